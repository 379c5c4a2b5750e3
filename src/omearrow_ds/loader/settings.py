"""Resolved settings of a loader, each with its reason, and the division of samples among ranks."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, default_convert

from omearrow_ds.dataset.batch import COLLATES, batched, collate_listed, collate_padded, parts_of, refuse_mixed_classes
from omearrow_ds.dataset.batch import collate as collate_alike
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.stored_images import copy_with
from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.batch_cost import BatchCost, CopyError, copy_for_trial, measure_batch_cost
from omearrow_ds.loader.device_transfer import pixel_device, stored_transfer_blocker
from omearrow_ds.loader.position import rank_and_world_size
from omearrow_ds.loader.samplers import (
    WINDOW,
    OrderSpec,
    PartsSampler,
    Ranks,
    SharedWindowedSampler,
    WindowedSampler,
    describe_mixing,
    windowed_order,
)
from omearrow_ds.loader.worker_processes import START_METHOD, refuse_in_daemon, warn_of_fork, worker_context
from omearrow_ds.options import check_choice, check_integer, refuse_value
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.formats._base import PartLayout

# Cost of transferring a batch from a worker, in seconds and seconds per byte: receiving it in the loader's process, and
# sending it from the worker. Measured for 0.6 MB to 64 MB on two cores of a server, in 2026.
_TAKEN_OVER_S, _TAKEN_OVER_S_PER_BYTE = 0.21e-3, 0.08e-9
_HANDED_OUT_S, _HANDED_OUT_S_PER_BYTE = 0.4e-3, 0.06e-9
_WORTH_IT = 0.9  # Use workers if the expected time per batch is at most this share of the time without.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # Torch allocates shared tensors here.

_NESTED = ("batch_sampler", "_batch_sampler", "sampler", "_sampler", "dataset")  # Attributes of wrappers.
_MOST_NESTED = 6
_FRAMES = 8  # From an iteration over a sampler, through torch's iterator, to the loader that dispatches the batches.


class Setting(NamedTuple):
    """Value of a setting, and the reason why it was chosen."""

    value: Any
    why: str


Settings = dict[str, Setting]
Arguments = Mapping[str, Any]  # Keyword arguments of the loader that are not None.
_GIVEN = "as given"


def resolve(
    dataset: Dataset[Any],
    batch_size: int | None,
    num_workers: Any,
    device: Any,
    keywords: Mapping[str, Any],
    collate: Any = None,
    shuffle_fields: int | None = None,
) -> Settings:
    """Return every setting and its reason, as passed or derived from dataset, machine and ranks."""
    refuse_mixed_classes(dataset)
    batch_size = None if batch_size is None else check_integer("batch_size", batch_size, 1)
    settings = {name: Setting(value, _GIVEN) for name, value in keywords.items()}
    settings |= {"batch_size": Setting(batch_size, _GIVEN), "device": _device(device)}
    passed = {name: value for name, value in keywords.items() if value is not None}
    settings |= _order(dataset, batch_size, passed, shuffle_fields)
    has_batches = batch_size is not None or "batch_sampler" in passed
    if collate is not None:
        settings["collate_fn"] = _collate_fn(collate, passed, has_batches=has_batches)
    elif "collate_fn" not in passed and has_batches:
        why = "like default_collate of torch, but stacked samples are not copied"
        settings["collate_fn"] = Setting(collate_alike, why)
    settings["num_workers"] = _workers(dataset, batch_size, num_workers, passed, _value(settings, "sampler"))
    settings |= _with_workers(passed) if settings["num_workers"].value else _without(passed, num_workers)
    settings |= _transfer_settings(dataset, settings, passed)
    _warn_of_little_shared_memory(dataset, settings)
    return settings


def _value(settings: Settings, name: str) -> Any:
    return settings[name].value if name in settings else None


def _collate_fn(collate: Any, passed: Arguments, *, has_batches: bool) -> Setting:
    functions = {"pad": collate_padded, "list": collate_listed}
    check_choice("collate", collate, list(functions), ", or None")
    if "collate_fn" in passed or not has_batches:
        problem = "conflicts with collate_fn=" if "collate_fn" in passed else "batch_size=None creates no batches"
        refuse_value("collate", collate, problem, "leave out one of them")
    return Setting(functions[collate], f"collate={collate!r}: samples may differ in height and width")


def _device(device: Any) -> Setting:
    if device is None:
        return Setting(None, "batches stay on the CPU")
    problem = partial(ArgumentError, option="device", value=device)
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise problem("unknown device", remedy="pass 'cpu', 'cuda' or None") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise problem("torch finds no CUDA device", remedy="leave it out, or pass 'cpu'")
    return Setting(chosen, _GIVEN)


def copied_to(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def _transfer_settings(dataset: Any, settings: Settings, passed: Arguments) -> Settings:
    target, device = settings["device"].value, pixel_device(dataset)
    pinned_by_user = {"pin_memory": settings["pin_memory"]} if "pin_memory" in passed else {}
    if device is not None or not copied_to(target):
        why = "the target is not a CUDA device" if device is None else f"batches are created on {device}"
        return {"pin_memory": Setting(False, why), **pinned_by_user}
    pinning = Setting(True, f"device is {target}; torch copies batches into pinned memory")
    transfer = Setting("raw", "stored pixels are transferred and normalized on the device")
    why_scaled = stored_transfer_blocker(dataset, _value(settings, "collate_fn"))
    if why_scaled is not None:
        transfer = Setting("normalized", f"pixels are normalized before the transfer: {why_scaled}")
    elif not settings["num_workers"].value and not pinned_by_user:
        transfer = transfer._replace(value="raw-pinned")
        pinning = Setting(False, "batches are created in alternating pinned buffers")
    return {"pin_memory": pinning, "transfer": transfer, **pinned_by_user}


def _order(dataset: Any, batch_size: int | None, passed: Arguments, shuffle_fields: int | None) -> Settings:
    (rank, world_size), shuffle = rank_and_world_size(), bool(passed.get("shuffle"))
    sampler: Any
    if shuffle_fields is not None:
        sampler, why = _windowed(dataset, shuffle_fields, batch_size, passed)
        shuffle = True
    elif "sampler" in passed or "batch_sampler" in passed:
        return _given_sampler(passed)
    elif isinstance(dataset, StoredSamples) and len(dataset) and dataset._collection.part_layout is not None:
        sampler = _of_parts(dataset, dataset._collection.part_layout, passed)
        why = sampler.describe(batch_size)
    elif world_size == 1 or isinstance(dataset, IterableDataset):
        if shuffle and isinstance(dataset, StoredSamples) and not len(dataset):
            refuse_value("shuffle", True, f"{dataset!r} is empty", "pass a dataset with samples, or leave it out")
        return _not_of_parts(dataset, passed)
    else:
        sampler = DistributedSampler(dataset, shuffle=shuffle, **_shared(passed))
        tail = "remaining samples are dropped" if sampler.drop_last else "the last ranks repeat the first samples"
        why = f"rank {rank} of {world_size} ranks takes every {world_size}th sample; {tail}"
    return {"sampler": Setting(sampler, why), "shuffle": Setting(None, f"by the sampler: {shuffle}")}


def _given_sampler(passed: Arguments) -> Settings:
    rank, world_size = rank_and_world_size()
    why = _GIVEN if world_size == 1 else f"{_GIVEN} on each of {world_size} ranks: it must divide the samples itself"
    if "sampler" not in passed:
        share_batches(passed["batch_sampler"], world_size)
        return {"batch_sampler": Setting(passed["batch_sampler"], why)}
    outer = sampler = passed["sampler"]
    wrapped = list(nested(outer))[1:] if divides(outer, world_size) else []
    inner = next((item for item in wrapped if isinstance(item, DistributedSampler | WindowedSampler)), None)
    if isinstance(inner, WindowedSampler):
        sampler = SharedWindowedSampler(inner.dataset, inner.window, **_shared(passed))
    elif isinstance(inner, PartsSampler):
        sampler = inner.divided(Ranks.from_environment(rank, world_size))
    elif inner is not None and divides(inner, world_size):
        sampler = inner
    if sampler is not outer:
        why = f"inner sampler of {type(outer).__name__}: it already divides the samples"
        if divides(inner, world_size):
            problem = "its inner sampler already divides the samples among ranks, so the outer sampler is ignored"
            remedy = "in Lightning, pass use_distributed_sampler=False"
            warnings.warn(f"sampler={type(outer).__name__}: {problem}; {remedy}", UserWarning, stacklevel=5)
    return {"sampler": Setting(sampler, why)}


class SharedBatches(BatchSampler):
    """Batch sampler of one rank that yields the batches of all ranks if another loader divides batches among ranks.

    Accelerate creates such a loader. With ``of_rank``, and for a loader that only skips batches, they are of one rank.
    """

    of_rank = False
    _has_warned = False

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        if batches.sampler is not self.sampler and not self._has_warned:
            self._has_warned = True
            problem = "an outer loader (such as that of accelerator.prepare) divides samples among ranks"
            remedy = "so this loader does not; to use load_state_dict(), iterate over this loader directly"
            warnings.warn(f"OMEArrowDataLoader: {problem}, {remedy}", UserWarning, stacklevel=2)
        return iter(batches)

    def __len__(self) -> int:
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.sampler
        sampler.set_epoch(epoch)

    def _batches(self) -> BatchSampler:
        sampler: Any = self.sampler
        if not (self.of_rank or _is_only_skipped(sys._getframe(2))):  # noqa: SLF001  # CPython only.
            if isinstance(sampler, PartsSampler):
                sampler = sampler.divided(Ranks())
            else:
                samples = len(sampler.dataset)
                sampler = copy_with(sampler, rank=0, num_replicas=1, num_samples=samples, total_size=samples)
        return BatchSampler(sampler, self.batch_size, self.drop_last)


def _is_only_skipped(frame: Any) -> bool:
    """Whether the caller only skips batches of a loader that this package divided, and no other loader divides them."""
    attributes: list[Any] = []
    while frame is not None and len(attributes) < _FRAMES:
        attributes.append(getattr(frame.f_locals.get("self"), "__dict__", {}))
        frame = frame.f_back
    # Attributes of Accelerate's SkipBatchSampler and DataLoaderDispatcher.
    return "skip_batches" in attributes[0] and not any("slice_fn" in names for names in attributes)


def nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the samplers that it wraps, from the outermost to the innermost."""
    pending, visited = [sampler], set[int]()
    while pending and len(visited) < _MOST_NESTED:
        current = pending.pop(0)
        visited.add(id(current))
        yield current
        attributes = getattr(current, "__dict__", {})
        pending += [attributes[name] for name in _NESTED if name in attributes and id(attributes[name]) not in visited]


def divides(sampler: Any, ranks: int) -> bool:
    """Whether a sampler yields one rank's share."""
    return ranks > 1 and ranks in (getattr(sampler, "num_replicas", None), getattr(sampler, "num_processes", None))


def share_batches(batch_sampler: Any, ranks: int) -> None:
    """Make a wrapped `SharedBatches` yield batches of one rank, unless a wrapper divides them; refuse a second one."""
    is_divided = False
    for sampler in nested(batch_sampler):
        if isinstance(sampler, SharedBatches):
            sampler.of_rank = not is_divided
            return
        if is_divided and isinstance(sampler, DistributedSampler) and divides(sampler, ranks):
            names = f"{type(batch_sampler).__name__} and {type(sampler).__name__}"
            problem = f"{names} both divide the samples among {ranks} ranks"
            remedy = "pass a batch sampler that divides them only once"
            raise ArgumentError(problem, option="batch_sampler", remedy=remedy)
        is_divided = is_divided or divides(sampler, ranks)


def _shared(passed: Arguments) -> dict[str, Any]:
    """Return the keywords of samplers that divide samples among ranks."""
    generator = passed.get("generator")
    seed = 0 if generator is None else generator.initial_seed() % 2**32
    return {"seed": seed, "drop_last": bool(passed.get("drop_last"))}


def _of_parts(dataset: StoredSamples, layout: PartLayout, passed: Arguments) -> PartsSampler:
    ranks = Ranks.from_environment(*rank_and_world_size())
    shared = _shared(passed)
    is_local = "generator" not in passed and ranks.ranks == 1  # `torch.manual_seed` may differ between ranks.
    seed = torch.initial_seed() % 2**32 if is_local else shared["seed"]
    grows = layout.mixed and layout.window is not None
    plan = OrderSpec(seed, ranks.hosts, layout.window or WINDOW, bool(passed.get("shuffle")), grows)
    sampler = PartsSampler(dataset, plan, ranks, drop_last=shared["drop_last"])
    sampler.local_seed = is_local
    return sampler


def _not_of_parts(dataset: Dataset[Any], passed: Arguments) -> Settings:
    """Return the setting that explains torch's order for collections in parts below other datasets."""
    is_ours = every_part(dataset, lambda _: True)
    if "shuffle" not in passed or not is_ours or every_part(dataset, lambda part: part._collection.part_layout is None):
        return {}
    why = f"{_GIVEN}, by torch: Subset and ConcatDataset hide the parts of a collection; use dataset.split() instead"
    return {"shuffle": Setting(passed["shuffle"], why)}


def _windowed(
    dataset: Any, window: int, batch_size: int | None, passed: Arguments
) -> tuple[WindowedSampler | SharedWindowedSampler, str]:
    """Return a sampler for ``shuffle_fields`` and its description, unless arguments or dataset do not support it."""
    problem = partial(ArgumentError, option="shuffle_fields")
    conflicts = [f"the order of {name}=" for name in ("sampler", "batch_sampler") if name in passed]
    conflicts += ["shuffle=False"] if passed.get("shuffle") is False else []
    if conflicts:
        raise problem(f"conflicts with {conflicts[0]}", value=window, remedy="leave out one of them")
    check_integer("shuffle_fields", window, 1, "a number of images from 1, or None")
    if not isinstance(dataset, StoredSamples):
        raise problem(f"needs a dataset of this package, not {type(dataset).__name__}", remedy="leave it out")
    collection, (rank, world_size) = dataset._collection, rank_and_world_size()
    if not dataset.preloaded and not dataset.source.images.details.storage_info().in_place:
        needed, cache_bytes = int(np.sort(collection.image_bytes)[-window:].sum()), collection.options.cache_bytes
        if cache_bytes < needed:
            cache = f"the cache of {dataset.path} has {cache_bytes} bytes, but the images of a window need {needed}"
            raise problem(cache, value=window, remedy=f"create the dataset with cache_bytes={needed}, or preload it")
    order = windowed_order(dataset.fields, window, torch.Generator().manual_seed(0))
    why = f"random over {window} images at a time{describe_mixing(dataset.fields[order], batch_size, 'image')}"
    if world_size == 1:
        return WindowedSampler(dataset, window, passed.get("generator")), why
    why = f"{why}; rank {rank} of {world_size} ranks reads a part of the windows"
    return SharedWindowedSampler(dataset, window, **_shared(passed)), why


def _with_workers(passed: Arguments) -> Settings:
    defaults = {
        "persistent_workers": Setting(True, "workers start once, not in each epoch"),
        "prefetch_factor": Setting(2, "each worker creates one batch while another one waits"),
    }
    context = passed.get("multiprocessing_context")
    if context is None:
        why = f"{START_METHOD}: workers inherit no threads or handles, and need no imports"
        defaults["multiprocessing_context"] = Setting(worker_context(), why)
    else:
        warn_of_fork(context if isinstance(context, str) else context.get_start_method())
    return {name: setting for name, setting in defaults.items() if name not in passed}


def _without(passed: Arguments, num_workers: Any) -> Settings:
    """Return defaults of settings that torch refuses without workers, if ``"auto"`` chose no workers."""
    defaults = {"persistent_workers": False, "prefetch_factor": None, "multiprocessing_context": None, "timeout": 0}
    names = [name for name in defaults if num_workers == "auto" and passed.get(name)]
    return {name: Setting(defaults[name], "no workers") for name in names}


def _workers(dataset: Any, batch_size: int | None, num_workers: Any, passed: Arguments, sampler: Any) -> Setting:
    device = pixel_device(dataset)
    if num_workers == "auto":
        reason = _reason_for_no_workers(dataset, device)
        return Setting(0, f"auto: {reason}") if reason else _measured_workers(dataset, batch_size, passed, sampler)
    number = check_integer("num_workers", num_workers, 0, "'auto', or a number of processes from 0")
    if number and device is not None:
        problem = f"the pixels are on {device}, and each worker process would copy them"
        refuse_value("num_workers", num_workers, problem, "leave it out, or pass 0")
    if number:
        refuse_in_daemon(number)
    return Setting(number, _GIVEN)


def _reason_for_no_workers(dataset: Dataset[Any], device: torch.device | None) -> str | None:
    if device is not None:
        return f"the pixels are on {device}, which creates the samples"
    if isinstance(dataset, IterableDataset):
        return "each worker would repeat all samples of an iterable dataset"
    if every_part(dataset, lambda part: part.preloaded and not part._has_user_code):
        return "copying pixels in memory is faster than transfer from a worker"
    if current_process().daemon:
        return "this process is daemonic and cannot start workers"
    return "only one core is available" if available_cores() == 1 else None


def _measured_workers(dataset: Dataset[Any], batch_size: int | None, passed: Arguments, sampler: Any) -> Setting:
    cores, collate_fn, init = available_cores(), passed.get("collate_fn", collate_alike), passed.get("worker_init_fn")
    tried = dataset
    try:
        if may_draw_random(dataset, collate_fn):
            tried = copy_for_trial(dataset, collate_fn, init)
    except CopyError as problem:
        return Setting(0, f"auto: {problem}")
    if init is not None and not every_part(dataset, lambda _: True):
        why = "auto: not measured, as worker_init_fn may prepare the dataset; one worker per core, at most 4"
        return Setting(min(cores, 4), why)
    size = batch_size or getattr(passed.get("batch_sampler"), "batch_size", None) or 1
    size = min(size, 16) if "batch_sampler" in passed else size
    candidates = sampler.of_one_part() if isinstance(sampler, PartsSampler) else None
    return _choose_num_workers(measure_batch_cost(batched(tried), size, candidates), cores)


def may_draw_random(dataset: Any, collate_fn: Any) -> bool:
    """Whether batches depend on user code (``collate_fn`` or a dataset class) or on random numbers."""
    is_plain = collate_fn in (*COLLATES, default_convert)
    return not is_plain or not every_part(dataset, lambda part: not part._is_random)


def every_part(dataset: Any, holds: Callable[[StoredSamples], bool]) -> bool:
    """Whether all wrapped datasets create samples as in this package, and ``holds`` is true for each."""
    methods = StoredSamples.__getitem__, StoredSamples.__getitems__
    return all(
        isinstance(part, StoredSamples) and methods == (type(part).__getitem__, type(part).__getitems__) and holds(part)
        for part in parts_of(dataset)
    )


def _choose_num_workers(cost: BatchCost, cores: int) -> Setting:
    """Choose the smallest number of workers within 5% of the shortest expected time per batch.

    The time per batch is the largest of three: a worker's, the loader process's, and that of all cores.
    """
    taken_s = _TAKEN_OVER_S + _TAKEN_OVER_S_PER_BYTE * cost.batch_bytes
    made_s = cost.worker_s + _HANDED_OUT_S + _HANDED_OUT_S_PER_BYTE * cost.batch_bytes
    expected = {w: max(made_s / w, taken_s, (made_s + taken_s) / cores) for w in range(1, cores + 1)}
    least_s = min(expected.values())
    measured = f"a batch of {cost.batch_bytes / 1e6:.3g} MB takes {cost.batch_s * 1e3:.3g} ms in this process"
    if least_s > _WORTH_IT * cost.batch_s:
        return Setting(0, f"auto: {measured}, and workers would not be much faster on {cores} cores")
    workers = next(w for w, expected_s in expected.items() if expected_s <= 1.05 * least_s)
    expected_ms = f"{expected[workers] * 1e3:.3g} ms"
    return Setting(workers, f"auto: {measured}, and an expected {expected_ms} with workers on {cores} cores")


def _warn_of_little_shared_memory(dataset: Any, settings: Settings) -> None:
    """Warn if batches of a user's collate function in workers may not fit ``/dev/shm``, which ours do not use."""
    workers = settings["num_workers"].value
    own = _value(settings, "collate_fn") in (None, *COLLATES)
    if not workers or own or sys.platform != "linux" or not _SHARED_MEMORY.is_dir():
        return
    shape, batch_size = getattr(dataset, "shape", None), settings["batch_size"].value
    if shape is None or batch_size is None:
        return
    needed_bytes = int(np.prod(shape)) * 4 * batch_size * (workers * settings["prefetch_factor"].value + 1)
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    if needed_bytes > free_bytes:
        needed = f"{workers} workers may need {needed_bytes:,} bytes for results of collate_fn"
        free = f"only {free_bytes:,} are free, and a full {_SHARED_MEMORY} kills workers"
        smaller = "lower batch_size, prefetch_factor or num_workers, or leave out collate_fn"
        remedy = f"enlarge it (docker run --shm-size), {smaller}"
        warnings.warn(f"{_SHARED_MEMORY}: {needed} but {free}; {remedy}", UserWarning, stacklevel=4)
