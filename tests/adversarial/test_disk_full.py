"""A full disk: an error that states the cause and the action, complete old content, and no leftovers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omearrow_ds import FORMATS

HERE = [fmt.name for fmt in FORMATS if fmt.missing_backend is None]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a small tmpfs is Linux's")
MOUNT = "mount -t tmpfs -o size=2m none"

FULL = """
import shutil, subprocess, sys
from pathlib import Path
import numpy as np
from omearrow_ds import OMEArrowDataset, WriteError, convert, open_images, write_images
from omearrow_ds.storage.formats import get_format

small, source, names = Path(sys.argv[1]), Path(sys.argv[2]) / "source.arrow", sys.argv[3:]
pixels = np.random.default_rng(0)  # nothing compresses these
few = [pixels.integers(0, 2**16, (64, 64), np.uint16) for _ in range(3)]
many = [pixels.integers(0, 2**16, (256, 256), np.uint16) for _ in range(32)]  # 4 MiB, and 2 MiB of disk
write_images(many, source, compression="none")

def refused(action, path, *words):
    try:
        action()
    except WriteError as error:
        said = str(error)
        assert said.startswith(f"{path}: ") and chr(10) not in said, said
        assert all(word in said for word in words), said
    else:
        raise AssertionError(f"{path} was written")

for name in names:
    path = small / f"images{get_format(name).suffix}"
    refused(lambda: write_images(many, path, name), path, "disk is full", "choose another path")
    assert not list(small.iterdir()), (name, list(small.iterdir()))
    write_images(few, path, name)
    for action in (
        lambda: write_images(many, path, name, overwrite=True),
        lambda: convert(source, path, name, overwrite=True),
    ):
        refused(action, path, "disk is full", "choose another path")
        assert [each.name for each in small.iterdir()] == [path.name], (name, list(small.iterdir()))
        with open_images(path, name) as found:
            assert all((each[0, 0, 0] == image).all() for each, image in zip(found.take(range(3)), few, strict=True))
    write_images(few, path, name, overwrite=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    large = Path(sys.argv[2]) / f"large{get_format(name).suffix}"
    write_images(many, large, name)
    held = small / "held"
    refused(lambda: OMEArrowDataset(large, name, cache_dir=held), held, "pass another cache_dir")
    assert [each.name for each in held.iterdir() if each.suffix != ".lock"] == []
    OMEArrowDataset(large, name, cache_dir=Path(sys.argv[2]) / "held")
    shutil.rmtree(held)
    print(f"\\n{name}")

path, large = small / "x.parts", {"part_bytes": 2**19, "compression": "none"}
refused(lambda: convert(source, path, **large), path, "disk is full", "repeat the command")
assert [each.name for each in small.iterdir()] == ["x.parts"]
assert not [each for each in (path / "jobs").iterdir() if each.name.startswith(".")], list((path / "jobs").iterdir())
assert len(list((path / "jobs").glob("0*.json"))) == len(list((path / "parts").iterdir())) >= 2
subprocess.run(["mount", "-o", "remount,size=16m", small], check=True)
made = {each.name: each.stat().st_ino for each in (path / "parts").iterdir()}
convert(source, path, **large)
assert made.items() <= {each.name: each.stat().st_ino for each in (path / "parts").iterdir()}.items()
with open_images(path, verify=True) as found:
    assert all((each[0, 0, 0] == image).all() for each, image in zip(found.take(range(32)), many, strict=True))
print("parts")
"""


# On a push, tests of errors, of `cache_dir` and of commands use a file size limit instead.
@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_the_old_content_whole(tmp_path):
    small, roomy = tmp_path / "small", tmp_path / "roomy"
    small.mkdir()
    roomy.mkdir()
    run = f'{MOUNT} "$1" || exit 99; shift; exec "$@"'
    inside = [sys.executable, "-W", "ignore", "-c", FULL, str(small), str(roomy), *HERE]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, "sh", str(small), *inside],  # Only this process sees the mount.
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if done.returncode == 99 or done.stderr.startswith("unshare:"):
        pytest.skip(f"this user may not mount a small tmpfs here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [word for word in done.stdout.split() if word in [*HERE, "parts"]] == [*HERE, "parts"]
