"""`Profile`: the measured epoch of a collection with the current settings."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from omearrow_ds.advise.profile.breakdown import CLOCKS, Breakdown
from omearrow_ds.advise.profile.trials import Trial
from omearrow_ds.advise.profile.verdict import Verdict
from omearrow_ds.text import count, duration, size, table

_WIDTH = 118


@dataclass(frozen=True)
class Profile:
    """Time of an epoch by stage, returned by `profile_dataset`.

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
        """Seconds of an epoch, from the run without clocks."""
        return self.images / self.samples_per_s

    def as_text(self) -> str:
        """Return the report in lines of at most 120 characters."""
        return _as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON; ``stages``, ``trials`` and ``preloading`` are flat rows."""
        values = asdict(self)
        breakdown = values.pop("breakdown")
        stages = breakdown.pop("stages")
        workers = [worker._asdict() for worker in self.breakdown.workers]
        plain: dict[str, Any] = _plain(
            {**values, "epoch_s": self.epoch_s, **breakdown, "workers": workers, "stages": stages}
        )
        return plain

    def __str__(self) -> str:
        return self.as_text()


def _plain(value: Any) -> Any:
    """Return a value with lists instead of tuples, and Python numbers instead of NumPy scalars."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def _as_text(profile: Profile) -> str:
    parts = [_head(profile), _stages(profile), _verdict(profile)]
    if profile.trials:
        parts += [_trials(profile), _preloading(profile)]
    return "\n\n".join(parts)


def _head(profile: Profile) -> str:
    shape = "of several shapes" if profile.sample_shape is None else f"of {' x '.join(map(str, profile.sample_shape))}"
    access = "preloaded" if profile.preloaded else "on demand"
    model = f", {profile.model}" if profile.model else ""
    once = [f"open {duration(profile.open_s)}", f"first batch {duration(profile.first_batch_s)}"]
    rate = f"{profile.samples_per_s:,.4g} samples/s ({profile.rounds} turns, half of them within {profile.noise:.0%})"
    if profile.preload_s is not None:
        once.insert(1, f"preload {duration(profile.preload_s)}")
    return "\n".join(
        [
            f"{profile.path}",
            f"{count(profile.images, 'sample')} {shape}, {', '.join(profile.dtypes)}, {profile.format}, {access}",
            f"batch {profile.batch_size}, {count(profile.num_workers, 'worker')}, {profile.device}{model}",
            f"{rate}, an epoch {duration(profile.epoch_s)}; once: {', '.join(once)}",
        ]
    )


def _stages(profile: Profile) -> str:
    breakdown, workers = profile.breakdown, profile.breakdown.workers
    rows = [["stage", "total", "share", "per sample", "at most", "in workers", ""]]
    for stage in breakdown.stages:
        if stage.calls or stage.total_s > 0.0:
            total = [duration(stage.total_s), f"{stage.share:.1%}", duration(stage.per_sample_s)]
            ceiling = "" if stage.ceiling is None or stage.stage == CLOCKS else f"{stage.ceiling:.2f}x"
            rows.append([stage.stage, *total, ceiling, duration(stage.worker_s) if stage.worker_s else "", stage.note])
    busy_s, total_s = (sum(worker.busy_s for worker in workers), sum(stage.total_s for stage in breakdown.stages))
    rows.append(["sum", duration(total_s), "100 %", "", "", duration(busy_s), ""])
    about = f"{breakdown.samples:,} samples in {duration(breakdown.wall_s)}, with clocks in it."
    if workers:
        about += (
            f" Of that the program waited {duration(breakdown.wait_s)} for {len(workers)} workers, shared out among "
            f"the stages as the workers' own clocks counted their seconds."
        )
    else:
        rows = [[*row[:5], row[-1]] for row in rows]
    remarks = [line for remark in breakdown.remarks for line in _wrapped(remark)]
    return "\n".join([*_wrapped(about), "", *table(rows), *([""] if remarks else []), *remarks])


def _verdict(profile: Profile) -> str:
    return "\n".join([*_wrapped(profile.verdict.text), *_wrapped(f"Try first: {profile.verdict.advice}")])


def _trials(profile: Profile) -> str:
    rows = [["tried", "samples/s", "gain", "in single turns", "once", ""]]
    rows.append(["(as now)", f"{profile.samples_per_s:,.4g}", "1.00x", "", "", ""])
    for trial in profile.trials:
        if trial.samples_per_s is None:
            rows.append([trial.name, trial.note])
            continue
        cells = [f"{trial.samples_per_s:,.4g}", f"{trial.gain:.2f}x"]
        cells += [f"{trial.least_gain:.2f}x to {trial.most_gain:.2f}x"]
        cells += ["" if trial.setup_s is None else duration(trial.setup_s)]
        rows.append([trial.name, *cells, trial.note or trial.options])
    return "\n".join(table(rows))


def _preloading(profile: Profile) -> str:
    rows = [["pixels", "once", "epoch", "pays after", "takes"]]
    for way in profile.preloading:
        if way.epoch_s is None:
            rows.append([way.name, way.note])
            continue
        once = "-" if way.setup_s is None else duration(way.setup_s)
        rows.append([way.name, once, duration(way.epoch_s), _break_even_text(way), _memory_text(way)])
    needed, free = size(profile.decoded_bytes), size(profile.available_bytes)
    return "\n".join([f"Does preloading pay? {needed} decoded; {free} of memory are free.", "", *table(rows)])


def _break_even_text(way: Trial) -> str:
    if way.name == "on demand":
        return ""
    if way.break_even_epochs is None:
        return "never" if way.clear else "not clear"
    return count(way.break_even_epochs, "epoch")


def _memory_text(way: Trial) -> str:
    return f"{size(way.held_bytes)} of {way.room}" if way.room else ""


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH)
