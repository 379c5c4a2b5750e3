"""The hash that parts, indexes and manifests are named by and told from others: BLAKE2b of 128 bits."""

from __future__ import annotations

import hashlib
from pathlib import Path

from omearrow_ds.storage.formats._detect import entries_below

_BLOCK_BYTES = 2**20


def new_hash(said: bytes = b"") -> hashlib.blake2b:
    """Return the hash, of these bytes so far."""
    return hashlib.blake2b(said, digest_size=16)


def digest_of(said: bytes) -> str:
    """Return the hash of bytes, in hexadecimal digits."""
    return new_hash(said).hexdigest()


def hash_of(path: Path) -> str:
    """Return the hash of a part: of its bytes, or of the names, sizes and bytes of all files in its folder."""
    digest, is_folder = new_hash(), path.is_dir()
    for each in sorted(Path(entry) for entry in entries_below(path)) if is_folder else [path]:
        if is_folder:
            said = f"{each.relative_to(path).as_posix()} {each.stat().st_size}\n"
            digest.update(said.encode(errors="surrogateescape"))
        with each.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
