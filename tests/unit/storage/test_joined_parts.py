"""Files of other writers opened as one: a folder, a glob pattern, a list."""

from __future__ import annotations

import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.feather as pf
import pyarrow.parquet as pq
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    DecodeError,
    FormatError,
    ImageColumnError,
    MissingPathError,
    OMEArrowDataset,
    PathExistsError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.advise.recommend.choices import unused_path_near
from omearrow_ds.storage.concat import Parts
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._base import name_stems
from tests.support.errors import raises
from tests.support.sources import check

SUFFIXES = (
    "parquet",
    "arrow",
    "lance",
    *(pytest.param(suffix, marks=pytest.mark.slow) for suffix in ("vortex", "duckdb")),
)


def image(number: int) -> np.ndarray:
    return (np.arange(30, dtype=np.uint16) + 100 * number).reshape(1, 1, 1, 5, 6)


def put(path: Path, numbers: list[int], ids: list[str] | None = None, **how: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_images([image(number) for number in numbers], path, image_ids=ids, **how)
    return path


def values(path: object, name: str, **how: object) -> list[object]:
    return open_images(path, **how).columns[name].to_pylist()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_a_glob_and_a_list_are_one_collection(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip({"arrow": "pyarrow", "parquet": "pyarrow"}.get(suffix, suffix))
    paths = [
        put(tmp_path / "p" / f"part-{n}.{suffix}", [2 * n, 2 * n + 1], columns={"n": [2 * n, 2 * n + 1]})
        for n in (10, 2, 1)
    ]
    images = [image(number) for number in (2, 3, 4, 5, 20, 21)]
    for collection in (
        tmp_path / "p" / f"part-*.{suffix}",
        paths[::-1],
        *([] if suffix == "lance" else [tmp_path / "p"]),
    ):
        with open_images(collection) as source:
            check(source, images, [5, 0, 0, -6, 3])
            assert source.columns["n"].to_pylist() == [2, 3, 4, 5, 20, 21]
            assert source.image_ids[-1] == "part-10/image-00001"
            assert source.rows.tolist() == list(range(6))
        check(pickle.loads(pickle.dumps(source)), images, [1, 4])
        again = np.stack([np.asarray(sample) for sample in OMEArrowDataset(collection, normalize=False)])
        np.testing.assert_array_equal(again[:, 0], np.stack(images)[:, 0, 0, 0])
    assert values(paths, "n") == [20, 21, 4, 5, 2, 3]


def test_ids_stay_where_they_are_distinct(tmp_path: Path) -> None:
    put(tmp_path / "b" / "x.arrow", [0], ["x/y"])
    put(tmp_path / "a.arrow", [1], ["y"])
    assert list(open_images(tmp_path).image_ids) == ["y", "x/y"]
    put(tmp_path / "b" / "z.arrow", [2], ["y"])
    source = open_images(tmp_path)
    assert list(source.image_ids) == ["a/y", "b/x/x/y", "b/z/y"]
    assert name_stems(source.images, 2) == ["b/z/y", "y"]


def test_keys_of_folders_are_columns_as_pyarrow_has_them(tmp_path: Path) -> None:
    names = (
        "plate=BR1/site=10",
        "plate=BR1/site=9",
        "plate=__HIVE_DEFAULT_PARTITION__/site=-3",
        "plate=a%2Fb%20c/site=4",
    )
    for number, name in enumerate(names):
        put(tmp_path / name / "x.parquet", [number], [str(number)])
    source = open_images(tmp_path)
    oracle = ds.dataset(tmp_path, format="parquet", partitioning="hive").to_table(
        columns=["plate", "site", "ome_image"]
    )
    order = [int(record["id"]) for record in oracle["ome_image"].to_pylist()]
    columns_in_order = source.columns.take([list(source.image_ids).index(str(number)) for number in order])
    assert columns_in_order["plate"].to_pylist() == oracle["plate"].to_pylist()
    assert columns_in_order["site"].to_pylist() == oracle["site"].to_pylist()
    assert columns_in_order["site"].type == pa.int64()
    assert values(str(tmp_path / "plate=BR1" / "**" / "*.parquet"), "plate") == ["BR1", "BR1"]
    put(tmp_path / "plate=BR2" / "site=007" / "x.parquet", [9], ["9"])
    assert set(values(tmp_path, "site")) == {"10", "9", "-3", "4", "007"}


def test_a_column_must_be_what_its_folder_says(tmp_path: Path) -> None:
    file = put(tmp_path / "well=A1" / "x.parquet", [0, 1], columns={"well": ["A1", "A1"]})
    assert values(tmp_path, "well") == ["A1", "A1"]
    put(tmp_path / "well=A2" / "x.parquet", [0, 1], columns={"well": ["A2", None]})
    with raises(ColumnError, path=tmp_path / "well=A2" / "x.parquet", mentions=("'well'", "'A2'")):
        open_images(tmp_path)
    assert values(file, "well") == ["A1", "A1"]


def test_columns_are_joined_by_name_and_no_value_changes(tmp_path: Path) -> None:
    put(tmp_path / "1.parquet", [0], columns={"a": pa.array([1], pa.int32()), "b": ["x"]})
    put(tmp_path / "2.parquet", [1], columns={"c": [0.5], "a": pa.array([2**40])}, checksum=False)
    put(tmp_path / "3.parquet", [2])
    source = open_images(tmp_path)
    assert source.columns.to_pydict() == {"a": [1, 2**40, None], "b": ["x", None, None], "c": [None, 0.5, None]}
    assert [checksum is None for checksum in source.images.header.columns.checksums.to_pylist()] == [False, True, False]
    put(tmp_path / "4.parquet", [3], columns={"a": [0.25]})
    assert values(tmp_path, "a") == [1.0, 2.0**40, None, 0.25]
    put(tmp_path / "5.parquet", [4], columns={"a": [2**53 + 1]})  # No float64 equals this number.
    with raises(ColumnError, mentions=("'a'", "double", tmp_path / "4.parquet", "int64", tmp_path / "5.parquet")):
        open_images(tmp_path)
    for name, first, second in (("t", ["x"], [b"x"]), ("n", ["1"], [1])):
        two = [
            put(tmp_path / name / f"{n}.arrow", [n], columns={"v": value}) for n, value in enumerate((first, second))
        ]
        with raises(ColumnError, mentions=("'v'", "string", two[0], two[1])):
            open_images(two)


def test_null_images_leave_gaps_in_the_rows_of_all_parts(tmp_path: Path) -> None:
    for number in range(3):
        table = pq.read_table(put(tmp_path / "x.parquet", [number, number + 10, number + 20], checksum=False))
        mask = pa.array([False, True, True])
        images = table["ome_image"].combine_chunks()
        images = pa.StructArray.from_arrays(images.flatten(), fields=list(images.type), mask=mask)
        (tmp_path / "p").mkdir(exist_ok=True)
        pq.write_table(pa.table({"ome_image": images, "n": [0, 1, 2]}), tmp_path / "p" / f"{number}.parquet")
        (tmp_path / "x.parquet").unlink()
    with raises(FormatError, path=tmp_path / "p" / "0.parquet", mentions=(2, 3, "nulls='skip'")):
        open_images(tmp_path / "p")
    source = open_images(tmp_path / "p", nulls="skip")
    assert source.rows.tolist() == [0, 3, 6]
    check(source, [image(0), image(1), image(2)], [2, 0])


def test_several_image_columns(tmp_path: Path) -> None:
    for number in range(2):
        column = pq.read_table(put(tmp_path / "x.parquet", [number], checksum=False))["ome_image"]
        (tmp_path / "x.parquet").unlink()
        pq.write_table(pa.table({"dna": column, "er": column}), tmp_path / f"{number}.parquet")
    with raises(ImageColumnError, option="image_column"):
        open_images(tmp_path)
    source = open_images(tmp_path, image_column=["er", "dna"])
    assert source.shapes[:, 1].tolist() == [2, 2]
    (counted, _) = open_images(tmp_path, image_column="er").images.details.image_columns()
    assert (counted.name, counted.images) == ("dna", 2)
    pq.write_table(pq.read_table(tmp_path / "1.parquet").select(["er"]), tmp_path / "2.parquet")
    pq.write_table(pq.read_table(tmp_path / "1.parquet").select(["dna"]), tmp_path / "3.parquet")
    with raises(ColumnError, option="image_column", mentions=(tmp_path / "2.parquet", tmp_path / "3.parquet")):
        open_images([tmp_path / "2.parquet", tmp_path / "3.parquet"])


def test_what_is_beside_the_parts(tmp_path: Path) -> None:
    put(tmp_path / "a.parquet", [0])
    for name in ("_SUCCESS", "_metadata", ".a.parquet.crc", "README.md"):
        (tmp_path / name).write_bytes(b"x")
    put(tmp_path / "_temporary" / "b.parquet", [1])
    pq.write_table(pa.table({"feature": [1.0]}), tmp_path / "features.parquet")
    for collection in (tmp_path, str(tmp_path / "*.parquet")):
        assert len(open_images(collection)) == 1
    with raises(ColumnError, path=tmp_path / "features.parquet", mentions="OME-Arrow", remedy=False):
        open_images(sorted(tmp_path.glob("*.parquet")))
    put(tmp_path / "c.arrow", [2])
    with raises(FormatError, option="format", path=tmp_path, mentions=("1 Parquet collection", "a.parquet", "c.arrow")):
        open_images(tmp_path)
    (tmp_path / "c.arrow").unlink()
    (tmp_path / "thumb.png").write_bytes(b"\x89PNG")
    with raises(FormatError, option="format", path=tmp_path, mentions=("1 PNG image", "'parquet'")):
        open_images(tmp_path)
    assert len(open_images(tmp_path, "parquet")) == 1
    (tmp_path / "thumb.png").unlink()
    (tmp_path / "_delta_log").mkdir()
    with raises(FormatError, path=tmp_path, mentions="Delta"):
        open_images(tmp_path)


def feathers(folder: Path, compression: str) -> list[Path]:
    """Write files of two images each, as pyarrow writes Feather, with polars' names."""
    paths = [folder / "b.feather", folder / "c.FEATHER", folder / "a.ipc"]
    for first, path in zip((2, 4, 0), paths, strict=True):
        with pa.ipc.open_file(put(folder.parent / f"{first}.arrow", [first, first + 1], [f"i{first}", "j"])) as file:
            pf.write_feather(file.read_all(), path, compression=compression)
    return paths


@pytest.mark.parametrize("compression", ["lz4", "uncompressed"])
def test_feather_files_are_arrow_ipc(tmp_path: Path, compression: str) -> None:
    (tmp_path / "p").mkdir()
    paths = feathers(tmp_path / "p", compression)
    pf.write_feather(pa.table({"feature": [1.0]}), tmp_path / "p" / "features.feather")
    (tmp_path / "p" / "old.feather").write_bytes(b"FEA1 and more of it")
    with open_images(tmp_path / "p") as source:
        assert source.format.name == "arrow"
        check(source, [image(number) for number in range(6)], [5, 0, 3])
    check(open_images(paths), [image(number) for number in (2, 3, 4, 5, 0, 1)], [1, 4])
    check(open_images(tmp_path / "p" / "*.ipc"), [image(0), image(1)], [1, 0])
    check(open_images(paths[1]), [image(4), image(5)], [1, 0])
    convert(paths[1], tmp_path / "again.feather")
    assert pf.read_table(tmp_path / "again.feather").num_rows == 2
    check(open_images(tmp_path / "again.feather"), [image(4), image(5)], [1, 0])
    with raises(FormatError, path=tmp_path / "p" / "old.feather", remedy=False):
        open_images(tmp_path / "p" / "old.feather")


def test_features_lie_beside_images_as_feather_too(tmp_path: Path) -> None:
    put(tmp_path / "images", [0, 1], format="tiff")
    (tmp_path / "images" / "columns.parquet").unlink()
    pf.write_feather(pa.table({"feature": [1.0]}), tmp_path / "images" / "features.feather")
    check(open_images(tmp_path / "images"), [image(0), image(1)], [1, 0])


def test_folders_that_are_no_parts(tmp_path: Path) -> None:
    put(tmp_path / "p" / "a.parquet", [0])
    put(tmp_path / "p" / "tiffs", [1], format="tiff")
    with raises(FormatError, option="format", path=tmp_path / "p", mentions=("Parquet", "OME-TIFF")):
        open_images(tmp_path / "p")
    put(tmp_path / "loop" / "sub" / "a.parquet", [0])
    (tmp_path / "loop" / "sub" / "back").symlink_to(tmp_path / "loop")
    with raises(FormatError, path=tmp_path / "loop" / "sub" / "back"):
        open_images(tmp_path / "loop")
    (tmp_path / "half.parts" / "parts").mkdir(parents=True)
    with raises(FormatError, path=tmp_path / "half.parts", mentions="parts.json"):
        open_images(tmp_path / "half.parts")
    with raises(FormatError, path=tmp_path / "half.parts"):
        open_images(tmp_path)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    file = put(tmp_path / "[1].parquet", [0])
    assert len(open_images(file)) == 1  # An existing path is not a glob pattern.
    with raises(MissingPathError, path=tmp_path / "*.arrow", remedy=False):
        open_images(tmp_path / "*.arrow")
    with raises(MissingPathError, path=tmp_path / "gone.parquet", remedy=False):
        open_images([file, tmp_path / "gone.parquet"])
    with raises(ArgumentError, mentions="paths"):
        open_images([])
    with raises(FormatError, path=file):
        open_images([file, str(file)])
    with raises(ArgumentError, mentions=3):
        open_images(3)
    with raises(FormatError, mentions=(file, "Parquet", tmp_path / "x.arrow", "Arrow IPC")):
        open_images([file, put(tmp_path / "x.arrow", [0])])


def test_a_list_of_folders_and_of_other_kinds(tmp_path: Path) -> None:
    for plate in ("plate2", "plate10"):
        put(tmp_path / plate / "a.parquet", [0, 1])
        put(tmp_path / f"{plate}.zarr", [2, 3], ["x", "y"])
    assert open_images(tmp_path / "plate*[0-9]").image_ids[0] == "plate2/a/image-00000"
    pytest.importorskip("zarr")
    source = open_images(str(tmp_path / "*.zarr"))
    check(source, [image(2), image(3)] * 2, [3, 0])


def test_a_part_that_was_replaced_is_refused(tmp_path: Path) -> None:
    paths = [put(tmp_path / f"{n}.parquet", [n]) for n in range(3)]
    source = open_images(tmp_path)
    write_images([image(7)], paths[1], overwrite=True)
    np.testing.assert_array_equal(source.read(2), image(2))
    with raises(FormatError, path=paths[1]):
        source.read(1)
    np.testing.assert_array_equal(open_images(tmp_path).read(1), image(7))


def test_what_is_written_replaces_no_part_and_becomes_none(tmp_path: Path) -> None:
    part = put(tmp_path / "p" / "a.parquet", [0, 1])
    put(tmp_path / "p" / "b.parquet", [2])
    for collection in (tmp_path / "p", tmp_path / "p" / "*.parquet", [part]):
        with raises(PathExistsError, path=part):
            convert(collection, part, overwrite=True)
    with raises(PathExistsError, path=tmp_path / "p" / "all.parquet"):
        convert(tmp_path / "p", tmp_path / "p" / "all.parquet")
    convert(tmp_path / "p", tmp_path / "all.arrow")
    check(open_images(tmp_path / "all.arrow"), [image(0), image(1), image(2)], [2, 0])


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_few_descriptors_are_held_while_views_of_many_parts_live(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_parts = 8
    monkeypatch.setattr(Parts, "max_open", open_parts)
    count = 3 * open_parts
    for number in range(count):
        put(tmp_path / f"{number}.{suffix}", [number])

    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_descriptors()
    source = open_images(tmp_path)
    assert num_descriptors() <= before
    views = source.images.read(range(count))
    windows = source.images.read(range(count), [[0] * 5 + [1] * 5] * count)
    assert num_descriptors() - before <= 2 * open_parts
    for index in (*range(0, count, 7), *range(count)):
        np.testing.assert_array_equal(views[index], image(index))
        np.testing.assert_array_equal(windows[index].ravel(), [100 * index])
        np.testing.assert_array_equal(source.read(index), image(index))
    assert num_descriptors() - before <= 2 * open_parts


@settings(deadline=None, max_examples=25)
@drawn(st.data())
def test_any_parts_are_what_they_were_written_of(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    starts = np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        put(folder / f"{number}.arrow", list(range(starts[number], starts[number] + size)))
    source = open_images(folder)
    assert len(source) == starts[-1]
    if len(source):
        requests = data.draw(st.lists(st.integers(-len(source), len(source) - 1), max_size=8))
        for index, results in zip(requests, source.take(requests), strict=True):
            np.testing.assert_array_equal(results, image(index % len(source)))
    observed = [index for start, images in source.images.stream() for index in range(start, start + len(images))]
    assert observed == list(range(len(source)))


def test_target_of_recommend_is_next_to_the_folder(tmp_path: Path) -> None:
    put(tmp_path / "plate" / "a.parquet", [0])
    for path in (tmp_path / "plate", tmp_path / "plate" / "*.parquet"):
        assert unused_path_near(path, ".arrow") == tmp_path / "plate.arrow"


def test_pixels_of_a_part_are_told_when_it_is_read(tmp_path: Path) -> None:
    for number in range(40):
        put(tmp_path / f"{number}.parquet", [2 * number, 2 * number + 1], checksum=False)
    column = pq.read_table(tmp_path / "7.parquet")["ome_image"].combine_chunks()
    rows = column.to_pylist()
    rows[1]["chunks"][0]["pixel_bytes"] = rows[1]["chunks"][0]["pixel_bytes"][:-2]
    pq.write_table(pa.table({"ome_image": pa.array(rows, column.type)}), tmp_path / "7.parquet")
    rows = pq.read_table(tmp_path / "9.parquet")["ome_image"].to_pylist()
    for row in rows:
        row["chunk_grid"] = {**(row["chunk_grid"] or {}), "chunk_order": "XYZ"}
    pq.write_table(pa.table({"ome_image": pa.array(rows, column.type)}), tmp_path / "9.parquet")
    source = open_images(tmp_path)
    good = [index for index in range(80) if index not in (15, 18, 19)]
    for index, pixels in zip(good, source.take(good), strict=True):
        np.testing.assert_array_equal(pixels, image(index))
    with raises(DecodeError, path=tmp_path / "7.parquet", mentions="image 1", remedy=False):
        source.read(15)
    with raises(DecodeError, path=tmp_path / "9.parquet", mentions=("image 1", "chunk_order"), remedy=False):
        source.read(19)
    for number in (30, 20):  # The error names the first damaged file in order.
        (tmp_path / f"{number}.parquet").write_bytes(b"PAR1")
    with raises(FormatError, path=tmp_path / "20.parquet", remedy=False):
        open_images(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "vortex"])
def test_a_part_is_looked_at_without_its_pixels(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"parquet": "pyarrow"}.get(suffix, suffix))
    for number in range(3):
        put(tmp_path / f"{number}.{suffix}", [number])
    located = []
    module = get_format(suffix).module()
    of_format = module.ParquetTable if suffix == "parquet" else module.VortexTable
    name = "_find_pixel_leaf" if suffix == "parquet" else "_find_leaf"
    find = getattr(of_format, name)
    monkeypatch.setattr(
        of_format, name, lambda self, *arguments: located.append(self.path.name) or find(self, *arguments)
    )
    source = open_images(tmp_path)
    assert located == []
    np.testing.assert_array_equal(source.read(1), image(1))
    assert located == [f"1.{suffix}"]
    open_images(tmp_path / f"0.{suffix}").read(0)
    assert located[1:] == [f"0.{suffix}"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "vortex"])
def test_what_is_told_of_all_parts_at_once_is_what_each_tells(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip({"arrow": "pyarrow", "parquet": "pyarrow"}.get(suffix, suffix))
    dtypes = ["uint16", "float32", "uint8", "uint16", "int16", "uint16", "uint16"]
    for number, dtype in enumerate(dtypes):
        images = [np.full((number + 1, 3 + index), 7 * number + index, dtype) for index in range(1 + number % 3)]
        how = {"columns": {"n": list(range(len(images))), **({"text": ["a"] * len(images)} if number == 4 else {})}}
        encoding = "list" if dtype == "uint8" else "bytes"
        write_images(images, tmp_path / f"{number}.{suffix}", encoding=encoding, checksum=number != 5, **how)
    source, checksums = open_images(tmp_path), []
    for number, first in enumerate(source.images.parts.starts[:-1]):
        with open_images(tmp_path / f"{number}.{suffix}") as part:
            rows = slice(first, source.images.parts.starts[number + 1])
            np.testing.assert_array_equal(source.shapes[rows], part.shapes)
            assert list(source.dtypes[rows]) == list(part.dtypes)
            assert list(source.image_ids[rows]) == [f"{number}/{name}" for name in part.image_ids]
            part_columns = source.columns.slice(first, len(part)).select(part.columns.column_names)
            assert part_columns.to_pydict() == part.columns.to_pydict()
            checksums += (
                [None] * len(part)
                if part.images.header.columns.checksums is None
                else part.images.header.columns.checksums.to_pylist()
            )
            check(part, source.take(range(first, source.images.parts.starts[number + 1])), range(len(part)))
    assert source.images.header.columns.checksums.to_pylist() == checksums
    assert None in checksums


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "vortex"])
def test_ids_and_impossible_images_of_parts_are_those_of_their_files(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip({"arrow": "pyarrow", "parquet": "pyarrow"}.get(suffix, suffix))
    column = pq.read_table(put(tmp_path / "one.parquet", [0, 1], checksum=False))["ome_image"]
    for number in range(4):
        rows = column.to_pylist()
        for row, id_ in zip(rows, (None, f"cell-{number}"), strict=True):
            row["id"] = id_
        write_others(tmp_path / "p" / f"{number}.{suffix}", pa.table({"ome_image": pa.array(rows, column.type)}))
    assert open_images(tmp_path / "p").image_ids[:4] == ["0/0", "0/cell-0", "1/0", "1/cell-1"]
    rows[1]["pixels_meta"]["size_x"] = 0
    write_others(tmp_path / "p" / f"2.{suffix}", pa.table({"ome_image": pa.array(rows, column.type)}))
    with raises(
        FormatError, path=tmp_path / "p" / f"2.{suffix}", mentions=("image 1", "[1, 1, 1, 5, 0]"), remedy=False
    ):
        open_images(tmp_path / "p")


def write_others(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        import vortex as vx

        vx.io.write(vx.Array.from_arrow(table), str(path))


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "vortex", "tiffs"])
def test_too_many_open_files_are_no_damage(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip({"vortex": "vortex"}.get(suffix, "pyarrow"))
    path, (soft, hard) = put(tmp_path / f"a.{suffix}", [1]), resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_images(path) as source:  # Import lazily loaded modules before the limit.
        assert source.read(0).tolist() == image(1).tolist()
    spare = os.open("/", os.O_RDONLY)
    os.close(spare)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        with raises(FormatError, path=path, mentions=("ulimit -n", spare)):
            open_images(path).read(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_collections_without_images_keep_their_columns(tmp_path):
    """Regression: an empty table of columns was taken for none."""
    path = tmp_path / "a.parquet"
    write_images([], path, columns=pa.table({"well": pa.array([], pa.string())}))
    with open_images([path]) as source:
        assert (len(source), source.column_names, source.column("well").to_pylist()) == (0, ["well"], [])
