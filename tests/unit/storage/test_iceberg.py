"""Iceberg tables written by pyiceberg, read from the files of their newest snapshot."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import BackendError, FormatError, MissingPathError, open_images, write_images
from tests.support.errors import raises
from tests.support.sources import check

pytest.importorskip("pyiceberg", reason="pyiceberg is not installed: pip install 'omearrow-ds[iceberg]'")
pytest.importorskip("sqlalchemy", reason="pyiceberg's catalog, which only the test writes by, needs sqlalchemy")


def image(number: int) -> np.ndarray:
    return (np.arange(30, dtype=np.uint16) + 100 * number).reshape(1, 1, 1, 5, 6)


def wide(kind: pa.DataType) -> pa.DataType:
    """Return the type as Iceberg stores it: no null type, no 8-bit or 16-bit and no unsigned integers."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, wide(field.type)) for field in kind if not pa.types.is_null(field.type)])
    if pa.types.is_list(kind):
        return pa.list_(wide(kind.value_type))
    if pa.types.is_integer(kind):
        return pa.int64() if pa.types.is_int64(kind) or pa.types.is_uint32(kind) else pa.int32()
    return kind


def table_of(folder: Path, numbers: list[int]) -> pa.Table:
    path = folder / "written.parquet"
    ids = [f"id-{number}" for number in numbers]
    write_images([image(number) for number in numbers], path, image_ids=ids, columns={"n": numbers}, checksum=False)
    table = pq.read_table(path)
    path.unlink()
    rows = table.to_pylist()
    kinds = pa.schema([(field.name, wide(field.type)) for field in table.schema])
    for row in rows:
        row["ome_image"].pop("masks", None)
    return pa.Table.from_pylist(rows, kinds)


@pytest.fixture
def table(tmp_path: Path) -> Any:
    from pyiceberg.catalog.sql import SqlCatalog

    root = tmp_path / "warehouse"
    root.mkdir()
    catalog = SqlCatalog("test", uri="sqlite:///:memory:", warehouse=root.as_uri())
    catalog.create_namespace("images")
    first = table_of(tmp_path, [0, 1])
    created = catalog.create_table("images.crops", schema=first.schema)
    created.append(first)
    created.append(table_of(tmp_path, [2]))
    yield created
    catalog.close()


def folder_of(table: Any) -> Path:
    return Path(table.location().removeprefix("file://"))


def newest_of(folder: Path) -> Path:
    return max((folder / "metadata").glob("*.metadata.json"))


def test_a_table_is_read_by_its_folder_or_its_metadata(table: Any) -> None:
    folder = folder_of(table)
    newest = newest_of(folder)
    for path in (folder, newest):
        source = open_images(path)
        numbers = source.columns["n"].to_pylist()
        assert sorted(numbers) == [0, 1, 2]
        check(source, [image(number) for number in numbers], [2, 0, 1])
        assert list(source.image_ids) == [f"id-{number}" for number in numbers]
    earlier = open_images(sorted((folder / "metadata").glob("*.metadata.json"))[1])
    assert len(earlier) == 2
    (folder / "metadata" / "version-hint.text").write_text(newest.name.removesuffix(".metadata.json"))
    assert len(open_images(folder / "metadata")) == 3
    with raises(FormatError, path=folder, mentions="Iceberg"):
        open_images(folder.parent)


def test_files_of_old_snapshots_are_not_read(table: Any, tmp_path: Path) -> None:
    table.overwrite(table_of(tmp_path, [7]))
    folder = folder_of(table)
    assert open_images(folder).columns["n"].to_pylist() == [7]
    assert len(open_images(folder / "data")) == 4  # All files that were ever written.
    table.delete()
    with raises(FormatError, path=newest_of(folder), mentions="snapshot", remedy=False):
        open_images(folder)


def test_tables_that_cannot_be_told(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(table)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    with raises(FormatError, path=newest_of(copy), mentions=folder):
        open_images(copy)
    with table.update_schema() as update:
        update.rename_column("n", "number")
    newest = newest_of(folder)
    with raises(FormatError, path=newest) as caught:
        open_images(folder)
    assert re.search(r"'n(umber)?'", str(caught.value))
    shutil.copy(newest, newest.with_name(f"{newest.name[:5]}-other.metadata.json"))
    with raises(FormatError, path=folder, mentions=(newest.name, f"{newest.name[:5]}-other.metadata.json")):
        open_images(folder)
    (tmp_path / "x.metadata.json").write_text(json.dumps({"format-version": 2}))
    with raises(FormatError, path=tmp_path / "x.metadata.json", mentions="Iceberg", remedy=False):
        open_images(tmp_path / "x.metadata.json")
    with pytest.raises(MissingPathError):
        open_images(tmp_path / "none.metadata.json")
    monkeypatch.setitem(sys.modules, "pyiceberg.table", None)
    with raises(BackendError, path=newest, mentions=("'omearrow-ds[iceberg]'", folder / "data")):
        open_images(newest)


def test_deleted_rows_are_refused(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.table import DataScan

    planned = DataScan.plan_files

    def with_deletes(self: Any) -> Any:
        tasks = list(planned(self))
        tasks[0].delete_files.add(tasks[0].file)
        return tasks

    monkeypatch.setattr(DataScan, "plan_files", with_deletes)  # pyiceberg itself writes no delete files.
    with raises(FormatError, path=newest_of(folder_of(table))):
        open_images(folder_of(table))
