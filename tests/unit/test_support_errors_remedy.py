"""Messages that count as stating a remedy, and facts that `warns` compares."""

from __future__ import annotations

import warnings
import weakref

import pytest

from tests.support.errors import raises, states_remedy, warns

WITH_REMEDY = [
    "x.parquet: 3 columns hold images; pass image_column= with the name of one",
    "x.tif: holds 2 images; one image per file is needed, split or join them first",
    "pipe: is a pipe; a file or a folder is needed: copy its content to one",
    "x.zarr: well 'A/1' is missing; restore it, or take it out of the list",
    "x.arrow: image 0 is smaller than crop_size=(129, 1); crop less",
    "bandwidth='1G': has no unit; write 1Gb or 1Gbit",
    "format 'lance': needs the module 'lance'; pip install 'omearrow-ds[lance]'",
    "s3://lab/x.lance: no answer came for 2 s; ValueError; see whether the server is up",
    "x.parquet: image 1, float32, has other pixels than image 0; measure them apart, with by=",
    "x.parquet: column 'holes' is null for 1 of 5 images (leave them out, or fill it)",
    "x.parts: was begun with other options; for another one, or remove x.parts",
]
WITHOUT_REMEDY = [
    "x.parquet: no such file or folder",
    "x.parquet: cannot be read as Parquet; it is damaged, incomplete or of another format: failed to read 84 bytes",
    "x.parts: it is an empty folder; there are no images to read",
    "objects=: has no objects to crop around, so there is nothing to measure",
    "encoding='png': is unknown; the encodings are bytes, list",
    "STAGES: 'reading' is unknown; there are open, read, select, other",
    "b.json: is damaged (TypeError: list indices must be integers or slices, not str)",
    "x.csv: is damaged; struct.error: unpack requires a buffer of 4 bytes",
    "select={'Z': 3}: is outside Z, which has length 3",
    "crop='random': it must be 'center' or 'grid'",
    "on=5: it must be the name of a column, or name of several",
    "epoch[arrow]: read has 2 values for 1 round",
    "by='well': no such column; there are ['plate', 'open', 'set']",
    "image 4: the image is 5 x 5, and the crop 6 x 6",
    "columns=: no column 'y' to join on; there are ['image_id']",
]


def _warn(*messages: str) -> None:
    for message in messages:
        warnings.warn(message, UserWarning, stacklevel=2)


@pytest.mark.parametrize("message", WITH_REMEDY)
def test_states_remedy_is_true_when_a_message_instructs(message: str) -> None:
    assert states_remedy(message)


@pytest.mark.parametrize("message", WITHOUT_REMEDY)
def test_states_remedy_is_false_when_a_message_states_facts_only(message: str) -> None:
    assert not states_remedy(message)


def test_warns_returns_the_warnings_when_one_has_the_facts() -> None:
    with warns(UserWarning, option="columns", path="a/x.arrow", mentions=("1 of 4", "'c'")) as caught:
        _warn("/tmp/a/x.arrow: columns= has no row for 1 of 4 images, 'c'")
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("expected", "lack"),
    [
        ({"option": "pad"}, "does not name the option 'pad' first"),
        ({"path": "y.arrow"}, "does not name the path 'y.arrow'"),
        ({"mentions": "2 of 4"}, "does not mention '2 of 4'"),
    ],
)
def test_warns_fails_when_no_warning_has_the_facts(expected: dict[str, str], lack: str) -> None:
    with pytest.raises(pytest.fail.Exception) as failed, warns(UserWarning, **expected):
        _warn("x.arrow: columns= has no row for 1 of 4 images")
    assert lack in str(failed.value)


def test_warns_issues_other_warnings_again_when_one_has_the_facts() -> None:
    with pytest.warns(UserWarning, match="other") as outer, warns(UserWarning, mentions="first"):
        _warn("the first", "the other")
    assert [str(warning.message) for warning in outer] == ["the other"]


def test_warns_fails_when_nothing_is_warned() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT WARN"), warns(UserWarning):
        pass


def test_raises_releases_the_error_when_the_test_deletes_it() -> None:
    class OwnError(Exception):
        pass

    with raises(OwnError, remedy=False) as caught:
        raise OwnError("x")
    error = weakref.ref(caught.value)
    del caught
    assert error() is None
