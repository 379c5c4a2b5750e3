"""A place below a URL, for collections in parts: parts are made in private files of this machine, and sent whole."""

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

_AT_ONCE = 16  # small objects


class Prefix:
    """A `omearrow_ds.storage.place.Place` below a URL.

    Parameters
    ----------
    path
        The URL.
    storage
        How its server is reached; credentials are looked up in each process.
    """

    puts_whole = True

    def __init__(self, path: Url, storage: Storage) -> None:
        self.path: Path = path
        self._remote = RemoteWriter(path, storage)

    @property
    def told_as(self) -> str:
        """What to remove, to begin anew."""
        return f"what is below {self.path}/{JOBS}"

    @property
    def replaces(self) -> str | None:
        """Hash of the manifest that is to be replaced."""
        said = self.read(f"{JOBS}/{PLAN}")
        return None if said is None else json.loads(said).get(REPLACES)

    @property
    def begun(self) -> bool:
        """Whether a collection is being made."""
        return self.read(f"{JOBS}/{PLAN}") is not None

    @property
    def stands(self) -> bool:
        """Whether a collection stands there."""
        return self.read(MANIFEST) is not None

    def refuse(self, *, overwrite: bool) -> None:
        """Raise an error if nothing must be made there; what is begun goes on."""
        there, plan = self.read_all([MANIFEST, f"{JOBS}/{PLAN}"])
        replaced = plan is not None and there is not None and digest_of(there) == json.loads(plan).get(REPLACES)
        if there is not None and (plan is None or replaced) and not overwrite:
            raise self._exists()

    def _exists(self) -> PathExistsError:
        return PathExistsError(f"{self.path}: exists already; pass overwrite=True to replace it, or choose another URL")

    def refuse_format(self, fmt: Format) -> None:
        """Raise `ArgumentError` if parts of a format cannot be there."""
        if fmt.in_folder:
            names = ", ".join(each.name for each in FORMATS if not each.in_folder)
            raise ArgumentError(
                f"parts of {fmt.label} are folders, which no server of objects has",
                path=self.path,
                remedy=f"choose among {names}",
            )

    def begin(self, *, overwrite: bool) -> str | None:
        """Return the hash of the manifest that is to be replaced; nothing need be made ready."""
        there, plan = self.read_all([MANIFEST, f"{JOBS}/{PLAN}"])
        if there is None or plan is not None:
            return None
        if not overwrite:
            raise self._exists()
        return digest_of(there)

    def read(self, name: str) -> bytes | None:
        """Return what an object holds; None if there is none."""
        try:
            return self._remote.read(name)
        except MissingPathError:
            return None

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return what objects hold."""
        self._remote.open()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(self.read, names))

    def write_once(self, name: str, data: bytes) -> bool:
        """Write an object, unless there is one: then that stays, and this is False.

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
        """Write the manifest, unless another one than is to be replaced is there: then this is False."""
        replaces = self.replaces
        if replaces is None:
            return self._remote.create(MANIFEST, data)
        return self._remote.replace(MANIFEST, data, replaces)

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Give a file to write, which is sent when it is whole."""
        with self.made_at(Path(name).name) as file:
            yield file
            self._remote.put(name, file)

    def put_index(self, index: Index) -> tuple[str, str]:
        """Write an index, called by its hash: whoever has the old manifest finds the old one."""
        with self.made_at(INDEX) as file:
            digest = write_index(file, index)
            name = f"{Path(INDEX).stem}-{digest}{Path(INDEX).suffix}"
            self._remote.put(name, file)
        return digest, name

    @contextmanager
    def made_at(self, name: str) -> Iterator[Path]:
        """Give where a part may be made, in a private folder, which goes; what killed processes left goes too."""
        with private_folder(Path(tempfile.gettempdir()), f"omearrow-ds-{os.getuid()}-") as folder:
            yield folder / name

    def take(self, made: Path, name: str, opening: Open) -> None:
        """Send a part that was made, with what is known of it, which who publishes needs."""
        each = look(opening, made)
        if name.startswith(f"{0:05d}-"):
            with opening(made) as source:
                self._remote.put(_outline_by(name), json.dumps(source.outline().as_json()).encode())
        self._remote.put(f"{PARTS}/{name}", made)
        with self.made_at(INDEX) as file:
            write_index(file, index_of([each], each.image_ids, each.columns))
            self._remote.put(_known_by(name), file)

    def forget(self, name: str) -> None:
        """Remove what was sent beside a part, after it was published."""
        self.remove([_known_by(name), _outline_by(name)])

    def known(self, parts: Sequence[Published], opening: Open) -> Sequence[Known | Index]:
        """Return what is known of parts, as who made them told it."""
        del opening
        said = self.read_all([_known_by(part.name) for part in parts])
        return [self._known(part, each) for part, each in zip(parts, said, strict=True)]

    def _known(self, part: Published, said: bytes | None) -> Index:
        where = self.path / _known_by(part.name)
        if said is None:
            raise MissingPathError(f"{where}: is missing; remove the record of this part beside it, and convert again")
        manifest = Manifest("", [part], digest_of(said))
        with self.made_at(INDEX) as file:
            file.write_bytes(said)
            index = manifest.stored_index(file)
            return replace(index.read(), columns=index.columns(), checksums=index.checksums())

    def outline(self, fmt: Format, parts: Sequence[Published], index: Index, opening: Open) -> Mapping[str, Any]:
        """Return what the first part told when it was made."""
        del fmt, index, opening
        said: dict[str, Any] = json.loads(self.read(_outline_by(parts[0].name)) or b"{}")
        if said:
            said["stored"]["chunking"] = f"{len(parts):,} parts, the first: {said['stored']['chunking']}"
        return said

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return what is in ``parts`` or ``jobs``, and how many bytes each is."""
        return self._remote.sizes(folder)

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; they may be gone."""
        self._remote.remove(names)

    def alone(self) -> AbstractContextManager[None]:
        """Do nothing: the first manifest counts."""
        return nullcontext()

    def finish(self, index_file: str) -> None:
        """Remove all but the collection; the plan last: while it is there, the same command clears up."""
        self.remove([name for name in self.sizes("") if INDEX_NAME.fullmatch(name) and name != index_file])
        self.remove([f"{JOBS}/{name}" for name in self.sizes(JOBS) if name != PLAN])
        self.remove([f"{JOBS}/{PLAN}"])


def _known_by(name: str) -> str:
    return f"{JOBS}/{name}.{INDEX}"


def _outline_by(name: str) -> str:
    return f"{JOBS}/{name}.outline.json"
