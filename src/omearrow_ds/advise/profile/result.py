"""`Profile`: the measured epoch of a collection, its `Verdict`, and `Trial`: another setting and its measured rate."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from omearrow_ds.advise.profile.recorder import CLOCKS, COMPUTE, Breakdown, StageTime
from omearrow_ds.advise.turns import LEAST_TIE, WORTH_IT, Rounds, doubt_note, gains, mostly_agree, noise, too_noisy
from omearrow_ds.text import count, duration, size, table

ON_DEMAND = "on demand"
_wrapped = partial(textwrap.wrap, width=118)
_TRIAL_COLUMNS = ("tried", "samples/s", "gain", "in single rounds", "once", "")
_WAY_COLUMNS = ("pixels", "once", "epoch", "pays after", "takes")
_COMPUTE_BOUND = 0.15  # Maximum part of the time that faster data work could save.
_DATA_BOUND = 0.4
_AS_GOOD = 0.9
_CHEAPER = {
    "transform": "make the transform cheaper, or apply it to whole batches on the device",
    "read": "a faster disk, or a format that reads less",
    "read+decode": "a format that needs no decoding",
    "decode": "a format that needs no decoding",
    "normalize": "normalize=False, and scale on the device",
    "transfer": "normalize=False, and scale on the device: fewer bytes are copied",
}


@dataclass(frozen=True)
class Trial:
    """Settings that differ from the current ones, and the measurement of a loop with these settings."""

    name: str
    options: str = ""  # Flags of the command.
    code: str = ""  # Python code of the settings.
    advice: str = ""  # The settings as a sentence.
    setup_s: float | None = None  # One-time work, such as decoding or converting; None if not measured.
    samples_per_s: float | None = None  # Median rate over the rounds; None if not measured.
    gain: float | None = None  # That rate divided by the rate of the current settings.
    least_gain: float | None = None  # Minimum of single rounds.
    most_gain: float | None = None  # Maximum of single rounds.
    epoch_s: float | None = None
    break_even_epochs: int | None = None  # Epochs that pay the setup, compared with access on demand; None if never.
    clear: bool = True  # Whether the rounds agree that it is faster, or not faster, than access on demand.
    held_bytes: int = 0  # Bytes of `room` that it uses.
    room: str = ""  # "memory" or "disk".
    note: str = ""  # Why it was not measured, or only on a part of the images.

    @property
    def worth_it(self) -> bool:
        """Whether this trial was at least 10 % faster than the current settings, and faster in every round."""
        return self.gain is not None and self.gain >= WORTH_IT and (self.least_gain or 0.0) > 1.0

    def measured(self, rates: Mapping[str, Rounds], now: str, images: int) -> Trial:
        """Return a copy with results computed from the rates of all trials; ``now`` has the current settings."""
        own, demand = rates.get(self.name), rates.get(ON_DEMAND)
        if own is None:
            return self
        rate, ratios = median(own.values()), gains(own, rates[now])
        gain, least, most = rate / median(rates[now].values()), min(ratios), max(ratios)
        trial = replace(self, samples_per_s=rate, gain=gain, least_gain=least, most_gain=most, epoch_s=images / rate)
        if demand is None or self.setup_s is None:
            return trial
        others, demand_rate = gains(own, demand), median(demand.values())
        epochs = break_even_epochs(self.setup_s, images / demand_rate, rate / demand_rate, min(others))
        # The rounds agree on a speedup, or on its absence.
        clear = mostly_agree(ratio > 1.0 for ratio in others) or mostly_agree(ratio < LEAST_TIE for ratio in others)
        return replace(trial, break_even_epochs=epochs, clear=clear)


def break_even_epochs(setup_s: float, epoch_s: float, gain: float, least_gain: float) -> int | None:
    """Return the number of epochs after which the setup has paid off; None if epochs are not clearly faster.

    ``epoch_s`` is the time of an epoch without the setup, and ``gain`` the speedup with it.
    """
    if gain < LEAST_TIE or least_gain <= 1.0:
        return None
    return max(1, -int(-setup_s // (epoch_s * (1 - 1 / gain))))


@dataclass(frozen=True)
class Verdict:
    """Bottleneck of the loop."""

    kind: str  # "data-bound", "compute-bound" or "balanced".
    bound: str  # Largest stage other than model and optimizer, for example "transform".
    headroom: float | None  # Speedup with one batch in memory, the limit for faster data work; None without a model.
    least_headroom: float | None  # Minimum of single rounds.
    most_headroom: float | None  # Maximum of single rounds.
    sure: bool  # Whether the rounds agree on the kind, and the machine was quiet.
    text: str  # The verdict as sentences.
    first: str | None  # Name of the trial to try first; None if no trial was clearly faster.
    advice: str  # Recommendation as sentences.


@dataclass(frozen=True)
class Profile:
    """Result of `profile_dataset`: time per stage of an epoch, and settings to change.

    Attributes
    ----------
    path, format, images, sample_shape, dtypes
        The collection. ``sample_shape``: None if samples differ.
    decoded_bytes, available_bytes
        Bytes of all decoded pixels, and of available memory.
    preloaded, batch_size, num_workers, num_workers_why, device, model, optimizer
        Settings of the measured loop.
    open_s, first_batch_s, preload_s
        One-time costs: opening without pixels; from there to the first batch, including the start of workers; decoding
        all pixels, or None if that was not done.
    samples_per_s
        Median rate of the loop without clocks.
    noise, rounds
        Relative difference between the median and the best round (0.1 is 10 %), and the number of rounds.
    breakdown
        Stages of the loop with clocks.
    verdict
        The limit of the loop: data or model.
    trials
        Other settings that were tried.
    preloading
        Ways to hold the pixels, including the measured one: cost and number of epochs until they pay.

    Examples
    --------
    >>> from omearrow_ds import profile_dataset
    >>> profile = profile_dataset("plate.arrow", batch_size=4, num_workers=0, epochs=1, trials=False)
    >>> profile.preloaded, profile.samples_per_s > 0
    (False, True)
    """

    path: str
    format: str
    images: int
    sample_shape: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    decoded_bytes: int
    available_bytes: int
    preloaded: bool
    batch_size: int
    num_workers: int
    num_workers_why: str
    device: str
    model: str | None
    optimizer: str | None
    open_s: float
    first_batch_s: float
    preload_s: float | None
    samples_per_s: float
    noise: float
    rounds: int
    breakdown: Breakdown
    verdict: Verdict
    trials: tuple[Trial, ...]
    preloading: tuple[Trial, ...]

    @property
    def epoch_s(self) -> float:
        """Duration of one epoch in seconds, measured without timing the stages."""
        return self.images / self.samples_per_s

    def as_text(self) -> str:
        """Return the profile as a text report."""
        shape = "of several shapes" if self.sample_shape is None else f"of {' x '.join(map(str, self.sample_shape))}"
        preload = "" if self.preload_s is None else f"preload {duration(self.preload_s)}, "
        once = f"open {duration(self.open_s)}, {preload}first batch {duration(self.first_batch_s)}"
        speed = f"{self.samples_per_s:,.4g}"
        rate = f"{speed} samples/s ({self.rounds} rounds, half of them within {self.noise:.0%})"
        access, model = "preloaded" if self.preloaded else "on demand", f", {self.model}" if self.model else ""
        lines = [
            self.path,
            f"{count(self.images, 'sample')} {shape}, {', '.join(self.dtypes)}, {self.format}, {access}",
            f"batch {self.batch_size}, {count(self.num_workers, 'worker')}, {self.device}{model}",
            f"{rate}, {duration(self.epoch_s)} per epoch; once: {once}",
            "",
            *_stages(self.breakdown),
            "",
            *_wrapped(self.verdict.text),
            *_wrapped(f"Try first: {self.verdict.advice}"),
        ]
        if self.trials:
            now, needed, free = ("(as now)", speed, "1.00x"), size(self.decoded_bytes), size(self.available_bytes)
            lines += ["", *table([_TRIAL_COLUMNS, (*now, "", "", ""), *map(_trial_row, self.trials)]), ""]
            lines += [f"Preloading needs {needed} of memory; {free} are free.", ""]
            lines += table([_WAY_COLUMNS, *map(_way_row, self.preloading)])
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all values as a dictionary that `json.dumps` accepts."""
        values = asdict(self)
        values |= {"epoch_s": self.epoch_s, **values.pop("breakdown")}
        # Lists instead of tuples, and Python numbers instead of NumPy scalars.
        plain: dict[str, Any] = json.loads(json.dumps(values, default=lambda scalar: scalar.item()))
        return plain

    def __str__(self) -> str:
        return self.as_text()


def _stages(breakdown: Breakdown) -> list[str]:
    workers = breakdown.workers
    rows = [["stage", "total", "share", "per sample", "at most", "in workers", ""]]
    for row in breakdown.stages:
        if row.calls or row.total_s > 0.0:
            times = [duration(row.total_s), f"{row.share:.1%}", duration(row.per_sample_s)]
            ceiling = "" if row.ceiling is None else f"{row.ceiling:.2f}x"
            rows.append([row.stage, *times, ceiling, duration(row.worker_s) if row.worker_s else "", row.note])
    total_s, busy_s = (sum(row.total_s for row in breakdown.stages), sum(worker.busy_s for worker in workers))
    rows.append(["sum", duration(total_s), "100 %", "", "", duration(busy_s), ""])
    about = f"{breakdown.samples:,} samples in {duration(breakdown.wall_s)}, while stages were timed."
    if workers:
        about += f" The main process waited {duration(breakdown.wait_s)} for {len(workers)} workers."
        about += " This wait is divided among the stages in proportion to the time of the workers."
    else:
        rows = [[*row[:5], row[-1]] for row in rows]
    remarks = [line for remark in breakdown.remarks for line in _wrapped(remark)]
    return [*_wrapped(about), "", *table(rows), *([""] if remarks else []), *remarks]


def _trial_row(trial: Trial) -> list[str]:
    if trial.samples_per_s is None:
        return [trial.name, trial.note]
    gains = f"{trial.gain:.2f}x", f"{trial.least_gain:.2f}x to {trial.most_gain:.2f}x"
    once = "" if trial.setup_s is None else duration(trial.setup_s)
    return [trial.name, f"{trial.samples_per_s:,.4g}", *gains, once, trial.note or trial.options]


def _way_row(way: Trial) -> list[str]:
    if way.epoch_s is None:
        return [way.name, way.note]
    pays = "" if way.name == ON_DEMAND else "never" if way.clear else "not clear"
    if pays and way.break_even_epochs is not None:
        pays = count(way.break_even_epochs, "epoch")
    once = "-" if way.setup_s is None else duration(way.setup_s)
    return [way.name, once, duration(way.epoch_s), pays, f"{size(way.held_bytes)} of {way.room}" if way.room else ""]


def judge(
    breakdown: Breakdown, rates: Rounds, cached: Rounds | None, trials: Sequence[Trial], *, tried: bool
) -> Verdict:
    """Return the bottleneck of the loop; ``cached`` are the rates of steps on one batch, None without a model.

    ``tried`` is whether trials were requested.
    """
    headroom = None if cached is None else median(cached.values()) / median(rates.values())
    ratios = [] if cached is None else gains(cached, rates)
    kind, doubt, why = _kind(headroom), "", "Without a model, all work is data work."
    of_data = (row for row in breakdown.stages if row.stage not in (*COMPUTE, CLOCKS))
    largest = max(of_data, key=lambda row: row.total_s)
    if headroom is not None:
        doubt = _doubt(kind, ratios, noise(1 / rate for rate in rates.values()))
        why = (
            f"The same loop is {max(1.0, headroom):.2f}x as fast with one batch in memory, which faster data cannot "
            f"exceed. {len(ratios)} rounds gave {min(ratios):.2f}x to {max(ratios):.2f}x{'; ' * bool(doubt)}{doubt}."
        )
    text = f"{kind.capitalize()}: the largest data stage, {largest.stage}, takes {largest.share:.0%} of the time. {why}"
    worth = {trial: trial.gain or 0.0 for trial in trials if trial.worth_it}
    good = _AS_GOOD * max(worth.values(), default=0.0)
    best = next((trial for trial, gain in worth.items() if gain >= good), None)  # Ordered by costs other than time.
    extremes, advice = (min(ratios, default=None), max(ratios, default=None)), _advice(kind, largest, best, tried=tried)
    return Verdict(kind, largest.stage, headroom, *extremes, not doubt, text, best.name if best else None, advice)


def _kind(headroom: float | None) -> str:
    data_share = 1.0 if headroom is None else 1 - 1 / headroom
    if data_share < _COMPUTE_BOUND:
        return "compute-bound"
    return "balanced" if data_share < _DATA_BOUND else "data-bound"


def _doubt(kind: str, ratios: Sequence[float], noise: float) -> str:
    """Return why the kind of bottleneck is uncertain, or an empty string if it is certain."""
    others = [other for other in map(_kind, ratios) if other != kind]
    if mostly_agree(_kind(ratio) == kind for ratio in ratios):
        return doubt_note(len(ratios), noise)
    return too_noisy(f"{len(others)} rounds indicate {' or '.join(sorted(set(others)))}")


def _advice(kind: str, largest: StageTime, best: Trial | None, *, tried: bool) -> str:
    measured = "No other setting was clearly faster." if tried else "No other setting was tried."
    if best is not None:
        turns = f"in single rounds {best.least_gain:.2f}x to {best.most_gain:.2f}x"
        measured = f"{best.advice}: {best.options} was {best.gain:.2f}x as fast ({turns})."
    if kind == "compute-bound":
        measured = "Keep the data settings." if best is None else measured
        return f"{measured} Beyond that, a smaller model, a faster device or mixed precision can save time."
    cheaper = _CHEAPER.get(largest.stage)
    if cheaper is None or largest.ceiling is None:
        return measured
    next_step = "Then" if best else "Remaining option" if tried else "According to the stages"
    return f"{measured} {next_step}: {cheaper} (at most {largest.ceiling:.2f}x, see the table)."
