"""`Images`: what datasets and conversions read; the base class of formats and of compositions of images."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from omearrow_ds.errors import ArgumentError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.resources import image_bytes, space_on_disk, split_by_bytes
from omearrow_ds.storage.extents import Region, Regions, Targets
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.formats._columns import ImageColumns
from omearrow_ds.storage.formats._detect import Paths, entries_below
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.formats._regions import rows_to_positions, slices_of
from omearrow_ds.storage.formats._stored import Outline, Stored, spread

Array = np.ndarray[Any, Any]
_PIECE_BYTES = 2**21  # pixels written and then read again: less than the cache that cores share
_REGIONS_BYTES = 2**26  # Images that are decoded at once for their regions.
BLOCK_BYTES = 2**25  # Images that are read together when all are read.
Block = tuple[int, Array | list[Array]]
Done = Callable[[int, int], object]


class PartLayout(NamedTuple):
    """First images and fingerprint of the parts of a collection, and properties for shuffling its samples."""

    starts: Sequence[int]  # the number of the first image of each part, and of all images
    digest: str  # fingerprint of the parts
    # number of parts to shuffle samples over if each part is fetched as a whole, else None
    window: int | None = None
    mixed: bool = False  # whether samples were permuted across all parts, so that each is a random sample of all


class PartFetches(Protocol):
    """Fetches of whole parts of a collection from a server."""

    def expect(self, parts: Sequence[int], at_once: int = 1) -> None:
        """Announce the order of the parts to be read, ``at_once`` parts at a time, so that they can be prefetched.

        Raises `ArgumentError` if that number of parts exceeds the cache.
        """

    def begin(self, part: int) -> None:
        """Announce that this or another process has begun to read a part."""

    def report(self, notify: Callable[[int], object] | None) -> int:
        """Report fetched bytes to ``notify`` until the next call, one thread at a time; return the total number."""


class ImageBuffer(Protocol):
    """Writable images in memory: an index returns one image as an array (T, C, Z, Y, X)."""

    def __getitem__(self, index: Any, /) -> Array: ...


@dataclass(kw_only=True)
class Header:
    """Properties of the N images of an open collection that are known without reading pixels."""

    format: Format
    path: Path
    guard: FileGuard
    image_ids: Sequence[str]
    shapes: Array  # (N, 5), int64.
    dtypes: Sequence[np.dtype[Any]]
    columns: ImageColumns
    image_column: tuple[str, ...] = ()  # Names of the columns that hold the images; empty for a folder.
    other_image_columns: tuple[str, ...] = ()
    # Selects one of several collections at a path: the table name, the level, the files that make an image, a filter.
    variant: tuple[str, ...] = ()
    selected_rows: Array | None = None  # Row number of each image in the table; None if all rows are images.
    row_count: int  # Number of rows of the table, including skipped rows.
    requested_path: Paths | None = None  # From which `open_source` opened it.
    # Reopens it in another process from names only; pickling otherwise carries the listing too.
    opened_by: Callable[[], Images] | None = None
    find_part_layout: Callable[[], PartLayout | None] = lambda: None
    part_fetches: PartFetches | None = None  # Fetches of whole parts from a server.
    # Returns consecutive rows that are cheap to read by one call, for example those of a row group.
    find_groups: Callable[[], Iterable[slice] | None] = lambda: None

    @cached_property
    def rows(self) -> Array:
        """Row number of each image in the table, int64."""
        return np.arange(len(self.image_ids)) if self.selected_rows is None else self.selected_rows

    @cached_property
    def part_layout(self) -> PartLayout | None:
        """Properties of the parts of the collection; None for a single file or folder."""
        return self.find_part_layout()


@dataclass(kw_only=True)
class Details:
    """Functions that return how a collection is stored and read; they may open files, but decode no pixels."""

    storage_info: Callable[[], Stored]
    files: Callable[[], Iterator[Path]]  # Local files that hold the collection.
    size: Callable[[], tuple[int, int, int] | None] = lambda: None  # See `stored_size`; None if all files are local.
    outline: Callable[[], Outline | None] = lambda: None  # Layout that is known without opening a part.
    image_columns: Callable[[], list[ImagesOf]] = list  # Summaries of the image columns of a table.
    label_names: Callable[[], list[str]] = list  # Names of label images stored with a few images.
    # Stems of the files of an image, by which other files may refer to it.
    file_stems: Callable[[int], Sequence[str]] = lambda _: ()
    # Files that store an image and little else; empty if they are unknown before files are read.
    files_of: Callable[[int], Sequence[str]] = lambda _: ()
    fills_out: Callable[[], bool] = bool  # Whether `Images.read` fills ``out``, which saves a copy of each image.
    # Whether two threads that read half of a batch each take at most 1 / 1.3 of the time of one.
    decodes_in_threads: Callable[[], bool] = bool


class Images(ABC):
    """Images of an open collection, as datasets and conversions read them; users have `CollectionSource`.

    A subclass sets ``header`` and ``details`` in its constructor. Rows are indices of images, from 0 to N - 1.
    """

    header: Header
    details: Details

    def prefetch(self, rows: Sequence[int]) -> None:  # noqa: B027  # Most sources do not fetch.
        """Announce the images that will be read next, in this order, so that sources on servers can fetch them."""

    def labels(self, name: str) -> tuple[Images, Array]:
        """Return the label images called ``name``, and the index of each image's label image, -1 if missing."""
        problem = f"{self.header.format.label} does not store label images"
        remedy = "pass the path of another collection with the masks"
        raise ArgumentError(problem, path=self.header.path, option="masks", value=f"labels/{name}", remedy=remedy)

    @abstractmethod
    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        """Return one image (T, C, Z, Y, X), or one region of an image, per row.

        The arrays may be read-only views of a mapped file. Rows are in any order, with repeats. Regions are not empty,
        and inside the image. If `Details.fills_out`, ``out`` is filled and returned: contiguous arrays of the
        shapes and dtypes of the images.
        """

    def mapped_stacks(self) -> Stacks | None:
        """Return all images as views of the memory-mapped file, or None if they cannot be views."""
        return None

    def stream(self) -> Iterator[Block]:
        """Yield all images in order, as pairs of a first index and an array (n, T, C, Z, Y, X) or a list of images."""
        for group in row_groups(self.header):
            yield group.start, self.read(range(group.start, group.stop))

    @abstractmethod
    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image, with every field of ome-arrow."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; a later read opens them again."""

    def __len__(self) -> int:
        return len(self.header.image_ids)

    @abstractmethod
    def __reduce__(self) -> tuple[Any, ...]: ...

    def __repr__(self) -> str:
        return f"<{self.header.format.label} source of {len(self)} images at {str(self.header.path)!r}>"


class _Forwarded:
    """Descriptor whose value is an attribute of a member; it is looked up once per instance, without a lock."""

    def __init__(self, attribute: str) -> None:
        self._look_up = attrgetter(attribute)

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, _: type | None = None) -> Any:
        if instance is None:
            return self
        value = vars(instance)[self._name] = self._look_up(instance)
        return value


def forwarded(attribute: str) -> Any:
    """Return a descriptor for an attribute or a method of a member of the instance, for example ``source.close``."""
    return _Forwarded(attribute)


class ImagesWrapper(Images):
    """Base class of compositions: images made of those of another source, which they close."""

    labels = forwarded("source.labels")
    metadata = forwarded("source.metadata")
    prefetch = forwarded("source.prefetch")
    close = forwarded("source.close")

    def __init__(self, source: Images, **changed: Any) -> None:
        self.source, self.header, self.details = source, replace(source.header, **changed), source.details


def stored_size(images: Images) -> tuple[int, int, int]:
    """Return the number of files of the collection, their size in bytes, and their allocated size on disk."""
    known = images.details.size()
    if known is not None:
        return known
    files = list(images.details.files())
    return (len(files), *space_on_disk(images.header.path, files))


def outline_of(images: Images) -> Outline:
    details, rows = images.details, spread(len(images))
    return details.outline() or Outline(details.storage_info(), list(map(images.metadata, rows)))


def name_stems(images: Images, row: int) -> list[str]:
    """Return the names by which other files may refer to an image: its id, and its own files without suffix."""
    return list(dict.fromkeys([images.header.image_ids[row], *images.details.file_stems(row)]))


def local_files(path: Path, guard: FileGuard) -> Iterator[Path]:
    """Yield the files of a local collection: a file with the files that accompany it, or a folder."""
    if path.is_dir():
        return files_below([path])
    return iter([path, *filter(Path.exists, map(Path, guard.files))])


def row_groups(header: Header) -> Iterable[slice]:
    """Return consecutive rows that are cheap to read by one call, for example those of a row group."""
    return header.find_groups() or split_by_bytes(image_bytes(header.shapes, header.dtypes), BLOCK_BYTES)


def decode_into(images: Images, out: ImageBuffer, done: Done | None) -> None:
    """Decode each image once into ``out[index]``, which is an array of the image's shape and dtype.

    ``done(first, stop)`` is called when images ``first`` to ``stop - 1`` are decoded and still in the CPU cache.
    """
    step = images_per_cache_block(images.header.shapes, images.header.dtypes)
    if images.details.fills_out():
        for first in range(0, len(images), step):
            rows = range(first, min(first + step, len(images)))
            targets = [out[row] for row in rows]
            copy_others(images.read(rows, out=targets), targets)
            if done is not None:
                done(rows.start, rows.stop)
        return
    for start, decoded in images.stream():
        for first in range(start, start + len(decoded), step):
            part = decoded[first - start : first - start + step]
            stop = first + len(part)
            if isinstance(out, np.ndarray) and isinstance(part, np.ndarray):
                out[first:stop] = part
            else:
                for index, image in enumerate(part, start=first):
                    out[index][...] = image
            if done is not None:
                done(first, stop)


def files_below(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (Path(entry) for entry in entries_below(path) if entry.is_file())
        else:
            yield path


def is_uniform(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> bool:
    return len(set(dtypes)) <= 1 and bool((shapes == shapes[:1]).all())


def read_distinct(read: Callable[[list[int]], list[Array]], rows: Sequence[int]) -> list[Array]:
    """Return the images of rows in any order, with repeats; ``read`` is called once for sorted, distinct rows."""
    distinct = sorted(set(rows))
    images = read(distinct)
    if distinct == (rows if isinstance(rows, list) else list(rows)):
        return images
    by_row = dict(zip(distinct, images, strict=True))
    return [by_row[row] for row in rows]


def crop_images(images: Images, rows: Sequence[int], regions: Sequence[Region]) -> list[Array]:
    """Return regions of images that are decoded whole, a few at once."""
    slices = list(map(slices_of, regions))
    distinct = sorted(set(rows))
    parts = [slice(0, len(distinct))]
    if len(distinct) > 1:
        header = images.header
        sizes_bytes = image_bytes(header.shapes[distinct], [header.dtypes[row] for row in distinct])
        parts = [*split_by_bytes(sizes_bytes, _REGIONS_BYTES)]
    positions = rows_to_positions(rows)
    arrays: dict[int, Array] = {}
    for part in parts:
        for row, image in zip(distinct[part], images.read(distinct[part]), strict=True):
            crops = {position: image[slices[position]] for position in positions[row]}
            arrays |= crops if len(parts) == 1 else {n: np.array(crop) for n, crop in crops.items()}
    return [arrays[position] for position in range(len(rows))]


def split_groups(starts: Sequence[int], are_whole: Iterable[bool], num_bytes: Array, max_bytes: int) -> Iterator[slice]:
    """Yield the rows of each group, between ``starts``, in parts of ``max_bytes`` unless it is decoded as a whole."""
    for is_whole, (start, stop) in zip(are_whole, pairwise(starts), strict=True):
        parts = [slice(0, stop - start)] if is_whole else split_by_bytes(num_bytes[start:stop], max_bytes)
        yield from (slice(start + part.start, start + part.stop) for part in parts)


def group_by_part(starts: Sequence[int], indices: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """Group sorted indices by part, as pairs of part number and indices; ``starts`` ends with the total number."""
    if len(indices) == 1:  # a sample
        return [(bisect.bisect_right(starts, indices[0]) - 1, indices)]
    groups, done = [], 0
    while done < len(indices):
        number = bisect.bisect_right(starts, indices[done]) - 1
        stop = bisect.bisect_left(indices, starts[number + 1], done)
        groups.append((number, indices[done:stop]))
        done = stop
    return groups


def images_per_cache_block(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> int:
    """Return how many decoded images fit in the CPU cache, assuming that all are as large as the first image."""
    first_bytes = math.prod(shapes[0].tolist()) * dtypes[0].itemsize if len(shapes) else 0
    return max(1, _PIECE_BYTES // max(1, first_bytes))


def copy_others(images: Iterable[Array], out: Iterable[Array]) -> None:
    """Copy images to the arrays of ``out``, except images that are these arrays."""
    for image, target in zip(images, out, strict=True):
        if image is not target:
            target[...] = image
