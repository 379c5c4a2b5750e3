"""Remote parts whose manifest has byte ranges of images: one verified request per image."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from omearrow_ds import ChecksumError, FormatError, Storage, convert, open_images, write_images
from omearrow_ds.storage.manifest import MANIFEST, Manifest
from omearrow_ds.storage.parts_target import find_byte_runs
from omearrow_ds.storage.source import open_source
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.sources import check

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
FORMATS = ["parquet", "arrow"]


@pytest.fixture
def images():
    return list(np.random.default_rng(0).integers(0, 2**16, (60, 2, 3, 1, 40, 50)).astype(np.uint16))


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served" / "lab").mkdir(parents=True)
    with serving(tmp_path / "served") as store:
        yield store


@pytest.fixture
def make_parts(server, images, tmp_path):
    """Return a function that makes a collection of 4 parts with several row groups or record batches each."""

    def make(fmt, **how):
        write_images(images, tmp_path / "a.arrow", axes="TCZYX", columns={"label": list(range(60))}, overwrite=True)
        path = server.folder / "lab" / "a.parts"
        convert(tmp_path / "a.arrow", path, fmt, part_bytes=15 * images[0].nbytes, overwrite=True, **how)
        return path

    return make


@pytest.fixture
def opened(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return partial(open_images, "s3://lab/a.parts", storage=Storage(anonymous=True, endpoint=server.url))


def places_of_parts(path):
    return [part.places for part in Manifest.read(path).parts]


def stands_at(run, number):
    time, index = divmod(number, run.images)
    return run.start + time * run.apart + index * run.step


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows_per_group", [None, 4])
def test_places_are_where_the_bytes_of_the_images_are(make_parts, images, fmt, rows_per_group):
    path = make_parts(fmt, **({"rows_per_group": rows_per_group} if rows_per_group else {}))
    manifest = Manifest.read(path)
    assert len(manifest.parts) == 4
    number = 0
    for part in manifest.parts:
        data = (path / "parts" / part.name).read_bytes()
        for run in part.places:
            for which in range(run.images * run.times):
                plane_bytes = images[number].nbytes // run.pieces
                start = stands_at(run, which)
                pieces = [start + piece * (plane_bytes + run.gap) for piece in range(run.pieces)]
                assert b"".join(data[offset : offset + plane_bytes] for offset in pieces) == images[number].tobytes()
                number += 1
    assert number == len(images)


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_image_is_one_request_of_its_own_bytes(server, make_parts, opened, images, fmt):
    make_parts(fmt, rows_per_group=4)
    with opened() as source:
        assert server.requests.total() == 2
        for index in (0, 59, 31, 30, 16):
            server.requests.clear()
            server.sent_bytes.clear()
            np.testing.assert_array_equal(source.read(index), images[index])
            assert server.requests.total() == 1
            assert server.sent_bytes.total() <= 1.01 * images[index].nbytes
        server.requests.clear()
        np.testing.assert_array_equal(source.read(7, (3, 20, 5, 9), [1]), images[7][:, 1:2, :, 3:20, 5:9])
        assert server.requests.total() == 1
        check(source, images, [59, 0, 3, 3, -12, 22])
        local = open_images(server.folder / "lab/a.parts")
        assert source.metadata(7) == local.metadata(7)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_was_put_in_a_parts_place_is_told_by_checksums_and_sizes(make_parts, opened, images, fmt):
    path = make_parts(fmt)
    part = path / "parts" / Manifest.read(path).parts[0].name
    data = bytearray(part.read_bytes())
    with opened() as source:
        np.testing.assert_array_equal(source.read(2), images[2])
        offset = stands_at(places_of_parts(path)[0][0], 2)
        data[offset] ^= 1
        part.write_bytes(data)
        with raises(ChecksumError, path=f"s3://lab/a.parts/parts/{part.name}", mentions="image 2"):
            source.read(2)
        part.write_bytes(data[:-1])
        with raises(
            FormatError, path=f"s3://lab/a.parts/parts/{part.name}", mentions=(f"{len(data) - 1:,}", f"{len(data):,}")
        ):
            source.read(2)
        np.testing.assert_array_equal(source.read(59), images[59])


@pytest.mark.parametrize(
    "damage",
    [
        {"start": -1},
        {"start": 2**70},
        {"images": 3},
        {"step": 10**9},
        {"pieces": 0},
        {"pieces": 7},
        {"gap": -4},
        {"pieces": 2, "gap": 2**40},
        {"step": 1},
    ],
)
def test_places_that_cannot_be_are_errors(make_parts, opened, damage):
    path = make_parts("arrow")
    manifest = json.loads((path / MANIFEST).read_text())
    (run,) = places_of_parts(path)[0]
    manifest["parts"][0]["places"] = [list(run._replace(**damage))]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with opened() as source, raises(FormatError, mentions="image 14"):
        source.read(14)


@pytest.mark.parametrize(
    ("fmt", "how"),
    [
        ("arrow", {"compression": "zstd"}),
        ("arrow", {"compression": "chunk-zstd"}),
        ("arrow", {"checksum": False}),
        ("parquet", {"encoding": "list"}),
        ("parquet", {"compression": "chunk-lz4"}),
    ],
)
def test_what_does_not_stand_as_in_memory_has_no_place_and_is_read_all_the_same(make_parts, opened, images, fmt, how):
    assert places_of_parts(make_parts(fmt, **how)) == [()] * 4
    with opened() as source:
        check(source, images, [59, 0, 3])


def test_compressed_parts_are_cached_only_by_the_hash_of_their_bytes(make_parts, opened, images, tmp_path):
    manifest = Manifest.read(make_parts("arrow", compression="zstd"))
    with opened() as source:
        np.testing.assert_array_equal(source.read(59), images[59])
    cached = {file.name for file in (tmp_path / "home" / "omearrow_ds" / "parts").iterdir()}
    assert cached == {".lock", f"00000-{manifest.index}.index.parquet", manifest.parts[3].name}


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float64"])
def test_dtypes_and_sizes_of_one(make_parts, opened, server, tmp_path, dtype):
    images = list(np.arange(24 * 35).astype(dtype).reshape(24, 1, 1, 1, 5, 7))
    write_images(images, tmp_path / "b.arrow", axes="TCZYX")
    convert(tmp_path / "b.arrow", server.folder / "lab/a.parts", "parquet", part_bytes=5 * images[0].nbytes)
    assert all(places_of_parts(server.folder / "lab/a.parts"))
    with opened() as source:
        check(source, images, [23, 0, 4, 5])


def test_images_of_many_sizes_and_odd_pieces_have_no_place(tmp_path):
    write_images([np.zeros((4, 5), np.uint8), np.zeros((4, 6), np.uint8)], tmp_path / "a.arrow")
    assert find_byte_runs(open_source(tmp_path / "a.arrow")) == []
    write_images([], tmp_path / "none.arrow")
    assert find_byte_runs(open_source(tmp_path / "none.arrow")) == []
    many = [np.full((8, 8), number, np.uint8) for number in range(200)]
    write_images(many, tmp_path / "b.parquet", rows_per_group=1, columns={"text": ["x" * n for n in range(200)]})
    assert (
        find_byte_runs(open_source(tmp_path / "b.parquet")) == []
    )  # One run per image is more than the manifest may hold.
