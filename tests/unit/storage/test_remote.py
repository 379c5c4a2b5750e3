"""Remote collections in parts: the pixels of the local folder, and one fetch per part despite failures."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from omearrow_ds import (
    ArgumentError,
    FormatError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    Storage,
    StorageError,
    WriteError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.dataset import preload
from omearrow_ds.storage import part_cache, remote, remote_parts
from omearrow_ds.storage.describe import describe
from omearrow_ds.storage.formats._urls import Url, url_of
from omearrow_ds.storage.manifest import MANIFEST, PARTS
from omearrow_ds.storage.part_cache import PartCache
from omearrow_ds.storage.source import publish as publish_parts
from tests.adversarial.golden.archive import GOLDEN, unpack
from tests.adversarial.golden.content import UNIFORM
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.parts import publish
from tests.support.sources import check

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
SIZES = [5, 1, 4, 4, 3]
PLENTY = 2**24
_CHILD = """
import sys
from omearrow_ds import open_images
source = open_images(sys.argv[1], part_cache=sys.argv[2], part_cache_bytes=2**24)
print("open", flush=True)
print([int(image.sum()) for image in source.take(range(17))], flush=True)
"""


@pytest.fixture
def images():
    return list(np.arange(17 * 240, dtype=np.uint16).reshape(17, 1, 2, 1, 12, 10))


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as store:
        yield store


@pytest.fixture
def url(server, images):
    publish(server.folder / "a.parts", images, SIZES)
    return f"{server.url}/a.parts"


@pytest.fixture
def opened(url, tmp_path):
    return partial(open_images, url, part_cache=tmp_path / "cache", part_cache_bytes=PLENTY)


def in_cache(tmp_path):
    return sorted(file.name for file in (tmp_path / "cache").iterdir() if file.name != ".lock")


@pytest.mark.parametrize("suffix", ["arrow", "parquet", "vortex", pytest.param("duckdb", marks=pytest.mark.slow)])
def test_images_are_those_of_the_local_folder(server, images, tmp_path, suffix):
    publish(server.folder / "plate.parts", images, [5, 1, 11], suffix)
    path = f"{server.url}/plate.parts"
    with open_images(path, part_cache=tmp_path / "cache", part_cache_bytes=PLENTY) as source:
        assert sorted(server.requests.values()) == [1, 1]  # For any number of parts.
        assert str(source.path) == path
        check(source, images, [16, 3, 3, -12, 5, 0])
        assert source.metadata(7)["name"] == open_images(server.folder / "plate.parts").metadata(7)["name"]
        assert source.columns["label"].to_pylist() == list(range(17))
    assert set(server.requests.values()) == {1}
    assert str(pickle.loads(pickle.dumps(source)).path) == path


def test_all_that_takes_a_path_takes_a_url(server, url, tmp_path, images):
    cache_options = {"part_cache": tmp_path / "cache", "part_cache_bytes": PLENTY}
    loaded = OMEArrowDataset(url, normalize=False, **cache_options)
    demanded = OMEArrowDataset(url, normalize=False, preload=False, target="label", **cache_options)
    for index in (0, 16, 5):
        np.testing.assert_array_equal(loaded[index].numpy()[:, None], images[index][0])
        np.testing.assert_array_equal(demanded[index][0].numpy()[:, None], images[index][0])
    convert(url, tmp_path / "copy.arrow", **cache_options)
    with open_images(tmp_path / "copy.arrow", verify=True) as copy:
        check(copy, images, [3, 1])
    description = describe(url, **cache_options)
    assert description.path == url
    assert description.sizes.disk_files == len(SIZES) + 2
    assert server.requests.most_common(1)[0][0].endswith(MANIFEST)  # Once per open.
    assert all(times == 1 for path, times in server.requests.items() if f"/{PARTS}/" in path)


def test_workers_share_what_is_fetched_once(server, url, tmp_path, images):
    dataset = OMEArrowDataset(
        url, preload=False, normalize=False, part_cache=tmp_path / "cache", part_cache_bytes=PLENTY
    )
    loader = OMEArrowDataLoader(dataset, batch_size=4, num_workers=2)
    np.testing.assert_array_equal(np.concatenate([batch.numpy() for batch in loader])[:, None, :, None], images)
    assert all(times == 1 for path, times in server.requests.items() if f"/{PARTS}/" in path)


class _Bar:
    """A progress bar that only counts."""

    def __init__(self, **options):
        self.options, self.count, self.steps = options, 0, 0
        bars.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def update(self, count):
        self.count, self.steps = self.count + count, self.steps + 1


bars: list[_Bar] = []


@pytest.mark.parametrize("target", [0, 3])
def test_preloading_shows_the_bytes_that_have_come(server, url, tmp_path, images, monkeypatch, target):
    passed = {"part_cache": tmp_path / "cache", "part_cache_bytes": PLENTY}
    with open_images(url, **passed) as source:
        source.take(range(sum(SIZES[:target])))
    monkeypatch.setattr(preload, "_ThreadlessBar", _Bar)
    monkeypatch.setattr(remote, "_CHUNK_BYTES", 100)
    bars.clear()
    server.faults = 0.3  # Bytes that are fetched twice count once.
    dataset = OMEArrowDataset(url, progress=True, normalize=False, **passed)
    np.testing.assert_array_equal(dataset[16].numpy()[:, None], images[16][0])
    (bar,) = bars
    total = sum(item.stat().st_size for item in (server.folder / "a.parts" / PARTS).iterdir())
    assert (bar.count, bar.total, bar.unit, bar.closed) == (total, total, "B", True)
    assert bar.options["desc"] == "preloading a.parts"
    assert bar.steps > 2 * (len(SIZES) - target)
    for quiet in ({"progress": False}, {}):  # No bar without a terminal either.
        OMEArrowDataset(url, **quiet, **passed)
    assert len(bars) == 1


def _loaded(url, tmp_path, shuffle, workers=0, limit_bytes=PLENTY, batch_size=1):
    cache_options = {"part_cache": tmp_path / "cache", "part_cache_bytes": limit_bytes}
    dataset = OMEArrowDataset(url, preload=False, normalize=False, **cache_options)
    return OMEArrowDataLoader(dataset, batch_size=batch_size, num_workers=workers, shuffle=shuffle)


def test_parts_are_fetched_ahead_in_the_order_of_the_loader(server, tmp_path):
    images = list(np.arange(12 * 240, dtype=np.uint16).reshape(12, 1, 2, 1, 12, 10))
    publish(server.folder / "a.parts", images, [1] * 12)
    loader = _loaded(f"{server.url}/a.parts", tmp_path, shuffle=False)
    assert "prefetched" in loader.settings["sampler"].why
    batches = iter(loader)
    next(batches)
    until_s = time.monotonic() + 30
    while len(cached := [name for name in in_cache(tmp_path) if not name.startswith(".")]) < 6:
        assert time.monotonic() < until_s, cached
    names = sorted(part.name for part in (server.folder / "a.parts" / PARTS).iterdir())
    assert [name for name in cached if name in names] == names[:5]  # The part being read, and four more.
    assert len(list(batches)) == 11
    assert all(times == 1 for path, times in server.requests.items() if f"/{PARTS}/" in path)


@pytest.mark.parametrize(("workers", "batch_size"), [(0, 1), (0, 8), (2, 8)])
def test_an_epoch_asks_for_each_part_once(server, url, tmp_path, images, workers, batch_size):
    loader = _loaded(url, tmp_path, shuffle=True, workers=workers, batch_size=batch_size)
    for _ in range(2):
        taken = np.concatenate([batch.numpy() for batch in loader])
        assert sorted(taken[:, 0, 0, 0].tolist()) == [int(image.flat[0]) for image in images]
    assert sum(times for path, times in server.requests.items() if f"/{PARTS}/" in path) == len(SIZES)


def test_the_first_batch_of_permuted_images_waits_for_one_part(server, tmp_path, monkeypatch):
    images = list((np.arange(200 * 240) % 65521).astype(np.uint16).reshape(200, 1, 2, 1, 12, 10))
    write_images(images, tmp_path / "a.arrow")
    convert(tmp_path / "a.arrow", server.folder / "a.parts", part_bytes=40 * 480, shuffle_seed=0)
    loader = _loaded(f"{server.url}/a.parts", tmp_path, shuffle=True, batch_size=4)
    assert "the first batch waits for 1 of them" in loader.settings["sampler"].why
    released = threading.Event()
    real_answering = server.answering
    monkeypatch.setattr(
        server, "answering", lambda path: real_answering(path) or (f"/{PARTS}/" in path and released.wait(30))
    )
    threading.Thread(target=lambda: time.sleep(0.5) or released.set()).start()
    batches = iter(loader)
    assert sum(f"/{PARTS}/" in path for path in server.requests) <= 1  # The first part has the bandwidth to itself.
    batches_of_epoch = [next(batches)]
    released.set()
    batches_of_epoch += batches
    firsts = sorted(int(image.flat[0]) for image in images)
    assert sorted(np.concatenate([batch.numpy() for batch in batches_of_epoch])[:, 0, 0, 0].tolist()) == firsts
    assert all(times == 1 for path, times in server.requests.items() if f"/{PARTS}/" in path)


@pytest.mark.parametrize("faults", [0.0, 0.3])
def test_large_parts_are_fetched_in_ranges(server, url, opened, tmp_path, images, monkeypatch, faults):
    monkeypatch.setattr(remote_parts, "RANGED_BYTES", 2**12)
    monkeypatch.setattr(remote_parts, "_RANGE_BYTES", 1000)
    server.faults = faults
    with opened() as source:
        np.testing.assert_array_equal(np.stack(source.take(range(17))), images)
    for part in (server.folder / "a.parts" / PARTS).iterdir():
        ranges = -(-part.stat().st_size // 1000) if part.stat().st_size > 2**12 else 1
        assert faults or server.requests[f"/a.parts/{PARTS}/{part.name}"] == ranges > 1
        assert (tmp_path / "cache" / part.name).read_bytes() == part.read_bytes()


def test_a_range_that_is_wrong_or_missing_is_an_error_and_leaves_nothing(server, url, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_parts, "RANGED_BYTES", 2**12)
    monkeypatch.setattr(remote_parts, "_RANGE_BYTES", 1000)
    first, *_, last = sorted((server.folder / "a.parts" / PARTS).iterdir())
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    last.unlink()
    with opened() as source:
        with raises(FormatError, path=first.name):
            source.read(0)
        with raises(MissingPathError, path=last.name):
            source.read(16)
        assert not [item for item in in_cache(tmp_path) if first.name in item or last.name in item]
    assert not [item for item in threading.enumerate() if "range" in item.name]


def test_what_the_disk_may_have_lost_is_compared_after_the_system_started(server, url, opened, tmp_path, monkeypatch):
    with opened() as source:
        whole = source.read(0), source.read(16)
    part, other = (tmp_path / "cache" / source.images.parts.manifest.parts[number].name for number in (0, 4))
    part.write_bytes(bytes(part.stat().st_size))  # A file system may leave zeros after a crash.
    os.utime(part, (0, part_cache._this_start_s()))
    monkeypatch.setattr(part_cache, "_this_start_s", lambda: 1234567890)
    requests = dict(server.requests)
    with opened() as source:
        np.testing.assert_array_equal(source.read(0), whole[0])
        np.testing.assert_array_equal(source.read(16), whole[1])
    assert server.requests[f"/a.parts/{PARTS}/{part.name}"] == 2
    assert server.requests[f"/a.parts/{PARTS}/{other.name}"] == requests[f"/a.parts/{PARTS}/{other.name}"] == 1
    read = []
    monkeypatch.setattr(part_cache, "part_hash", read.append)
    with opened() as source:
        source.read(0), source.read(16)
    assert not read  # Parts are compared once.


@pytest.mark.parametrize(("version", "digits"), [(1, 32), (2, 64)])
def test_parts_of_each_version_are_compared_with_the_hash_that_they_are_named_by(
    server, tmp_path, monkeypatch, version, digits
):
    unpack(GOLDEN / f"manifest-{version}" / "parts-arrow.zip", server.folder)
    opened = partial(open_images, f"{server.url}/images.parts", part_cache=tmp_path / "cache", part_cache_bytes=PLENTY)
    with opened() as source:
        assert [len(part.hash) for part in source.images.parts.manifest.parts] == [digits] * 3
        for image, expected in zip(source.take(range(5)), UNIFORM.images, strict=True):
            np.testing.assert_array_equal(image, expected)
    names = [part.name for part in source.images.parts.manifest.parts]
    lost = tmp_path / "cache" / names[0]
    lost.write_bytes(bytes(lost.stat().st_size))
    os.utime(lost, (0, part_cache._this_start_s()))
    monkeypatch.setattr(part_cache, "_this_start_s", lambda: 1234567890)
    with opened() as source:
        np.testing.assert_array_equal(source.read(0), UNIFORM.images[0])
    requests = [server.requests[f"/images.parts/{PARTS}/{name}"] for name in names]
    assert requests == [2, 1, 1]
    folder = server.folder / "images.parts" / PARTS / names[1]
    damaged = bytearray(folder.read_bytes())
    damaged[5000] ^= 1
    folder.write_bytes(damaged)
    (tmp_path / "cache" / names[1]).unlink()
    with opened() as source, raises(FormatError, path=names[1]):
        source.read(2)


def test_a_share_without_samples_has_no_parts(url, tmp_path):
    sampler = _loaded(url, tmp_path, shuffle=True).sampler
    sampler.consumed = sampler.samples
    assert list(sampler) == []


def test_parts_that_are_drawn_together_are_fetched_together(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_parts, "MAX_AHEAD", 1)
    images = list(np.arange(16 * 240, dtype=np.uint16).reshape(16, 1, 2, 1, 12, 10))
    publish(server.folder / "a.parts", images, [1] * 16)
    loader = _loaded(f"{server.url}/a.parts", tmp_path, shuffle=False, batch_size=16)
    server.latency_s = 1.0
    began_s = time.monotonic()
    np.testing.assert_array_equal(next(iter(loader)).numpy()[:, None, :, None], images)
    assert time.monotonic() - began_s < 6  # At least 8 s with one prefetching thread.


def test_requests_that_fail_ahead_are_told_where_the_part_is_read(server, url, tmp_path):
    loader = _loaded(url, tmp_path, shuffle=False)
    last = max((server.folder / "a.parts" / PARTS).iterdir())
    last.write_bytes(last.read_bytes()[::-1])
    batches = iter(loader)
    for _ in range(sum(SIZES[:-1])):
        next(batches)
    with raises(FormatError, path=last.name):
        next(batches)


def test_a_cache_too_small_for_what_is_shuffled_together_is_refused(server, url, tmp_path, images):
    sizes = [part.stat().st_size for part in (server.folder / "a.parts" / PARTS).iterdir()]
    index_bytes = (server.folder / "a.parts" / "index.parquet").stat().st_size
    needed = index_bytes + len(SIZES) * max(sizes)
    with raises(ArgumentError, option="part_cache_bytes", mentions=f"{needed:,}"):
        _loaded(url, tmp_path, shuffle=True, limit_bytes=needed - 1)
    for shuffle, limit_bytes in [(True, needed), (False, needed - 3 * max(sizes))]:
        assert len(list(_loaded(url, tmp_path, shuffle=shuffle, limit_bytes=limit_bytes))) == len(images)


@pytest.mark.parametrize(("seed", "window"), [(None, 14), (3, 4)])
def test_parts_that_were_shuffled_are_shuffled_over_fewer(server, tmp_path, images, seed, window):
    write_images(images, tmp_path / "a.arrow")
    convert(tmp_path / "a.arrow", server.folder / "b.parts", part_bytes=2**14, shuffle_seed=seed)
    with open_images(f"{server.url}/b.parts", part_cache=tmp_path / "cache", part_cache_bytes=PLENTY) as source:
        assert source.images.header.part_layout.window == window
        assert source.images.header.part_layout.mixed == (seed is not None)


def test_an_epoch_begins_with_one_part_only_where_each_is_a_sample_of_all(server, tmp_path, images):
    plates = ["P1"] * 8 + ["P2"] * 9
    write_images(images, tmp_path / "a.arrow", columns={"Metadata_Plate": plates, "well": plates})
    convert(tmp_path / "a.arrow", server.folder / "b.parts", part_bytes=2**11, shuffle_seed=0)
    options = {"part_cache": tmp_path / "cache", "part_cache_bytes": PLENTY}
    with open_images(f"{server.url}/b.parts", **options) as source:
        assert source.images.header.part_layout[2:] == (4, False)
    write_images(images, tmp_path / "c.arrow", columns={"Metadata_Plate": ["P1"] * 17, "well": plates})
    for name, group_by in [("c", None), ("d", "well")]:
        target = server.folder / f"{name}.parts"
        convert(tmp_path / "c.arrow", target, part_bytes=2**11, shuffle_seed=0, group_by=group_by)
        with open_images(f"{server.url}/{name}.parts", **options) as source:
            assert source.images.header.part_layout[2:] == (4, group_by is None)


def test_processes_share_what_is_fetched_once(programs, server, url, tmp_path, images):
    server.latency_s = 0.05
    children = [programs.start(_CHILD, url, tmp_path / "cache") for _ in range(2)]
    outputs = [child.wait().stdout for child in children]
    assert outputs == [f"open\n{[int(image.sum()) for image in images]}\n"] * 2
    assert all(times == 1 for path, times in server.requests.items() if f"/{PARTS}/" in path)


def test_the_oldest_goes_where_the_limit_is_reached(server, url, tmp_path, images):
    sizes = [part.stat().st_size for part in (server.folder / "a.parts" / PARTS).iterdir()]
    index_bytes = (server.folder / "a.parts" / "index.parquet").stat().st_size
    fewest = index_bytes + 2 * max(sizes)
    cache_options = {"part_cache": tmp_path / "cache"}
    with raises(ArgumentError, option="part_cache_bytes", mentions=f"{fewest:,}"):
        open_images(url, **cache_options, part_cache_bytes=fewest - 1)
    with open_images(url, **cache_options, part_cache_bytes=fewest) as source:
        for index in np.random.default_rng(0).integers(0, 17, 60).tolist():
            np.testing.assert_array_equal(source.read(index), images[index])
            assert sum(cached.stat().st_size for cached in (tmp_path / "cache").iterdir()) <= fewest
        taken = source.take(list(range(17)))
        np.testing.assert_array_equal(np.stack(taken), images)
    assert max(times for path, times in server.requests.items() if f"/{PARTS}/" in path) > 1


def test_what_is_held_does_not_go(tmp_path):
    cache = PartCache(tmp_path, 100)
    names = [f"{number:05d}-{'a' * 32}.arrow" for number in range(4)]
    (tmp_path / "notes.txt").write_text("not ours" * 100)

    def fetch(descriptor):
        os.write(descriptor, b"x" * 40)

    pinned = [cache.acquire(name, 40, fetch) for name in names[:2]]
    with pytest.raises(BlockingIOError):
        cache.try_acquire(names[2], 40, fetch)
    pinned[0].close()
    assert cache.acquire(names[2], 40, fetch).path.read_bytes() == b"x" * 40
    assert not pinned[0].path.exists()
    assert pinned[1].path.exists()
    assert (tmp_path / "notes.txt").exists()


def test_a_cache_that_somebody_removes_is_made_anew_or_said(url, opened, tmp_path, images):
    with opened() as source:
        np.testing.assert_array_equal(source.read(0), images[0])
        shutil.rmtree(tmp_path / "cache")
        for index, image in enumerate(images):
            np.testing.assert_array_equal(source.read(index), image)
    with opened() as source:
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("no folder")
        with raises(WriteError, path=tmp_path / "cache", mentions="part_cache"):
            source.read(0)


def test_a_disk_without_room_is_told_with_figures(url, opened, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with opened() as source:
        monkeypatch.setattr(part_cache.os, "posix_fallocate", full)
        with raises(OSError, path="cache", mentions=("00000", "part_cache_bytes")):
            source.read(0)


def test_a_wrong_byte_is_an_error_and_is_not_kept(server, url, opened, tmp_path, images):
    first = min((server.folder / "a.parts" / PARTS).iterdir())
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    with opened() as source:
        with raises(FormatError, path=first.name):
            source.read(0)
        assert all(first.name not in cached for cached in in_cache(tmp_path))
        np.testing.assert_array_equal(source.read(6), images[6])
        first.write_bytes(data + b"x")
        with raises(FormatError, path=first.name, mentions=(f"{len(data) + 1:,}", f"{len(data):,}")):
            source.read(0)
        first.unlink()
        with raises(MissingPathError, path=first.name):
            source.read(0)


def test_parts_that_are_looked_at_and_go_were_replaced(server, url, tmp_path, images):
    with open_images(url) as source:
        np.testing.assert_array_equal(source.read(0), images[0])
        (server.folder / "a.parts").rename(server.folder / "old.parts")
        publish(server.folder / "a.parts", images[::-1], SIZES)
        for region in (None, (2, 9, 3, 8)):
            with raises(FormatError, path=url):
                source.read(1, region)


def test_a_manifest_that_changed_is_another_collection(server, url, opened, tmp_path, images):
    dataset = OMEArrowDataset(url, preload=False, part_cache=tmp_path / "cache", part_cache_bytes=PLENTY)
    sent = pickle.dumps(dataset)
    (server.folder / "a.parts").rename(server.folder / "old.parts")
    publish(server.folder / "a.parts", images[::-1], SIZES)
    with raises(FormatError, path=url):
        pickle.loads(sent)[0]
    with opened() as source:
        np.testing.assert_array_equal(source.read(0), images[16])


def test_requests_that_fail_change_nothing(server, url, tmp_path, images):
    server.faults = 0.3
    for round_ in range(3):
        cache_options = {"part_cache": tmp_path / f"cache{round_}", "part_cache_bytes": PLENTY}
        with open_images(url, **cache_options) as source:
            np.testing.assert_array_equal(np.stack(source.take(range(17))), images)
    assert len(server.failed) > 2


def test_a_silent_server_is_an_error(server, url, opened, monkeypatch):
    monkeypatch.setattr(remote, "_SILENT_S", 2.5)
    monkeypatch.setattr(remote, "READ_S", 1)
    server.stalled = True
    started_s = time.monotonic()
    with raises(StorageError, path=f"{url}/parts.json"):
        opened()
    assert time.monotonic() - started_s < 10


def test_a_dead_server_is_an_error(server, url, opened, monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "_SILENT_S", 1.0)
    monkeypatch.setattr(remote, "_LONGEST_PAUSE_S", 0.1)  # A random long pause could use up all of the time.
    with opened() as source:
        source.read(0)
        server.faults = 1.0
        source.read(0)  # Cached parts are still read.
        with raises(StorageError, mentions="00004"):
            source.read(16)
    with serving(tmp_path) as gone:
        pass
    with raises(StorageError, path=f"{gone.url}/a.parts/parts.json", mentions="refused"):
        open_images(f"{gone.url}/a.parts", part_cache=tmp_path / "other")


def test_who_is_refused_is_told_and_no_secret_is(server, url, opened):
    server.status = 403
    with raises(StorageError, path=f"{url}/parts.json", mentions=("anonymous", 403, "Made"), remedy=False) as refused:
        opened()
    assert "SECRET" not in "".join(map(str, (refused.value, refused.value.__cause__)))
    assert refused.value.__suppress_context__


def _killed(programs, url, cache, after_s):
    child = programs.start(_CHILD, url, cache)
    child.first_line()
    time.sleep(after_s)
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_left_to_clean_after_a_kill(programs, server, url, opened, tmp_path, images, kills):
    server.latency_s = 0.1
    for kill in range(kills):
        _killed(programs, url, tmp_path / "cache", 0.05 + 0.6 * kill / kills)
    server.latency_s = 0
    with opened() as source:
        np.testing.assert_array_equal(np.stack(source.take(range(17))), images)
    assert not [cached for cached in in_cache(tmp_path) if cached.startswith(".")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Lance warns of every fork.
def test_a_forked_child_is_refused_where_it_would_hang(url, opened):
    with opened() as source:
        source.read(0)
        child = os.fork()
        if not child:
            try:
                source.read(16)
            except StorageError as error:
                os._exit(0 if "forkserver" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("text", ["s3://bucket/a.parts", "HTTPS://host:80/x y/a.parts", "gs://b/c.parts"])
def test_a_url_reads_as_itself(text):
    parsed = url_of(text)
    assert isinstance(parsed, Url)
    assert str(parsed).lower() == text.lower()
    assert url_of(Path(text)) == parsed == pickle.loads(pickle.dumps(parsed)) == url_of(parsed)
    assert str(parsed / "x").lower() == f"{text}/x".lower()
    assert not parsed.exists()


def test_a_path_is_no_url(tmp_path):
    for text in ("a/s3://x", "c:/x", "file:///x", "/s3://x", "s3:", "ftp://x/y", "s3x://a"):
        assert url_of(text) is None
    for text in (
        "s3://key:SECRET@b/a.parts",
        "http://h/a.parts?sig=SECRET",
        "s3://b/../a.parts",
        "s3:///a.parts",
        "s3://",
    ):
        with pytest.raises(ArgumentError) as refused:
            open_images(text)
        assert "SECRET" not in str(refused.value)
    with raises(ArgumentError, option="part_cache_bytes", path=tmp_path):
        open_images(tmp_path, part_cache_bytes=5)


def test_storage_is_checked_and_holds_no_secret(monkeypatch, tmp_path):
    for wrong in ({"endpoint": "http://a:SECRET@b"}, {"endpoint": "b:80"}, {"anonymous": True, "profile": "lab"}):
        with pytest.raises(ArgumentError) as refused:
            Storage(**wrong)
        assert "SECRET" not in str(refused.value)
    with raises(ArgumentError, option="region", path="http://host/a.parts", mentions=("'x'", "S3")):
        open_images("http://host/a.parts", storage=Storage(region="x"))
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = ID\naws_secret_access_key = SECRET\n")
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-1\n[profile other]\nrole_arn = x\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)  # As if boto3 were missing.
    config, provider = remote.s3_settings(Storage(profile="lab"))
    assert config == {"region": "eu-west-1"}
    assert provider()["secret_access_key"] == "SECRET"
    with raises(ArgumentError, option="profile", mentions="'none'", remedy=False):
        remote.s3_settings(Storage(profile="none"))
    with raises(ImportError, mentions="boto3"):
        remote.s3_settings(Storage(profile="other"))
    with raises(ImportError, path="s3://b/a.parts", mentions="omearrow-ds[remote]"):
        open_images("s3://b/a.parts", storage=Storage(profile="lab"), part_cache=tmp_path)
    sent = remote.ObjectStore(url_of("s3://b/a.parts"), Storage(profile="lab"))
    assert b"SECRET" not in pickle.dumps(sent)


def test_threads_share_a_source_whose_cache_has_no_room_for_all_parts(server, tmp_path):
    pixels = [np.full((1, 1, 1, 40, 50), number, np.uint8) for number in range(24)]
    write_images(pixels, tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", server.folder / "b.parts", "parquet", part_bytes=9000)
    url, cache = f"{server.url}/b.parts", tmp_path / "cache"

    def read(seed):
        for index in np.random.default_rng(seed).integers(0, 24, 12).tolist():
            taken = source.take([index, 23 - index])
            assert [int(image.min()) for image in taken] == [int(image.max()) for image in taken] == [index, 23 - index]

    with open_images(url, part_cache=cache, part_cache_bytes=80_000) as source, ThreadPoolExecutor(5) as pool:
        assert list(pool.map(read, range(5))) == [None] * 5


def test_a_server_that_never_answered_is_named_soon(monkeypatch):
    monkeypatch.setattr(remote, "_UNHEARD_S", {"dns error": 0.2, "refused": 0.2})
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    started_s = time.monotonic()
    with raises(
        StorageError,
        option="storage",
        path="s3://b/a.parts/parts.json",
        mentions=("http://127.0.0.1:9", "endpoint=", "AWS_ENDPOINT_URL"),
    ):
        open_images("s3://b/a.parts", storage=Storage(True, "http://127.0.0.1:9", "x"))
    with raises(StorageError, path="http://no-such-host.invalid/a.parts/parts.json"):
        open_images("http://no-such-host.invalid/a.parts")
    with raises(
        StorageError, option="target_storage", mentions=("http://127.0.0.1:9", "endpoint=", "AWS_ENDPOINT_URL")
    ):
        publish_parts("s3://b/a.parts", storage=Storage(True, "http://127.0.0.1:9", "x"))
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize("anonymous", [False, True])
def test_who_is_refused_is_told_what_would_help(server, tmp_path, monkeypatch, anonymous):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    remote_ = remote.ObjectStore(url_of("s3://b/a"), Storage(anonymous=anonymous))
    with raises(StorageError, path="s3://b/a", mentions=("AWS_ACCESS_KEY_ID", 403)) as caught:
        remote_.refuse_final("s3://b/a", PermissionError("status code: 403"))
    assert ("~/.aws" in str(caught.value)) is not anonymous
    assert ("anonymous=True" in str(caught.value)) is not anonymous
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    with raises(StorageError, path="s3://b/a", mentions=("anonymous=True", 403)) as caught:
        remote_.refuse_final("s3://b/a", PermissionError("status code: 403"))
    assert ("Storage(anonymous=True)" in str(caught.value)) is not anonymous
    server.status = 403
    with raises(
        StorageError, path=f"{server.url}/a.parts/parts.json", mentions=("anonymous", 403), remedy=False
    ) as caught:
        open_images(f"{server.url}/a.parts")
    assert "storage=" not in str(caught.value)


def test_who_waits_for_a_part_that_is_there_in_a_moment_is_not_told_that_nobody_gets_on(tmp_path, monkeypatch):
    """The old time that marks a verified part is set only after the file has its final name."""
    cache, name, waited = PartCache(tmp_path, 100), f"00000-{'a' * 32}.arrow", []
    utime = os.utime

    def looked_at(*utime_arguments, **more):
        utime(*utime_arguments, **more)
        cache._refuse_stuck(name)
        waited.append(utime_arguments)

    monkeypatch.setattr(part_cache.os, "utime", looked_at)
    cache.acquire(name, 1, lambda descriptor: os.write(descriptor, b"x"))
    assert waited


def test_waiters_do_not_take_the_time_of_a_killed_fetch_for_that_of_the_next(tmp_path, monkeypatch):
    cache, name, checks = PartCache(tmp_path, 100), f"00000-{'a' * 32}.arrow", []
    partial = cache._partial_path(name)
    partial.write_bytes(b"left by a killed process")
    os.utime(partial, (0, 0))
    locked_names, try_lock = PartCache._locked_names, part_cache._try_lock

    @contextmanager
    def locked_and_checked(self):
        with locked_names(self):
            yield
        if checks and partial.exists():
            self._refuse_stuck(name)
            checks.append("not stuck")

    monkeypatch.setattr(PartCache, "_locked_names", locked_and_checked)
    monkeypatch.setattr(part_cache, "_try_lock", lambda descriptor: checks.append("locked") or try_lock(descriptor))
    cache.acquire(name, 1, lambda descriptor: os.write(descriptor, b"x"))
    assert checks.count("not stuck") >= 2
