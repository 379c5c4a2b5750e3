"""OME-Arrow rows that are malformed or merely odd, built as Arrow data, and the result of the oracle for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import ome_arrow
import pyarrow as pa

from omearrow_ds.codec import schema
from tests.support.strategies import Array, Record, byte_chunk, image_of, planes_of, record_of, retyped, whole_chunks

SHAPE = (2, 2, 3, 2, 3)
BOTH, BYTES, LIST = schema.ENCODINGS, ("bytes",), ("list",)
ORACLE_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OSError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SyntaxError,
)
ORACLE_LIMIT_BYTES = 2**30


class Case(NamedTuple):
    """Changes to a good record, and the fields with another Arrow type."""

    name: str
    encodings: Sequence[str]
    change: Callable[[Record], Record | None]
    types: dict[str, Callable[[pa.DataType], Any]]


def oracle(record: Record | None) -> Array | Exception:
    """Return the result of ``ome_arrow.to_numpy`` for a record, in native byte order, or the error that it raises."""
    try:
        meta = record["pixels_meta"]
        dtype = _dtype(meta["type"])
        size_bytes = float(np.prod([float(meta[f"size_{axis}"]) for axis in "tczyx"])) * dtype.itemsize
        if size_bytes > ORACLE_LIMIT_BYTES:
            raise MemoryError(size_bytes)  # No test may take all memory.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = ome_arrow.to_numpy(record, dtype=dtype)
        return image.astype(dtype.newbyteorder("="))
    except ORACLE_ERRORS as error:
        return error


def _dtype(name: Any) -> np.dtype[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.dtype(name if isinstance(name, str) else object())  # NumPy would read None as float64.


def records_of(rows: pa.Array) -> list[Record | Exception | None]:
    """Return rows as ome-arrow gets them. A row without a record is replaced by the error for it."""
    records: list[Any] = []
    for row in rows:
        try:
            records.append(row.as_py())
        except ORACLE_ERRORS as error:
            records.append(error)
    return records


def good_record(encoding: str, number: int = 0) -> Record:
    image = image_of(SHAPE, "uint16", number)
    return record_of(image, whole_chunks(image, encoding), [], chunk_grid={"chunk_order": "ZYX"})


def struct_type(case: Case, encoding: str) -> pa.StructType:
    top = {"": case.types[""]} if "" in case.types else {}
    kind = retyped(schema.image_struct(encoding), {name: make for name, make in case.types.items() if name})
    return top[""](kind) if top else kind


def rows_of(case: Case, encoding: str) -> pa.Array:
    """Return a good row, the row of the case and another good one."""
    records = [good_record(encoding), case.change(good_record(encoding, 1)), good_record(encoding, 2)]
    if not case.types:
        return pa.array(records, schema.image_struct(encoding))
    kind = struct_type(case, encoding)
    records = [_safe(record) for record in (records if "" not in case.types else [records[1]] * 3)]
    try:
        return pa.array(records, kind)
    except (pa.ArrowException, TypeError):  # Good records may not fit the odd type.
        return pa.array([records[1], records[1], records[1]], kind)


def _safe(record: Record | None) -> Record | None:
    """Return the record with arrays as lists, because not every Arrow type accepts arrays."""
    if isinstance(record, dict):
        return {name: _safe(value) for name, value in record.items()}
    if isinstance(record, list):
        return [_safe(value) for value in record]
    return record.tolist() if isinstance(record, np.ndarray) else record


def first_chunk(**fields: Any) -> Callable[[Record], Record]:
    return lambda record: record | {"chunks": [record["chunks"][0] | fields, *record["chunks"][1:]]}


def meta(**fields: Any) -> Callable[[Record], Record]:
    return lambda record: record | {"pixels_meta": record["pixels_meta"] | fields}


def fields(**values: Any) -> Callable[[Record], Record]:
    return lambda record: record | values


def same_record(record: Record) -> Record:
    return record


def _image(record: Record) -> Array:
    return image_of(SHAPE, "uint16", 1)


def with_planes(change: Callable[[list[Record]], Any], chunks: Any = None) -> Callable[[Record], Record]:
    return lambda record: record | {"chunks": chunks, "planes": change(planes_of(_image(record)))}


def chunks_changed(change: Callable[[list[Record]], Any]) -> Callable[[Record], Record]:
    return lambda record: record | {"chunks": change(record["chunks"])}


def stored_as(dtype: str, compression: str | None = None, meta_type: str = "uint16") -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        image, slices = _image(record) % 100, tuple(slice(0, size) for size in SHAPE[2:])
        chunks = [byte_chunk(image, t, c, slices, dtype, compression) for t in range(2) for c in range(2)]
        return record | {"chunks": chunks, "pixels_meta": record["pixels_meta"] | {"type": meta_type}}

    return change


def compressed(codec: str, plain_bytes: int) -> Callable[[Record], Record]:
    """Return the change that replaces the first chunk, of 36 bytes, by other bytes, compressed."""
    data = pa.Codec(codec).compress(bytes(range(1, 256)) * (plain_bytes // 255) + b"\7" * (plain_bytes % 255))
    return first_chunk(compression=codec, pixel_bytes=data.to_pybytes())


def _one_pixel(encoding_change: Callable[[Record], Record], meta_type: str) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        sizes = {f"size_{axis}": 1 for axis in "tczyx"}
        chunk = record["chunks"][0] | {f"shape_{axis}": 1 for axis in "zyx"}
        return encoding_change(meta(type=meta_type, **sizes)(record | {"chunks": [chunk]}))

    return change


def struct_fields(*extra: tuple[str, pa.DataType], without: Sequence[str] = ()) -> Callable[[pa.DataType], Any]:
    """Return the function that adds fields to a struct, or to the structs of a list, and omits others."""

    def change(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind):
            return pa.list_(change(kind.value_type))
        return pa.struct(
            [*(field for field in kind if field.name not in without), *(pa.field(*arguments) for arguments in extra)]
        )

    return change


def always(kind: pa.DataType) -> Callable[[pa.DataType], Any]:
    return lambda _: kind


def list_view(kind: pa.DataType) -> pa.DataType:
    return pa.list_view(kind.value_type)


def large_list_view(kind: pa.DataType) -> pa.DataType:
    return pa.large_list_view(kind.value_type)


def wrapped_t(record: Record) -> Record:
    """Return a record whose every ``t``, times the 8 planes per t, is valid modulo 2**64."""
    image = image_of((2, 2, 4, 2, 3))
    chunks = whole_chunks(image, "list" if "pixels" in record["chunks"][0] else "bytes")
    return record_of(image, [chunk | {"t": chunk["t"] + 2**61} for chunk in chunks], [])


HUGE = {"size_t": 2**31 - 1, "size_z": 2**31 - 1, "size_y": 2**31 - 1, "size_x": 2**31 - 1}
DICTIONARY = always(pa.dictionary(pa.int8(), pa.string()))
_CODECS = ("gzip", "brotli", "lz4", "lz4_raw", "zstd", "snappy")

# Name, encodings, change of the record, other types of fields by name ("" is the whole struct).
_CASES: list[tuple[Any, ...]] = [
    ("nothing changed", BOTH, same_record),
    ("null image", BOTH, lambda _: None),
    ("null chunks, planes", BOTH, with_planes(list)),
    ("null chunks, no planes", BOTH, fields(chunks=None, planes=[])),
    ("null chunks, null planes", BOTH, fields(chunks=None, planes=None)),
    ("empty chunks, planes", BOTH, with_planes(list, [])),
    ("empty chunks, no planes", BOTH, fields(chunks=[], planes=[])),
    ("empty chunks, null planes", BOTH, fields(chunks=[], planes=None)),
    ("a null chunk", BOTH, chunks_changed(lambda chunks: [None, *chunks])),
    ("only a null chunk", BOTH, fields(chunks=[None])),
    ("a gap", BOTH, chunks_changed(lambda chunks: chunks[1:])),
    ("chunks in another order", BOTH, chunks_changed(lambda chunks: chunks[::-1])),
    ("overlapping chunks", BOTH, chunks_changed(lambda chunks: [*chunks, chunks[1] | {"t": 0, "c": 0}])),
    ("a chunk twice, another missing", BOTH, chunks_changed(lambda chunks: [chunks[0], *chunks[:3]])),
    *(
        (f"chunk with {name}={value}", BOTH, first_chunk(**{name: value}))
        for name in schema.CHUNK_PLACE
        for value in (None, -1, 2, 9, 2**15 - 1 if name == "c" else 2**31 - 1)
    ),
    ("chunk of no height", BOTH, first_chunk(shape_y=0)),
    ("chunk of negative height", BOTH, first_chunk(shape_y=-2)),
    ("chunk past the end", BOTH, first_chunk(x=1)),
    ("chunk of another form, same count", BOTH, first_chunk(shape_z=2, shape_y=3)),
    ("sizes that say less than the chunks", BOTH, meta(size_z=2)),
    ("sizes that say more than the chunks", BOTH, meta(size_y=4)),
    ("sizes exchanged", BOTH, meta(size_y=3, size_x=2)),
    *(
        (f"{name}={value}", BOTH, meta(**{name: value}))
        for name in ("size_t", "size_c", "size_x")
        for value in (None, 0, -1)
    ),
    ("sizes whose product overflows", BOTH, meta(**HUGE)),
    ("sizes beyond memory", BOTH, meta(size_t=2**20, size_y=2**20)),
    ("null pixels_meta", BOTH, fields(pixels_meta=None)),
    *(
        (f"pixel type {name!r}", BOTH, meta(type=name))
        for name in (
            None,
            "",
            "pixels",
            "uint16 ",
            "UINT16",
            "u2",
            "<u2",
            ">u2",
            "|u1",
            "uint8",
            "float32",
            ">f8",
            "int8",
            "H",
            "u2,u2",
            "(2,2)u2",
            "a4",
            "V2",
            "O",
            "M8[s]",
            "a,(",
            "2u2",
            "\0",
            "int64",
            "uint64",
            "bool",
            "float16",
            "complex64",
        )
    ),
    *(
        (f"chunk order {order!r}", BOTH, fields(chunk_grid={"chunk_order": order}))
        for order in (None, "", "zyx", "XYZ", " ZYX", "ZYX\0", "zy\uff38")
    ),
    ("null chunk grid", BOTH, fields(chunk_grid=None)),
    (
        "odd chunk order of planes",
        BOTH,
        lambda record: with_planes(list)(record) | {"chunk_grid": {"chunk_order": "XYZ"}},
    ),
    # bytes
    ("too few bytes", BYTES, first_chunk(pixel_bytes=b"\1" * 34)),
    ("bytes that are no whole pixels", BYTES, first_chunk(pixel_bytes=b"\1" * 35)),
    ("too many bytes", BYTES, first_chunk(pixel_bytes=b"\1" * 38)),
    ("no bytes", BYTES, first_chunk(pixel_bytes=b"")),
    ("null bytes", BYTES, first_chunk(pixel_bytes=None)),
    (
        "bytes moved between chunks",
        BYTES,
        chunks_changed(
            lambda chunks: [
                chunks[0] | {"pixel_bytes": b"\1" * 34},
                chunks[1] | {"pixel_bytes": b"\1" * 38},
                *chunks[2:],
            ]
        ),
    ),
    *(
        (f"chunk dtype {name!r}", BYTES, first_chunk(dtype=name))
        for name in (
            "",
            "uint16",
            "H",
            "<u2",
            ">u2",
            "int16",
            "uint8",
            "float64",
            "pixels",
            "UINT16",
            "u2,u2",
            "V2",
            "S2",
            "a2",
            "a,(",
            "M8",
        )
    ),
    *(
        (f"pixels stored as {name}", BYTES, stored_as(name))
        for name in ("uint8", ">u2", "int32", ">f8", "float16", "int64", ">i8", "uint64", "bool", "complex64")
    ),
    ("big-endian image of big-endian chunks", BYTES, stored_as(">u2", None, ">u2")),
    ("big-endian image of little-endian chunks", BYTES, stored_as("<u2", None, ">u2")),
    ("big-endian floats", BYTES, stored_as(">f4", "zstd", ">f4")),
    *(
        (f"compression {name!r}", BYTES, first_chunk(compression=name))
        for name in (
            "",
            "none",
            "None",
            " NONE ",
            "\tnone\n",
            "rar",
            "uncompressed",
            "bz2",
            "zstd",
            "ZSTD",
            " zstd",
            "lzo",
            "\0",
        )
    ),
    *((f"{codec} of every chunk", BYTES, stored_as("uint16", codec)) for codec in _CODECS),
    *((f"{codec} of another dtype", BYTES, stored_as("float64", codec)) for codec in _CODECS),
    *(
        (f"{codec} that gives {wrong} bytes", BYTES, compressed(codec, wrong))
        for codec in _CODECS
        for wrong in (0, 2, 35, 37, 72)
    ),
    *((f"{codec} bomb", BYTES, compressed(codec, 2**22)) for codec in _CODECS),
    *((f"{codec} of one byte", BYTES, _one_pixel(compressed(codec, 1), "uint8")) for codec in _CODECS),
    *((f"{codec} of no byte for one", BYTES, _one_pixel(compressed(codec, 0), "uint8")) for codec in _CODECS),
    (
        "compressed bytes said to be plain",
        BYTES,
        lambda record: first_chunk(compression=None)(compressed("zstd", 36)(record)),
    ),
    # lists
    ("too few pixels", LIST, first_chunk(pixels=[1] * 17)),
    ("too many pixels", LIST, first_chunk(pixels=[1] * 19)),
    ("no pixels", LIST, first_chunk(pixels=[])),
    ("null pixels", LIST, first_chunk(pixels=None)),
    ("a null pixel", LIST, first_chunk(pixels=[None, *range(17)])),
    (
        "a null pixel of a float image",
        LIST,
        lambda record: meta(type="float32")(first_chunk(pixels=[None, *range(17)])(record)),
    ),
    ("null pixels of a float image of one pixel", LIST, _one_pixel(first_chunk(pixels=None), "float64")),
    (
        "pixels moved between chunks",
        LIST,
        chunks_changed(
            lambda chunks: [chunks[0] | {"pixels": [1] * 17}, chunks[1] | {"pixels": [1] * 19}, *chunks[2:]]
        ),
    ),
    # planes
    ("a missing plane", BOTH, with_planes(lambda planes: planes[1:])),
    ("a plane twice", BOTH, with_planes(lambda planes: [*planes, planes[3] | {"z": 0}])),
    ("a null plane", BOTH, with_planes(lambda planes: [None, *planes])),
    *(
        (f"plane with {change}", BOTH, with_planes(lambda planes, change=change: [planes[0] | change, *planes[1:]]))
        for change in (
            {"z": 3},
            {"t": -1},
            {"c": None},
            {"pixels": None},
            {"pixels": []},
            {"pixels": [1] * 5},
            {"pixels": [1] * 7},
            {"pixels": [1, 2, 3, 4, 5, None]},
        )
    ),
    ("bad planes beside good chunks", BOTH, fields(planes=[{"z": 9, "t": 0, "c": 0, "pixels": [1]}])),
    # types of Arrow
    ("large lists of chunks", BOTH, same_record, {"chunks": lambda kind: pa.large_list(kind.value_type)}),
    ("list views of chunks", BOTH, same_record, {"chunks": list_view}),
    ("large list views of chunks", BOTH, same_record, {"chunks": large_list_view}),
    ("list views of planes", BOTH, with_planes(list), {"planes": list_view}),
    ("fixed-size lists of chunks", BOTH, same_record, {"chunks": lambda kind: pa.list_(kind.value_type, 4)}),
    ("null fixed-size list of chunks", BOTH, with_planes(list), {"chunks": lambda kind: pa.list_(kind.value_type, 4)}),
    ("large lists of pixels", LIST, same_record, {"pixels": lambda kind: pa.large_list(kind.value_type)}),
    ("list views of pixels", LIST, same_record, {"pixels": list_view}),
    ("large list views of pixels", LIST, same_record, {"pixels": large_list_view}),
    (
        "dictionary of pixels",
        LIST,
        first_chunk(pixels=[5] * 18),
        {"pixels": always(pa.list_(pa.dictionary(pa.int16(), pa.uint16())))},
    ),
    *(
        (f"list of {kind}", LIST, first_chunk(pixels=[*range(18)]), {"pixels": always(pa.list_(kind))})
        for kind in (
            pa.uint8(),
            pa.int8(),
            pa.int64(),
            pa.uint64(),
            pa.float16(),
            pa.float32(),
            pa.float64(),
            pa.decimal128(9, 0),
        )
        if kind.bit_width > 8
    ),
    (
        "list of bool",
        LIST,
        chunks_changed(lambda chunks: [chunk | {"pixels": [True, False] * 9} for chunk in chunks]),
        {"pixels": always(pa.list_(pa.bool_()))},
    ),
    (
        "numbers beyond the dtype",
        LIST,
        first_chunk(pixels=[-1, 2**40 + 7, *range(16)]),
        {"pixels": always(pa.list_(pa.int64()))},
    ),
    (
        "fractions as pixels",
        LIST,
        first_chunk(pixels=[1.5, *map(float, range(17))]),
        {"pixels": always(pa.list_(pa.float32()))},
    ),
    (
        "strings as pixels",
        LIST,
        chunks_changed(lambda chunks: [chunk | {"pixels": ["7"] * 18} for chunk in chunks]),
        {"pixels": always(pa.list_(pa.string()))},
    ),
    (
        "lists of lists as pixels",
        LIST,
        chunks_changed(lambda chunks: [chunk | {"pixels": [[7] * 6] * 3} for chunk in chunks]),
        {"pixels": always(pa.list_(pa.list_(pa.uint16())))},
    ),
    (
        "a number for pixels",
        LIST,
        chunks_changed(lambda chunks: [chunk | {"pixels": 7} for chunk in chunks]),
        {"pixels": always(pa.uint16())},
    ),
    ("binary", BYTES, same_record, {"pixel_bytes": always(pa.binary())}),
    ("binary views", BYTES, same_record, {"pixel_bytes": always(pa.binary_view())}),
    ("fixed-size binary", BYTES, same_record, {"pixel_bytes": always(pa.binary(36))}),
    ("dictionary of bytes", BYTES, same_record, {"pixel_bytes": always(pa.dictionary(pa.int8(), pa.binary()))}),
    (
        "bytes as a string",
        BYTES,
        chunks_changed(lambda chunks: [chunk | {"pixel_bytes": "a" * 36} for chunk in chunks]),
        {"pixel_bytes": always(pa.string())},
    ),
    (
        "bytes as a list",
        BYTES,
        chunks_changed(lambda chunks: [chunk | {"pixel_bytes": [7] * 36} for chunk in chunks]),
        {"pixel_bytes": always(pa.list_(pa.uint8()))},
    ),
    (
        "string views",
        BYTES,
        first_chunk(dtype="uint16", compression="none"),
        dict.fromkeys(("dtype", "compression", "chunk_order", "type"), always(pa.string_view())),
    ),
    (
        "dictionaries of strings",
        BYTES,
        first_chunk(dtype="uint16", compression="none"),
        dict.fromkeys(("dtype", "compression", "chunk_order"), DICTIONARY),
    ),
    (
        "dictionary of pixel types",
        BOTH,
        same_record,
        {
            "pixels_meta": lambda kind: pa.struct(
                [child.with_type(DICTIONARY(None)) if child.name == "type" else child for child in kind]
            )
        },
    ),
    (
        "dtype as bytes",
        BYTES,
        chunks_changed(lambda chunks: [chunk | {"dtype": b"uint16"} for chunk in chunks]),
        {"dtype": always(pa.binary())},
    ),
    (
        "compression as bytes",
        BYTES,
        chunks_changed(lambda chunks: [chunk | {"compression": b"none"} for chunk in chunks]),
        {"compression": always(pa.binary())},
    ),
    ("dtype as a number", BYTES, first_chunk(dtype=2), {"dtype": always(pa.int8())}),
    ("chunk order as a number", BOTH, fields(chunk_grid={"chunk_order": 5}), {"chunk_order": always(pa.int8())}),
    ("chunk grid of null type", BOTH, fields(chunk_grid=None), {"chunk_grid": always(pa.null())}),
    ("chunk grid as text", BOTH, fields(chunk_grid="ZYX"), {"chunk_grid": always(pa.string())}),
    ("chunks of null type", BOTH, with_planes(list), {"chunks": always(pa.null())}),
    ("list of null type for chunks", BOTH, with_planes(list, []), {"chunks": always(pa.list_(pa.null()))}),
    ("numbers for chunks", BOTH, fields(chunks=[1, 2]), {"chunks": always(pa.list_(pa.int8()))}),
    ("text for chunks", BOTH, fields(chunks="chunks"), {"chunks": always(pa.string())}),
    ("planes of null type", BOTH, fields(planes=None), {"planes": always(pa.null())}),
    ("int64 places", BOTH, same_record, dict.fromkeys(schema.CHUNK_PLACE, always(pa.int64()))),
    ("uint64 places", BOTH, first_chunk(z=2**64 - 1), dict.fromkeys(schema.CHUNK_PLACE, always(pa.uint64()))),
    (
        "t that wraps around to a valid one",
        BOTH,
        first_chunk(t=2**63),
        {"t": always(pa.uint64()), "c": always(pa.uint64())},
    ),
    ("t that wraps around in a product", BOTH, wrapped_t, dict.fromkeys(schema.CHUNK_PLACE, always(pa.int64()))),
    ("places as floats", BOTH, same_record, dict.fromkeys(schema.CHUNK_PLACE, always(pa.float64()))),
    ("a fraction for a place", BOTH, first_chunk(t=0.5), {"t": always(pa.float32())}),
    ("no number for a place", BOTH, first_chunk(t=float("nan")), {"t": always(pa.float32())}),
    ("infinite place", BOTH, first_chunk(t=float("inf")), {"t": always(pa.float32())}),
    (
        "places as strings",
        BOTH,
        chunks_changed(lambda chunks: [chunk | {"z": "0"} for chunk in chunks]),
        {"z": always(pa.string())},
    ),
    (
        "places as bools",
        BOTH,
        chunks_changed(lambda chunks: [chunk | {"t": bool(chunk["t"])} for chunk in chunks]),
        {"t": always(pa.bool_())},
    ),
    ("sizes as int64", BOTH, same_record, {f"size_{axis}": always(pa.int64()) for axis in "tczyx"}),
    (
        "int64 sizes whose product wraps around to 4",
        BOTH,
        meta(size_t=2**62 + 1, size_c=4, size_z=1, size_y=1, size_x=1),
        {f"size_{axis}": always(pa.int64()) for axis in "tczyx"},
    ),
    ("sizes as floats", BOTH, same_record, {f"size_{axis}": always(pa.float64()) for axis in "tczyx"}),
    ("a fraction for a size", BOTH, meta(size_z=3.5), {"size_z": always(pa.float64())}),
    ("sizes as strings", BOTH, meta(size_z="3"), {"size_z": always(pa.string())}),
    ("pixels_meta as text", BOTH, fields(pixels_meta="uint16"), {"pixels_meta": always(pa.string())}),
    (
        "pixel type as a number",
        BOTH,
        fields(pixels_meta={"type": 16}),
        {"pixels_meta": always(pa.struct([("type", pa.int8())]))},
    ),
    *(
        (f"pixels_meta without {name}", BOTH, same_record, {"pixels_meta": struct_fields(without=[name])})
        for name in ("type", "size_t", "size_x", "channels")
    ),
    *(
        (f"chunks without {name}", BOTH, same_record, {"chunks": struct_fields(without=[name])})
        for name in schema.CHUNK_PLACE
    ),
    ("chunks without any place", BOTH, same_record, {"chunks": struct_fields(without=list(schema.CHUNK_PLACE))}),
    (
        "chunks without dtype and compression",
        BYTES,
        same_record,
        {"chunks": struct_fields(without=["dtype", "compression"])},
    ),
    ("chunks without pixels", BOTH, same_record, {"chunks": struct_fields(without=["pixels", "pixel_bytes"])}),
    ("planes without z", BOTH, with_planes(list), {"planes": struct_fields(without=["z"])}),
    ("planes without pixels", BOTH, with_planes(list), {"planes": struct_fields(without=["pixels"])}),
    (
        "planes with the fields of chunks",
        BOTH,
        with_planes(
            lambda planes: [
                plane | {"y": 1, "x": 1, "shape_z": 9, "shape_y": 1, "shape_x": 1, "pixel_bytes": b"12"}
                for plane in planes
            ]
        ),
        {
            "planes": struct_fields(
                *((name, pa.int32()) for name in ("y", "x", "shape_z", "shape_y", "shape_x")),
                ("pixel_bytes", pa.binary()),
            )
        },
    ),
    ("struct without planes", BOTH, same_record, {"": struct_fields(without=["planes"])}),
    ("struct without planes, empty chunks", BOTH, fields(chunks=[]), {"": struct_fields(without=["planes"])}),
    ("struct without chunks", BOTH, with_planes(list), {"": struct_fields(without=["chunks"])}),
    ("struct without chunks, no planes", BOTH, fields(planes=[]), {"": struct_fields(without=["chunks"])}),
    ("struct without chunk grid and id", BOTH, same_record, {"": struct_fields(without=["chunk_grid", "id"])}),
    ("struct without chunk order", BOTH, same_record, {"chunk_grid": struct_fields(without=["chunk_order"])}),
    (
        "further fields",
        BOTH,
        same_record,
        {
            "": struct_fields(("shape_z", pa.int8())),
            "chunks": struct_fields(("quality", pa.float32())),
            "pixels_meta": struct_fields(("note", pa.string())),
        },
    ),
    (
        "chunks with bytes and numbers",
        BYTES,
        first_chunk(pixels=[1] * 18),
        {"chunks": struct_fields(("pixels", pa.list_(pa.uint16())))},
    ),
    (
        "null bytes beside numbers",
        BYTES,
        first_chunk(pixel_bytes=None, pixels=[1] * 18),
        {"chunks": struct_fields(("pixels", pa.list_(pa.uint16())))},
    ),
    (
        "numbers with a dtype of bytes",
        LIST,
        first_chunk(dtype="float64", compression="zstd"),
        {"chunks": struct_fields(("dtype", pa.string()), ("compression", pa.string()))},
    ),
    ("two fields of one name in a chunk", BOTH, same_record, {"chunks": struct_fields(("t", pa.int32()))}),
    (
        "two fields of one name in pixels_meta",
        BOTH,
        same_record,
        {"pixels_meta": struct_fields(("size_t", pa.int32()))},
    ),
    (
        "numbers as ids",
        BOTH,
        fields(id=7),
        {"": lambda kind: pa.struct([child.with_type(pa.int64()) if child.name == "id" else child for child in kind])},
    ),
]


CASES = [Case(*arguments, *([{}] if len(arguments) == 3 else [])) for arguments in _CASES]
