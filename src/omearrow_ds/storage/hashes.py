"""Hashes in the names of parts, and fingerprints of indexes, manifests and sources.

A part is named by the SHA-256 of its bytes: fetching compares them, and processors have instructions for it. With
these, it takes half the time of BLAKE2b. The parts of manifests of version 1 are named by BLAKE2b of 128 bits, which
is still the hash of all small data.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from omearrow_ds.storage.formats._detect import entries_below

if TYPE_CHECKING:
    from hashlib import _Hash

_SHORT = 2 * 16  # Number of hexadecimal digits.


def new_hash(data: bytes | memoryview = b"") -> hashlib.blake2b:
    """Return a new hash object for small data, updated with ``data``."""
    return hashlib.blake2b(data, digest_size=16)


def digest_of(data: bytes | memoryview) -> str:
    """Return the hash of small data as hexadecimal digits."""
    return new_hash(data).hexdigest()


def part_hash(digits: str = "") -> _Hash | hashlib.blake2b:
    """Return a new hash object with the algorithm of part names; ``digits`` are those of an existing name to verify."""
    return new_hash() if is_short(digits) else hashlib.sha256()


def is_short(digits: str) -> bool:
    """Whether ``digits`` are a short hash, which is used for small data and in part names of older versions."""
    return len(digits) == _SHORT


def file_hash(file: Path) -> str:
    """Return the hash of a small file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, new_hash).hexdigest()


def hash_of(path: Path) -> str:
    """Return the hash for the name of a part, computed from its file or, for a folder, from all files in it."""
    digest, is_folder = part_hash(), path.is_dir()
    for part_file in sorted(Path(entry) for entry in entries_below(path)) if is_folder else [path]:
        if is_folder:
            header = f"{part_file.relative_to(path).as_posix()} {part_file.stat().st_size}\n"
            digest.update(header.encode(errors="surrogateescape"))
        with part_file.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
