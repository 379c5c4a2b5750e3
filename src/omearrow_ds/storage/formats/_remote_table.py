"""`RemoteTable`: the base of sources of tables on servers: one object, opened in each process, read by ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omearrow_ds.axes import image_bytes
from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats._base import Array, Block
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._ranged import Objects, Ranged
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._table import TableSource

_BLOCK_BYTES = 2**25  # of images that are fetched together, where all are
_END_BYTES = 2**16  # in which most footers are


class Unmapped:
    """Stands where a mapped file is looked at before it is read."""

    def refuse_cut(self, among: int = 1) -> None:
        """Do nothing: what is fetched is compared, each time."""


UNMAPPED = Unmapped()


class RemoteTable(TableSource):
    """A table in one object; `_object` is it. It stands before the source of its format in the order of classes."""

    fetches = True
    _objects: Objects
    _object: ProcessLocal[Ranged]

    def _reach(self, objects: Objects) -> None:
        """Take what fetches, before anything is read."""
        self._objects, self._object = objects, ProcessLocal(self._open_object)

    def _open_object(self) -> Ranged:
        opened = self._objects.open(str(self.path))
        tag = hashlib.blake2b(opened.seen[1].encode(), digest_size=16).digest()
        stamp = (opened.size_bytes, int.from_bytes(tag))
        if self.stamp not in (None, stamp):
            raise FormatError(f"{self.path}: was replaced or changed since it was opened; open it again")
        self.stamp = stamp
        return opened

    def _refuse_replaced(self) -> None:
        """Do nothing: what is fetched is compared, each time."""

    @property
    def mapping(self) -> None:
        """None: no file is mapped."""
        return

    def stacks(self) -> list[Array]:
        return []

    def stored_as(self) -> Stored:
        stored: Stored = super().stored_as()  # type: ignore[safe-super]  # of the format's source, which comes next
        return replace(stored, in_place=False, reading="by ranges of an object on a server")

    def blocks(self) -> Iterator[Block]:
        sizes_bytes = image_bytes(self.shapes, self.dtypes).tolist()
        first = 0
        while first < len(self):
            stop, held_bytes = first + 1, sizes_bytes[first]
            while stop < len(self) and held_bytes + sizes_bytes[stop] <= _BLOCK_BYTES:
                held_bytes += sizes_bytes[stop]
                stop += 1
            yield first, self.views(range(first, stop))
            first = stop

    def stored_files(self) -> Iterator[Path]:
        yield from ()

    def stored_size(self) -> tuple[int, int, int]:
        size_bytes = self._object.get().size_bytes
        return 1, size_bytes, size_bytes

    def close(self) -> None:
        super().close()  # type: ignore[safe-super]  # of the format's source, which comes next
        self._object.close()


def footer(file: Ranged, mark_bytes: int, size_of: Any) -> None:
    """Fetch a footer, of which ``size_of(last mark_bytes)`` tells the length."""
    end = file.hold_end(_END_BYTES)
    file.hold_end(size_of(bytes(end[-mark_bytes:])) + mark_bytes)
