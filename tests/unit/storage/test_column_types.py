"""Columns of every Arrow type in every format: equal values in the same plain type, or an error before writing."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Set as AbstractSet
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import MetadataError, open_images, write_images
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.raw_tables import raw_table
from tests.support.strategies import NAMES, SUFFIX, TABLES

IMAGES = [np.full((2, 2), index, np.uint16) for index in range(3)]
DUCKDB = {"parquet_duck", "duckdb"}
NO_DURATION = DUCKDB | {"vortex"}
NO_INTERVAL = set(NAMES) - {"arrow"}


class Case(NamedTuple):
    """A column of three rows, its plain type and values (None: unchanged), and the formats that reject it."""

    column: pa.Array
    kind: pa.DataType | None = None
    values: list[Any] | None = None
    refused_by: AbstractSet[str] = frozenset()

    @property
    def expected(self):
        if self.kind is None:
            return self.column
        return pa.array(self.column.to_pylist() if self.values is None else self.values, self.kind)


class Stranger(pa.ExtensionType):
    """An extension type known only to this test."""

    def __init__(self):
        super().__init__(pa.int32(), "tests.stranger")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()


def numbers(kind, *values):
    """Return an array with these bits, for types whose values Python objects cannot hold."""
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return pa.array(values, width).view(kind)


def each_of_three(values, names=None):
    """Return three lists of one value each, or three structs if names are given."""
    if names:
        return pa.StructArray.from_arrays([values] * len(names), names=names)
    return pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), values)


def nested(array, depth):
    return array if depth == 0 else each_of_three(nested(array, depth - 1))


def integers(name):
    limits = np.iinfo(name)
    return Case(pa.array([limits.min, None, limits.max], getattr(pa, name)()))


def extension(kind, *values):
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


def map_of(*values):
    return pa.array(values, pa.map_(pa.string(), pa.int32()))


DECIMALS = [Decimal("1.25"), None, Decimal("-999.99")]
DAYS = [dt.date(2024, 2, 29), None, dt.date(1, 1, 1)]
LISTS = [[1, None], None, []]
PLAIN_LIST = pa.list_(pa.int32())
ENTRIES = pa.list_(pa.struct({"key": pa.string(), "value": pa.int32()}))
ONE_ENTRY = [{"key": "a", "value": 1}]
WORDS = pa.array(["x", None, "x"]).dictionary_encode()
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([1, None]))
UUIDS = [uuid.UUID(int=1).bytes, None, uuid.UUID(int=2).bytes]
UNION = pa.UnionArray.from_dense(
    pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array([1, None]), pa.array(["x"])]
)
TENSORS = np.arange(18).reshape(3, 2, 3)
UTC_US, UTC_NS = pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC")

CASES = {
    "null": Case(pa.nulls(3)),
    "bool": Case(pa.array([True, None, False])),
    **{name: integers(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    "float16": Case(pa.array(np.array([0.5, np.inf, -0.0], np.float16)), refused_by=DUCKDB),
    "float32": Case(pa.array([0.5, None, -np.inf], pa.float32())),
    "float64": Case(pa.array([0.1, None, -1e300])),
    "decimal32": Case(pa.array(DECIMALS, pa.decimal32(5, 2)), pa.decimal128(5, 2)),
    "decimal64": Case(pa.array(DECIMALS, pa.decimal64(15, 2)), pa.decimal128(15, 2)),
    "decimal128": Case(pa.array(DECIMALS, pa.decimal128(38, 2))),
    "decimal of hundreds": Case(
        pa.array([Decimal("1E2"), None, Decimal("-9E2")], pa.decimal128(5, -2)), pa.decimal128(7)
    ),
    "decimal of few digits": Case(
        pa.array([Decimal("0.0012"), None, None]).cast(pa.decimal128(2, 4)), pa.decimal128(4, 4)
    ),
    "decimal256": Case(pa.array(DECIMALS, pa.decimal256(60, 2)), refused_by=DUCKDB),
    "decimal256 that fits 128": Case(pa.array(DECIMALS, pa.decimal256(20, 2)), pa.decimal128(20, 2)),
    "date32": Case(pa.array(DAYS, pa.date32())),
    "date32 far away": Case(numbers(pa.date32(), 2**31 - 1, None, -(2**31) + 1)),
    "date64": Case(pa.array(DAYS, pa.date64()), pa.date32()),
    "time32 s": Case(numbers(pa.time32("s"), 1, None, 86399), pa.time64("us")),
    "time32 ms": Case(numbers(pa.time32("ms"), 1, None, 86399999), pa.time64("us")),
    "time64 us": Case(numbers(pa.time64("us"), 1, None, 86399999999)),
    "time64 ns": Case(numbers(pa.time64("ns"), 1, None, 86399999999999)),
    **{
        f"timestamp {unit} {zone}": Case(
            numbers(pa.timestamp(unit, zone), 1, None, -1), pa.timestamp("ns" if unit == "ns" else "us", zone and "UTC")
        )
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "Europe/Berlin")
    },
    "timestamp us far away": Case(numbers(pa.timestamp("us"), 2**63 - 1, None, -(2**63) + 1)),
    "timestamp ns far away": Case(numbers(pa.timestamp("ns"), 2**63 - 1, None, -(2**63) + 1)),
    **{
        f"duration {unit}": Case(numbers(pa.duration(unit), 1, None, -1), refused_by=NO_DURATION)
        for unit in ("s", "ms", "us", "ns")
    },
    "interval": Case(pa.array([pa.MonthDayNano([1, 2, 3]), None, pa.MonthDayNano([0, 0, 0])]), refused_by=NO_INTERVAL),
    "string": Case(pa.array(["a", None, "µ\0x"])),
    "large_string": Case(pa.array(["a", None, "µ\0x"], pa.large_string()), pa.string()),
    "string_view": Case(pa.array(["a", None, "a text that is no prefix"], pa.string_view()), pa.string()),
    "binary": Case(pa.array([b"a", None, b"\xff\0"])),
    "large_binary": Case(pa.array([b"a", None, b"\xff\0"], pa.large_binary()), pa.binary()),
    "binary_view": Case(pa.array([b"a", None, b"bytes that are no prefix"], pa.binary_view()), pa.binary()),
    "fixed_size_binary": Case(pa.array([b"ab", None, b"\xff\0"], pa.binary(2)), pa.binary()),
    "list": Case(pa.array(LISTS, PLAIN_LIST)),
    "list with a field": Case(
        pa.array([[1], [2], []], pa.list_(pa.field("x", pa.int32(), nullable=False))), PLAIN_LIST
    ),
    "large_list": Case(pa.array(LISTS, pa.large_list(pa.int32())), PLAIN_LIST),
    "fixed_size_list": Case(pa.array([[1, None], None, [2, 3]], pa.list_(pa.int32(), 2)), PLAIN_LIST),
    "fixed_size_list of none": Case(pa.array([[], None, []], pa.list_(pa.int32(), 0)), PLAIN_LIST),
    "list_view": Case(pa.array(LISTS, pa.list_view(pa.int32())), PLAIN_LIST),
    "large_list_view": Case(pa.array(LISTS, pa.large_list_view(pa.int32())), PLAIN_LIST),
    "list of nulls": Case(pa.array([[None], None, []], pa.list_(pa.null()))),
    "list of lists": Case(
        pa.array([[[1], None], None, []], pa.large_list(pa.list_view(pa.int32()))), pa.list_(pa.list_(pa.int32()))
    ),
    "list of structs": Case(pa.array([[{"a": 1}], None, []], pa.list_(pa.struct({"a": pa.int8()})))),
    "list of float16": Case(pa.array([[np.float16(1)], None, []], pa.list_(pa.float16())), refused_by=DUCKDB),
    "lists eleven deep": Case(nested(pa.array([1, 2, 3]), 11)),
    "struct": Case(pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}])),
    "struct of capitals": Case(each_of_three(pa.array([1, 2, 3]), ["a", "A"])),
    "struct of a dot": Case(each_of_three(pa.array([1, 2, 3]), ["a.b"])),
    "struct of nulls": Case(pa.array([{"a": None}, None, {"a": None}], pa.struct({"a": pa.null()}))),
    "struct that is null": Case(pa.array([None, None, None], pa.struct({"a": pa.int8()}))),
    "struct of an interval": Case(pa.nulls(3, pa.struct({"a": pa.month_day_nano_interval()})), refused_by=NO_INTERVAL),
    "map": Case(map_of([("a", 1)], None, []), ENTRIES, [ONE_ENTRY, None, []]),
    "list of maps": Case(
        pa.array([[[("a", 1)]], None, []], pa.list_(map_of().type)), pa.list_(ENTRIES), [[ONE_ENTRY], None, []]
    ),
    "struct of a map": Case(
        pa.array([{"m": [("a", 1)]}, None, {"m": None}], pa.struct({"m": map_of().type})),
        pa.struct({"m": ENTRIES}),
        [{"m": ONE_ENTRY}, None, {"m": None}],
    ),
    "dictionary": Case(WORDS, pa.string()),
    "dictionary of views, as polars has it": Case(
        pa.DictionaryArray.from_arrays(pa.array([0, None, 0], pa.uint32()), pa.array(["x"], pa.string_view())),
        pa.string(),
    ),
    "dictionary with a null": Case(
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array(["x", None])), pa.string()
    ),
    "dictionary of lists": Case(
        pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), pa.array([[1], [2]])), pa.list_(pa.int64())
    ),
    "list of a dictionary": Case(each_of_three(WORDS), pa.list_(pa.string())),
    "struct of a dictionary": Case(each_of_three(WORDS, ["a"]), pa.struct({"a": pa.string()})),
    "runs": Case(RUNS, pa.int64()),
    "runs of a dictionary": Case(
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int16()), pa.array(["x", "y"]).dictionary_encode()),
        pa.string(),
    ),
    "list of runs": Case(each_of_three(RUNS), pa.list_(pa.int64())),
    "struct of runs": Case(each_of_three(RUNS, ["a"]), pa.struct({"a": pa.int64()})),
    "uuid": Case(extension(pa.uuid(), *UUIDS), pa.binary(), UUIDS),
    "list of uuids": Case(
        each_of_three(extension(pa.uuid(), *UUIDS)), pa.list_(pa.binary()), [[value] for value in UUIDS]
    ),
    "json": Case(extension(pa.json_(), '{"a":1}', None, "[]"), pa.string()),
    "bool8": Case(extension(pa.bool8(), 2, None, 0), pa.bool_(), [True, None, False]),
    "tensor": Case(
        pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS), pa.list_(pa.list_(pa.int64())), TENSORS.tolist()
    ),
    "tensor of one axis": Case(
        extension(pa.fixed_shape_tensor(pa.int8(), [2]), [1, 2], None, [3, 4]),
        pa.list_(pa.int8()),
        [[1, 2], None, [3, 4]],
    ),
}
REFUSED = {
    "dense union": UNION,
    "sparse union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(list("xyz"))]
    ),
    "list of unions": each_of_three(UNION),
    "struct of a union": each_of_three(UNION, ["a"]),
    "opaque": extension(pa.opaque(pa.int32(), "type", "vendor"), 1, None, 2),
    "a stranger's": extension(Stranger(), 1, None, 2),
    "list of a stranger's": each_of_three(extension(Stranger(), 1, None, 2)),
    "permuted tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS.transpose(0, 2, 1)),
    "struct of nothing": pa.array([{}, None, {}], pa.struct([])),
    "thirty lists": nested(pa.array([1, 2, 3]), 30),
    "struct of twins": each_of_three(pa.array([1, 2, 3]), ["a", "a"]),
    "struct without a name": each_of_three(pa.array([1, 2, 3]), [""]),
    "struct of NUL": each_of_three(pa.array([1, 2, 3]), ["a\0b"]),
    "decimal of too many digits": pa.nulls(3, pa.decimal256(76, -1)),
    "a time of 24:00": numbers(pa.time64("us"), 86_400_000_000, None, 0),
    "a day of 25 hours": numbers(pa.date64(), 90_000_000, None, 0),
    "a timestamp that is no number of µs": numbers(pa.timestamp("s"), 2**53, None, 0),
    "text that is no UTF-8": pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"\xff\xfea")]
    ),
}


def rotated(array):
    """Return an array of two chunks with offsets into their buffers."""
    return pa.chunked_array([array.slice(1), array.slice(0, 1)])


def columns_for(name):
    return {key: rotated(case.column) for key, case in CASES.items() if name not in case.refused_by}


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """Columns of all types that a format holds, read by this package and by the format's library."""
    folder = tmp_path_factory.mktemp("columns")
    columns_of_formats = {}
    for name in NAMES:
        needs(name)
        path = folder / f"x{SUFFIX[name]}"
        # Lance rejects dots in names.
        write_images(IMAGES, path, name, columns=pa.table(columns_for(name)), checksum=False)
        with open_images(path) as source:
            own = raw_table(name, path) if name in TABLES else pq.read_table(path / "columns.parquet")
            columns_of_formats[name] = source.columns, own
    return columns_of_formats


def same(actual, expected):
    """Whether a column has exactly this type, including value names of lists, and these values."""
    return actual.type.equals(expected.type, check_metadata=True) and actual.equals(expected)


@pytest.mark.parametrize("key", CASES)
def test_values_come_back_in_one_plain_type_or_are_refused(columns, tmp_path, key):
    case = CASES[key]
    expected = rotated(case.expected)
    for name, (ours, own) in columns.items():
        if name not in case.refused_by:
            assert same(ours[key], expected), (name, ours[key])
            assert own[key].cast(expected.type).equals(expected), (name, own[key])
            continue
        with raises(MetadataError, path=tmp_path / f"x{SUFFIX[name]}", mentions="'c'"):
            write_images(iter(IMAGES), tmp_path / f"x{SUFFIX[name]}", name, columns=pa.table({"c": case.column}))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("key", REFUSED)
def test_what_no_format_holds_is_refused_before_an_image_is_asked_for(tmp_path, key):
    images = iter(IMAGES)
    for name in NAMES:
        with raises(MetadataError, path=tmp_path / f"x{SUFFIX[name]}", remedy=False):
            write_images(images, tmp_path / f"x{SUFFIX[name]}", name, columns=pa.table({"c": REFUSED[key]}))
    assert len(list(images)) == len(IMAGES)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("column", "fact"), [("a\0b", "NUL"), ("", "['']")])
def test_a_name_that_no_column_can_have_is_refused(tmp_path, name, column, fact):
    with raises(MetadataError, mentions=fact, remedy=False):
        write_images(IMAGES, tmp_path / f"x{SUFFIX[name]}", name, columns={column: [1, 2, 3]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.share(2, "name")
def test_nested_structs_of_many_groups_keep_their_values(stored, name):
    inner = each_of_three(pa.array([1, 2, 3]), ["a"])
    written = pa.concat_arrays([each_of_three(inner, ["b"])] * 700)  # More rows than any format writes at once.
    source = open_images(stored(name, [IMAGES[0]] * len(written), columns=pa.table({"c": written}), checksum=False))
    assert source.columns["c"].combine_chunks().equals(written)


@pytest.mark.parametrize("name", NAMES)
def test_columns_without_rows_keep_their_types(stored, name):
    columns_of_case = pa.table(columns_for(name))
    read_columns = open_images(stored(name, [], columns=columns_of_case.slice(0, 0))).columns
    assert read_columns.num_rows == 0
    for key in columns_of_case.column_names:
        assert same(read_columns[key], pa.chunked_array([], CASES[key].expected.type)), key


def add_to_file(path, columns):
    """Add columns to an Arrow IPC file of images, without this package's writer."""
    write_images(IMAGES, path)
    with pa.ipc.open_file(path) as reader:
        table = reader.read_all()
    for name, column in columns.items():
        table = table.append_column(name, column)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


def test_columns_of_others_are_read_as_ours_are(tmp_path):
    path = add_to_file(tmp_path / "x.arrow", columns_for("arrow") | {"opaque": REFUSED["opaque"]})
    read_columns = open_images(path).columns
    for key, case in CASES.items():
        assert same(read_columns[key], rotated(case.expected)), key
    assert read_columns["opaque"].to_pylist() == [1, None, 2]
    with raises(MetadataError, path=tmp_path / "y.arrow", mentions=("'u'", "dense_union")):
        open_images(add_to_file(tmp_path / "y.arrow", {"u": UNION}))
