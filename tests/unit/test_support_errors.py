"""The check of errors in tests accepts real messages and rejects swapped facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from omearrow_ds import ArgumentError, FormatError, OMEArrowDSError
from tests.contract.calls import DATASET, FILES, OPEN, WRITE
from tests.contract.wrong_calls import Outcome, outcomes
from tests.support.errors import names_option, names_path, offending_option, raises, states_remedy


@dataclass(frozen=True)
class Swap:
    """An error with an expectation that is wrong in one respect."""

    respect: str
    error: BaseException
    expected: type[BaseException]
    option: str | None = None
    path: Path | None = None

    def is_rejected(self) -> bool:
        """Whether `raises` rejects this expectation."""
        try:
            with raises(self.expected, self.option, self.path, remedy=False):
                raise self.error
        except (pytest.fail.Exception, type(self.error)):
            return True
        return False


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """Outcomes of wrong calls that name the option or path at fault."""
    all_outcomes = outcomes(tmp_path_factory.mktemp("wrong"), (*OPEN, *FILES, *WRITE, *DATASET))
    errors = [outcome for outcome in all_outcomes if isinstance(outcome.error, OMEArrowDSError)]
    return [outcome for outcome in errors if names_its_option(outcome) or names_its_path(outcome)]


def names_its_option(outcome: Outcome) -> bool:
    return outcome.option is not None and offending_option(str(outcome.error)) == outcome.option


def names_its_path(outcome: Outcome) -> bool:
    return outcome.path is not None and names_path(str(outcome.error), outcome.path)


def swaps(raised: list[Outcome]) -> Iterator[Swap]:
    """Yield wrong expectations, each with one fact of the next outcome that differs in it."""
    with_option = [outcome for outcome in raised if names_its_option(outcome)]
    with_path = [outcome for outcome in raised if names_its_path(outcome)]
    for one, other in pairwise(with_option):
        message = str(one.error)
        # Short words such as "images" may appear in a message in another sense.
        if one.option != other.option and "_" in other.option and other.option not in one.call:
            yield Swap("option", one.error, type(one.error), option=other.option)
            yield Swap("message", type(one.error)(str(other.error)), type(one.error), option=one.option)
        for later in ("columns", "masks", "objects", "nulls", "preload", "crop_size"):
            if f" {later}=" in message and later != one.option:
                yield Swap("option in the remedy", one.error, type(one.error), option=later)
        if not issubclass(type(one.error), type(other.error)):
            yield Swap("class", one.error, type(other.error), option=one.option)
    for one, other in pairwise(with_path):
        if other.path.name not in str(one.error):
            yield Swap("path", one.error, type(one.error), path=other.path)
            yield Swap("message", type(one.error)(str(other.error)), type(one.error), path=one.path)
        yield Swap("folder", one.error, type(one.error), path=one.path.parent)
        yield Swap("longer name", one.error, type(one.error), path=one.path.with_name(f"{one.path.name}x"))
        yield Swap("part of a name", one.error, type(one.error), path=Path(one.path.name[1:]))


def test_raises_accepts_each_real_message(raised):
    for outcome in raised:
        option = outcome.option if names_its_option(outcome) else None
        path = outcome.path if names_its_path(outcome) else None
        with raises(type(outcome.error), option, path, remedy=states_remedy(str(outcome.error))):
            raise outcome.error
    assert len(raised) >= 150


def test_raises_rejects_each_swapped_class_message_option_and_path(raised):
    all_swaps = list(swaps(raised))
    assert [swap for swap in all_swaps if not swap.is_rejected()] == []
    counts = Counter(swap.respect for swap in all_swaps)
    options = counts["option"] + counts["option in the remedy"]
    assert min(options, counts["message"], counts["path"], counts["class"]) >= 40, counts


@pytest.mark.parametrize(
    ("message", "option"),
    [
        ("level=-1; it must be a whole number from 0", "level"),
        ("--level 1: Parquet has no levels; leave it out", "--level"),
        ("Invalid value for '--task': '3/2' is not a task; write 3/384", "--task"),
        ("on='image_id': it says how columns= are joined; pass columns= with it", "on"),
        ("/a/level=2/b.parquet: engine='x' is unknown", "engine"),
        ("a.parquet: x == 2 is false; pass nulls='skip'", "nulls"),
        ("a.parquet: no such file", None),
    ],
)
def test_offending_option_is_the_first_one_outside_paths(message, option):
    assert offending_option(message) == option


@pytest.mark.parametrize(
    ("message", "option", "is_named"),
    [
        ("new.parquet: image_ids has 1 entries", "image_ids", True),
        ("new.parquet: pass image_ids= again", "image_ids", True),
        ("columns= has no key; pass on= with names", "on", False),
        ("--crop 9: too large; pass --pad", "--pad", False),
        ("/data/level/a.parquet: no such file", "level", False),
        ("the sublevel is unknown", "level", False),
        ("it is unknown; see level", "level", False),
    ],
)
def test_names_option_is_true_if_it_precedes_other_options(message, option, is_named):
    assert names_option(message, option) is is_named


@pytest.mark.parametrize(
    ("path", "is_named"),
    [
        ("/data/plate.tiffs/a.tif", True),
        ("plate.tiffs/a.tif", True),
        ("a.tif", True),
        ("/data/plate.tiffs", True),
        ("/data", False),
        ("/data/plate", False),
        ("late.tiffs/a.tif", False),
        ("a.tiff", False),
    ],
)
def test_names_path_is_true_for_whole_names_of_files_and_collections(path, is_named):
    assert names_path("/data/plate.tiffs/a.tif: cannot be read; restore it", path) is is_named


@pytest.mark.parametrize(
    ("message", "states"),
    [
        ("a.parquet: exists already; pass overwrite=True", True),
        ("a.parquet: exists already; remove it, or choose another path", True),
        ("pad='mirror'; it must be one of 'edge', 'drop'", False),
        ("select={'C': 7} is outside C", False),
        ("IO error: attempted to read 7 bytes", False),
        ("a.parquet: no such file", False),
    ],
)
def test_states_remedy_is_true_for_instructions_only(message, states):
    assert states_remedy(message) is states


def test_raises_reports_all_that_a_message_lacks():
    with pytest.raises(pytest.fail.Exception) as failed, raises(FormatError, "level", "b.parquet"):
        raise FormatError("a.parquet: no such file")
    expected = "does not name the option 'level' first; does not name the path 'b.parquet'; states no remedy"
    assert expected in str(failed.value)


def test_raises_accepts_facts_as_whole_words_only():
    with raises(ArgumentError, "level", mentions=[1, "Parquet"]):
        raise ArgumentError("level=1: Parquet has no levels; leave it out")
    with pytest.raises(pytest.fail.Exception) as failed, raises(ArgumentError, mentions="Parq"):
        raise ArgumentError("level=1: Parquet has no levels; leave it out")
    assert "does not mention 'Parq'" in str(failed.value)
