"""Hashes of parts, indexes, manifests and sources, and checksums of images.

A part is named by the SHA-256 of its bytes: fetching compares them, and processors have instructions for it. With
these, it takes half the time of BLAKE2b. The parts of manifests of version 1 are named by BLAKE2b of 128 bits, which
is still the hash of all small data.

Checksums are computed from dtype, shape and decoded pixels, so they are equal in all formats. XXH3 of 128 bits detects
accidental damage (it is not a cryptographic signature), and costs less than copying the pixels. On one core, images of
100 x 100 and of 512 x 512 uint16 in memory, GB/s: XXH3 26 and 47, memcpy 19 and 35, crc32c 11 and 18, zlib's crc32 3.0
and 4.2, SHA-256 1.7 and 1.8, BLAKE2b 0.7 and 0.9 (2026-11-22, xxhash 4.1.0).
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from omearrow_ds.axes import Array
from omearrow_ds.storage.formats._detect import entries_below

_SHORT = 2 * 16  # Number of hexadecimal digits of hashes of small data, and of parts in manifests of version 1.
KIND = "xxh3-128:"  # Prefix of stored checksums, so that another hash can be added later.
_LITTLE = sys.byteorder == "little"


def new_hash(data: bytes | memoryview = b"") -> hashlib.blake2b:
    """Return a new hash object for small data, updated with ``data``."""
    return hashlib.blake2b(data, digest_size=16)


def digest_of(data: bytes | memoryview) -> str:
    """Return the hash of small data as hexadecimal digits."""
    return new_hash(data).hexdigest()


def part_hash(digits: str) -> Any:
    """Return a new hash object to verify the name of a part, which contains ``digits``."""
    return new_hash() if len(digits) == _SHORT else hashlib.sha256()


def file_hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, new_hash).hexdigest()


def hash_of(path: Path) -> str:
    """Return the hash for the name of a part, computed from its file or, for a folder, from all files in it."""
    digest = hashlib.sha256()
    for file in sorted(map(Path, entries_below(path))) if path.is_dir() else [path]:
        if file != path:
            header = f"{file.relative_to(path).as_posix()} {file.stat().st_size}\n"
            digest.update(header.encode(errors="surrogateescape"))
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
    return digest.hexdigest()


@functools.lru_cache(maxsize=4096)  # Formatting the text takes longer than hashing 100 x 100 pixels.
def _begin_checksum(dtype: np.dtype[Any], shape: tuple[int, ...]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{dtype.name} {shape}".encode())


def checksum_of(image: Array) -> str:
    """Return the checksum of an image: the prefix ``xxh3-128:``, then 32 hexadecimal digits.

    The input is the UTF-8 text ``"uint16 (1, 3, 1, 100, 100)"`` of dtype and shape, then the pixels in C order,
    little-endian.
    """
    digest = _begin_checksum(image.dtype, image.shape).copy()
    as_hashed = image.flags.c_contiguous and _LITTLE
    digest.update((image if as_hashed else np.ascontiguousarray(image, image.dtype.newbyteorder("<"))).data)
    return KIND + digest.hexdigest()
