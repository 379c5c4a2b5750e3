"""The hashes that parts are named by, and that indexes, manifests and sources are told from others by.

A part is named by SHA-256 of its bytes: whoever fetches it compares them, and processors have instructions for it.
Where they have, it takes half the time of BLAKE2b, of 128 bits, by which the parts of manifests of version 1 are named;
all that is small is hashed so still.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from omearrow_ds.storage.formats._detect import entries_below

if TYPE_CHECKING:
    from hashlib import _Hash

_BLOCK_BYTES = 2**20
_SHORT = 2 * 16  # digits


def new_hash(said: bytes = b"") -> hashlib.blake2b:
    """Return the hash of what is small, of these bytes so far."""
    return hashlib.blake2b(said, digest_size=16)


def digest_of(said: bytes) -> str:
    """Return the hash of bytes that are few, in hexadecimal digits."""
    return new_hash(said).hexdigest()


def part_hash(digits: str = "") -> _Hash | hashlib.blake2b:
    """Return the hash that a part is named by, of no bytes so far: of a part that has a name, by its digits."""
    return new_hash() if is_short(digits) else hashlib.sha256()


def is_short(digits: str) -> bool:
    """Whether digits are of the hash by which parts were named before, and small things are."""
    return len(digits) == _SHORT


def file_hash(file: Path) -> str:
    """Return the hash of a small file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, new_hash).hexdigest()


def hash_of(path: Path) -> str:
    """Return what a part is to be named by: the hash of its bytes, or of names, sizes and bytes of all files in it."""
    digest, is_folder = part_hash(), path.is_dir()
    for each in sorted(Path(entry) for entry in entries_below(path)) if is_folder else [path]:
        if is_folder:
            said = f"{each.relative_to(path).as_posix()} {each.stat().st_size}\n"
            digest.update(said.encode(errors="surrogateescape"))
        with each.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
