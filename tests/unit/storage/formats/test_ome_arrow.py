"""ome-arrow's dataset format: read from ome-arrow, written for ome-arrow, and damaged."""

from __future__ import annotations

import json

import numpy as np
import ome_arrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omearrow_ds import DecodeError, FormatError, convert, open_images, write_images
from omearrow_ds.codec.schema import normalize_metadata
from omearrow_ds.storage.formats import ome_arrow as ours
from tests.support.errors import raises
from tests.support.sources import check
from tests.support.strategies import DTYPES, METADATA, MIXED, all_same, collections, image_of, images_of, same

LAYOUTS = ["auto", "image", "tile", "volume", "z-plane", "block", "hybrid"]
COMPRESSIONS = [None, "snappy", "gzip", "brotli", "zstd", "lz4"]


def theirs(images, path, **options):
    """Write images with ome-arrow, which stores ids separately from records, and return the path."""
    ome_arrow.write_ome_arrow_dataset(images, path, **options)
    return path


def rewrite(path, change, **options):
    """Rewrite a Parquet table with a change."""
    pq.write_table(change(pq.ParquetFile(path).read()), path, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "not indexed"])
@pytest.mark.share(2, "layout", "indexed")
def test_every_layout_of_theirs(tmp_path, layout, indexed):
    images = images_of([((2, 3, 4, 150, 300), "uint16"), ((1, 1, 1, 5, 600), "float32"), ((1, 2, 17, 9, 8), "int8")])
    path = theirs(images, tmp_path / "theirs", layout=layout, build_physical_index=indexed)
    source = open_images(path)
    assert source.format.name == "ome_arrow"
    assert source.image_ids == [f"image-{number:05d}" for number in range(3)]
    check(source, images, [2, 0, 1, 1])


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.share(3, "compression", "rows")
def test_every_compression_of_theirs(tmp_path, compression, rows):
    images = images_of(MIXED)
    options = {"compression": compression, "chunk_rows_per_row_group": rows, "chunk_shape": (1, 1, 1, 4, 5)}
    check(open_images(theirs(images, tmp_path / "theirs", **options)), images, [11, 0, 5, 5, 7])


@pytest.mark.parametrize("compression", [None, "snappy", "zstd", "lz4"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.share(2, "compression", "rows")
def test_their_dictionaries_are_cut_without_pyarrow(tmp_path, monkeypatch, compression, rows):
    images = images_of([((1, 3, 1, 20, 30), "uint16"), ((1, 2, 1, 20, 30), "float64"), ((1, 3, 1, 6, 7), "uint8")] * 3)
    images.append(np.zeros((1, 4, 1, 20, 30), "uint16"))  # All chunks of this image share one dictionary value.
    options = {"layout": "z-plane", "compression": compression, "chunk_rows_per_row_group": rows}
    path = theirs(images, tmp_path / "theirs", **options)
    for version in ("1.0", "2.0"):
        rewrite(
            path / "chunks.parquet",
            lambda table: table,
            row_group_size=rows,
            compression=compression or "none",
            data_page_version=version,
            data_page_size=1,
            write_batch_size=2,
        )
        with monkeypatch.context() as patch:
            patch.setattr(ours.ChunkTable, "decode_group", None)
            check(open_images(path), images, [9, 0, 5, 5, 7])


def test_dictionaries_that_grew_too_large_are_read(tmp_path):
    images = images_of([((1, 6, 1, 20, 30), "uint16")] * 3)
    path = theirs(images, tmp_path / "theirs", layout="z-plane")
    few = {"write_batch_size": 2, "dictionary_pagesize_limit": 3000, "row_group_size": 18}
    rewrite(path / "chunks.parquet", lambda table: table, **few)
    (path / "index.parquet").unlink()
    check(open_images(path), images, [2, 0, 1])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    collections(),
    st.sampled_from(LAYOUTS),
    st.none() | st.tuples(*[st.integers(1, 4)] * 5),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([None, "zstd"]),
)
def test_whatever_they_write(tmp_path_factory, images, layout, chunk, indexed, rows, compression):
    path = theirs(
        images,
        tmp_path_factory.mktemp("theirs") / "images",
        layout=layout,
        chunk_shape=chunk,
        build_physical_index=indexed,
        chunk_rows_per_row_group=rows,
        compression=compression,
    )
    order = [*range(len(images) - 1, -1, -1), 0]
    check(open_images(path), images, order)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "snappy"])
def test_they_read_what_is_written(tmp_path, compression):
    images = images_of([*(((2, 1, 3, 4, 5), dtype) for dtype in DTYPES), *MIXED])
    path = tmp_path / "ours.ome_arrow"
    write_images(images, path, compression=compression)
    source = ome_arrow.OMEArrowDataset(path)
    assert source.image_ids == open_images(path).image_ids
    assert all_same(source.read_many(source.image_ids), images)
    assert same(source.read_region("image-00000", y=slice(1, 3), x=slice(0, 2)), images[0][..., 1:3, :2])
    (path / "index.parquet").unlink()
    assert all_same(ome_arrow.OMEArrowDataset(path).read_many(source.image_ids[-2:]), images[-2:])
    check(open_images(path), images, [0, 19, 3])


def test_the_tables_are_those_of_theirs(tmp_path):
    """Names, types and order of columns, key-value metadata, and manifest keys equal ome-arrow's."""
    images = images_of(MIXED)
    theirs(images, tmp_path / "theirs", layout="image", compression=None)
    write_images(images, tmp_path / "ours", "ome_arrow")
    for name in ("images.parquet", "chunks.parquet", "index.parquet"):
        expected, actual = (pq.read_schema(tmp_path / folder / name) for folder in ("theirs", "ours"))
        assert actual.equals(expected)
        assert actual.metadata.items() >= {**expected.metadata}.items() - {(b"ARROW:schema", b"")}
    expected, actual = (
        json.loads((tmp_path / folder / "_ome_arrow_dataset.json").read_text()) for folder in ("theirs", "ours")
    )
    assert actual.keys() == expected.keys()
    assert actual["choice"].keys() == expected["choice"].keys()
    assert [actual[name] for name in ("type", "version", "layout", "image_count", "chunk_count")] == [
        expected[name] for name in ("type", "version", "layout", "image_count", "chunk_count")
    ]


def test_metadata_of_theirs(tmp_path):
    images = images_of([((1, 2, 1, 3, 4), "uint16")] * 2)
    write_images(images, tmp_path / "images.parquet", metadata=[METADATA, None], image_ids=["a", "b"])
    column = pq.read_table(tmp_path / "images.parquet")["ome_image"]
    records = [ome_arrow.OMEArrow(scalar) for scalar in column]
    source = open_images(theirs(records, tmp_path / "theirs"))
    expected = normalize_metadata(METADATA, 2, "")
    for name in ("name", "image_type", "channels"):
        assert source.metadata(0)[name] == expected[name]
    assert source.metadata(1)["name"] == "b"
    assert source.image_ids == ["a", "b"]


def test_columns_that_others_added_to_their_images(tmp_path):
    images = images_of([((1, 1, 1, 3, 4), "uint8")] * 2)
    path = theirs(images, tmp_path / "theirs")
    rewrite(path / "images.parquet", lambda table: table.append_column("well", pa.array(["A01", "B02"])))
    assert open_images(path).columns.to_pydict() == {"well": ["A01", "B02"]}


def test_columns_called_as_theirs_come_back(tmp_path):
    columns = {"name": ["a", "b"], "dtype": [1, 2], "t": [0.5, None]}
    write_images(images_of([((1, 1, 1, 3, 4), "uint8")] * 2), tmp_path / "x.ome_arrow", columns=columns)
    assert open_images(tmp_path / "x.ome_arrow").columns.to_pydict() == columns


def test_row_groups_hold_many_chunks_and_pages_one_where_they_are_compressed(tmp_path):
    images = images_of([((1, 1, 1, 100, 100), "uint16")] * 600)
    for compression in ("none", "zstd"):
        write_images(images, tmp_path / compression, "ome_arrow", compression=compression)
        source = open_images(tmp_path / compression)
        assert [len(rows) for rows in np.split(np.arange(600), source.images._chunks().starts[1:-1])] == [256, 256, 88]
        stored = source.images.details.storage_info()
        assert (stored.compression, stored.in_place) == (compression, compression == "none")
        assert stored.chunking == "600 chunks, one per image, in 3 row groups of 88 to 256 chunks"
        check(source, images, [599, 0, 255, 256, 256])
        assert source.images._chunks()._has_pages


def test_large_images_are_cut_along_t_and_c_then_z(tmp_path, monkeypatch):
    image = image_of((2, 2, 3, 20, 10), "uint16")
    for most, layout, count in ((4800, "image", 1), (4799, "volume", 4), (1199, "z-plane", 12)):
        monkeypatch.setattr(ours, "_MOST_CHUNK_BYTES", most)
        path = tmp_path / layout
        write_images([image, image + np.uint16(1)], path, "ome_arrow")
        assert pq.read_table(path / "images.parquet")["layout"].to_pylist() == [layout] * 2
        assert pq.ParquetFile(path / "chunks.parquet").metadata.num_rows == 2 * count
        check(open_images(path), [image, image + np.uint16(1)], [1, 0])
        assert same(ome_arrow.OMEArrowDataset(path).read_image("image-00001"), image + np.uint16(1))
    monkeypatch.setattr(ours, "_MOST_CHUNK_BYTES", 399)
    with raises(Exception, mentions="image-00000"):
        write_images([image], tmp_path / "none", "ome_arrow")
    assert not (tmp_path / "none").exists()


def test_one_buffer_that_is_filled_again_and_again(tmp_path):
    images = images_of([((1, 2, 1, 3, 4), "uint16")] * 5)
    buffer = np.empty_like(images[0])

    def filled():
        for image in images:
            buffer[...] = image
            yield buffer

    write_images(filled(), tmp_path / "x.ome_arrow")
    check(open_images(tmp_path / "x.ome_arrow"), images, [4, 0])


def test_images_of_one_id(tmp_path):
    """CytoTable repeats ids: they are kept here, but made unique for ome-arrow, which finds images by id."""
    images = images_of([((1, 1, 1, 3, 4), "uint8")] * 3)
    tables = [ours_table(tmp_path, f"{number}.parquet", image) for number, image in enumerate(images)]
    pq.write_table(pa.concat_tables(tables), tmp_path / "all.parquet")
    convert(tmp_path / "all.parquet", tmp_path / "x.ome_arrow")
    source = open_images(tmp_path / "x.ome_arrow")
    assert source.image_ids == ["same"] * 3
    check(source, images, [2, 0, 1])
    foreign = ome_arrow.OMEArrowDataset(tmp_path / "x.ome_arrow")
    assert foreign.image_ids == ["same", "same-1", "same-2"]
    assert all_same(foreign.read_many(foreign.image_ids), images)
    path = theirs(images, tmp_path / "theirs")
    rewrite(path / "images.parquet", lambda table: table.set_column(0, "image_id", pa.array(["a"] * 3)))
    with raises(FormatError, path=path / "images.parquet", mentions="image_id", remedy=False):
        open_images(path)


def ours_table(folder, name, image):
    write_images([image], folder / name, image_ids=["same"])
    return pq.read_table(folder / name)


@pytest.fixture
def path(tmp_path):
    """Four images of six chunks each in ome-arrow's layout, with three chunks per row group."""
    images = images_of([((1, 2, 3, 4, 5), "uint16")] * 4)
    return theirs(images, tmp_path / "theirs", layout="z-plane", chunk_rows_per_row_group=3)


def test_images_of_several_chunks_say_so(path):
    assert (
        open_images(path).images.details.storage_info().chunking
        == "24 chunks, of 4 images, in 8 row groups of 3 chunks"
    )


def test_a_chunk_that_is_missing_or_there_twice(path):
    rewrite(path / "chunks.parquet", lambda table: table.slice(0, 23), row_group_size=3)
    with raises(FormatError, path=path, mentions=("image 3", "'image-00003'", "5 chunks")):
        open_images(path).read(0)
    rewrite(path / "chunks.parquet", lambda table: pa.concat_tables([table, table.slice(22, 1)]), row_group_size=3)
    with raises(FormatError, path=path, mentions=("image 3", "6 chunks")):
        open_images(path).read(0)


@pytest.mark.parametrize(("column", "value"), [("t", 1), ("c", 2), ("z", -1), ("y", 4), ("shape_x", 4), ("shape_y", 0)])
def test_a_chunk_that_stands_elsewhere(path, column, value):
    def moved(table):
        values = table[column].to_pylist()
        values[7] = value
        return table.set_column(table.schema.get_field_index(column), column, pa.array(values, pa.int32()))

    rewrite(path / "chunks.parquet", moved, row_group_size=3)
    with raises(FormatError, path=path, mentions=("image 1", "'image-00001'", "6 chunks")):
        open_images(path).read(0)


@pytest.mark.parametrize("value", [b"", b"x" * 39, b"x" * 41, None])
def test_a_chunk_of_other_pixels(path, value):
    def cut(table):
        values = table["pixel_bytes"].to_pylist()
        values[7] = value
        column = table.schema.get_field_index("pixel_bytes")
        return table.set_column(column, "pixel_bytes", pa.array(values, pa.large_binary()))

    rewrite(path / "chunks.parquet", cut, row_group_size=3)
    source = open_images(path)
    assert same(source.read(0), image_of((1, 2, 3, 4, 5), "uint16", 0))
    with raises(DecodeError, path=path, mentions=("image 1", "40 bytes"), remedy=False):
        source.read(1)


def test_a_chunk_of_another_dtype(path):
    def retyped(table):
        values = table["dtype"].to_pylist()
        values[7] = "int16"
        return table.set_column(table.schema.get_field_index("dtype"), "dtype", pa.array(values))

    rewrite(path / "chunks.parquet", retyped, row_group_size=3)
    with raises(FormatError, path=path, mentions=("image 1", "'image-00001'", "uint16", "int16"), remedy=False):
        open_images(path).read(0)


@pytest.mark.parametrize("column", ["image_id", "c", "z", "row_group_id"])
def test_an_index_that_contradicts_the_chunks_is_ignored(path, column):
    images = images_of([((1, 2, 3, 4, 5), "uint16")] * 4)
    rewrite(path / "index.parquet", lambda table: table.slice(0, 20))
    check(open_images(path), images, [3, 0])

    def swapped(table):
        values = table[column].to_pylist()
        values[0], values[6] = values[6], values[0]
        number = table.schema.get_field_index(column)
        return table.set_column(number, table.schema.field(number), pa.array(values, table.schema.field(number).type))

    theirs(images, path, layout="z-plane", chunk_rows_per_row_group=3)
    rewrite(path / "index.parquet", swapped)
    check(open_images(path), images, [3, 0])


def test_chunks_in_another_order_than_in_the_index_are_read(path):
    order = np.random.default_rng(0).permutation(24)
    rewrite(path / "chunks.parquet", lambda table: table.take(pa.array(order)), row_group_size=3)
    check(open_images(path), images_of([((1, 2, 3, 4, 5), "uint16")] * 4), [3, 0])


@pytest.mark.parametrize("position", [0, 14], ids=["before", "after"])
def test_chunks_with_a_nested_column_are_read(path, position):
    extra = pa.array([{"a": 1, "b": 2}] * 24)
    rewrite(path / "chunks.parquet", lambda table: table.add_column(position, "extra", extra), row_group_size=1)
    check(open_images(path), images_of([((1, 2, 3, 4, 5), "uint16")] * 4), [3, 0])


@pytest.mark.parametrize("rows", [1, 3, 24])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("statistics", [True, False, ["c", "dtype"]], ids=str)
def test_chunks_are_located_with_any_statistics(path, rows, kind, statistics):
    """Positions of chunks come from the footer if it states them, else from pages."""

    def change(table):
        ids = pa.array(np.repeat(["image-00000", "image-00001", None, "image-00003"], len(table) // 4))
        return table.set_column(0, "image_id", ids.cast(kind))

    rewrite(path / "chunks.parquet", change, row_group_size=rows, write_statistics=statistics)
    rewrite(path / "images.parquet", change)
    check(open_images(path), images_of([((1, 2, 3, 4, 5), "uint16")] * 4), [3, 0, 2, 1])


def test_chunks_of_one_row_per_group_are_located_by_the_footer(path, monkeypatch):
    rewrite(path / "chunks.parquet", lambda table: table, row_group_size=1)
    source, read, original = open_images(path), [], pq.ParquetFile.read
    monkeypatch.setattr(pq.ParquetFile, "read", lambda self, columns: read.append(columns) or original(self, columns))
    check(source, images_of([((1, 2, 3, 4, 5), "uint16")] * 4), [3, 0])
    assert read == [[]]


def test_bounds_that_are_not_exact_are_ignored(path):
    """A writer may state smaller and larger bounds, as for long strings; pages have the values."""
    rewrite(path / "chunks.parquet", lambda table: table, row_group_size=1, use_dictionary=False, compression="none")
    file = path / "chunks.parquet"
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    file.write_bytes(data[:footer] + data[footer:].replace(b"image-00001", b"image-0000~", 1))
    assert pq.ParquetFile(file).metadata.row_group(6).column(0).statistics.max == "image-0000~"
    check(open_images(path), images_of([((1, 2, 3, 4, 5), "uint16")] * 4), [3, 0, 1])


def test_images_that_were_taken_out(path):
    """Chunks of images that are no longer listed are ignored, as in ome-arrow."""
    rewrite(path / "images.parquet", lambda table: table.take(pa.array([3, 1])))
    with raises(
        FormatError, path=path / "_ome_arrow_dataset.json", mentions=("4 images", 2, "images.parquet"), remedy=False
    ):
        open_images(path)
    (path / "_ome_arrow_dataset.json").unlink()
    source = open_images(path, "ome_arrow")
    check(source, [image_of((1, 2, 3, 4, 5), "uint16", number) for number in (3, 1)], [1, 0])


def test_a_folder_of_theirs_written_over_ours(tmp_path):
    images = images_of([((1, 1, 1, 3, 4), "uint8")] * 2)
    path = tmp_path / "x.ome_arrow"
    write_images(images, path, columns={"well": ["A01", "B02"]}, image_ids=["a", "b"])
    source = open_images(path)
    theirs(images, path)
    with raises(FormatError, path=path):
        source.read(0)
    with raises(FormatError, path=path / "columns.parquet", mentions="images.parquet"):
        open_images(path)
    (path / "columns.parquet").unlink()
    check(open_images(path), images, [1, 0])


@pytest.mark.parametrize("name", ["images.parquet", "chunks.parquet"])
def test_a_table_that_is_missing_or_a_link(path, name):
    moved = path.parent / name
    (path / name).rename(moved)
    with raises(FormatError, path=path, mentions=name):
        open_images(path)
    (path / name).symlink_to(moved)
    with raises(FormatError, path=path / name, mentions="symbolic link"):
        open_images(path)
