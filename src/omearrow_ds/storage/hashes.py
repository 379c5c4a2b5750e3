"""Hashes of files and folders, which parts and indexes are named by and told from others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from omearrow_ds.storage.formats._detect import entries_below

_BLOCK_BYTES = 2**20


def hash_of(path: Path) -> str:
    """Return the hash of a part: of its bytes, or of the names and bytes of all files in its folder."""
    if not path.is_dir():
        return _hash_of([path], path.parent)
    return _hash_of(sorted(Path(entry) for entry in entries_below(path)), path, named=True)


def _hash_of(files: Sequence[Path], folder: Path, *, named: bool = False) -> str:
    """Return the BLAKE2b, of 128 bits in hexadecimal digits, of the bytes of files, and of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for each in files:
        if named:
            said = f"{each.relative_to(folder).as_posix()} {each.stat().st_size}\n"
            digest.update(said.encode(errors="surrogateescape"))
        with each.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
