"""Base classes of tables on servers that a library reads by a client of its own, or whose file is fetched whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from omearrow_ds.storage.byte_source import version_fingerprint
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._ranged import Copy, Objects
from omearrow_ds.storage.formats._stored import Stored
from omearrow_ds.storage.formats._table import TableSource


class OnServer(TableSource):
    """Mixin for tables on a server; among base classes, it must come before the source class of the format."""

    _objects: Objects

    def __init__(self, path: Path, *how: Any, objects: Objects, **named: Any) -> None:
        self.path = path
        self._reach(objects)
        super().__init__(path, *how, **named)  # type: ignore[call-arg]  # of the format's source, which comes next
        self._how["objects"] = objects

    def _reach(self, objects: Objects) -> None:
        """Set the client that fetches, before anything is read."""
        self._objects = objects


class CopiedTable(OnServer):
    """Mixin for a table in one object, which is copied to the cache as a whole and read there as a local file."""

    _copy: ProcessLocal[Copy]

    def _reach(self, objects: Objects) -> None:
        self._objects, self._copy = objects, ProcessLocal(self._fetch_copy)

    def _fetch_copy(self) -> Copy:
        copy, version = self._objects.copied(str(self.path))
        self.guard.compare(version_fingerprint(version))
        return copy

    @property
    def _place(self) -> Path:
        return self._copy.get().path

    def storage_info(self) -> Stored:
        stored: Stored = super().storage_info()
        return replace(stored, reading=f"from a fetched copy of the object: {stored.reading}")

    def stored_size(self) -> tuple[int, int, int]:
        self._copy.get()
        size_bytes = (self.guard.fingerprint or (0,))[0]
        return 1, size_bytes, size_bytes

    def close(self) -> None:
        super().close()  # type: ignore[safe-super]  # of the format's source, which comes next
        self._copy.close()
