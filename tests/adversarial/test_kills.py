"""A few kills and races of every format; ``make kills`` makes hundreds."""

from __future__ import annotations

import hashlib
import socket
import sys
from pathlib import Path

import pytest

from benchmarks.report.results import replacing
from benchmarks.support.data import DataCache
from benchmarks.support.workload import Workload
from omearrow_ds import FORMATS, open_images, write_images
from omearrow_ds.storage import publish
from omearrow_ds.storage.formats import get_format
from tests.support.strategies import image_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness forks, and limits are Linux's")
ROOT = Path(__file__).resolve().parents[2]


# A folder that a library writes itself, with threads; all formats are published by the same code.
FEW = ("lance",)
SHARES = FEW, pytest.param(tuple(fmt.name for fmt in FORMATS), marks=pytest.mark.slow, id="all")


@pytest.mark.parametrize("names", SHARES, ids="-".join)
def test_what_a_killed_writer_leaves_is_whole_and_the_next_run_works(programs, names):
    works = ["--works", "write", "parts", "preload", "--kills", 3 * len(names), "--rounds", 2 if names == FEW else 4]
    run = "import sys; from tests.adversarial.kills import main; sys.exit(main())"
    done = programs.run(run, "--formats", *names, *works, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 wrong\n")
    assert done.stdout.count("race ") >= len(names)


@pytest.mark.slow  # `test_nothing_is_left_to_clean_after_a_kill` of tests/unit/storage/test_remote.py is the short one.
def test_readers_that_share_a_cache_and_are_killed_leave_nothing_to_clean(programs):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    run = "import sys; from tests.adversarial.reader_kills import main; sys.exit(main())"
    done = programs.run(run, "--kills", 10, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 wrong\n")


def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_holds_is_not(programs, tmp_path):
    path = tmp_path / "images.arrow"
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    prefix = f".{path.name}.partial-{host}-"
    dead = tmp_path / f"{prefix}0123456789ab"
    of_another_host = tmp_path / f".{path.name}.partial-00000000-0123456789ab"
    for folder in (dead, of_another_host):
        (folder / "deep").mkdir(parents=True)
    live, lock = publish._locked_folder(tmp_path, prefix)
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / f"{prefix}link").symlink_to(target)
    code = (
        "import sys, numpy; from omearrow_ds import write_images; write_images([numpy.ones((2, 3), 'u1')], sys.argv[1])"
    )
    assert programs.run(code, path).returncode == 0
    assert not dead.exists()
    assert live.is_dir()
    assert of_another_host.is_dir()
    assert target.is_dir()
    publish.os.close(lock)


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_folder_that_another_writer_takes_for_a_killed_one_is_made_again(tmp_path, monkeypatch, moment):
    """Processes that raced for one target found this: one had created its folder, but not locked it yet."""
    lost = []
    opened, locked = publish.os.open, publish.fcntl.flock

    def lose(folder):
        if not lost:
            lost.append(folder)
            publish.shutil.rmtree(folder)

    def opening(folder, *flags, **options):
        if moment == "before it is opened":
            lose(folder)
        return opened(folder, *flags, **options)

    def locking(descriptor, how):
        if moment == "before it is locked":
            lose(next(entry for entry in tmp_path.iterdir() if "partial" in entry.name))
        return locked(descriptor, how)

    monkeypatch.setattr(publish.os, "open", opening)
    monkeypatch.setattr(publish.fcntl, "flock", locking)
    write_images([image_of((4, 5))], tmp_path / "images.arrow")
    assert len(lost) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["images.arrow"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_whether_or_not_the_file_system_can_exchange(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    for number in range(3):
        write_images([image_of((4, 5), number=number)], tmp_path / "images.tiffs", overwrite=True)
        assert (open_images(tmp_path / "images.tiffs").read(0)[0, 0, 0] == image_of((4, 5), number=number)).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["images.tiffs"]


@pytest.mark.parametrize("has_old", [False, True])
def test_a_failed_move_of_a_folder_raises_the_first_error_and_keeps_the_old_folder(tmp_path, monkeypatch, has_old):
    monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    new, path, rename = tmp_path / "partial" / "images.tiffs", tmp_path / "images.tiffs", Path.rename
    new.mkdir(parents=True)
    if has_old:
        write_images([image_of((4, 5))], path)

    def fail(file, target):
        if file == new:
            raise PermissionError(13, "Permission denied", str(file))
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError) as caught:
        publish.move(new, path, overwrite=True)
    assert caught.value.filename == str(new)
    assert path.exists() == has_old
    assert not has_old or (open_images(path).read(0)[0, 0, 0] == image_of((4, 5))).all()


def test_a_folder_at_the_path_is_there_at_every_moment(tmp_path, monkeypatch):
    """An observer between two system calls sees a killed writer leave old or new content."""
    path = tmp_path / "images.tiffs"
    write_images([image_of((4, 5))], path)
    existed = []
    for owner, name in ((Path, "rename"), (Path, "replace"), (publish.os, "link"), (publish.shutil, "rmtree")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, real=real, **kw: (real(*args, **kw), existed.append(path.is_dir()))[0]
        )
    write_images([image_of((4, 5), number=1)], path, overwrite=True)
    assert existed
    assert all(existed)


def test_what_killed_benchmark_runs_left_is_removed_and_what_a_live_one_holds_is_not(programs, tmp_path):
    path = tmp_path / "table.json"
    dead = tmp_path / ".table.json.1.tmp"
    dead.write_text("half")
    with replacing(path) as live:
        live.write_text("first")
        assert not dead.exists()
        run = "import sys, pathlib; from benchmarks.report.results import replacing\n"
        run += "with replacing(pathlib.Path(sys.argv[1])) as other: other.write_text('second')"
        assert programs.run(run, path).returncode == 0
        assert path.read_text() == "second"
        assert live.read_text() == "first"
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


def test_the_lock_of_a_killed_session_on_a_piece_of_data_is_removed(tmp_path):
    fmt = get_format("arrow")
    with DataCache(tmp_path, Workload(count=2, shape=(1, 1, 1, 4, 5), seed=1)) as cache:
        piece = cache.path(fmt, "bytes").parent
        dead = piece.with_name(f".{piece.name}.use-1-00000000")
        dead.touch()
        with DataCache(tmp_path, Workload(count=2, shape=(1, 1, 1, 4, 5), seed=1)) as other:
            assert other.path(fmt, "bytes").parent == piece
            assert not dead.exists()
            assert len(list(piece.parent.glob(".*.use-*"))) == 2
