"""Vortex file: pixels of the requested rows are read from the memory-mapped file, still encoded.

zstd suits archives that are preloaded: reading one image decodes its block of 8,192 rows. Vortex creates these blocks
for any input, holds them while writing, and cannot store bytes unencoded.
Measurements are in ``docs/explanation/layouts.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.codec.decode import placed_chunks
from omearrow_ds.errors import DecodeError, FormatError
from omearrow_ds.kernels.stacks import Stacks
from omearrow_ds.storage.byte_source import MappedFile
from omearrow_ds.storage.formats._base import Array, Block, group_by_part, is_uniform, split_groups
from omearrow_ds.storage.formats._columns import is_narrow
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._image_columns import PIXELS_META, ImageColumn
from omearrow_ds.storage.formats._leaf import LeafSource
from omearrow_ds.storage.formats._stored import Stored, groups, joined
from omearrow_ds.storage.formats._stream import Stream
from omearrow_ds.storage.formats._table import CopiedFile, as_reader, unnest
from omearrow_ds.storage.formats._urls import Objects
from omearrow_ds.storage.formats._vortex_rows import OpenVortexFile, Rows, in_place

_BLOCK_BYTES = 4 * 2**20
_MANY = 64  # From this number of images, Arrow arrays cost less than scalars.
UNSUPPORTED_TYPES = (pa.types.is_duration, pa.types.is_interval)
STAGES = {"Source._images_of_scalars": "read+decode"}


def write(tables: Stream[pa.Table], table_schema: pa.Schema, path: Path, compression: str) -> None:
    """Write tables to a Vortex file with the encodings that Vortex chooses, including zstd if ``compression`` is zstd.

    Vortex is called in a separate thread, because otherwise the main thread would handle Ctrl-C only at the end.
    """
    import vortex.io  # noqa: PLC0415  # an optional backend

    options = vortex.io.VortexWriteOptions
    chosen = options.compact() if compression == "zstd" else options.default()
    with ThreadPoolExecutor(1, "vortex-write") as thread:
        writing = thread.submit(chosen.write, as_reader(tables, table_schema), str(path))
        try:
            writing.result()
        except BaseException:
            tables.stop()
            raise


class Source(LeafSource):
    """Images of a Vortex file, or of an object on a server.

    An object is copied to the cache as a whole, because Vortex 0.91 would fetch it once per process.
    """

    name = "vortex"
    errors = (OSError, ValueError, RuntimeError)

    def __init__(
        self,
        path: Path,
        image_column: str | None = None,
        *,
        with_columns: bool = True,
        look: bool = False,
        objects: Objects | None = None,
    ) -> None:
        self._set_file(path, objects, image_column=image_column, with_columns=with_columns)
        self.fetches = False
        self._file = ProcessLocal(self._open)
        table_schema = self._file.get().file.to_arrow().schema
        others = self._choose(table_schema, image_column, with_columns=with_columns)
        columns = pa.schema([table_schema.field(name) for name in others])
        self._look = look and is_narrow(others)
        if self._look:
            info, values = self._read_told(others)
            self._set_header(info, columns, values)
            self.close()
            return
        self._set_header(self._read_info(self._column), columns)
        self._leaf = self._find_leaf(table_schema.field(self._column.name).type)
        self._all_placed = self._leaf is not None
        self.close()

    def _read_stored(self, names: list[str]) -> pa.Table:
        import vortex.expr  # noqa: PLC0415  # an optional backend

        return unnest(self._read(vortex.expr.select(names, vortex.expr.root()))).select(names)

    def _read_info(self, column: ImageColumn) -> pa.Table:
        import vortex.expr  # noqa: PLC0415  # an optional backend

        return unnest(self._read(vortex.expr.select(column.info_fields, vortex.expr.column(column.name))))

    def _read_told(self, others: list[str]) -> tuple[pa.Table, pa.Table]:
        """Return the fields that give id, shape and dtype, and the columns ``others``, by one scan."""
        from vortex.expr import column, pack, root, select  # noqa: PLC0415  # an optional backend

        image = column(self._column.name)
        told: dict[str, Any] = {"id": image["id"]} if "id" in self._column.fields else {}
        meta = image["pixels_meta"]
        told["pixels_meta"] = pack({name: meta[name] for name in PIXELS_META})
        table = unnest(self._read(pack({"told": pack(told), "others": select(others, root())})))
        return unnest(table["told"]), unnest(table["others"])

    def _open(self) -> OpenVortexFile:
        import vortex  # noqa: PLC0415  # an optional backend

        with self.guard:
            mapping = MappedFile(self.path) if self._objects is None else CopiedFile(self.guard, self._objects)
            return OpenVortexFile(vortex.open(mapping.name, memory_map=True), mapping)

    def storage_info(self) -> Stored:
        stored = super().storage_info()
        copied = "" if self._objects is None else "from a fetched copy of the object: "
        return replace(stored, reading=f"{copied}{stored.reading}")

    def _layout(self) -> Stored:
        rows = self._pixel_rows(self._column.pixel_field)
        decoded = [self._image_bytes[start:stop].sum() for start, stop in pairwise(rows.starts)]
        packed = (part.nbytes < size_bytes for part, size_bytes in zip(rows.parts, decoded, strict=True))
        compression = joined("compressed" if is_packed else "none" for is_packed in packed)
        plain = bool(self._mapped_images())
        if plain:
            reading = "in place: from the mapped file"
        elif any(rows.decoded_whole):
            reading = "by Vortex, which decodes a part of the file per image"
        else:
            reading = "by Vortex, each image separately"
        return Stored(self._column.encoding, compression, groups(rows.starts, "part"), plain, reading)

    def close(self) -> None:
        self._file.close()

    def _read(self, expression: Any) -> pa.ChunkedArray:
        mapped = self._file.get()
        mapped.mapping.refuse_changed()
        with self.guard.reading():
            array = mapped.file.scan(expression).read_all().to_arrow_array()
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])

    def _find_leaf(self, image: pa.DataType) -> pa.Field | None:
        """Return the pixel leaf of the chunks if it suffices to read every image."""
        found = self._leaf_and_places(image)
        if found is None:
            return None
        leaf, places = found
        try:
            stored = pa.concat_arrays(self._read(self._narrowed(places)).chunks)
        except FormatError:  # columns that Vortex cannot narrow are read whole
            return None
        return leaf if placed_chunks(stored, self._expected(np.arange(len(self)))).all() else None

    def _narrowed(self, fields: list[pa.Field]) -> Any:
        """Return the expression for chunks of only these fields.

        No expression reaches below a list, but a cast to fewer fields leaves the others undecoded.
        """
        import vortex.expr  # noqa: PLC0415  # an optional backend

        return vortex.expr.cast(self._expression("chunks"), vortex.DType.from_arrow(pa.list_(pa.struct(fields))))

    def _expression(self, field: str) -> Any:
        import vortex.expr  # noqa: PLC0415  # an optional backend

        return vortex.expr.column(self._column.name)[field]

    def _rows(self, field: str) -> Rows:
        return self._kept_rows(field, partial(self._expression, field))

    def _pixel_rows(self, field: str) -> Rows:
        """Return the rows of a field; for the chunks of a plainly stored file, only their pixels."""
        if self._leaf is None or field != "chunks":
            return self._rows(field)
        return self._kept_rows("pixels alone", partial(self._narrowed, [self._leaf]))

    def _kept_rows(self, name: str, expression: Callable[[], Any]) -> Rows:
        """Return all rows of an expression, cached under ``name``."""
        mapped = self._file.get()
        if name not in mapped.rows:
            with self.guard.reading():
                mapped.rows[name] = Rows(mapped.file.scan(expression()).read_all())
        return mapped.rows[name]

    def _mapped_images(self) -> list[Array | list[Array]]:
        """Return the images as views of the mapped file, part by part, if none of them is encoded, else []."""
        mapped = self._file.get()
        mapped.mapping.refuse_changed()
        if mapped.images is None:
            images = list(self._find_mapped_images())
            mapped.images = images if sum(map(len, images)) == len(self) else []
        return mapped.images

    def _find_mapped_images(self) -> Iterator[Array | list[Array]]:
        if self._leaf is None or not _holds(self._leaf.type, set(self._given_dtypes)):
            return
        pixels = self._pixel_rows("chunks")
        for part, (start, stop) in zip(pixels.parts, pairwise(pixels.starts), strict=True):
            indices = np.arange(start, stop)
            with self.guard.reading():
                lists = in_place(part, int(self._image_bytes[indices].sum()))
            if lists is None:
                return
            try:
                images = self._block(lists, indices).images()
            except DecodeError:  # the other images can still be read
                return
            yield images

    def _images_of_scalars(self, indices: Sequence[int]) -> list[Array] | None:
        """Return images of plainly stored bytes, or None if one is stored in another way.

        A scalar avoids the Arrow arrays, which cost more than dozens of small images; bytes are one object per chunk.
        """
        if self._leaf is None or self._leaf.name != "pixel_bytes" or not self._native:
            return None
        rows = self._kept_rows("chunks", partial(self._expression, "chunks"))
        images = []
        with self.guard.reading():
            for index in indices:
                chunks: Any = rows.scalar(index).as_py()
                pieces = [chunk["pixel_bytes"] for chunk in chunks or ()]
                if not pieces:  # The image is null.
                    return None
                share = int(self._image_bytes[index]) / len(pieces)
                if not all(isinstance(piece, bytes) and len(piece) == share for piece in pieces):
                    return None
                shape, dtype = self._kinds[index]
                pixels = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                images.append(np.frombuffer(pixels, dtype).reshape(shape))
        return images

    def _read_images(self, rows: Sequence[int]) -> list[Array]:
        mapped = self._mapped_images()
        if not mapped and len(rows) == 1:
            image = self._images_of_scalars(rows)  # Any encoding: only this image is decoded.
            return super()._read_images(rows) if image is None else image
        pixels = self._pixel_rows(self._column.pixel_field)
        images: list[Array] = []
        for number, in_part in group_by_part(pixels.starts, rows):
            if mapped:
                images += [mapped[number][row - pixels.starts[number]] for row in in_part]
                continue
            is_few = len(in_part) < _MANY and not pixels.decoded_whole[number]
            few = self._images_of_scalars(in_part) if is_few else None
            images += super()._read_images(in_part) if few is None else few
        return images

    def read_groups(self) -> Iterable[slice]:
        rows = self._pixel_rows(self._column.pixel_field)
        return split_groups(rows.starts, rows.decoded_whole, self._image_bytes, _BLOCK_BYTES)

    def stream(self) -> Iterator[Block]:
        """Yield all images by `take` of many rows; scalars would need a second scan, which holds more memory."""
        mapped = self._mapped_images()
        if mapped:
            yield from zip(self._pixel_rows("chunks").starts, mapped, strict=False)
            return
        for group in self.read_groups():
            yield group.start, super()._read_images(range(group.start, group.stop))

    def mapped_stacks(self) -> Stacks | None:
        arrays = [images for images in self._mapped_images() if isinstance(images, np.ndarray)]
        if not is_uniform(self) or not arrays or len(arrays) < len(self._mapped_images()):
            return None
        return Stacks(arrays, self._file.get().mapping.refuse_changed, is_mapped=True)

    @property
    def mapping(self) -> MappedFile | None:
        return self._file.get().mapping if self._mapped_images() else None

    def _fetch(self, field: str, indices: Array) -> list[pa.Array]:
        rows = self._pixel_rows(field)
        with self.guard.reading():
            return rows.take(indices.tolist())


def _holds(leaf: pa.DataType, dtypes: set[np.dtype[Any]]) -> bool:
    """Whether a leaf of this type stores pixels of all these dtypes as they are in memory."""
    if pa.types.is_list(leaf):
        return dtypes == {np.dtype(leaf.value_type.to_pandas_dtype())}
    return all(dtype.isnative for dtype in dtypes)
