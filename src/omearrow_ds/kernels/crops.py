"""Windows of fields, padded and scaled into a batch in one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from omearrow_ds.kernels.compiled import CROP_WEIGHT, compiled, worth
from omearrow_ds.kernels.scaling import COMPILED, FLOAT32, Array, Divisor, Scaling, first_of, scale
from omearrow_ds.kernels.stacks import Stacks, strided_groups

PADS = ("constant", "edge", "reflect")
_NO_ILLUM = np.empty(0, np.float32)


def crops(stacks: Stacks, boxes: Sequence[Array], out: Array, divisor: Divisor = None, pad: str = "constant") -> None:
    """Write scaled windows of fields (N, T, C, Z, Y, X) to ``out`` (n, T, C, Z, height, width), of any strides.

    ``boxes`` are the field of each window, and the row and column of its first pixel, which may be outside the field.
    The arrays of a `Scaling` broadcast to a field. ``pad`` chooses the values outside the field: ``"constant"`` writes
    0 to ``out``; ``"edge"`` and ``"reflect"`` pad scaled fields like `numpy.pad`. Raises `IndexError` if a field does
    not exist.
    """
    fields, shape = boxes[0], stacks.like.shape[1:]
    if not out.size:
        return
    if 0 in shape or fields.min() < 0 or fields.max() >= len(stacks):
        limits = f"fields {fields.min()} to {fields.max()}"
        raise IndexError(f"crops in {limits} exceed the {len(stacks)} fields of shape {shape}")
    if not (worth(CROP_WEIGHT * out.nbytes) and _by_loop(stacks, boxes, out, divisor, PADS.index(pad))):
        for index, (field, top, left) in enumerate(zip(*(values.tolist() for values in boxes), strict=True)):
            crop(stacks[field], top, left, out[index], divisor, pad)


def crop(field: Array, top: int, left: int, out: Array, divisor: Divisor, pad: str) -> None:
    """Write one scaled window of a field (T, C, Z, Y, X) to ``out``; see `crops`."""
    (size_y, size_x), (height, width) = field.shape[-2:], out.shape[-2:]
    rows, columns = places_of(top, height, size_y, pad), places_of(left, width, size_x, pad)
    if pad == "constant" and not (isinstance(rows, slice) and isinstance(columns, slice)):
        out[...] = 0
        y0, x0 = max(top, 0), max(left, 0)
        rows, columns = slice(y0, max(y0, min(top + height, size_y))), slice(x0, max(x0, min(left + width, size_x)))
        out = out[..., y0 - top : rows.stop - top, x0 - left : columns.stop - left]
    scale(
        field[..., rows, :][..., columns], divisor.at(rows, columns) if isinstance(divisor, Scaling) else divisor, out
    )


def places_of(first: int, length: int, size: int, pad: str) -> slice | Array:
    """Return the indices of the pixels that a window shows along an axis of ``size`` pixels."""
    if first >= 0 and first + length <= size:
        return slice(first, first + length)
    indices = np.arange(first, first + length)
    if pad == "reflect" and size > 1:
        indices %= 2 * (size - 1)
        return np.where(indices < size, indices, 2 * (size - 1) - indices)
    return np.clip(indices, 0, size - 1)


def _by_loop(fields: Stacks, windows: Sequence[Array], out: Array, divisor: Divisor, pad: int) -> bool:
    """Write all windows with the compiled loop, by field or by plane; return False if neither is possible."""
    is_written = False
    for origin, which, origins in fields.strided_groups(windows[0]):
        corners = [values[which] for values in windows[1:]]
        if not windows_by_loop(origin, [origins, *corners], out, divisor, pad, which):
            return False
        is_written = True
    return is_written or _plane_by_plane(fields, windows, out, divisor, pad)


def _plane_by_plane(fields: Stacks, boxes: Sequence[Array], out: Array, divisor: Divisor, pad: int) -> bool:
    """Write all windows plane by plane, at any byte offset; return False if a loop cannot iterate over the rows."""
    steps, size = fields.like.strides, fields.like.itemsize
    uneven = not fields.has_equal_strides or any(stride % size for stride in steps[4:])
    if uneven or isinstance(divisor, Scaling) or not out.flags.c_contiguous:
        return False
    offsets = np.indices(fields.like.shape[1:4]).reshape(3, -1).T @ np.array(steps[1:4])
    located = fields.located(boxes[0])  # Keeps the memory.
    planes, plane = out.reshape(-1, 1, 1, 1, *out.shape[-2:]), fields.like[:1, 0, 0, 0][:, None, None, None]
    for origin, which, origins in strided_groups((located.addresses[:, None] + offsets).ravel(), plane):
        group = [origins, *(values[which // len(offsets)] for values in boxes[1:])]
        if not windows_by_loop(origin, group, planes, divisor, pad, which):
            return False
    return True


@functools.lru_cache(256)
def _plan(
    stored: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_dtype: np.dtype[Any],
    window: tuple[int, ...],
    out_strides: tuple[int, ...],
    illumination_steps: tuple[int, ...],
    *,
    copied: bool,
    aligned: bool,
) -> tuple[Array, tuple[str, ...]] | None:
    """Return sizes, strides and plane offsets in elements, and the types of the loop; None if no loop supports them."""
    if stored not in COMPILED or out_dtype != (stored if copied else FLOAT32):
        return None
    if any(stride % stored.itemsize for stride in strides) or any(
        stride % out_dtype.itemsize for stride in out_strides
    ):
        return None
    # s: stored, o: out, i: illumination; n, p, y, x: strides of windows, planes (T, C, Z), rows, columns.
    _, *sp, sy, sx = (stride // stored.itemsize for stride in strides)
    on, *op, oy, ox = (stride // out_dtype.itemsize for stride in out_strides)
    *ip, iy, ix = illumination_steps
    planes = np.indices(shape[1:4]).reshape(3, -1).T @ np.array([sp, op, ip]).T  # The offsets in s, o and i per plane.
    table = np.array([*shape[-2:], *window[-2:], sy, sx, on, oy, ox, iy, ix, *planes.ravel()], np.int64)
    pixels, factors = f"{stored.name} {'r' if aligned else 'unaligned'}", "none" if copied else "float32 r"
    return table, (pixels, f"{out_dtype.name} w", *["int64 r"] * 5, factors, "float32 r", "int64")


def assemble(regions: Sequence[Array], into: Sequence[int], out: Array, divisor: Divisor = None) -> None:
    """Scale regions (T, C, Z, height, width) of one dtype, and write each to its position ``into`` in ``out``.

    See `crops`; a `Scaling` must have the same values for all pixels of a plane.
    """
    left = list(range(len(regions)))
    if regions and worth(CROP_WEIGHT * out.nbytes):
        addresses, rows = np.array([region.__array_interface__["data"][0] for region in regions]), np.array(into)
        alike: dict[tuple[int, ...], list[int]] = {}  # Regions that one loop can process.
        for number, region in enumerate(regions):
            alike.setdefault(region.strides, []).append(number)
        left = []
        for numbers in map(np.array, alike.values()):
            for origin, which, origins in strided_groups(addresses[numbers], regions[numbers[0]][None]):
                some, corner = numbers[which], np.zeros(len(origins), np.int64)
                if not windows_by_loop(origin, [origins, corner, corner], out, divisor, 0, rows[some]):
                    left += some.tolist()
    for number in left:
        scale(regions[number], divisor, out[into[number]])


def windows_by_loop(stack: Array, boxes: list[Array], out: Array, divisor: Divisor, pad: int, into: Array) -> bool:
    """Write windows with the compiled loop; return False if numba is missing or the loop cannot use these arrays.

    ``boxes`` are the offset of each window's field from ``stack`` in elements, and its row and column in the field;
    ``into`` is its position in ``out``.
    """
    if not out.flags.aligned:
        return False
    factors, illumination = None, _NO_ILLUM
    illumination_steps: tuple[int, ...] = (0,) * 5
    copied = divisor is None and out.dtype == stack.dtype
    if isinstance(divisor, Scaling):
        flat = divisor.flat(stack.shape[1:])
        if flat is None:
            return False
        factors, illumination, illumination_steps = flat
    elif not copied:
        factors = np.array([1 if divisor is None else divisor, -np.inf, np.inf], np.float32)
    stored, samples = (stack.dtype, stack.shape, stack.strides), (out.dtype, out.shape[1:], out.strides)
    plan = _plan(*stored, *samples, illumination_steps, copied=copied, aligned=bool(stack.flags.aligned))
    loop = None if plan is None else compiled(_windows, plan[1])
    if plan is None or loop is None:
        return False
    loop(first_of(stack), first_of(out), into, *boxes, plan[0], factors, illumination, pad)
    return True


def _windows(  # noqa: PLR0912, PLR0915  # one loop nest, compiled
    source: Any,
    out: Any,
    into: Any,
    origins: Any,
    tops: Any,
    lefts: Any,
    table: Any,
    factors: Any,
    illumination: Any,
    pad: Any,
) -> None:
    height, width, window_height, window_width = table[0], table[1], table[2], table[3]
    sy, sx, on, oy, ox, iy, ix = table[4], table[5], table[6], table[7], table[8], table[9], table[10]
    planes = (len(table) - 11) // 3
    if factors is not None:
        divisor, least, largest, offset = factors[0], factors[1], factors[2], np.float32(0)
        plain, lit = len(factors) == 3, len(illumination) > 0
    from_ = np.empty(window_height + window_width, np.int64)  # Field row or column per window row or column; -1: none.
    for number in range(len(origins)):
        # Rows and columns of the window outside the field map to none, the nearest or the mirrored one of the field.
        for pixel in range(window_height + window_width):
            down = pixel < window_height
            index = tops[number] + pixel if down else lefts[number] + pixel - window_height
            size = height if down else width
            if index < 0 or index >= size:
                if pad == 0:
                    index = -1
                elif pad == 1 or size == 1:
                    index = 0 if index < 0 else size - 1
                else:
                    index %= 2 * (size - 1)
                    index = index if index < size else 2 * (size - 1) - index
            from_[pixel] = index
        # Columns [first, last) are contiguous in field and window, so the compiler vectorizes the loops over them.
        # All other columns, outside the field or strided, are copied one by one afterwards.
        left = lefts[number]
        first, last = 0, 0
        if sx == 1 and ox == 1 and (ix == 1 or len(illumination) == 0):
            first = min(max(-left, 0), window_width)
            last = max(min(width - left, window_width), first)
        for plane in range(planes):
            s_plane = origins[number] + table[11 + 3 * plane]
            o_plane = on * into[number] + table[12 + 3 * plane]
            i_plane = table[13 + 3 * plane]
            if factors is not None and not plain:
                offset, divisor = factors[3 + 2 * plane], factors[4 + 2 * plane]
            for y in range(window_height):
                row, o = from_[y], o_plane + oy * y
                if row < 0:
                    for x in range(window_width):
                        out[np.uintp(o + ox * x)] = 0
                    continue
                s, i = s_plane + sy * row, i_plane + iy * row
                if factors is None:
                    for x in range(first, last):
                        out[np.uintp(o + x)] = source[np.uintp(s + left + x)]
                elif lit:
                    for x in range(first, last):
                        value = np.float32(source[np.uintp(s + left + x)]) / illumination[np.uintp(i + left + x)]
                        value = (value - offset) / divisor
                        value = least if value <= least else value
                        out[np.uintp(o + x)] = largest if value > largest else value
                elif plain:
                    for x in range(first, last):
                        out[np.uintp(o + x)] = np.float32(source[np.uintp(s + left + x)]) / divisor
                else:
                    for x in range(first, last):
                        value = (np.float32(source[np.uintp(s + left + x)]) - offset) / divisor
                        value = least if value <= least else value
                        out[np.uintp(o + x)] = largest if value > largest else value
                for outer in range(window_width - last + first):
                    x = outer if outer < first else last + outer - first
                    column = from_[window_height + x]
                    if column < 0:
                        out[np.uintp(o + ox * x)] = 0
                    elif factors is None:
                        out[np.uintp(o + ox * x)] = source[np.uintp(s + sx * column)]
                    else:
                        value = np.float32(source[np.uintp(s + sx * column)])
                        if lit:
                            value /= illumination[np.uintp(i + ix * column)]
                        value = (value - offset) / divisor
                        value = least if value <= least else value
                        out[np.uintp(o + ox * x)] = largest if value > largest else value
