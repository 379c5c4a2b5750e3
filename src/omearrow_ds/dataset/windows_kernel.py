"""`omearrow_ds.dataset.windows.crop_with_torch` as one Triton kernel. Torch's CUDA builds include Triton."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError
from triton.language import constexpr, tensor

from omearrow_ds.dataset.windows import DeviceScaling, KernelLayout, SampleLayout, crop_with_torch, kernel_layout
from omearrow_ds.kernels.crops import PADS

_BLOCK = 1024  # Pixels per program: 8 per thread, which are 16 bytes of uint16.


@triton.jit  # type: ignore[untyped-decorator]
def _padded(indices: tensor, size: constexpr, pad: constexpr) -> tensor:
    """Return the rows or columns that are shown; with constant padding, some may be out of range."""
    if pad == 1:
        indices = tl.minimum(tl.maximum(indices, 0), size - 1)
    if pad == 2:
        if size == 1:
            indices = indices * 0
        else:
            indices = indices % (2 * (size - 1))
            indices = tl.where(indices < 0, indices + 2 * (size - 1), indices)
            indices = tl.where(indices < size, indices, 2 * (size - 1) - indices)
    return indices


@triton.jit  # type: ignore[untyped-decorator]
def _windows(
    source: tensor,
    out: tensor,
    positions: tensor,
    boxes: tensor,
    planes: tensor,
    groups: tensor,
    factors: tensor,
    illumination: tensor,
    field_step: tensor,
    out_step: tensor,
    num_planes: constexpr,
    height: constexpr,
    width: constexpr,
    window_height: constexpr,
    window_width: constexpr,
    row_step: constexpr,
    column_step: constexpr,
    out_row_step: constexpr,
    out_column_step: constexpr,
    source_alignment: constexpr,
    out_alignment: constexpr,
    pad: constexpr,
    clip: constexpr,
    is_whole: constexpr,
    block: constexpr,
) -> None:
    """Write a part of one plane of one window; without factors, pixels are only cast to the dtype of ``out``."""
    window = (tl.program_id(0) // num_planes).to(tl.int64)
    plane = tl.program_id(0) % num_planes
    field = window
    if positions is not None:
        field = tl.load(positions + window)
    if boxes is not None:
        box = boxes + 3 * field
        field = tl.load(box)
        top = tl.load(box + 1).to(tl.int32)
        left = tl.load(box + 2).to(tl.int32)
    source_first = tl.multiple_of(field * field_step + tl.load(planes + 2 * plane), source_alignment)
    out_first = tl.multiple_of(window * out_step + tl.load(planes + 2 * plane + 1), out_alignment)
    pixel = tl.program_id(1) * block + tl.arange(0, block)
    is_in_window = pixel < window_height * window_width
    is_in_field = is_in_window
    y = pixel // window_width
    x = pixel % window_width
    out_offset = pixel
    if not is_whole:
        out_offset = y * out_row_step + x * out_column_step
    if boxes is not None:
        y = _padded(y + top, height, pad)
        x = _padded(x + left, width, pad)
        is_in_field = is_in_window & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    source_offset = pixel
    if boxes is not None or not is_whole:
        source_offset = y * row_step + x * column_step
    value = tl.load(source + source_first + source_offset, mask=is_in_field, other=0)
    if factors is not None:
        value = value.to(tl.float32)
        group_plane = plane.to(tl.int64)
        if groups is not None:
            group_plane += tl.load(groups + field) * num_planes
        if illumination is not None:
            function = illumination + group_plane * (height * width) + y * width + x
            value = tl.div_rn(value, tl.load(function, mask=is_in_field, other=1))
        offset = tl.load(factors + 2 * group_plane)
        divisor = tl.load(factors + 2 * group_plane + 1)
        value = tl.div_rn(value - offset, divisor)
        if clip:
            value = tl.where(value <= 0, 0.0, value)
            value = tl.where(value > 1, 1.0, value)
        if boxes is not None:
            value = tl.where(is_in_field, value, 0.0)
    tl.store(out + out_first + out_offset, value, mask=is_in_window)


def launch(
    source: Tensor,
    out: Tensor,
    layout: SampleLayout,
    scales: DeviceScaling,
    positions: Tensor | None,
    boxes: Tensor | None,
    plan: KernelLayout,
) -> None:
    """Write windows to ``out``, like `crop_with_torch`, in the current stream of the device of ``source``."""
    height, width = layout.lengths[3:]
    tensors = (source, out, positions, boxes, plan.planes, scales.groups, scales.factors, scales.illumination)
    sizes = (layout.field_step, out.stride(0), len(layout.planes), len(layout.rows), len(layout.columns), height, width)
    steps = (*plan.steps, *layout.steps[3:], *plan.alignments)
    pad, grid = PADS.index(layout.pad), (len(out) * len(layout.planes), triton.cdiv(height * width, _BLOCK))
    is_elsewhere = source.device.type == "cuda" and torch.cuda.current_device() != source.device.index
    with torch.cuda.device(source.device) if is_elsewhere else contextlib.nullcontext():
        kernel = _windows[grid]
        # Without fusion, each step is rounded, as on the CPU.
        kernel(*tensors, *sizes, *steps, pad, scales.clip, plan.is_whole, _BLOCK, enable_fp_fusion=False)


def works(device: torch.device) -> bool:
    """Whether kernel and torch give equal results on a device; raises RuntimeError if the kernel does not compile."""
    layout = SampleLayout.of_samples((1, 5, 7), "CYX")
    plan = kernel_layout(layout, device)
    source = torch.arange(70, dtype=torch.int16, device=device).view(torch.uint16)
    scales = DeviceScaling(torch.float32, torch.tensor([[[3, 65535]]], dtype=torch.float32, device=device))
    positions = torch.tensor([1, 0, 1], device=device)
    out, expected = (torch.empty((3, *layout.shape), device=device) for _ in range(2))
    assert plan is not None
    try:
        launch(source, out, layout, scales, positions, None, plan)
    except (TritonError, TypeError, KeyError) as error:  # KeyError: unknown dtype.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    crop_with_torch(source, expected, layout, scales, positions)
    return bool(torch.equal(out, expected))
