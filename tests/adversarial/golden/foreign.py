"""Golden files written by other software: ome-arrow, tifffile, zarr, and the table libraries themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather

from omearrow_ds.storage.protocol import OpenOptions
from tests.adversarial.golden.content import Array, Content

STACK = Content(
    (((2, 2, 3, 9, 11), "uint16"),),
    ("an id",),
    metadata=({"name": "a name", "physical_size_x": 0.5},),
)
STACK_NAMED = replace(STACK, metadata=({"name": "a name"},))
STACK_SIZED = replace(STACK, metadata=({"physical_size_x": 0.5},))
STACK_8 = Content((((2, 2, 3, 9, 11), "uint8"),), ("an id",), metadata=({"name": "a name"},))
PLANE = Content((((12, 17), "uint16"),), ("image",), moved=((0, 1), (1, 1, 1, 12, 17)))
PLANE_F = Content((((12, 17), "float32"),), ("image",), moved=((0, 1), (1, 1, 1, 12, 17)))
TILED = Content((((40, 50), "int16"),), ("image",), moved=((0, 1), (1, 1, 1, 40, 50)))
RGB = Content((((12, 17, 3), "uint8"),), ("image",), moved=((2, 0, 1), (1, 3, 1, 12, 17)))
TZCYX = Content((((2, 3, 2, 6, 7), "uint16"),), ("image",), moved=((0, 2, 1, 3, 4), (2, 2, 3, 6, 7)))
ZCYX = Content((((3, 2, 6, 7), "uint16"),), ("image",), moved=((1, 0, 2, 3), (1, 2, 3, 6, 7)))
NGFF = Content(
    (((2, 3, 12, 10), "uint16"),),
    ("image",),
    metadata=({"name": "an image", "physical_size_x": 0.25},),
    moved=((0, 1, 2, 3), (1, 2, 3, 12, 10)),
)
BARE = Content((((12, 10), "uint16"),), ("image",), moved=((0, 1), (1, 1, 1, 12, 10)))

_ROWS = 6
TABLE = Content(
    (((1, 2, 1, 6, 5), "uint16"),) * _ROWS,
    tuple(f"id {number}" for number in range(_ROWS)),
    {
        "before": (pa.int64(), [10 * number for number in range(_ROWS)]),
        "after": (pa.string(), [f"x{number}" for number in range(_ROWS)]),
    },
)
# Of 6 rows, the first was deleted after rows 4 and 5 had been appended.
EDITED = Content(
    TABLE.kinds[1:],
    TABLE.ids[1:],
    {name: (kind, values[1:]) for name, (kind, values) in TABLE.columns.items()},
    numbers=(1, 2, 3, 4, 5),
)


@dataclass(frozen=True)
class Foreign:
    """A collection written by other software: ``writer`` gets the path and the content."""

    name: str
    stored: str
    format: str
    content: Content
    needs: tuple[str, ...]
    writer: Callable[[Path, Content], None]
    opening: OpenOptions = field(default_factory=OpenOptions)

    def write(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Other libraries warn about their own dependencies.
            self.writer(path, self.content)


def table_of(content: Content, encoding: str, column: str = "picture") -> pa.Table:
    """Return the images as OME-Arrow records between the other columns, one chunk per (t, c), built by hand."""
    from omearrow_ds.codec import schema

    records = [_record(image, encoding, image_id) for image, image_id in zip(content.images, content.ids, strict=True)]
    images = pa.array(records, schema.image_struct(encoding))
    columns = content.table
    return pa.table({"before": columns["before"], column: images, "after": columns["after"]})


def _record(image: Array, encoding: str, image_id: str) -> dict[str, Any]:
    sizes = dict(zip(("size_t", "size_c", "size_z", "size_y", "size_x"), image.shape, strict=True))
    box = {"z": 0, "y": 0, "x": 0, **dict(zip(("shape_z", "shape_y", "shape_x"), image.shape[2:], strict=True))}
    chunks = []
    for t, c in product(range(image.shape[0]), range(image.shape[1])):
        pixels = image[t, c]
        stored = {"pixels": pixels.ravel()}
        if encoding == "bytes":
            stored = {"dtype": image.dtype.name, "compression": None, "pixel_bytes": pixels.tobytes()}
        chunks.append({"t": t, "c": c, **box, **stored})
    meta = {"type": image.dtype.name, "dimension_order": "XYZCT", "channels": [], **sizes}
    return {"type": "ome.arrow", "version": "0.1.0", "id": image_id, "pixels_meta": meta, "chunks": chunks}


def _ome_arrow(export: str, build: dict[str, Any], options: dict[str, Any], path: Path, content: Content) -> None:
    import ome_arrow.export
    from ome_arrow.ingest import from_numpy

    names = {"image_id": content.ids[0], "name": "a name", "physical_size_x": 0.5}
    scalar = from_numpy(content.written[0], clamp_to_uint16=False, **names, **build)
    path.parent.mkdir(exist_ok=True)
    getattr(ome_arrow.export, export)(scalar, str(path), **options)


def _inside(name: str, write: Callable[[Path, Content], None], path: Path, content: Content) -> None:
    path.mkdir()
    write(path / name, content)


def _tiff(options: dict[str, Any], path: Path, content: Content) -> None:
    import tifffile

    path.mkdir()
    tifffile.imwrite(path / "image.tif", content.written[0], **options)


def _ngff(version: str, zarr_format: int, options: dict[str, Any], path: Path, content: Content) -> None:
    import zarr

    space = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
    axes = [{"name": "c", "type": "channel"}, *space]
    scale = {"type": "scale", "scale": [1, 0.25, 0.25, 0.25]}
    levels = [{"path": "full", "coordinateTransformations": [scale]}]
    multiscales = [{"version": version, "name": "an image", "axes": axes, "datasets": levels}]
    attributes = (
        {"multiscales": multiscales} if version == "0.4" else {"ome": {"version": "0.5", "multiscales": multiscales}}
    )
    path.mkdir()
    group = zarr.create_group(path / "image.zarr", zarr_format=zarr_format, attributes=attributes)
    pixels = content.written[0]
    array = group.create_array("full", shape=pixels.shape, dtype=pixels.dtype, **options)
    array[...] = pixels


def _zarr_array(zarr_format: int, dtype: str, path: Path, content: Content) -> None:
    import zarr

    pixels = content.written[0].astype(dtype)
    path.mkdir()
    image_path = path / "image"
    array = zarr.create_array(image_path, shape=pixels.shape, dtype=dtype, chunks=(5, 4), zarr_format=zarr_format)
    array[...] = pixels


def _parquet(encoding: str, options: dict[str, Any], path: Path, content: Content) -> None:
    pq.write_table(table_of(content, encoding), path, **options)


def _feather(compression: str, path: Path, content: Content) -> None:
    feather.write_feather(table_of(content, "bytes"), path, compression=compression, chunksize=4)


def _lance(path: Path, content: Content) -> None:
    import lance

    table = table_of(TABLE, "bytes")
    lance.write_dataset(table.take([0, 1, 2, 3]), str(path))
    lance.write_dataset(table.take([4, 5]), str(path), mode="append").delete("before = 0")  # A slice makes Lance panic.


def _vortex(encoding: str, path: Path, content: Content) -> None:
    import vortex.io

    vortex.io.write(table_of(content, encoding), str(path))


def _duckdb(encoding: str, path: Path, content: Content) -> None:
    import duckdb

    with duckdb.connect(str(path)) as connection:
        connection.register("incoming", table_of(TABLE, encoding))
        connection.execute('CREATE TABLE "some pictures" AS FROM incoming')
        connection.execute('DELETE FROM "some pictures" WHERE before = 0')


def foreign_cases() -> Iterator[Foreign]:
    """Yield the cases of other software."""
    yield from _ome_arrow_cases()
    yield from _tiff_cases()
    yield from _zarr_cases()
    yield from _table_cases()


def _ome_arrow_cases() -> Iterator[Foreign]:
    parquet: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "list": ({}, {}),
        "list-chunked": ({"chunk_shape": (2, 4, 6)}, {}),
        "planes": ({"build_chunks": False}, {}),
        "bytes": ({"chunk_encoding": "bytes"}, {}),
        "bytes-zstd": ({"chunk_encoding": "bytes", "chunk_shape": (3, 5, 7), "chunk_compression": "zstd"}, {}),
        "inline": ({}, {"inline_chunk_encoding": "bytes", "inline_chunk_compression": "lz4"}),
    }
    needs = ("ome_arrow",)
    for name, (build, options) in parquet.items():
        write = partial(_ome_arrow, "to_ome_parquet", build, options)
        yield Foreign(f"ome_arrow-parquet-{name}", "image.parquet", "parquet", STACK, needs, write)
    for name, build in (("list", {}), ("planes", {"build_chunks": False})):
        write = partial(_ome_arrow, "to_ome_vortex", build, {})
        yield Foreign(f"ome_arrow-vortex-{name}", "image.vortex", "vortex", STACK_8, (*needs, "vortex"), write)
    for zarr_format in (2, 3):
        write = partial(_ome_arrow, "to_ome_zarr", {}, {"zarr_format": zarr_format, "multiscale_levels": 2})
        write = partial(_inside, "an id.ome.zarr", write)
        yield Foreign(f"ome_arrow-zarr-{zarr_format}", "images", "ome_zarr", STACK_NAMED, (*needs, "zarr"), write)
    write = partial(_inside, "an id.ome.tiff", partial(_ome_arrow, "to_ome_tiff", {}, {}))
    yield Foreign("ome_arrow-tiff", "images", "tiff", STACK_SIZED, needs, write)


def _tiff_cases() -> Iterator[Foreign]:
    tiffs: dict[str, tuple[Content, dict[str, Any]]] = {
        "plain": (PLANE, {}),
        "float-zlib-predictor": (PLANE_F, {"compression": "zlib", "predictor": True}),
        "tiled-big-endian-lzw": (TILED, {"byteorder": ">", "tile": (16, 32), "compression": "lzw"}),
        "bigtiff-strips": (PLANE, {"bigtiff": True, "rowsperstrip": 5}),
        "rgb": (RGB, {"photometric": "rgb"}),
        "imagej": (TZCYX, {"imagej": True, "metadata": {"axes": "TZCYX"}}),
        "ome": (ZCYX, {"ome": True, "photometric": "minisblack", "metadata": {"axes": "ZCYX"}}),
    }
    for name, (content, options) in tiffs.items():
        yield Foreign(f"tifffile-{name}", "images", "tiff", content, ("tifffile",), partial(_tiff, options))


def _zarr_cases() -> Iterator[Foreign]:
    needs = ("zarr",)
    layouts: dict[str, tuple[str, int, dict[str, Any]]] = {
        "0.4": ("0.4", 2, {"chunks": (1, 2, 5, 6)}),
        "0.5": ("0.5", 3, {"chunks": (1, 2, 5, 6)}),
        "0.5-sharded": ("0.5", 3, {"chunks": (1, 1, 4, 5), "shards": (1, 3, 12, 10)}),
    }
    for name, layout in layouts.items():
        yield Foreign(f"zarr-ngff-{name}", "images", "ome_zarr", NGFF, needs, partial(_ngff, *layout))
    for zarr_format, dtype in ((2, ">u2"), (3, "<u2")):
        write = partial(_zarr_array, zarr_format, dtype)
        yield Foreign(f"zarr-array-{zarr_format}", "images", "ome_zarr", BARE, needs, write)


def _table_cases() -> Iterator[Foreign]:
    pages = {"row_group_size": 4, "compression": "zstd", "data_page_version": "2.0", "use_dictionary": False}
    layouts: dict[str, dict[str, Any]] = {
        "default": {},
        "pages-2": pages,
        "1.0": {"version": "1.0", "store_schema": False},
    }
    for (name, options), encoding in product(layouts.items(), ("bytes", "list")):
        write = partial(_parquet, encoding, options)
        yield Foreign(f"pyarrow-parquet-{encoding}-{name}", "images.parquet", "parquet", TABLE, ("pyarrow",), write)
    for compression in ("uncompressed", "lz4"):
        write = partial(_feather, compression)
        yield Foreign(f"pyarrow-feather-{compression}", "images.arrow", "arrow", TABLE, ("pyarrow",), write)
    yield Foreign("lance-edited", "images.lance", "lance", EDITED, ("lance",), _lance)
    for encoding in ("bytes", "list"):
        yield Foreign(f"vortex-{encoding}", "images.vortex", "vortex", TABLE, ("vortex",), partial(_vortex, encoding))
        yield Foreign(f"duckdb-{encoding}", "images.duckdb", "duckdb", EDITED, ("duckdb",), partial(_duckdb, encoding))
