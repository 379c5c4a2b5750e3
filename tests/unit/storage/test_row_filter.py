"""Tests of conditions on rows: their syntax, their values and null logic compared with DuckDB, and their errors."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, ColumnError, SelectError
from omearrow_ds.storage.formats._columns import ColumnReader
from omearrow_ds.storage.row_filter import RowFilter
from tests.support.errors import raises

PATH = Path("plate.parquet")
TEXTS = ("", "a", "B", "ab", "it's", "ü", 'say "x"', "null")
NUMBERS = ("0", "1", "-2", "2.5", "7", "1e2", ".5", "-0.25", "300")
NAMES = {
    "i": "i",
    "small": "SMALL",
    "f": "f",
    "dose µM": "dose µM",
    "s": "s",
    't "quoted"': 't "quoted"',
    "flag": "flag",
}
IDS = [f"image-{number}" for number in range(40)]


class Rows(ColumnReader):
    """Rows of a table in memory, which record the columns that are read."""

    path = PATH

    def __init__(self, table):
        self.table, self.image_ids, self.read = table, IDS[: len(table)], []

    def column(self, name):
        self.read.append(name)
        return super().column(name)


def choose(condition, table):
    return RowFilter(condition).choose(Rows(table)).tolist()


@st.composite
def tables(draw):
    count = draw(st.integers(1, 12))

    def column(values, kind):
        rows = st.lists(st.none() | values, min_size=count, max_size=count)
        return pa.array(draw(rows), kind)

    floats = st.sampled_from((-2.0, -0.25, 0.0, 0.5, 1.0, 2.5, 7.0, 100.0))
    return pa.table(
        {
            "i": column(st.integers(-3, 8), pa.int64()),
            "small": column(st.integers(0, 8), pa.uint8()),
            "f": column(floats, pa.float64()),
            "dose µM": column(floats, pa.float32()),
            "s": column(st.sampled_from(TEXTS), pa.string()),
            't "quoted"': column(st.sampled_from(TEXTS), pa.string()),
            "flag": column(st.booleans(), pa.bool_()),
        }
    )


def quoted(name):
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def names(*columns):
    """Return columns as they are written in a condition: in quotes, or bare if possible."""
    return st.sampled_from([*map(quoted, columns), *(name for name in columns if name.isidentifier())])


NUMERIC, TEXTUAL = names("i", "small", "f", "dose µM"), names("s", 't "quoted"')
TEXT_VALUES = st.sampled_from(["'" + text.replace("'", "''") + "'" for text in TEXTS])
OPERATORS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])


def cased(*words):
    return st.sampled_from([form for word in words for form in (word, word.upper(), word.capitalize())])


@st.composite
def predicates(draw):
    column, value = draw(st.sampled_from([(NUMERIC, st.sampled_from(NUMBERS)), (TEXTUAL, TEXT_VALUES)]))
    left = draw(column)
    form = draw(st.sampled_from(["value", "mirrored", "column", "in", "null", "flag", "flag value"]))
    if form == "value":
        return f"{left} {draw(OPERATORS)} {draw(value)}"
    if form == "mirrored":
        return f"{draw(value)}{draw(OPERATORS)}{left}"
    if form == "column":
        return f"{left}{draw(OPERATORS)}{draw(column)}"
    if form == "in":
        values = draw(st.lists(value, min_size=1, max_size=3))
        return f"{left} {draw(cased('in', 'not in'))} ({', '.join(values)})"
    if form == "null":
        return f"{left} {draw(cased('is null', 'is not null'))}"
    return "flag" if form == "flag" else f"flag {draw(OPERATORS)} {draw(cased('true', 'false'))}"


def combined(parts):
    joined = st.tuples(parts, cased("and", "or"), parts).map(" ".join)
    return joined | parts.map(lambda part: f"({part})") | parts.map(lambda part: f"not {part}")


@pytest.fixture(scope="module")
def sql():
    with duckdb.connect() as connection:
        yield connection


@settings(max_examples=150, deadline=None)
@given(tables(), st.recursive(predicates(), combined, max_leaves=6))
def test_row_filter_chooses_the_rows_of_sql(sql, table, condition):
    sql.register("numbered", table.append_column("row number", pa.array(range(len(table)))))
    query = f'select "row number" from numbered where {condition} order by 1'
    expected = [row for (row,) in sql.execute(query).fetchall()]
    if expected:
        assert choose(condition, table) == expected
    else:
        with raises(SelectError, "filter", PATH):
            choose(condition, table)


TABLE = pa.table(
    {
        "treatment": ["DMSO", "TAXOL", None, "DMSO"],
        "dose": [0.0, 1.5, 2.0, None],
        "site": pa.array([1, 2, 3, 4], pa.int16()),
        "large": pa.array([1, 2**64 - 1, None, 2**63], pa.uint64()),
        "half": pa.array([0.1, 0.2, None, 0.3], pa.float16()),
        "single": pa.array([0.1, 0.2, None, 0.3], pa.float32()),
        "exact": pa.array([2**60, 2**60 + 1, None, 2**60 + 2]),
        "empty": pa.nulls(4),
        "points": [[1], [], None, [2, 3]],
        "taken": pa.array([0, 86_400, None, 172_800], pa.timestamp("s", "UTC")).cast(pa.timestamp("us", "UTC")),
        "day": pa.array([0, 1, None, 2], pa.date32()),
    }
)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("large == 18446744073709551615", [1]),
        ("large > -1", [0, 1, 3]),
        ("large == site", [0]),
        ("exact == 1152921504606846977", [1]),
        ("exact < 1152921504606846976.5", [0]),
        ("site < 1e30 and site > 1e-30 and site < 1e999", [0, 1, 2, 3]),
        ("single in (0.1, 0.3)", [0, 3]),
        ("half == 0.2", [1]),
        ("points is not null", [0, 1, 3]),
        ("empty is null and empty is null", [0, 1, 2, 3]),
        ("empty == 'x' or site == 2", [1]),
        ("taken >= '1970-01-02'", [1, 3]),
        ("taken == '1970-01-02 00:00:00'", [1]),
        ("day > '1970-01-02'", [3]),
        ("image_id in ('image-0', 'image-3')", [0, 3]),
        ("NOT treatment == 'DMSO'", [1]),
        ("treatment not in ('TAXOL')", [0, 3]),
        (" site==1or site==4 ", [0, 3]),
        (pc.field("treatment") == "DMSO", [0, 3]),
        (pc.field("site").isin([2, 3]) & ~(pc.field("treatment") == "DMSO"), [1]),
        (pc.field("image_id") == "image-2", [2]),
    ],
)
def test_row_filter_chooses_rows_by_exact_values(condition, rows):
    assert choose(condition, TABLE) == rows


def test_nan_is_unequal_to_each_value():
    table = pa.table({"x": [float("nan"), 1.0]})
    assert choose("x != 1", table) == [0]
    assert choose("not x > 1", table) == [0, 1]
    assert choose("x is not null", table) == [0, 1]


@pytest.mark.parametrize(
    ("condition", "expected", "character"),
    [
        ("", "a column", 1),
        ("dose ==", "a value", 8),
        ("dose = 1", '"and", "or" or the end', 6),
        ("dose <> 1", "a value", 7),
        ("1 == 1", "a comparison with a column", 3),
        ("dose in ()", "a value", 10),
        ("dose in (site)", "a number or a string", 10),
        ("dose in (1", '")"', 11),
        ("(dose == 1", '")"', 11),
        ("dose == 1)", '"and", "or" or the end', 10),
        ("dose not 1", '"in"', 10),
        ("dose is 1", '"null"', 9),
        ("treatment == 'DMSO", "a value", 14),
        ("a-b == 1", '"and", "or" or the end', 2),
        ("true", "a comparison", 5),
        ("__import__('os')", '"and", "or" or the end', 11),
        ("(" * 101 + "dose", "at most 100 nested", 101),
        ("not " * 200 + "dose", "at most 100 nested", 401),
    ],
)
def test_invalid_syntax_is_an_error_that_names_its_position(condition, expected, character):
    with raises(ArgumentError, "filter", mentions=[f"character {character}"]) as caught:
        RowFilter(condition)
    assert f"expected {expected}" in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(
    st.text() | st.lists(st.sampled_from([*"()<>=!,'\"._1ex ", "and", "or", "not", "is", "in", "null"])).map(" ".join)
)
def test_any_text_is_a_condition_or_an_argument_error(text):
    try:
        RowFilter(text)
    except ArgumentError as caught:
        error = caught
    else:
        return
    with raises(ArgumentError, "filter"):
        raise error


@pytest.mark.parametrize(
    ("condition", "types"),
    [
        ("treatment == 5", ["string", "int64"]),
        ("5.5 < treatment", ["string", "double"]),
        ("dose in ('DMSO')", ["double", "string"]),
        ("treatment == dose", ["string", "double"]),
        ("site", ["int16", "bool"]),
        ("points == 1", ["list", "int64"]),
        ("day == 1", ["date32", "int64"]),
    ],
)
def test_values_of_another_type_are_an_error_that_names_both_types(condition, types):
    with raises(ColumnError, "filter", PATH, mentions=types):
        choose(condition, TABLE)


@pytest.mark.parametrize(
    ("condition", "near"),
    [("Treatment == 'DMSO'", "treatment"), ("treatmnet == 'DMSO'", "treatment"), (pc.field("dos") > 1, "dose")],
)
def test_an_unknown_column_is_an_error_that_names_the_nearest_one(condition, near):
    with raises(ColumnError, "filter", PATH, mentions=[f"'{near}'"]):
        choose(condition, TABLE)


@pytest.mark.parametrize("condition", [5, ["dose > 1"], pc.field(0) == 1])
def test_other_conditions_are_argument_errors(condition):
    with raises(ArgumentError, "filter"):
        choose(condition, TABLE)


@pytest.mark.parametrize("condition", [pc.field("treatment") == 1, pc.field("treatment"), pc.field("points", "x") == 1])
def test_an_expression_that_fits_no_column_is_a_column_error(condition):
    with raises(ColumnError, "filter", PATH):
        choose(condition, TABLE)


def test_a_condition_that_matches_no_row_is_a_select_error():
    with raises(SelectError, "filter", PATH):
        choose("dose > 100", TABLE)
    with raises(SelectError, "filter", PATH):
        choose("empty == 1", TABLE)


@pytest.mark.parametrize("condition", ["dose > 1 and not site == 3", (pc.field("dose") > 1) & (pc.field("site") != 3)])
def test_row_filter_reads_only_the_columns_of_its_condition(condition):
    rows = Rows(TABLE)
    assert RowFilter(condition).choose(rows).tolist() == [1]
    assert sorted(rows.read) == ["dose", "site"]


def test_long_expressions_that_differ_have_different_texts():
    first, second = (pc.field("site").isin([*range(50), last, *range(60, 99)]) for last in (50, 51))
    assert str(first) == str(second)
    assert RowFilter(first).text != RowFilter(second).text
    assert RowFilter(first).text == RowFilter(pc.field("site").isin([*range(51), *range(60, 99)])).text


@pytest.mark.parametrize(
    ("condition", "remedy"),
    [
        ("dose > 1 && site == 1", '"and"'),
        ("dose > 1 || site == 1", '"or"'),
        ("site in [1, 2]", "in (1, 2)"),
        ("dose == null", '"is null"'),
        ("dose <> 1", '"!="'),
        ("dose = 1", '"=="'),
        ("treatment like 'D%'", "pyarrow.compute.Expression"),
        ("dose between 1 and 2", "dose >= 1 and dose <= 2"),
    ],
)
def test_row_filter_names_the_correct_syntax_when_a_condition_is_written_in_another_language(condition, remedy):
    with raises(ArgumentError, "filter") as caught:
        choose(condition, TABLE)
    assert remedy in caught.value.remedy


def test_texts_do_not_request_ids_that_they_do_not_name():
    """Ids of objects are texts that are made when they are requested."""

    class Rows(ColumnReader):
        path = Path("objects.parquet")
        names = ("dose",)

        @property
        def image_ids(self):
            raise AssertionError("the ids are not needed")

        def column(self, name):
            return pa.chunked_array([[1.0, 3.0]])

    assert RowFilter("dose > 2").choose(Rows()).tolist() == [1]
