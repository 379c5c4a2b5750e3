"""Windows of pixels in device memory, gathered, cropped, padded and scaled into a batch.

`crop_with_torch` is the reference implementation with torch operations for any device.
`omearrow_ds.dataset.windows_kernel` uses one kernel, and `omearrow_ds.dataset.cuda.device_cropper` chooses one of them.
Results are bit-identical to NumPy on the CPU: both divide in float32 with IEEE 754 rounding. So a divisor is always a
tensor on the device: for a Python number, torch multiplies by the reciprocal on CUDA, which rounds differently.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from omearrow_ds.axes import AXES, Cut, SampleAxes
from omearrow_ds.dataset.crop_boxes import CropWindows, shown_indices
from omearrow_ds.kernels.scaling import Array, Divisor, Scaling
from omearrow_ds.storage.extents import Shape

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}  # Torch cannot gather these unsigned dtypes.
_LARGEST_ALIGNMENT = 16


def to_device(array: Array, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, in the C order that the kernel requires."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


class SampleLayout(NamedTuple):
    """Positions of a sample's pixels in stored fields, as offsets and strides in units of pixels."""

    field_step: int  # Stride of stored fields.
    planes: Array  # (P, 2) int64: offset of each plane (T, C, Z) of a sample, in its field and in the sample.
    # (H,) and (W,) int64: offset of each row that a sample may show in its plane, and of each column in its row.
    rows: Array
    columns: Array
    shape: Shape  # Shape of a sample, in the order of its axes.
    lengths: Shape  # Lengths and strides of a sample along (T, C, Z, Y, X).
    steps: tuple[int, ...]
    pad: str = "constant"

    @classmethod
    def of(cls, stored: Shape, steps: Sequence[int], cut: Cut, axes: str, crops: CropWindows | None = None) -> Self:
        """Return the layout of samples with ``axes`` of fields of shape ``stored`` and strides ``steps`` in pixels.

        ``cut`` is the region of a field that a sample may show, with all axes, and ``crops`` are windows of one size.
        """
        window, pad = (None, "constant") if crops is None else (crops.box_size, crops.pad)
        indices = zip(shown_indices(cut, stored), steps, strict=True)
        *offsets, rows, columns = [index.astype(np.int64) * step for index, step in indices]
        lengths = (*map(len, offsets), *(window or (len(rows), len(columns))))
        shape = tuple(lengths[AXES.index(axis)] for axis in axes)
        sample_steps = _contiguous_steps(shape, axes)
        in_sample = [np.arange(length) * step for length, step in zip(lengths[:3], sample_steps, strict=False)]
        planes = [functools.reduce(np.add.outer, parts).ravel() for parts in (offsets, in_sample)]
        table = np.stack(planes, axis=1).astype(np.int64)
        return cls(math.prod(stored), table, rows, columns, shape, lengths, sample_steps, pad)

    @classmethod
    def of_samples(cls, shape: Shape, axes: str) -> Self:
        lengths = tuple(shape[axes.index(axis)] if axis in axes else 1 for axis in AXES)
        return cls.of(lengths, _contiguous_steps(shape, axes), SampleAxes(AXES).cut(lengths, "samples"), axes)


def _contiguous_steps(shape: Sequence[int], axes: str) -> tuple[int, ...]:
    """Return the strides of a sample along (T, C, Z, Y, X) in pixels, 0 for missing axes."""
    return tuple(math.prod(shape[axes.index(axis) + 1 :]) if axis in axes else 0 for axis in AXES)


class DeviceScaling(NamedTuple):
    """Arrays for (pixel / illumination - offset) / divisor in float32; without ``factors``, pixels are not scaled."""

    dtype: torch.dtype  # Samples have this dtype.
    factors: Tensor | None = None  # (G, P, 2) float32: offset and divisor per group of fields and plane.
    illumination: Tensor | None = None  # (G, P, H, W) float32
    clip: bool = False  # Whether values are clipped to [0, 1].
    groups: Tensor | None = None  # (N,) int64, the group of each field; None for one group.

    @classmethod
    def of(
        cls, divisors: Sequence[Divisor], groups: Array | None, field: Shape, dtype: torch.dtype, device: torch.device
    ) -> DeviceScaling:
        if divisors[0] is None:
            return cls(dtype)
        scalings = [item if isinstance(item, Scaling) else Scaling(None, None, item, clip=False) for item in divisors]
        factors, functions, clips = zip(*(scaling.by_plane(field) for scaling in scalings), strict=True)
        illumination = None if functions[0] is None else to_device(np.stack(functions), device)
        group_of = None if groups is None else to_device(groups.astype(np.int64), device)
        return cls(dtype, to_device(np.stack(factors), device), illumination, clips[0], group_of)


def crop_with_torch(
    source: Tensor,
    out: Tensor,
    layout: SampleLayout,
    scales: DeviceScaling,
    positions: Tensor | None = None,
    boxes: Tensor | None = None,
) -> None:
    """Write windows to ``out``, (n, *shape) of the layout, with torch operations; ``source`` is flat.

    Windows are the rows ``positions`` of ``boxes``, (M, 3) int64 of field, top and left, or all rows. Without
    ``boxes``, they are whole fields, and positions are field indices; without both, all fields.
    """
    device = source.device
    if boxes is not None:
        boxes = boxes if positions is None else boxes[positions]
        fields, firsts = boxes[:, 0], boxes[:, 1:]
    else:
        fields = torch.arange(len(out), device=device) if positions is None else positions
        firsts = torch.zeros((1, 2), dtype=torch.int64, device=device)
    planes, rows, columns = (to_device(table, device) for table in (layout.planes[:, 0], layout.rows, layout.columns))
    sides = []
    for first, length, size in zip(firsts.T, layout.lengths[3:], (len(rows), len(columns)), strict=True):
        indices = first[:, None] + torch.arange(length, device=device)
        if layout.pad == "reflect" and size > 1:
            indices = indices.remainder(2 * (size - 1))
            indices = torch.where(indices < size, indices, 2 * (size - 1) - indices)
        sides.append(indices)
    box_rows, box_columns = sides  # Some may be out of range.
    row, column = box_rows.clamp(0, len(rows) - 1), box_columns.clamp(0, len(columns) - 1)
    in_plane = rows[row][:, None, :, None] + columns[column][:, None, None, :]
    index = (fields * layout.field_step)[:, None, None, None] + planes[None, :, None, None] + in_plane
    pixels = source.view(_SIGNED.get(source.dtype, source.dtype))[index]
    if scales.dtype != source.dtype or scales.factors is not None:
        pixels = _scaled(pixels.view(source.dtype), scales, fields, row, column)
    if boxes is not None and layout.pad == "constant":
        is_outside = (box_rows != row)[:, None, :, None] | (box_columns != column)[:, None, None, :]
        pixels = pixels.masked_fill(is_outside, 0)
    if pixels.dtype != out.dtype:
        pixels = pixels.view(out.dtype)
    lengths = (len(out), *layout.lengths)
    out.as_strided(lengths, (math.prod(layout.shape), *layout.steps)).copy_(pixels.view(lengths))


def _scaled(pixels: Tensor, scales: DeviceScaling, fields: Tensor, row: Tensor, column: Tensor) -> Tensor:
    value = pixels.to(torch.float32)
    if scales.factors is None:
        return value
    group = torch.zeros_like(fields) if scales.groups is None else scales.groups[fields]
    if scales.illumination is not None:
        plane = torch.arange(value.shape[1], device=value.device)[None, :, None, None]
        value /= scales.illumination[group[:, None, None, None], plane, row[:, None, :, None], column[:, None, None, :]]
    factors = scales.factors[group]
    value -= factors[:, :, 0, None, None]
    value /= factors[:, :, 1, None, None]
    if scales.clip:  # Like NumPy's clip, this keeps NaN.
        value = value.masked_fill(value <= 0, 0).masked_fill_(value > 1, 1)
    return value


class KernelLayout(NamedTuple):
    """Layout for the kernel, with a constant stride of rows and of columns."""

    planes: Tensor
    steps: list[int]  # Strides of rows and of columns.
    alignments: list[int]  # Common divisors of the offsets in fields and in samples.
    is_whole: bool  # Whether windows are whole contiguous planes.


def kernel_layout(layout: SampleLayout, device: torch.device) -> KernelLayout | None:
    """Return the layout for the kernel, or None if its strides vary or fields have 2**31 pixels or more."""
    sides, size = (layout.rows, layout.columns), math.prod(layout.shape)
    steps = [int(offsets[1] - offsets[0]) if len(offsets) > 1 else 0 for offsets in sides]
    is_even = all((np.diff(offsets) == step).all() for offsets, step in zip(sides, steps, strict=True))
    if not is_even or max(layout.field_step, size) >= 2**31:
        return None
    planes = layout.planes + np.array([layout.rows[0] + layout.columns[0], 0])
    height, width = map(len, sides)
    alignments = [
        math.gcd(_LARGEST_ALIGNMENT, step, *planes[:, side].tolist())
        for side, step in enumerate((layout.field_step, size))
    ]
    is_whole = steps == [width, 1] == [*layout.steps[3:]] and layout.lengths[3:] == (height, width)
    return KernelLayout(to_device(planes, device), steps, alignments, is_whole)
