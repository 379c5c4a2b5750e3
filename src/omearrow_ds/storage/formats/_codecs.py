"""Decompression by imagecodecs into an existing buffer, which limits the decompressed size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def decompress_into(codec: str, stored: Array | bytes | memoryview, plain: Array) -> None:
    """Decompress ``stored`` into ``plain``, a one-dimensional array of bytes.

    Raises `ValueError` if it cannot be decompressed, or its decompressed size differs.
    """
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
