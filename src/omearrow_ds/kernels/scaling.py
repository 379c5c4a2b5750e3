"""`scale`: pixels of a sample, divided once or scaled by the steps of a `Scaling`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from omearrow_ds.kernels.compiled import COUNTER, Loop, compiled

Array = np.ndarray[Any, Any]
FLOAT32 = np.dtype(np.float32)
# Arrays of a `Scaling` for compiled loops: float32 divisor, minimum and maximum, then offset and divisor per plane
# (T, C, Z); first value of the illumination function, empty without one, and strides of its other values in elements.
KernelScaling = tuple[Array, Array, tuple[int, ...]]
COMPILED = frozenset(np.dtype(name) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"))  # native


class Scaling:
    """Scaling of pixels to samples: ``(pixels / illumination - offset) / divisor``, clipped to [0, 1] with ``clip``.

    The illumination function is float32 and broadcasts to a sample, the others are values or float32 arrays. None skips
    a step; at least one is not None.
    """

    def __init__(self, illumination: Any, offset: Any, divisor: Any, *, clip: bool) -> None:
        self.illumination, self._offset, self._divisor, self._clip = illumination, offset, divisor, clip
        steps = ((np.true_divide, illumination), (np.subtract, offset), (np.true_divide, divisor))
        self._steps = [(step, value) for step, value in steps if value is not None]
        self._flat: dict[tuple[int, ...], KernelScaling | None] = {}

    def __call__(self, pixels: Array, out: Array) -> None:
        for step, value in self._steps:
            step(pixels, value, out, dtype=FLOAT32, casting="unsafe")
            pixels = out
        if self._clip:
            np.clip(out, 0, 1, out)
            np.add(out, 0, out)  # -0.0 becomes 0.0, as clip does in some versions of NumPy.

    def at(self, rows: Any, columns: Any) -> Scaling:
        """Return the scaling for a region of the image: ``rows`` and ``columns`` of the last two axes."""
        parts = (self.illumination, self._offset, self._divisor)
        illumination, offset, divisor = (None if part is None else _at(part, rows, columns) for part in parts)
        return Scaling(illumination, offset, divisor, clip=self._clip)

    def by_plane(self, shape: tuple[int, ...]) -> tuple[Array, Array | None, bool]:
        """Return offset and divisor per plane (T * C * Z, 2), float32, the illumination function, and `clip`.

        Planes are those of fields of ``shape`` (T, C, Z, Y, X). The illumination function is (T * C * Z, Y, X) or None.
        """
        light = self.illumination
        of_planes = None if light is None else np.broadcast_to(light, shape).reshape(-1, *shape[3:])
        return _per_plane(self._pair(shape)), of_planes, self._clip

    def _pair(self, shape: tuple[int, ...]) -> list[Array]:
        parts = (0 if self._offset is None else self._offset, 1 if self._divisor is None else self._divisor)
        return [np.broadcast_to(np.asarray(part, np.float32), shape) for part in parts]

    def flat(self, shape: tuple[int, ...]) -> KernelScaling | None:
        """Return this scaling as arrays for a compiled loop over fields, or None if no loop supports the scaling."""
        if shape not in self._flat:
            self._flat[shape] = self._flattened(shape)
        return self._flat[shape]

    def _flattened(self, shape: tuple[int, ...]) -> KernelScaling | None:
        pair = self._pair(shape)
        sides = (zip(shape[3:], values.strides[3:], strict=True) for values in pair)
        if any(size > 1 and stride for side in sides for size, stride in side):
            return None
        bounds = (0, 1) if self._clip else (-np.inf, np.inf)
        factors = np.concatenate([[1, *bounds], _per_plane(pair).ravel()]).astype(np.float32)
        if self.illumination is None:
            return factors, np.empty(0, np.float32), (0,) * len(shape)
        light = np.broadcast_to(self.illumination, shape)
        if light.dtype != FLOAT32 or not light.flags.aligned or any(stride % 4 for stride in light.strides):
            return None
        return factors, first_of(light), tuple(stride // 4 for stride in light.strides)


def _per_plane(pair: list[Array]) -> Array:
    """Return offset and divisor, which are constant per plane, as (planes, 2)."""
    return np.stack([values[..., 0, 0].ravel() for values in pair], axis=1)


def first_of(array: Array) -> Array:
    """Return a 1-D view of the first element of an array; loops reach the other elements by the array's strides."""
    one: Array = array[(0,) * (array.ndim - 1)][:1]
    return one


Divisor = np.float32 | Scaling | None


def _at(part: Any, rows: Any, columns: Any) -> Any:
    if np.ndim(part) < 2:
        return part
    picked: Array = part[..., rows, :] if part.shape[-2] > 1 else part
    return picked[..., columns] if part.shape[-1] > 1 else picked


def scale(pixels: Array, divisor: Divisor, out: Array) -> None:
    """Divide ``pixels`` in float32, or copy them without a divisor, and write the result to ``out`` in one pass."""
    if isinstance(divisor, Scaling):
        divisor(pixels, out)
        return
    if divisor is None:
        with np.errstate(over="ignore"):
            np.copyto(out, pixels, casting="same_kind")
        return
    if COUNTER.worth and pixels.flags.c_contiguous and pixels.shape == out.shape and divides(pixels, out):
        loop = pixel_loop(divided, pixels.dtype, "float32 w", "float32")
        if loop is not None:
            loop(pixels.reshape(-1), out.reshape(-1), divisor)
            return
    np.true_divide(pixels, divisor, out, dtype=FLOAT32, casting="unsafe")


@functools.cache
def pixel_loop(function: Loop, pixels: np.dtype[Any], *types: str, access: str = "r") -> Loop | None:
    """Return a loop compiled for flat pixels of a dtype, and other arguments of ``types``; see `compiled`.

    Returns None without numba or for other dtypes. The name of a dtype takes as long as scaling a small image.
    """
    return compiled(function, (f"{pixels.name} {access}", *types)) if pixels in COMPILED else None


def divides(pixels: Array, out: Array) -> bool:
    """Whether a compiled loop supports the dtypes and the memory layout of ``pixels`` and ``out``."""
    flags = out.flags
    is_aligned = flags.c_contiguous and flags.aligned and bool(pixels.flags.aligned)
    return is_aligned and pixels.dtype in COMPILED and out.dtype == FLOAT32


def divided(pixels: Any, out: Any, divisor: Any) -> None:
    for pixel in range(len(out)):
        out[pixel] = np.float32(pixels[pixel]) / divisor
