"""Arrow IPC file, memory-mapped: pixels are decoded from the page cache without a copy."""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.lib.array_utils import byte_bounds

from omearrow_ds.codec.decode import ImageBlock
from omearrow_ds.errors import DecodeError, FormatError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import ByteRange, MappedFile, ObjectFile
from omearrow_ds.storage.formats._base import Array, Block, group_by_part
from omearrow_ds.storage.formats._detect import refuse_other
from omearrow_ds.storage.formats._file_guard import FileGuard
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import ImageColumn, image_columns
from omearrow_ds.storage.formats._stored import Stored, groups
from omearrow_ds.storage.formats._table import CopiedFile, StoredTable, TableImages, TableOptions, open_bytes

ERRORS = (pa.ArrowException, OSError, ValueError)


def write_collection(tables: Iterable[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write each table as a record batch of an Arrow IPC file; only an uncompressed file can be read zero-copy."""
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table_schema, options=options) as writer:
        for table in tables:
            writer.write_table(table)


_CODECS = ("lz4", "zstd")
_START = 8  # the magic number, padded
_LARGE_READ_AHEAD_BYTES = 2**20
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0)
_Images: TypeAlias = ImageBlock | Array
_FOOTER_BYTES = 2**16  # size that covers most footers
_END_BYTES = 10  # the footer's length and the magic number
_MARK = b"ARROW1"
_DICTIONARIES, _BATCHES = 2, 3  # fields of a footer
_BLOCK = struct.Struct("<qi4xq")  # Start, bytes of the header, and bytes of the body of a message.


@dataclass
class _OpenArrowFile:
    """Arrow IPC file that a process has mapped, with cached images of record batches."""

    mapping: MappedFile | _ObjectMemory
    mapped: pa.Buffer
    reader: pa.ipc.RecordBatchFileReader
    image_reader: pa.ipc.RecordBatchFileReader | None = None  # Reads record batches with the image column.
    images: dict[int, _Images] = field(default_factory=dict)
    valid_batches: set[tuple[str, int]] = field(default_factory=set)  # Names of image columns, and record batches.

    @classmethod
    def of(cls, mapping: MappedFile | _ObjectMemory) -> _OpenArrowFile:
        mapped = pa.py_buffer(mapping.file)
        return cls(mapping, mapped, pa.ipc.open_file(mapped))

    @cached_property
    def compression(self) -> str:
        """Compression of the first record batch, which pyarrow does not expose."""
        # The message before it is a flat buffer: ``Message.header`` is a ``RecordBatch``, whose ``compression`` names
        # the codec (https://arrow.apache.org/docs/format/Columnar.html).
        for message in pa.ipc.MessageReader.open_stream(self.mapped.slice(_START)):
            if message.type == "record batch":
                data = bytes(message.metadata)
                header = _flat_field(data, _flat_offset(data, 0), 2)
                compression = None if header is None else _flat_field(data, _flat_offset(data, header), 3)
                if compression is None:
                    return "none"
                codec = _flat_field(data, _flat_offset(data, compression), 0)
                return _CODECS[0 if codec is None else data[codec]]
        return "none"

    def reader_of(self, names: Sequence[str]) -> pa.ipc.RecordBatchFileReader:
        """Return a reader of record batches that have at least some columns."""
        if len(names) == len(self.reader.schema) or self.compression == "none":
            return self.reader  # Arrow would copy the included fields of an uncompressed file.
        included = sorted(map(self.reader.schema.get_field_index, names))  # Others would be decompressed too.
        return pa.ipc.open_file(self.mapped, options=pa.ipc.IpcReadOptions(included_fields=included))


class ArrowTable(StoredTable):
    """Arrow IPC file: memory-mapped, or an object on a server.

    All bytes of an object except pixels are fetched at opening, to their file offsets in anonymous memory of its size.
    Images are views of that memory, and their offsets give the ranges to fetch. Record batches whose images are not
    plainly stored are fetched whole, and compressed objects are copied to the cache.
    """

    def __init__(self, guard: FileGuard, options: TableOptions) -> None:
        super().__init__(guard, options)
        self._file = ProcessLocal(self._open)
        self.schema = self._file.get().reader.schema

    def read_fields(
        self, column: ImageColumn, fields: Sequence[str], names: Sequence[str] = ()
    ) -> tuple[pa.Table, pa.Table]:
        infos, columns = [], []
        for batch in self._batches([column.name, *names]):
            infos.append(pa.RecordBatch.from_struct_array(batch.column(column.name)).select(fields))
            columns.append(batch.select(list(names)))
        self._starts = list(itertools.accumulate(map(len, infos), initial=0))
        self._file.get().valid_batches.update((column.name, number) for number in range(len(infos)))
        early = _copied_table(columns, map(self.schema.field, names))
        return _copied_table(infos, map(column.type.field, fields)), early

    def read_columns(self, names: list[str]) -> pa.Table:
        with self.guard.reading():
            return _copied_table(list(self._batches(names)), map(self.schema.field, names))

    def _batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield validated record batches of some columns, in the order of ``names``, because Arrow trusts the file."""
        file = self._file.get()
        with _scattered_reads(file.mapping):
            reader = file.reader_of(names)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number).select(list(names))
                batch.validate(full=True)
                yield batch

    def _open(self) -> _OpenArrowFile:
        with self.guard.interpreting():
            file = open_bytes(self.guard, self.objects)
            refuse_other(self.path, bytes(file.read_ranges([(0, min(_START, file.size_bytes))])[0]))
            if isinstance(file, MappedFile):
                return _OpenArrowFile.of(file)
            memory = _ObjectMemory(file, self.path)
            opened = _OpenArrowFile.of(memory)
            if self.objects is not None and opened.compression != "none":
                return _OpenArrowFile.of(CopiedFile(self.guard, self.objects))
            memory.fetch_columns(opened.reader)
            file.clear_cache()
            return opened

    @property
    def _memory(self) -> _ObjectMemory | None:
        """Memory of an object whose pixels are fetched by ranges."""
        mapping = None if self.objects is None else self._file.get().mapping
        return mapping if isinstance(mapping, _ObjectMemory) else None

    def layout(self) -> Stored:
        with self.guard.reading():
            compression = self._file.get().compression
        plain = compression == "none"
        reading = "in place: from the mapped file" if plain else "a record batch is decompressed per image"
        stored = Stored(self.header.column.encoding, compression, groups(self._starts, "record batch"), plain, reading)
        if self.objects is None:
            return stored
        if self._memory is not None:
            return stored.by_ranges()
        return replace(stored, in_place=False, reading="from a fetched copy of the object; one record batch at a time")

    def close(self) -> None:
        self._file.close()

    def _image_structs(self, number: int) -> pa.StructArray:
        """Return the image column of a record batch with validated offsets and strings."""
        # Validation takes time per chunk, not per pixel, and is done once per mapping.
        file, name = self._file.get(), self.header.column.name
        file.mapping.refuse_changed()
        with self.guard.reading():
            if file.image_reader is None:
                file.image_reader = file.reader_of([name])
            structs = file.image_reader.get_batch(number).column(name)
            if (name, number) not in file.valid_batches:
                structs.validate(full=True)
                file.valid_batches.add((name, number))
        return structs

    def read_images(self, rows: Sequence[int]) -> list[Array]:
        memory = self._memory
        return self._located(rows) if memory is None else self._fetched(memory, rows)

    def _located(self, indices: Sequence[int]) -> list[Array]:
        """Return images as views of the file, or of the memory of an object that may not have been fetched."""
        images: list[Array] = []
        for number, rows in group_by_part(self._starts, indices):
            part, start = self._images_of(number), self._starts[number]
            images += [part[row - start] for row in rows]
        return images

    def _fetched(self, memory: _ObjectMemory, indices: Sequence[int]) -> list[Array]:
        """Return images of an object, each fetched by its byte range, or with its record batch."""
        try:
            with memory.object.lock:
                images = self._located(indices)
            arrays = memory.fetch_images(images)
        except DecodeError:  # Separately compressed chunks are recognized by their first bytes, which are not fetched.
            arrays = None
        if arrays is not None:
            return arrays
        arrays = []
        for number, rows in group_by_part(self._starts, indices):
            with memory.object.lock:
                self._fetch_batch(memory, number)
                arrays += [np.array(image) for image in self._located(rows)]
        return arrays

    def _fetch_batch(self, memory: _ObjectMemory, number: int) -> None:
        """Fetch all pixels of a record batch to their offsets."""
        images, fetched = self._file.get().images, memory.fetched_batch
        if fetched != number:
            images.pop(fetched, None)
            images.pop(number, None)  # Located before its pixels were fetched.
            memory.fetch_batch(number)

    def read_groups(self) -> Iterable[slice] | None:
        if self._memory is not None:
            return None
        return (slice(start, stop) for start, stop in itertools.pairwise(self._starts) if start < stop)

    def stream(self) -> Iterator[Block]:
        if self._memory is not None:
            yield from super().stream()
            return
        for number, start in enumerate(self._starts[:-1]):
            images = self._images_of(number)
            with self.guard.interpreting():
                block = images if isinstance(images, np.ndarray) else images.images()
            yield start, block

    def mapped_stacks(self) -> Stacks | None:
        file, arrays = self._file.get(), list[Array]()
        mapping = file.mapping if self.objects is None else None
        if not isinstance(mapping, MappedFile):
            return None
        for number in range(len(self._starts) - 1):
            images = self._images_of(number)
            if not isinstance(images, np.ndarray) or number not in file.images:
                return None
            arrays.append(images)
        return Stacks(arrays, mapping.refuse_changed, is_mapped=True, file=mapping.file) if arrays else None

    def _images_of(self, number: int) -> _Images:
        """Return the images of a record batch: cached if they view the mapping, else decompressed each time."""
        file = self._file.get()
        file.mapping.refuse_changed()
        if number in file.images:
            return file.images[number]
        with _scattered_reads(file.mapping):
            image = self._image_structs(number)
            rows = np.arange(self._starts[number], self._starts[number + 1])
            block = self.header.block(self, image.field(self.header.column.pixel_field), rows)
            stack = block.stack()
        images = block if stack is None else stack
        addresses = [buffer.address for buffer in image.buffers() if buffer is not None and buffer.size]
        start, num_bytes = file.mapped.address, file.mapped.size
        if not addresses or (start <= min(addresses) and max(addresses) < start + num_bytes):
            file.images[number] = images
        return images

    def fetch(self, field: str, indices: Array) -> Iterable[pa.Array]:
        memory = self._memory
        for number, rows in group_by_part(self._starts, indices.tolist()):
            with nullcontext() if memory is None else memory.object.lock:
                if memory is not None:
                    self._fetch_batch(memory, number)
                column = self._image_structs(number).field(field)
                taken = column.take(pa.array(np.array(rows) - self._starts[number]))
            yield taken


open_collection = partial(TableImages, "arrow", ArrowTable, ERRORS)


def _scattered_reads(mapping: MappedFile | _ObjectMemory) -> AbstractContextManager[None]:
    """Return a context that reads offsets and columns of a cold file by single pages."""
    # That takes twice the time with a small read-ahead, and a quarter of it with 8 MB.
    if isinstance(mapping, MappedFile) and mapping.read_ahead_bytes > _LARGE_READ_AHEAD_BYTES:
        return mapping.read_at_random()
    return nullcontext()


def _copied_table(batches: Sequence[pa.RecordBatch], fields: Iterable[pa.Field]) -> pa.Table:
    """Return record batches as a copy, which does not keep the file mapped."""
    table = pa.Table.from_batches(batches, pa.schema(fields))
    return pa.concat_tables([table.slice(0, 0), table]).combine_chunks()  # A single batch is copied as well.


def _pixel_buffers(images: pa.StructArray) -> Iterator[pa.Buffer | None]:
    """Yield the buffers with the pixels of an image column, in its chunks and planes."""
    for number in range(images.type.num_fields):
        items: Any = getattr(images.field(number), "values", None)
        names = items.type.names if isinstance(items, pa.StructArray) else []
        yield from (items.field(name).buffers()[-1] for name in ("pixel_bytes", "pixels") if name in names)


class _ObjectMemory:
    """Memory of the size of an object, in which fetched ranges are stored at their file offsets."""

    def __init__(self, file: ObjectFile, path: Path) -> None:
        self.object, self.fetched_batch = file, -1
        self.file = mmap.mmap(-1, file.size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
        self._pixels: list[list[ByteRange]] = []  # Byte ranges of the pixels of each record batch.
        self._fill(_find_messages(file, path))

    def fetch_columns(self, reader: pa.ipc.RecordBatchFileReader) -> None:
        """Fetch the bytes of all record batches except pixels; Arrow states their offsets without reading them."""
        images, origin = image_columns(reader.schema), pa.py_buffer(self.file).address
        others: list[ByteRange] = []
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            buffers = chain.from_iterable(column.buffers() for column in batch.columns)
            pixels = chain.from_iterable(_pixel_buffers(batch.column(name)) for name in images)
            ranges, of_pixels = (
                {(buffer.address - origin, buffer.address - origin + buffer.size) for buffer in group if buffer}
                for group in (buffers, pixels)
            )
            self._pixels.append(sorted(of_pixels))
            others += sorted(ranges - of_pixels)
        self._fill(others)

    def refuse_changed(self) -> None:
        """Do nothing: each request compares size and ETag of the object."""

    def _fill(self, ranges: Sequence[ByteRange]) -> None:
        for (start, stop), data in zip(ranges, self.object.read_ranges(ranges), strict=True):
            self.file[start:stop] = data

    def fetch_images(self, images: Sequence[Array]) -> list[Array] | None:
        """Fetch the pixels of images that are views of this memory; return None if any image is a copy."""
        memory = np.frombuffer(self.file, np.uint8)
        if not all(np.may_share_memory(image, memory) for image in images if image.size):
            return None
        first = memory.ctypes.data
        bounds = [byte_bounds(image) if image.size else (first, first) for image in images]
        ranges = [(low - first, high - first) for low, high in bounds if low < high]
        fetched = iter(self.object.read_ranges(ranges))
        return [
            np.ndarray(image.shape, image.dtype, next(fetched), image.ctypes.data - low, image.strides)
            if image.size
            else image
            for image, (low, _) in zip(images, bounds, strict=True)
        ]

    def fetch_batch(self, number: int) -> None:
        """Fetch all pixels of a record batch, and evict the pixels of the record batch fetched before."""
        for start, stop in self._pixels[self.fetched_batch] if self.fetched_batch >= 0 else []:
            first, length = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
            if first < length:
                self.file.madvise(mmap.MADV_DONTNEED, first, length - first)
        self.fetched_batch = -1
        self._fill(self._pixels[number])
        self.fetched_batch = number


def _find_messages(file: ObjectFile, path: Path) -> list[ByteRange]:
    """Return the byte ranges of all bytes except bodies of record batches."""
    # Raises `FormatError` if the footer is missing, or requires more bytes.
    end = bytes(file.read_tail(_FOOTER_BYTES)[-_END_BYTES:])
    if end[4:] != _MARK:
        problem = "the end of an Arrow IPC file is missing"
        raise FormatError(f"{path}: {problem}; the file is incomplete or has another format, restore it")
    footer_bytes = int.from_bytes(end[:4], "little")
    footer = bytes(file.read_tail(footer_bytes + _END_BYTES)[:footer_bytes])
    dictionaries, batches = (_blocks(footer, field) for field in (_DICTIONARIES, _BATCHES))
    ranges = [(0, min((start for start, _, _ in dictionaries + batches), default=file.size_bytes))]
    ranges += [(start, start + header + body) for start, header, body in dictionaries]
    ranges += [(start, start + header) for start, header, _ in batches]
    ranges.append((file.size_bytes - footer_bytes - _END_BYTES, file.size_bytes))
    bodies = [(start + header, start + header + body) for start, header, body in batches]
    if any(not 0 <= start <= stop <= file.size_bytes for start, stop in ranges + bodies):
        problem = f"{file.size_bytes:,} bytes are fewer than the footer requires"
        raise FormatError(f"{path}: {problem}; the file is truncated, restore it")
    return ranges


def _blocks(footer: bytes, field: int) -> list[tuple[int, ...]]:
    field_start = _flat_field(footer, _flat_offset(footer, 0), field)
    if field_start is None:
        return []
    vector = _flat_offset(footer, field_start)
    (count,) = struct.unpack_from("<I", footer, vector)
    return [_BLOCK.unpack_from(footer, vector + 4 + _BLOCK.size * number) for number in range(count)]


def _flat_offset(data: bytes, position: int) -> int:
    """Return the target of the offset stored at a position of a flat buffer."""
    return position + int(struct.unpack_from("<I", data, position)[0])


def _flat_field(data: bytes, table: int, number: int) -> int | None:
    """Return the position of field ``number`` of a FlatBuffers table, or None if the field is missing."""
    entries = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, entries)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, entries + entry)[0])
    return table + offset if offset else None
