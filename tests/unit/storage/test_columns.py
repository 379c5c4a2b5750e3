"""Columns of sources and datasets, read by name."""

from __future__ import annotations

import duckdb
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import vortex

from omearrow_ds import (
    FORMATS,
    ArgumentError,
    ColumnError,
    FormatError,
    OMEArrowDataset,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.storage.formats import _columns
from omearrow_ds.storage.formats._detect import SIDECAR
from omearrow_ds.storage.writing import Layout
from tests.support.errors import raises

COUNT = 12
COLUMNS = pa.table(
    {
        "number": pa.array(range(COUNT), pa.int64()),
        "well": [f"{'ABC'[n // 4]}{n % 4 + 1:02}" for n in range(COUNT)],
        "dose": [None if n % 5 == 4 else n / 8 for n in range(COUNT)],
        'a "b".c µ': [n % 2 == 0 for n in range(COUNT)],
    }
)
NAMES = COLUMNS.column_names
PLAIN = [name for name in NAMES if "." not in name]  # Lance and DuckDB refuse the other name.
READERS = {
    "parquet": pq.read_table,
    "parquet_duck": pq.read_table,
    "arrow": lambda path: pa.ipc.open_file(path.read_bytes()).read_all(),
    "lance": lambda path: lance.dataset(str(path)).to_table(),
    "vortex": lambda path: vortex.open(str(path)).to_arrow().read_all(),
    "duckdb": lambda path: duckdb.connect(str(path), read_only=True).sql("FROM images").to_arrow_table(),
    "ome_arrow": lambda path: pq.read_table(path / SIDECAR),
}


def images(count=COUNT):
    """Return images whose pixels encode their number and position."""
    return [np.arange(6 * 7, dtype=np.uint16).reshape(1, 6, 7) + 100 * number for number in range(count)]


@pytest.fixture
def wide(monkeypatch):
    """Treat each table as too wide to be read at opening."""
    monkeypatch.setattr(_columns, "MAX_COLUMNS_AT_ONCE", 0)


@pytest.fixture(scope="module", params=[fmt.name for fmt in FORMATS])
def path(request, tmp_path_factory):
    fmt = next(fmt for fmt in FORMATS if fmt.name == request.param)
    target = tmp_path_factory.mktemp("columns") / f"plate{fmt.suffix}"
    write_images(images(), target, fmt.name, axes="CYX", columns=COLUMNS.select(PLAIN))
    return target


def test_column_equals_the_written_values_in_every_format(path):
    with open_images(path) as source:
        assert source.column_names == PLAIN
        for name in PLAIN:
            assert source.column(name).type == COLUMNS[name].type
            assert source.column(name).to_pylist() == COLUMNS[name].to_pylist()
        assert source.column_table(PLAIN[::-1]).equals(COLUMNS.select(PLAIN[::-1]))
        assert source.columns.select(PLAIN).equals(COLUMNS.select(PLAIN))


@pytest.mark.parametrize("name", READERS)
def test_column_equals_that_of_another_library(tmp_path, name):
    fmt = next(fmt for fmt in FORMATS if fmt.name == name)
    target = tmp_path / f"plate{fmt.suffix}"
    write_images(images(), target, name, axes="CYX", columns=COLUMNS.select(PLAIN))
    expected = READERS[name](target)
    with open_images(target) as source:
        for column in PLAIN:
            assert source.column(column).to_pylist() == expected[column].to_pylist()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".vortex"])
def test_columns_with_dots_quotes_and_unicode_are_read_by_name(tmp_path, suffix):
    target = tmp_path / f"plate{suffix}"
    write_images(images(), target, axes="CYX", columns=COLUMNS)
    with open_images(target) as source:
        assert source.column_table(NAMES[::-1]).equals(COLUMNS.select(NAMES[::-1]))


def test_column_errors_state_the_nearest_names_of_many(tmp_path):
    many = {f"Cells_Texture_{number:04}": np.arange(3) for number in range(60)}
    target = tmp_path / "many.parquet"
    write_images(images(3), target, axes="CYX", columns=many)
    with open_images(target) as source:
        with raises(ColumnError, path=target, mentions=("'Cells_Texture_0042'",)) as caught:
            source.column("cells_texture_0042")
        assert len(str(caught.value)) < 300 + len(str(target))
        with raises(ArgumentError, option="names"):
            source.column_table("Cells_Texture_0001")
        with raises(ArgumentError, option="names"):
            source.column_table(["Cells_Texture_0001"] * 2)


def test_columns_of_datasets_are_those_of_their_samples(path):
    dataset = OMEArrowDataset(path, target="number")
    parts = dataset.split((0.5, 0.5), by="well", seed=3)
    for view in (dataset, *parts):
        numbers = [int(label) for _, label in view]
        assert view.column_names == PLAIN
        assert view.column("number").to_pylist() == numbers
        assert view.column_table(["well"])["well"].to_pylist() == [COLUMNS["well"][n].as_py() for n in numbers]


def test_columns_of_crops_are_those_of_objects_then_of_their_images(tmp_path):
    target = tmp_path / "plate.parquet"
    write_images(images(), target, axes="CYX", columns=COLUMNS)
    objects = {"image_id": [f"image-{n:05}" for n in (3, 3, 8)], "y": [2.0, 3, 3], "x": [2.0, 4, 3], "dose": [7, 8, 9]}
    dataset = OMEArrowDataset(target, crop_size=(2, 2), objects=pa.table(objects), center=("y", "x"), target="number")
    assert dataset.column("number").to_pylist() == [3, 3, 8]
    assert dataset.column("dose").to_pylist() == [7, 8, 9]
    assert dataset.column_table(["well", "x"]).to_pydict() == {"well": ["A04", "A04", "C01"], "x": [2.0, 4, 3]}
    assert set(dataset.column_names) == set(dataset.columns.column_names)
    assert [int(label) for _, label in dataset] == [3, 3, 8]


def test_columns_of_parts_and_joined_files_are_in_order(tmp_path):
    target = tmp_path / "plate.parquet"
    write_images(images(), target, axes="CYX", columns=COLUMNS)
    convert(target, tmp_path / "plate.parts", part_bytes=300)
    convert(target, tmp_path / "copy.parquet")
    for opened, copies in ((tmp_path / "plate.parts", 1), ([target, tmp_path / "copy.parquet"], 2)):
        with open_images(opened) as source:
            assert source.column("number").to_pylist() == list(range(COUNT)) * copies
            assert source.column_table(["well", "dose"]).column_names == ["well", "dose"]


TABLES = [fmt for fmt in FORMATS if fmt.kind == "table"]


@pytest.mark.parametrize("fmt", TABLES, ids=lambda fmt: fmt.name)
@pytest.mark.usefixtures("wide")
def test_only_the_requested_columns_are_read(tmp_path, fmt, monkeypatch):
    target = tmp_path / f"plate{fmt.suffix}"
    write_images(images(), target, fmt.name, axes="CYX", columns=COLUMNS.select(PLAIN), checksum=False)
    requests = []
    table_type = type(open_images(target).images.table)
    read = table_type.read_columns
    monkeypatch.setattr(table_type, "read_columns", lambda self, names: requests.append(names) or read(self, names))
    dataset = OMEArrowDataset(target, target="number")
    assert dataset[3][1] == 3
    assert dataset.column_names == PLAIN
    assert requests == [["number"]]


@pytest.mark.parametrize("fmt", TABLES, ids=lambda fmt: fmt.name)
@pytest.mark.usefixtures("wide")
def test_columns_of_a_file_replaced_after_opening_are_refused(tmp_path, fmt):
    target = tmp_path / f"plate{fmt.suffix}"
    write_images(images(), target, fmt.name, axes="CYX", columns=COLUMNS.select(PLAIN))
    source = open_images(target)
    write_images(images(), target, fmt.name, axes="CYX", columns={"number": range(COUNT)}, overwrite=True)
    with raises(FormatError, path=target):
        source.column("number")


def test_row_groups_of_wide_tables_are_large():
    wide = pa.table({f"c{number}": pa.nulls(5_000) for number in range(4_000)})
    default = Layout("bytes", "none", 256, 2**24)
    assert 4_000 * -(-5_000 // default.for_columns(wide).max_rows) <= 40_000
    assert default.for_columns(wide.select(range(100))) == default
