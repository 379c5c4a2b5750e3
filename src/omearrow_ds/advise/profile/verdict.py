"""`Verdict`: the bottleneck of the loop, and the setting to try first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from omearrow_ds.advise.profile.breakdown import CLOCKS, Breakdown, StageTime
from omearrow_ds.advise.profile.recorder import COMPUTE
from omearrow_ds.advise.profile.trials import Trial
from omearrow_ds.advise.turns import Rounds, gains, median_ratio, mostly_agree, noise, too_noisy, uncertainty_note

_COMPUTE_BOUND = 0.15  # Maximum part of the time that faster data work could save.
_DATA_BOUND = 0.4
_AS_GOOD = 0.9
_CHEAPER = MappingProxyType(
    {
        "transform": "make the transform cheaper, or apply it to whole batches on the device",
        "read": "a faster disk, or a format that reads less",
        "read+decode": "a format that needs no decoding",
        "decode": "a format that needs no decoding",
        "normalize": "normalize=False, and scale on the device",
        "transfer": "normalize=False, and scale on the device: fewer bytes are copied",
    }
)


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
    breakdown: Breakdown, rates: Rounds, cached: Rounds | None, trials: Sequence[Trial], *, tried: bool
) -> Verdict:
    """Return the bottleneck of the loop, the certainty of this result, and the setting to try first.

    ``rates`` are those of the loop, and ``cached`` those of steps that repeat one batch, None without a model.
    ``tried`` is whether trials were requested.
    """
    headroom = None if cached is None else median_ratio(cached, rates)
    ratios = [] if cached is None else gains(cached, rates)
    kind = _kind(headroom)
    data_stages = [row for row in breakdown.stages if row.stage not in (*COMPUTE, CLOCKS)]
    largest = max(data_stages, key=lambda row: row.total_s)
    text = f"{kind.capitalize()}: the largest data stage, {largest.stage}, takes {largest.share:.0%} of the time."
    doubt = ""
    if headroom is None:
        text += " Without a model everything is data work."
    else:
        doubt = _doubt(kind, ratios, noise(1 / rate for rate in rates.values()))
        text += (
            f" On a batch that is in memory the same loop is {max(1.0, headroom):.2f}x as fast; no data work can win "
            f"more. {len(ratios)} turns gave {min(ratios):.2f}x to {max(ratios):.2f}x{'; ' * bool(doubt)}{doubt}."
        )
    worth = [trial for trial in trials if trial.worth_it]
    good = _AS_GOOD * max((trial.gain or 0.0 for trial in worth), default=0.0)
    best = next((trial for trial in worth if (trial.gain or 0.0) >= good), None)  # Ordered by costs other than time.
    return Verdict(
        kind=kind,
        bound=largest.stage,
        headroom=headroom,
        least_headroom=min(ratios, default=None),
        most_headroom=max(ratios, default=None),
        sure=not doubt,
        text=text,
        first=None if best is None else best.name,
        advice=_advice(kind, largest, best, tried=tried),
    )


def _kind(headroom: float | None) -> str:
    data_share = 1.0 if headroom is None else 1 - 1 / headroom
    if data_share < _COMPUTE_BOUND:
        return "compute-bound"
    return "balanced" if data_share < _DATA_BOUND else "data-bound"


def _doubt(kind: str, ratios: Sequence[float], noise: float) -> str:
    """Return why the rounds leave the kind uncertain, or an empty string."""
    others = [other for other in map(_kind, ratios) if other != kind]
    if mostly_agree(_kind(ratio) == kind for ratio in ratios):
        return uncertainty_note(len(ratios), noise)
    return too_noisy(f"by {len(others)} of them it is {' or '.join(sorted(set(others)))}")


def _advice(kind: str, largest: StageTime, best: Trial | None, *, tried: bool) -> str:
    measured = "Nothing that was tried was clearly faster." if tried else "Nothing was tried."
    if best is not None:
        turns = f"in single turns {best.least_gain:.2f}x to {best.most_gain:.2f}x"
        measured = f"{best.advice}: {best.options} was {best.gain:.2f}x as fast ({turns})."
    if kind == "compute-bound":
        measured = "Leave the data alone." if best is None else measured
        return f"{measured} Beyond that, a smaller model, a faster device or mixed precision can save time."
    cheaper = _CHEAPER.get(largest.stage)
    if cheaper is None or largest.ceiling is None:
        return measured
    next_step = "Then" if best else "Remaining option" if tried else "By the stages"
    return f"{measured} {next_step}: {cheaper} (at most {largest.ceiling:.2f}x, by the table)."
