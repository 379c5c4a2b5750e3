"""Malformed rows: the pixels of ome-arrow bit for bit, or an error; docs/explanation/guarantees.md lists exceptions."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import OMEArrowDatasetNumpy, OMEArrowDSError, open_images
from omearrow_ds.codec import schema
from omearrow_ds.storage.formats._table import unnest
from tests.adversarial.malformed import CASES, oracle, records_of, rows_of
from tests.conftest import needs
from tests.support.strategies import SUFFIX, same, slow_except

GUARANTEES = Path(__file__).parents[2] / "docs/explanation/guarantees.md"
EACH = [pytest.param(case, encoding, id=f"{encoding} {case.name}") for case in CASES for encoding in case.encodings]
UNHELD = (pa.ArrowException, OSError, ValueError, RuntimeError, TypeError)


def documented():
    """Return the names of the cases that the document lists, each as `` `name` `` in the first column of a table."""
    section = GUARANTEES.read_text().partition("## Stricter than ome-arrow")[2]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def outcome(make):
    """Return the images that ``make`` returns, or the error of this package; other errors propagate."""
    try:
        return make()
    except OMEArrowDSError as error:
        return error


def scanned(source):
    images = [np.array(image) for _, part in source.images.stream() for image in part]
    assert len(images) == len(source)
    return images


def preloaded(path, name=None):
    dataset = OMEArrowDatasetNumpy(path, name, preload=True, axes="TCZYX", normalize=False)
    return [dataset[index] for index in range(len(dataset))]


def agree(path, expected, name=None, **options):
    """Compare every way to read a file with the oracle's images; return the rows, with errors, that only we refuse."""
    source = outcome(lambda: open_images(path, name, **options))
    if isinstance(source, Exception):
        assert path.name in str(source)
        return {row: source for row, image in enumerate(expected) if not isinstance(image, Exception)}
    with source:
        outcomes = [outcome(lambda row=row: source.read(row)) for row in range(len(source))]
        for row, (image, right) in enumerate(zip(outcomes, expected, strict=True)):
            if isinstance(image, Exception):
                assert re.search(rf"{path.name}: (image {row}\b|chunks|planes)", str(image)), image
                again = outcome(lambda row=row: source.take([row, row]))
                assert isinstance(again, Exception), "take gives what read refuses"
            else:
                assert not isinstance(right, Exception), f"row {row}: pixels, where the oracle raises {right!r}"
                assert same(image, right), f"row {row}: other pixels than the oracle's"
        good = [row for row, image in enumerate(outcomes) if not isinstance(image, Exception)]
        order = [*good[::-1], *good[:1]]
        for row, image in zip(order, source.take(order), strict=True):
            assert same(image, expected[row])
        for way in (lambda: scanned(source), lambda: preloaded(path, name)):
            images = outcome(way)
            assert isinstance(images, Exception) == (len(good) < len(outcomes)), images
            if isinstance(images, list):
                assert all(map(same, images, expected))
        assert outcome(lambda: [source.metadata(row) for row in range(len(source))])
    return {
        row: error for row, error in enumerate(outcomes) if not isinstance(expected[row], Exception) and row not in good
    }


def check(path, column, case, name=None, **options):
    """Check a stored column as its own library reads it. Only documented cases may raise here but not in the oracle."""
    expected = [oracle(record) for record in records_of(column)]
    refused = agree(path, expected, name, **options)
    assert 1 in refused or not refused or isinstance(expected[1], Exception) or case.types
    if refused:
        whole = len(refused) == sum(not isinstance(image, Exception) for image in expected)
        assert case.name in documented() or (whole and isinstance(expected[1], Exception)), refused
    return {case.name} if 1 in refused or (case.types and refused) else set()


def write_ipc(path, batches):
    with pa.ipc.new_file(path, pa.schema({"ome_image": batches[0].type})) as writer:
        for batch in batches:
            writer.write_batch(pa.record_batch({"ome_image": batch}))


@pytest.mark.parametrize(("case", "encoding"), EACH)
@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.share(5, "case", "encoding")
def test_arrow_rows(tmp_path, case, encoding, both):
    """Each encoding has its own layout: one batch for lists, and several, with offsets, for bytes; or both layouts."""
    rows = rows_of(case, encoding)
    rows.validate(full=True)
    moved = pa.concat_arrays([rows.slice(0, 1), rows]).slice(1)
    layouts = {"list": [rows], "bytes": [moved.slice(0, 1), moved.slice(1)]}
    path, refused = tmp_path / "images.arrow", []
    for batches in layouts.values() if both else [layouts[encoding]]:
        write_ipc(path, batches)
        refused.append(check(path, rows, case))
    assert refused[0] == refused[-1]


def test_the_list_of_stricter_cases_is_complete(tmp_path):
    stricter = set()
    for case in CASES:
        if case.name in documented():
            for encoding in case.encodings:
                rows = rows_of(case, encoding)
                write_ipc(tmp_path / "images.arrow", [rows])
                stricter |= check(tmp_path / "images.arrow", rows, case)
    assert stricter == documented()


def store(name, rows, path):
    """Write rows with the format's own library; return them as it reads them, or None if it cannot store them."""
    needs(name)
    table = pa.table({"ome_image": rows})
    try:
        if name == "parquet":
            pq.write_table(table, path, row_group_size=2)
            return pq.ParquetFile(path).read()["ome_image"]
        if name == "lance":
            import lance

            return lance.write_dataset(table, str(path)).to_table()["ome_image"]
        if name == "vortex":
            import vortex

            vortex.io.write(table, str(path))
            stored = vortex.open(str(path)).scan().read_all().to_arrow_array()
            return unnest(stored if isinstance(stored, pa.ChunkedArray) else pa.chunked_array([stored]))["ome_image"]
        import duckdb

        with duckdb.connect(str(path)) as connection:
            connection.register("incoming", table)
            connection.execute("CREATE TABLE images AS FROM incoming")
            return connection.sql("FROM images").to_arrow_table()["ome_image"]
    except UNHELD:
        return None


# Positions and types are valid, but the pixels are not: formats that read only the pixel leaf must detect it.
LEAF_CASES = (
    "nothing changed",
    "too few bytes",
    "too many bytes",
    "no bytes",
    "null bytes",
    "bytes moved between chunks",
    "compressed bytes said to be plain",
    "too few pixels",
    "too many pixels",
    "null pixels",
    "a null pixel",
    "pixels moved between chunks",
    "t that wraps around in a product",
)
NAMES = ("parquet", "lance", "vortex", "duckdb")
formats = pytest.mark.parametrize("name", NAMES)


@formats
@pytest.mark.parametrize(("case", "encoding"), [param for param in EACH if param.values[0].name in LEAF_CASES])
@pytest.mark.share(4, "name", "case", "encoding")
def test_a_pixel_leaf_that_contradicts_its_places(tmp_path, name, case, encoding):
    path = tmp_path / f"images{SUFFIX[name]}"
    column = store(name, rows_of(case, encoding), path)
    if column is not None:
        check(path, column, case, name)


@cache
def rows_of_files_that_open(encoding):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.arrow"
        for case in CASES:
            if encoding in case.encodings and not case.types:
                row = rows_of(case, encoding).slice(1, 1)
                write_ipc(path, [row])
                if not isinstance(outcome(lambda: open_images(path)), Exception):
                    rows.append(row)
    return rows


# Two of the four formats in each encoding; nightly runs use all formats in both.
ALL_CASES = slow_except([("parquet", "bytes"), ("lance", "list")], product(NAMES, schema.ENCODINGS))


@pytest.mark.parametrize(("name", "encoding"), ALL_CASES)
def test_all_cases_of_the_usual_types_in_one_file(tmp_path, name, encoding):
    """The file contains every row that does not prevent opening it."""
    rows = rows_of_files_that_open(encoding)
    assert len(rows) > 80
    path = tmp_path / f"all{SUFFIX[name]}"
    column = store(name, pa.concat_arrays(rows), path)
    assert column is not None
    expected = [oracle(record) for record in records_of(column)]
    refused = agree(path, expected, name)
    assert 0 < len(refused) < len(rows)


TYPED = [case for case in CASES if case.types]


@pytest.mark.parametrize("encoding", schema.ENCODINGS)
@pytest.mark.share(2, "encoding")
def test_other_arrow_types_in_parquet(tmp_path, encoding):
    path = tmp_path / "images.parquet"
    stored = 0
    for case in TYPED:
        column = store("parquet", rows_of(case, encoding), path) if encoding in case.encodings else None
        if column is not None:
            check(path, column, case, "parquet")
            stored += 1
    assert stored > 30
