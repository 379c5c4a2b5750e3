"""Types of target columns: numbers that torch collates, or an error from the dataset's constructor."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds import ColumnError, OMEArrowDataLoader, OMEArrowDataset, write_images
from omearrow_ds.dataset.targets import Targets
from omearrow_ds.storage.formats._columns import ColumnReader
from tests.support.errors import raises

IMAGES = [np.full((8, 8), 2**15 + number, np.uint16) for number in range(4)]
DAY = dt.date(2024, 1, 2)


def targets_of(path, target, **options):
    """Return the targets of one batch of all images."""
    (batch,) = OMEArrowDataLoader(OMEArrowDataset(path, target=target, axes="YX", **options), 4, num_workers=0)
    return batch[1]


def stored_with(folder, values):
    write_images(IMAGES, folder / "i.arrow", columns={"value": values})
    return folder / "i.arrow"


def test_missing_column_of_images_without_columns_is_refused_with_a_way_to_add_some(tmp_path):
    write_images(IMAGES, tmp_path / "i.tiffs")
    with raises(ColumnError, path=tmp_path / "i.tiffs", mentions=("'label'", "columns=", "pattern=")):
        OMEArrowDataset(tmp_path / "i.tiffs", target="label")


def test_sums_and_shares_of_duckdb_become_numbers(tmp_path):
    write_images(IMAGES, tmp_path / "i.parquet", columns={"cells": [2**40, -7, 3, 4]})
    with duckdb.connect(tmp_path / "i.duckdb") as db:
        shares = "sum(cells) over () as total, (cells / 7)::decimal(20, 3) as share"
        db.sql(f"create table images as select *, {shares} from '{tmp_path}/i.parquet'")
        totals, floats = zip(*db.sql("select total, share::double from images").fetchall(), strict=True)
        kinds = set(db.sql("select data_type from information_schema.columns").fetchnumpy()["data_type"])
    assert kinds >= {"HUGEINT", "DECIMAL(20,3)"}
    targets = targets_of(tmp_path / "i.duckdb", ["total", "share"])
    assert (targets["total"].dtype, targets["share"].dtype) == (torch.int64, torch.float64)
    assert targets["total"].tolist() == list(totals) == [2**40] * 4
    assert targets["share"].tolist() == list(floats)


class Table(ColumnReader):
    """A source with columns only."""

    path, image_ids = "here", ("a",)

    def __init__(self, column):
        self.table = pa.table({"value": column})


@given(st.integers(-(10**37), 10**37), st.integers(1, 37))
def test_decimals_become_the_nearest_float(digits, scale):
    value = Decimal(f"{digits}E-{scale}")
    column = pa.array([value], pa.decimal128(38, scale))
    assert Targets(Table(column), "value", None, encode_targets=True, nulls=False)[0] == float(f"{digits}E-{scale}")


def test_decimals_in_lists_become_arrays(tmp_path):
    values = pa.array([[Decimal("0.1")], [], [Decimal("-7.5"), Decimal("2.0")], []], pa.list_(pa.decimal128(9, 1)))
    dataset = OMEArrowDataset(stored_with(tmp_path, values), target="value", axes="YX")
    assert [target.tolist() for _, target in dataset] == [[0.1], [], [-7.5, 2.0], []]
    assert {target.dtype for _, target in dataset} == {np.dtype("float64")}


def test_decimals_in_structs_become_numbers(tmp_path):
    values = pa.array([{"a": Decimal(number), "b": number} for number in range(4)])
    targets = targets_of(stored_with(tmp_path, values), "value")
    assert {name: (value.dtype, value.tolist()) for name, value in targets.items()} == {
        name: (torch.int64, [0, 1, 2, 3]) for name in "ab"
    }


def test_null_decimals_are_left_out_when_asked(tmp_path):
    values = pa.array([Decimal("0.5"), None, Decimal("1.5"), None], pa.decimal128(4, 1))
    assert targets_of(stored_with(tmp_path, values), "value", nulls="skip").tolist() == [0.5, 1.5]


def test_uint64_targets_are_integers_when_int64_holds_them(tmp_path):
    targets = targets_of(stored_with(tmp_path, pa.array([0, 1, 2, 2**63 - 1], pa.uint64())), "value")
    assert (targets.dtype, targets.tolist()) == (torch.int64, [0, 1, 2, 2**63 - 1])


BEYOND = {
    "uint64": pa.array([1, 2, 3, 2**63], pa.uint64()),
    "decimal128": pa.array([Decimal(2**63)] * 4, pa.decimal128(38, 0)),
    "decimal256": pa.array([Decimal(-(2**63) - 1)] * 4, pa.decimal256(50, 0)),
    "struct": pa.array([{"big": 2**64 - 1}] * 4, pa.struct({"big": pa.uint64()})),
}


@pytest.mark.parametrize("values", BEYOND.values(), ids=BEYOND)
def test_integers_beyond_int64_are_an_error_at_construction(tmp_path, values):
    path = stored_with(tmp_path, values)
    with raises(ColumnError, path=path, mentions=("'value'", str(values.type).split("(")[0], "float64")):
        OMEArrowDataset(path, target="value", axes="YX", preload=False)


TIMES = {
    "date": (pa.array([DAY] * 4), "int32"),
    "timestamp": (pa.array([dt.datetime(2024, 1, 2, 3)] * 4, pa.timestamp("us", "UTC")), "int64"),  # noqa: DTZ001
    "time": (pa.array([dt.time(3, 4)] * 4), "int64"),
    "duration": (pa.array([dt.timedelta(1)] * 4), "int64"),
    "list": (pa.array([[DAY]] * 4), "int32"),
    "struct": (pa.array([{"day": DAY}] * 4), "int32"),
}


@pytest.mark.parametrize(("values", "number"), TIMES.values(), ids=TIMES)
def test_times_are_an_error_at_construction(tmp_path, values, number):
    path = stored_with(tmp_path, values)
    with raises(ColumnError, path=path, mentions=("'value'", number, "callable")):
        OMEArrowDataset(path, target=["value"], axes="YX", preload=False)
    assert targets_of(path, lambda row: str(row["value"])) == [str(value) for value in values.to_pylist()]


def test_the_proposed_cast_of_a_time_gives_targets(tmp_path):
    values = pa.chunked_array([TIMES["timestamp"][0]])
    targets = targets_of(stored_with(tmp_path, pc.cast(values, TIMES["timestamp"][1])), "value")
    assert targets.tolist() == [dt.datetime(2024, 1, 2, 3, tzinfo=dt.UTC).timestamp() * 10**6] * 4


def test_columns_of_objects_are_checked_too(tmp_path):
    write_images(IMAGES, tmp_path / "i.arrow")
    cells = {"image_id": ["image-00000"] * 2, "y": [3, 4], "x": [3, 4], "area": [Decimal("1.5"), Decimal("2.5")]}
    options = {"objects": pd.DataFrame({**cells, "day": [DAY] * 2}), "center": ("y", "x"), "crop_size": (2, 2)}
    assert targets_of(tmp_path / "i.arrow", "area", **options).tolist() == [1.5, 2.5]
    with raises(ColumnError, mentions=("'day'", "date32[day]")):
        OMEArrowDataset(tmp_path / "i.arrow", target="day", axes="YX", **options)
