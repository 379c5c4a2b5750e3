"""`BaseSource`: what all sources share: each way to read, made of two, and pickling as how to reopen."""

from __future__ import annotations

import bisect
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import (
    ArgumentError,
    FormatError,
    ImageIndexError,
    MissingPathError,
    OMEArrowDSError,
    PathExistsError,
)
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.resources import image_bytes, space_on_disk
from omearrow_ds.storage.formats import CHUNK_PREFIX, Format, get_format
from omearrow_ds.storage.formats._columns import Named, columns_and_checksums, refuse_types
from omearrow_ds.storage.formats._detect import Paths, entries_below, refuse_special
from omearrow_ds.storage.formats._failures import MALFORMED, Opening, refusing
from omearrow_ds.storage.formats._handles import Mapping
from omearrow_ds.storage.formats._html import as_html, kinds, shapes
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.formats._pictures import Pictures
from omearrow_ds.storage.formats._regions import Pick, Region, pick_region, rows_to_positions, slices_of
from omearrow_ds.storage.formats._stored import Outline, Stored, spread
from omearrow_ds.text import count

Array = np.ndarray[Any, Any]
_TOLD = (
    *("path", "image_ids", "shapes", "dtypes", "rows"),
    *("image_column", "other_image_columns", "variant", "stamp"),
)
_PIECE_BYTES = 2**21  # of pixels that are written and then read again: less than a cache holds that cores share
_REGIONS_BYTES = 2**26  # Images that are decoded at once for their regions.
Stamp = tuple[int, ...]
Block = tuple[int, Array | list[Array]]
Done = Callable[[int, int], object]
Reader = Callable[[int, Array], Array]


class Parted(NamedTuple):
    """The parts that a collection is in."""

    starts: Sequence[int]  # the number of the first image of each part, and of all images
    digest: str  # what tells the parts from others
    # over how many parts samples are best shuffled, where each is fetched as a whole; None where none is
    window: int | None = None
    mixed: bool = False  # whether what they hold was permuted over all of them, so that each is a sample of all


class SupportsImages(Protocol):
    """Images in memory, by index: each (T, C, Z, Y, X), writable."""

    def __getitem__(self, index: Any, /) -> Array: ...


class BaseSource(ABC):
    """An open collection of images; the formats add how it is opened and read.

    A subclass sets ``name`` and ``errors`` (what the format's library raises), fills ``path``, ``image_ids``,
    ``shapes``, ``dtypes`` and ``columns`` when it is made, and gives `views`, `blocks` and `metadata`. All other ways
    to read are made of these. Beside what `omearrow_ds.ImageSource` promises, it is for this package alone.

    Attributes
    ----------
    checksums
        What `write_images` stored of the images, a string or a null each; None if it stored none.
    image_column, other_image_columns
        Names of the columns that the images are from, and of those with other images; of a folder none.
    variant
        Which of several collections at its path it is: the name of its table, its level, which files make its images.
    stamp
        What tells the file or folder that was opened from one that was put in its place.
    opened_by
        What opens it in another process: of names alone, where pickling carries what was found as well.
    fetches
        Whether images are fetched from a server, several at once where it knows which come next.
    """

    name: ClassVar[str]
    errors: ClassVar[tuple[type[Exception], ...]]
    unheld_types: ClassVar[Sequence[Callable[[pa.DataType], bool]]] = ()
    path: Path
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table
    checksums: pa.ChunkedArray | None = None
    image_column: tuple[str, ...] = ()
    other_image_columns: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    stamp: Stamp | None = None
    opened_by: Callable[[], BaseSource] | None = None
    fetches: ClassVar[bool] = False
    _how: dict[str, Any]

    @property
    def format(self) -> Format:
        """The storage format."""
        return get_format(self.name)

    @cached_property
    def _label(self) -> str:
        return self.format.label

    @cached_property
    def _looked_at(self) -> str:
        """Path of what is looked at to see whether the collection was replaced."""
        return str(self.path)

    @classmethod
    def refuse_target(cls, path: Path, columns: pa.Schema) -> None:
        """Raise an error if the format cannot stand at this path, or cannot hold these columns, by name or by type.

        Raises
        ------
        FormatError
            For the path.
        PathExistsError
            If there is a file beside it that would be read as part of what is written.
        MetadataError
            For a column.
        """
        for suffix in get_format(cls.name).beside:
            if os.path.lexists(f"{path}{suffix}"):
                msg = (
                    f"{path}{suffix}: would be read as part of what is to be written beside it, and holds changes of "
                    f"what was there before; merge them (with DuckDB: CHECKPOINT), or remove this file"
                )
                raise PathExistsError(msg)
        refuse_types(columns, cls.unheld_types, get_format(cls.name).label, str(path))

    @cached_property
    def rows(self) -> Array:
        """Row number in the table of each image, int64."""
        return np.arange(len(self))

    @property
    def row_count(self) -> int:
        """How many rows the table has, those included that were left out."""
        return len(self)

    @property
    def given(self) -> Paths:
        """What opens it anew."""
        return self.path

    @property
    def named(self) -> Named:
        """The columns, where not all of them are wanted."""
        named: Named = self.columns
        return named

    @property
    def parted(self) -> Parted | None:
        """The parts that the collection is in; None of a single file or folder."""
        return None

    def expect(self, parts: Sequence[int], at_once: int = 1) -> None:  # noqa: B027  # most have none
        """Be told of the parts that are asked for next, in this order, and of how many of them in turns.

        Raises
        ------
        ArgumentError
            If there is no room for so many.
        """

    def reached(self, part: int) -> None:  # noqa: B027  # most have none
        """Be told that a part is asked for now, in whatever process."""

    def coming(self, indices: Sequence[int]) -> None:  # noqa: B027  # most need not know
        """Be told of the images that are read next, in this order; it matters to those that fetch."""

    def arriving(self, came: Callable[[int], object] | None) -> int:
        """Have ``came`` be told how many bytes come from a server, as they do; return how many come, 0 if none need to.

        It is called in any thread, in one at a time.
        """
        del came
        return 0

    def image_columns(self) -> list[ImagesOf]:
        """Return what each image column of the table holds, without reading pixels; of a folder nothing."""
        return []

    def stored_size(self) -> tuple[int, int, int]:
        """Return how many files hold the collection, their bytes, and those that the file system gives them."""
        files = list(self.stored_files())
        return (len(files), *space_on_disk(self.path, files))

    def chunk_codec(self) -> str | None:
        """Return what compresses each chunk of a table by itself, as the first one says; None where nothing does."""
        return None

    def outline(self) -> Outline:
        """Return how the images are stored, what compresses their chunks included, and the metadata of a few."""
        stored, codec = self.stored_as(), self.chunk_codec()
        if codec is not None:
            reading = f"each chunk is decompressed alone; {stored.reading}"
            stored = replace(stored, compression=f"{CHUNK_PREFIX}{codec}", in_place=False, reading=reading)
        return Outline(stored, [self.metadata(index) for index in spread(len(self))])

    def label_images(self) -> list[str]:
        """Return the names of label images that are stored beside a few images, spread over the collection."""
        return []

    def labels(self, name: str) -> tuple[BaseSource, Array]:
        """Return the label images of a name, and (n,) int64, that of each image; -1 without one.

        Raises
        ------
        ArgumentError
            If no image has one.
        """
        raise ArgumentError(f"{self._label} has no label images, and so no {name!r}", path=self.path)

    def stems(self, index: int) -> list[str]:
        """Return what files that go with an image may be called after: its id, the names of its own files."""
        return [self.image_ids[index]]

    def _set_columns(self, columns: pa.Table) -> None:
        """Take the columns that are stored; that of the checksums is none of the user's."""
        self.columns, checksums = columns_and_checksums(columns, str(self.path))
        self.checksums = self.checksums if checksums is None else checksums

    @abstractmethod
    def views(self, indices: Sequence[int]) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they may be read-only views of the store's memory."""

    def reader(self) -> Reader | None:
        """Return a function that reads one image into memory that is used again; None where `views` is as fast.

        It takes an index and an array of the image's shape and dtype, and returns the image: that array, or another.
        """
        return None

    def files_of(self, index: int) -> Sequence[str]:  # noqa: ARG002  # most formats store images in one file
        """Return the files that hold one image and not much else, as far as they are known without reading any."""
        return ()

    def read_regions(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Array]:
        """Return one array (t, c, z, y, x) per region; it may be a read-only view.

        A format that can read less than an image overrides this. Here images are decoded whole, a few at once unless
        they are mapped.

        Parameters
        ----------
        rows
            The image of each region, in any order, with repeats.
        regions
            Starts of T, C, Z, Y and X, then their stops; not empty, and inside the image.
        """
        slices = list(map(slices_of, regions))
        distinct = sorted(set(rows))
        step = len(distinct)
        if step > 1 and not self._in_place:
            sizes_bytes = image_bytes(self.shapes[distinct], [self.dtypes[row] for row in distinct])
            if sizes_bytes.sum(dtype=float) > _REGIONS_BYTES:
                step = max(1, _REGIONS_BYTES // int(sizes_bytes.max()))
        if step >= len(distinct):
            images = dict(zip(distinct, self.views(distinct), strict=True))
            return [images[row][region] for row, region in zip(rows, slices, strict=True)]
        arrays: dict[int, Array] = {}
        positions = rows_to_positions(rows)
        for first in range(0, len(distinct), step):
            part = distinct[first : first + step]
            for row, image in zip(part, self.views(part), strict=True):
                arrays |= {position: np.array(image[slices[position]]) for position in positions[row]}
        return [arrays[position] for position in range(len(rows))]

    @cached_property
    def _in_place(self) -> bool:
        """Whether images are views of a mapped file, so that a region costs only its own pixels."""
        return self.stored_as().in_place

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""

    @property
    def mapping(self) -> Mapping | None:
        """The mapped file that the `blocks` are views of, good for as long as it is not cut; None if they are made."""
        return None

    @abstractmethod
    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image, every field of ome-arrow's present."""

    @property
    def uniform(self) -> bool:
        """Whether all images are of one shape and dtype."""
        return len(set(self.dtypes)) <= 1 and bool((self.shapes == self.shapes[:1]).all())

    def stacked(self) -> Stacks | None:
        """Return all images as views of the `mapping`, with the checks before each access; None if they are not."""
        mapping = self.mapping
        if not self.uniform or mapping is None:
            return None
        blocks = [images for _, images in self.blocks()]
        arrays = [images for images in blocks if isinstance(images, np.ndarray)]
        if not arrays or len(arrays) < len(blocks):
            return None
        return Stacks(arrays, mapping.refuse_cut, is_mapped=True)

    def refuse_damaged(self, index: int) -> None:
        """Raise `FormatError` for an image whose stored bytes are not as its shape and dtype require."""
        self.views([index])  # Raises an error that says more, if the format's library finds the fault.
        raise FormatError(
            f"{self.path}: image {index} is not stored as its shape requires; restore the file", image=index
        )

    def decode_into(self, images: SupportsImages, done: Done | None = None) -> None:
        """Decode every image once into ``images[index]``, an array of its shape and dtype; it may be a stack.

        ``done(first, stop)`` is called when images ``first`` to ``stop - 1`` are there, and in a processor's cache yet.
        """
        step = piece_length(self.shapes, self.dtypes)
        for start, decoded in self.blocks():
            for first in range(start, start + len(decoded), step):
                part = decoded[first - start : first - start + step]
                stop = first + len(part)
                if isinstance(images, np.ndarray) and isinstance(part, np.ndarray):
                    images[first:stop] = part
                else:
                    for index, image in enumerate(part, start=first):
                        images[index][...] = image
                if done is not None:
                    done(first, stop)

    @abstractmethod
    def stored_as(self) -> Stored:
        """Return how the images are stored and read, without decoding pixels."""

    def stored_files(self) -> Iterator[Path]:
        """Yield the files that hold the collection."""
        for part in self._parts:
            if part.is_dir():
                yield from (Path(entry) for entry in entries_below(part) if entry.is_file())
            else:
                yield part

    @property
    def _parts(self) -> list[Path]:
        """The files and folders that hold the collection."""
        return [self.path] if self.path.is_dir() else [self.path, *filter(Path.exists, map(Path, self._told_by))]

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections; a later read opens them again."""

    def _reading(self, path: Path | None = None) -> refusing:
        """Turn what the format's library raises into a `FormatError` that names ``path``, by default the source's."""
        return refusing(path or self.path, self._label, self.errors, self.failure)

    def _interpreting(self, path: Path | None = None) -> refusing:
        """Turn also into a `FormatError` what our own code raises on values that no writer would store."""
        return refusing(path or self.path, self._label, (*self.errors, *MALFORMED), self.failure)

    def failure(self, error: BaseException) -> OMEArrowDSError | None:
        """Return the error for what the library raised where nothing is damaged; None where it may be."""
        del error
        try:
            self._refuse_replaced()
        except OMEArrowDSError as replaced:
            return replaced
        return None

    def _opening(self) -> Opening:
        """As `_reading`, around what opens the file by its path: afterwards it has to be the one of the first time.

        What was opened between two looks at the same file is that file, and the first look stays good: a file that was
        replaced does not come back.
        """
        return Opening(self._reading(), self._refuse_replaced, first=self.stamp is None)

    def _refuse_replaced(self) -> None:
        """Raise `FormatError` if the file, or what its collection is told by, is not that of the first call."""
        try:
            status = os.stat(self._looked_at)  # noqa: PTH116  # at every read: pathlib would double its cost
        except FileNotFoundError:
            raise MissingPathError(f"{self.path}: was removed since it was opened") from None
        stamp: Stamp = (status.st_dev, status.st_ino)
        if not stat.S_ISDIR(status.st_mode):
            stamp = (*stamp, status.st_size, status.st_mtime_ns)
        for told_by in self._told_by:
            stamp += _state_of(told_by)
        if self.stamp is None:
            for each in (str(self.path), *self._told_by):
                refuse_special(each)
            self.stamp = stamp
        if stamp != self.stamp:
            raise FormatError(f"{self.path}: was replaced or changed since it was opened; open it again")

    @cached_property
    def _told_by(self) -> Sequence[str]:
        """Paths of the files, there or not, that tell what the collection is beside what stands at its path."""
        return [str(file) for file in self.format.files_beside(self.path)]

    def __len__(self) -> int:
        return len(self.image_ids)

    def read(
        self,
        index: int,
        region: Sequence[int] | None = None,
        channels: Pick | None = None,
        *,
        z: Pick | None = None,
        t: Pick | None = None,
    ) -> Array:
        """Return one image (T, C, Z, Y, X), or a part of it, in memory of its own.

        Of a part no more is read and decoded than the store has to: rows of uncompressed TIFF, strips, tiles and chunks
        that the region meets; else the whole image.

        Parameters
        ----------
        index
            Which image, from the end where it is negative.
        region
            ``(y0, y1, x0, x1)`` in pixels, ``y1`` and ``x1`` excluded, within the image; None is all of it.
        channels
            Index or name of a channel, several in the order that they are wanted in, or a slice; None is all.
        z, t
            Likewise of Z and T, by index. Every axis stays, of length 1 where one index is picked.

        Raises
        ------
        ImageIndexError
            If ``index`` is outside ``-len(self)`` to ``len(self) - 1``.
        AxesError
            If the region is empty or reaches outside the image, or there is no such channel, Z or T.
        DecodeError
            If what is stored is no valid image.
        """
        position = self.index(index)
        if region is None and channels is None and z is None and t is None:
            return _owned(self.views([position])[0])
        where = f"{self.path}: image {position} ({self.image_ids[position]!r})"
        picked = pick_region(
            self.shapes[position].tolist(),
            region,
            {"T": t, "C": channels, "Z": z},
            lambda: [channel["name"] for channel in self.metadata(position)["channels"]],
            where,
        )
        return _owned(picked.join(self.read_regions([position] * len(picked.regions), picked.regions)))

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return the images of ``indices``, in that order, duplicates kept, each in memory of its own."""
        positions = self.indices(indices).tolist()
        distinct = sorted(set(positions))
        views = dict(zip(distinct, self.views(distinct), strict=True))
        owned = {position: _owned(views[position]) for position in distinct}
        return [owned.pop(position) if position in owned else np.array(views[position]) for position in positions]

    def index(self, index: int) -> int:
        """Return ``index`` counted from the front, or raise `ImageIndexError`."""
        try:
            position = index.__index__()
        except (AttributeError, TypeError):
            raise ImageIndexError(f"{self.path}: image index {index!r} is no integer") from None
        if not -len(self) <= position < len(self):
            raise ImageIndexError(f"{self.path}: image index {position} is outside the {len(self)} images")
        return position % len(self)

    def indices(self, indices: Sequence[int] | Array) -> Array:
        """Return ``indices`` counted from the front as int64, or raise `ImageIndexError`."""
        array = np.asarray(indices)
        if array.size == 0:
            return np.zeros(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ImageIndexError(f"{self.path}: image indices must be a sequence of integers, not {indices!r}")
        array = array.astype(np.int64)
        outside = (array < -len(self)) | (array >= len(self))
        if outside.any():
            raise ImageIndexError(f"{self.path}: image index {array[outside][0]} is outside the {len(self)} images")
        return np.where(array < 0, array + len(self), array)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pinned(self) -> dict[str, Any]:
        """Keywords that open this very state, where what stands at a path has several."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Carry how to open it: a subclass keeps the keywords that it was made with as ``_how``."""
        return partial(type(self), **self._how, **self.pinned), (self.path,)

    def __repr__(self) -> str:
        return f"<{self.format.label} source of {len(self)} images at {str(self.path)!r}>"

    def _preview(self) -> Pictures:
        """Return the images as what they are shown from."""
        return Pictures(
            str(self.path),
            self.image_ids,
            self.columns,
            image_bytes(self.shapes, self.dtypes),
            lambda index: self.views([index])[0],
            lambda index: [channel["name"] for channel in self.metadata(index)["channels"]],
        )

    def _repr_html_(self) -> str:
        facts = [
            ("path", str(self.path)),
            ("shape", shapes(self.shapes)),
            ("dtype", kinds(dtype.name for dtype in self.dtypes)),
        ]
        return as_html(f"{self.format.label} source of {count(len(self), 'image')}", facts, self._preview())


class Over(BaseSource):
    """A source that reads from another one, of which it has all that it does not change, and which it closes."""

    def __init__(self, source: BaseSource) -> None:
        self._source = source
        vars(self).update({name: getattr(source, name) for name in _TOLD})

    @cached_property
    def columns(self) -> pa.Table:  # read when they are asked for, unless they are changed
        return self._source.columns

    @cached_property
    def checksums(self) -> pa.ChunkedArray | None:  # type: ignore[override]  # as above
        return self._source.checksums

    @property
    def format(self) -> Format:
        return self._source.format

    @property
    def row_count(self) -> int:
        return self._source.row_count

    @property
    def given(self) -> Paths:
        return self._source.given

    @property
    def parted(self) -> Parted | None:
        return self._source.parted

    def files_of(self, index: int) -> Sequence[str]:
        return self._source.files_of(index)

    def expect(self, parts: Sequence[int], at_once: int = 1) -> None:
        self._source.expect(parts, at_once)

    def reached(self, part: int) -> None:
        self._source.reached(part)

    def arriving(self, came: Callable[[int], object] | None) -> int:
        return self._source.arriving(came)

    def image_columns(self) -> list[ImagesOf]:
        return self._source.image_columns()

    def chunk_codec(self) -> str | None:
        return self._source.chunk_codec()

    def label_images(self) -> list[str]:
        return self._source.label_images()

    def labels(self, name: str) -> tuple[BaseSource, Array]:
        return self._source.labels(name)

    def stems(self, index: int) -> list[str]:
        return self._source.stems(index)

    def metadata(self, index: int) -> dict[str, Any]:
        return self._source.metadata(index)

    def stored_as(self) -> Stored:
        return self._source.stored_as()

    def stored_files(self) -> Iterator[Path]:
        return self._source.stored_files()

    def stored_size(self) -> tuple[int, int, int]:
        return self._source.stored_size()

    def close(self) -> None:
        self._source.close()

    @property
    def pinned(self) -> dict[str, Any]:
        return self._source.pinned


def _state_of(path: str) -> Stamp:
    """Return what tells a file from one that was put in its place, or written over it; zeros where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116  # as above
    except (FileNotFoundError, NotADirectoryError):
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def by_part(starts: Sequence[int], indices: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """Return the parts that sorted indices are of, which start at ``starts`` and end at its last, each with its own."""
    if len(indices) == 1:  # a sample
        return [(bisect.bisect_right(starts, indices[0]) - 1, indices)]
    found, done = [], 0
    while done < len(indices):
        number = bisect.bisect_right(starts, indices[done]) - 1
        stop = bisect.bisect_left(indices, starts[number + 1], done)
        found.append((number, indices[done:stop]))
        done = stop
    return found


def piece_length(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> int:
    """Return how many images stay in a processor's cache from when they are decoded, if all are like the first one."""
    first_bytes = math.prod(shapes[0].tolist()) * dtypes[0].itemsize if len(shapes) else 0
    return max(1, _PIECE_BYTES // max(1, first_bytes))


def _owned(image: Array) -> Array:
    is_own = image.flags.owndata and image.flags.writeable and image.flags.c_contiguous
    return image if is_own else np.array(image, order="C")
