"""Inputs that once failed, and some seconds of new ones: `make fuzz` goes on from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adversarial import fuzz

ROOT = Path(__file__).parents[2]
SECONDS = 2, pytest.param(60, marks=pytest.mark.long)


@pytest.mark.parametrize("file", sorted(fuzz.CORPUS.iterdir()), ids=lambda file: file.name)
def test_an_input_that_once_failed(file):
    fuzz.one_input(file.read_bytes())


@pytest.mark.parametrize("seconds", SECONDS)
def test_random_inputs(seconds):
    """In a process of its own: a crash of a library is then one failed test, which names the input.

    The seed is fixed, that a run that fails does so for what was changed; `make fuzz` looks for what is new.
    """
    seed = os.environ.get("FUZZ_SEED", "20261122")
    command = [sys.executable, "-m", "tests.adversarial.fuzz", "--random", "--seconds", str(seconds), "--seed", seed]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds + 180, check=False
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
