"""`OMEArrowDataLoader`: a torch DataLoader with the right defaults for stored images."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from omearrow_ds.dataset.batch import batched
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.stored_images import copy_with
from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.device_transfer import IN_ORDER, RawTransfer, add_device_indices, mover_to, pixel_device, unwrap
from omearrow_ds.loader.epoch import EpochBatchSampler, EpochIterator
from omearrow_ds.loader.position import EpochProgress, LoaderPosition, rank_and_world_size
from omearrow_ds.loader.samplers import PartsSampler, Ranks
from omearrow_ds.loader.settings import Setting, SharedBatches, may_draw_random, resolve
from omearrow_ds.loader.worker_processes import refuse_in_daemon
from omearrow_ds.options import refuse_unknown, refuse_value

_AHEAD = 2  # Without workers: one batch reached 86 % of the throughput of `preadv`, two reached 95 %.
_OURS = ("batch_size", "device", "transfer")  # Settings that are not passed to torch as keywords.


class OMEArrowDataLoader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` for `OMEArrowDataset`, `OMEArrowDatasetNumpy` and other datasets.

    Parameters
    ----------
    dataset
        Dataset to load from.
    batch_size
        Samples per batch.
    num_workers
        ``"auto"`` is 0 if samples are only copied from memory, or if workers cannot start or would copy a random
        generator; otherwise a few timed batches choose the number that the available cores justify. `settings` has the
        reason.
    device
        ``None`` leaves batches on the CPU, or on the device of ``preload="cuda"``. A CUDA device gets each batch from
        pinned memory while the previous one is processed; integer pixels are transferred as stored and scaled there if
        possible.
    collate
        ``None`` refuses samples of different sizes, as torch does; ``"list"`` returns lists of images and masks.
        ``"pad"`` pads samples at the bottom and right to equal size, and adds ``valid`` as last item: bool (B, H, W),
        True for pixels of a sample.
    shuffle_fields
        ``None`` shuffles all samples. An integer shuffles the samples of that many images at a time, so that each image
        is decoded once; use it with ``cache_bytes`` (`settings` states how well this mixes).
    **kwargs
        Passed to torch's DataLoader; with workers, ``persistent_workers`` is True and ``prefetch_factor`` 2. Workers
        are forked from a server process: scripts need no ``__main__`` guard, and their functions can be transforms.

    Raises
    ------
    ArgumentError
        If ``dataset`` is a path or source; if a keyword is unknown; if ``num_workers`` is invalid, or positive in a
        daemonic process; if the device does not exist; if objects that workers need cannot be pickled.

    Warns
    -----
    UserWarning
        If a storage library in use can hang or crash with the chosen start method, or ``/dev/shm`` may be too small for
        batches of a ``collate_fn``.

    Notes
    -----
    Order and random numbers depend only on torch's seed or on ``generator``, not on the number of workers. Before each
    batch, the global generators of torch (CPU), NumPy and Python are seeded by epoch, batch and rank, and restored
    afterwards if the batch is made in this process. `numpy.random.seed` has no effect.

    In an initialized ``torch.distributed`` group, each rank loads its share, as with ``DistributedSampler``. The order
    depends on the epoch and the seed of ``generator``, or on 0. `set_epoch` chooses the epoch.

    A collection in parts has an order of its own, equal for any number of ranks; each host reads its own parts
    (`docs/how-to/several-hosts.md`).

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
    >>> plate = OMEArrowDataset("plate.arrow", target="treatment")
    >>> loader = OMEArrowDataLoader(plate, batch_size=4, shuffle=True)
    >>> [tuple(images.shape) for images, codes in loader]
    [(4, 2, 160, 160), (4, 2, 160, 160), (2, 2, 160, 160)]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        *,
        num_workers: int | Literal["auto"] = "auto",
        device: torch.device | str | None = None,
        collate: Literal["pad", "list"] | None = None,
        shuffle_fields: int | None = None,
        **kwargs: Any,
    ) -> None:
        known = inspect.signature(DataLoader).parameters
        if "batch_size" in known:  # A framework may have replaced its constructor by one with any keywords.
            refuse_unknown(kwargs, known, OMEArrowDataLoader)
        _check_dataset(dataset)
        settings = resolve(dataset, batch_size, num_workers, device, kwargs, collate, shuffle_fields)
        chosen = {name: setting.value for name, setting in settings.items() if name not in _OURS}
        super().__init__(dataset, settings["batch_size"].value, **chosen)
        self.device = settings["device"].value
        self._settings = settings
        self._raw_transfer: RawTransfer | None = None
        self._is_random = may_draw_random(dataset, self.collate_fn)
        self._world_size = rank_and_world_size()[1]
        self._begin_lock = threading.RLock()
        self._epoch: weakref.ref[EpochIterator] | None = None
        self._own_parts = self.sampler if isinstance(self.sampler, PartsSampler) else None
        shares = isinstance(self.sampler, DistributedSampler) and self.sampler is not kwargs.get("sampler")
        if shares and self._world_size > 1 and self.batch_sampler is not None:
            batches = SharedBatches(self.sampler, self.batch_size, self.drop_last)  # type: ignore[arg-type]
            vars(self)["batch_sampler"] = batches  # Torch refuses `setattr`.
        samplers = [self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)]
        self._position = LoaderPosition(samplers, sets_epochs=shares)

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Settings of the loader, each with its value and the reason for it."""
        return MappingProxyType(self._settings)

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        if isinstance(self.dataset, IterableDataset):
            return sampler
        parts = self._parts
        own = self.sampler if parts is None else parts
        if self.batch_sampler is None:
            sampler = own
        elif self.batch_size is not None and (isinstance(sampler, SharedBatches) or own is not self.sampler):
            sampler = BatchSampler(own, self.batch_size, self.drop_last)
        sampler = add_device_indices(sampler, self.dataset)
        return EpochBatchSampler(
            sampler,
            self._position,
            self._generators,
            workers=self.num_workers > 0,
            rank=rank_and_world_size()[0] if self._is_random else None,
            seed_source=itemgetter(int(self.generator is not None)) if parts is None else parts.seed_source,
            read_ahead=(self.dataset, self.num_workers or _AHEAD) if _can_read_ahead(sampler, self.dataset) else None,
        )

    @property
    def _parts(self) -> PartsSampler | None:
        """Sampler of this rank's share if the order is that of a collection in parts, or None.

        It differs from ``sampler`` if that was created before the process group.
        """
        if self._own_parts is not None:
            ranks = Ranks.from_environment(*rank_and_world_size())
            if self._own_parts.ranks != ranks:
                self._own_parts = self._own_parts.divided(ranks)
        return self._own_parts

    def _get_iterator(self) -> Any:
        """Return torch's iterator over the dataset with batched access below ``ConcatDataset``.

        If raw pixels are sent to the device, the dataset has raw pixels.
        """
        dataset = batched(self.dataset)
        transfer = self._settings.get("transfer")
        if transfer is not None and transfer.value != "normalized":
            assert self.device is not None
            is_pinned = transfer.value == "raw-pinned"
            self._raw_transfer = self._raw_transfer or RawTransfer(dataset, self.device, pinned=is_pinned)
            dataset = self._raw_transfer.dataset
        loader = self if dataset is self.dataset else copy_with(self, dataset=dataset)
        return DataLoader._get_iterator(loader)  # noqa: SLF001  # The overridden method.

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        """Iterate over the batches of an epoch, on ``device`` if one was given."""
        if self.num_workers:
            refuse_in_daemon(self.num_workers)
        if isinstance(self.dataset, IterableDataset):
            return EpochIterator(super().__iter__(), EpochProgress(), mover_to(self.device), None)
        with self._begin_lock:  # One thread at a time: two would share progress and persistent workers.
            _, world_size = rank_and_world_size()
            if world_size != self._world_size and self._parts is None:
                problem = f"created for {self._world_size} ranks but the process group has {world_size}"
                remedy = "create the loader after torch.distributed.init_process_group"
                msg = f"OMEArrowDataLoader: {problem}, so each rank reads wrong samples; {remedy}"
                warnings.warn(msg, UserWarning, stacklevel=3)
            progress, discarded = self._position.pop_next(is_single=world_size == 1)
            if discarded is not None:
                self._discard(discarded, progress.epoch)
            batches = self._begin(progress)
            move = mover_to(self.device, self._raw_transfer, is_on_device=pixel_device(self.dataset) is not None)
            epoch = EpochIterator(batches, progress, move, self._prepare)
            if batches is self._iterator:
                self._epoch = weakref.ref(epoch)
            return epoch

    def _begin(self, progress: EpochProgress) -> Any:
        """Draw the order of an epoch, and return torch's iterator over its batches."""
        parts, failed = self._parts, self._position.progress.failed
        self._position.progress = progress
        if parts is not None:
            parts.set_epoch(progress.epoch)
            parts.consumed = progress.consumed
        self._position.set_samplers(progress.epoch, always=progress.resumed)
        if failed or not all(worker.is_alive() for worker in getattr(self._iterator, "_workers", ())):
            self._iterator = None  # A worker was killed: start new ones.
        # Persistent workers serve one epoch at a time, so an earlier iterator that continues starts new ones.
        previous = None if self._epoch is None or self._iterator is None else self._epoch()
        if previous is not None and not previous.release():
            batches = self._get_iterator()
        else:
            if self._iterator is not None:
                # Torch draws a seed when it starts workers, or per epoch without workers. Here both cases draw one.
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            batches = super().__iter__()
        if self.num_workers == 0:
            # As with workers, the order is drawn when the epoch begins, not when the first batch is requested.
            batches._index_sampler.draw(progress)  # noqa: SLF001  # An `EpochBatchSampler`.
        if parts is not None:
            parts.consumed = 0
        progress.begun = True
        return batches

    def _prepare(self, epoch: EpochIterator) -> None:
        """Begin another epoch if one was chosen after ``iter``, or start new workers, before the next batch."""
        with self._begin_lock:
            progress = epoch.progress
            if epoch.is_released:
                # The seed that torch draws for these workers must not come from the generator of the next epochs.
                loader = copy_with(self, _position=LoaderPosition(progress=progress), generator=torch.Generator())
                epoch.use(loader._get_iterator())  # noqa: SLF001  # Same class.
                return
            if progress is not self._position.progress:
                return
            chosen = self._position.pop_chosen()
            is_saved = progress.resumed or progress.consumed > 0
            if chosen is None or chosen == progress.epoch or (is_saved and chosen < progress.epoch):
                return
            if not is_saved and self._position.sampler_epoch is None:  # Each epoch has the next order.
                progress.epoch = chosen
                return
            if is_saved:
                _warn_of_discarded(progress, chosen)
            following = EpochProgress(chosen)
            epoch.start(self._begin(following), following)

    def _discard(self, saved: EpochProgress, epoch: int) -> None:
        _warn_of_discarded(saved, epoch)
        self._position.saved = None
        self._index_sampler.pass_over(saved)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number that determines the shuffled order.

        It replaces ``DistributedSampler.set_epoch``, and also sets the epoch of your samplers. Without it, the order on
        several ranks changes after each complete epoch. If the epoch differs from the one in a loaded state, the rest
        of that epoch is discarded with a warning.
        """
        saved = self._position.saved
        if saved is not None and saved.epoch != epoch:
            self._discard(saved, epoch)
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, to save it with ``torch.save`` and resume the epoch later.

        The state counts delivered batches, not those that workers have prefetched. After the last batch of an epoch, it
        is the start of the next one. It contains the order, and reproduces draws from the global generators, but not
        from others. If a custom sampler draws from another generator, or during the epoch, save its state yourself.
        Later epochs are reproduced if the loader has ``generator=``. Otherwise they depend on torch's global generator.
        The state of one rank is valid for all ranks with the same seed.

        For a collection in parts, the state is a few integers. It is valid for any number of ranks and any batch size,
        and for numbers of hosts that divide the saved number or are its multiples.
        """
        saved = self._position.saved
        progress = self._position.following() if saved is None else saved
        if self._parts is not None:
            return self._parts.state(progress, self.batch_size)
        return progress.state(self._generators, self._identity)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume an epoch from a state of `state_dict`: the next iteration starts after the last delivered batch.

        ``num_workers`` may differ from the saved loader.

        Raises
        ------
        ArgumentError
            If the state is from a loader with other data, batches or ranks. For a collection in parts, if it is from
            other data, or from a number of hosts that neither divides the current number nor is its multiple.
        """
        parts = self._parts
        if parts is not None:
            saved = parts.resumed(state, self.batch_size)
            parts.consumed = saved.consumed
        else:
            saved = EpochProgress.from_state(state, self._generators, self._identity)
        order = self._index_sampler
        saved.set_length(order)
        if parts is not None:
            parts.consumed = 0
        if saved.batches and saved.batches == saved.total:  # Earlier versions saved the end of an epoch.
            order.pass_over(saved)
            saved = EpochProgress(saved.epoch + 1)
        self._position.saved = saved

    @property
    def _identity(self) -> dict[str, Any]:
        size = self.batch_size if self.batch_size is not None else getattr(self.batch_sampler, "batch_size", None)
        if isinstance(self.dataset, IterableDataset):
            problem, remedy = "an iterable dataset has no order to resume", "use a dataset with __getitem__"
            raise ArgumentError(problem, option="dataset", remedy=remedy)
        identity = {"samples": len(self.dataset), "batch_size": size, "ranks": rank_and_world_size()[1]}  # type: ignore[arg-type]
        filters = getattr(unwrap(self.dataset)[0], "_filters", ())
        identity |= {"filter": " and ".join(f"({condition})" for condition in filters)} if filters else {}
        return {**identity, "sampler": type(self.sampler).__name__, "drop_last": self.drop_last}

    @property
    def _generators(self) -> list[torch.Generator]:
        """Generators that the order may be drawn from, in addition to torch's global one."""
        generators = [getattr(owner, "generator", None) for owner in (self, *self._position.samplers)]
        return [*dict.fromkeys(item for item in generators if item is not None and isinstance(item, torch.Generator))]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch": None, "_iterator": None, "_begin_lock": None, "_raw_transfer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _begin_lock=threading.RLock())

    def __repr__(self) -> str:
        lines = [
            f"  {name}={getattr(value, '__name__', None) or repr(value)}: {why}"
            for name, (value, why) in self.settings.items()
        ]
        return "\n".join([f"<{type(self).__name__} of {self.dataset!r}", *lines]) + ">"


def _check_dataset(dataset: Any) -> None:
    """Raise `ArgumentError` for an object without samples, such as a path or source."""
    has_samples = hasattr(type(dataset), "__getitem__") or hasattr(dataset, "__getitems__")
    if not has_samples or isinstance(dataset, str | bytes | os.PathLike | type):
        remedy = "open a collection with OMEArrowDataset(path) first"
        refuse_value("dataset", dataset, "", remedy, allowed="a dataset or a sequence of samples")


def _can_read_ahead(sampler: Any, dataset: Any) -> bool:
    """Whether batches can be drawn early, without effect on the order or the states of generators."""
    samples, _ = unwrap(dataset)
    if not isinstance(samples, StoredSamples) or not samples._collection.is_read:
        return False
    if type(sampler) not in (BatchSampler, SharedBatches):
        return False
    of_parts = type(sampler.sampler) is PartsSampler and sampler.sampler.fetches is None
    return of_parts or type(sampler.sampler) in IN_ORDER


def _warn_of_discarded(saved: EpochProgress, epoch: int) -> None:
    """Warn that the rest of a saved epoch is skipped, if only some of its batches were delivered."""
    delivered = saved.batches - saved.first + len(saved.ahead) + bool(saved.consumed)
    if delivered and saved.batches != saved.total:
        left = f"batch {saved.batches}" + ("" if saved.total is None else f" of {saved.total}")
        problem = f"skips the rest of epoch {saved.epoch}, which the loaded state left after {left}"
        remedy = f"call set_epoch({saved.epoch}) to continue that epoch"
        warnings.warn(f"set_epoch({epoch}): {problem}; {remedy}", UserWarning, stacklevel=4)
