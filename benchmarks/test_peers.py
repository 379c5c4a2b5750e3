"""Comparison with other libraries, in turns: shuffled batches of 16 float32 images in [0, 1], without workers.

This package is measured preloaded, and on demand from the other library's storage or the most similar one. Equality of
pixels is checked outside the timed section. Missing libraries are listed: ``pip install 'omearrow-ds[peers]'``.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils.data import RandomSampler

from benchmarks.conftest import Datasets
from benchmarks.support.data import DataCache
from benchmarks.support.library import get_format
from benchmarks.support.paired import Compare, Preloaded, Side, drain
from benchmarks.support.peers import PEERS, Collection, LoaderOf, Peer
from benchmarks.support.workload import Profile, trial_s
from omearrow_ds import Format, OMEArrowDataLoader, OMEArrowDataset

_BATCH_SIZE = 16
pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.parametrize("batch_size", [_BATCH_SIZE]),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
    ),  # WebDataset's files
]

Theirs: TypeAlias = tuple[Peer, int, LoaderOf]
_TRIAL_BATCHES = 2
_PART = 4  # An epoch longer than the budget is cut to this fraction (1/4) of the budget.


@pytest.mark.limit("reference", "epoch")
@pytest.mark.parametrize("reference", [pytest.param(peer.name, id=peer.key) for peer in PEERS])
def test_preloaded(compare: Compare, reference: str, batch_size: int, preloaded: Preloaded, peers: Peers) -> None:
    """A preloaded, shuffled epoch of the loader, or a part of it; the time is per image."""
    _compare(compare, reference, peers, preloaded.dataset, batch_size, preloaded.image_shape)


@pytest.mark.limit("reference", "epoch_on_demand")
@pytest.mark.parametrize(
    ("reference", "format_name"),
    [pytest.param(peer.name, peer.format, id=peer.key) for peer in PEERS if peer.format],
)
def test_on_demand(
    compare: Compare, reference: str, batch_size: int, fmt: Format, datasets: Datasets, peers: Peers
) -> None:
    """A shuffled epoch of the loader on demand, or a part of it; the time is per image."""
    _compare(compare, reference, peers, datasets.get(fmt, "on_demand"), batch_size, datasets.image_shape(fmt))


def _compare(
    compare: Compare,
    reference: str,
    peers: Peers,
    dataset: OMEArrowDataset,
    batch_size: int,
    image_shape: str,
) -> None:
    peer, images, loader_of = peers.get(reference)

    def ours_of(sampler: Iterable[int]) -> OMEArrowDataLoader:
        return OMEArrowDataLoader(dataset, batch_size, num_workers=0, sampler=sampler)

    assert _same(peer, images, ours_of, loader_of), "the peer's pixels differ from ours"
    ours, theirs = (
        _epoch(loader_factory, images, batch_size, compare.profile) for loader_factory in (ours_of, loader_of)
    )
    compare(ours, theirs, image_shape, f"{reference}, B={batch_size}", images=images)


def _same(peer: Peer, images: int, ours_of: LoaderOf, loader_of: LoaderOf) -> bool:
    """Whether a batch of the library equals ours, or, if it has its own order, contains distinct images of ours."""
    ends = [0, images // 2, images - 1]
    if not peer.streams:
        (mine,), (other,) = ours_of(ends), loader_of(ends)
        return torch.equal(mine, other.as_subclass(torch.Tensor))
    stored = Counter(_hashes(ours_of(range(images))))
    return Counter(_hashes(loader_of(ends))) <= stored


def _hashes(batches: Iterable[torch.Tensor]) -> Iterator[int]:
    return (hash(image.numpy().tobytes()) for batch in batches for image in batch)


def _epoch(loader_of: LoaderOf, images: int, batch_size: int, profile: Profile) -> Side:
    """Return an epoch, cut to whole batches if it would take too long."""

    def loader(count: int) -> Any:
        return loader_of(RandomSampler(range(images), num_samples=count))

    few = min(images, _TRIAL_BATCHES * batch_size)
    drain(loader(few))
    image_s = trial_s(lambda: drain(loader(few))) / few
    batches = int(profile.pair.seconds / _PART / image_s) // batch_size
    count = images if images * image_s <= profile.pair.seconds else max(few, batches * batch_size)
    return Side(drain, repeat(loader(count)), count)


class Peers:
    """Measured libraries, each set up once, given the images, their storage and an empty folder."""

    def __init__(self, preloaded: Preloaded, datasets: Datasets, folder: Path) -> None:
        self._preloaded, self._datasets, self._folder = preloaded, datasets, folder
        self._peers: dict[str, Theirs] = {}

    def get(self, name: str) -> Theirs:
        """Return a peer, how many images it loads, and its maker of loaders; skip where it is not installed."""
        if name not in self._peers:
            peer = next(peer for peer in PEERS if peer.name == name)
            if peer.missing:
                pytest.skip(peer.missing)
            pixels = self._preloaded.pixels[: peer.at_most]
            path = self._datasets.path(get_format(peer.format)) if peer.format else None
            collection = Collection(pixels, self._preloaded.divisor, path, self._folder, _BATCH_SIZE)
            self._peers[name] = peer, len(pixels), peer.set_up(collection)
        return self._peers[name]


@pytest.fixture(scope="module")
def peers(preloaded: Preloaded, datasets: Datasets, data: DataCache) -> Iterator[Peers]:
    """Give the peers, kept from the network and from folders outside the data's."""
    with (
        tempfile.TemporaryDirectory(prefix=".peers-", dir=data.folder) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HF_HOME", folder)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
            patch.setenv(name, "1")
        yield Peers(preloaded, datasets, Path(folder))
