"""DuckDB: rows found by key, by row number and by scans, while another reader is open."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import ome_arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    FormatError,
    MetadataError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    WriteError,
    convert,
    open_images,
    write_images,
)
from tests.conftest import needs
from tests.support.sources import scanned
from tests.support.strategies import all_same, collections, images_of, same

needs("duckdb")

import duckdb  # noqa: E402

from omearrow_ds.codec.schema import CHECKSUM_COLUMN  # noqa: E402
from omearrow_ds.storage import writing  # noqa: E402
from omearrow_ds.storage.formats import duckdb as duckdb_format  # noqa: E402
from omearrow_ds.storage.formats import get_format  # noqa: E402
from tests.support.errors import raises  # noqa: E402

DUCKDB = get_format("duckdb")
quick = settings(max_examples=6, deadline=None)
KEY = "omearrow_ds_row"
KEYED = "omearrow_ds_images"
MANY = [((1, 2, 1, 4, 5), "uint16")] * 40


@contextmanager
def database(path, **options):
    with duckdb.connect(str(path), **options) as connection:
        yield connection


set_rows = duckdb_format.DuckDBTable._set_rows
WAYS = {
    "by key": [],
    "by key alone": [(duckdb_format, "_SCANNED_BYTES", 0)],
    "by key, one by one": [(duckdb_format, "_SCANNED_BYTES", 0), (duckdb_format, "_PIECE_BYTES", 1)],
    "by row number": [(duckdb_format.DuckDBTable, "_set_rows", lambda self, _: set_rows(self, None))],
    "short of memory": [(duckdb_format.DuckDBTable, "_working_bytes", lambda _: 1)],
    "in small batches": [(duckdb_format, "_STREAMED_BYTES", 1)],
}


@quick
@given(data=st.data(), images=collections(5), compression=st.sampled_from(DUCKDB.writer.compressions))
def test_duckdb_rows(fresh, data, images, compression):
    """All ways to find rows in one file, as writing a file takes as long as reading it in all ways."""
    listable = all(image.dtype.name in ("uint8", "uint16") for image in images)
    encoding = data.draw(st.sampled_from(["bytes", "list"] if listable else ["bytes"]))
    path = fresh(".duckdb")
    write_images(
        images, path, axes="TCZYX", encoding=encoding, compression=compression, columns={"n": range(len(images))}
    )
    with database(path, read_only=True) as connection:
        raw = connection.sql("FROM images").to_arrow_table()
    assert raw.column_names == ["ome_image", "n", CHECKSUM_COLUMN]
    for row, image in zip(raw["ome_image"], images, strict=True):
        assert same(ome_arrow.to_numpy(row.as_py(), dtype=image.dtype), image)
    for way, changes in WAYS.items():
        with pytest.MonkeyPatch.context() as patch:
            for change in changes:
                patch.setattr(*change)
            source = open_images(path)
            assert source.columns.to_pydict() == {"n": list(range(len(images)))}
            indices = data.draw(st.lists(st.integers(-len(images), len(images) - 1), max_size=8), way)
            assert all_same(source.take(indices), [images[index] for index in indices]), way
            assert all_same(scanned(source), images), way
            assert all_same([source.read(index) for index in indices], [images[index] for index in indices]), way


@pytest.fixture(scope="module")
def numbered(fresh):
    """Five thousand images, each filled with its number."""
    path = fresh(".duckdb")
    write_images([np.full((2, 3), number, "uint16") for number in range(5000)], path)
    return path


@pytest.mark.parametrize(
    "indices", [[7], [7, 8], [0, 1], range(100, 116), [0, 4999], [4, 90, 2047, 2048, 2049], range(200)]
)
def test_rows_are_found_by_the_index(numbered, indices):
    source = open_images(numbered)
    taken = source.take(indices)
    assert [int(image.max()) for image in taken] == list(indices)
    table = source.images.table._query("EXPLAIN ANALYZE SELECT *", source.images.table._condition(np.array(indices)))
    plan = table["explain_value"][0].as_py()
    assert "Index Scan" in plan


@pytest.mark.parametrize("compression", DUCKDB.writer.compressions)
def test_rows_of_many_row_groups(fresh, monkeypatch, compression):
    small = replace(DUCKDB, writer=replace(DUCKDB.writer, max_rows=97))
    monkeypatch.setattr(writing, "format_of_target", lambda _: small)
    path = fresh(".duckdb")
    images = [np.full((2, 3), number, "uint16") for number in range(1500)]
    write_images(images, path, compression=compression)
    with open_images(path) as source:
        assert [int(image.min()) for image in scanned(source)] == list(range(1500))
        some = np.random.default_rng(0).permutation(1500)[:700]
        assert [int(image.max()) for image in source.take(some)] == some.tolist()
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda start: source.take(range(start, 1500, 300)), range(30)))
        assert [[int(image.max()) for image in batch] for batch in taken] == [[*range(i, 1500, 300)] for i in range(30)]


def test_rows_that_were_lost_in_writing(fresh, monkeypatch):
    path = fresh(".duckdb")
    run = duckdb_format.run_on_tables

    def lose_rows(connection, tables, table_schema, statement):
        run(connection, (table.slice(0, 0) for table in tables), table_schema, statement)

    monkeypatch.setattr(duckdb_format, "run_on_tables", lose_rows)
    for compression in DUCKDB.writer.compressions:
        with raises(WriteError, path=path, mentions="0 of 4", remedy=False):
            write_images(images_of(MANY[:4]), path, compression=compression)
        assert not path.exists()


@pytest.fixture
def keyed(fresh):
    """Forty images with their number as a column, as this package writes them."""
    path, images = fresh(".duckdb"), images_of(MANY)
    write_images(images, path, columns={"n": range(40)})
    return path, images


def check_rows(path, images, numbers, columns=("n",)):
    source = open_images(path)
    assert source.columns.column_names == list(columns)
    assert source.columns["n"].to_pylist() == numbers
    expected = [images[number] for number in numbers]
    assert all_same(scanned(source), expected)
    order = [len(numbers) - 1, 0, 3, 3, -2]
    assert all_same(source.take(order), [expected[index] for index in order])
    assert all_same([source.read(index) for index in range(len(numbers))], expected)
    return source


def test_rows_that_were_deleted(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"DELETE FROM {KEYED} WHERE n IN (0, 7, 8, 39)")
    assert check_rows(path, images, [number for number in range(40) if number not in (0, 7, 8, 39)]).images.table._keyed


def test_keys_in_another_order(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"UPDATE {KEYED} SET {KEY} = 7 * (100 - {KEY})")
        numbers = [number for (number,) in connection.sql(f"SELECT n FROM {KEYED} ORDER BY rowid").fetchall()]
    assert check_rows(path, images, numbers).images.table._keyed


def test_rows_without_a_key(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"INSERT INTO {KEYED} BY NAME SELECT * FROM images WHERE n IN (5, 6)")
    source = check_rows(path, images, [*range(40), 5, 6])
    assert not source.images.table._keyed


def test_the_key_without_its_index_is_a_column(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"DROP INDEX {KEY}")
    source = check_rows(path, images, list(range(40)), ["n", KEY])
    assert source.columns[KEY].to_pylist() == list(range(40))
    assert not source.images.table._keyed


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (None, "n * 2"),
        (None, "'row ' || n"),
        (f"CREATE INDEX {KEY} ON pictures ({KEY})", "n * 2"),
        (f"CREATE UNIQUE INDEX {KEY} ON pictures (n)", "n * 2"),
        (f"CREATE UNIQUE INDEX {KEY} ON pictures (n, {KEY})", "NULL"),
        (f"CREATE UNIQUE INDEX {KEY} ON pictures (n, {KEY})", "n * 2"),
        (f"CREATE UNIQUE INDEX another ON pictures ({KEY})", "n * 2"),
        (f"CREATE UNIQUE INDEX another ON pictures ({KEY})", "'row ' || n"),
        (f"CREATE TABLE more AS SELECT n AS {KEY} FROM pictures; CREATE UNIQUE INDEX {KEY} ON more ({KEY})", "n * 2"),
    ],
)
@pytest.mark.share(2, "index", "value")
def test_a_foreign_column_of_the_keys_name(fresh, keyed, index, value):
    images, path = keyed[1], fresh(".duckdb")
    with database(path) as connection:
        connection.execute(f"ATTACH '{keyed[0]}' AS ours (READ_ONLY)")
        connection.execute(f"CREATE TABLE pictures AS SELECT *, {value} AS {KEY} FROM ours.images")
        connection.execute("DETACH ours")
        connection.execute(index or "SELECT 1")
    source = check_rows(path, images, list(range(40)), ["n", KEY])
    assert not source.images.table._keyed


def test_a_column_of_the_keys_name_is_refused_where_rows_have_keys(fresh):
    images = images_of(MANY)
    with raises(MetadataError, mentions=KEY.upper()):
        write_images(images, fresh(".duckdb"), columns={KEY.upper(): range(40)})
    write_images(images, fresh(".duck.parquet"), columns={KEY: range(40)})


def test_a_second_table_called_images(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"CREATE SCHEMA other; CREATE TABLE other.another AS FROM {KEYED}")
    check_rows(path, images, list(range(40))).close()
    with database(path) as connection:
        connection.execute("CREATE TABLE other.images AS FROM other.another WHERE n < 5")
    listed = f"'main.{KEYED}', 'other.images'"
    with raises(ColumnError, option="table", path=path, mentions=(2, listed)):
        open_images(path)
    with raises(ColumnError, option="table", path=path, mentions=(2, listed)):
        open_images(path, table="images")
    assert [len(open_images(path, table=name)) for name in ("main.images", "other.images", KEYED)] == [40, 5, 40]


@pytest.fixture
def tables(tmp_path, stored):
    """A file of two image tables and another table, and the images of each."""
    fields, cells = images_of(MANY[:6]), images_of([((1, 2, 1, 4, 5), "uint16")] * 6)[::-1]
    path = tmp_path / "study.duckdb"
    with database(path) as connection:
        for name, images in (("fields", fields), ("single cells", cells)):
            connection.execute(f"ATTACH '{stored('duckdb', images, name.split()[-1])}' AS ours (READ_ONLY)")
            connection.execute(f'CREATE TABLE "{name}" AS FROM ours.images; DETACH ours')
        connection.execute("CREATE TABLE wells AS SELECT 'A01' AS well; CREATE VIEW seen AS FROM fields")
    return path, {"fields": fields, "single cells": cells}


def test_a_table_is_chosen_among_several(tables, tmp_path):
    path, images_of_tables = tables
    with raises(ColumnError, option="table", path=path, mentions=(2, "'main.fields', 'main.single cells'")):
        open_images(path)
    for wrong in ("wells", "seen", "none", ""):
        with raises(ColumnError, option="table", mentions=(f"'{wrong}'", "'main.fields'"), remedy=False):
            open_images(path, table=wrong)
    for name, images in images_of_tables.items():
        for table_name in (name, f"main.{name}", name.upper()):
            assert all_same(open_images(path, table=table_name).take(range(6)), images)
        source = open_images(path, table=name, nulls="skip", image_column=["ome_image"])
        assert all_same(pickle.loads(pickle.dumps(source)).take(range(6)), images)
        convert(path, tmp_path / "copy.parquet", table=name, overwrite=True)
        assert all_same(open_images(tmp_path / "copy.parquet").take(range(6)), images)
    with database(path) as connection:
        connection.execute("DROP VIEW seen; DROP TABLE fields")
    assert all_same(open_images(path).take(range(6)), images_of_tables["single cells"])


@pytest.mark.parametrize("preload", [True, False])
def test_samples_are_of_the_table_in_workers_and_in_a_cache(tables, tmp_path, preload):
    """Both tables have images of the same shape and dtype with the same column name."""
    path, images_of_tables = tables
    for _ in range(2):
        for name, images in images_of_tables.items():
            dataset = OMEArrowDataset(
                path, table=name, preload=preload, cache_dir=tmp_path / "cache" if preload else None, normalize=False
            )
            for workers in (0, 1):
                (batch,) = OMEArrowDataLoader(dataset, 6, num_workers=workers)
                assert same(batch.numpy(), np.stack([image[0, :, 0] for image in images]))
    assert not preload or len(list((tmp_path / "cache").glob("*.pixels"))) == 2


def test_tables_of_what_has_none(stored):
    for name, label in (("arrow", "Arrow IPC"), ("tiff", "OME-TIFF")):
        with raises(ArgumentError, option="table", mentions=("'images'", label)):
            open_images(stored(name, images_of(MANY[:1])), table="images")
    with raises(ArgumentError, option="table", mentions=1, remedy=False):
        open_images(stored("duckdb", images_of(MANY[:1])), table=1)


def test_an_index_that_is_cut_off(keyed):
    path, _ = keyed
    path.write_bytes(path.read_bytes()[:-8])
    with raises(FormatError, path=path, remedy=False):
        open_images(path)


def test_zstd_is_smaller_and_has_no_key(fresh):
    images = [np.zeros((100, 100), "uint16")] * 50
    paths = {compression: fresh(".duckdb") for compression in DUCKDB.writer.compressions}
    for compression, path in paths.items():
        write_images(np.add(images, np.arange(10000, dtype="uint16").reshape(100, 100)), path, compression=compression)
    assert paths["zstd"].stat().st_size < paths["none"].stat().st_size / 1.5
    assert not open_images(paths["zstd"]).images.table._keyed
    with database(paths["zstd"]) as connection:
        assert connection.sql("SHOW TABLES").fetchall() == [("images",)]


def test_large_metadata_leaves_the_memory_limit_of_images(tmp_path, monkeypatch):
    """Regression: DuckDB cached all images that were read after metadata that exceeded the limit."""
    images, path = images_of([((1, 1, 1, 4, 5), "uint8")] * 200), tmp_path / "images.duckdb"
    names = [str(number) * 50_000 for number in range(200)]
    write_images(images, path, metadata=[{"name": name} for name in names])
    monkeypatch.setattr(duckdb_format.DuckDBTable, "_working_bytes", lambda _: 2**23)
    source = open_images(path)
    assert source.metadata(7)["name"] == names[7]
    connection = source.images.table._connection.get()
    assert connection.sql("SELECT current_setting('memory_limit')").fetchall() == [("8.0 MiB",)]
    assert all_same(source.take([0, 199]), [images[0], images[199]])
