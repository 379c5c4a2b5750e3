"""`omearrow_ds.dataset.windows.crop_with_torch` as one Triton kernel. Torch's CUDA builds include Triton."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from omearrow_ds.dataset.windows import (
    DeviceCropBoxes,
    DeviceScaling,
    KernelLayout,
    SampleLayout,
    crop_with_torch,
    fused,
)

_BLOCK = 1024  # Pixels per program: 8 per thread, which are 16 bytes of uint16.


@triton.jit  # type: ignore[untyped-decorator]
def _inside(at: tl.tensor, size: tl.constexpr, pad: tl.constexpr) -> tl.tensor:
    """Return the rows or columns that are shown; with constant padding, some may be out of range."""
    if pad == 1:
        at = tl.minimum(tl.maximum(at, 0), size - 1)
    if pad == 2:
        if size == 1:
            at = at * 0
        else:
            at = at % (2 * (size - 1))
            at = tl.where(at < 0, at + 2 * (size - 1), at)
            at = tl.where(at < size, at, 2 * (size - 1) - at)
    return at


@triton.jit  # type: ignore[untyped-decorator]
def _windows(
    source: tl.tensor,
    out: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    planes: tl.tensor,
    groups: tl.tensor,
    factors: tl.tensor,
    illumination: tl.tensor,
    field_step: tl.tensor,
    out_step: tl.tensor,
    plane_count: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    window_height: tl.constexpr,
    window_width: tl.constexpr,
    sy: tl.constexpr,
    sx: tl.constexpr,
    oy: tl.constexpr,
    ox: tl.constexpr,
    source_aligned: tl.constexpr,
    out_aligned: tl.constexpr,
    pad: tl.constexpr,
    positioned: tl.constexpr,
    placed: tl.constexpr,
    grouped: tl.constexpr,
    scaled: tl.constexpr,
    lit: tl.constexpr,
    clip: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write a part of one plane of one window."""
    number = tl.program_id(0)
    window = (number // plane_count).to(tl.int64)
    plane = number % plane_count
    field = window
    if positioned:
        field = tl.load(positions + window)
    if placed:
        place = places + 3 * field
        field = tl.load(place)
        top = tl.load(place + 1).to(tl.int32)
        left = tl.load(place + 2).to(tl.int32)
    first = tl.multiple_of(field * field_step + tl.load(planes + 2 * plane), source_aligned)
    into = tl.multiple_of(window * out_step + tl.load(planes + 2 * plane + 1), out_aligned)
    pixel = tl.program_id(1) * block + tl.arange(0, block)
    there = pixel < window_height * window_width
    kept = there
    y = pixel // window_width
    x = pixel % window_width
    to = pixel
    if not whole:
        to = y * oy + x * ox
    if placed:
        y = _inside(y + top, height, pad)
        x = _inside(x + left, width, pad)
        kept = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    at = pixel
    if placed or not whole:
        at = y * sy + x * sx
    value = tl.load(source + first + at, mask=kept, other=0)
    if scaled != 0:
        value = value.to(tl.float32)
    if scaled == 2:
        plane_of_group = plane.to(tl.int64)
        if grouped:
            plane_of_group += tl.load(groups + field) * plane_count
        if lit:
            light = tl.load(illumination + plane_of_group * (height * width) + y * width + x, mask=kept, other=1)
            value = tl.div_rn(value, light)
        offset = tl.load(factors + 2 * plane_of_group)
        divisor = tl.load(factors + 2 * plane_of_group + 1)
        value = tl.div_rn(value - offset, divisor)
        if clip:
            value = tl.where(value <= 0, 0.0, value)
            value = tl.where(value > 1, 1.0, value)
        if placed:
            value = tl.where(kept, value, 0.0)
    tl.store(out + into + to, value, mask=there)


def launch(
    source: torch.Tensor,
    out: torch.Tensor,
    layout: SampleLayout,
    plan: KernelLayout,
    scales: DeviceScaling,
    windows: DeviceCropBoxes,
    pad: int,
) -> None:
    """Write windows to ``out``, like `crop_with_torch`, in the current stream of the device of ``source``."""
    height, width = layout.window
    size = height * width
    scaled = 0 if scales.dtype == source.dtype and scales.factors is None else 1 if scales.factors is None else 2
    grid = (len(out) * len(layout.planes), triton.cdiv(size, _BLOCK))
    elsewhere = source.device.type == "cuda" and torch.cuda.current_device() != source.device.index
    with torch.cuda.device(source.device) if elsewhere else contextlib.nullcontext():
        _windows[grid](
            source,
            out,
            windows.positions,
            windows.boxes,
            plan.planes,
            scales.groups,
            scales.factors,
            scales.illumination,
            layout.field_step,
            out.stride(0),
            len(layout.planes),
            len(layout.rows),
            len(layout.columns),
            height,
            width,
            *plan.steps,
            *layout.steps[3:],
            *plan.aligned,
            pad,
            windows.positions is not None,
            windows.boxes is not None,
            scales.groups is not None,
            scaled,
            scales.illumination is not None,
            scales.clip,
            plan.whole,
            _BLOCK,
            enable_fp_fusion=False,  # Each step is rounded, as on the CPU.
        )


def works(device: torch.device) -> bool:
    """Whether kernel and torch give equal results on a device; raises RuntimeError if the kernel does not compile."""
    layout = SampleLayout.of_samples((1, 5, 7), "CYX")
    plan = fused(layout, device)
    source = torch.arange(70, dtype=torch.int16, device=device).view(torch.uint16)
    factors = torch.tensor([[[3, 65535]]], dtype=torch.float32, device=device)
    scales, windows = DeviceScaling(torch.float32, factors), DeviceCropBoxes(torch.tensor([1, 0, 1], device=device))
    out, expected = (torch.empty((3, *layout.shape), device=device) for _ in range(2))
    assert plan is not None
    try:
        launch(source, out, layout, plan, scales, windows, 0)
    except (TritonError, TypeError, KeyError) as error:  # KeyError: unknown dtype.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    crop_with_torch(source, expected, layout, scales, windows)
    return bool(torch.equal(out, expected))
