"""Parquet: leaf columns that are read, and whole chunks for unusual images."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import ArgumentError, FormatError, OMEArrowDataset, open_images
from omearrow_ds.codec import schema
from omearrow_ds.storage.formats import parquet
from tests.support.errors import raises
from tests.support.sources import all_read
from tests.support.strategies import MIXED, images_of

MANY = [((1, 2, 3, 7, 5), "uint16")] * 40
both = pytest.mark.parametrize("shapes", [MANY, MIXED], ids=["uniform", "ragged"])


@both
@pytest.mark.parametrize("encoding", ["bytes", "list"])
def test_parquet_reads_the_pixel_leaf_alone(stored, monkeypatch, shapes, encoding):
    images = images_of(shapes if encoding == "bytes" else MANY)
    source = open_images(stored("parquet", images, encoding=encoding), engine="pyarrow")
    read, paths = pq.ParquetFile.read_row_group, set()

    def noted(file, number, columns, **options):
        paths.update(columns)
        return read(file, number, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    assert all_read(source, images)
    assert len(paths) == 1
    assert ".pixel" in paths.pop()


def test_parquet_with_one_odd_image_reads_whole_chunks(stored, tmp_path):
    images = images_of(MANY)
    table = pq.read_table(stored("parquet", images))
    rows = table["ome_image"].to_pylist()
    rows[7]["chunks"] = rows[7]["chunks"][::-1]
    column = pa.array(rows, table.schema.field("ome_image").type)
    pq.write_table(pa.table({"ome_image": column}), tmp_path / "odd.parquet", row_group_size=16)
    assert all_read(open_images(tmp_path / "odd.parquet"), images)


def test_pixels_are_located_at_the_first_read(stored, monkeypatch):
    path, located = stored("parquet", images_of(MANY)), []
    find = parquet.ParquetTable._find_pixel_leaf
    monkeypatch.setattr(
        parquet.ParquetTable, "_find_pixel_leaf", lambda self, paths: located.append(1) or find(self, paths)
    )
    source = open_images(path)
    assert located == []
    assert all_read(source, images_of(MANY))
    assert located == [1]
    open_images(path, engine="pages").close()
    assert located == [1, 1]


def test_datasets_locate_pixels_before_workers_are_forked(stored):
    dataset = OMEArrowDataset(stored("parquet", images_of(MANY)), axes="TCZYX", preload=False)
    assert vars(dataset.source.images.table)["_located_leaf"].chunks


@pytest.mark.parametrize("method", ["_find_pixel_leaf", "read_later"])
def test_first_use_of_one_file_does_not_block_others(stored, monkeypatch, method):
    """A process that is forked meanwhile must not inherit a lock that no thread of it releases."""
    path, images = stored("parquet", images_of(MANY)), images_of(MANY)
    slow, other = open_images(path), open_images(path)
    begun, released, use = threading.Event(), threading.Event(), getattr(parquet.ParquetTable, method)

    def use_slowly(table, *options):
        if table is slow.images.table:
            begun.set()
            assert released.wait(60)
        return use(table, *options)

    def reads(source):
        return all_read(source, images) and source.metadata(0) == schema.normalize_metadata(None, 0, "")

    monkeypatch.setattr(parquet.ParquetTable, method, use_slowly)
    with ThreadPoolExecutor(2) as threads:
        try:
            reading = threads.submit(reads, slow)
            assert begun.wait(60)
            assert threads.submit(reads, other).result(60)
        finally:
            released.set()
        assert reading.result(60)


@pytest.mark.parametrize("names", [5, [], ["ome_image", "ome_image"], ["ome_image", 3]], ids=str)
def test_errors_of_image_columns_carry_the_path(stored, names):
    path = stored("parquet", images_of(MANY))
    with raises(ArgumentError, option="image_column") as caught:
        open_images(path, image_column=names)
    assert caught.value.path == str(path)


def test_errors_of_null_images_carry_the_path(tmp_path, stored):
    table = pq.read_table(stored("parquet", images_of(MANY)))
    rows = table["ome_image"].to_pylist()
    column = pa.array([None, *rows[1:]], table.schema.field("ome_image").type)
    pq.write_table(pa.table({"ome_image": column}), tmp_path / "null.parquet")
    with raises(FormatError, mentions=("null",)) as caught:
        open_images(tmp_path / "null.parquet")
    assert caught.value.path == str(tmp_path / "null.parquet")
