"""Data files of a Lance dataset, each with a whole fragment, and their pixel pages, from which images are cut.

Through Lance, an image costs two reads, each by another thread. But from file format 2.1 on, a large value is stored as
is in its page, after a control byte (1 at the start of a row, else 0) and its length. A second buffer of the page holds
the offsets of its rows. So a page is known to be uncompressed if its row offsets equal the sums of its image sizes, to
the byte; the control bytes and lengths are checked whenever an image is cut.

A value compressed by zstd is stored as its length and its plain size, of eight bytes each, and one frame. Such values
are decompressed here too: Lance allocates the size that a damaged value states, which ends the process.

Lance reads all other pages (with nulls, small values, another version).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader, LancePageMetadata
from lance.fragment import FragmentSession

from omearrow_ds.codec.decode import new_image
from omearrow_ds.errors import DecodeError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import Array, MappedFile
from omearrow_ds.storage.formats._codecs import decompress_into
from omearrow_ds.storage.formats._image_columns import ImageColumn, holds_pixels
from omearrow_ds.storage.formats._stored import spread
from omearrow_ds.storage.formats._table import Kind, as_arrays
from omearrow_ds.storage.formats._urls import as_parsed
from omearrow_ds.storage.image_extents import ImageExtents, OtherLayoutError, PieceLayout, stack_images

_OFFSET_BYTES = (1, 2, 4, 8)
_HEADER_BYTES = (5, 9)  # a control byte, and the length of a binary or of a large binary value
_ZSTD = ("FullZipLayout{bits_rep:1,bits_def:0,", "scheme:CompressionAlgorithmZstd", "Variable(", "BitsPerOffset(64,")
_ZSTD_HEADER = struct.Struct("<BQQ")  # a control byte, the length of the following bytes, and their decompressed size
_MAX_STACKS = 512
_ZSTD_LENGTH_BYTES = 9  # header bytes before those that its length counts
Client = dict[str, str] | None  # storage options of a server


class Places(NamedTuple):
    """Location of images: start offset of the first header, size of each header, and for zstd the stop offset."""

    starts: Array
    header_bytes: int
    stops: Array | None = None


class DataFile(NamedTuple):
    """A data file that has all columns of a fragment, the fragment's id, and the file column of each leaf."""

    name: str
    fragment: int
    columns: dict[str, int]
    start: int = 0  # First image.
    locations: Places | None = None  # None if they are unknown.


def whole_files(dataset: lance.LanceDataset) -> list[DataFile]:
    """Return the data file of each fragment; an empty list unless each file has a complete, unchanged fragment."""
    # It does not if rows were deleted, or columns were added, dropped or patched since; Lance can read such fragments.
    leaves = dict(_leaf_ids(dataset.lance_schema.fields()))
    files = []
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        if len(metadata.files) != 1 or metadata.deletion_file is not None or getattr(metadata, "overlays", None):
            return []
        file = metadata.files[0]
        if "/" in file.path or file.path.startswith("."):  # in another folder than the data files
            return []
        if list(file.fields) != list(leaves.values()) or getattr(file, "base_id", None) is not None:
            return []
        files.append(DataFile(file.path, fragment.fragment_id, dict(zip(leaves, file.column_indices, strict=True))))
    return files


def open_file(path: Path, name: str, client: Client) -> LanceFileReader:
    return LanceFileReader(as_parsed(path / "data" / name), storage_options=client)


def pixel_bytes(dataset: lance.LanceDataset, path: Path, column: ImageColumn, client: Client) -> dict[int, int]:
    """Return the number of stored bytes of pixel pages in a few fragments, by fragment index."""
    leaves = {number for leaf, number in _leaf_ids(dataset.lance_schema.fields()) if holds_pixels(leaf, column)}
    fragments = dataset.get_fragments()
    stored_bytes = {}
    for number in spread(len(fragments)):
        sizes = []
        for file in fragments[number].metadata.files:
            columns = [index for leaf, index in zip(file.fields, file.column_indices, strict=True) if leaf in leaves]
            if columns and getattr(file, "base_id", None) is None:
                stored = open_file(path, file.path, client).metadata().columns
                pages = [page for index in columns if index >= 0 for page in stored[index].pages]
                sizes += [buffer.size for page in pages for buffer in page.buffers]
        stored_bytes[number] = sum(sizes)
    return stored_bytes


def _leaf_ids(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for field in fields:
        path = f"{prefix}{field.name()}"
        children = field.children()
        yield from _leaf_ids(children, f"{path}.") if children else [(path, field.id())]


def open_session(dataset: lance.LanceDataset, fragment: int, columns: list[str]) -> FragmentSession:
    """Return a session that takes rows of a fragment, with only these columns."""
    opened = dataset.get_fragment(fragment)
    if opened is None:
        raise ValueError(f"fragment {fragment} is missing")
    return opened.open_session(columns)


def take_rows(session: FragmentSession, rows: list[int]) -> list[pa.Array]:
    """Return the chunks of a fragment's rows by number, in ascending order."""
    # A session costs half of a `LanceFileReader` for small images, and raises a panic of Lance, such as for a damaged
    # page, as an error. In a stream, such as that of the reader or a scan, a panic ends the process (Lance 14).
    return as_arrays(session.take(rows).column(0), "chunks")  # type: ignore[no-untyped-call]


def find_places(mapped: Array, pages: Sequence[LancePageMetadata], size_bytes: Array, pieces: Array) -> Places | None:
    """Return the locations of images, given their sizes and numbers of chunks; None if the pages do not match these."""
    if len({re.sub(r"\d+", "", page.encoding) for page in pages}) != 1 or any(len(page.buffers) != 2 for page in pages):
        return None
    # Each value of a page is a zstd frame, and none is null.
    is_zstd = all(part in re.sub(r"\s", "", page.encoding) for page in pages for part in _ZSTD)
    starts, stops, headers, done = [], [], set[int](), 0
    for values, offsets in (page.buffers for page in pages):
        stored = mapped[offsets.position : offsets.position + offsets.size]
        for bounds in _offsets(stored, values.size, len(size_bytes) - done):
            rows = slice(done, done + len(bounds) - 1)
            header = _header_bytes(np.diff(bounds), size_bytes[rows], pieces[rows], is_zstd=is_zstd)
            if header is not None:
                break
        else:
            return None
        if values.position + values.size > len(mapped):
            return None
        starts.append(bounds[:-1] + values.position)
        stops.append(bounds[1:] + values.position)
        headers.add(header)
        done = rows.stop
    if done != len(size_bytes) or len(headers) != 1:
        return None
    return Places(np.concatenate(starts), headers.pop(), np.concatenate(stops) if is_zstd else None)


def _offsets(stored: Array, page_bytes: int, most_rows: int) -> Iterator[Array]:
    """Yield the stored row offsets of a page, for each integer width with which they cover the whole page."""
    for width in _OFFSET_BYTES:
        if len(stored) % width == 0 and 0 < len(stored) // width - 1 <= most_rows:
            bounds = stored.view(f"<u{width}").astype(np.int64)
            if bounds[0] == 0 and bounds[-1] == page_bytes:
                yield bounds


def _header_bytes(row_bytes: Array, size_bytes: Array, pieces: Array, *, is_zstd: bool) -> int | None:
    """Return the size of the header before each chunk, given the sizes of rows; None if these do not match."""
    if is_zstd:
        return _ZSTD_HEADER.size if (row_bytes > _ZSTD_HEADER.size).all() else None
    # The size of a row is the image size plus a header per chunk, all of one known size. Other pages leave a remainder.
    headers, rest = np.divmod(row_bytes - size_bytes, pieces)
    matches = headers[0] in _HEADER_BYTES and (headers == headers[0]).all() and not rest.any()
    return int(headers[0]) if matches else None


class PixelPages:
    """Images of one mapped data file, with one chunk per (t, c), in order.

    ``kinds`` are those of all images of the dataset; ``start`` is the first image of the file.
    """

    def __init__(self, path: Path, locations: Places, kinds: Sequence[Kind], start: int) -> None:
        self.mapping = MappedFile(path)
        self._path, self._kinds, self._start = path, kinds, start
        self._starts, header_bytes, self._stops = locations
        layouts = [_layout(kind, header_bytes) for kind in kinds[start : start + len(self._starts)]]
        self._extents = ImageExtents(self._starts + header_bytes, layouts) if self._stops is None else None

    def images(self, rows: Sequence[int]) -> list[Array]:
        """Return images as views of the file, or decompressed ones."""
        # Raises `OtherLayoutError` if the bytes before a chunk are unexpected, and `DecodeError` for a damaged
        # compressed image; uncompressed pixels have no checksum.
        self.mapping.refuse_changed()
        if self._extents is None:
            return list(map(self._decompressed, rows))
        return self._extents.images(rows, self.mapping.read_ranges(self._extents.ranges(rows)))

    def stack(self, first: int, count: int) -> Array | None:
        """Return consecutive images as one view (n, T, C, Z, Y, X); None if they differ in shape, dtype or distance."""
        self.mapping.refuse_changed()
        if self._extents is None:
            return None
        arrays = self._extents.stacks(self.mapping.data, first, first + count)
        if arrays is None or len(arrays) > 1:
            return None
        try:
            self._extents.check(self.mapping.data, first, first + count)
        except OtherLayoutError:
            return None
        return arrays[0]

    def mapped_stacks(self, refuse: Callable[[int], object]) -> Stacks | None:
        """Return all images as views of the file; None if compressed, scattered, or different in shape or dtype."""
        # The bytes before each chunk are compared at the first use of an image; ``refuse`` raises the error.
        if self._extents is None:
            return None
        self.mapping.refuse_changed()
        arrays = self._extents.stacks(self.mapping.data, 0, len(self._starts))
        if arrays is None or len(arrays) > _MAX_STACKS:
            return None
        return stack_images(arrays, self._extents.layouts[0], self.mapping, refuse)

    def _decompressed(self, row: int) -> Array:
        assert self._stops is not None
        start, stop = int(self._starts[row]), int(self._stops[row])
        image_name = f"{self._path}: image {self._start + row}"
        shape, dtype = self._kinds[self._start + row]
        image = new_image(shape, dtype, image_name)
        # A frame is decompressed only if its header states the size of the chunk, and it ends within the row.
        for number, chunk in enumerate(image.reshape(shape[0] * shape[1], -1).view(np.uint8)):
            try:
                control, length, size = _ZSTD_HEADER.unpack_from(self.mapping.file, start)
                end = start + _ZSTD_LENGTH_BYTES + length
                if control != (number == 0) or size != chunk.size or end > stop:
                    raise _damaged(image_name)
                decompress_into("zstd", self.mapping.data[start + _ZSTD_HEADER.size : end], chunk)
            except (ValueError, struct.error) as error:
                raise _damaged(image_name) from error
            start = end
        if start != stop:
            raise _damaged(image_name)
        return image


@lru_cache(64)
def _layout(kind: Kind, header_bytes: int) -> PieceLayout:
    """Return the layout of uncompressed images. Each chunk follows a flag, 1 for the first of a row, and its length."""
    shape, dtype = kind
    num_chunks = shape[0] * shape[1]
    length = (math.prod(shape[2:]) * dtype.itemsize).to_bytes(header_bytes - 1, "little")
    return PieceLayout(shape, dtype, num_chunks, tuple(bytes([number == 0]) + length for number in range(num_chunks)))


def _damaged(subject: str) -> DecodeError:
    return DecodeError(f"{subject}: bytes are not zstd frames of the expected size; the file is damaged, restore it")
