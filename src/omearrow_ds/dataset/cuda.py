"""`DeviceSamples`: all stored pixels of a collection in device memory, and samples created there.

Each rank has a separate copy of all images on its device, since any of them may be requested. Decoded pixels are copied
in pieces through pinned buffers, so CPU memory never holds all of them.
"""

from __future__ import annotations

import functools
import subprocess
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omearrow_ds.dataset.crop_boxes import CropWindows
from omearrow_ds.dataset.shared_memory import BatchBufferPool, batch_array
from omearrow_ds.dataset.windows import DeviceScaling, SampleLayout, crop_with_torch, kernel_layout, to_device
from omearrow_ds.errors import ArgumentError, MemoryLimitError
from omearrow_ds.storage.extents import Shape
from omearrow_ds.storage.formats._base import Array, Block, Done

Create = Callable[..., Tensor]
_PIECE_BYTES = 32 * 2**20


def device_of(preload: Any) -> torch.device | None:
    """Return the CUDA device that ``preload=`` names, with its index, or None if ``preload`` is not a device."""
    if not isinstance(preload, torch.device) and not (isinstance(preload, str) and preload.startswith("cuda")):
        return None
    problem = functools.partial(ArgumentError, option="preload", value=preload)
    try:
        device = torch.device(preload)
    except RuntimeError as error:
        raise problem(str(error).splitlines()[0], remedy="pass a device such as 'cuda:1'") from None
    if device.type != "cuda":
        raise problem("not a CUDA device", remedy="pass 'cuda', or True for the CPU")
    if not torch.cuda.is_available():
        raise problem("torch finds no CUDA device", remedy="pass preload=True")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise problem(f"torch finds {count} CUDA devices", remedy="pass cuda:0 or another of these")
    return torch.device(device.type, index)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, including unused memory that torch has reserved."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def check_room(path: object, device: torch.device, needed_bytes: int, max_bytes: int | None) -> None:
    free = free_bytes(device)
    limit, limit_name = (free // 2, "half of the free device memory") if max_bytes is None else (max_bytes, "max_bytes")
    if limit > free:
        limit, limit_name = free, "the free device memory, which is less than max_bytes"
    if needed_bytes > limit:
        problem = f"preloading on {device} needs {needed_bytes:,} bytes but the limit is {limit:,} ({limit_name})"
        remedy = "raise max_bytes, or preload on the CPU: preload=True, and device='cuda' for the loader"
        raise MemoryLimitError(f"{path}: {problem}; {remedy}")


class DeviceIndices(list[int]):
    """Indices of a batch, with their positions in the collection on a device; one transfer sends a whole epoch."""

    def __init__(self, indices: Iterable[int], device_positions: Tensor) -> None:
        super().__init__(indices)
        self.on_device = device_positions


def device_cropper(layout: SampleLayout, scales: DeviceScaling, device: torch.device) -> Create:
    """Return a function that creates a batch on a device from flat pixels; see `crop_with_torch` for its windows."""
    crop: Callable[..., None] = crop_with_torch
    plan = kernel_layout(layout, device) if triton_kernel_works(device) else None
    if plan is not None:
        from omearrow_ds.dataset.windows_kernel import launch  # noqa: PLC0415  # Triton is optional.

        crop = functools.partial(launch, plan=plan)

    def create(source: Tensor, count: int, positions: Tensor | None = None, boxes: Tensor | None = None) -> Tensor:
        out = torch.empty((count, *layout.shape), dtype=scales.dtype, device=device)
        if out.numel():
            crop(source, out, layout, scales, positions, boxes)
        return out

    return create


@functools.cache
def triton_kernel_works(device: torch.device) -> bool:
    """Whether the Triton kernel works on a device, which requires a driver and a C compiler; tested once per device."""
    if device.type != "cuda":
        return False
    try:
        from omearrow_ds.dataset.windows_kernel import works  # noqa: PLC0415

        why = None if works(device) else "its kernel and torch returned different pixels"
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        msg = f"{device}: Triton is unusable ({why}); torch creates the samples instead, which is slower"
        warnings.warn(msg, UserWarning, stacklevel=2)
    return why is None


class DeviceSamples:
    """Samples of images in device memory.

    ``pixels`` (N, T, C, Z, Y, X) are the contiguous stored pixels on the device, and ``create`` is the `device_cropper`
    for them. ``crops`` are boxes of one size, or None for whole images.
    """

    def __init__(self, pixels: Tensor, create: Create, crops: CropWindows | None) -> None:
        self.device, self._pixels, self._flat = pixels.device, pixels, pixels.reshape(-1)
        self._create, self._crops = create, crops
        self._boxes = None if crops is None or crops.ranges is not None else self._sent_boxes(crops.corners)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # Samples may be requested in another stream.

    def _sent_boxes(self, boxes: Array) -> Tensor:
        return to_device(boxes[:3].T.astype(np.int64), self.device)

    def batch(self, positions: Sequence[int]) -> Tensor:
        numbers, boxes = None, self._boxes
        if self._crops is not None and boxes is None:
            boxes = self._sent_boxes(self._crops.take(positions))  # Random.
        elif isinstance(positions, DeviceIndices):
            numbers = positions.on_device
        else:
            numbers = torch.tensor(positions, dtype=torch.int64).to(self.device)
        return self._create(self._flat, len(positions), numbers, boxes)

    def images(self, positions: Sequence[int]) -> list[Array]:
        return [self._pixels[position].cpu().numpy() for position in positions]


def sent(
    blocks: Iterable[Block], shape: Shape, dtype: np.dtype[Any], device: torch.device, done: Done | None
) -> Tensor:
    """Copy blocks (first index, images) to one tensor on a device, each piece while the next one is decoded."""
    native = dtype.newbyteorder("=")
    device_pixels = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, native)).dtype, device=device)
    pool = BatchBufferPool.pinned() if device.type == "cuda" else BatchBufferPool()
    step = max(1, _PIECE_BYTES // max(1, device_pixels[:1].nbytes))
    for start, images in blocks:
        for first in range(0, len(images), step):
            part = images[first : first + step]
            piece = batch_array((len(part), *shape[1:]), native, pool)
            for target, image in zip(piece, part, strict=True):
                target[...] = image
            tensor = torch.from_numpy(piece)
            device_pixels[start + first : start + first + len(part)].copy_(tensor, non_blocking=True)
            if device.type == "cuda":
                pool.record_copy(tensor, torch.cuda.current_stream(device))
        if done is not None:
            done(start, start + len(images))
    return device_pixels
