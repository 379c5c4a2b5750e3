"""Collections in parts on a server: whole parts are fetched into a cache, and read there as local files.

Without an explicit cache, single images are read by range requests until all images are requested.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.errors import ArgumentError, FormatError, MissingPathError
from omearrow_ds.storage.byte_source import ByteRange
from omearrow_ds.storage.concat import OPEN_PARTS, Open
from omearrow_ds.storage.extents import Regions, Targets
from omearrow_ds.storage.formats import FILE_FORMAT_NAMES, Format
from omearrow_ds.storage.formats._base import (
    Array,
    Details,
    Header,
    Images,
    PartFetches,
    PartLayout,
    forwarded,
    read_distinct,
    stored_size,
)
from omearrow_ds.storage.formats._columns import ImageColumns
from omearrow_ds.storage.formats._error_translation import MALFORMED, translate_errors
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._stored import Outline, Stored
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.hashes import digest_of, part_hash
from omearrow_ds.storage.image_extents import PieceLayout
from omearrow_ds.storage.manifest import INDEX, MANIFEST, PARTS, PLATE, Manifest, PublishedPart
from omearrow_ds.storage.part_cache import PartCache, PinnedFile, write_all
from omearrow_ds.storage.published_parts import PublishedParts
from omearrow_ds.storage.remote import ObjectStore, Storage
from omearrow_ds.storage.urls import FetchCancelledError, Prefetcher
from omearrow_ds.storage.verified import VerifiedSource

MAX_AHEAD = 4  # Parts that are prefetched concurrently.
_MAX_LARGE = 2  # Parts that are prefetched concurrently if each is fetched in ranges.
_MIN_PARTS = 2  # Parts that a cache must have space for: one that is read, one that is fetched.
_WINDOW, _MIXED_WINDOW = 14, 4  # Parts in a shuffle window; the second if images were shuffled when parts were made.
RANGED_BYTES = 2**25  # Larger parts are fetched in ranges.
_RANGE_BYTES, _NUM_RANGES = 2**24, 4  # Size and concurrency of ranges.
_READ_BYTES = 2**20
OnBytes = Callable[[int], None]
_Known = tuple[Sequence[str], Array, Sequence[np.dtype[Any]], pa.ChunkedArray]  # Ids, shapes, dtypes and checksums.


class RangedPartSource(Images):
    """Images fetched by byte range from a part, which ``open_whole`` opens only for metadata; not verified."""

    metadata = forwarded("_whole.metadata")

    def __init__(
        self, path: Path, fmt: Format, part: PublishedPart, remote: ObjectStore, known: _Known, open_whole: Open
    ) -> None:
        image_ids, shapes, dtypes, checksums = known
        self.header = Header(
            format=fmt,
            path=path,
            guard=FileGuard(path),
            image_ids=image_ids,
            shapes=shapes,
            dtypes=dtypes,
            columns=ImageColumns(path, image_ids, pa.table({}), None, lambda: checksums),
            row_count=len(image_ids),
        )

        def find_storage() -> Stored:
            with closing(open_whole(path)) as whole:
                return whole.details.storage_info()

        self.details = Details(storage_info=find_storage, files=lambda: iter(()))
        self._part, self._remote, self._open_whole = part, remote, open_whole

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        del regions, out  # A `VerifiedSource` reads whole images, and crops them.
        return read_distinct(self._fetch, rows)

    def _fetch(self, rows: Sequence[int]) -> list[Array]:
        """Fetch images; images that are near each other in the file share a request."""
        located = list(map(self._locate, rows))
        ranges = [(start, start + layout.num_bytes) for start, layout in located]
        stored = self._remote.ranges(f"{PARTS}/{self._part.name}", ranges, size_bytes=self._part.size_bytes)[0]
        return [layout.image(data, 0) for (_, layout), data in zip(located, stored, strict=True)]

    def _locate(self, index: int) -> tuple[int, PieceLayout]:
        """Return the offset of the first pixel of an image, and its layout."""
        row, header = index, self.header
        shape, dtype = tuple(header.shapes[index].tolist()), header.dtypes[index].newbyteorder("<")
        for run in self._part.places:
            if row < run.images * run.times:
                repeat, position = divmod(row, run.images)
                start = run.start + repeat * run.apart + position * run.step
                if run.pieces >= 1 and math.prod(shape) % run.pieces == 0 and run.gap >= 0:
                    layout = PieceLayout(shape, dtype, run.pieces, gap_bytes=run.gap)
                    if 0 <= start <= start + layout.num_bytes <= self._part.size_bytes:
                        return start, layout
                break
            row -= run.images * run.times
        problem = f"the byte range of image {index} in the manifest is outside the part"
        raise FormatError(problem, path=header.path, image=index, remedy="restore the manifest")

    @cached_property
    def _whole(self) -> Images:
        return self._open_whole(self.header.path)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a single part cannot be pickled; pickle its collection")

    def close(self) -> None:
        if "_whole" in vars(self):
            self._whole.close()


class RemoteParts(PublishedParts):
    """Parts of a published collection on a server; opening it reads two objects, for any number of parts.

    Whole parts are fetched into ``cache``, and pinned there while they are open. ``open_ranged`` opens a part by its
    URL, so that single images are read by range requests if the format supports them. This ends when all images are
    expected, or when a part must be fetched whole. Without ``open_ranged``, parts are always fetched whole.
    """

    report = forwarded("_progress.start")

    def __init__(
        self, path: Url, open_part: Open, storage: Storage, cache: PartCache, open_ranged: Open | None
    ) -> None:
        self._remote, self._cache = ObjectStore(path, storage), cache
        data = bytes(self._remote.read(MANIFEST))
        self._digest, self._manifest_bytes, guard = digest_of(data), len(data), FileGuard(path)
        guard.fingerprint = (0, int(self._digest, 16))
        self._lock = ProcessLocal(threading.RLock)  # Prevents closing and evicting a part that another thread reads.
        self._pinned: dict[int, PinnedFile] = {}
        self._pinned_index: PinnedFile | None = None
        super().__init__(path, open_part, Manifest.parse(data, path / MANIFEST), guard)
        self.variant = (self._digest,)
        if self.format.is_folder:
            problem = f"parts of {self.format.label} are folders, but parts on a server must be single files"
            remedy = f"convert to one of {FILE_FORMAT_NAMES}, or copy the collection to this machine"
            raise FormatError(problem, path=self.path, remedy=remedy)
        self._sizes_bytes = [part.size_bytes for part in self.manifest.parts]
        self._progress, self._max_ahead = DownloadProgress(self._sizes_bytes), 0
        self._prefetcher = ProcessLocal(self._new_prefetcher)
        self._open_ranged = open_ranged if "ranges" in self.format.remote_access else None
        if self._open_ranged is None:
            self.max_open = self._reserve()

    @property
    def fetches(self) -> PartFetches:
        return self

    def _new_prefetcher(self) -> Prefetcher[int, None]:
        is_large = max(self._sizes_bytes, default=0) > RANGED_BYTES
        max_running = min(self._max_ahead, _MAX_LARGE) if is_large else self._max_ahead
        return Prefetcher("omearrow-ds-fetch", self._max_ahead, max_running, has_results=False)

    def find_index(self) -> Path:
        """Return the cached path of the image index, which is fetched if it is missing."""
        name = f"00000-{self.manifest.index}.{INDEX}"
        pinned = self._pinned_index or self._cache.get(name)
        if pinned is None:
            data = self._remote.read(self.manifest.index_file)
            if digest_of(data) != self.manifest.index:
                path = self.path / self.manifest.index_file
                raise FormatError(f"{path}: differs from the file that {MANIFEST} lists; restore it")
            pinned = self._cache.acquire(name, len(data), lambda descriptor: write_all(descriptor, data))
        self._pinned_index = pinned
        return pinned.path

    def _reserve(self, min_parts: int = _MIN_PARTS) -> int:
        """Set how many parts are prefetched, and return the limit of open parts; ``min_parts`` must fit the cache."""
        largest_bytes = max(self._sizes_bytes, default=0) or 1
        index_bytes, limit_bytes = self.find_index().stat().st_size, self._cache.limit_bytes
        slots = (limit_bytes - index_bytes) // largest_bytes
        if slots < min_parts:
            min_bytes = min_parts * largest_bytes + index_bytes
            needed = f"{self.path} needs at least {min_bytes:,} bytes in {self._cache.folder}"
            problem = f"{needed} for its index and {min_parts} parts (the largest has {largest_bytes:,} bytes)"
            remedy = "raise the limit, or pass a part_cache on a larger disk"
            raise ArgumentError(problem, option="part_cache_bytes", value=limit_bytes, remedy=remedy)
        self._max_ahead = min(MAX_AHEAD, slots // 2)
        return min(OPEN_PARTS, slots - self._max_ahead)

    def _fetch_whole(self) -> None:
        """Fetch whole parts from now on."""
        if self._open_ranged is not None:
            self.max_open, self._open_ranged = self._reserve(), None
            super().close()

    def expect(self, parts: Sequence[int], at_once: int = 1) -> None:
        self._fetch_whole()
        max_ahead = MAX_AHEAD if at_once > 1 else 1
        self._reserve(min(at_once + max_ahead + (at_once > 1), len(self.manifest.parts)))
        # Queued functions refer neither to this object nor to their queue, so that both are freed without a collection.
        remote, cache, progress, prefetcher = self._remote, self._cache, self._progress, self._prefetcher.get()
        queue = weakref.proxy(prefetcher)

        def prefetch(number: int, part: PublishedPart) -> None:
            def on_bytes(num_bytes: int) -> None:
                if not queue.is_wanted:
                    raise FetchCancelledError
                progress.add_bytes(number, num_bytes)

            with suppress(BlockingIOError):  # The cache is full.
                pinned = cache.try_acquire(part.name, part.size_bytes, partial(fetch_part, remote, part, on_bytes))
                if pinned is not None:  # Else another process fetches the part.
                    pinned.close()

        listed, missing = self.manifest.parts, [number for number in parts if number not in self._pinned]
        prefetcher.schedule({number: partial(prefetch, number, listed[number]) for number in missing})

    def begin(self, part: int) -> None:
        if self._max_ahead:
            self._prefetcher.get().start(part)

    @property
    def layout(self) -> PartLayout:
        layout = self.manifest.made.get("layout", {})
        is_permuted, groups = layout.get("shuffle_seed") is not None, [PLATE, *layout.get("group_by", ())]
        columns = self.read_columns([name for name in self.index.columns.names if name in groups])
        is_one_group = all(pc.count_distinct(column, "all").as_py() < 2 for column in columns.columns)
        window = _MIXED_WINDOW if is_permuted else _WINDOW
        return super().layout._replace(window=window, mixed=is_permuted and is_one_group)

    def _open(self, number: int) -> Images:
        part = self.manifest.parts[number]
        if self._open_ranged is not None:
            pinned = self._cache.get(part.name)
            if pinned is not None:
                self._pinned[number] = pinned
                return self.open_part(pinned.path)
            source = _open_by_ranges(self, number, self._remote, self._open_ranged)
            if source is not None:
                return source
            self._fetch_whole()
        future = self._prefetcher.get().take(number)
        if future is not None and not future.done():  # After an earlier error, the part is fetched again.
            with suppress(FetchCancelledError):
                future.result()
        fetch = partial(fetch_part, self._remote, part, partial(self._progress.add_bytes, number))
        pinned = self._cache.acquire(part.name, part.size_bytes, fetch, release=lambda: self._close_oldest() >= 0)
        self._pinned[number] = pinned
        self._progress.add_bytes(number, part.size_bytes)  # It may have been cached, or fetched by another process.
        return self.open_part(pinned.path)

    def _close_oldest(self) -> int:
        number = super()._close_oldest()
        self._unpin(number)
        return number

    def _unpin(self, number: int) -> None:
        pinned = self._pinned.pop(number, None)
        if pinned is not None:
            pinned.close()

    def _open_checked(self, number: int) -> Images:
        try:
            with self.reading():
                return super()._open_checked(number)
        except BaseException:
            self._unpin(number)
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Block other threads while parts are read; report a part that is missing because of a replaced collection."""
        try:
            with self._lock.get():
                yield
        except MissingPathError:
            if digest_of(self._remote.read(MANIFEST)) != self._digest:
                raise FormatError(f"{self.path}: was replaced since it was opened; open it again") from None
            raise

    def are_in_place(self) -> bool:
        if self._open_ranged is not None:
            return False
        if not self.manifest.outline:  # It was made by an older version.
            return super().are_in_place()
        return self.outline().stored.in_place  # Known without fetching a part.

    def files(self) -> Iterator[Path]:
        yield from ()

    def stored_size(self) -> tuple[int, int, int]:
        own_bytes = self._manifest_bytes + self.find_index().stat().st_size
        size_bytes = sum(self._sizes_bytes) + own_bytes
        return len(self.paths) + 2, size_bytes, size_bytes

    def outline(self) -> Outline:
        if not self.manifest.outline:
            unknown = "unknown until a part is fetched"
            return Outline(Stored(None, unknown, unknown, in_place=False, reading=unknown, looked_at=0), [])
        with translate_errors(self.path / MANIFEST, "the manifest of a collection in parts", MALFORMED):
            return Outline.of_json(self.manifest.outline)

    def close(self) -> None:
        """Close all parts, cancel running fetches, and release the index; later calls begin again."""
        super().close()
        self._prefetcher.get().close()
        self._prefetcher.close()
        if self._pinned_index is not None:
            self._pinned_index.close()
            self._pinned_index = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteParts, (self.path, self.open_part, self._remote.storage, self._cache, self._open_ranged)


def _open_by_ranges(parts: PublishedParts, number: int, remote: ObjectStore, open_ranged: Open) -> Images | None:
    """Return a part that is read by byte ranges; None if it must be fetched."""
    part, path = parts.manifest.parts[number], parts.paths[number]
    if part.places and parts.checksums is not None:  # Checksums detect images of a replaced object.
        rows = slice(parts.starts[number], parts.starts[number + 1])
        index = parts.index
        known = index.image_ids[rows], index.shapes[rows], index.dtypes[rows], parts.checksums[rows]
        return VerifiedSource(RangedPartSource(path, parts.format, part, remote, known, open_ranged))
    with suppress(FormatError):  # The compression needs whole parts; or it is damaged, which its hash detects.
        source = open_ranged(path)
        if stored_size(source)[1] == part.size_bytes:
            return source
        source.close()
    return None


class DownloadProgress:
    """Reports progress of fetching parts to a callback; bytes that are fetched again are not counted."""

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self._sizes_bytes = sizes_bytes
        self._missing_bytes: list[int] = []
        self._notify: Callable[[int], object] | None = None
        self._lock = threading.Lock()

    def start(self, notify: Callable[[int], object] | None) -> int:
        """Start to report numbers of fetched bytes to ``notify``, and return the total size of all parts in bytes."""
        with self._lock:
            self._notify, self._missing_bytes = notify, list(self._sizes_bytes)
            return sum(self._missing_bytes)

    def add_bytes(self, number: int, num_bytes: int) -> None:
        """Report more bytes of a part; bytes beyond its size, from a repeated fetch, are ignored."""
        with self._lock:
            if self._notify is not None:
                new_bytes = min(num_bytes, self._missing_bytes[number])
                self._missing_bytes[number] -= new_bytes
                self._notify(new_bytes)


def fetch_part(remote: ObjectStore, part: PublishedPart, on_bytes: OnBytes, descriptor: int) -> None:
    """Fetch a part into a file, and compare its bytes with the hash in its name; ``on_bytes`` may raise to abort."""
    name, digest = f"{PARTS}/{part.name}", part_hash(part.hash)

    def write(piece: memoryview) -> None:
        on_bytes(len(piece))
        digest.update(piece)
        write_all(descriptor, piece)

    if part.size_bytes <= RANGED_BYTES:
        remote.fetch(name, part.size_bytes, write)
    else:
        for start, stop in _fetch_ranges(remote, part, descriptor, on_bytes):
            for first in range(start, stop, _READ_BYTES):
                digest.update(os.pread(descriptor, min(_READ_BYTES, stop - first), first))
    if digest.hexdigest() != part.hash:
        problem = "the content does not match the hash in the file name"
        raise FormatError(problem, path=f"{remote.url}/{name}", remedy="restore the file")


def _fetch_ranges(remote: ObjectStore, part: PublishedPart, descriptor: int, on_bytes: OnBytes) -> Iterator[ByteRange]:
    """Fetch the ranges of a part concurrently, write them at their offsets, and yield them in file order."""
    ranges = Prefetcher[ByteRange, None]("omearrow-ds-range", _NUM_RANGES, _NUM_RANGES)

    def fetch(start: int, stop: int) -> None:
        offset = start

        def write(piece: memoryview) -> None:
            nonlocal offset
            if not ranges.max_ahead:  # Closed after an error.
                raise FetchCancelledError
            on_bytes(len(piece))
            write_all(descriptor, piece, offset)
            offset += len(piece)

        remote.fetch(f"{PARTS}/{part.name}", part.size_bytes, write, span=(start, stop))

    starts = range(0, part.size_bytes, _RANGE_BYTES)
    spans = [(start, min(start + _RANGE_BYTES, part.size_bytes)) for start in starts]
    ranges.schedule({span: partial(fetch, *span) for span in spans})
    try:
        for span in spans:
            future = ranges.take(span)
            if future is None:  # The main thread has ended, so nothing is prefetched.
                fetch(*span)
            else:
                future.result()
            yield span
    finally:
        wait(ranges.close())  # The descriptor is closed next.
