"""Collections in parts on a server: whole parts are fetched into a cache, and read there as local files.

Without an explicit cache, single images are read by range requests until all images are requested.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, FormatError, MissingPathError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import ByteRange
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats import FORMATS
from omearrow_ds.storage.formats._base import Array, Images, PartLayout, is_uniform
from omearrow_ds.storage.formats._error_translation import MALFORMED, translate_errors
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._stored import Outline, Stored
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of
from omearrow_ds.storage.manifest import INDEX, MANIFEST, PARTS, Manifest, PublishedSource
from omearrow_ds.storage.part_cache import PartCache, PinnedFile, write_all
from omearrow_ds.storage.part_stacks import PartStacks
from omearrow_ds.storage.parts_source import OPEN_PARTS, Open
from omearrow_ds.storage.planning import PLATE
from omearrow_ds.storage.prefetcher import (
    RANGED_BYTES,
    DownloadProgress,
    FetchCancelledError,
    Prefetcher,
    fetch_part,
    prefetch_part,
)
from omearrow_ds.storage.ranged_part_source import RangedPartSource
from omearrow_ds.storage.remote import ObjectStore, Storage
from omearrow_ds.storage.verified import VerifiedSource

AHEAD = 4  # Parts that are prefetched concurrently.
_MAX_LARGE = 2  # Parts that are prefetched concurrently if each is fetched in ranges.
_MIN_PARTS = 2  # Parts that a cache must have space for: one that is read, one that is fetched.
_WINDOW, _MIXED_WINDOW = 14, 4  # Parts in a shuffle window; the second if images were shuffled when parts were made.


class RemotePartsSource(PublishedSource):
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
    open_ranged
        Opens a part by its URL to read a few images, if the format supports range requests, until `expect` requests
        more, or a part needs to be fetched whole; None if parts are always fetched whole.
    """

    def __init__(
        self, path: Url, opening: Open, storage: Storage, cache: PartCache, open_ranged: Open | None = None
    ) -> None:
        self._remote, self.cache = ObjectStore(path, storage), cache
        self._lock = ProcessLocal(threading.RLock)  # Prevents closing and evicting a part that another thread reads.
        self._pinned: dict[int, PinnedFile] = {}
        self._pinned_index: PinnedFile | None = None
        super().__init__(path, opening)
        self._refuse_folders()
        self._progress = DownloadProgress(self.manifest.parts)
        self._prefetcher = ProcessLocal(self._new_prefetcher)
        self._open_ranged = open_ranged if self.format.by_ranges else None
        if self._open_ranged is None:
            self._fetch_whole()

    def _fetch_whole(self) -> None:
        """Fetch whole parts from now on."""
        self._close_parts()
        self._open_ranged = None
        self._open_parts, self._max_ahead = self._room(_MIN_PARTS)

    def _new_prefetcher(self) -> Prefetcher[int, None]:
        is_large = any(part.size_bytes > RANGED_BYTES for part in self.manifest.parts)
        max_running = min(self._max_ahead, _MAX_LARGE) if is_large else self._max_ahead
        return Prefetcher("omearrow-ds-fetch", self._max_ahead, max_running, has_results=False)

    def _manifest_of(self) -> Manifest:
        data = bytes(self._remote.read(MANIFEST))
        digest, self._manifest_bytes = digest_of(data), len(data)
        self.guard.fingerprint, self.variant = (0, int(digest, 16)), (digest,)
        return Manifest.parse(data, self.path / MANIFEST)

    def _index_of(self, manifest: Manifest) -> Path:
        if self._pinned_index is None:
            name = f"00000-{manifest.index}.{INDEX}"
            self._pinned_index = self.cache.get(name) or self._fetch_index(name, manifest)
        return self._pinned_index.path

    def _fetch_index(self, name: str, manifest: Manifest) -> PinnedFile:
        data = self._remote.read(manifest.index_file)
        if digest_of(data) != manifest.index:
            path = f"{self.path}/{manifest.index_file}"
            raise FormatError(f"{path}: differs from the file that {MANIFEST} lists; restore it")
        return self.cache.acquire(name, len(data), lambda descriptor: write_all(descriptor, data))

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
                f"parts (the largest has {largest_bytes:,} bytes)",
                option="part_cache_bytes",
                value=self.cache.limit_bytes,
                remedy="raise the limit, or pass a part_cache on a larger disk",
            )
        max_ahead = min(AHEAD, slots // 2)
        return min(OPEN_PARTS, slots - max_ahead), max_ahead

    @cached_property
    def part_layout(self) -> PartLayout:
        layout = self.manifest.made.get("layout", {})
        is_permuted, groups = layout.get("shuffle_seed") is not None, [PLATE, *layout.get("group_by", ())]
        is_one_group = all(
            pc.count_distinct(self.column(name), "all").as_py() < 2 for name in groups if name in self.column_names
        )
        window = _MIXED_WINDOW if is_permuted else _WINDOW
        return super().part_layout._replace(window=window, mixed=is_permuted and is_one_group)

    @property
    def part_fetches(self) -> Self:  # type: ignore[override]  # Read-only.
        return self

    def expect(self, parts: Sequence[int], at_once: int = 1) -> None:
        if self._open_ranged is not None:
            self._fetch_whole()
        max_ahead = AHEAD if at_once > 1 else 1
        self._room(min(at_once + max_ahead + (at_once > 1), len(self.manifest.parts)))
        prefetcher, prefetch = self._prefetcher.get(), partial(prefetch_part, self._remote, self.cache, self._progress)
        missing = [number for number in parts if number not in self._pinned]
        prefetcher.schedule({number: partial(prefetch, number, weakref.proxy(prefetcher)) for number in missing})

    def begin(self, part: int) -> None:
        if self._open_ranged is None:
            self._prefetcher.get().start(part)

    def _open_number(self, number: int) -> Images:
        return self._open_by_ranges(number) or super()._open_number(number)

    def _open_by_ranges(self, number: int) -> Images | None:
        """Return a part that is cached or is read by byte ranges; None if it must be fetched."""
        part = self.manifest.parts[number]
        if self._open_ranged is None:
            return None
        pinned = self.cache.get(part.name)
        if pinned is not None:
            self._pinned[number] = pinned
            return self._open_part(pinned.path)
        if part.places and self.checksums is not None:
            return self._placed(number, self._open_ranged, self.checksums)
        with suppress(FormatError):  # The compression needs whole parts; or it is damaged, which its hash detects.
            source = self._open_ranged(self.parts[number])
            if source.stored_size()[1] == part.size_bytes:
                return source
            source.close()
        self._fetch_whole()
        return None

    def _placed(self, number: int, open_ranged: Open, checksums: pa.ChunkedArray) -> Images:
        """Return a part whose images are fetched singly; checksums detect images of a replaced object."""
        part, images = self.manifest.parts[number], slice(self.starts[number], self.starts[number + 1])
        known = self.image_ids[images], self.shapes[images], self.dtypes[images], checksums[images]

        def fetch(ranges: Sequence[ByteRange]) -> list[memoryview]:
            return self._remote.ranges(f"{PARTS}/{part.name}", ranges, size_bytes=part.size_bytes)[0]

        path = self.parts[number]
        return VerifiedSource(
            RangedPartSource(path, self.format, part.size_bytes, part.places, known, fetch, open_ranged)
        )

    def mapped_stacks(self) -> Stacks | None:
        if self._open_ranged is not None:
            return None
        if not self.manifest.outline:  # It was made by an older version.
            return super().mapped_stacks()
        in_place = len(self) and is_uniform(self) and self.outline().stored.in_place  # Known without fetching a part.
        return PartStacks(self) if in_place else None

    def _file_of(self, number: int) -> Path:
        part, future = self.manifest.parts[number], self._prefetcher.get().take(number)
        if future is not None and not future.done():  # After an earlier error, the part is fetched again.
            with suppress(FetchCancelledError):
                future.result()
        fetch = partial(fetch_part, self._remote, part, partial(self._progress.add_bytes, number))
        pinned = self.cache.acquire(part.name, part.size_bytes, fetch, release=self._release_part)
        self._pinned[number] = pinned
        self._progress.add_bytes(number, part.size_bytes)  # It may have been cached, or fetched by another process.
        return pinned.path

    def report(self, notify: Callable[[int], object] | None) -> int:
        return self._progress.start(notify)

    def _release_part(self) -> bool:
        has_open_parts = bool(self._opened)
        self._close_oldest()
        return has_open_parts

    def _opened_part(self, number: int) -> Images:
        try:
            with self._reading_alone():
                return super()._opened_part(number)
        except BaseException:
            self._closed(number)
            raise

    @contextmanager
    def _reading_alone(self) -> Iterator[None]:
        """Block other threads while parts are read; report a part that is missing because of a replaced collection."""
        try:
            with self._lock.get():
                yield
        except MissingPathError:
            if digest_of(self._remote.read(MANIFEST)) != self.variant[0]:
                raise FormatError(f"{self.path}: was replaced since it was opened; open it again") from None
            raise

    def read_arrays(
        self, rows: Sequence[int], regions: Sequence[Region] | None = None, out: Sequence[Array] | None = None
    ) -> list[Array]:
        with self._reading_alone():
            return super().read_arrays(rows, regions, out)

    def _closed(self, number: int) -> None:
        pinned = self._pinned.pop(number, None)
        if pinned is not None:
            pinned.close()

    def stored_files(self) -> Iterator[Path]:
        yield from ()

    def stored_size(self) -> tuple[int, int, int]:
        own_bytes = self._manifest_bytes + self._index_of(self.manifest).stat().st_size
        size_bytes = sum(part.size_bytes for part in self.manifest.parts) + own_bytes
        return len(self.parts) + 2, size_bytes, size_bytes

    def outline(self) -> Outline:
        if not self.manifest.outline:
            unknown = "unknown until a part is fetched"
            return Outline(Stored(None, unknown, unknown, in_place=False, reading=unknown, looked_at=0), [])
        with translate_errors(self.path / MANIFEST, "the manifest of a collection in parts", MALFORMED):
            return Outline.of_json(self.manifest.outline)

    def _close_parts(self) -> None:
        super().close()

    def close(self) -> None:
        self._close_parts()
        if self._open_ranged is None:
            self._prefetcher.get().close()
            self._prefetcher.close()
        if self._pinned_index is not None:
            self._pinned_index.close()
            self._pinned_index = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePartsSource, (self.path, self._open_part, self._remote.storage, self.cache, self._open_ranged)
