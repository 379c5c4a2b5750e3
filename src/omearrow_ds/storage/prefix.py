"""Target below a URL for collections in parts: parts are made in private local files, and uploaded when complete."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from omearrow_ds.errors import ArgumentError, MissingPathError, PathExistsError
from omearrow_ds.storage.formats import FORMATS, Format
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.index import write_index
from omearrow_ds.storage.joined import Known, index_of, look
from omearrow_ds.storage.manifest import INDEX, INDEX_NAME, MANIFEST, PARTS, Manifest, Published
from omearrow_ds.storage.parts import Index, Open
from omearrow_ds.storage.place import JOBS, PLAN, REPLACES
from omearrow_ds.storage.publish import private_folder
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.remote_writing import RemoteWriter

_AT_ONCE = 16  # Concurrent requests for small objects.


class Prefix:
    """Target URL of a new collection in parts; see `omearrow_ds.storage.place.Place`.

    Parameters
    ----------
    path
        The URL.
    storage
        Access to its server; credentials are looked up in each process.
    """

    puts_whole = True

    def __init__(self, path: Url, storage: Storage) -> None:
        self.path: Path = path
        self._remote = RemoteWriter(path, storage)

    @property
    def told_as(self) -> str:
        """Objects to delete in order to start an unfinished collection again, for error messages."""
        return f"everything below {self.path}/{JOBS}"

    @property
    def replaces(self) -> str | None:
        """Hash of the manifest of the existing collection that the new one replaces, or None."""
        plan = self.read(f"{JOBS}/{PLAN}")
        return None if plan is None else json.loads(plan).get(REPLACES)

    @property
    def begun(self) -> bool:
        """Whether a collection has been started but not yet published."""
        return self.read(f"{JOBS}/{PLAN}") is not None

    @property
    def stands(self) -> bool:
        """Whether a collection exists at the URL."""
        return self.read(MANIFEST) is not None

    def refuse(self, *, overwrite: bool) -> None:
        """Raise an error if a collection exists and ``overwrite`` is false; an unfinished collection is allowed."""
        manifest, plan = self.read_all([MANIFEST, f"{JOBS}/{PLAN}"])
        replaced = plan is not None and manifest is not None and digest_of(manifest) == json.loads(plan).get(REPLACES)
        if manifest is not None and (plan is None or replaced) and not overwrite:
            raise self._exists()

    def _exists(self) -> PathExistsError:
        return PathExistsError(f"{self.path}: already exists; pass overwrite=True to replace it, or choose another URL")

    def refuse_format(self, fmt: Format) -> None:
        """Raise `ArgumentError` if parts of a format cannot be written to an object store."""
        if fmt.in_folder:
            names = ", ".join(fmt_known.name for fmt_known in FORMATS if not fmt_known.in_folder)
            raise ArgumentError(
                f"parts of {fmt.label} are folders, which object stores cannot store",
                path=self.path,
                remedy=f"pass one of {names}",
            )

    def begin(self, *, overwrite: bool) -> str | None:
        """Return the hash of the manifest of an existing collection to be replaced, or None."""
        manifest, plan = self.read_all([MANIFEST, f"{JOBS}/{PLAN}"])
        if manifest is None or plan is not None:
            return None
        if not overwrite:
            raise self._exists()
        return digest_of(manifest)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an object; None if it does not exist."""
        try:
            return self._remote.read(name)
        except MissingPathError:
            return None

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several objects; None for a missing object."""
        self._remote.open()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(self.read, names))

    def write_once(self, name: str, data: bytes) -> bool:
        """Write an object if it does not exist; return False otherwise.

        Raises
        ------
        FileNotFoundError
            If it is a record of a collection that was published meanwhile.
        """
        if not self._remote.create(name, data):
            return False
        if name != f"{JOBS}/{PLAN}" and not self.begun:
            self.remove([name])
            raise FileNotFoundError(name)
        return True

    def commit(self, data: bytes) -> bool:
        """Write the manifest, which publishes the collection; return False if another process published one first."""
        replaces = self.replaces
        if replaces is None:
            return self._remote.create(MANIFEST, data)
        return self._remote.replace(MANIFEST, data, replaces)

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yield the path of a temporary file, which is uploaded as the object ``name`` at exit."""
        with self.made_at(Path(name).name) as file:
            yield file
            self._remote.put(name, file)

    def put_index(self, index: Index) -> tuple[str, str]:
        """Write an image index under a name with its hash; the old index is kept for readers of the old manifest."""
        with self.made_at(INDEX) as file:
            digest = write_index(file, index)
            name = f"{Path(INDEX).stem}-{digest}{Path(INDEX).suffix}"
            self._remote.put(name, file)
        return digest, name

    @contextmanager
    def made_at(self, name: str) -> Iterator[Path]:
        """Yield a path for a part in a private temporary folder, which is removed at exit."""
        with private_folder(Path(tempfile.gettempdir()), f"omearrow-ds-{os.getuid()}-") as folder:
            yield folder / name

    def take(self, made: Path, name: str, opening: Open) -> None:
        """Upload a finished part and its image index, which publishing reads."""
        each = look(opening, made)
        if name.startswith(f"{0:05d}-"):
            with opening(made) as source:
                self._remote.put(_outline_by(name), json.dumps(source.outline().as_json()).encode())
        self._remote.put(f"{PARTS}/{name}", made)
        with self.made_at(INDEX) as file:
            write_index(file, index_of([each], each.image_ids, each.columns))
            self._remote.put(_known_by(name), file)

    def forget(self, name: str) -> None:
        """Remove the auxiliary objects of a part after the collection was published."""
        self.remove([_known_by(name), _outline_by(name)])

    def known(self, parts: Sequence[Published], opening: Open) -> Sequence[Known | Index]:
        """Return the image indexes that were uploaded with the parts."""
        del opening
        said = self.read_all([_known_by(part.name) for part in parts])
        return [self._known(part, each) for part, each in zip(parts, said, strict=True)]

    def _known(self, part: Published, content: bytes | None) -> Index:
        path = self.path / _known_by(part.name)
        if content is None:
            raise MissingPathError(f"{path}: is missing; remove the record of this part next to it, and convert again")
        manifest = Manifest("", [part], digest_of(content))
        with self.made_at(INDEX) as file:
            file.write_bytes(content)
            index = manifest.stored_index(file)
            return replace(index.read(), columns=index.columns(index.column_schema.names), checksums=index.checksums())

    def outline(self, fmt: Format, parts: Sequence[Published], index: Index, opening: Open) -> Mapping[str, Any]:
        """Return the description of the images that was uploaded with the first part."""
        del fmt, index, opening
        said: dict[str, Any] = json.loads(self.read(_outline_by(parts[0].name)) or b"{}")
        if said:
            said["stored"]["chunking"] = f"{len(parts):,} parts, the first: {said['stored']['chunking']}"
        return said

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names of objects in the folder ``parts`` or ``jobs``, with their sizes in bytes."""
        return self._remote.sizes(folder)

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; missing objects are ignored."""
        self._remote.remove(names)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context manager without effect: no lock is needed, because only the first manifest is valid."""
        return nullcontext()

    def finish(self, index_file: str) -> None:
        """Remove temporary objects; the plan is removed last, so that the same command can resume the cleanup."""
        self.remove([name for name in self.sizes("") if INDEX_NAME.fullmatch(name) and name != index_file])
        self.remove([f"{JOBS}/{name}" for name in self.sizes(JOBS) if name != PLAN])
        self.remove([f"{JOBS}/{PLAN}"])


def _known_by(name: str) -> str:
    return f"{JOBS}/{name}.{INDEX}"


def _outline_by(name: str) -> str:
    return f"{JOBS}/{name}.outline.json"
