"""Frameworks in plain torch: how they divide the samples of a loader among ranks, and begin and end epochs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, convert, write_images

COUNT, BATCH_SIZE, EPOCHS, RANKS = 26, 4, 3, 2
STORES = ("one.arrow", "many.parts")
Loader = OMEArrowDataLoader
Epochs = Iterator[list[list[int]]]


def store(folder: Path) -> None:
    """Write images whose pixels and column encode their number, in one file and in parts."""
    images = [np.full((1, 4, 4), number, np.uint16) for number in range(COUNT)]
    write_images(images, folder / STORES[0], axes="CYX", columns={"number": list(range(COUNT))})
    convert(folder / STORES[0], folder / STORES[1], part_bytes=4 * 4 * 2 * 5)


def as_dict(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Return a batch as the Trainer of transformers expects it."""
    images, numbers = zip(*samples, strict=True)
    return {"images": torch.stack(images).float(), "numbers": torch.tensor(numbers)}


def make(path: Path, **options: Any) -> Loader:
    """Return the loader of a program."""
    dataset = OMEArrowDataset(path, preload=False, normalize=False, target="number")
    chosen = {"shuffle": True, "num_workers": 0, "collate_fn": as_dict, **options}
    return Loader(dataset, BATCH_SIZE, **chosen)


def numbers_of(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return the numbers of a batch, after comparing them with the pixels."""
    numbers: list[int] = batch["numbers"].tolist()
    assert batch["images"][:, 0, 3, 3].tolist() == numbers
    return numbers


def plainly(loader: Any) -> Epochs:
    """Iterate like a program under torchrun."""
    for _ in range(EPOCHS):
        yield [numbers_of(batch) for batch in loader]


class Listed(torch.utils.data.Dataset):
    """Indices of a sampler, as in Lightning."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, index: int) -> int:
        indices: int = self._list[index]
        return indices

    def reset(self) -> None:
        """Draw the indices."""
        self._list = list(self._sampler)


class Wrapper(DistributedSampler):
    """Division of the indices of any sampler, as in Lightning."""

    def __init__(self, sampler: Any, **options: Any) -> None:
        super().__init__(Listed(sampler), **options)

    def __iter__(self) -> Iterator[int]:
        listed: Any = self.dataset
        listed.reset()
        return (listed[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of both."""
        super().set_epoch(epoch)
        inner = self.dataset._sampler
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)


def recreated(loader: Loader, sampler: Any) -> Loader:
    """Return a loader of the same class with another sampler, made from the attributes of one, as Lightning does."""
    defaults = {name: option.default for name, option in inspect.signature(DataLoader.__init__).parameters.items()}
    options = {name: value for name, value in vars(loader).items() if name in defaults and value is not defaults[name]}
    options |= {"sampler": sampler, "shuffle": False, "batch_sampler": None}
    return type(loader)(**options)


def with_sampler(loader: Loader, *, always: bool) -> Loader:
    """Divide the samples like Lightning and Fabric: ``always``, or only if they are not divided."""
    if isinstance(loader.sampler, DistributedSampler) and not always:
        return loader
    if isinstance(loader.sampler, RandomSampler | SequentialSampler):
        return recreated(loader, DistributedSampler(loader.dataset, shuffle=True))
    return recreated(loader, Wrapper(loader.sampler, shuffle=True))


def set_epoch(loader: Loader, epoch: int) -> None:
    """Set the epoch of the samplers, as Lightning does."""
    for sampler in {id(sampler): sampler for sampler in (loader.sampler, loader.batch_sampler.sampler)}.values():
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def as_lightning(loader: Loader, *, always: bool = False) -> Epochs:
    """Iterate as the Trainer of Lightning does: it begins the first epoch before it sets it, and counts batches."""
    loader = with_sampler(loader, always=always)
    batches = iter(loader)
    for epoch in range(EPOCHS):
        set_epoch(loader, epoch)
        if epoch:
            batches = iter(loader)
        yield [numbers_of(next(batches)) for _ in range(len(loader))]


def as_fabric(loader: Loader) -> Epochs:
    """Iterate as the loader of Fabric does."""
    loader = with_sampler(loader, always=False)
    for epoch in range(EPOCHS):
        set_epoch(loader, epoch)
        yield [numbers_of(batch) for batch in loader]


class Shard(BatchSampler):
    """Division of batches, as in Accelerate."""

    def __init__(self, batch_sampler: Any, num_processes: int, process_index: int, *, split: bool, even: bool) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, num_processes, process_index
        self.split_batches, self.even_batches = split, even
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self.batch_sampler)
        count, rank, size = self.num_processes, self.process_index, self.batch_size
        together, part = (1, size // count) if self.split_batches else (count, size)
        filling = list(chain(*batches[:together]))
        for first in range(0, len(batches), together):
            indices = list(chain(*batches[first : first + together]))
            if len(indices) < count * part:
                if self.drop_last:
                    return
                while self.even_batches and len(indices) < count * part:
                    indices = indices + filling
            if share := indices[: count * part][rank * part : (rank + 1) * part]:
                yield share

    def __len__(self) -> int:
        count = len(self.batch_sampler)
        if self.split_batches:
            return count
        more = self.even_batches or self.process_index < count % self.num_processes
        return count // self.num_processes + (count % self.num_processes > 0 and not self.drop_last and more)


class Skip(BatchSampler):
    """Batches without the first ones, as in Accelerate."""

    def __init__(self, batch_sampler: Any, skip_batches: int) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        for index, batch in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


def one_ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate one batch ahead, as Accelerate does."""
    batches = iter(loader)
    ahead = next(batches)
    for batch in batches:
        yield ahead
        ahead = batch
    yield ahead


def as_accelerate(loader: Loader, *, split: bool = False, even: bool = True, skipped: int = 0) -> Epochs:
    """Iterate as the loader of Accelerate does, with batches of another loader that it makes."""
    if isinstance(loader.sampler, RandomSampler):
        loader.sampler.generator = torch.Generator().manual_seed(5)  # The same on all ranks.
    shard = Shard(loader.batch_sampler, RANKS, dist.get_rank(), split=split, even=even)
    own = DataLoader(loader.dataset, batch_sampler=shard, collate_fn=loader.collate_fn)
    rest = DataLoader(loader.dataset, batch_sampler=Skip(shard, skipped), collate_fn=loader.collate_fn)
    for epoch in range(EPOCHS):
        shard.batch_sampler.sampler.set_epoch(epoch)
        batches_of_rank = [numbers_of(batch) for batch in one_ahead(own)]
        assert len(batches_of_rank) == len(own)
        if skipped:
            assert [numbers_of(batch) for batch in one_ahead(rest)] == batches_of_rank[skipped:]
            assert len(rest) == len(batches_of_rank) - skipped
        yield batches_of_rank


class Dispatcher:
    """Batches of rank 0, of which each rank gets a part, as in Accelerate."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.slice_fn = loader, None

    def __len__(self) -> int:
        return (len(self.loader) + RANKS - 1) // RANKS

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.loader) if dist.get_rank() == 0 else None
        first: list[int] = []
        while True:
            together: list[Any] = [[]]
            if batches is not None:
                together = [list(chain(*map(numbers_of, islice(batches, RANKS))))]
            dist.broadcast_object_list(together)
            (numbers,) = together
            if not numbers:
                return
            first = first or numbers
            numbers = numbers + first[: -len(numbers) % RANKS]
            share = len(numbers) // RANKS
            yield numbers[dist.get_rank() * share :][:share]


def as_dispatched(loader: Loader, skipped: int = 0) -> Epochs:
    """Iterate like the loader of Accelerate when one rank loads for all."""
    sampler = Skip(loader.batch_sampler, skipped) if skipped else loader.batch_sampler
    own = Dispatcher(DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn))
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        batches_of_rank = list(own)
        assert len(batches_of_rank) == len(own)
        yield batches_of_rank


def as_skipped(loader: Loader) -> Epochs:
    """Iterate like the loader that ``skip_first_batches`` makes of an unprepared one."""
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        batches_of_rank = [numbers_of(batch) for batch in loader]
        loader.set_epoch(epoch)
        rest = DataLoader(loader.dataset, batch_sampler=Skip(loader.batch_sampler, 1), collate_fn=loader.collate_fn)
        assert len(rest) == len(loader) - 1
        yield [batches_of_rank[0], *(numbers_of(batch) for batch in one_ahead(rest))]


def as_looked_at(loader: Loader) -> Epochs:
    """Iterate like a program under torchrun whose first rank reads a batch before each epoch."""
    for _ in range(EPOCHS):
        if dist.get_rank() == 0:
            next(iter(loader))
        yield [numbers_of(batch) for batch in loader]


EMULATED: dict[str, Callable[[Loader], Epochs]] = {
    "torchrun": plainly,
    "torchrun, one rank looks at a batch": as_looked_at,
    "Lightning": as_lightning,
    "a wrapper around any sampler": functools.partial(as_lightning, always=True),
    "Fabric": as_fabric,
    "Accelerate": as_accelerate,
    "Accelerate, split_batches": functools.partial(as_accelerate, split=True),
    "Accelerate, even_batches=False": functools.partial(as_accelerate, even=False),
    "Accelerate, skip_first_batches": functools.partial(as_accelerate, skipped=2),
    "Accelerate, dispatch_batches": as_dispatched,
    "Accelerate, not prepared, skip_first_batches": as_skipped,
}
