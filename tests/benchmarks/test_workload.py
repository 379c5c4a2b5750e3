from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile

from benchmarks.support import cold
from benchmarks.support import data as data_module
from benchmarks.support.data import MANIFEST, DataCache, disk_usage_of, encodings, intact, writer_version
from benchmarks.support.workload import NAMED, PROFILES, Workload
from omearrow_ds import FORMATS, Format, open_images
from omearrow_ds.advise.recommend.sample import Resemblance
from omearrow_ds.testing import synthetic_image
from tests.support.errors import raises
from tests.support.programs import Programs

ROOT = Path(__file__).resolve().parents[2]
SMALL = Workload(6, (1, 1, 1, 9, 7), seed=3)
BY_NAME = {fmt.name: fmt for fmt in FORMATS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return three fields of 10 x 12 whose pixels are numbered; a2 sorts before a10."""
    folder = tmp_path / "fields"
    folder.mkdir()
    for number, name in enumerate(("a1", "a2", "a10")):
        field = np.arange(120, dtype=np.uint16).reshape(10, 12) + 1000 * number
        tifffile.imwrite(folder / f"{name}.tif", field)
    return folder


def test_files_are_cold_or_it_is_said_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for name in ("a", "deep/b"):
        (tmp_path / "folder" / name).write_bytes(os.urandom(1 << 20))
    files = cold.files_of(tmp_path / "folder")
    assert {file.name for file in files} == {"a", "b"}
    reason = cold.why_not(files)
    assert reason is None or "page cache" in reason or "posix_fadvise" in reason
    monkeypatch.setattr(cold, "drop", lambda files: None)
    assert "reads nothing anew" in str(cold.why_not(files))  # They were just read, so they are not cold.


AGAIN = ", so few that rounds read the same ones again and again"


class TestWorkload:
    def test_synthetic_images_are_those_of_the_library_and_stream(self) -> None:
        images = list(SMALL.images())
        assert [image.shape for image in images] == [(1, 1, 1, 9, 7)] * 6
        assert np.array_equal(images[4], synthetic_image(4, (1, 1, 1, 9, 7), "uint16", 3))
        assert next(iter(Workload(10**9).images())).shape == (1, 1, 1, 100, 100)

    def test_description(self) -> None:
        assert Workload().describe() == "1,000 images of 100 x 100 uint16, synthetic, seed 42"
        assert Workload(5, (1, 3, 1, 8, 9)).describe() == "5 images of 3 x 1 x 8 x 9 uint16, synthetic, seed 42"

    def test_named_workloads_differ_in_what_decides_between_formats(self) -> None:
        assert {workload.key() for workload in NAMED.values()} == {NAMED[name].key() for name in NAMED}
        assert NAMED["cells-8bit"] == Workload()
        few = {name: replace(workload, count=1) for name, workload in NAMED.items() if name not in ("fields", "stack")}
        images = {name: next(workload.images()) for name, workload in few.items()}
        used = {name: (image.dtype.name, int(np.bitwise_or.reduce(image, axis=None))) for name, image in images.items()}
        assert used["cells-12bit"] == ("uint16", 0x0FFF)
        assert used["cells-16bit"] == ("uint16", 0xFFFF)
        assert used["cells-uint8"] == ("uint8", 0xFF)
        levels = {name: len(np.unique(image)) for name, image in images.items()}
        assert levels["cells-8bit"] <= 255 < levels["cells-12bit"] < levels["cells-16bit"]
        assert set(np.unique(images["masks"])) <= set(range(1 + 512 * 512 // 5200))
        assert few["cells-12bit"].describe() == "1 images of 100 x 100 uint16 of 12 bits, synthetic, seed 42"
        assert NAMED["masks"].describe() == "200 images of 512 x 512 uint16 labels, synthetic, seed 42"

    def test_key_depends_on_everything_that_determines_the_images(self) -> None:
        variants = [SMALL, Workload(7, SMALL.shape, seed=3), Workload(6, (1, 1, 1, 9, 8), seed=3)]
        variants += [Workload(6, SMALL.shape, seed=4), Workload(6, SMALL.shape, "uint8", 3)]
        assert len({workload.key() for workload in variants}) == len(variants)
        assert SMALL.key() == Workload(6, (1, 1, 1, 9, 7), seed=3).key()

    def test_files_that_give_no_tile_are_named(self, folder: Path) -> None:
        tifffile.imwrite(folder / "small.tif", np.zeros((3, 40), np.uint16))
        description = Workload(None, folder=folder, tile=5).describe()
        assert description == "12 tiles of 5 x 5 uint16 from 3 files of fields (too small: small)" + AGAIN

    def test_full_tiles_of_a_folder_in_natural_order(self, folder: Path) -> None:
        workload = Workload(None, folder=folder, tile=5)
        tiles = list(workload.images())
        assert [tile.shape for tile in tiles] == [(1, 1, 1, 5, 5)] * 12
        assert [int(tile[0, 0, 0, 0, 0]) for tile in tiles[:5]] == [0, 5, 60, 65, 1000]
        assert [int(tile[0, 0, 0, 0, 0]) for tile in tiles[8:]] == [2000, 2005, 2060, 2065]
        assert workload.describe() == "12 tiles of 5 x 5 uint16 from 3 files of fields" + AGAIN

    def test_every_plane_is_cut(self, folder: Path) -> None:
        stack = np.arange(2 * 10 * 12, dtype=np.uint16).reshape(2, 10, 12)
        tifffile.imwrite(folder / "a3.tif", stack, metadata={"axes": "CYX"}, ome=True, photometric="minisblack")
        tiles = list(Workload(None, folder=folder, tile=10).images())
        assert [int(tile[0, 0, 0, 0, 0]) for tile in tiles] == [0, 1000, 0, 120, 2000]

    def test_whole_images_and_a_limit(self, folder: Path) -> None:
        workload = Workload(2, folder=folder)
        assert [image.shape for image in workload.images()] == [(1, 1, 1, 10, 12)] * 2
        assert workload.describe() == "2 images of 10 x 12 uint16 from fields" + AGAIN

    def test_tile_larger_than_every_image(self, folder: Path) -> None:
        with raises(ValueError, path=folder, mentions="11 x 11", remedy=False):
            next(Workload(None, folder=folder, tile=11).images())

    def test_key_of_a_folder_follows_its_files(self, folder: Path) -> None:
        workload = Workload(None, folder=folder, tile=5)
        keys = [workload.key(), Workload(None, folder=folder, tile=4).key()]
        os.utime(folder / "a1.tif", (1, 1))
        keys.append(workload.key())
        (folder / "a2.tif").rename(folder / "b2.tif")
        keys.append(workload.key())
        assert len(set(keys)) == 4

    def test_nf1_tiles(self, nf1_folder: Path) -> None:
        workload = Workload(3, folder=nf1_folder, tile=100)
        assert [tile.shape for tile in workload.images()] == [(1, 1, 1, 100, 100)] * 3
        assert Workload(None, folder=nf1_folder, tile=100).describe() == (
            "1,620 tiles of 100 x 100 uint16 from 15 files of nf1"
        )


def test_rounds_follow_the_budget_within_limits() -> None:
    quick, full = PROFILES
    assert quick.sample.rounds(quick.sample.seconds / 100) == 100
    assert quick.sample.rounds(1e3) == quick.sample.least
    assert quick.sample.rounds(1e-9) == quick.sample.most
    assert quick.whole.rounds(1e3) == quick.whole.least
    assert full.whole.rounds(0.1) >= quick.whole.rounds(0.1)


def pieces(cache: DataCache) -> list[str]:
    return sorted(entry.name for entry in cache.folder.iterdir() if not entry.name.startswith("."))


def stamps(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in path.parent.rglob("*") if file.is_file()}


def a_file(path: Path) -> Path:
    return path if path.is_file() else max(path.rglob("*"), key=lambda file: file.is_file() and file.stat().st_size)


class TestDataCache:
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    @pytest.mark.share(3, "fmt")
    def test_made_once_and_checked(self, fmt: Format, tmp_path: Path) -> None:
        if fmt.missing_backend:
            pytest.skip(fmt.missing_backend)
        for encoding in encodings(fmt):
            with DataCache(tmp_path, SMALL) as cache:
                path = cache.path(fmt, encoding)
                with open_images(path, fmt.name) as source:
                    assert np.array_equal(source.read(5), synthetic_image(5, SMALL.shape, "uint16", 3))
            before = stamps(path)
            with DataCache(tmp_path, SMALL) as cache:
                assert cache.path(fmt, encoding) == path
            assert stamps(path) == before

    @pytest.mark.parametrize("name", ["arrow", "tiff", "ome_zarr"])
    @pytest.mark.parametrize(
        "damage",
        [
            lambda path: os.truncate(a_file(path), 10),
            lambda path: a_file(path).unlink(),
            lambda path: a_file(path).write_bytes(bytes(a_file(path).stat().st_size)),
            lambda path: (path.parent / MANIFEST).unlink(),
            lambda path: os.truncate(path.parent / MANIFEST, 20),
            lambda path: (path.parent / MANIFEST).write_text("[]"),
            lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink(),
            lambda path: shutil.rmtree(path.parent),
            lambda path: (path.parent / "stranger").touch(),
        ],
        ids=["truncated", "member", "zeros", "no-manifest", "half-manifest", "odd-manifest", "data", "piece", "extra"],
    )
    @pytest.mark.share(3, "name", "damage")
    def test_damaged_piece_is_rebuilt_and_no_other(
        self, name: str, damage: Callable[[Path], object], tmp_path: Path
    ) -> None:
        fmt, other = BY_NAME[name], BY_NAME["parquet"]
        with DataCache(tmp_path, SMALL) as cache:
            path, undamaged = cache.path(fmt, encodings(fmt)[0]), cache.path(other, "bytes")
        before = stamps(undamaged)
        damage(path)
        assert not intact(path.parent)
        with DataCache(tmp_path, SMALL) as cache:
            assert cache.path(fmt, encodings(fmt)[0]) == path
            cache.path(other, "bytes")
            with open_images(path, fmt.name) as source:
                assert np.array_equal(source.read(5), synthetic_image(5, SMALL.shape, "uint16", 3))
        assert intact(path.parent)
        assert stamps(undamaged) == before

    def test_copied_cache_is_hashed_once_and_kept(self, tmp_path: Path) -> None:
        with DataCache(tmp_path / "one", SMALL) as cache:
            path = cache.path(BY_NAME["tiff"], "native")
        os.utime(a_file(path), (1, 1))
        before = stamps(path)
        del before[MANIFEST]
        assert intact(path.parent)
        after = stamps(path)
        assert before.items() <= after.items()
        assert intact(path.parent)
        assert stamps(path) == after

    def test_what_a_killed_run_left_is_removed(self, tmp_path: Path) -> None:
        fmt = BY_NAME["arrow"]
        with DataCache(tmp_path, SMALL) as cache:
            left = cache.folder / f".arrow-bytes-{writer_version(fmt)}.0123abcd.partial"
            left.mkdir()
            (left / "images.arrow").write_bytes(b"half")
            others = cache.folder / ".arrow-list-0.0123abcd.partial"
            others.mkdir()
            cache.path(fmt, "bytes")
            assert not left.exists()
            assert others.exists()

    def test_failed_build_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def half(images: object, path: Path, *_: object, **__: object) -> None:
            path.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(data_module, "write_images", half)
        with DataCache(tmp_path, SMALL) as cache:
            with pytest.raises(OSError, match="no space"):
                cache.path(BY_NAME["arrow"], "bytes")
            assert pieces(cache) == []
            monkeypatch.undo()
            assert cache.path(BY_NAME["arrow"], "bytes").exists()

    def test_older_writers_piece_goes_unless_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fmt = BY_NAME["arrow"]
        now = writer_version(fmt)
        monkeypatch.setattr(data_module, "writer_version", lambda _: "0000old")
        with DataCache(tmp_path, SMALL) as reader:
            old = reader.path(fmt, "bytes")
            monkeypatch.setattr(data_module, "writer_version", lambda _: now)
            with DataCache(tmp_path, SMALL) as cache:
                cache.path(fmt, "bytes")
                assert pieces(cache) == sorted(["arrow-bytes-0000old", f"arrow-bytes-{now}"])
        assert old.exists()
        with DataCache(tmp_path, SMALL) as cache:
            cache.path(fmt, "list")
            assert old.exists()
            cache.path(fmt, "bytes")
            assert not old.exists()

    def test_killed_reader_does_not_hold_a_piece(self, tmp_path: Path) -> None:
        with DataCache(tmp_path, SMALL) as cache:
            old = cache.folder / "arrow-bytes-0000old"
            old.mkdir()
            (cache.folder / ".arrow-bytes-0000old.use-1-0123abcd").touch()
            cache.path(BY_NAME["arrow"], "bytes")
            assert not old.exists()

    @pytest.mark.parametrize("is_cached", [True, False])
    def test_images_that_take_little_are_made_once(
        self, is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected, generated = list(SMALL.images()), list[int]()

        class Counted:
            def images(self) -> Iterator[np.ndarray]:
                for image in expected:
                    generated.append(len(generated) % len(expected))
                    yield image.copy()

            def key(self) -> str:
                return "counted"

        size_bytes = sum(image.nbytes for image in expected)
        monkeypatch.setattr(data_module, "_KEPT_BYTES", size_bytes - (not is_cached))
        with DataCache(tmp_path, Counted()) as cache:
            next(cache.images())  # An incomplete iteration caches nothing.
            generated.clear()
            for name in ("arrow", "tiff"):
                with open_images(cache.path(BY_NAME[name], encodings(BY_NAME[name])[0]), name) as source:
                    read_images = source.take(range(len(source)))
                assert all(map(np.array_equal, read_images, expected))
            assert all(map(np.array_equal, cache.images(), expected))
        assert generated == [*range(len(expected))] * (1 if is_cached else 3)

    @pytest.mark.slow
    def test_processes_at_once_build_one(self, programs: Programs, tmp_path: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from benchmarks.support.data import DataCache;"
            "from benchmarks.support.workload import Workload; from omearrow_ds import FORMATS;"
            "cache = DataCache(Path(sys.argv[1]), Workload(60, (1, 1, 1, 9, 7), seed=3));"
            "path = cache.path(FORMATS[6], 'native');"
            "print(path.stat().st_ino, path)"
        )
        both = [programs.start(code, tmp_path) for _ in range(2)]
        runs = [program.wait() for program in both]
        assert [run.returncode for run in runs] == [0, 0], runs
        assert len({run.stdout for run in runs}) == 1, "the second found what the first had made"

    def test_checking_is_cheap(self, tmp_path: Path) -> None:
        workload = Workload(300, (1, 1, 1, 9, 7))
        with DataCache(tmp_path, workload) as cache:
            piece = cache.path(BY_NAME["tiff"], "native").parent
        start = time.perf_counter()
        assert intact(piece)
        assert time.perf_counter() - start < 0.5, "about 5 ms: names, sizes and times, no content"

    def test_size_of_file_and_folder(self, tmp_path: Path) -> None:
        (tmp_path / "deep" / "er").mkdir(parents=True)
        (tmp_path / "deep" / "one").write_bytes(bytes(10))
        (tmp_path / "deep" / "er" / "two").write_bytes(bytes(5))
        (tmp_path / "deep" / "er" / "hole").touch()
        os.truncate(tmp_path / "deep" / "er" / "hole", 2**20)
        for path, size_bytes in ((tmp_path / "deep", 15 + 2**20), (tmp_path / "deep" / "one", 10)):
            du = subprocess.run(["du", "-s", "-B1", path], capture_output=True, text=True, check=True)
            assert disk_usage_of(path) == {"size_bytes": size_bytes, "allocated_bytes": int(du.stdout.split()[0])}


def test_writer_version_depends_on_the_formats_own_code_and_what_all_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "omearrow_ds"
    shutil.copytree(ROOT / "src" / "omearrow_ds", package)
    monkeypatch.setattr(data_module.omearrow_ds, "__file__", str(package / "__init__.py"))
    versions = []
    for touched in ("codec/decode.py", "storage/formats/arrow.py", "storage/formats/_table.py", "codec/encode.py"):
        with (package / touched).open("a") as file:
            file.write("# changed\n")
        writer_version.cache_clear()
        versions.append((writer_version(BY_NAME["arrow"]), writer_version(BY_NAME["tiff"])))
    writer_version.cache_clear()
    arrow, tiff = zip(*versions, strict=True)
    assert len(set(arrow)) == 4
    assert len(set(tiff)) == 3


class TestResemblance:
    @pytest.mark.parametrize("name", NAMED)
    def test_images_of_a_workload_resemble_it(self, name: str) -> None:
        workload = replace(NAMED[name], count=1 if name in ("fields", "stack", "masks") else 20)
        nearest = Resemblance.of(list(workload.images()))
        assert nearest is not None
        assert nearest.workload == name

    def test_pixels_of_no_workload_resemble_none(self) -> None:
        assert Resemblance.of([np.zeros((1, 1, 1, 9, 9), np.float32)]) is None
        assert Resemblance.of([np.zeros((1, 1, 1, 9, 9), dtype) for dtype in (np.uint8, np.uint16)]) is None
