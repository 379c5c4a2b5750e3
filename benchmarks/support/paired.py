"""Ours and a reference, measured in turns: a round of the reference, then a round of ours.

Only ours is inside pytest-benchmark's clock. What is compared is seconds a unit (an image, a batch, a collection): the
best of ours with the best of the reference, and the median of the ratios of each pair of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.report.ratios import judged
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import ImageSource, OMEArrowDataset


class Side(NamedTuple):
    """One of the two: what is timed, and what it is called with, without end.

    Attributes
    ----------
    units
        Images, batches or collections of one call.
    once
        Call it once a round, so that the clock holds no freeing of what an earlier call made.
    """

    act: Callable[[Any], object]
    arguments: Iterator[Any]
    units: int = 1
    once: bool = False


class Preloaded:
    """A preloaded data set that normalizes, and its pixels once more as one array (N, ...) of the stored dtype."""

    def __init__(self, dataset: OMEArrowDataset, source: ImageSource, image_shape: str) -> None:
        assert dataset.shape is not None
        self.dataset = dataset
        self.image_shape = image_shape
        self.pixels = np.stack(source.take(range(len(source)))).reshape(len(source), *dataset.shape)
        self.divisor = divisor_of(self.pixels.dtype)


class Compare(NamedTuple):
    """What measures both sides of a benchmark: the fixture ``compare``."""

    benchmark: BenchmarkFixture
    profile: Profile

    def __call__(self, ours: Side, reference: Side, image_shape: str, case: str = "", **said: Any) -> None:
        """Measure both in turns, each called twice before, so that all is open and warm; note ratio and target.

        Shape and case say which target, if there is one; see `judged`. What else is ``said`` stands beside them.
        """
        benchmark, profile = self
        benchmark.extra_info.update(said)
        counts, seconds = zip(*(_calls(side, profile) for side in (reference, ours)), strict=True)
        reference_s: list[float] = []

        def measure_reference() -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments = list(islice(reference.arguments, counts[0]))
            start = perf_counter()
            _repeat(reference.act, arguments)
            reference_s.append((perf_counter() - start) / (counts[0] * reference.units))
            if benchmark.stats is not None:
                # pytest-benchmark divides the time of a round by this, but takes no iterations beside a setup.
                benchmark.stats.iterations = counts[1] * ours.units
            return (ours.act, list(islice(ours.arguments, counts[1]))), {}

        benchmark.pedantic(_repeat, setup=measure_reference, rounds=profile.pair.rounds(sum(seconds)))
        note(benchmark, reference_s, image_shape, case)


def note(benchmark: BenchmarkFixture, reference_s: Sequence[float], image_shape: str, case: str = "") -> None:
    """Note the ratio of what was measured to a reference, unless benchmarks are disabled."""
    if benchmark.stats is not None:
        operation, ours_s = benchmark.extra_info["operation"], benchmark.stats.stats.data
        benchmark.extra_info.update(judged(operation, ours_s, reference_s, image_shape, case), reference_s=reference_s)


def random_indices(count: int, seed: int) -> tuple[Iterator[int], Iterator[int]]:
    """Return the same random order twice, each without end; the second is half of it ahead.

    What one side has just read is then not yet in the processor's cache for the other.
    """
    order = np.random.default_rng(seed).permutation(count).tolist()
    half = count // 2
    return cycle(order), cycle(order[half:] + order[:half])


def divisor_of(dtype: np.dtype[Any]) -> np.float32:
    """Return what normalizing divides pixels by."""
    return np.float32(np.iinfo(dtype).max if dtype.kind in "iu" else 1)


def drain(loader: Iterable[Any]) -> None:
    """Go through an epoch, keeping nothing."""
    for _ in loader:
        pass


def stop_workers(batches: Iterator[Any]) -> None:
    """End the workers now, not when the garbage collector comes by, lest they run into the next benchmark."""
    getattr(batches, "_shutdown_workers", int)()  # torch has no public way, and without workers there is none


def batched(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of ``size`` items, without end."""
    while True:
        yield list(islice(items, size))


def _repeat(act: Callable[[Any], object], arguments: Sequence[Any]) -> object:
    result = None
    for argument in arguments:
        result = act(argument)
    return result  # freed outside the clock


def _calls(side: Side, profile: Profile) -> tuple[int, float]:
    """Return the calls that a round takes to be long enough for the timer, and its seconds."""
    side.act(next(side.arguments))
    once_s = trial_s(lambda: side.act(next(side.arguments)))
    count = 1 if side.once else profile.calls_of_round(once_s)
    return count, count * once_s
