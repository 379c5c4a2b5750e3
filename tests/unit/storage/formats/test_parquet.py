"""Parquet: leaf columns that are read, and whole chunks for unusual images."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import open_images
from omearrow_ds.storage.formats import parquet
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
    find = parquet.Source._find_pixel_leaf
    monkeypatch.setattr(parquet.Source, "_find_pixel_leaf", lambda self, paths: located.append(1) or find(self, paths))
    source = open_images(path)
    assert located == []
    assert all_read(source, images_of(MANY))
    assert located == [1]
    open_images(path, engine="pages").close()
    assert located == [1, 1]
