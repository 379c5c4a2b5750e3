"""Cache of generated collections, each written once, checked on reuse, and added atomically.

``<root>/<workload>/<format>-<encoding>-<writer>/`` is one piece: the collection, and a manifest of its files that is
written last. It is built under a temporary name and renamed. There are two file locks, which the system releases when
their process ends: one while a piece is checked or built, the other as long as a session may read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self

import numpy as np
from filelock import FileLock, Timeout

import omearrow_ds
from benchmarks.support import library
from omearrow_ds import Format, write_images


class Images(Protocol):
    """Reproducible source of images, with a key that identifies them."""

    def images(self) -> Iterator[np.ndarray[Any, Any]]:
        """Stream the images, each ``(T, C, Z, Y, X)``."""

    def key(self) -> str:
        """Return a key that differs between different images."""


Encoding = Literal["bytes", "list"]

MANIFEST = "manifest.json"
_NATIVE = "native"
_KEPT_BYTES = 2**28
# Modules that write data of all formats. Their folders differ between versions of the package.
_SOURCES = {"axes", "checksums", "codec", "encode", "incoming", "schema", "source", "synthetic", "testing", "writing"}


class DataCache:
    """Collections of one workload, by format and encoding; a context manager that releases their locks.

    They are in a folder of ``root``, which is created if missing. ``chunk_shapes`` maps formats to their shape of
    chunks.
    """

    def __init__(
        self,
        root: Path,
        workload: Images,
        chunk_shapes: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self._workload = workload
        self._chunk_shapes = chunk_shapes
        self.folder = root / workload.key()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._paths: dict[tuple[str, str], Path] = {}
        self._in_use: list[FileLock] = []
        self._cached: list[np.ndarray[Any, Any]] = []

    def images(self) -> Iterator[np.ndarray[Any, Any]]:
        """Stream the images, which are generated once if they need little memory."""
        if self._cached:
            yield from self._cached
            return
        images, size_bytes = [], 0
        for image in self._workload.images():
            size_bytes += image.nbytes
            images.append(image)
            if size_bytes > _KEPT_BYTES:
                images.clear()
            yield image
        self._cached = images if size_bytes <= _KEPT_BYTES else []

    def path(self, fmt: Format, encoding: str) -> Path:
        """Return the path of a collection, which is written now if it is missing or changed.

        The encoding of a table format is ``"bytes"`` or ``"list"``, that of a folder format ``"native"``.
        """
        key = (fmt.name, encoding)
        if key not in self._paths:
            piece = self.folder / f"{fmt.name}-{encoding}-{writer_version(fmt)}"
            with FileLock(self.folder / f".{fmt.name}-{encoding}.lock"):
                self._use(piece)
                self._remove_leftovers(piece, f"{fmt.name}-{encoding}-")
                if not intact(piece):
                    self._build(piece, fmt, encoding)
            self._paths[key] = piece / f"images{fmt.suffix}"
        return self._paths[key]

    def close(self) -> None:
        """Release the locks of all pieces that this session reads."""
        for lock in self._in_use:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)
        self._in_use.clear()
        self._paths.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _use(self, piece: Path) -> None:
        lock = FileLock(piece.with_name(f".{piece.name}.use-{os.getpid()}-{uuid.uuid4().hex[:8]}"))
        lock.acquire()
        self._in_use.append(lock)

    def _build(self, piece: Path, fmt: Format, encoding: str) -> None:
        temporary = _hidden_sibling(piece, "partial")
        temporary.mkdir()
        try:
            target = temporary / f"images{fmt.suffix}"
            chunk_shape = self._chunk_shapes.get(fmt.name)
            # Older packages lack this argument.
            chunked: dict[str, Any] = {} if chunk_shape is None else {"chunk_shape": chunk_shape}
            write_images(self.images(), target, fmt.name, encoding=library_encoding(encoding), **chunked)
            _write_manifest(temporary)
            _move_aside(piece)
            temporary.rename(piece)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _remove_leftovers(self, piece: Path, prefix: str) -> None:
        """Remove files of killed runs, and unused pieces of older writers; the caller must hold the lock."""
        _used(piece)  # Removes locks of processes that ended.
        for entry in list(self.folder.iterdir()):
            if entry.name.startswith(f".{prefix}") and entry.name.endswith((".partial", ".old")):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(prefix) and entry != piece and not _used(entry):
                _move_aside(entry)


def intact(piece: Path) -> bool:
    """Whether a piece has exactly the files of its manifest, unchanged.

    Size and time are compared. A file with another time, for example in a copied cache, is hashed.
    """
    try:
        listed = json.loads((piece / MANIFEST).read_bytes())["files"]
        sizes = dict(_files(piece))
    except (OSError, ValueError, TypeError, KeyError):
        return False
    if sizes.keys() != listed.keys():
        return False
    touched = [name for name, stat in sizes.items() if [stat.st_size, stat.st_mtime_ns] != listed[name][:2]]
    if any(sizes[name].st_size != listed[name][0] or _hash(piece / name) != listed[name][2] for name in touched):
        return False
    if touched:
        _write_manifest(piece)
    return True


def library_encoding(encoding: str) -> Encoding:
    """Return the encoding argument of `write_images`; folder formats use the default."""
    return "list" if encoding == "list" else "bytes"


def encodings(fmt: Format) -> tuple[str, ...]:
    """Return the encodings of a format, the default first."""
    return ("bytes", "list") if fmt.kind == "table" else (_NATIVE,)


def disk_usage_of(path: Path) -> dict[str, int]:
    """Return the size of a file, or of all files in a folder, and the size allocated on disk."""
    files = [path] if path.is_file() else [path / name for name, _ in _files(path)]
    size_bytes, allocated_bytes = library.space_on_disk(path, files)
    return {"size_bytes": size_bytes, "allocated_bytes": allocated_bytes}


@cache
def writer_version(fmt: Format) -> str:
    """Return a hash of the code that writes a format: this package, the format's backend and pyarrow."""
    files = [file for file in Path(omearrow_ds.__file__).parent.rglob("*.py") if _makes(file, fmt)]
    if getattr(fmt, "implementation", None) is not None:  # Older packages may lack it.
        files.append(Path(fmt.module().__file__ or ""))
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(files):
        digest.update(file.read_bytes())
    for distribution in sorted({*_distributions().get(fmt.backend, ()), "pyarrow"}):
        digest.update(f"{distribution} {metadata.version(distribution)}".encode())
    return digest.hexdigest()


def _makes(file: Path, fmt: Format) -> bool:
    """Whether a module of the package affects the stored data of a format."""
    if file.parent.name == "formats":
        return file.stem.startswith("_") or file.stem == fmt.name
    return file.stem in _SOURCES


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


def _write_manifest(piece: Path) -> None:
    files = {name: [stat.st_size, stat.st_mtime_ns, _hash(piece / name)] for name, stat in _files(piece)}
    temporary = piece / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps({"files": files}), encoding="utf-8")
    temporary.replace(piece / MANIFEST)


def _files(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield relative name and status of each file except the manifest."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{name}/")
            elif name not in (MANIFEST, f".{MANIFEST}.tmp"):
                yield name, entry.stat(follow_symlinks=False)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _hidden_sibling(piece: Path, suffix: str) -> Path:
    return piece.with_name(f".{piece.name}.{uuid.uuid4().hex[:8]}.{suffix}")


def _move_aside(piece: Path) -> None:
    """Remove a piece by an atomic rename followed by deletion."""
    if piece.exists():
        old = _hidden_sibling(piece, "old")
        piece.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _used(piece: Path) -> bool:
    """Whether a running session reads a piece; locks of ended sessions are removed."""
    used = False
    for path in piece.parent.glob(f".{piece.name}.use-*"):
        lock = FileLock(path)
        try:
            with lock.acquire(timeout=0):
                pass
        except Timeout:
            used = True
        else:
            path.unlink(missing_ok=True)
    return used
