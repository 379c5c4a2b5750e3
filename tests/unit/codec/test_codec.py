"""The codec; the oracle is ``ome_arrow.to_numpy``."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import ome_arrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omearrow_ds import DecodeError, FormatError, open_images
from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import Expected, ImageBlock
from omearrow_ds.codec.encode import Image, encode_tables
from tests.support.errors import raises
from tests.support.strategies import (
    DTYPES,
    NO_METADATA,
    all_same,
    boxes,
    byte_chunk,
    collections,
    dtypes,
    image_of,
    kinds,
    list_chunk,
    planes_of,
    record_of,
    same,
    shapes,
    whole_chunks,
)

quick = settings(max_examples=60, deadline=None)
LIST = ome_arrow.OME_ARROW_STRUCT if hasattr(ome_arrow, "OME_ARROW_STRUCT") else ome_arrow.meta.OME_ARROW_STRUCT
BYTES = ome_arrow.meta.OME_ARROW_BYTE_STRUCT


def oracle(record):
    return ome_arrow.to_numpy(record, dtype=np.dtype(record["pixels_meta"]["type"]))


def expected_of(records):
    sizes = [[record["pixels_meta"][f"size_{axis}"] for axis in "tczyx"] for record in records]
    dtypes_of = [np.dtype(record["pixels_meta"]["type"]) for record in records]
    return Expected("memory", np.arange(len(records)), np.array(sizes, np.int64).reshape(-1, 5), dtypes_of)


def block_of(rows, records):
    """Return the `ImageBlock` of an OME-Arrow struct array that holds ``records``."""
    names = {field.name for field in rows.type}
    planes = rows.field("planes") if "planes" in names else pa.nulls(len(rows), schema.PLANES)
    chunks = rows.field("chunks") if "chunks" in names else pa.nulls(len(rows))
    return ImageBlock(chunks, expected_of(records), lambda: planes)


def decoded(rows, records):
    block = block_of(rows, records)
    images = [block[row] for row in range(len(block))]
    stack = block.stack()
    assert stack is None or all_same(list(stack), images)
    block._dense[:] = False  # Force assembly chunk by chunk, although the pixels are dense.
    assert all_same([block[row] for row in range(len(block))], images)
    return images


@st.composite
def records(draw, encoding):
    """Draw an OME-Arrow record of one image: in one or several chunks, in planes, or both."""
    image = image_of(draw(shapes(6)), draw(dtypes) if encoding == "bytes" else draw(st.sampled_from(DTYPES[:2])))
    stored = draw(st.sampled_from(["whole", "boxes", "boxes", "planes", "both"]))
    planes = planes_of(image.astype(np.uint16)) if stored in ("planes", "both") else draw(st.sampled_from([[], None]))
    if stored == "planes":
        return record_of(image, draw(st.sampled_from([[], None])), draw(st.permutations(planes)))
    if stored == "whole":
        return record_of(image, whole_chunks(image, encoding), planes)
    chunks = []
    for number, (t, c, slices) in enumerate(draw(boxes(image.shape))):
        other = image + image.dtype.type(number % 2)
        if encoding == "list":
            chunks.append(list_chunk(other, t, c, slices))
        else:
            dtype = draw(st.sampled_from([None, image.dtype.name, image.dtype.newbyteorder(">").str]))
            compression = draw(st.sampled_from([None, None, "none", "None", "", " NONE ", "zstd", "lz4", "gzip"]))
            chunks.append(byte_chunk(other, t, c, slices, dtype, compression))
    return record_of(image, chunks, planes)


def collected(encoding):
    return st.lists(records(encoding), min_size=1, max_size=4)


@pytest.mark.parametrize("encoding", schema.ENCODINGS)
@quick
@given(data=st.data())
def test_a_block_decodes_as_ome_arrow_does(encoding, data):
    drawn_records = data.draw(collected(encoding))
    rows = pa.array(drawn_records, BYTES if encoding == "bytes" else LIST)
    assert all_same(decoded(rows, drawn_records), [oracle(record) for record in drawn_records])


@pytest.mark.parametrize("encoding", schema.ENCODINGS)
@quick
@given(data=st.data())
def test_slices_and_null_rows_do_not_shift_pixels(encoding, data):
    drawn_records = data.draw(st.lists(st.one_of(st.none(), records(encoding)), min_size=1, max_size=5))
    rows = pa.array(drawn_records, BYTES if encoding == "bytes" else LIST)
    start = data.draw(st.integers(0, len(drawn_records) - 1))
    stop = data.draw(st.integers(start, len(drawn_records)))
    numbers = [number for number in range(start, stop) if drawn_records[number] is not None]
    if not numbers:
        return
    for first, last in pairwise(
        [*(number for number in numbers if number == numbers[0] or number - 1 not in numbers), None]
    ):
        run = [number for number in numbers if number >= first and (last is None or number < last)]
        part = rows.slice(first, len(run))
        expected = [drawn_records[number] for number in run]
        assert all_same(decoded(part, expected), [oracle(record) for record in expected])


def _fixed(kind):
    return pa.list_(kind.value_type, 6)


VARIANTS = {
    "large lists": (
        schema.ENCODINGS,
        {"chunks": lambda kind: pa.large_list(kind.value_type), "pixels": lambda kind: pa.large_list(kind.value_type)},
    ),
    "fixed-size pixels": (("list",), {"pixels": _fixed}),
    "fixed-size chunks": (schema.ENCODINGS, {"chunks": lambda kind: pa.list_(kind.value_type, 2)}),
    "int32 pixels": (("list",), {"pixels": lambda _: pa.list_(pa.int32())}),
    "double pixels": (("list",), {"pixels": lambda _: pa.list_(pa.float64())}),
    "binary": (("bytes",), {"pixel_bytes": lambda _: pa.binary()}),
    "binary view": (("bytes",), {"pixel_bytes": lambda _: pa.binary_view()}),
    "fixed-size binary": (("bytes",), {"pixel_bytes": lambda _: pa.binary(12)}),
    "string views": (("bytes",), {"dtype": lambda _: pa.string_view(), "compression": lambda _: pa.string_view()}),
    "large strings": (("bytes",), {"dtype": lambda _: pa.large_string(), "compression": lambda _: pa.large_string()}),
    "dictionary dtype": (("bytes",), {"dtype": lambda _: pa.dictionary(pa.int8(), pa.string())}),
    "int64 places": (schema.ENCODINGS, dict.fromkeys(schema.CHUNK_PLACE, lambda _: pa.int64())),
}


@pytest.mark.parametrize(
    ("variant", "encoding"), [(name, encoding) for name, (encodings, _) in VARIANTS.items() for encoding in encodings]
)
def test_other_arrow_types_of_the_same_values(variant, encoding):
    from tests.support.strategies import retyped

    images = [image_of((1, 2, 1, 2, 3), "uint16", number) for number in range(3)]
    drawn_records = [record_of(image, whole_chunks(image, encoding), []) for image in images]
    rows = pa.array(drawn_records, retyped(schema.image_struct(encoding), VARIANTS[variant][1]))
    assert all_same(decoded(rows, drawn_records), images)
    assert all_same(decoded(rows.slice(1), drawn_records[1:]), images[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.arrow"
        write_ipc(path, [rows.slice(0, 1), rows.slice(1)])
        assert all_same(open_images(path).take([2, 0, 1]), [images[2], images[0], images[1]])


def write_ipc(path, batches):
    with pa.ipc.new_file(path, pa.schema({"ome_image": batches[0].type})) as writer:
        for batch in batches:
            writer.write_batch(pa.record_batch({"ome_image": batch}))


def without_offsets(kind):
    """Return an array of no rows whose lists have no offsets buffer, which Arrow permits in files."""
    if pa.types.is_struct(kind):
        return pa.Array.from_buffers(kind, 0, [None], children=[without_offsets(field.type) for field in kind])
    if pa.types.is_list(kind):
        return pa.Array.from_buffers(kind, 0, [None, None], children=[without_offsets(kind.value_type)])
    return pa.array([], kind)


@pytest.mark.parametrize("encoding", schema.ENCODINGS)
@pytest.mark.parametrize("order", ["empty, full", "full, empty", "empty"])
def test_batches_of_no_rows_need_no_offsets(tmp_path, encoding, order):
    images = [image_of((1, 2, 1, 2, 3), "uint16", number) for number in range(3)]
    kind = schema.image_struct(encoding)
    full = pa.array([record_of(image, whole_chunks(image, encoding), []) for image in images], kind)
    batches = {"full": full, "empty": without_offsets(kind)}
    write_ipc(tmp_path / "images.arrow", [batches[name] for name in order.split(", ")])
    with open_images(tmp_path / "images.arrow") as source:
        assert all_same(source.take(range(len(source))), images if "full" in order else [])


@pytest.mark.parametrize("suffix", [".arrow", ".parquet", ".duck.parquet"])
@pytest.mark.parametrize("encoding", schema.ENCODINGS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_file_of_several_batches_decodes_as_ome_arrow_does(suffix, encoding, data):
    results = data.draw(collected(encoding))
    rows = pa.array(results, schema.image_struct(encoding))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"images{suffix}"
        if suffix == ".arrow":
            cut = data.draw(st.integers(0, len(rows)))
            write_ipc(path, [rows.slice(0, cut), rows.slice(cut)])
        else:
            pq.write_table(pa.table({"ome_image": rows}), path, row_group_size=data.draw(st.integers(1, 3)))
        indices = data.draw(st.lists(st.integers(-len(results), len(results) - 1), max_size=6))
        with open_images(path) as source:
            expected = [oracle(record) for record in results]
            assert all_same(source.take(indices), [expected[index] for index in indices])
            assert all_same([image for _, images in source.images.stream() for image in images], expected)


@pytest.mark.parametrize("encoding", schema.ENCODINGS)
@quick
@given(images=collections(), data=st.data())
def test_encode_gives_ome_arrows_own_types_and_values(encoding, images, data):
    if encoding == "list":
        images = [image.astype(data.draw(st.sampled_from(DTYPES[:2]))) for image in images]
    stored = (Image(image, str(number), NO_METADATA) for number, image in enumerate(images))
    (table,) = encode_tables(stored, pa.table({}), encoding, max_rows=len(images) + 1, max_bytes=2**30)
    rows = table["ome_image"].combine_chunks()
    rows.validate(full=True)
    assert rows.type == (BYTES if encoding == "bytes" else LIST)
    encoded = rows.to_pylist()
    assert all_same([oracle(record) for record in encoded], images)
    assert all_same(decoded(rows, encoded), images)


def _change(record, **fields):
    """Return the record with changed fields in its first chunk."""
    return record | {"chunks": [record["chunks"][0] | fields, *record["chunks"][1:]]}


def _changed(**fields):
    return lambda record: _change(record, **fields)


BAD_EVERYWHERE = {
    "t outside": _changed(t=2),
    "c negative": _changed(c=-1),
    "z outside": _changed(z=3),
    "y negative": _changed(y=-1),
    "x too far": _changed(x=1),
    "empty shape": _changed(shape_y=0),
    "shape too large": _changed(shape_z=9),
    "null place": _changed(t=None),
    "null shape": _changed(shape_x=None),
    "null chunk": lambda record: record | {"chunks": [None, *record["chunks"]]},
    "shape of another length": _changed(shape_y=1),
}
BAD_BYTES = {
    "short": _changed(pixel_bytes=b"\0" * 10),
    "odd": _changed(pixel_bytes=b"\0" * 11),
    "long": _changed(pixel_bytes=b"\0" * 600),
    "null": _changed(pixel_bytes=None),
    "not compressed": _changed(compression="zstd"),
    "unknown compression": _changed(compression="rar"),
    "unknown dtype": _changed(dtype="pixels"),
    "wider dtype": _changed(dtype="float64"),
}
BAD_LISTS = {
    "short": _changed(pixels=[1, 2]),
    "long": _changed(pixels=[1] * 100),
    "null": _changed(pixels=None),
}
BAD = [
    *((name, "bytes", change) for name, change in (BAD_EVERYWHERE | BAD_BYTES).items()),
    *((name, "list", change) for name, change in (BAD_EVERYWHERE | BAD_LISTS).items()),
]


@pytest.mark.parametrize(("encoding", "change"), [pytest.param(*case[1:], id=f"{case[1]} {case[0]}") for case in BAD])
def test_what_ome_arrow_refuses_is_a_decode_error(tmp_path, encoding, change):
    image = image_of((2, 2, 3, 2, 3))
    good = record_of(image, whole_chunks(image, encoding), [])
    bad = change(good)
    rows = pa.array([good, bad, good], schema.image_struct(encoding))
    with pytest.raises((ValueError, TypeError, OSError, KeyError)):
        oracle(rows[1].as_py())
    write_ipc(tmp_path / "images.arrow", [rows])
    source = open_images(tmp_path / "images.arrow")
    with raises(DecodeError, path=tmp_path / "images.arrow", mentions="image 1", remedy=False):
        source.read(1)
    assert all_same(source.take([2, 0]), [image, image])
    with raises(DecodeError, path=tmp_path / "images.arrow", mentions="image 1", remedy=False):
        list(source.images.stream()) and [image for _, images in source.images.stream() for image in images]


@pytest.mark.parametrize("change", [{"z": 9}, {"c": None}, {"pixels": [1]}, {"pixels": None}], ids=str)
def test_a_bad_plane_is_a_decode_error(change):
    image = image_of((2, 2, 3, 2, 3))
    planes = planes_of(image)
    record = record_of(image, None, [planes[0] | change, *planes[1:]])
    rows = pa.array([record], LIST)
    with pytest.raises((ValueError, TypeError)):
        oracle(rows[0].as_py())
    with raises(DecodeError, path="memory", mentions="image 0", remedy=False):
        decoded(rows, [record])


@pytest.mark.parametrize("empty", [None, []])
def test_an_image_without_pixels_is_an_error(empty):
    record = record_of(image_of((1, 1, 1, 2, 3)), empty, empty)
    with raises(DecodeError, path="memory", mentions="image 0"):
        decoded(pa.array([record], LIST), [record])


def test_missing_planes_are_zero_as_in_ome_arrow():
    image = image_of((1, 2, 2, 2, 3))
    record = record_of(image, None, planes_of(image)[1:])
    assert all_same(decoded(pa.array([record], LIST), [record]), [oracle(record)])


@pytest.mark.parametrize(
    ("stored", "meta"),
    [("uint16", "uint8"), ("int32", "float64"), ("float32", "float64"), ("uint8", "uint16"), ("float64", "uint8")],
)
def test_chunks_of_another_dtype_are_cast(stored, meta):
    image = (image_of((1, 2, 1, 2, 3), "uint8") % 100).astype(meta)
    record = record_of(
        image, [byte_chunk(image, 0, c, (slice(0, 1), slice(0, 2), slice(0, 3)), stored) for c in (0, 1)], []
    )
    assert all_same(decoded(pa.array([record], BYTES), [record]), [oracle(record)])


@quick
@given(kind=kinds)
@example(kind=((1, 1, 1, 1, 1), "uint8"))
def test_a_struct_of_planes_alone(kind):
    image = image_of(kind[0], np.uint16)
    record = record_of(image, None, planes_of(image))
    struct = pa.struct([field for field in LIST if field.name not in ("chunks", "chunk_grid")])
    assert all_same(decoded(pa.array([record], struct), [record]), [image])


def test_a_chunk_order_that_ome_arrow_refuses(tmp_path):
    image = image_of((1, 1, 1, 2, 3))
    record = record_of(image, whole_chunks(image, "bytes"), [], chunk_grid={"chunk_order": "XYZ"})
    with pytest.raises(ValueError, match="chunk_order"):
        oracle(record)
    write_ipc(tmp_path / "images.arrow", [pa.array([record], schema.image_struct("bytes"))])
    with raises(FormatError, path=tmp_path / "images.arrow", mentions=("image 0", "chunk_order", "ZYX"), remedy=False):
        open_images(tmp_path / "images.arrow").read(0)


@pytest.mark.parametrize("grid", [None, {"chunk_order": None}, {"chunk_order": "zyx"}, {"chunk_order": ""}])
def test_a_chunk_order_that_ome_arrow_accepts(tmp_path, grid):
    image = image_of((1, 1, 1, 2, 3))
    record = record_of(image, whole_chunks(image, "bytes"), [], chunk_grid=grid)
    write_ipc(tmp_path / "images.arrow", [pa.array([record], schema.image_struct("bytes"))])
    assert same(open_images(tmp_path / "images.arrow").read(0), oracle(record))


def test_the_chunk_order_of_planes_says_nothing(tmp_path):
    image = image_of((1, 1, 1, 2, 3))
    record = record_of(image, None, planes_of(image), chunk_grid={"chunk_order": "XYZ"})
    write_ipc(tmp_path / "images.arrow", [pa.array([record], LIST)])
    assert same(open_images(tmp_path / "images.arrow").read(0), oracle(record))


@pytest.mark.parametrize("name", [">u2", "<f4", "uint16", "f8", "double", "H"])
def test_dtype_names_mean_what_they_mean_to_numpy(tmp_path, name):
    image = image_of((1, 1, 1, 2, 3), np.dtype(name).newbyteorder("="))
    record = record_of(image, [byte_chunk(image.astype(name), 0, 0, (slice(0, 1), slice(0, 2), slice(0, 3)))], [])
    record["pixels_meta"]["type"] = name
    write_ipc(tmp_path / "images.arrow", [pa.array([record], schema.image_struct("bytes"))])
    assert np.array_equal(open_images(tmp_path / "images.arrow").read(0), oracle(record))
