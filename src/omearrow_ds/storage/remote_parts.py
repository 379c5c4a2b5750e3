"""Collections in parts on a server: whole parts are fetched into a cache, and read there as local files.

Without an explicit cache, single images are read by range requests until all images are requested.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, FormatError, MissingPathError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import ByteRange
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats import FORMATS
from omearrow_ds.storage.formats._base import Array, BaseSource, Parted
from omearrow_ds.storage.formats._failures import MALFORMED, refusing
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._stored import Outline, Stored
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.manifest import INDEX, MANIFEST, PARTS, Manifest, PublishedSource
from omearrow_ds.storage.part_cache import Held, PartCache, write_all
from omearrow_ds.storage.part_fetches import Ahead, Arrivals, fetching
from omearrow_ds.storage.part_stacks import PartStacks
from omearrow_ds.storage.parts import OPEN_PARTS, Open
from omearrow_ds.storage.placed import Placed
from omearrow_ds.storage.planning import PLATE
from omearrow_ds.storage.remote import Remote, Storage
from omearrow_ds.storage.verified import VerifiedSource

AHEAD = 4  # Parts that are prefetched concurrently.
_FEWEST = 2  # Parts that a cache must have space for: one that is read, one that is fetched.
_WINDOW, _MIXED_WINDOW = 14, 4  # Parts in a shuffle window; the second if images were shuffled when parts were made.


class RemoteParts(PublishedSource):
    """A published collection in parts on a server; opening it reads two objects, for any number of parts.

    Parameters
    ----------
    path
        URL of the folder.
    opening
        Picklable function that opens a part.
    storage
        Access to the server.
    cache
        Cache of fetched parts.
    looking
        Opens a part by its URL to read a few images, if the format supports range requests, until `expect` requests
        more; None if parts are always fetched whole.
    """

    def __init__(
        self, path: Url, opening: Open, storage: Storage, cache: PartCache, looking: Open | None = None
    ) -> None:
        self._remote, self.cache = Remote(path, storage), cache
        self._turn = ProcessLocal(threading.RLock)  # Prevents closing and evicting a part that another thread reads.
        self._held: dict[int, Held] = {}
        self._index_held: Held | None = None
        super().__init__(path, opening)
        self._refuse_folders()
        self._arrivals = Arrivals(self.manifest.parts)
        self._looking = looking if self.format.by_ranges else None
        if self._looking is None:
            self._fetch_whole()

    def _fetch_whole(self) -> None:
        """Fetch whole parts from now on."""
        self._close_parts()
        self._looking = None
        self._open_parts, ahead = self._room(_FEWEST)
        self._ahead = ProcessLocal(partial(Ahead, self._remote, self.cache, self.manifest.parts, ahead, self._arrivals))

    def _refuse_replaced(self) -> None:
        """Do nothing: a source keeps its manifest, and the hash of a part detects changes."""

    def _manifest_of(self) -> Manifest:
        said = self._remote.read(MANIFEST)
        digest, self._manifest_bytes = digest_of(said), len(said)
        self.stamp, self.variant = (0, int(digest, 16)), (digest,)
        return Manifest.parse(said, self.path / MANIFEST)

    def _index_of(self, manifest: Manifest) -> Path:
        if self._index_held is None:
            name = f"00000-{manifest.index}.{INDEX}"
            self._index_held = self.cache.there(name) or self._fetched_index(name, manifest)
        return self._index_held.path

    def _fetched_index(self, name: str, manifest: Manifest) -> Held:
        data, path = self._remote.read(manifest.index_file), f"{self.path}/{manifest.index_file}"
        if digest_of(data) != manifest.index:
            raise FormatError(f"{path}: differs from the file that {MANIFEST} names; restore it")
        return self.cache.hold(name, len(data), lambda descriptor: write_all(descriptor, memoryview(data)))

    def _refuse_folders(self) -> None:
        if self.format.in_folder:
            names = ", ".join(fmt.name for fmt in FORMATS if not fmt.in_folder)
            raise FormatError(
                f"{self.path}: parts of {self.format.label} are folders, but parts on a server must be single files "
                f"of {names}; convert to one of these formats, or copy the collection to this machine"
            )

    def _room(self, parts: int) -> tuple[int, int]:
        """Return the maximum numbers of open and prefetched parts, given cache space for at least ``parts``."""
        largest_bytes = max((part.size_bytes for part in self.manifest.parts), default=0) or 1
        index_bytes = self._index_of(self.manifest).stat().st_size
        slots = (self.cache.limit_bytes - index_bytes) // largest_bytes
        if slots < parts:
            needed_bytes = parts * largest_bytes + index_bytes
            raise ArgumentError(
                f"{self.path} needs at least {needed_bytes:,} bytes in {self.cache.folder} for its index and {parts} "
                f"parts, the largest of which has {largest_bytes:,} bytes",
                option="part_cache_bytes",
                value=self.cache.limit_bytes,
                remedy="raise it, or pass a part_cache on a larger disk",
            )
        ahead = min(AHEAD, slots // 2)
        return min(OPEN_PARTS, slots - ahead), ahead

    @cached_property
    def parted(self) -> Parted:
        layout = self.manifest.made.get("layout", {})
        permuted, groups = layout.get("shuffle_seed") is not None, [PLATE, *layout.get("group_by", ())]
        alike = all(
            pc.count_distinct(self.column(name), "all").as_py() < 2 for name in groups if name in self.column_names
        )
        return super().parted._replace(window=_MIXED_WINDOW if permuted else _WINDOW, mixed=permuted and alike)

    def expect(self, parts: Sequence[int], at_once: int = 1) -> None:
        if self._looking is not None:
            self._fetch_whole()
        ahead = AHEAD if at_once > 1 else 1
        self._room(min(at_once + ahead + (at_once > 1), len(self.manifest.parts)))
        self._ahead.get().expect([number for number in parts if number not in self._held])

    def reached(self, part: int) -> None:
        if self._looking is None:
            self._ahead.get().reached(part)

    def _open_number(self, number: int) -> BaseSource:
        part, looking = self.manifest.parts[number], self._looking
        held = None if looking is None else self.cache.there(part.name)
        if held is not None:
            self._held[number] = held
            return self._open_part(held.path)
        if looking is not None and part.places and self.checksums is not None:
            return self._placed(number, looking)
        if looking is not None:
            try:
                source = looking(self.parts[number])
            except FormatError:  # The compression needs whole parts; or it is damaged, which its hash detects.
                self._fetch_whole()
            else:
                if source.stored_size()[1] == part.size_bytes:
                    return source
                source.close()
                self._fetch_whole()
        return super()._open_number(number)

    def _placed(self, number: int, looking: Open) -> BaseSource:
        """Return a part whose images are fetched singly; checksums detect images of a replaced object."""
        part, images = self.manifest.parts[number], slice(self.starts[number], self.starts[number + 1])
        assert self.checksums is not None
        known = self.image_ids[images], self.shapes[images], self.dtypes[images], self.checksums[images]

        def fetch(spans: Sequence[ByteRange]) -> list[memoryview]:
            return self._remote.ranges(f"{PARTS}/{part.name}", spans, size_bytes=part.size_bytes)[0]

        path = self.parts[number]
        return VerifiedSource(Placed(path, self.format, part.size_bytes, part.places, known, fetch, looking))

    def stacked(self) -> Stacks | None:
        if self._looking is not None:
            return None
        if not self.manifest.outline:  # It was made by an older version.
            return super().stacked()
        in_place = len(self) and self.uniform and self.outline().stored.in_place  # Known without fetching a part.
        return PartStacks(self) if in_place else None

    def _file_of(self, number: int) -> Path:
        part = self.manifest.parts[number]
        fetch = self._ahead.get().taken(number, fetching(self._remote, part, partial(self._arrivals.more, number)))
        held = self.cache.hold(part.name, part.size_bytes, fetch, let_go=self._let_go)
        self._held[number] = held
        self._arrivals.more(number, part.size_bytes)  # It may have been cached, or fetched by another process.
        return held.path

    def arriving(self, notify: Callable[[int], object] | None) -> int:
        return self._arrivals.tell(notify)

    def _let_go(self) -> bool:
        some = bool(self._opened)
        self._close_oldest()
        return some

    def _opened_part(self, number: int) -> BaseSource:
        try:
            with self._telling():
                return super()._opened_part(number)
        except BaseException:
            self._closed(number)
            raise

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Let one thread read at a time; report a part that is missing because the collection was replaced."""
        try:
            with self._turn.get():
                yield
        except MissingPathError:
            if digest_of(self._remote.read(MANIFEST)) != self.variant[0]:
                raise FormatError(f"{self.path}: was replaced since it was opened; open it again") from None
            raise

    def views(self, indices: Sequence[int]) -> list[Array]:
        with self._telling():
            return super().views(indices)

    def read_regions(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Array]:
        with self._telling():
            return super().read_regions(rows, regions)

    def _closed(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            held.close()

    def stored_files(self) -> Iterator[Path]:
        yield from ()

    def stored_size(self) -> tuple[int, int, int]:
        beside_bytes = self._manifest_bytes + self._index_of(self.manifest).stat().st_size
        size_bytes = sum(each.size_bytes for each in self.manifest.parts) + beside_bytes
        return len(self.parts) + 2, size_bytes, size_bytes

    def outline(self) -> Outline:
        if not self.manifest.outline:
            unknown = "unknown before a part is fetched"
            return Outline(Stored(None, unknown, unknown, in_place=False, reading=unknown, looked_at=0), [])
        with refusing(self.path / MANIFEST, "the manifest of a collection in parts", MALFORMED):
            return Outline.of_json(self.manifest.outline)

    def _close_parts(self) -> None:
        super().close()

    def close(self) -> None:
        self._close_parts()
        if self._looking is None:
            self._ahead.get().close()
            self._ahead.close()
        if self._index_held is not None:
            self._index_held.close()
            self._index_held = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteParts, (self.path, self._open_part, self._remote.storage, self.cache, self._looking)
