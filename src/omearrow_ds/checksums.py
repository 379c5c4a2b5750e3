"""Checksums of images: of dtype, shape and decoded pixels, so an image has the same one in every format.

XXH3 of 128 bits: it finds every damage that is not made to deceive (it is no signature), and costs less than copying
the pixels. On one core, images of 100 x 100 and of 512 x 512 uint16 in memory, GB/s: XXH3 26 and 47, memcpy 19 and 35,
crc32c 11 and 18, zlib's crc32 3.0 and 4.2, SHA-256 1.7 and 1.8, BLAKE2b 0.7 and 0.9 (2026-11-22, xxhash 4.1.0).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from omearrow_ds.codec import Image

Array = np.ndarray[Any, Any]
KIND = "xxh3-128:"  # what a stored checksum starts with, so that another hash can follow one day


def checksum_of(pixels: Array) -> str:
    """Return the checksum of an image: its kind, then 32 hexadecimal digits.

    What is hashed is the text ``"uint16 (1, 3, 1, 100, 100)"`` of dtype and shape in UTF-8, then the pixels in C order,
    little-endian.
    """
    digest = xxhash.xxh3_128(f"{pixels.dtype.name} {pixels.shape}".encode())
    if sys.byteorder == "big":
        pixels = pixels.astype(pixels.dtype.newbyteorder("<"))
    digest.update(np.ascontiguousarray(pixels).data)
    return f"{KIND}{digest.hexdigest()}"


def checksummed(images: Iterable[Image]) -> Iterator[Image]:
    """Yield the images, each with its checksum."""
    for image in images:
        yield replace(image, checksum=checksum_of(image.pixels))
