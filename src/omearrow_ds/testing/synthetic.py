"""Seeded images that look and compress like Cell Painting microscopy.

Cells are blurred, textured ellipses on an uneven dim background. A channel stains an area between only the nucleus and
the whole cell. Shot noise, read noise and an 8-bit camera follow, whose levels are spread over the whole range of the
dtype, like in the NF1 fields that the model was tuned to (256 gray levels, all multiples of 257, as uint16).

Ratio of raw bytes to zstd bytes of little-endian uint16, where each tile is compressed separately with `pyarrow.Codec`
(pyarrow 26). NF1: all 1,620 tiles of 100 x 100 (30 of 512 x 512) of 15 fields; synthetic: 1,620 (60), seed 42.

=========  =====  =========  ======  ======  ======  ======
tile       level  synthetic  NF1     DAPI    GFP     RFP
=========  =====  =========  ======  ======  ======  ======
100 x 100  1      2.49       2.68    4.02    2.25    2.35
100 x 100  3      2.66       2.82    4.32    2.35    2.46
512 x 512  1      2.57       2.43    3.82    2.05    2.06
512 x 512  3      3.17       3.11    4.34    2.62    2.84
=========  =====  =========  ======  ======  ======  ======
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

__all__ = ["synthetic_image", "synthetic_images"]

Shape: TypeAlias = tuple[int, int, int, int, int]
Plane: TypeAlias = "NDArray[np.float32]"
Random = np.random.Generator

DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "float32", "float64")

# 254 steps, not 255: 65535 / 255 = 257 would give every uint16 two equal bytes, so that tests miss a byte swap.
TOP_LEVEL = 254

PIXELS_PER_CELL = 5200
COUNTS_PER_ELECTRON = 20.0
READ_NOISE_COUNTS = 100.0
GRAIN = 4
TEXTURE_CONTRAST = 0.4
BAND_PIXELS = 2**15  # Pixels exposed at once, so that temporaries stay in the CPU cache. It does not change images.
REACH = 1.5  # Radii at which a cell is cut off, with exp(-REACH**4) = 0.6 % of its peak.


def synthetic_image(
    index: int, shape: Shape, dtype: DTypeLike = "uint16", seed: int = 42, *, levels: int = TOP_LEVEL + 1
) -> NDArray[Any]:
    """Make one image, which depends only on the arguments.

    Parameters
    ----------
    index : int
        Index of the image in the collection, from 0.
    shape : tuple of int
        ``(T, C, Z, Y, X)``. Cells drift a little over T, go out of focus over Z, and show in every channel.
    dtype : DTypeLike
        One of `DTYPES`. The scene is the same for each: integers span ``0 ... iinfo.max``, floats ``[0, 1]``.
    seed : int
        Number of the collection, from 0.
    levels : int
        Number of camera levels: 4,096 for 12 bits, 65,536 for all values of uint16.

    Returns
    -------
    numpy.ndarray
        ``(T, C, Z, Y, X)``, C-contiguous, own memory.

    Raises
    ------
    ValueError
        If an argument is outside its range.
    """
    values = _checked_values(shape, dtype, levels, index=index, seed=seed)
    # The bit generator is explicit because NumPy may change the one of `default_rng`.
    rng = Random(np.random.PCG64([seed, index]))
    size_t, size_c, size_z, size_y, size_x = shape
    cells_at, number = _draw_cells(rng, size_z, size_y, size_x)
    stains = [_draw_stain(rng, number, size_y, size_x) for _ in range(size_c)]
    image = np.empty(shape, values.dtype)
    band_rows = max(1, BAND_PIXELS // size_x)
    for t, (c, (dark, render)), z in product(range(size_t), enumerate(stains), range(size_z)):
        counts = render(*cells_at(t, z))
        for top in range(0, size_y, band_rows):
            band = slice(top, top + band_rows)
            np.take(values, _expose(rng, counts[band], dark, levels), out=image[t, c, z, band], mode="clip")
    return image


def synthetic_images(
    count: int,
    shape: Shape = (1, 1, 1, 100, 100),
    dtype: DTypeLike = "uint16",
    seed: int = 42,
    *,
    levels: int = TOP_LEVEL + 1,
) -> Iterator[NDArray[Any]]:
    """Yield images, where image i is ``synthetic_image(i, shape, dtype, seed, levels=levels)``.

    Parameters
    ----------
    count : int
        Number of images.
    shape, dtype, seed, levels
        See `synthetic_image`.

    Returns
    -------
    iterator of numpy.ndarray
        Images ``(T, C, Z, Y, X)``.

    Raises
    ------
    ValueError
        If an argument is invalid, at the call and not at the first image.
    """
    _checked_values(shape, dtype, levels, count=count, seed=seed)
    return (synthetic_image(index, shape, dtype, seed, levels=levels) for index in range(count))


def _checked_values(shape: Shape, dtype: DTypeLike, num_levels: int, **numbers: int) -> NDArray[Any]:
    """Check the arguments; return the pixel value of each camera level, spread over the range of the dtype."""
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"{name}={number}: expected 0 or more")
    if len(shape) != 5 or any(not isinstance(size, int | np.integer) or size < 1 for size in shape):
        raise ValueError(f"shape={shape!r}: expected five positive integers (T, C, Z, Y, X)")
    pixel_dtype = np.dtype(dtype)
    if pixel_dtype.name not in DTYPES or not pixel_dtype.isnative:
        raise ValueError(f"dtype={pixel_dtype.str}: expected one of {', '.join(DTYPES)}, in native byte order")
    if not 2 <= num_levels <= 2**16:
        raise ValueError(f"levels={num_levels}: expected 2 to 65,536")
    levels, steps = np.arange(num_levels, dtype=np.int64), num_levels - 1
    is_float = pixel_dtype.kind == "f"
    return (levels / steps if is_float else levels * int(np.iinfo(pixel_dtype).max) // steps).astype(pixel_dtype)


def _draw_cells(rng: Random, size_z: int, size_y: int, size_x: int) -> tuple[Callable[..., tuple[Any, Any]], int]:
    """Return a function of t and z, and the number of cells.

    The function returns the position, radii in pixels and angle of each cell, and its blur.
    """
    margin = 12.0  # Adds cells that the border cuts.
    number = max(1, rng.poisson((size_y + 2 * margin) * (size_x + 2 * margin) / PIXELS_PER_CELL))
    y, x = (rng.uniform(-margin, size + margin, number) for size in (size_y, size_x))
    drift_y, drift_x = rng.normal(0, 1.5, (2, number))
    radius, elongation, angle = (rng.uniform(low, high, number) for low, high in ((9, 16), (1, 1.4), (0, np.pi)))
    focus = rng.uniform(0.3, 0.7, number) * (size_z - 1)

    def cells_at(t: int, z: int) -> tuple[Any, Any]:
        blur = 1 + 0.15 * (z - focus) ** 2
        short = radius * np.sqrt(blur / elongation)
        return (y + t * drift_y, x + t * drift_x, short, short * elongation, angle), blur

    return cells_at, number


def _draw_stain(rng: Random, number: int, size_y: int, size_x: int) -> tuple[float, Callable[..., Plane]]:
    """Return the dark offset of a channel, and a function that renders its cells in counts."""
    peaks, extent = rng.lognormal(np.log(26000), 0.35, number), rng.uniform(1, 1.8)  # The extent is in nucleus radii.
    dark = rng.uniform(600, 3500)
    glow = np.outer(rng.uniform(100, 700) * _bow(rng, size_y), _bow(rng, size_x))
    texture = _texture(rng, size_y, size_x)

    def render(cells: tuple[NDArray[Any], ...], blur: NDArray[Any]) -> Plane:
        plane = np.zeros_like(glow)
        for ellipse in np.stack([*cells, peaks / blur], axis=1).tolist():
            _add_cell(plane, ellipse, extent)
        plane *= texture
        plane += glow
        return plane

    return dark, render


def _bow(rng: Random, size: int) -> NDArray[np.float32]:
    centre, width = rng.uniform(0.25, 0.75) * size, 1.3 * size
    return 1 - ((np.arange(size, dtype=np.float32) - centre) / width) ** 2


def _texture(rng: Random, size_y: int, size_x: int) -> Plane:
    """Return a smooth random field around 1: one random value every `GRAIN` pixels, interpolated linearly."""
    field = rng.random((size_y // GRAIN + 2, size_x // GRAIN + 2), dtype=np.float32)
    field *= 2 * TEXTURE_CONTRAST / GRAIN**2
    field += (1 - TEXTURE_CONTRAST) / GRAIN**2
    # Repeat, then sum over a box of GRAIN: linear interpolation, one axis after the other.
    field = field.repeat(GRAIN, axis=1)
    field = field[:, 1:] + field[:, :-1]
    field = field[:, 2:] + field[:, :-2]
    field = field.repeat(GRAIN, axis=0)
    field = field[1:] + field[:-1]
    field = field[2:] + field[:-2]
    return field[:size_y, :size_x]


def _add_cell(plane: Plane, ellipse: Sequence[float], extent: float) -> None:
    """Add one cell to a plane; a wide stain leaves the nucleus dimmer."""
    y, x, minor, major, angle, peak = ellipse
    cos, sin = math.cos(angle), math.sin(angle)
    reach_y = REACH * extent * math.hypot(major * sin, minor * cos)
    reach_x = REACH * extent * math.hypot(major * cos, minor * sin)
    top, bottom = max(0, int(y - reach_y)), min(plane.shape[0], int(y + reach_y) + 1)
    left, right = max(0, int(x - reach_x)), min(plane.shape[1], int(x + reach_x) + 1)
    if top >= bottom or left >= right:
        return
    down = np.arange(top - y, bottom - y, dtype=np.float32)[: bottom - top, None]
    across = np.arange(left - x, right - x, dtype=np.float32)[: right - left]
    # Squared distance from the center in radii: a dx^2 + b dx dy + c dy^2.
    squared = across * ((cos / major) ** 2 + (sin / minor) ** 2) + down * (2 * sin * cos * (major**-2 - minor**-2))
    squared *= across
    squared += down * down * ((sin / major) ** 2 + (cos / minor) ** 2)
    squared *= -squared
    hole = np.exp(squared)
    hole *= peak * (1 - extent) * 0.6
    hole += peak
    squared *= extent**-4
    hole *= np.exp(squared, out=squared)
    plane[top:bottom, left:right] += hole


def _expose(rng: Random, counts: Plane, dark: float, levels: int) -> NDArray[np.intp]:
    """Return camera levels of a plane, with shot noise, read noise and dark offset.

    At these counts, Poisson noise is nearly normal, so both noises are one draw. The number of set bits in 64 random
    bits is also nearly normal (mean 32, standard deviation 4), twice as fast, and equal in all versions of NumPy.
    """
    noise = np.bitwise_count(rng.integers(0, 2**64, counts.shape, dtype=np.uint64)).astype(np.float32)
    noise -= 32
    noise /= 4
    noise *= np.sqrt(counts * COUNTS_PER_ELECTRON + READ_NOISE_COUNTS**2)
    noise += counts
    noise += dark
    noise *= (levels - 1) / 65535
    return noise.astype(np.intp)
