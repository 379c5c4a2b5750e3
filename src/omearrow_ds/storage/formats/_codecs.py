"""Decompression by imagecodecs into an existing buffer, which limits the decompressed size."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from omearrow_ds.axes import Array

_BLOSC_SIZES = struct.Struct("<4xI4xI")  # Numbers of decompressed and compressed bytes.


def decompress_into(codec: str | None, stored: Any, plain: Array) -> None:
    """Decompress or, without a codec, copy the bytes ``stored`` into ``plain``, a one-dimensional array of bytes."""
    # Raises `ValueError` if it cannot be decompressed, or its decompressed size differs.
    if codec is None:
        if len(stored) != plain.size:
            raise ValueError(f"a chunk has {len(stored):,} bytes, expected {plain.size:,}")
        plain[...] = np.frombuffer(stored, np.uint8)
        return
    # Blosc trusts its header, and would read beyond the end of a truncated file.
    num_bytes = len(stored)
    if codec == "blosc" and (num_bytes < 16 or _BLOSC_SIZES.unpack_from(stored) != (plain.size, num_bytes)):
        raise ValueError(f"{num_bytes:,} bytes are not a Blosc chunk of {plain.size:,} bytes")
    try:
        size_bytes = len(_decoder(codec)(stored, out=plain))
    except (RuntimeError, ImportError) as error:
        raise ValueError(f"{codec}: {error}") from error
    if size_bytes != plain.size:
        raise ValueError(f"{codec}: {size_bytes:,} decompressed bytes, expected {plain.size:,}")


@cache
def _decoder(codec: str) -> Callable[..., Any]:
    import imagecodecs  # noqa: PLC0415  # only compressed data needs it

    decode = getattr(imagecodecs, f"{codec}_decode")
    return partial(decode, numthreads=1) if codec == "blosc" else decode
