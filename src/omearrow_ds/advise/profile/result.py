"""`Profile`: the measured epoch of a collection with the current settings."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from omearrow_ds.advise.profile.breakdown import Breakdown
from omearrow_ds.advise.profile.trials import ON_DEMAND, Trial
from omearrow_ds.advise.profile.verdict import Verdict
from omearrow_ds.text import count, duration, size, table

_WIDTH = 118
_WAY_COLUMNS = ("pixels", "once", "epoch", "pays after", "takes")


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
        verdict = [*_wrapped(self.verdict.text), *_wrapped(f"Try first: {self.verdict.advice}")]
        parts = [_head(self), _stages(self.breakdown), verdict]
        if self.trials:
            needed, free = size(self.decoded_bytes), size(self.available_bytes)
            question = f"Does preloading pay? {needed} decoded; {free} of memory are free."
            parts += [_trials(self), [question, "", *table([_WAY_COLUMNS, *map(_way_row, self.preloading)])]]
        return "\n\n".join("\n".join(lines) for lines in parts)

    def as_dict(self) -> dict[str, Any]:
        """Return all values as a dictionary that `json.dumps` accepts."""
        values = asdict(self)
        values |= {"epoch_s": self.epoch_s, **values.pop("breakdown")}
        # Lists instead of tuples, and Python numbers instead of NumPy scalars.
        plain: dict[str, Any] = json.loads(json.dumps(values, default=lambda scalar: scalar.item()))
        return plain

    def __str__(self) -> str:
        return self.as_text()


def _head(profile: Profile) -> list[str]:
    shape = "of several shapes" if profile.sample_shape is None else f"of {' x '.join(map(str, profile.sample_shape))}"
    access = "preloaded" if profile.preloaded else "on demand"
    model = f", {profile.model}" if profile.model else ""
    preload = "" if profile.preload_s is None else f"preload {duration(profile.preload_s)}, "
    once = f"open {duration(profile.open_s)}, {preload}first batch {duration(profile.first_batch_s)}"
    rate = f"{profile.samples_per_s:,.4g} samples/s ({profile.rounds} turns, half of them within {profile.noise:.0%})"
    return [
        profile.path,
        f"{count(profile.images, 'sample')} {shape}, {', '.join(profile.dtypes)}, {profile.format}, {access}",
        f"batch {profile.batch_size}, {count(profile.num_workers, 'worker')}, {profile.device}{model}",
        f"{rate}, an epoch {duration(profile.epoch_s)}; once: {once}",
    ]


def _stages(breakdown: Breakdown) -> list[str]:
    workers = breakdown.workers
    rows = [["stage", "total", "share", "per sample", "at most", "in workers", ""]]
    for row in breakdown.stages:
        if row.calls or row.total_s > 0.0:
            times = [duration(row.total_s), f"{row.share:.1%}", duration(row.per_sample_s)]
            ceiling = "" if row.ceiling is None else f"{row.ceiling:.2f}x"
            rows.append([row.stage, *times, ceiling, duration(row.worker_s) if row.worker_s else "", row.note])
    busy_s, total_s = (sum(worker.busy_s for worker in workers), sum(row.total_s for row in breakdown.stages))
    rows.append(["sum", duration(total_s), "100 %", "", "", duration(busy_s), ""])
    about = f"{breakdown.samples:,} samples in {duration(breakdown.wall_s)}, with clocks in it."
    if workers:
        about += (
            f" The program waited {duration(breakdown.wait_s)} of that for {len(workers)} workers, divided among the "
            f"stages by the seconds that the workers counted."
        )
    else:
        rows = [[*row[:5], row[-1]] for row in rows]
    remarks = [line for remark in breakdown.remarks for line in _wrapped(remark)]
    return [*_wrapped(about), "", *table(rows), *([""] if remarks else []), *remarks]


def _trials(profile: Profile) -> list[str]:
    rows = [["tried", "samples/s", "gain", "in single turns", "once", ""]]
    rows.append(["(as now)", f"{profile.samples_per_s:,.4g}", "1.00x", "", "", ""])
    for trial in profile.trials:
        if trial.samples_per_s is None:
            rows.append([trial.name, trial.note])
            continue
        gains = f"{trial.gain:.2f}x", f"{trial.least_gain:.2f}x to {trial.most_gain:.2f}x"
        once = "" if trial.setup_s is None else duration(trial.setup_s)
        rows.append([trial.name, f"{trial.samples_per_s:,.4g}", *gains, once, trial.note or trial.options])
    return table(rows)


def _way_row(way: Trial) -> list[str]:
    """Return a line about a way to hold the pixels."""
    if way.epoch_s is None:
        return [way.name, way.note]
    pays = "never" if way.clear else "not clear"
    if way.break_even_epochs is not None:
        pays = count(way.break_even_epochs, "epoch")
    once = "-" if way.setup_s is None else duration(way.setup_s)
    takes = f"{size(way.held_bytes)} of {way.room}" if way.room else ""
    return [way.name, once, duration(way.epoch_s), "" if way.name == ON_DEMAND else pays, takes]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH)
