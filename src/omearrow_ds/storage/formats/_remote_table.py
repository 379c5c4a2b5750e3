"""Base classes for tables on servers: one object, opened in each process, read by ranges or fetched whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omearrow_ds.errors import FormatError
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.byte_source import ObjectFile, version_fingerprint
from omearrow_ds.storage.formats._base import Block
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._ranged import Copy, Objects
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._table import TableSource

BLOCK_BYTES = 2**25  # images that are fetched together when all are read
_END_BYTES = 2**16  # size that covers most footers


class Unmapped:
    """Replacement of a mapping whose file is checked before each read."""

    def refuse_changed(self, among: int = 1) -> None:
        """Do nothing: each fetch compares the object's fingerprint."""


UNMAPPED = Unmapped()


class OnServer(TableSource):
    """A table on a server, for any reader; it precedes the source of its format in the list of base classes."""

    _objects: Objects

    def __init__(self, path: Path, *how: Any, objects: Objects, **named: Any) -> None:
        self.path = path
        self._reach(objects)
        super().__init__(path, *how, **named)  # type: ignore[call-arg]  # of the format's source, which comes next
        self._how["objects"] = objects

    def _reach(self, objects: Objects) -> None:
        """Set the client that fetches, before anything is read."""
        self._objects = objects

    def _refuse_other(self, version: tuple[int, str]) -> None:
        """Raise `FormatError` if an object is not the one that was opened first."""
        if self.stamp not in (None, version_fingerprint(version)):
            raise FormatError(f"{self.path}: was replaced or changed since it was opened; open it again")
        self.stamp = version_fingerprint(version)

    def _refuse_replaced(self) -> None:
        """Do nothing: each fetch compares the object's fingerprint."""

    def stored_files(self) -> Iterator[Path]:
        yield from ()


class RemoteTable(OnServer):
    """A table in one object, `_object`, that is read by ranges."""

    fetches = True
    _object: ProcessLocal[ObjectFile]

    def _reach(self, objects: Objects) -> None:
        self._objects, self._object = objects, ProcessLocal(self._open_object)

    def _open_object(self) -> ObjectFile:
        opened = self._objects.open(str(self.path))
        self._refuse_other(opened.version)
        return opened

    @property
    def mapping(self) -> None:
        """None, because no file is mapped."""
        return

    def stored_as(self) -> Stored:
        stored: Stored = super().stored_as()  # type: ignore[safe-super]  # of the format's source, which comes next
        return replace(stored, in_place=False, reading="by ranges of an object on a server")

    def blocks(self) -> Iterator[Block]:
        for part in split_by_bytes(image_bytes(self.shapes, self.dtypes), BLOCK_BYTES):
            yield part.start, self.views(range(part.start, part.stop))

    def stored_size(self) -> tuple[int, int, int]:
        size_bytes = self._object.get().size_bytes
        return 1, size_bytes, size_bytes

    def close(self) -> None:
        super().close()  # type: ignore[safe-super]  # of the format's source, which comes next
        self._object.close()


class CopiedTable(OnServer):
    """A table in one object that is fetched whole into the cache and read there as a local file."""

    _copy: ProcessLocal[Copy]

    def _reach(self, objects: Objects) -> None:
        self._objects, self._copy = objects, ProcessLocal(self._fetch_copy)

    def _fetch_copy(self) -> Copy:
        copy, seen = self._objects.copied(str(self.path))
        self._refuse_other(seen)
        return copy

    @property
    def _place(self) -> Path:
        return self._copy.get().path

    def stored_as(self) -> Stored:
        stored: Stored = super().stored_as()  # type: ignore[safe-super]  # of the format's source, which comes next
        return replace(stored, reading=f"of a copy of the object, fetched whole: {stored.reading}")

    def stored_size(self) -> tuple[int, int, int]:
        self._copy.get()
        size_bytes = 0 if self.stamp is None else self.stamp[0]
        return 1, size_bytes, size_bytes

    def close(self) -> None:
        super().close()  # type: ignore[safe-super]  # of the format's source, which comes next
        self._copy.close()


def footer(file: ObjectFile, mark_bytes: int, size_of: Any) -> None:
    """Fetch a footer, whose length ``size_of(last mark_bytes)`` returns."""
    end = file.read_tail(_END_BYTES)
    file.read_tail(size_of(bytes(end[-mark_bytes:])) + mark_bytes)
