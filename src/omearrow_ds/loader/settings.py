"""Resolved settings of a loader, each with its reason."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import current_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Subset, default_convert

from omearrow_ds.dataset.batch import COLLATES, collate_listed, collate_padded
from omearrow_ds.dataset.batch import collate as collate_alike
from omearrow_ds.dataset.concat import CONCATS, batched, refuse_mixed_classes
from omearrow_ds.dataset.dataset import OMEArrowDataset, OMEArrowDatasetNumpy
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError
from omearrow_ds.loader.device import pixel_device, stored_transfer_blocker
from omearrow_ds.loader.division import divides, share_batches, warn_of_division, within
from omearrow_ds.loader.parts_order import WINDOW, OrderSpec, PartsSampler, Ranks
from omearrow_ds.loader.shuffling import SharedWindowedSampler, WindowedSampler, check_shuffle_fields, describe_shuffle
from omearrow_ds.loader.trial import BatchCost, CopyError, copy_for_trial, measure_batch_cost
from omearrow_ds.loader.workers import START_METHOD, refuse_in_daemon, warn_of_fork, worker_context
from omearrow_ds.options import check_integer
from omearrow_ds.resources import available_cores

# Cost of transferring a batch from a worker, in seconds and seconds per byte: receiving it in the loader's process, and
# sending it from the worker. Measured for 0.6 MB to 64 MB on two cores of a server, in 2026.
_TAKEN_OVER_S, _TAKEN_OVER_S_PER_BYTE = 0.21e-3, 0.08e-9
_HANDED_OUT_S, _HANDED_OUT_S_PER_BYTE = 0.4e-3, 0.06e-9
_WORTH_IT = 0.9  # Use workers if the expected time per batch is at most this share of the time without.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # Torch allocates shared tensors here.


class Setting(NamedTuple):
    """Value of a setting, and the reason why it was chosen."""

    value: Any
    why: str


Settings = dict[str, Setting]
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
    """Return every setting and its reason, as passed or derived from dataset, machine and ranks.

    ``given`` are the keywords for torch; all other parameters are those of `OMEArrowDataLoader`.
    """
    refuse_mixed_classes(dataset)
    settings = {name: Setting(value, _GIVEN) for name, value in keywords.items()}
    settings["batch_size"] = Setting(batch_size, _GIVEN)
    settings["device"] = _device(device)
    windowed = shuffle_fields is not None
    settings |= (
        _windowed(dataset, shuffle_fields, batch_size, keywords)
        if windowed
        else _sampler(dataset, batch_size, keywords)
    )
    if collate is not None:
        settings["collate_fn"] = _collate_fn(collate, batch_size, keywords)
    elif keywords.get("collate_fn") is None and (batch_size is not None or keywords.get("batch_sampler") is not None):
        settings["collate_fn"] = Setting(collate_alike, "as torch's default_collate, without copying stacked samples")
    sampler = settings.get("sampler", Setting(None, "")).value
    candidates = sampler.of_one_part() if isinstance(sampler, PartsSampler) else None
    settings["num_workers"] = _workers(dataset, batch_size, num_workers, keywords, candidates)
    settings |= _with_workers(settings) if settings["num_workers"].value else _without(keywords, num_workers)
    settings |= _transfer_settings(dataset, settings, keywords)
    _warn_of_little_shared_memory(dataset, settings)
    return settings


def _collate_fn(collate: Any, batch_size: int | None, keywords: Mapping[str, Any]) -> Setting:
    known = {"pad": collate_padded, "list": collate_listed}
    if collate not in known:
        raise ArgumentError(option="collate", value=collate, allowed=f"one of {', '.join(map(repr, known))}, or None")
    if keywords.get("collate_fn") is not None or (batch_size is None and keywords.get("batch_sampler") is None):
        problem = (
            "batch_size=None creates no batches" if keywords.get("collate_fn") is None else "conflicts with collate_fn="
        )
        raise ArgumentError(problem, option="collate", value=collate, remedy="leave out one of them")
    return Setting(known[collate], f"collate={collate!r}: samples may differ in height and width")


def _device(device: Any) -> Setting:
    if device is None:
        return Setting(None, "batches stay on the CPU")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            "unknown device", option="device", value=device, remedy="pass 'cpu', 'cuda' or None"
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "torch finds no CUDA device", option="device", value=device, remedy="leave it out, or pass 'cpu'"
        )
    return Setting(chosen, _GIVEN)


def copied_to(device: torch.device | None) -> bool:
    """Whether batches are copied to a device asynchronously."""
    return device is not None and device.type == "cuda"


def _transfer_settings(dataset: Any, settings: Settings, keywords: Mapping[str, Any]) -> Settings:
    target, device = settings["device"].value, pixel_device(dataset)
    if device is not None or not copied_to(target):
        why = "the target is not a CUDA device" if device is None else f"batches are created on {device}"
        return {} if keywords.get("pin_memory") is not None else {"pin_memory": Setting(False, why)}
    why_scaled = stored_transfer_blocker(dataset, settings.get("collate_fn", Setting(None, "")).value)
    if why_scaled is not None:
        chosen = {"transfer": Setting("normalized", f"pixels are normalized before the transfer: {why_scaled}")}
    else:
        chosen = {"transfer": Setting("raw", "stored pixels are transferred and normalized on the device")}
    if keywords.get("pin_memory") is not None:
        return chosen
    if why_scaled is None and not settings["num_workers"].value:
        return chosen | {
            "transfer": chosen["transfer"]._replace(value="raw-pinned"),
            "pin_memory": Setting(False, "batches are created in alternating pinned buffers"),
        }
    return chosen | {"pin_memory": Setting(True, f"device is {target}; torch copies batches into pinned memory")}


def rank_and_world_size() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _sampler(dataset: Dataset[Any], batch_size: int | None, keywords: Mapping[str, Any]) -> Settings:
    rank, count = rank_and_world_size()
    if keywords.get("sampler") is not None or keywords.get("batch_sampler") is not None:
        return _given_sampler(keywords)
    if isinstance(dataset, StoredSamples) and len(dataset) and dataset._collection.parted is not None:
        return _of_parts(dataset, batch_size, keywords)
    if count == 1 or isinstance(dataset, IterableDataset):
        if keywords.get("shuffle") and isinstance(dataset, StoredSamples) and not len(dataset):
            raise ArgumentError(
                f"{dataset!r} is empty",
                option="shuffle",
                value=True,
                remedy="pass a dataset with samples, or leave it out",
            )
        return _not_of_parts(dataset, keywords)
    generator, shuffle = keywords.get("generator"), bool(keywords.get("shuffle"))
    seed = _seed(generator)
    drop_last = bool(keywords.get("drop_last"))
    sharded: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
    tail = "the tail is dropped" if drop_last else "the first samples fill up the last ranks"
    why = f"rank {rank} of {count} ranks takes every {count}th sample; {tail}"
    return {"sampler": Setting(sharded, why), "shuffle": Setting(None, f"by the sampler: {shuffle}")}


def _given_sampler(keywords: Mapping[str, Any]) -> Settings:
    (rank, count), sampler = rank_and_world_size(), keywords.get("sampler")
    name = "sampler" if sampler is not None else "batch_sampler"
    why = _GIVEN if count == 1 else f"{_GIVEN} on each of {count} ranks: it must divide the samples itself"
    if sampler is None:
        share_batches(keywords[name], count)
        return {name: Setting(keywords[name], why)}
    inner = within(sampler, (DistributedSampler, WindowedSampler), count)
    if isinstance(inner, WindowedSampler):
        seed, drop_last = _seed(keywords.get("generator")), bool(keywords.get("drop_last"))
        sampler = SharedWindowedSampler(inner.dataset, inner.window, seed=seed, drop_last=drop_last)
    elif isinstance(inner, PartsSampler):
        sampler = inner.divided(Ranks.of(rank, count))
    elif inner is not None and divides(inner, count):
        sampler = inner
    if sampler is not keywords["sampler"]:
        why = f"inner sampler of {type(keywords['sampler']).__name__}: it already divides the samples"
        if divides(inner, count):
            warn_of_division(keywords["sampler"])
    return {"sampler": Setting(sampler, why)}


def _seed(generator: torch.Generator | None) -> int:
    return 0 if generator is None else generator.initial_seed() % 2**32


def _of_parts(dataset: StoredSamples, batch_size: int | None, keywords: Mapping[str, Any]) -> Settings:
    ranks, generator = Ranks.of(*rank_and_world_size()), keywords.get("generator")
    shuffle = bool(keywords.get("shuffle"))
    alone = generator is None and ranks.ranks == 1  # `torch.manual_seed` may differ between ranks.
    seed = torch.initial_seed() % 2**32 if alone else _seed(generator)
    parted = dataset._collection.parted
    window, mixed = (None, False) if parted is None else (parted.window, parted.mixed)
    plan = OrderSpec(seed, ranks.hosts, window or WINDOW, shuffle, grows=mixed and window is not None)
    sampler = PartsSampler(dataset, plan, ranks, drop_last=bool(keywords.get("drop_last")))
    sampler.local_seed = alone
    return {
        "sampler": Setting(
            sampler, "; ".join(filter(None, (sampler.describe(batch_size), sampler.describe_first_batch(batch_size))))
        ),
        "shuffle": Setting(None, f"by the sampler: {shuffle}"),
    }


def _not_of_parts(dataset: Dataset[Any], keywords: Mapping[str, Any]) -> Settings:
    """Return the setting that explains torch's order for collections in parts below ``Subset`` or ``ConcatDataset``."""
    if "shuffle" not in keywords or every_part(dataset, lambda part: part._collection.parted is None):
        return {}
    if not every_part(dataset, lambda _: True):
        return {}
    why = f"{_GIVEN}, by torch: no parts are known below Subset and ConcatDataset; use dataset.split() instead"
    return {"shuffle": Setting(keywords["shuffle"], why)}


def _windowed(dataset: Any, window: Any, batch_size: int | None, keywords: Mapping[str, Any]) -> Settings:
    taken = next((name for name in ("sampler", "batch_sampler") if keywords.get(name) is not None), None)
    if taken is not None:
        raise ArgumentError(
            f"conflicts with the order of {taken}=",
            option="shuffle_fields",
            value=window,
            remedy="leave out one of them",
        )
    if keywords.get("shuffle") is False:
        raise ArgumentError(
            "conflicts with shuffle=False",
            option="shuffle_fields",
            value=window,
            remedy="leave out one of them",
        )
    samples, (rank, count) = check_shuffle_fields(dataset, window), rank_and_world_size()
    generator = keywords.get("generator")
    if count == 1:
        sampler: Any = WindowedSampler(samples, window, generator)
        why = describe_shuffle(samples, window, batch_size)
    else:
        seed = _seed(generator)
        sampler = SharedWindowedSampler(samples, window, seed=seed, drop_last=bool(keywords.get("drop_last")))
        why = (
            f"{describe_shuffle(samples, window, batch_size)}; rank {rank} of {count} ranks reads a part of the windows"
        )
    return {"sampler": Setting(sampler, why), "shuffle": Setting(None, "by the sampler")}


def _with_workers(settings: Settings) -> Settings:
    defaults: Settings = {}
    if settings.get("persistent_workers") is None:
        defaults["persistent_workers"] = Setting(True, "workers start once, not in each epoch")
    if settings.get("prefetch_factor") is None or settings["prefetch_factor"].value is None:
        defaults["prefetch_factor"] = Setting(2, "one batch is created while another waits")
    chosen = settings.get("multiprocessing_context")
    if chosen is None or chosen.value is None:
        why = f"{START_METHOD}: workers inherit no threads or handles, and need no imports"
        defaults["multiprocessing_context"] = Setting(worker_context(), why)
    else:
        warn_of_fork(chosen.value if isinstance(chosen.value, str) else chosen.value.get_start_method())
    return defaults


def _without(keywords: Mapping[str, Any], num_workers: Any) -> Settings:
    """Return defaults of worker settings, which torch refuses without workers, if ``"auto"`` chose no workers."""
    if num_workers != "auto":
        return {}
    aside = {"persistent_workers": False, "prefetch_factor": None, "multiprocessing_context": None, "timeout": 0}
    return {name: Setting(value, "no workers") for name, value in aside.items() if keywords.get(name)}


def _workers(
    dataset: Dataset[Any], batch_size: int | None, num_workers: Any, keywords: Mapping[str, Any], among: Any
) -> Setting:
    device = pixel_device(dataset)
    if num_workers != "auto":
        check_integer("num_workers", num_workers, 0, "'auto', or a number of processes from 0")
        if num_workers and device is not None:
            raise ArgumentError(
                f"the pixels are on {device}, and each worker process would copy them",
                option="num_workers",
                value=num_workers,
                remedy="leave it out, or pass 0",
            )
        if num_workers:
            refuse_in_daemon(int(num_workers))
        return Setting(int(num_workers), _GIVEN)
    if device is not None:
        return Setting(0, f"auto: the pixels are on {device}, which creates the samples")
    if isinstance(dataset, IterableDataset):
        return Setting(0, "auto: each worker would repeat the samples of an iterable dataset")
    if every_part(dataset, lambda part: part.preloaded and not part._has_user_code):
        return Setting(0, "auto: copying pixels in memory is faster than transfer from a worker")
    if current_process().daemon:
        return Setting(0, "auto: this process is daemonic and cannot start workers")
    cores = available_cores()
    if cores == 1:
        return Setting(0, "auto: only one core is available")
    collate_fn = keywords.get("collate_fn") or collate_alike
    try:
        tried = (
            copy_for_trial(dataset, collate_fn, keywords.get("worker_init_fn"))
            if may_draw_random(dataset, collate_fn)
            else dataset
        )
    except CopyError as problem:
        return Setting(0, f"auto: {problem}")
    if keywords.get("worker_init_fn") is not None and not every_part(dataset, lambda _: True):
        why = "auto: not measured, as worker_init_fn may prepare the dataset; one per core, at most 4"
        return Setting(min(cores, 4), why)
    size = batch_size or getattr(keywords.get("batch_sampler"), "batch_size", None) or 1
    cost = measure_batch_cost(batched(tried), size if keywords.get("batch_sampler") is None else min(size, 16), among)
    return _choose_num_workers(cost, cores)


_PLAIN = (*COLLATES, default_convert)
_MAKE = ("__getitem__", "__getitems__")
_OURS = {getattr(cls, name) for cls in (OMEArrowDataset, OMEArrowDatasetNumpy) for name in _MAKE}


def may_draw_random(dataset: Any, collate_fn: Any) -> bool:
    """Whether batches depend on user code (``collate_fn`` or a dataset class) or on random numbers."""
    return collate_fn not in _PLAIN or not every_part(dataset, lambda part: not part._is_random)


def every_part(dataset: Any, holds: Callable[[StoredSamples], bool]) -> bool:
    """Whether ``dataset`` is or combines only datasets of this package for which ``holds`` returns True.

    False for datasets of any class that creates its own samples, including subclasses of ours or torch's.
    """
    if isinstance(dataset, StoredSamples):
        return {getattr(type(dataset), name) for name in _MAKE} <= _OURS and holds(dataset)
    if type(dataset) is Subset:
        return every_part(dataset.dataset, holds)
    return type(dataset) in CONCATS and all(every_part(part, holds) for part in dataset.datasets)


def _choose_num_workers(cost: BatchCost, cores: int) -> Setting:
    """Choose the smallest number of workers within 5% of the shortest expected time per batch.

    With w workers, the time per batch is the largest of three: a worker's, the loader process's, and that of all cores.
    """
    taken_s = _TAKEN_OVER_S + _TAKEN_OVER_S_PER_BYTE * cost.batch_bytes
    made_s = cost.worker_s + _HANDED_OUT_S + _HANDED_OUT_S_PER_BYTE * cost.batch_bytes
    expected = {w: max(made_s / w, taken_s, (made_s + taken_s) / cores) for w in range(1, cores + 1)}
    least_s = min(expected.values())
    measured = f"a batch of {cost.batch_bytes / 1e6:.3g} MB takes {cost.batch_s * 1e3:.3g} ms in this process"
    if least_s > _WORTH_IT * cost.batch_s:
        return Setting(0, f"auto: {measured}, and workers would not be much faster on {cores} cores")
    workers = next(w for w, expected_s in expected.items() if expected_s <= 1.05 * least_s)
    return Setting(
        workers, f"auto: {measured}, and an expected {expected[workers] * 1e3:.3g} ms with workers on {cores} cores"
    )


def _warn_of_little_shared_memory(dataset: Any, settings: Settings) -> None:
    """Warn if batches of a user's collate function in workers may not fit ``/dev/shm``.

    Our collate functions do not use it: it only contains tensors that torch shares.
    """
    workers = settings["num_workers"].value
    own = settings.get("collate_fn", Setting(None, "")).value in (None, *COLLATES)
    if not workers or own or sys.platform != "linux" or not _SHARED_MEMORY.is_dir():
        return
    shape, batch_size = getattr(dataset, "shape", None), settings["batch_size"].value
    if shape is None or batch_size is None:
        return
    needed_bytes = int(np.prod(shape)) * 4 * batch_size * (workers * settings["prefetch_factor"].value + 1)
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    if needed_bytes > free_bytes:
        msg = (
            f"{_SHARED_MEMORY}: {free_bytes:,} bytes are free but {workers} workers may need {needed_bytes:,} for "
            f"results of collate_fn, and a worker is killed if it is full; raise its size (docker run --shm-size), "
            f"lower batch_size, prefetch_factor or num_workers, or leave out collate_fn"
        )
        warnings.warn(msg, UserWarning, stacklevel=4)
