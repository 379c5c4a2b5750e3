"""Stacked batches, which are collated without a copy, and `collate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from omearrow_ds.dataset.handover import batch_array
from omearrow_ds.errors import AxesError

Array = np.ndarray[Any, Any]
_SHOWN = 4


class CollatedBatch(NamedTuple):
    """Collated batch that a dataset returns instead of samples, equal to the result of ``default_collate``."""

    batch: Any


def asked_for_whole() -> bool:
    """Whether the caller of ``__getitems__`` only collates the samples, so that a dataset may return a collated batch.

    That is torch's fetcher, of any loader whose ``collate_fn`` is torch's default or ours, also through a ``Subset``.
    Other callers may keep samples, collate them twice, or write to them. Torch does not pass the loader to a dataset,
    so this function inspects the call stack.
    """
    frame = sys._getframe(2)  # noqa: SLF001  # CPython only; `inspect` would read source files.
    while frame.f_back is not None and (frame.f_code is _SUBSET or frame.f_globals["__name__"] == _CLOCK):
        frame = frame.f_back
    return frame.f_code is _FETCH and frame.f_locals["self"].collate_fn in COLLATES


def collate(samples: Sequence[Any]) -> Any:
    """Collate like ``torch.utils.data.default_collate``, without copying stacked samples.

    In a loader's worker, tensors are stacked in memory that is transferred without a copy.
    """
    return collate_by_type(samples, collate_fn_map=_COLLATE)


def collate_padded(samples: Sequence[Any]) -> Any:
    """Collate samples that differ in height and width by padding with zeros at the bottom and right.

    The last item of the batch is ``valid``, bool (B, H, W), True for pixels of the sample. For samples that are only
    images, the batch is ``(images, valid)``.
    """
    whole = _whole(samples)
    if whole is not None:
        first = whole[0] if isinstance(whole, Sequence) else whole
        valid = torch.ones((len(first), *first.shape[-2:]), dtype=torch.bool)
        return [*whole, valid] if isinstance(whole, Sequence) else [whole, valid]
    rows = [sample if isinstance(sample, tuple | list) else (sample,) for sample in samples]
    images = [row[0] for row in rows]
    valid = _padded([torch.ones(image.shape[-2:], dtype=torch.bool) for image in images])
    parts = [_padded(part) if _are_planes(part) else collate(part) for part in map(list, zip(*rows, strict=True))]
    return [*parts, valid]


def collate_listed(samples: Sequence[Any]) -> Any:
    """Collate samples that differ in height and width into lists of images and masks."""
    whole = _whole(samples)
    if whole is not None:
        parts = whole if isinstance(whole, Sequence) else [whole]
        listed = [list(part.unbind(0)) if _are_planes([part]) else part for part in parts]
        return listed if isinstance(whole, Sequence) else listed[0]
    if not isinstance(samples[0], tuple | list):
        return list(samples)
    return [part if _are_planes(part) else collate(part) for part in map(list, zip(*samples, strict=True))]


def _whole(samples: Sequence[Any]) -> Any:
    """Return the stacked batch, or None if there are separate samples."""
    return samples[0].batch if isinstance(samples[0], CollatedBatch) else None


def _are_planes(part: Sequence[Any]) -> bool:
    return all(isinstance(item, torch.Tensor) and item.ndim >= 2 for item in part)


def _padded(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return stacked images with the same number of axes, padded with zeros at the bottom and right."""
    first = images[0]
    shape = [max(sizes) for sizes in zip(*(image.shape for image in images), strict=True)]
    if any(image.shape[:-2] != first.shape[:-2] for image in images):
        raise AxesError(
            f"collate='pad': samples differ in more than height and width (largest {shape}); use collate='list'"
        )
    memory = batch_array((len(images), *shape, first.element_size()), np.dtype(np.uint8))
    out = torch.from_numpy(memory).view(first.dtype).view(len(images), *shape).zero_()
    for index, image in zip(out, images, strict=True):
        index[..., : image.shape[-2], : image.shape[-1]] = image
    return out


def _collated(samples: Sequence[CollatedBatch], **_: Any) -> Any:
    return samples[0].batch


def _listed(samples: Sequence[str], **_: Any) -> list[str]:
    return list(samples)


def _stack(
    samples: Sequence[torch.Tensor], *, collate_fn_map: dict[type | tuple[type, ...], Callable[..., Any]] | None = None
) -> torch.Tensor:
    first = samples[0]
    if get_worker_info() is None or not all(_like(first, item) for item in samples):
        if len({item.shape for item in samples}) > 1:
            shapes = ", ".join(str(tuple(item.shape)) for item in samples[:_SHOWN])
            raise AxesError(
                f"samples of one batch differ in shape: {shapes}; pass collate='pad' or 'list' to the loader, or "
                f"crop_size= to the dataset (with box=, pad_to= or resize=)"
            )
        collated: torch.Tensor = _TORCHS_OWN(samples, collate_fn_map=collate_fn_map)
        return collated
    memory = batch_array((len(samples), *first.shape, first.element_size()), np.dtype(np.uint8))
    out = torch.from_numpy(memory).view(first.dtype).view(len(samples), *first.shape)
    return torch.stack(list(samples), out=out)


def _like(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are ordinary tensors of one shape and dtype, with values to copy."""
    ordinary = type(other) is torch.Tensor and other.layout == torch.strided and other.device.type == "cpu"
    alike = ordinary and other.shape == first.shape and other.dtype == first.dtype
    return alike and other.numel() > 0 and not other.requires_grad and not other.is_quantized


COLLATES = (default_collate, collate, collate_padded, collate_listed)  # They do not expose samples.
_FETCH = _MapDatasetFetcher.fetch.__code__
_SUBSET = Subset.__getitems__.__code__
ASKERS = frozenset((_FETCH, _SUBSET))  # Torch code that requests batches of ``self.dataset``.
_CLOCK = "omearrow_ds.advise.profile.recorder"  # Wraps timed functions.
_TORCHS_OWN = default_collate_fn_map[torch.Tensor]
_COLLATE: dict[Any, Callable[..., Any]] = {
    **default_collate_fn_map,
    torch.Tensor: _stack,
    CollatedBatch: _collated,
    str: _listed,
}
default_collate_fn_map.setdefault(CollatedBatch, _collated)
