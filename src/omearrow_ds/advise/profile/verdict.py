"""`Verdict`: the bottleneck of the loop, and the setting to try first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from omearrow_ds.advise.profile.breakdown import Breakdown, StageTime
from omearrow_ds.advise.profile.stages import DATA, Stage
from omearrow_ds.advise.profile.trials import Trial
from omearrow_ds.advise.turns import LEAST_TIE, mostly_agree, uncertainty_note

_COMPUTE_BOUND = 0.15  # Maximum part of the time that faster data work could save.
_DATA_BOUND = 0.4
_AS_GOOD = 0.9

_CHEAPER = MappingProxyType(
    {
        Stage.TRANSFORM.label: "make the transform cheaper, or apply it to whole batches on the device",
        Stage.READ.label: "a faster disk, or a format that reads less",
        Stage.READ_DECODE.label: "a format that needs no decoding",
        Stage.DECODE.label: "a format that needs no decoding",
        Stage.NORMALIZE.label: "normalize=False, and scale on the device",
        Stage.TRANSFER.label: "normalize=False, and scale on the device: fewer bytes are copied",
    }
)


class Headroom(NamedTuple):
    """Speedup if the loop repeats one batch in memory instead of loading batches: by medians, and per round."""

    ratio: float
    turns: Sequence[float]


@dataclass(frozen=True)
class Verdict:
    """Bottleneck of the loop.

    Attributes
    ----------
    kind
        ``"data-bound"``, ``"compute-bound"`` or ``"balanced"``.
    bound
        Largest stage other than model and optimizer, for example ``"transform"``.
    headroom, least_headroom, most_headroom
        Speedup of the loop on one batch that is already loaded, which is the limit for faster data work: of medians,
        and minimum and maximum of single rounds. None without a model, as all work is data work then.
    sure
        Whether the rounds agree on the ``kind``, and the machine was quiet.
    text
        The verdict as sentences.
    first
        Name of the trial to try first, or None if no trial was clearly faster.
    advice
        Recommendation as sentences.
    """

    kind: str
    bound: str
    headroom: float | None
    least_headroom: float | None
    most_headroom: float | None
    sure: bool
    text: str
    first: str | None
    advice: str


def judge(
    breakdown: Breakdown, headroom: Headroom | None, trials: Sequence[Trial], *, tried: bool, noise: float = 0.0
) -> Verdict:
    """Return the bottleneck of the loop, the certainty of this result, and the setting to try first.

    ``headroom`` has the value None without a model, ``tried`` is whether trials were requested, and ``noise`` is the
    noise of the rounds of the loop.
    """
    ratio, least, most = (None,) * 3 if headroom is None else (headroom.ratio, min(headroom.turns), max(headroom.turns))
    kind = _kind(ratio)
    names = [stage.label for stage in (*DATA, Stage.OTHER)]
    largest = max((breakdown[name] for name in names), key=lambda stage: stage.total_s)
    worth = [trial for trial in trials if trial.worth_it]
    good = _AS_GOOD * max((trial.gain or 0.0 for trial in worth), default=0.0)
    best = next((trial for trial in worth if (trial.gain or 0.0) >= good), None)  # Ordered by costs other than time.
    sure, turns = (True, "") if headroom is None else _sure(kind, headroom, noise)
    text = " ".join(filter(None, [_text(kind, largest, headroom), turns]))
    first, advice = None if best is None else best.name, _advice(kind, largest, best, tried=tried)
    return Verdict(kind, largest.stage, ratio, least, most, sure, text, first, advice)


def _kind(headroom: float | None) -> str:
    data_share = 1.0 if headroom is None else 1 - 1 / headroom
    if data_share < _COMPUTE_BOUND:
        return "compute-bound"
    return "balanced" if data_share < _DATA_BOUND else "data-bound"


def _text(kind: str, largest: StageTime, headroom: Headroom | None) -> str:
    bound = largest.stage
    most = f"{bound} takes {largest.share:.0%} of the time"
    if headroom is None:
        return f"{bound}-bound: {most}. Without a model everything is data work."
    gain = f"On a batch that is there already the same loop is {headroom.ratio:.2f}x as fast; no data work can win more"
    if headroom.ratio < LEAST_TIE:
        gain = "On a batch that is there already the same loop is no faster, so no data work can win anything"
    if kind == "compute-bound":
        return f"Compute-bound: the model takes the time. {gain}."
    if kind == "balanced":
        return f"Balanced: data and model both take their part, and of the data {most}. {gain}."
    return f"Data-bound, and there {bound}-bound: {most}. {gain}."


def _sure(kind: str, headroom: Headroom, noise: float) -> tuple[bool, str]:
    """Return whether the rounds agree on the kind, and a sentence about their range."""
    kinds, count = [_kind(ratio) for ratio in headroom.turns], len(headroom.turns)
    between = f"{count} turns gave {min(headroom.turns):.2f}x to {max(headroom.turns):.2f}x"
    if not mostly_agree(ratio == kind for ratio in kinds):
        others = [ratio for ratio in kinds if ratio != kind]
        words = f"Not sure: the {between}, and by {len(others)} of them it is {' or '.join(sorted(set(others)))}. "
        return False, f"{words}Let it run for longer, or where nothing else runs."
    why = uncertainty_note(count, noise)
    return not why, f"All {between}{f'; {why}' if why else ''}."


def _advice(kind: str, largest: StageTime, best: Trial | None, *, tried: bool) -> str:
    if kind == "compute-bound":
        rest = "a smaller model, a faster device or mixed precision is where time can be won"
        if best is None:
            return f"Leave the data alone; {rest}."
        return f"{best.advice}: {_measured(best)}. Beyond that, {rest}."
    cheaper, ceiling = _CHEAPER.get(largest.stage), largest.ceiling
    hint = f"{cheaper} (at most {ceiling:.2f}x, by the table)" if cheaper and ceiling is not None else ""
    if best is not None:
        then = f" Then: {hint}." if hint else ""
        return f"{best.advice}: {_measured(best)}.{then}"
    if not tried:
        return f"Nothing was tried.{f' By the stages: {hint}.' if hint else ''}"
    return f"Nothing that was tried was clearly faster.{f' What is left: {hint}.' if hint else ''}"


def _measured(best: Trial) -> str:
    turns = f"in single turns {best.least_gain:.2f}x to {best.most_gain:.2f}x"
    return f"{best.options} was {best.gain:.2f}x as fast ({turns})"
