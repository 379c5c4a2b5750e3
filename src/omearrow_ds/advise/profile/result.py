"""`Profile`: what was measured of a collection and the settings at hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from omearrow_ds.advise.profile import text
from omearrow_ds.advise.profile.breakdown import Breakdown
from omearrow_ds.advise.profile.trials import Trial
from omearrow_ds.advise.profile.verdict import Verdict


@dataclass(frozen=True)
class Profile:
    """Where the time of an epoch goes.

    Attributes
    ----------
    path, format, images, sample_shape, dtypes
        What was profiled; ``sample_shape`` is None where samples differ.
    decoded_bytes, available_bytes
        Bytes of all decoded pixels, and of the memory that was free.
    preloaded, batch_size, num_workers, num_workers_why, device, model, optimizer
        The settings at hand.
    open_s, first_batch_s, preload_s
        What is paid once: opening without pixels; from there to the first batch, with the start of workers; decoding
        all pixels, None if it was not done.
    samples_per_s
        Median rate of the loop without clocks in it.
    noise, rounds
        How far its least and its greatest rate lie apart, over the median; and in how many turns it ran.
    breakdown
        The stages of the loop with clocks in it.
    verdict
        What it is bound by.
    trials
        Other settings that were tried.
    preloading
        The ways to hold the pixels, that at hand among them: what each takes, and when it has paid.
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
        """Seconds of an epoch without clocks in it."""
        return self.images / self.samples_per_s

    def as_text(self) -> str:
        """Return it for people, in lines of at most 120 characters."""
        return text.as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return it for machines, in what JSON knows; ``stages``, ``trials`` and ``preloading`` are flat rows."""
        found = asdict(self)
        breakdown = found.pop("breakdown")
        stages = breakdown.pop("stages")
        workers = [each._asdict() for each in self.breakdown.workers]
        plain: dict[str, Any] = _plain(
            {**found, "epoch_s": self.epoch_s, **breakdown, "workers": workers, "stages": stages}
        )
        return plain

    def __str__(self) -> str:
        return self.as_text()


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tuples, and Python's numbers in place of others."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value
