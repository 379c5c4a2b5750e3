"""Option records agree with signatures, checks, flags, help and reference."""

from __future__ import annotations

import inspect
import re
import runpy
import typing
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import omearrow_ds
import tests
from omearrow_ds import (
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    convert,
    profile_dataset,
    recommend,
    show,
    stats,
    write_crops,
)
from omearrow_ds.cli.options import flags
from omearrow_ds.dataset.crop_boxes import DatasetOptions
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError
from omearrow_ds.options import (
    LAYOUT,
    PARTS,
    OpenSettings,
    ProfileSettings,
    RecommendSettings,
    SampleSettings,
    WriteSettings,
    check_integer,
    flag_of,
    option,
    options_of,
    rule_of,
)
from omearrow_ds.storage.protocol import OpenOptions
from tests.support.errors import raises

RECORDS = (OpenSettings, SampleSettings, WriteSettings, ProfileSettings, RecommendSettings)
OF_TARGET = {*LAYOUT, "progress", "overwrite"}
SIGNATURES = {
    "open_images": (omearrow_ds.open_images, OpenSettings, {field.name for field in options_of(OpenSettings)}),
    "write_images": (omearrow_ds.write_images, WriteSettings, OF_TARGET),
    "convert": (omearrow_ds.convert, WriteSettings, OF_TARGET | {*PARTS, "target_storage"}),
    "write_crops": (omearrow_ds.write_crops, WriteSettings, OF_TARGET | {*PARTS, "target_storage"}),
    **{
        function.__name__: (function, record, {option.name for option in options_of(record)})
        for function, record in ((profile_dataset, ProfileSettings), (recommend, RecommendSettings))
    },
}
OF_CROPS = {"objects", "center", "box", "crop", "overlap", "pad", "resize", "pad_to"}
OF_SAMPLES = {field.name for field in options_of(SampleSettings)} - OF_CROPS
SIGNATURES["OMEArrowDataset"] = (omearrow_ds.OMEArrowDataset.__init__, SampleSettings, OF_SAMPLES)
SIGNATURES["OMEArrowDatasetNumpy"] = (StoredSamples.__init__, SampleSettings, OF_SAMPLES - {"transform"})


@dataclass(frozen=True, kw_only=True)
class WithHalo(OpenSettings):
    """Options of opening, and a new one."""

    halo: int = option(0, "Pixels around each image.", kind="integer", minimum=0, metavar="N")


def reference():
    """Return the names of the module that generates the reference pages."""
    return runpy.run_path(str(Path(tests.__file__).parents[1] / "docs" / "conf.py"))


def declared(record):
    return {field.name: field for field in options_of(record)}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_have_the_options_and_defaults_of_the_record(name):
    function, record, expected = SIGNATURES[name]
    parameters = inspect.signature(function).parameters
    keywords = {
        parameter.name: parameter.default
        for parameter in parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name in {*declared(record), *expected}
    }
    assert keywords == {option_name: declared(record)[option_name].default for option_name in expected}


@pytest.mark.parametrize(
    ("typed", "record"), [(OpenOptions, OpenSettings), (DatasetOptions, SampleSettings), (OpenOptions, WithHalo)]
)
def test_typed_keywords_are_options_of_the_record(typed, record):
    own = set(typed.__annotations__) - (set(OpenOptions.__annotations__) if typed is DatasetOptions else set())
    expected = OF_CROPS if typed is DatasetOptions else {*declared(OpenSettings)}
    assert own == expected
    assert own <= {*declared(record)}


@pytest.mark.parametrize("record", RECORDS)
def test_choices_are_those_of_the_annotation(record):
    hints = typing.get_type_hints(record, None, {"re": re, "Executor": object})
    for field in options_of(record):
        choices = {arm for arm in _literals(hints[field.name]) if arm is not None}
        assert choices == set(rule_of(field).choices), field.name


def _literals(hint):
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return {value for arm in typing.get_args(hint) for value in _literals(arm)}


class TestNewOption:
    """An option that is added to a record needs no other declaration."""

    @pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
    def test_check_rejects_an_invalid_value(self, value):
        with raises(ArgumentError, option="halo", mentions=("whole number", 0), remedy=False) as caught:
            WithHalo(halo=value)
        assert (caught.value.option, caught.value.value) == ("halo", value)

    def test_check_accepts_a_valid_value(self):
        assert WithHalo(halo=np.int64(3), level=0).chosen == {"halo": 3}

    def test_flag_and_help_show_the_option(self):
        command = click.command()(flags(WithHalo)(lambda **options: click.echo(options["halo"])))
        runner = CliRunner()
        assert runner.invoke(command, ["--halo", "4"]).output == "4\n"
        assert runner.invoke(command, ["--halo", "-1"]).exit_code == 2
        line = next(line for line in runner.invoke(command, ["--help"]).output.splitlines() if "--halo" in line)
        assert line.split() == ["--halo", "N", "Pixels", "around", "each", "image.", "[x>=0]"]

    def test_reference_shows_the_option(self):
        describe_options = reference()["describe_options"]
        assert "| `halo=`<br>`--halo` | `0` | from 0 | Pixels around each image. |" in describe_options(WithHalo)


@pytest.mark.parametrize("record", RECORDS)
def test_reference_page_lists_each_option(record):
    page = reference()["options_page"]()
    for field in options_of(record):
        assert f"| `{field.name}=`{f'<br>`{flag_of(field)}`' if flag_of(field) else ''} |" in page


@pytest.mark.parametrize("record", RECORDS)
def test_each_option_has_help_and_a_default(record):
    for field in fields(record):
        if field.init:
            first_word = rule_of(field).help.split(" ")[0]
            assert field.default is not MISSING
            assert first_word[:1].isupper() or first_word in ("none:", "torch.nn.Module,")


@given(st.integers() | st.booleans() | st.floats() | st.text() | st.none() | st.integers(0, 255).map(np.uint8))
def test_check_integer_returns_whole_numbers_from_the_minimum(value):
    is_allowed = not isinstance(value, bool) and isinstance(value, int | np.integer) and 1 <= value <= 100
    if is_allowed:
        number = check_integer("level", value, 1, maximum=100)
        assert (type(number), number) == (int, int(value))
        return
    with raises(ArgumentError, option="level", mentions="whole number from 1", remedy=False):
        check_integer("level", value, 1, maximum=100)


@pytest.mark.parametrize("function", [convert, write_crops, show, stats, recommend])
def test_function_suggests_its_own_parameters_when_an_option_is_misspelled(function, tmp_path):
    parameters = inspect.signature(function).parameters
    name = "overwrite" if "overwrite" in parameters else "progress"
    required = [tmp_path for parameter in parameters.values() if parameter.default is parameter.empty][:-1]
    with raises(ArgumentError, f"{name}e", mentions=[f"unknown option of {function.__name__}", f"{name}="]):
        function(*required, **{f"{name}e": True})


@pytest.mark.parametrize(
    ("dataset", "name", "remedy"),
    [
        (OMEArrowDataset, "cropsize", "use crop_size="),
        (OMEArrowDatasetNumpy, "cropsize", "use crop_size="),
        (OMEArrowDataset, "qqq", "use one of axes, "),
        (OMEArrowDatasetNumpy, "transform", "use one of axes, "),
    ],
)
def test_dataset_states_path_and_remedy_of_an_unknown_option(dataset, name, remedy):
    message = f"plate: {name}=4: unknown option of {dataset.__name__}; {remedy}"
    with raises(ArgumentError, name, "plate") as caught:
        dataset("plate", **{name: 4})
    assert str(caught.value).startswith(message)
