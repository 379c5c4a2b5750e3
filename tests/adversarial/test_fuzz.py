"""Inputs that once failed, and some seconds of new ones: `make fuzz` goes on from there."""

from __future__ import annotations

import os

import pytest

from tests.adversarial import fuzz

SECONDS = 1, pytest.param(60, marks=pytest.mark.long)


@pytest.mark.parametrize("file", sorted(fuzz.CORPUS.iterdir()), ids=lambda file: file.name)
def test_an_input_that_once_failed(file):
    fuzz.one_input(file.read_bytes())


@pytest.mark.parametrize("seconds", SECONDS)
def test_random_inputs(programs, seconds):
    """In a process of its own: a crash of a library is then one failed test, which names the input.

    The seed is fixed, that a run that fails does so for what was changed; `make fuzz` looks for what is new.
    """
    seed = os.environ.get("FUZZ_SEED", "20261122")
    code = "from tests.adversarial.fuzz import main; main()"
    done = programs.run(code, "--random", "--seconds", seconds, "--seed", seed, timeout_s=seconds + 180)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
