"""`scale`: pixels of a sample, divided once or scaled by the steps of a `Scaling`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.kernels.compiled import Loop, compiled, tally

Array = np.ndarray[Any, Any]
FLOAT32 = np.dtype(np.float32)
COMPILED = frozenset(np.dtype(name) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"))  # native


class KernelScaling(NamedTuple):
    """Arrays of a `Scaling` in the form that compiled loops take."""

    # float32: divisor, minimum and maximum, and offset and divisor per plane (T, C, Z).
    factors: Array
    # First value of the illumination function, whose other values follow by ``strides``; empty without a function.
    illumination: Array
    strides: tuple[int, ...]  # Strides of the illumination function, in elements.


class Scaling:
    """Scaling of pixels to samples: ``(pixels / illumination - offset) / divisor``.

    Parameters
    ----------
    illumination
        Illumination function, float32, of a sample's shape or one that broadcasts to it; None skips the division.
    offset
        Value or float32 array that is subtracted; None skips the subtraction.
    divisor
        Value or float32 array of the final division; None skips it.
    clip
        Whether results are clipped to [0, 1].
    """

    def __init__(self, illumination: Any, offset: Any, divisor: Any, *, clip: bool) -> None:
        self.illumination, self._offset, self._divisor, self._clip = illumination, offset, divisor, clip
        self._flat: dict[tuple[int, ...], KernelScaling | None] = {}

    def __call__(self, pixels: Array, out: Array) -> None:
        if self.illumination is not None:
            np.true_divide(pixels, self.illumination, out, dtype=FLOAT32, casting="unsafe")
            pixels = out
        if self._offset is not None:
            np.subtract(pixels, self._offset, out, dtype=FLOAT32, casting="unsafe")
            pixels = out
        if self._divisor is not None:
            np.true_divide(pixels, self._divisor, out, dtype=FLOAT32, casting="unsafe")
        elif pixels is not out:
            with np.errstate(over="ignore"):
                np.copyto(out, pixels, casting="same_kind")
        if self._clip:
            np.clip(out, 0, 1, out)
            np.add(out, 0, out)  # -0.0 becomes 0.0, as clip does in some versions of NumPy.

    def at(self, rows: Any, columns: Any) -> Scaling:
        """Return the scaling for a region of the image: ``rows`` and ``columns`` of the last two axes."""
        parts = (self.illumination, self._offset, self._divisor)
        illumination, offset, divisor = (None if part is None else _at(part, rows, columns) for part in parts)
        return Scaling(illumination, offset, divisor, clip=self._clip)

    def by_plane(self, shape: tuple[int, ...]) -> tuple[Array, Array | None, bool]:
        """Return the scaling per plane of fields of ``shape`` (T, C, Z, Y, X).

        These are offset and divisor, (T * C * Z, 2) float32 and constant per plane, the illumination function,
        (T * C * Z, Y, X) or None, and whether values are clipped to [0, 1].
        """
        light = self.illumination
        of_planes = None if light is None else np.broadcast_to(light, shape).reshape(-1, *shape[3:])
        return np.stack([values[..., 0, 0].ravel() for values in self._pair(shape)], axis=1), of_planes, self._clip

    def _pair(self, shape: tuple[int, ...]) -> list[Array]:
        """Return offset and divisor as arrays of ``shape``."""
        parts = (0 if self._offset is None else self._offset, 1 if self._divisor is None else self._divisor)
        return [np.broadcast_to(np.asarray(part, np.float32), shape) for part in parts]

    def flat(self, shape: tuple[int, ...]) -> KernelScaling | None:
        """Return this scaling as arrays for a compiled loop over fields, or None if no loop supports the scaling."""
        if shape not in self._flat:
            self._flat[shape] = self._flattened(shape)
        return self._flat[shape]

    def _flattened(self, shape: tuple[int, ...]) -> KernelScaling | None:
        planes = []
        for values in self._pair(shape):
            if any(size > 1 and stride for size, stride in zip(shape[-2:], values.strides[-2:], strict=True)):
                return None
            planes.append(values[..., 0, 0].ravel())
        bounds = (0, 1) if self._clip else (-np.inf, np.inf)
        factors = np.concatenate([[1, *bounds], np.stack(planes, axis=1).ravel()]).astype(np.float32)
        if self.illumination is None:
            return KernelScaling(factors, np.empty(0, np.float32), (0,) * len(shape))
        illumination = np.broadcast_to(self.illumination, shape)
        if (
            illumination.dtype != FLOAT32
            or not illumination.flags.aligned
            or any(stride % 4 for stride in illumination.strides)
        ):
            return None
        return KernelScaling(factors, first_of(illumination), tuple(stride // 4 for stride in illumination.strides))


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
    if tally().worth and pixels.flags.c_contiguous and pixels.shape == out.shape and divides(pixels, out):
        loop = division(pixels.dtype)
        if loop is not None:
            loop(pixels.reshape(-1), out.reshape(-1), divisor)
            return
    np.true_divide(pixels, divisor, out, dtype=FLOAT32, casting="unsafe")


@functools.cache
def division(pixels: np.dtype[Any]) -> Loop | None:
    """Return a loop that divides flat pixels of a dtype into flat float32; None without numba or for other dtypes."""
    return compiled(_divided, (f"{pixels.name} r", "float32 w", "float32")) if pixels in COMPILED else None


def divides(pixels: Array, out: Array) -> bool:
    """Whether a compiled loop supports the dtypes and the memory layout of ``pixels`` and ``out``."""
    flags = out.flags
    return (
        pixels.dtype in COMPILED
        and out.dtype == FLOAT32
        and flags.c_contiguous
        and flags.aligned
        and bool(pixels.flags.aligned)
    )


def _divided(pixels: Any, out: Any, divisor: Any) -> None:
    for pixel in range(len(out)):
        out[pixel] = np.float32(pixels[pixel]) / divisor
