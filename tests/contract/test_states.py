"""Saved states that later versions must load: they exist unchanged, and continue their epoch."""

from __future__ import annotations

import pytest

from tests.adversarial.golden.archive import sha256
from tests.contract.loading import NUM_IMAGES
from tests.contract.states import CASES, DIGESTS, STATES, load, record, write_missing

ALONE = [name for name, case in CASES.items() if case.ranks[1] == 1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Batches that follow each state, for each rank."""
    return record(tmp_path_factory.mktemp("states"))


def test_saved_states_are_unchanged():
    lines = DIGESTS.read_text(encoding="utf-8").splitlines()
    digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert {file.name: sha256(file) for file in STATES.iterdir() if file != DIGESTS} == digests
    assert {f"{name}.json" for name in CASES} < digests.keys()


def test_writing_states_changes_nothing_when_all_exist(tmp_path):
    assert list(write_missing(tmp_path)) == []


@pytest.mark.parametrize("name", ALONE)
def test_saved_state_continues_with_the_images_that_were_not_delivered(recorded, name):
    before = flatten(load(name)["delivered"])
    ((rest, following),) = recorded[name]
    everything = list(range(NUM_IMAGES))
    has_ended = sorted(before) == everything  # The next epoch begins.
    assert sorted(([] if has_ended else before) + flatten(rest)) == everything
    assert sorted(flatten(following)) == everything


def flatten(batches):
    """Return the numbers of the images of some batches, which may have checksums with them."""
    samples = [sample for batch in batches for sample in (batch if isinstance(batch, list) else [batch])]
    return [int(str(sample).partition(":")[0]) for sample in samples]
