"""Collections in parts by `convert`: planned, made, resumed, rejected and published."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import tempfile
import threading
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import tifffile
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.parts_figures import noisy_fields, worker_bytes
from omearrow_ds import (
    FORMATS,
    ArgumentError,
    ColumnError,
    FormatError,
    PathExistsError,
    WriteError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.cli import main
from omearrow_ds.storage import parts_stores, parts_target
from omearrow_ds.storage import source as sources
from omearrow_ds.storage.concat import Index
from omearrow_ds.storage.formats import default_part_bytes, get_format
from omearrow_ds.storage.jobs import PartitionOptions
from omearrow_ds.storage.manifest import Manifest
from omearrow_ds.storage.parts_stores import FolderStore
from omearrow_ds.storage.parts_target import PartsTarget
from tests.support.errors import raises, warns
from tests.support.sources import check

COUNT = 23
SHAPE = (1, 2, 1, 6, 5)
IMAGES = list(np.arange(COUNT * 60, dtype=np.uint16).reshape(COUNT, *SHAPE))
SIZE = IMAGES[0].nbytes
ORDER = [0, 3, 7, 5, 1, 2, 6, 4]
PLATES = ["p1"] * 9 + ["p2"] * 14


@pytest.fixture
def plate(tmp_path: Path) -> Path:
    """Images of two plates whose ids and columns encode the image number."""
    path = tmp_path / "plate.parquet"
    columns = {"Metadata_Plate": PLATES, "number": list(range(COUNT)), "well": [f"A{i // 4}" for i in range(COUNT)]}
    write_images(IMAGES, path, image_ids=[f"id-{i}" for i in range(COUNT)], columns=columns)
    return path


def checked_numbers(path: Path) -> list[int]:
    """Return the image numbers of a collection in order, after comparing all contents."""
    with open_images(path, verify=True) as source:
        numbers = source.columns["number"].to_pylist()
        assert list(source.image_ids) == [f"id-{i}" for i in numbers]
        check(source, [IMAGES[i] for i in numbers], [0, len(numbers) - 1, 0])
    assert sorted(file.name for file in path.iterdir() if file.name != "failed.csv") == [
        "index.parquet",
        "parts",
        "parts.json",
    ]
    return numbers


@st.composite
def materials(draw: st.DrawFn) -> SimpleNamespace:
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=40))
    shapes = np.array([(1, c, 1, 1, x) for c, x in sizes], np.int64).reshape(-1, 5)
    plates = draw(st.lists(st.sampled_from(["a", "b", None]), min_size=len(sizes), max_size=len(sizes)))
    wells = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    columns = pa.table({"Metadata_Plate": pa.array(plates, pa.string()), "well": pa.array(wells, pa.int64())})
    ids = [str(i) for i in range(len(sizes))]
    dtypes = [np.dtype(np.uint16)] * len(sizes)
    path = SimpleNamespace(path=Path("x"))
    return SimpleNamespace(index=Index([0, len(ids)], ids, shapes, dtypes, columns, None), source=path)


@settings(deadline=None)
@given(materials(), st.integers(1, 100), st.none() | st.integers(0, 9), st.sampled_from([None, "well"]))
def test_a_plan_has_every_image_once_in_parts_of_one_group_that_are_full(material, part_bytes, seed, group_by):
    options = PartitionOptions(part_bytes, seed, (group_by,) if group_by else ())
    parts = [part.tolist() for part in options.plan(material)]
    assert sorted(number for part in parts for number in part) == list(range(len(material.index.image_ids)))
    names = ["Metadata_Plate", *([group_by] if group_by else [])]
    keys = list(zip(*(material.index.columns[name].to_pylist() for name in names), strict=True))
    sizes = (material.index.shapes.prod(axis=1) * 2).tolist()
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        assert len({keys[i] for i in part}) <= 1
        assert len(part) <= 1 or sum(sizes[i] for i in part) <= part_bytes
        if after and keys[part[0]] == keys[after[0]]:
            assert sum(sizes[i] for i in [*part, after[0]]) > part_bytes
    in_order = [number for part in parts for number in part]
    assert list(dict.fromkeys(keys[i] for i in in_order)) == list(dict.fromkeys(keys))
    if seed is None:
        assert in_order == sorted(in_order, key=lambda i: (list(dict.fromkeys(keys)).index(keys[i]), i))
    assert [part.tolist() for part in options.plan(material)] == parts


def test_the_order_of_a_seed_is_the_same_with_every_release():
    shapes, dtypes = np.ones((8, 5), np.int64), [np.dtype(np.uint8)] * 8
    material = SimpleNamespace(index=Index([0, 8], list("abcdefgh"), shapes, dtypes, pa.table({}), None))
    assert np.concatenate(PartitionOptions(3, 0).plan(material)).tolist() == ORDER
    assert np.concatenate(PartitionOptions(3, 1).plan(material)).tolist() != ORDER


def test_parts_are_smaller_where_the_writer_of_a_format_holds_more_of_them(tmp_path, plate, monkeypatch):
    assert set(map(default_part_bytes, FORMATS)) == {2**26}
    vortex = get_format("vortex")
    greedy = replace(vortex, writer=replace(vortex.writer, memory_factor=6.0))
    assert 5 * default_part_bytes(greedy) <= 100e6 < 5 * 2 * default_part_bytes(greedy)
    monkeypatch.setattr("omearrow_ds.storage.writing.get_format", lambda name: greedy)
    for part_bytes, expected_bytes in ((None, 2**24), (2**25, 2**25)):
        convert(plate, tmp_path / "x.parts", "vortex", part_bytes=part_bytes, overwrite=True)
        assert Manifest.read(tmp_path / "x.parts").made["layout"]["part_bytes"] == expected_bytes


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["arrow", "lance", "vortex", "duckdb"])
def test_a_worker_takes_at_most_a_part_and_200_mb(format_name):
    part_bytes = default_part_bytes(get_format(format_name))
    with tempfile.TemporaryDirectory() as folder:  # On disk, as mapped files in a RAM disk count as memory.
        source = Path(folder, "fields.arrow")
        write_images(noisy_fields(3 * part_bytes), source)
        before, most = worker_bytes(source, Path(folder, "x.parts"), format_name, part_bytes)
    assert before < most <= part_bytes + 200e6


@pytest.mark.parametrize("format_name", [None, "parquet", "lance", "vortex", "duckdb", "tiff", "ome_zarr"])
@pytest.mark.share(3, "format_name")
def test_parts_of_every_format_hold_every_image_once(tmp_path, plate, format_name):
    dst = tmp_path / "x.parts"
    convert(plate, dst, format_name, part_bytes=5 * SIZE)
    assert checked_numbers(dst) == list(range(COUNT))
    with open_images(dst) as source:
        assert [len(source.images.parts.get(n)) for n in range(len(source.images.parts.paths))] == [5, 4, 5, 5, 4]
        assert source.format.name == format_name or format_name is None


def executors():
    yield "threads", lambda: ThreadPoolExecutor(3)
    yield "processes", lambda: ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver"))


@pytest.mark.parametrize(("name", "made_by"), list(executors()))
def test_an_executor_makes_the_same_parts_as_a_loop(tmp_path, plate, name, made_by):
    with made_by() as executor:
        convert(plate, tmp_path / "x.parts", part_bytes=3 * SIZE, shuffle_seed=1, executor=executor)
    convert(plate, tmp_path / "y.parts", part_bytes=3 * SIZE, shuffle_seed=1)
    assert checked_numbers(tmp_path / "x.parts") == checked_numbers(tmp_path / "y.parts") != list(range(COUNT))
    assert (tmp_path / "x.parts/parts.json").read_bytes() == (tmp_path / "y.parts/parts.json").read_bytes()


def test_shares_are_made_one_by_one_and_the_same_command_makes_what_is_missing(tmp_path, plate):
    dst = tmp_path / "x.parts"
    convert(plate, dst, part_bytes=5 * SIZE, task=(2, 3))
    inodes = {part.name: part.stat().st_ino for part in (dst / "parts").iterdir()}
    assert [name[:5] for name in sorted(inodes)] == ["00001", "00002"]
    with raises(FormatError, path=dst, mentions="2 of 5", remedy=False):
        open_images(dst)
    with raises(FormatError, path=dst, mentions=("2 of 5", "1, 4, 5"), remedy=False):
        sources.publish(dst)
    convert(plate, dst, part_bytes=5 * SIZE, task=(1, 3))
    cut_short = next((dst / "parts").glob("00002-*"))
    cut_short.write_bytes(cut_short.read_bytes()[:-8])
    (dst / "parts" / f"00004-{'0' * 32}.arrow").write_bytes(b"an orphan")
    convert(plate, dst, part_bytes=5 * SIZE)
    assert checked_numbers(dst) == list(range(COUNT))
    after = {part.name: part.stat().st_ino for part in (dst / "parts").iterdir()}
    assert len(after) == 5
    assert after[min(inodes)] == inodes[min(inodes)]
    with raises(PathExistsError, path=dst, remedy=False):
        sources.publish(dst)


def test_shares_by_threads_that_all_begin_at_once_make_one_collection(tmp_path, plate):
    dst = tmp_path / "x.parts"
    begin = threading.Barrier(6)

    def share(number):
        begin.wait(20)
        convert(plate, dst, part_bytes=2 * SIZE, task=(number // 2 + 1, 3))  # Each share twice.

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(share, range(6)))
    sources.publish(dst)
    assert checked_numbers(dst) == list(range(COUNT))


@pytest.mark.parametrize("check", ["_is_empty", "is_unfinished"])
def test_store_is_not_hidden_when_another_process_begins_the_collection_meanwhile(tmp_path, check, monkeypatch):
    real = getattr(parts_stores, check)

    def begin_after(path):
        result = real(path)
        (path / parts_stores.JOBS).mkdir(exist_ok=True)
        return result

    monkeypatch.setattr(parts_stores, check, begin_after)
    (tmp_path / "x.parts").mkdir()
    assert FolderStore(tmp_path / "x.parts").removal_hint == str(tmp_path / "x.parts")


def test_records_keeps_the_record_of_a_part_that_is_finished_meanwhile(tmp_path, plate, monkeypatch):
    dst, sizes, others = tmp_path / "x.parts", FolderStore.sizes, [2, 3]

    def finish_another_part(self, folder):
        sizes_bytes = sizes(self, folder)
        if others:
            convert(plate, dst, part_bytes=2 * SIZE, task=(others.pop(), 3))
        return sizes_bytes

    convert(plate, dst, part_bytes=2 * SIZE, task=(1, 3))
    monkeypatch.setattr(FolderStore, "sizes", finish_another_part)
    PartsTarget(FolderStore(dst), None).records()
    sources.publish(dst)
    assert checked_numbers(dst) == list(range(COUNT))


def test_of_several_publishers_at_once_one_publishes_and_the_others_are_told(tmp_path, plate):
    dst, begin = tmp_path / "x.parts", threading.Barrier(4)
    convert(plate, dst, part_bytes=2 * SIZE, task=(1, 1))

    def publish(_):
        begin.wait(20)
        try:
            sources.publish(dst)
        except PathExistsError as error:
            return str(error)
        return "published"

    with ThreadPoolExecutor(4) as threads:
        outcomes = sorted(threads.map(publish, range(4)))
    assert outcomes[0] != "published"
    assert all("published" in outcome for outcome in outcomes)
    assert outcomes.count("published") == 1
    assert checked_numbers(dst) == list(range(COUNT))


@pytest.mark.parametrize("format_name", ["arrow", "ome_zarr"])
def test_of_two_that_convert_to_one_target_at_once_the_later_one_is_told(tmp_path, plate, monkeypatch, format_name):
    """The other conversion ends while this one makes its third part."""
    dst, real, calls = tmp_path / "x.parts", PartsTarget.add, []

    def other_ends(target, number, *arguments):
        calls.append(number)
        if len(calls) == 3:
            convert(plate, dst, format_name, part_bytes=5 * SIZE)
        return real(target, number, *arguments)

    monkeypatch.setattr(PartsTarget, "add", other_ends)
    with raises(PathExistsError, path=dst, remedy=False):
        convert(plate, dst, format_name, part_bytes=5 * SIZE)
    assert checked_numbers(dst) == list(range(COUNT))


def test_a_collection_that_came_meanwhile_is_not_replaced(tmp_path, plate, monkeypatch):
    dst, real = tmp_path / "x.parts", PartitionOptions.plan

    def other_is_first(options, material):
        monkeypatch.setattr(PartitionOptions, "plan", real)
        convert(plate, dst, part_bytes=5 * SIZE)
        return real(options, material)

    monkeypatch.setattr(PartitionOptions, "plan", other_is_first)
    with raises(PathExistsError, option="overwrite", path=dst):
        convert(plate, dst, part_bytes=3 * SIZE, shuffle_seed=1)
    assert checked_numbers(dst) == list(range(COUNT))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plate.parquet", "x.parts"]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["plan.json", "00001.json", "parts.json", "index.parquet", "part index", "parts"])
@pytest.mark.share(2, "name")
def test_convert_continues_after_a_full_disk(tmp_path, plate, monkeypatch, name):
    dst, link, put = tmp_path / "x.parts", os.link, FolderStore.put
    with monkeypatch.context() as patch:
        if name in ("parts", "index.parquet"):
            patch.setattr(FolderStore, "put", lambda *args: (full if args[1].startswith(name) else put)(*args))
        elif name == "part index":
            patch.setattr(parts_target, "write_index", full)
        else:
            patch.setattr(os, "link", lambda old, new: (full if Path(new).name == name else link)(old, new))
        with raises(WriteError, path=dst, mentions="No space left on device", remedy=False):
            convert(plate, dst, part_bytes=5 * SIZE)
    assert not (dst / "parts.json").exists()
    assert not [file.name for file in (dst / "jobs").iterdir() if file.name[0] == "."]
    convert(plate, dst, part_bytes=5 * SIZE)
    assert checked_numbers(dst) == list(range(COUNT))


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"shuffle_seed": 1}, (0, 1)),
        ({"format": "parquet"}, ("'arrow'", "'parquet'")),
        ({"group_by": ["well"]}, ("[]", "['well']")),
        ({"part_bytes": SIZE}, (5 * SIZE, SIZE)),
        ({"checksum": False}, ("True", "False")),
        ({"rows_per_group": 2}, ("None", 2)),
        ({"compression": "chunk-zstd"}, ("'none'", "'chunk-zstd'")),
    ],
)
def test_other_options_for_parts_that_are_begun_are_refused(tmp_path, plate, changed, facts):
    dst = tmp_path / "x.parts"
    options = {"part_bytes": 5 * SIZE, "shuffle_seed": 0, "format": None}
    convert(plate, dst, task=(1, 2), **options)
    with raises(PathExistsError, option=next(iter(changed)), path=dst, mentions=facts):
        convert(plate, dst, **(options | changed))
    convert(plate, dst, **options)
    assert sorted(checked_numbers(dst)) == list(range(COUNT))


@pytest.mark.parametrize(("option", "value"), [("rows_per_group", 1), ("compression", "chunk-zstd")])
def test_convert_continues_with_the_option_that_its_refusal_names(tmp_path, plate, option, value):
    dst = tmp_path / "x.parts"
    convert(plate, dst, "parquet", part_bytes=5 * SIZE, task=(1, 2), **{option: value})
    with raises(PathExistsError, option=option, path=dst, mentions=repr(value)) as caught:
        convert(plate, dst, "parquet", part_bytes=5 * SIZE)
    assert "max_" not in str(caught.value)
    convert(plate, dst, "parquet", part_bytes=5 * SIZE, **{option: value})
    assert checked_numbers(dst) == list(range(COUNT))


@pytest.mark.parametrize(
    ("format_name", "layout"), [("parquet", {"max_rows": 7}), ("tiff", {"max_rows": 1, "max_bytes": 2**31 - 1})]
)
def test_parts_begun_with_defaults_of_another_version_are_refused(tmp_path, plate, format_name, layout):
    dst = tmp_path / "x.parts"
    convert(plate, dst, format_name, part_bytes=5 * SIZE, task=(1, 2))
    file = dst / "jobs/plan.json"
    plan = json.loads(file.read_text())
    plan["layout"] |= layout
    file.write_text(json.dumps(plan))
    with raises(PathExistsError, path=dst, mentions=("another version", "remove")) as caught:
        convert(plate, dst, format_name, part_bytes=5 * SIZE)
    assert not any(name in str(caught.value) for name in ("max_", "rows_per_group"))


def test_another_source_for_parts_that_are_begun_is_refused(tmp_path, plate):
    dst = tmp_path / "x.parts"
    convert(plate, dst, part_bytes=5 * SIZE, task=(1, 2))
    with open_images(plate) as source:
        columns = source.columns
    write_images(IMAGES, plate, image_ids=[f"id-{i}" for i in range(COUNT)], columns=columns, overwrite=True)
    with raises(PathExistsError, path=dst, mentions="files"):
        convert(plate, dst, part_bytes=5 * SIZE)
    write_images(IMAGES, plate, columns=columns, overwrite=True)
    with raises(PathExistsError, path=dst, mentions=("ids", "shapes")):
        convert(plate, dst, part_bytes=5 * SIZE)


def test_a_collection_is_there_until_the_one_that_replaces_it_is_whole(tmp_path, plate):
    dst = tmp_path / "x.parts"
    convert(plate, dst, part_bytes=5 * SIZE)
    with raises(PathExistsError, option="overwrite", path=dst):
        convert(plate, dst, part_bytes=5 * SIZE)
    options = {"part_bytes": 4 * SIZE, "shuffle_seed": 3, "overwrite": True}
    convert(plate, dst, task=(1, 2), **options)
    assert checked_numbers(dst) == list(range(COUNT))
    with raises(FormatError, path=dst, mentions="3 of 7", remedy=False):
        sources.publish(dst)
    convert(plate, dst, task=(2, 2), **options)
    assert checked_numbers(dst) == list(range(COUNT))
    sources.publish(dst)
    assert checked_numbers(dst) != list(range(COUNT))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plate.parquet", "x.parts"]


def test_a_second_attempt_at_a_part_leaves_no_second_version(tmp_path, plate, monkeypatch):
    """An engine may run a task twice. Lance names files at random, so the two results differ."""
    dst = tmp_path / "x.parts"
    records = []
    real = PartsTarget.add

    def twice(target, number, *arguments):
        records.append(real(target, number, *arguments))
        if len(records) == 1:
            convert(plate, dst, "lance", part_bytes=5 * SIZE, task=(2, 3))  # Parts 1 and 2, which are made again below.
        assert len(list((dst / "parts").glob(f"{number:05d}-*"))) == 1
        return records[-1]

    monkeypatch.setattr(PartsTarget, "add", twice)
    convert(plate, dst, "lance", part_bytes=5 * SIZE)
    assert checked_numbers(dst) == list(range(COUNT))
    assert len(records) == 7


def test_options_of_parts_and_targets_that_do_not_go_together_are_refused(tmp_path, plate):
    for name, value in {"part_bytes": 2**26, "shuffle_seed": 0, "group_by": "well", "on_error": "skip"}.items():
        with raises(ArgumentError, option=name, path=tmp_path / "x.arrow", mentions=".parts"):
            convert(plate, tmp_path / "x.arrow", **{name: value})
    for options in ({"part_bytes": 0}, {"part_bytes": 1.5}, {"shuffle_seed": -1}, {"task": (0, 3)}, {"task": (4, 3)}):
        with raises(ArgumentError, option=next(iter(options)), remedy=False):
            convert(plate, tmp_path / "x.parts", **options)
    with raises(ColumnError, option="group_by", path=plate, mentions=("'nothing'", "'well'"), remedy=False):
        convert(plate, tmp_path / "x.parts", group_by="nothing")
    with raises(ArgumentError, option="executor", mentions="Executor", remedy=False):
        convert(plate, tmp_path / "x.parts", executor=3)
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as forking,
        raises(ArgumentError, option="executor", mentions="spawn"),
    ):
        convert(plate, tmp_path / "x.parts", executor=forking)
    with raises(ArgumentError, path=tmp_path / "x.parts"):
        write_images(IMAGES, tmp_path / "x.parts")
    assert not (tmp_path / "x.parts").exists()


def test_a_collection_without_images_has_a_part_without(tmp_path):
    write_images([], tmp_path / "none.parquet", columns={"number": pa.array([], pa.int64())})
    convert(tmp_path / "none.parquet", tmp_path / "x.parts")
    with open_images(tmp_path / "x.parts") as source:
        assert len(source) == 0
        assert source.columns.schema == pa.schema([("number", pa.int64())])
        assert list(source.images.stream()) == []


def test_what_made_it_is_in_the_manifest_without_paths(tmp_path, plate):
    convert(plate, tmp_path / "x.parts", part_bytes=5 * SIZE, shuffle_seed=7, group_by=["well"])
    origin = json.loads((tmp_path / "x.parts/parts.json").read_text())["made"]
    assert origin["layout"]["shuffle_seed"] == 7
    assert origin["layout"]["group_by"] == ["well"]
    assert origin["source"]["images"] == COUNT
    assert str(tmp_path) not in json.dumps(origin)


def broken(folder: Path) -> Path:
    """Return a folder of TIFFs whose fifth and last are damaged."""
    for i, image in enumerate(IMAGES):
        tifffile.imwrite(folder / f"{PLATES[i]}_{i:02d}_1.tif", image[0, 0, 0])
        tifffile.imwrite(folder / f"{PLATES[i]}_{i:02d}_2.tif", image[0, 1, 0])
    (folder / "p1_04_2.tif").write_bytes(b"no image")
    (folder / "p2_22_1.tif").write_bytes((folder / "p2_22_1.tif").read_bytes()[:100])
    return folder


@pytest.mark.parametrize("seed", [None, 1])
def test_what_cannot_be_read_is_an_error_or_is_listed(tmp_path, seed):
    (tmp_path / "src").mkdir()
    src, dst = broken(tmp_path / "src"), tmp_path / "x.parts"
    options = {"pattern": "{plate}_{site}_{channel}.tif", "part_bytes": 5 * SIZE, "shuffle_seed": seed}
    with raises(FormatError, path=dst, mentions=("of 5", "on_error='skip'"), remedy=False) as caught:
        convert(src, dst, **options)
    assert any(name in str(caught.value) for name in ("p1_04_2", "p2_22_1"))
    with warns(UserWarning, path=dst, mentions=("2 images", dst / "failed.csv")):
        convert(src, dst, on_error="skip", **options)
    with open_images(dst) as source:
        images = {site: source.read(i) for i, site in enumerate(source.columns["Metadata_Site"].to_pylist())}
    assert sorted(map(int, images)) == [i for i in range(COUNT) if i not in (4, 22)]
    assert all(np.array_equal(image, IMAGES[int(site)]) for site, image in images.items())
    listed = pa.csv.read_csv(dst / "failed.csv").to_pylist()
    assert json.loads((dst / "parts.json").read_text())["failed"] == listed
    assert sorted((failure["id"], "p1_04_2" in failure["error"]) for failure in listed) == [
        ("p1_04", True),
        ("p2_22", False),
    ]


def test_a_source_of_which_nothing_can_be_read_makes_no_collection(tmp_path, plate):
    with open_images(plate) as source:
        checksums = ["xxh3-128:" + "0" * 32] * COUNT
        ids, columns = list(source.image_ids), source.columns
    table = pq.read_table(plate)
    column_index = table.column_names.index("omearrow_ds_checksum")
    pq.write_table(
        table.set_column(column_index, "omearrow_ds_checksum", pa.array(checksums)), tmp_path / "wrong.parquet"
    )
    with open_images(tmp_path / "wrong.parquet") as source:
        assert (list(source.image_ids), source.columns) == (ids, columns)
    with raises(FormatError, path=tmp_path / "x.parts", mentions=tmp_path / "wrong.parquet"):
        convert(tmp_path / "wrong.parquet", tmp_path / "x.parts", part_bytes=5 * SIZE, on_error="skip")
    assert not (tmp_path / "x.parts/parts.json").exists()


@pytest.mark.parametrize("name", ["lost", "raised"])
def test_an_executor_that_fails_is_told_of_and_what_is_made_stays(tmp_path, plate, monkeypatch, name):
    dst = tmp_path / "x.parts"
    futures = []

    class Failing(ThreadPoolExecutor):
        def submit(self, function, /, *words):
            future = super().submit(function, *words)
            futures.append(future)
            if len(futures) == 3:
                raise {"lost": BrokenExecutor("killed"), "raised": RuntimeError("gone")}[name]
            return future

    facts = {"lost": ("BrokenExecutor", "part_bytes="), "raised": ("part 3 of 12", "RuntimeError: gone")}[name]
    with Failing(1) as executor, raises(WriteError, path=dst, mentions=facts, remedy=False):
        convert(plate, dst, part_bytes=2 * SIZE, executor=executor)
    assert 1 <= len(list((dst / "jobs").glob("0*.json"))) <= 3
    convert(plate, dst, part_bytes=2 * SIZE)
    assert checked_numbers(dst) == list(range(COUNT))


def test_an_executor_whose_futures_cannot_be_cancelled_serves_too(tmp_path, plate):
    """Parsl has such futures."""

    class Kept(ThreadPoolExecutor):
        def submit(self, function, /, *words):
            future = super().submit(function, *words)
            future.cancel = unable
            return future

    def unable():
        raise NotImplementedError

    with Kept(2) as executor:
        convert(plate, tmp_path / "x.parts", part_bytes=5 * SIZE, executor=executor)
    assert checked_numbers(tmp_path / "x.parts") == list(range(COUNT))


def test_ctrl_c_says_how_far_it_is_and_the_same_command_goes_on(tmp_path, plate, monkeypatch):
    dst = tmp_path / "x.parts"
    real, calls = PartsTarget.add, []

    def stopped(target, number, *arguments):
        if number == 2 and not calls:
            calls.append(number)
            raise KeyboardInterrupt
        return real(target, number, *arguments)

    monkeypatch.setattr(PartsTarget, "add", stopped)
    with raises(KeyboardInterrupt, path=dst, mentions="2 of 5", remedy=False):
        convert(plate, dst, part_bytes=5 * SIZE)
    names = sorted(file.name for file in (dst / "jobs").iterdir() if file.suffix == ".json")
    assert names == ["00000.json", "00001.json", "plan.json"]
    with raises(FormatError, path=dst, mentions=["2 of 5", "run the same conversion again"]) as caught:
        open_images(dst)
    assert "publish" not in str(caught.value)
    convert(plate, dst, part_bytes=5 * SIZE)
    assert checked_numbers(dst) == list(range(COUNT))


def test_on_the_command_line(tmp_path, plate):
    dst = tmp_path / "x.parts"

    def run(*words, code=0):
        done = CliRunner().invoke(main, [str(item) for item in words], prog_name="omearrow-ds")
        assert done.exit_code == code, done.output
        return done.output

    options = ("--part-bytes", 5 * SIZE, "--shuffle-seed", 1, "--group-by", "well,number")
    assert "task 2 of 2" in run("convert", plate, dst, *options, "--task", "2/2")
    unfinished = "12 of 23 parts are written; run the same conversion again to continue, or its unfinished commands"
    assert f"{unfinished} with --task" in run("info", dst, code=1)
    assert "(missing part numbers: 1, 2, " in run("publish", dst, code=1)
    assert json.loads(run("convert", plate, dst, *options, "--task", "1/2", "--json"))["made"] == COUNT
    assert f"23 of 23 parts are written; run omearrow-ds publish {dst}" in run("info", dst, code=1)
    assert json.loads(run("publish", dst, "--json"))["written"]["images"] == COUNT
    assert checked_numbers(dst) == list(range(COUNT))
    assert "23 images as written" in run("verify", dst)
    run("convert", dst, tmp_path / "back.arrow", "--src-format", "arrow")
    with open_images(tmp_path / "back.arrow") as source:
        check(source, IMAGES, [3, 0])
    assert "--task 1/2: needs a target" in run("convert", plate, tmp_path / "y.arrow", "--task", "1/2", code=1)
    for wrong in (("--task", "3/2"), ("--task", "0/2"), ("--part-bytes", "many")):
        run("convert", plate, tmp_path / "y.parts", *wrong, code=2)
    for wrong in ("local", "local:0", "dask", "ray:3"):
        assert "write local:8" in run("convert", plate, tmp_path / "y.parts", "--executor", wrong, code=1)


@pytest.fixture
def same_environment():
    """Restore the environment: a cluster sets limits of memory and threads in it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("same_environment")
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["threads", "processes"])
def test_by_a_dask_cluster(tmp_path, plate, processes):
    distributed = pytest.importorskip("distributed")
    words = ["--part-bytes", str(5 * SIZE), "--shuffle-seed", "1"]
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=processes, protocol="tcp", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        convert(plate, tmp_path / "x.parts", part_bytes=5 * SIZE, shuffle_seed=1, executor=client.get_executor())
        (tmp_path / "scheduler.json").write_text(json.dumps({"address": cluster.scheduler_address}))
        for name, which in (("tcp", cluster.scheduler_address), ("file", tmp_path / "scheduler.json")):
            target = str(tmp_path / f"{name}.parts")
            done = CliRunner().invoke(main, ["convert", str(plate), target, *words, "--executor", f"dask:{which}"])
            assert done.exit_code == 0, done.output
    convert(plate, tmp_path / "y.parts", part_bytes=5 * SIZE, shuffle_seed=1)
    for name in ("x", "tcp", "file"):
        assert checked_numbers(tmp_path / f"{name}.parts") == checked_numbers(tmp_path / "y.parts")


@pytest.mark.parametrize(
    ("which", "told"),
    [
        ("tcp://127.0.0.1", "missing port"),
        ("node://here:1", "unknown address scheme"),
        ("absent.json", "no such file after 0.2 s"),
        (__file__, "not a scheduler file after 0.2 s"),
        ("list.json", "not a scheduler file"),
    ],
)
def test_a_dask_cluster_that_is_none_is_told_of_soon(tmp_path, plate, monkeypatch, which, told):
    pytest.importorskip("distributed")
    monkeypatch.setattr("omearrow_ds.cli.parts._CONNECT_S", 0.2)
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    done = CliRunner().invoke(main, ["convert", str(plate), "x.parts", "--executor", f"dask:{which}"])
    assert (done.exit_code, told in done.output) == (1, True), done.output
    assert not Path("x.parts").exists()


@pytest.mark.parametrize("task", [(1,), ("1", 3), (1, 3, 2), (0, 3), (4, 3), (True, 3), 1, "13"])
def test_convert_rejects_an_invalid_task_before_it_writes(plate, tmp_path, task):
    with raises(ArgumentError, option="task", mentions="(K, N)", remedy=False):
        convert(plate, tmp_path / "x.parts", task=task)
    assert not (tmp_path / "x.parts").exists()
