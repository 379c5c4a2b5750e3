"""``omearrow-ds profile``, a thin wrapper of `profile_dataset`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from omearrow_ds import write_images
from omearrow_ds.advise.profile import measure
from omearrow_ds.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

QUICK = ["--seconds", "0.1", "--no-trials", "--workers", "0"]
OWN = """
import pathlib
import time
from torch import nn

def half(image):
    return image / 2

def slow(image):
    pathlib.Path("begun").touch()
    time.sleep(0.005)
    return image

def failing(image):
    raise KeyError("planted in the transform")

def model(shape):
    return nn.Sequential(nn.Flatten(1), nn.Linear(shape[-1] * shape[-2], 2))
"""

IN_FOREGROUND = """
import os, sys
os.setpgrp()  # Ctrl-C is for all of a process group
os.chdir(sys.argv.pop(1))
sys.path.insert(0, "")
from omearrow_ds.cli import main
main()
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_TURN_S", (0.01, 0.01))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_functions.py").write_text(OWN)
    pixels = np.arange(24 * 2 * 8 * 8, dtype=np.uint16).reshape(24, 1, 2, 1, 8, 8)
    write_images(pixels, "images.parquet", columns={"label": list(range(24))}, axes="TCZYX")
    yield "images.parquet"
    sys.modules.pop("own_functions", None)


def run(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def test_it_tells_people(path):
    done = run(path, "--seconds", "0.1", "--workers", "0", "--batch-size", "4")
    assert done.exit_code == 0, done.output
    for words in ("24 samples of 2 x 8 x 8", "batch 4, 0 workers", "normalize", "Try first", "Preloading needs"):
        assert words in done.stdout
    assert done.stderr == ""


def test_it_tells_machines(path):
    options = ["--transform", "own_functions:half", "--model", "own_functions:model", "--target", "label"]
    options += ["--optimizer", "adam", "--select", "C=0", "--select", "Z=0", "--crop", "4", "--preload", "yes"]
    done = run(path, *QUICK, *options, "--json", "--no-shuffle", "--axes", "YX")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["sample_shape"] == [4, 4]
    assert result["preloaded"] is True
    assert result["model"] == "own_functions:model"
    assert result["trials"] == []
    calls = {row["stage"]: row["calls"] for row in result["stages"]}
    assert calls["transform"] == result["samples"]
    assert calls["forward"] == calls["optimizer step"] == result["batches"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.parquet"], 1, "error: "),
        (["images.parquet", "--epochs", "1", "--seconds", "1"], 1, "pass one of them"),
        (["images.parquet", "--transform", "no_such:thing"], 1, "error: --transform 'no_such:thing'"),
        (["images.parquet", "--crop", "99"], 1, "larger than the image"),
        (["images.parquet", "--workers", "many"], 2, "not a number from 0 or 'auto'"),
        (["images.parquet", "--select", "Q=1"], 2, "write an axis of TCZYX"),
        (["images.parquet", "--batch-size", "0"], 2, "Invalid value"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(path, arguments, code, message):
    done = run(*arguments)
    assert done.exit_code == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    if code == 1:
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_own_function_raises(path, workers):
    arguments = [path, *QUICK, "--workers", workers, "--transform", "own_functions:failing"]
    done = run(*arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: transform own_functions:failing raised KeyError")
    assert "planted in the transform" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "in failing" in run(*arguments, "--traceback").stderr


@pytest.mark.skipif(os.name != "posix", reason="sends the signal that Ctrl-C sends on POSIX systems")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_ctrl_c_ends_it_at_once(programs, path, tmp_path, workers):
    words = [path, "--seconds", "60", "--workers", workers, "--transform", "own_functions:slow", "--no-trials"]
    program = programs.start(IN_FOREGROUND, tmp_path, "profile", *words, has_workers=True)
    children = _running(psutil.Process(program.pid), workers, tmp_path)
    start = time.monotonic()
    os.killpg(program.pid, signal.SIGINT)
    done = program.wait()
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["stopped; nothing was left half-written"]
    psutil.wait_procs(children, timeout=20)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert time.monotonic() - start < 30


def _running(process, workers, folder):
    """Wait until stages are measured, and return the child processes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_running():
        children = process.children(recursive=True)
        # Children: the fork server, sometimes the resource tracker, and the workers of trials and of profiled epochs.
        # Wait for the first transform call: libraries may swallow Ctrl-C during their import.
        if (not workers or len(children) > 2 * workers) and (folder / "begun").exists():
            time.sleep(0.3)
            return process.children(recursive=True)
        time.sleep(0.1)
    pytest.fail("it did not start within two minutes")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_in_one_line_from_workers_too(path, tmp_path, workers):
    """The message of a worker's error contains its traceback."""
    write_images(np.random.default_rng(3).integers(0, 999, (4, 64, 64), dtype=np.uint16), tmp_path / "sites.tiffs")
    file = sorted((tmp_path / "sites.tiffs").glob("*.tif"))[2]
    file.write_bytes(file.read_bytes()[:-3000])
    done = run(tmp_path / "sites.tiffs", "--seconds", "0.1", "--no-trials", "--workers", workers, "--batch-size", "1")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'sites.tiffs'}")
    assert file.name in done.stderr
    assert len(done.stderr) < 400
    assert len(done.stderr.splitlines()) == 1
