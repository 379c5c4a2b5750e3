"""Sample orders within windows of images, and of collections in parts.

**Windows.** A random crop from a compressed store requires decoding its whole image. In a windowed order, the samples
of ``window`` images precede those of other images, so a cache of ``window`` images decodes each once.

**Parts.** The order is independent of world size and workers, with separate parts per host.
Parts are permuted and concatenated, and their samples are cut into equal stretches, one per *node*. Nodes are the
hosts of the first run. Within a stretch, each sample is shifted by a random distance of up to ``window`` parts. Samples
shifted beyond the end wrap around to the beginning, so consecutive samples come from at most ``window + 1`` parts.
If parts are fetched and their samples were permuted when they were written, a stretch begins with samples of its first
part only, and the parts of the window join one by one: the first batch waits for one part, not for the window. The
global order takes one sample of each node in turn. It depends only on seed, epoch, parts, window and nodes. A host
reads the nodes whose index modulo the number of hosts is its own index.

The random numbers are those of ``numpy.random.RandomState``, whose stream NumPy has frozen (NEP 19).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.stored_images import copy_with
from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.position import EpochProgress, describe_differences, rank_and_world_size
from omearrow_ds.storage.formats._base import Array, PartFetches
from omearrow_ds.text import count

_BATCHES = 200  # For measuring the quality of an order.
WINDOW = 14  # The parts of two windows are open at once. Up to two windows of parts are shuffled together.
VERSION = "parts 1"  # Version of saved states.
_AT_ONCE = 2**16


class Ranks(NamedTuple):
    rank: int = 0
    ranks: int = 1
    hosts: int = 1

    @classmethod
    def from_environment(cls, rank: int, ranks: int, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Return ranks and hosts from the environment variables of torchrun or a compatible launcher.

        Raises `ArgumentError` if hosts differ in their number of ranks: ranks would then disagree about the order.
        """
        texts = (environment.get(name, "") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE"))
        per_host, hosts, world_size = (int(text) if text.isdigit() else 0 for text in texts)
        if per_host and hosts and world_size == ranks != hosts * per_host:
            problem = f"{count(ranks, 'rank')} on {count(hosts, 'host')} are not equally distributed"
            remedy = "start the same number of ranks on each host, or remove LOCAL_WORLD_SIZE from the environment"
            raise ArgumentError(problem, option="LOCAL_WORLD_SIZE", value=per_host, remedy=remedy)
        return cls(rank, ranks, ranks // per_host if per_host and ranks % per_host == 0 else 1)


class OrderSpec(NamedTuple):
    """Settings that, together with the parts and the epoch, determine the order of samples; see the module."""

    seed: int
    nodes: int
    window: int
    shuffle: bool  # Otherwise, parts and samples keep their stored order.
    grows: bool = False  # Whether a stretch begins with one part, and the others of the window join one by one.


class PartsSampler(DistributedSampler[Any]):
    """Sampler of one rank's share of a dataset whose collection is stored in parts.

    It is a ``DistributedSampler`` so that frameworks do not divide its samples again. An iteration skips the first
    ``consumed`` samples of all ranks. ``local_seed`` is whether the seed may differ from that of other processes, and
    ``digest`` a fingerprint of the samples and their parts.
    """

    def __repr__(self) -> str:
        return f"PartsSampler({len(self)} samples, part by part)"

    def __init__(self, dataset: StoredSamples, plan: OrderSpec, ranks: Ranks, *, drop_last: bool = False) -> None:
        layout = dataset._collection.part_layout
        assert layout is not None
        starts, fields = np.asarray(layout.starts, np.int64), dataset.fields
        samples: Any = range(len(fields))  # Only its length is used.
        super().__init__(samples, ranks.ranks, ranks.rank, shuffle=plan.shuffle, seed=plan.seed, drop_last=drop_last)
        self.plan, self.ranks, self.consumed, self.local_seed = plan, ranks, 0, False
        self._sample = np.argsort(fields, kind="stable")  # Samples in image order.
        part_of = np.searchsorted(starts, fields, side="right") - 1
        self._sizes = np.bincount(part_of, minlength=len(starts) - 1).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        self.samples = len(fields)
        self._part_of = part_of
        self._fetched = None if layout.window is None or dataset.preloaded else dataset
        if self.fetches is not None:
            self.fetches.expect([], self._at_once)
        self.digest = hashlib.blake2b(layout.digest.encode() + fields.tobytes(), digest_size=16).hexdigest()

    @property
    def fetches(self) -> PartFetches | None:
        """Fetches of parts, which expect each part before its first sample; None if parts are not fetched."""
        return None if self._fetched is None else self._fetched._collection.source.header.part_fetches

    def __len__(self) -> int:
        left, ranks = self.samples - self.consumed, self.ranks.ranks
        return left // ranks if self.drop_last else -(-left // ranks)

    def divided(self, ranks: Ranks) -> PartsSampler:
        if ranks.ranks > 1:
            self._agree()
        share = copy_with(self, ranks=ranks, num_replicas=ranks.ranks, rank=ranks.rank, consumed=0)
        share.num_samples = len(share)
        share.total_size = share.num_samples * ranks.ranks
        return share

    def _agree(self) -> None:
        """Use the seed that all ranks share."""
        if self.local_seed:
            self.plan, self.local_seed = self.plan._replace(seed=0), False

    def __iter__(self) -> Iterator[int]:
        if rank_and_world_size()[1] > 1:
            self._agree()
        order, fetches = self.share(), self.fetches
        begins: dict[int, int] = {}  # Parts by the index of their first sample.
        if fetches is not None:
            parts, firsts = np.unique(self._part_of[order], return_index=True)
            begins = dict(sorted(zip(firsts.tolist(), parts.tolist(), strict=True)))
            fetches.expect(list(begins.values()), self._at_once)
        bounds = sorted({*begins, *range(0, len(order), _AT_ONCE)})
        for first, stop in pairwise([*bounds, len(order)]):
            if fetches is not None and first in begins:
                fetches.begin(begins[first])
            yield from order[first:stop].tolist()

    @property
    def _at_once(self) -> int:
        nodes = self.plan.nodes
        own_nodes = max(1, nodes // self.ranks.hosts)
        if not self.plan.shuffle:
            return min(own_nodes, len(self._sizes))
        per_stretch = -(-len(self._sizes) // nodes) + 1
        if self.plan.grows or per_stretch > 2 * self.plan.window:
            per_stretch = min(per_stretch, self.plan.window + 2)
        return min(own_nodes * per_stretch, len(self._sizes))

    def of_one_part(self) -> Array | None:
        """Return all samples in the part of this rank's first sample, or None if parts are not fetched from a URL."""
        if self._fetched is None or not self.samples:
            return None
        return np.flatnonzero(self._part_of == self._part_of[self.share()[0]])

    def share(self) -> Array:
        """Return the samples of this rank, (n,) int64, from `consumed` on."""
        rank, world_size, hosts = self.ranks
        stride = min(self.plan.nodes, hosts)  # Between positions of a host; one number divides the other.
        host, local_rank = divmod(rank, world_size // hosts)
        first = self.consumed + (host % stride - self.consumed) % stride
        turns = host // stride * (world_size // hosts) + local_rank + world_size // stride * np.arange(len(self))
        in_image_order: Array = self._sample[self._at(first + stride * turns)]
        return in_image_order

    def _at(self, positions: Array) -> Array:
        """Return the samples at positions of the global order; positions beyond its end repeat its last samples."""
        nodes, total = self.plan.nodes, self.samples
        if len(positions) and positions[-1] >= total:
            beyond = np.maximum(-(-(positions - total + 1) // nodes), 0)
            positions = (positions - nodes * beyond) % max(total, 1)
        num_parts = len(self._sizes)
        parts = self._random().permutation(num_parts) if self.plan.shuffle else np.arange(num_parts)
        sizes = self._sizes[parts]
        stops = np.cumsum(sizes)
        moves = self._starts[parts] - (stops - sizes)
        samples = np.empty(len(positions), np.int64)
        for node in np.unique(positions % nodes).tolist():
            of_node = positions % nodes == node
            stretch = self._stretch(node, stops)[positions[of_node] // nodes]
            samples[of_node] = stretch + moves[np.searchsorted(stops, stretch, side="right")]
        return samples

    def _stretch(self, node: int, stops: Array) -> Array:
        length, more = divmod(self.samples, self.plan.nodes)
        first = node * length + min(node, more)
        length += node < more
        if not self.plan.shuffle or not length:
            return np.arange(first, first + length)
        random = self._random(node + 1)
        ends = np.searchsorted(stops, [first, first + length - 1], side="right")
        parts = int(ends[1] - ends[0]) + 1
        if self.plan.grows:  # The first part is spread over two parts, the second over three, up to the window.
            bounds = np.clip(np.append(first, stops[ends[0] : ends[1] + 1]), first, first + length)
            sizes = np.diff(bounds)
            ways = np.minimum(np.arange(2, len(sizes) + 2), self.plan.window) * sizes.mean()
            moved = np.repeat(bounds[:-1], sizes) + random.random_sample(length) * np.repeat(ways, sizes)
        elif parts <= 2 * self.plan.window:
            return first + random.permutation(length)
        else:
            way = np.ceil(self.plan.window * length / parts)
            moved = (np.arange(length) + random.random_sample(length) * way) % length
        return first + np.argsort(moved, kind="stable")

    def _random(self, *stream: int) -> np.random.RandomState:
        return np.random.RandomState([self.plan.seed, self.epoch % 2**32, *stream])

    def describe(self, batch_size: int | None) -> str:
        """Describe the order of samples, compare it with a full shuffle, and state the wait for fetched parts."""
        plan, parts, (rank, ranks, hosts) = self.plan, count(len(self._sizes), "part"), self.ranks
        source = f"by the seed {plan.seed} and the epoch"
        if not plan.shuffle:
            text = f"{parts} in stored order"
        elif len(self._sizes) <= 2 * plan.window * plan.nodes and not plan.grows:
            text = f"random over {'all of ' if plan.nodes == 1 else ''}{parts}, {source}"
        else:
            mixing = describe_mixing(self._part_of[self.share()], batch_size, "part")
            text = f"random over {plan.window} of {parts} at a time, {source}{mixing}"
        if ranks > 1:
            text += f"; rank {rank} of {ranks} ranks reads a share of its host, one of {hosts} hosts"
        if self._fetched is None:
            return text
        num_parts = len(np.unique(self._part_of[self.share()[: batch_size or 1]]))
        text += f"; whole parts are prefetched in this order, and the first batch waits for {num_parts} of them"
        if plan.grows:
            return f"{text}, because shuffle_seed= already permuted the images"
        return f"{text}; convert with shuffle_seed= to wait for fewer" if plan.shuffle else text

    def seed_source(self, _: object = None) -> torch.Tensor:
        return torch.tensor([self.plan.seed, self.epoch])

    def state(self, progress: EpochProgress, batch_size: int | None) -> dict[str, Any]:
        step = self.ranks.ranks * (batch_size or 1)
        consumed = progress.consumed + (progress.batches - progress.first) * step
        state = {"version": VERSION, "epoch": progress.epoch, "consumed": min(consumed, self.samples)}
        state |= self.plan._asdict() | {"samples": self.samples, "parts": self.digest}
        return state | ({"ahead": sorted(progress.ahead), "step": step} if progress.ahead else {})

    def resumed(self, state: Mapping[str, Any], batch_size: int | None) -> EpochProgress:
        """Restore the order of a saved state, and return the progress to resume from."""
        own = {"version": VERSION, "samples": self.samples, "parts": self.digest, "shuffle": self.plan.shuffle}
        saved = state if isinstance(state, Mapping) else {}
        differences = describe_differences(saved, own)
        problem, remedy, step = "", "", self.ranks.ranks * (batch_size or 1)
        if differences:
            problem = f"was saved with other samples or parts: {differences}"
            remedy = "create the loader with the previous settings"
        elif state.get("ahead") and state["step"] != step:
            problem = f"was saved with unordered batches of {state['step']} samples over all ranks, now {step}"
            remedy = f"use batches of {state['step']} samples, or save states with in_order=True"
        elif state["nodes"] % self.ranks.hosts and self.ranks.hosts % state["nodes"]:
            relation = f"neither a multiple nor a divisor of the {self.ranks.hosts} hosts of this run"
            problem = f"was saved on {count(state['nodes'], 'host')}, which is {relation}"
            remedy = f"use {state['nodes']} hosts, or a multiple or divisor of this number"
        if problem:
            raise ArgumentError(problem, option="state", remedy=remedy)
        seed, nodes, window, consumed = (int(state[name]) for name in ("seed", "nodes", "window", "consumed"))
        self.plan = OrderSpec(seed, nodes, window, self.plan.shuffle, bool(state.get("grows")))
        self.local_seed = False
        first = -(-consumed // step)
        return EpochProgress(int(state["epoch"]), first, set(state.get("ahead", ())), first=first, consumed=consumed)


def windowed_order(fields: Array, window: int, generator: torch.Generator) -> Array:
    """Return all sample indices, in random order within random windows of images; ``fields`` has each image index."""
    distinct, of_sample = np.unique(fields, return_inverse=True)
    rank = torch.randperm(len(distinct), generator=generator).numpy()
    windows = rank[of_sample.reshape(-1)] // window
    within = torch.randperm(len(fields), generator=generator).numpy()
    return within[np.argsort(windows[within], kind="stable")]


class WindowedSampler(Sampler[int]):
    """Samples of a dataset in a `windowed_order` per epoch, drawn from ``generator`` or torch's global one."""

    def __init__(self, dataset: StoredSamples, window: int, generator: torch.Generator | None) -> None:
        self.dataset, self.window, self.generator = dataset, window, generator
        self._fields = dataset.fields

    def __repr__(self) -> str:
        return f"WindowedSampler({len(self)} samples, within windows of {self.window} images)"

    def __len__(self) -> int:
        return len(self._fields)

    def __iter__(self) -> Iterator[int]:
        generator = self.generator
        if generator is None:  # Draws exactly one number, like RandomSampler.
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        yield from windowed_order(self._fields, self.window, generator).tolist()


class SharedWindowedSampler(DistributedSampler[Any]):
    """A rank's contiguous part of a `windowed_order` that all ranks share; each rank reads few of the images."""

    def __init__(self, dataset: StoredSamples, window: int, *, seed: int, drop_last: bool) -> None:
        super().__init__(dataset, seed=seed, drop_last=drop_last)
        self._fields, self._window = dataset.fields, window

    def __iter__(self) -> Iterator[int]:
        whole = windowed_order(self._fields, self._window, torch.Generator().manual_seed(self.seed + self.epoch))
        part = np.resize(whole, self.total_size)  # Repeats from the beginning, like DistributedSampler.
        yield from part[self.rank * self.num_samples :][: self.num_samples].tolist()


def describe_mixing(groups: Array, batch_size: int | None, group_name: str) -> str:
    """Return how often two samples of a batch share a group, here and if shuffled; "" for batches of one sample."""
    size = min(batch_size or 1, len(groups))
    if size < 2:
        return ""
    batches = np.sort(groups[: min(len(groups) // size, _BATCHES) * size].reshape(-1, size), axis=1)
    _, batch_counts = np.unique(np.arange(len(batches))[:, None] * (groups.max() + 1) + batches, return_counts=True)
    _, counts = np.unique(groups, return_counts=True)
    same = (batch_counts * (batch_counts - 1)).sum() / (batches.size * (size - 1))
    uniform = (counts * (counts - 1)).sum() / (len(groups) * (len(groups) - 1))
    cases = f"in {same:.2%} of cases ({uniform:.2%} in a full shuffle)"
    return f": two samples of a batch come from one {group_name} {cases}"
