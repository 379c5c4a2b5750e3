"""Paired measurement of this package and a reference: rounds of both alternate, the reference first.

pytest-benchmark times only rounds of this package. Seconds per unit (image, batch or collection) are compared: by the
ratio of the best rounds, and by the median ratio of all pairs of rounds.
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
    """Side of a comparison: the timed function and an endless iterator of its arguments.

    Attributes
    ----------
    units
        Images, batches or collections per call.
    once
        Call it once per round, so the time does not include freeing the result of an earlier call.
    """

    act: Callable[[Any], object]
    arguments: Iterator[Any]
    units: int = 1
    once: bool = False


class Preloaded:
    """Preloaded dataset that normalizes, and a second copy of its pixels as an array (N, ...) of the stored dtype."""

    def __init__(self, dataset: OMEArrowDataset, source: ImageSource, image_shape: str) -> None:
        assert dataset.shape is not None
        self.dataset = dataset
        self.image_shape = image_shape
        self.pixels = np.stack(source.take(range(len(source)))).reshape(len(source), *dataset.shape)
        self.divisor = divisor_of(self.pixels.dtype)


class Compare(NamedTuple):
    """Measures both sides of a benchmark; value of the fixture ``compare``."""

    benchmark: BenchmarkFixture
    profile: Profile

    def __call__(self, ours: Side, reference: Side, image_shape: str, case: str = "", **said: Any) -> None:
        """Measure both sides alternately after two warm-up calls each, and record the ratio and the target.

        ``image_shape`` and ``case`` select the target, see `judged`. ``said`` is added to the record.
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
                # pytest-benchmark divides the time of a round by this, but refuses iterations together with a setup.
                benchmark.stats.iterations = counts[1] * ours.units
            return (ours.act, list(islice(ours.arguments, counts[1]))), {}

        benchmark.pedantic(_repeat, setup=measure_reference, rounds=profile.pair.rounds(sum(seconds)))
        note(benchmark, reference_s, image_shape, case)


def note(benchmark: BenchmarkFixture, reference_s: Sequence[float], image_shape: str, case: str = "") -> None:
    """Record the ratio of a benchmark to its reference, unless benchmarks are disabled."""
    if benchmark.stats is not None:
        operation, ours_s = benchmark.extra_info["operation"], benchmark.stats.stats.data
        benchmark.extra_info.update(judged(operation, ours_s, reference_s, image_shape, case), reference_s=reference_s)


def random_indices(count: int, seed: int) -> tuple[Iterator[int], Iterator[int]]:
    """Return two endless iterators over one random order; the second starts in its middle.

    So neither side reads images that the other side just brought into the processor's cache.
    """
    order = np.random.default_rng(seed).permutation(count).tolist()
    half = count // 2
    return cycle(order), cycle(order[half:] + order[:half])


def divisor_of(dtype: np.dtype[Any]) -> np.float32:
    """Return the divisor that normalizes pixels of a dtype."""
    return np.float32(np.iinfo(dtype).max if dtype.kind in "iu" else 1)


def drain(loader: Iterable[Any]) -> None:
    """Iterate over an epoch, and drop each batch."""
    for _ in loader:
        pass


def stop_workers(batches: Iterator[Any]) -> None:
    """Stop the workers now instead of on garbage collection, so they do not disturb the next benchmark."""
    getattr(batches, "_shutdown_workers", int)()  # Torch lacks a public method. Without workers, this is a no-op.


def batched(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of ``size`` items endlessly."""
    while True:
        yield list(islice(items, size))


def _repeat(act: Callable[[Any], object], arguments: Sequence[Any]) -> object:
    result = None
    for argument in arguments:
        result = act(argument)
    return result  # The caller frees it outside the timed section.


def _calls(side: Side, profile: Profile) -> tuple[int, float]:
    """Return the number of calls per round that the timer needs, and the estimated seconds of a round."""
    side.act(next(side.arguments))
    once_s = trial_s(lambda: side.act(next(side.arguments)))
    count = 1 if side.once else profile.calls_of_round(once_s)
    return count, count * once_s
