"""Collections in parts written to a real server: atomic, resumable, and published by one writer."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from omearrow_ds import (
    ArgumentError,
    FormatError,
    PathExistsError,
    Storage,
    StorageError,
    convert,
    open_images,
    write_crops,
    write_images,
)
from omearrow_ds.cli import main
from omearrow_ds.storage import parts_stores, remote
from omearrow_ds.storage import source as sources
from omearrow_ds.storage.formats._urls import url_of
from omearrow_ds.storage.parts_stores import BucketStore
from omearrow_ds.storage.parts_target import PartsTarget
from tests.support.errors import raises

COUNT, PLENTY = 17, 2**24
IMAGES = list(np.arange(COUNT * 240, dtype=np.uint16).reshape(COUNT, 1, 2, 1, 12, 10))
PART = {"part_bytes": 5 * 480}


@pytest.fixture
def plate(tmp_path):
    path = tmp_path / "plate.parquet"
    write_images(IMAGES, path, columns={"label": list(range(COUNT)), "well": ["A1", "B2"] * 8 + ["A1"]})
    return path


@pytest.fixture
def dst(bucket):
    return f"s3://{bucket}/x.parts"


@pytest.fixture
def read_labels(tmp_path):
    """Return a function that verifies every image of a collection and returns the image numbers in its order."""

    def look(url, **given):
        with open_images(url, verify=True, part_cache=tmp_path / "cache", part_cache_bytes=PLENTY, **given) as source:
            labels = source.columns["label"].to_pylist()
            for image, label in zip(source.take(range(len(source))), labels, strict=True):
                np.testing.assert_array_equal(image, IMAGES[label])
            assert source.image_ids == [f"image-{label:05d}" for label in labels]
        return labels

    return look


def left(weed, bucket):
    """Return the names below the URL, first those outside parts/, then those in it."""
    names = [name.removeprefix("x.parts/") for name in weed.names(bucket)]
    return [name for name in names if not name.startswith("parts/")], [n for n in names if n.startswith("parts/")]


@pytest.mark.parametrize("form", ["arrow", "parquet", "vortex", pytest.param("duckdb", marks=pytest.mark.slow)])
def test_a_plate_is_written_and_nothing_is_left_beside(weed, bucket, plate, dst, read_labels, tmp_path, form):
    convert(plate, dst, form, shuffle_seed=3, **PART)
    labels = read_labels(dst)
    assert sorted(labels) == list(range(COUNT)) != labels
    others, parts = left(weed, bucket)
    manifest = json.loads(weed.get(bucket, "x.parts/parts.json"))
    assert others == [f"index-{manifest['index']}.parquet", "parts.json"]
    assert parts == sorted(f"parts/{item['name']}" for item in manifest["parts"])
    convert(plate, tmp_path / "x.parts", form, shuffle_seed=3, **PART)
    local = json.loads((tmp_path / "x.parts/parts.json").read_text())
    assert {**local, "index_file": manifest["index_file"], "index": manifest["index"]} == manifest or form == "duckdb"
    assert "SECRET" not in json.dumps(manifest)
    with raises(PathExistsError, option="overwrite", path=dst):
        convert(plate, dst, form, **PART)


def test_a_copy_of_what_is_there_is_a_collection_of_this_machine(weed, bucket, plate, dst, tmp_path):
    convert(plate, dst, **PART)
    for name in weed.names(bucket):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(weed.get(bucket, name))
    with open_images(tmp_path / "x.parts", verify=True) as source:
        np.testing.assert_array_equal(np.stack(source.take(range(COUNT))), IMAGES)


def test_targets_that_cannot_be_are_refused_before_anything_is_sent(weed, bucket, plate, dst, tmp_path):
    for url, facts in {
        f"s3://{bucket}/x.parquet": (f"s3://{bucket}/x.parquet", f"s3://{bucket}/x.parts"),
        "http://host/x.parts": ("http://host/x.parts", "s3://", "gs://", "az://"),
        "s3://b/../x.parts": "s3://b/",
    }.items():
        with raises(ArgumentError, mentions=facts):
            convert(plate, url)
    with raises(ArgumentError, path=dst, mentions=("OME-Zarr", "parquet")):
        convert(plate, dst, "ome_zarr")
    with raises(ArgumentError, option="target_storage", path=tmp_path / "x.parts", mentions="URLs"):
        convert(plate, tmp_path / "x.parts", target_storage=Storage())
    with raises(ArgumentError, path=f"s3://{bucket}/x.arrow", mentions=f"s3://{bucket}/x.parts"):
        write_images(IMAGES, f"s3://{bucket}/x.arrow")
    convert(plate, dst, **PART)
    with raises(PathExistsError, path=dst):
        convert(dst, dst, part_cache=tmp_path / "cache", part_cache_bytes=PLENTY, overwrite=True)
    assert weed.names(bucket) == weed.names(bucket, "x.parts/")


def test_who_may_not_write_is_told(weed, plate, dst, bucket, monkeypatch):
    for variable, value in weed.keys("reader").items():
        monkeypatch.setenv(variable, value)
    with raises(StorageError, path=f"{dst}/jobs/plan.json", mentions=("AWS_ACCESS_KEY_ID", 403)):
        convert(plate, dst, **PART)
    with raises(StorageError, path=f"{dst}/parts.json", mentions=("anonymous", 403)):
        convert(plate, dst, target_storage=Storage(anonymous=True), **PART)
    assert weed.names(bucket) == []


def test_the_same_call_goes_on_and_another_one_is_refused(weed, bucket, plate, dst, read_labels, monkeypatch, tmp_path):
    real = PartsTarget.add

    def stopped(target, number, *arguments):
        if number == 2:
            raise KeyboardInterrupt
        return real(target, number, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PartsTarget, "add", stopped)
        with raises(KeyboardInterrupt, path=dst, mentions="2 of 4", remedy=False):
            convert(plate, dst, **PART)
    with raises(FormatError, path=dst, mentions="2 of 4", remedy=False):
        read_labels(dst)
    for other in ({"shuffle_seed": 1}, {"part_bytes": 480}, {"group_by": "well"}, {"compression": "zstd"}):
        with raises(PathExistsError, option=next(iter(other)), path=dst):
            convert(plate, dst, **PART | other)
    write_images(IMAGES[::-1], tmp_path / "other.parquet")
    with raises(PathExistsError, path=dst, mentions=("ids", "files")):
        convert(tmp_path / "other.parquet", dst, **PART)
    before = {name for name in weed.names(bucket) if "/parts/" in name}
    convert(plate, dst, **PART)
    assert read_labels(dst) == list(range(COUNT))
    assert before < set(weed.names(bucket))


def test_shares_are_made_one_by_one_and_published(weed, bucket, plate, dst, read_labels):
    for share in (2, 3):
        convert(plate, dst, task=(share, 3), **PART)
    with raises(FormatError, path=dst, mentions=("3 of 4", "part numbers: 1")):
        sources.publish(dst)
    convert(plate, dst, task=(1, 3), target_storage=Storage(endpoint=weed.url), **PART)
    weed.put(bucket, "x.parts/parts/00001-" + "a" * 32 + ".arrow", b"an orphan")
    weed.put(bucket, "x.parts/parts/notes.txt", b"of somebody else")
    sources.publish(dst, storage=Storage(endpoint=weed.url))
    assert read_labels(dst) == list(range(COUNT))
    assert [len(item) for item in left(weed, bucket)] == [2, 4 + 1]
    assert weed.get(bucket, "x.parts/parts/notes.txt") == b"of somebody else"
    with raises(PathExistsError, path=dst, remedy=False):
        sources.publish(dst)


def test_workers_of_a_pool_get_names_alone(weed, bucket, plate, dst, read_labels, tmp_path):
    context = multiprocessing.get_context("forkserver")  # Its environment is that of the first test that used it.
    set_environment = f"import os; os.environ.update({dict(os.environ)!r})"
    with ProcessPoolExecutor(1, context, exec, [set_environment]) as pool:
        convert(plate, dst, executor=pool, **PART)
        assert read_labels(dst) == list(range(COUNT))
        objects = pa.table(
            {"image_id": [f"image-{n:05d}" for n in range(COUNT)], "y": [6.0] * COUNT, "x": [5.0] * COUNT}
        )
        crops = f"s3://{bucket}/crops.parts"
        write_crops(plate, objects, crops, crop_size=(4, 4), center=("y", "x"), executor=pool, part_bytes=300)
    with open_images(crops, verify=True, part_cache=tmp_path / "cache", part_cache_bytes=PLENTY) as source:
        taken = np.stack(source.take(range(COUNT)))
        assert len(source.images.header.part_layout.starts) > 3
        corner = (f"source_bbox_{axis}_min" for axis in "yx")
        ((top, left),) = set(zip(*(source.columns[name].to_pylist() for name in corner), strict=True))
    np.testing.assert_array_equal(taken, np.stack(IMAGES)[..., top : top + 4, left : left + 4])
    assert b"SECRET" not in pickle.dumps(sources.parts_target(dst, Storage(endpoint=weed.url)))


def test_of_two_publishers_one_wins_and_the_other_is_told(weed, bucket, plate, dst, read_labels):
    convert(plate, dst, task=(1, 1), **PART)

    def end(_):
        try:
            return sources.publish(dst)
        except PathExistsError as error:
            return str(error)

    sources.parts_target(dst).store.read_files(["open the client first"])
    with ThreadPoolExecutor(4) as threads:
        output = list(threads.map(end, range(4)))
    assert output.count(None) == 1, output
    assert all("published" in item for item in output if item is not None)
    assert read_labels(dst) == list(range(COUNT))
    assert [len(item) for item in left(weed, bucket)] == [2, 4]


def test_what_is_replaced_stays_readable_until_then(weed, bucket, plate, dst, read_labels, tmp_path, monkeypatch):
    write_images(IMAGES[:7], tmp_path / "old.parquet", columns={"label": list(range(7))})
    convert(tmp_path / "old.parquet", dst, **PART)
    old = open_images(dst, part_cache=tmp_path / "old", part_cache_bytes=PLENTY)
    real = PartsTarget._write_manifest

    def looked_at(target, *arguments):
        assert read_labels(dst) == list(range(7))  # While all new parts already exist.
        return real(target, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PartsTarget, "_write_manifest", looked_at)
        convert(plate, dst, overwrite=True, **PART)
    assert read_labels(dst) == list(range(COUNT))
    assert [len(item) for item in left(weed, bucket)] == [2, 4]
    with old, raises(FormatError, path=dst):
        old.read(6)
    convert(plate, dst, overwrite=True, **PART)  # By an identical collection.
    assert read_labels(dst) == list(range(COUNT))


def test_replacing_that_was_ended_goes_on_only_if_it_is_asked_for(plate, dst, read_labels, tmp_path, monkeypatch):
    convert(plate, dst, **PART)
    convert(plate, dst, shuffle_seed=2, overwrite=True, task=(1, 2), **PART)
    assert read_labels(dst) == list(range(COUNT))
    with raises(PathExistsError, option="overwrite", path=dst):
        convert(plate, dst, shuffle_seed=2, **PART)
    convert(plate, dst, shuffle_seed=2, overwrite=True, **PART)
    assert read_labels(dst) != list(range(COUNT))


def test_a_second_attempt_at_a_part_leaves_no_second_version(weed, bucket, plate, dst, read_labels, monkeypatch):
    """An engine may run a task twice. DuckDB's files differ each time."""
    real, records = PartsTarget.add, []

    def twice(target, number, *arguments):
        records.append(real(target, number, *arguments))
        if len(records) == 1:
            convert(plate, dst, "duckdb", task=(2, 2), **PART)
        return records[-1]

    monkeypatch.setattr(PartsTarget, "add", twice)
    convert(plate, dst, "duckdb", **PART)
    assert read_labels(dst) == list(range(COUNT))
    assert [len(item) for item in left(weed, bucket)] == [2, 4]


def test_a_task_that_ends_after_publishing_leaves_nothing(weed, bucket, plate, dst, read_labels, monkeypatch):
    real, late = PartsTarget.add, []

    def later(target, number, path, failed):
        data, record = path.read_bytes(), real(target, number, path, failed)
        late.append((number, data, record.part.name))
        return record

    with monkeypatch.context() as patched:
        patched.setattr(PartsTarget, "add", later)
        convert(plate, dst, **PART)
    target = sources.parts_target(dst)
    for number, data, name in late[:2]:
        with target.store.temporary("late.arrow") as path:
            path.write_bytes(data)
            assert target.add(number, path, []).part.name == name
    assert read_labels(dst) == list(range(COUNT))
    assert left(weed, bucket)[0][1:] == ["parts.json"]


_ONE_BY_ONE = [pytest.param([kind], marks=pytest.mark.slow) for kind in ("503", "reset", "lost")]


@pytest.mark.parametrize("kinds", [["503", "reset", "lost", "cut"], *_ONE_BY_ONE], ids=",".join)
def test_three_in_ten_requests_that_fail_change_nothing(proxy, weed, bucket, plate, dst, read_labels, kinds):
    proxy.set(share=0.3, kinds=kinds, seed=4)
    convert(plate, dst, **PART)
    assert proxy.counts().failed.total() > 3
    proxy.set()
    assert read_labels(dst) == list(range(COUNT))
    assert [len(item) for item in left(weed, bucket)] == [2, 4]


def test_large_objects_are_sent_in_pieces_that_are_tried_again_alone(proxy, bucket, weed, tmp_path, monkeypatch):
    data = np.random.default_rng(0).bytes(2**24 + 2**23)
    monkeypatch.setattr(parts_stores, "_PIECE_BYTES", 5 * 2**20)
    (tmp_path / "large").write_bytes(data)
    proxy.set(share=0.3, kinds=("503", "reset"), seed=1)
    BucketStore(url_of(f"s3://{bucket}/x"), Storage()).put("large", tmp_path / "large")
    assert weed.get(bucket, "x/large") == data
    assert sum(times for name, times in proxy.counts().per_path.items() if "partNumber" in name) >= 5


def test_a_slow_link_that_goes_on_is_given_time(proxy, bucket, weed, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "READ_S", 1)
    monkeypatch.setattr(remote, "_SILENT_S", 4)
    monkeypatch.setitem(remote._RETRIES, "retry_timeout", timedelta(seconds=0.5))
    (tmp_path / "x").write_bytes(b"x" * 1000)
    writer = BucketStore(url_of(f"s3://{bucket}/x"), Storage())
    proxy.set(latency_s=3.0, methods=("PUT",))
    writer.put("x", tmp_path / "x")
    assert weed.get(bucket, "x/x") == b"x" * 1000
    proxy.set(share=1.0, kinds=("stall",))
    with raises(StorageError, path=f"s3://{bucket}/x/x", mentions="timed out"):
        writer.put("x", tmp_path / "x")


def test_on_the_command_line(weed, bucket, plate, dst, read_labels, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    reached = ("--endpoint", weed.url)

    def run(*words, code=0):
        done = CliRunner().invoke(main, [str(item) for item in words], prog_name="omearrow-ds")
        assert done.exit_code == code, done.output
        return done.output

    target = ("--part-bytes", 2400, "--target-endpoint", weed.url)
    output = run("convert", plate, dst, "--task", "1/2", *target)
    assert "2 of 4 parts are written; publish it after all parts are written" in output
    run("convert", plate, dst, "--task", "2/2", *target)
    assert "17 images" in run("publish", dst, *reached)
    assert read_labels(dst, storage=Storage(endpoint=weed.url)) == list(range(COUNT))
    assert "already exists" in run("convert", plate, dst, *target, code=1)
    assert "17 images" in run("convert", plate, dst, *target, "--overwrite", "--format", "vortex")
    assert "4 parts, the first: " in run("info", dst, *reached)
    assert "applies only to URLs" in run(
        "convert", plate, plate.with_suffix(".arrow"), "--target-endpoint", weed.url, code=1
    )


def test_a_name_is_no_url_whatever_is_in_it(weed, bucket, plate, read_labels):
    name = "50%25 of %41+b&c é.parts"
    convert(plate, f"s3://{bucket}/{name}", **PART)
    assert sorted(read_labels(f"s3://{bucket}/{name}")) == list(range(COUNT))
    assert json.loads(weed.get(bucket, f"{quote(name)}/parts.json"))["parts"]
