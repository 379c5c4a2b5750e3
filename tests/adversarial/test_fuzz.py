"""Inputs that failed before, and some seconds of new ones; `make fuzz` runs longer."""

from __future__ import annotations

import os

import pytest

from tests.adversarial import fuzz

# The seed is fixed, so that only a change can make a run fail; `make fuzz` finds new inputs.
SEED = int(os.environ.get("FUZZ_SEED", "20261122"))


@pytest.mark.parametrize("file", sorted(fuzz.CORPUS.iterdir()), ids=lambda file: file.name)
def test_an_input_that_once_failed(file):
    fuzz.one_input(file.read_bytes())


def test_random_inputs():
    assert fuzz.random_pass(60, SEED, most=60) == 60


@pytest.mark.slow
def test_random_inputs_of_a_minute(programs):
    """Runs in its own process, so that a crash of a library is one failed test that names the input."""
    code = "from tests.adversarial.fuzz import main; main()"
    done = programs.run(code, "--random", "--seconds", 60, "--seed", SEED, timeout_s=240)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
