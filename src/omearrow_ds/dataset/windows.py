"""Windows of pixels in device memory, gathered, cropped, padded and scaled into a batch.

`crop_with_torch` is the reference implementation with torch operations for any device.
`omearrow_ds.dataset.windows_kernel` uses one kernel, and `omearrow_ds.dataset.cuda.DeviceCropper` chooses one of them.
Results are bit-identical to NumPy on the CPU: both divide in float32 with IEEE 754 rounding. So a divisor is always a
tensor on the device: for a Python number, torch multiplies by the reciprocal on CUDA, which rounds differently.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from omearrow_ds.axes import AXES, Cut, SampleAxes
from omearrow_ds.dataset.crop_boxes import shown_indices
from omearrow_ds.kernels.scaling import Divisor, Scaling

Array = np.ndarray[Any, Any]
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}  # Torch cannot gather these unsigned dtypes.
_LARGEST_ALIGNMENT = 16


def to(array: Array, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, in the C order that the kernel requires."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


class SampleLayout(NamedTuple):
    """Positions of a sample's pixels in stored fields, as offsets and strides in units of pixels."""

    field_step: int  # Stride of stored fields.
    planes: Array  # (P, 2) int64: offset of each plane (T, C, Z) of a sample, in its field and in the sample.
    # (H,) and (W,) int64: offset of each row that a sample may show in its plane, and of each column in its row.
    rows: Array
    columns: Array
    # Sample shape in the order of its axes, and its (height, width).
    shape: tuple[int, ...]
    window: tuple[int, int]
    # Lengths and strides of a sample along (T, C, Z, Y, X).
    lengths: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(
        cls, stored: Sequence[int], steps: Sequence[int], cut: Cut, axes: str, window: tuple[int, int] | None = None
    ) -> SampleLayout:
        """Return the layout of samples with ``axes`` of fields of shape ``stored`` and strides ``steps`` in pixels.

        ``cut`` is the region of a field that a sample may show, with all axes, and ``window`` the (height, width) of
        samples that are windows of this region.
        """
        indices = shown_indices(cut, stored)
        offsets = [index.astype(np.int64) * step for index, step in zip(indices, steps, strict=True)]
        height, width = window or (len(offsets[3]), len(offsets[4]))
        lengths = (*map(len, offsets[:3]), height, width)
        shape = tuple(lengths[AXES.index(axis)] for axis in axes)
        of_sample = _contiguous_steps(shape, axes)
        in_field = functools.reduce(np.add.outer, offsets[:3]).ravel()
        in_sample = functools.reduce(
            np.add.outer, [np.arange(n) * step for n, step in zip(lengths[:3], of_sample, strict=False)]
        ).ravel()
        planes = np.stack([in_field, in_sample], axis=1).astype(np.int64)
        return cls(math.prod(stored), planes, offsets[3], offsets[4], shape, (height, width), lengths, of_sample)

    @classmethod
    def of_samples(cls, shape: Sequence[int], axes: str) -> SampleLayout:
        lengths = tuple(shape[axes.index(axis)] if axis in axes else 1 for axis in AXES)
        whole = SampleAxes(AXES).cut(lengths, "samples")
        return cls.of(lengths, _contiguous_steps(shape, axes), whole, axes)


def _contiguous_steps(shape: Sequence[int], axes: str) -> tuple[int, ...]:
    """Return the strides of a sample along (T, C, Z, Y, X) in pixels, 0 for missing axes."""
    return tuple(math.prod(shape[axes.index(axis) + 1 :]) if axis in axes else 0 for axis in AXES)


class DeviceScaling(NamedTuple):
    """Arrays for (pixel / illumination - offset) / divisor in float32; without ``factors``, pixels are not scaled."""

    dtype: torch.dtype  # Samples have this dtype.
    factors: torch.Tensor | None = None  # (G, P, 2) float32: offset and divisor per group of fields and plane.
    illumination: torch.Tensor | None = None  # (G, P, H, W) float32
    clip: bool = False  # Whether values are clipped to [0, 1].
    groups: torch.Tensor | None = None  # (N,) int64, the group of each field; None for one group.

    @classmethod
    def of(
        cls,
        divisors: Sequence[Divisor],
        groups: Array | None,
        field: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> DeviceScaling:
        if divisors[0] is None:
            return cls(dtype)
        planes = math.prod(field[:3])
        factors, illuminations, clip = [], [], False
        for divisor in divisors:
            if isinstance(divisor, Scaling):
                of_planes, illumination, clip = divisor.by_plane(field)
                factors.append(of_planes)
                illuminations += [] if illumination is None else [illumination]
            else:
                factors.append(np.broadcast_to(np.array([0, divisor], np.float32), (planes, 2)))
        lit = to(np.stack(illuminations), device) if illuminations else None
        number = None if groups is None else to(groups.astype(np.int64), device)
        return cls(dtype, to(np.stack(factors), device), lit, clip, number)


class DeviceCropBoxes(NamedTuple):
    """Crop boxes on a device: the rows ``positions`` of ``boxes``, (M, 3) int64 of field, top and left.

    Without ``boxes``, windows are whole fields, and positions are field indices; without both, all fields.
    """

    positions: torch.Tensor | None = None
    boxes: torch.Tensor | None = None
    pad: str = "constant"

    def located(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the field index of each window, and the top and left of each window as (n, 2)."""
        if self.boxes is None:
            return self.positions, None
        boxes = self.boxes if self.positions is None else self.boxes[self.positions]
        return boxes[:, 0], boxes[:, 1:]


def crop_with_torch(
    source: torch.Tensor, out: torch.Tensor, layout: SampleLayout, scales: DeviceScaling, windows: DeviceCropBoxes
) -> None:
    """Write windows to ``out``, (n, *shape) of the layout, with torch operations; ``source`` is flat."""
    device = source.device
    fields, corners = windows.located()
    fields = torch.arange(len(out), device=device) if fields is None else fields
    planes, rows, columns = (to(table, device) for table in (layout.planes[:, 0], layout.rows, layout.columns))
    firsts = torch.zeros((1, 2), dtype=torch.int64, device=device) if corners is None else corners
    box_rows = _padded_indices(firsts[:, 0], layout.window[0], len(rows), windows.pad)
    box_columns = _padded_indices(firsts[:, 1], layout.window[1], len(columns), windows.pad)
    row, column = box_rows.clamp(0, len(rows) - 1), box_columns.clamp(0, len(columns) - 1)
    in_plane = rows[row][:, None, :, None] + columns[column][:, None, None, :]
    index = (fields * layout.field_step)[:, None, None, None] + planes[None, :, None, None] + in_plane
    signed = source.view(_SIGNED.get(source.dtype, source.dtype))
    pixels = signed[index]
    if scales.dtype != source.dtype or scales.factors is not None:
        pixels = _scaled(pixels.view(source.dtype), scales, fields, row, column)
    if corners is not None and windows.pad == "constant":
        is_outside = (box_rows != row)[:, None, :, None] | (box_columns != column)[:, None, None, :]
        pixels = pixels.masked_fill(is_outside, 0)
    if pixels.dtype != out.dtype:
        pixels = pixels.view(out.dtype)
    lengths = (len(out), *layout.lengths)
    out.as_strided(lengths, (math.prod(layout.shape), *layout.steps)).copy_(pixels.view(lengths))


def _padded_indices(first: torch.Tensor, length: int, size: int, pad: str) -> torch.Tensor:
    """Return the rows or columns of boxes, (n, length), reflected for ``pad="reflect"``; some may be out of range."""
    indices = first[:, None] + torch.arange(length, device=first.device)
    if pad == "reflect" and size > 1:
        indices = indices.remainder(2 * (size - 1))
        indices = torch.where(indices < size, indices, 2 * (size - 1) - indices)
    return indices


def _scaled(
    pixels: torch.Tensor, scales: DeviceScaling, fields: torch.Tensor, row: torch.Tensor, column: torch.Tensor
) -> torch.Tensor:
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

    planes: torch.Tensor
    steps: tuple[int, int]
    aligned: tuple[int, int]
    whole: bool


def fused(layout: SampleLayout, device: torch.device) -> KernelLayout | None:
    """Return the layout for the kernel, or None if its strides vary or fields have 2**31 pixels or more."""
    steps = [int(offsets[1] - offsets[0]) if len(offsets) > 1 else 0 for offsets in (layout.rows, layout.columns)]
    even = all(
        (np.diff(offsets) == step).all() for offsets, step in zip((layout.rows, layout.columns), steps, strict=True)
    )
    size = math.prod(layout.shape)
    if not even or max(layout.field_step, size) >= 2**31:
        return None
    planes = layout.planes + np.array([layout.rows[0] + layout.columns[0], 0])
    height, width = len(layout.rows), len(layout.columns)
    flat = (height == 1 or steps[0] == width) and (width == 1 or steps[1] == 1)
    flat = flat and (height == 1 or layout.steps[3] == width) and (width == 1 or layout.steps[4] == 1)
    aligned = [
        math.gcd(_LARGEST_ALIGNMENT, step, *map(int, planes[:, side]))
        for side, step in enumerate((layout.field_step, size))
    ]
    whole = flat and layout.window == (height, width)
    return KernelLayout(to(planes, device), (steps[0], steps[1]), (aligned[0], aligned[1]), whole)
