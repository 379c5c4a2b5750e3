"""Compressed bytes of files: by imagecodecs, which is told where to decompress to, and so how much that may be."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def decompress_into(codec: str, stored: Array | bytes, plain: Array) -> None:
    """Decompress ``stored`` into ``plain``, flat bytes.

    Raises
    ------
    ValueError
        If it cannot be decompressed, or not to as many bytes.
    """
    import imagecodecs  # noqa: PLC0415  # what is compressed alone needs it

    options = {"numthreads": 1} if codec == "blosc" else {}
    try:
        size_bytes = len(getattr(imagecodecs, f"{codec}_decode")(stored, out=plain, **options))
    except (RuntimeError, ImportError) as error:
        raise ValueError(f"{codec}: {error}") from error
    if size_bytes != plain.size:
        raise ValueError(f"{codec}: {size_bytes} bytes, expected {plain.size}")
