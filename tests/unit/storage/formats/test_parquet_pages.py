"""Images cut out of Parquet pages of any writer, intact or damaged; the oracle is pyarrow."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, DecodeError, FormatError, OMEArrowDSError, open_images
from omearrow_ds.codec import schema
from omearrow_ds.storage.formats import _codecs, parquet
from omearrow_ds.storage.formats._parquet_headers import iter_pages
from omearrow_ds.storage.image_extents import OtherLayoutError
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import (
    all_same,
    byte_chunk,
    collections,
    image_of,
    images_of,
    list_chunk,
    record_of,
    same,
    whole_chunks,
)

UNIFORM = [((1, 2, 1, 7, 5), "uint16")] * 40
RAGGED = [((1, 1 + number % 3, 2, 4 + number, 5), ("uint8", "int32", "float64")[number % 3]) for number in range(12)]
LEAF = {
    "bytes": "ome_image.chunks.list.element.pixel_bytes",
    "list": "ome_image.chunks.list.element.pixels.list.element",
}
encodings = pytest.mark.parametrize("encoding", schema.ENCODINGS)
CHANGES = 1, 2, 0x10, 0x80, 0xFF
SHARES = 2 * len(CHANGES), pytest.param(1, marks=pytest.mark.slow)  # Changes every second byte, or all bytes.


def table_of(records, encoding="bytes"):
    return pa.table({"ome_image": pa.array(records, schema.image_struct(encoding))})


def cut_in_z(image, encoding, length):
    """Return chunks of ``length`` planes in TCZYX order."""
    make = byte_chunk if encoding == "bytes" else list_chunk
    size_t, size_c, size_z, size_y, size_x = image.shape
    starts = range(0, size_z, length)
    boxes = [(slice(start, start + length), slice(0, size_y), slice(0, size_x)) for start in starts]
    return [make(image, t, c, box) for t in range(size_t) for c in range(size_c) for box in boxes]


def engine_of(source):
    """Return the engine that reads the pixels of an open Parquet file."""
    table = source.images.table
    return getattr(table, "engine", None) or ("pages" if table._leaf.chunks else "pyarrow")


def read_in_all_ways(path, engine=None):
    with open_images(path, "parquet", engine=engine) as source:
        count = len(source)
        images = [source.read(index) for index in range(count)]
        order = [*range(count - 1, -1, -1), 0]
        assert all_same(source.take(order), [images[index] for index in order])
        assert all_same([source.images.read([index])[0] for index in range(count)], images)
        assert all_same([image for _, part in source.images.stream() for image in part], images)
    return images


def groups_of(source):
    """Return whether each row group was cut out of its pages, after reading all of them."""
    return [pages is not None for _, pages in sorted(source.images.table._reader.get()._pages.items())]


page_options = st.fixed_dictionaries(
    {
        "row_group_size": st.integers(1, 5),
        "data_page_size": st.sampled_from([16, 64, 300, 2**20]),
        "write_batch_size": st.sampled_from([1, 3, 1024]),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "use_dictionary": st.sampled_from([False, False, [*LEAF.values()]]),
        "dictionary_pagesize_limit": st.sampled_from([200, 2**20]),
        "compression": st.sampled_from(["none", "none", "lz4", "zstd", "snappy", "gzip"]),
        "write_statistics": st.booleans(),
        "write_page_index": st.booleans(),
        "write_page_checksum": st.booleans(),
    }
)


@encodings
@settings(max_examples=20, deadline=None)
@given(images=collections(6), options=page_options, data=st.data())
def test_pages_of_any_writer(encoding, images, options, data):
    if encoding == "list":
        images = [image.astype(data.draw(st.sampled_from(schema.LIST_DTYPES))) for image in images]
    records = []
    for image in images:
        lengths = [length for length in range(1, image.shape[2] + 1) if image.shape[2] % length == 0]
        records.append(record_of(image, cut_in_z(image, encoding, data.draw(st.sampled_from(lengths))), []))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.parquet"
        pq.write_table(table_of(records, encoding), path, **options)
        assert all_same(read_in_all_ways(path), images)
        assert all_same(read_in_all_ways(path, "pyarrow"), images)


@encodings
@pytest.mark.parametrize("kinds", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.parametrize("name", ["parquet", "parquet_duck"])
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "snappy"])
@pytest.mark.share(4, "name", "compression", "kinds", "encoding")
def test_what_is_written_here_is_cut_out_of_pages(stored, monkeypatch, name, compression, kinds, encoding):
    images = images_of([(shape, dtype if encoding == "bytes" else "uint16") for shape, dtype in kinds])
    source = open_images(stored(name, images, encoding=encoding, compression=compression, rows_per_group=5), name)
    assert engine_of(source) == "pages"
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    assert all_same(source.take(range(len(images))), images)
    assert all_same([image for _, part in source.images.stream() for image in part], images)
    assert all(groups_of(source))


@encodings
def test_a_compressed_image_is_a_page(stored, encoding):
    images = [image_of((1, 2, 1, 50, 60), "uint16", number) for number in range(10)]
    source = open_images(stored("parquet", images, encoding=encoding, compression="zstd"))
    assert all_same(source.take(range(10)), images)
    assert source.images.table._reader.get()._pages[0].first_rows == [*range(11)]


@encodings
def test_pixels_are_not_copied_into_statistics(stored, encoding):
    images = images_of([((1, 1, 1, 20, 20), "uint8")] * 10)
    path = stored("parquet", images, encoding=encoding, columns={"well": list("ABCDEFGHIJ")}, compression="lz4")
    group = pq.read_metadata(path).row_group(0)
    described = {group.column(n).path_in_schema for n in range(group.num_columns) if group.column(n).is_stats_set}
    assert described == {"well"}


@encodings
def test_constant_images_are_no_dictionary(stored, encoding):
    images = [np.zeros((1, 1, 1, 10, 10), np.uint16)] * 30
    source = open_images(stored("parquet_duck", images, encoding=encoding))
    assert all_same(source.take(range(30)), images)
    assert all(groups_of(source))


def test_engines(stored, tmp_path):
    images = images_of(UNIFORM)
    path = stored("parquet_duck", images)
    for engine in ("pages", "pyarrow", "duckdb"):
        source = open_images(path, engine=engine)
        assert engine_of(source) == engine
        again = pickle.loads(pickle.dumps(source))
        assert engine_of(again) == engine
        assert all_same(again.take([39, 0, 0]), [images[39], images[0], images[0]])
        assert again.metadata(3) == open_images(path).metadata(3)
    assert engine_of(pickle.loads(pickle.dumps(open_images(path)))) == "pages"
    pq.write_table(pq.read_table(path), tmp_path / "other.parquet", compression="gzip")
    assert engine_of(open_images(tmp_path / "other.parquet")) == "pyarrow"
    with raises(ArgumentError, option="engine", path=tmp_path / "other.parquet", mentions="engine=None"):
        open_images(tmp_path / "other.parquet", engine="pages")
    for name in ("parquet", "parquet_duck"):
        with raises(ArgumentError, option="engine", mentions=("'polars'", "pages", "pyarrow"), remedy=False):
            open_images(path, name, engine="polars")


def test_an_empty_collection(stored):
    for name in ("parquet", "parquet_duck"):
        assert list(open_images(stored(name, []), engine="pages").images.stream()) == []


@encodings
def test_a_dictionary_that_grew_too_large(tmp_path, encoding):
    images = images_of([((1, 1, 1, 20, 30), "uint16")] * 9)
    table = table_of([record_of(image, whole_chunks(image, encoding), []) for image in images], encoding)
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3, compression="none", dictionary_pagesize_limit=1300)
    assert all_same(read_in_all_ways(tmp_path / "x.parquet"), images)


@encodings
def test_one_damaged_row_group_is_one_error(tmp_path, encoding):
    images = images_of([((1, 1, 1, 20, 30), "uint16")] * 9)
    table = table_of([record_of(image, whole_chunks(image, encoding), []) for image in images], encoding)
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=3, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    offset = pq.read_metadata(path).row_group(1).column(leaf_number(path, encoding)).data_page_offset
    assert content[offset : offset + 2] == b"\x15\x00"  # Page type 0.
    content[offset + 1] = 0x0E
    path.write_bytes(content)
    with open_images(path) as source:
        assert all_same(source.take([0, 1, 2, 6, 7, 8]), images[:3] + images[6:])
        with raises(FormatError, path=path, remedy=False):
            source.read(4)
        assert groups_of(source) == [True, False, True]
        assert all_same(source.take([0, 8]), [images[0], images[8]])


def leaf_number(path, encoding):
    group = pq.read_metadata(path).row_group(0)
    return [group.column(number).path_in_schema for number in range(group.num_columns)].index(LEAF[encoding])


def as_lists(lists, kind):
    """Return a table of one image per list of pixels, valid or not."""
    records = [
        record_of(
            image_of((1, 1, 1, 2, 3)),
            [list_chunk(image_of((1, 1, 1, 2, 3)), 0, 0, (slice(0, 1), slice(0, 2), slice(0, 3))) | {"pixels": pixels}],
            [],
        )
        for pixels in lists
    ]
    return pa.table({"ome_image": pa.array(records, kind)})


@pytest.mark.parametrize(
    "lists",
    [
        [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]],
        [[1, 2, 3, 4, 5, None], [1, 2, 3, 4, 5, 6]],
        [[1, 2, 3, 4, 5, None], [1, 2, 3, 4, 5, 6, 7]],
        [None, [1, 2, 3, 4, 5, 6]],
        [[], [1, 2, 3, 4, 5, 6]],
        [[], list(range(12))],
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"data_page_size": 1}], ids=str)
def test_lists_of_other_lengths(tmp_path, lists, options):
    table = as_lists([*lists, [9] * 6], schema.image_struct("list"))
    pq.write_table(table, tmp_path / "x.parquet", compression="none", use_dictionary=False, **options)
    good = [
        index for index, pixels in enumerate([*lists, [9] * 6]) if pixels and len(pixels) == 6 and None not in pixels
    ]
    for engine in ("pages", "pyarrow"):
        source = open_images(tmp_path / "x.parquet", engine=engine)
        for index in range(3):
            if index in good:
                assert source.read(index).ravel().tolist() == ([*lists, [9] * 6])[index]
            else:
                with raises(DecodeError, path=tmp_path / "x.parquet", mentions=f"image {index}", remedy=False):
                    source.read(index)


@pytest.mark.parametrize("lengths", [[11, 13], [12, None], [0, 24], [16, 8], [0, 12]], ids=str)
@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_bytes_of_other_lengths(tmp_path, lengths, compression):
    image = image_of((1, 1, 1, 2, 3))
    records = []
    for length in [*lengths, 12]:
        (chunk,) = whole_chunks(image, "bytes")
        pixels = None if length is None else (chunk["pixel_bytes"] * 2)[:length]
        records.append(record_of(image, [chunk | {"pixel_bytes": pixels}], []))
    pq.write_table(table_of(records), tmp_path / "x.parquet", compression=compression, use_dictionary=False)
    source = open_images(tmp_path / "x.parquet", engine="pages")
    for index, length in enumerate([*lengths, 12]):
        if length == 12:
            assert same(source.read(index), image)
        else:
            with raises(DecodeError, path=tmp_path / "x.parquet", mentions=f"image {index}", remedy=False):
                source.read(index)


@pytest.mark.parametrize("dtype", ["uint16", "uint8", "int8", "float32"])
def test_values_outside_uint16_are_what_pyarrow_makes_of_them(tmp_path, dtype):
    images = images_of([((1, 1, 1, 4, 5), "uint16")] * 3)
    records = [record_of(image, whole_chunks(image, "list"), []) for image in images]
    for record in records:
        record["pixels_meta"]["type"] = dtype
    path = tmp_path / "x.parquet"
    pq.write_table(table_of(records, "list"), path, compression="none", use_dictionary=False)
    stored = path.read_bytes()
    values = np.concatenate([image.ravel() for image in images]).astype("<i4")
    assert stored.count(values.tobytes()) == 1
    path.write_bytes(stored.replace(values.tobytes(), (values * -70001 + 5).tobytes()))
    source = open_images(path, engine="pages")
    assert all_same(source.take(range(3)), open_images(path, engine="pyarrow").take(range(3)))
    assert groups_of(source) == [True]


@pytest.mark.parametrize("kind", [pa.int32(), pa.int16(), pa.uint8(), pa.uint32(), pa.int64(), pa.float32()], ids=str)
def test_lists_of_other_types(tmp_path, kind):
    struct = schema.image_struct("list")
    chunk = struct.field("chunks").type.value_type
    fields = [field.with_type(pa.list_(kind)) if field.name == "pixels" else field for field in chunk]
    changed = pa.struct(
        [field.with_type(pa.list_(pa.struct(fields))) if field.name == "chunks" else field for field in struct]
    )
    pq.write_table(
        as_lists([range(6), range(6, 12)], changed), tmp_path / "x.parquet", compression="none", use_dictionary=False
    )
    source = open_images(tmp_path / "x.parquet")
    assert [image.ravel().tolist() for image in source.take([0, 1])] == [[*range(6)], [*range(6, 12)]]


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none"},
        {"compression": "none", "data_page_version": "2.0"},
        {"compression": "snappy"},
        {"compression": "lz4", "data_page_version": "2.0"},
    ],
    ids=str,
)
@encodings
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.share(2, "options", "encoding")
def test_a_damaged_page_is_an_error_or_the_right_pixels(tmp_path, options, encoding, share):
    images = images_of([((1, 1, 1, 3, 4), "uint16")] * 4)
    table = table_of([record_of(image, whole_chunks(image, encoding), []) for image in images], encoding)
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, use_dictionary=False, write_statistics=False, **options)
    content = path.read_bytes()
    chunk = pq.read_metadata(path).row_group(0).column(leaf_number(path, encoding))
    (page,) = iter_pages(
        lambda start, stop: memoryview(content)[start:stop],
        chunk.data_page_offset,
        chunk.data_page_offset + chunk.total_compressed_size,
        compressed=options["compression"] != "none",
    )
    body = (
        0 if page.compressed else len(images) * (4 + images[0].nbytes) if encoding == "bytes" else 4 * 12 * len(images)
    )
    for position in range(chunk.data_page_offset, page.stop - body + (4 if encoding == "bytes" and body else 0)):
        for change in CHANGES[position % share :: share]:
            damaged = bytearray(content)
            damaged[position] ^= change
            path.write_bytes(damaged)
            try:
                images_read = read_in_all_ways(path, "pages")
            except OMEArrowDSError as error:
                assert path.name in str(error)  # noqa: PT017
            else:  # A change of compressed pixels to other valid ones is not detected.
                right = all_same(images_read, images)
                right = right or (page.compressed and all_same(images_read, read_in_all_ways(path, "pyarrow")))
                assert right, (position, change)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_pages_or_an_error(content, compressed):
    try:
        read = lambda start, stop: memoryview(content)[start:stop]  # noqa: E731
        pages = list(iter_pages(read, 0, len(content), compressed=compressed))
    except OtherLayoutError:
        return
    assert all(page.start <= page.stop <= len(content) for page in pages)


def test_a_damaged_name_is_an_error(stored):
    path = stored("parquet", images_of(UNIFORM))
    content = path.read_bytes()
    offset = content.index(b"pixel_bytes")
    path.write_bytes(content[:offset] + b"\xff" + content[offset + 1 :])
    with raises(FormatError, path=path, remedy=False):
        open_images(path)


def test_a_file_cut_short_while_it_is_mapped(stored):
    images = images_of([((1, 1, 1, 100, 100), "uint16")] * 30)
    path = stored("parquet", images)
    source = open_images(path)
    assert same(source.read(0), images[0])
    with path.open("r+b") as file:
        file.truncate(1000)
    for read in (lambda: source.read(29), lambda: source.take([3, 28]), lambda: list(source.images.stream())):
        with raises(FormatError, path=path):
            read()


def test_a_codec_that_is_not_built_leaves_pages_to_pyarrow(stored, monkeypatch):
    def missing(*_, **__):
        raise ImportError

    images = [np.full((1, 1, 1, 40, 50), number, np.uint16) for number in range(40)]
    path = stored("parquet", images, compression="zstd")
    monkeypatch.setattr(_codecs, "_decoder", lambda codec: missing)
    source = open_images(path)
    assert all_same(source.take(range(40)), images)
    assert not any(groups_of(source))


def test_pages_that_lie_in_another_file(stored, monkeypatch):
    needs("parquet")
    monkeypatch.setattr(parquet, "_DEPTHS", {})
    assert engine_of(open_images(stored("parquet", images_of(UNIFORM)))) == "pyarrow"
