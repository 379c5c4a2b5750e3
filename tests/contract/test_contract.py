"""Names, signatures, help, outputs and errors of this version, compared with the golden files."""

from __future__ import annotations

import inspect

import pytest

import omearrow_ds
from tests.contract.calls import CALLS
from tests.contract.records import COMMAND, FOLDER, RECORDERS, as_json, difference, missing_backends, record

CALLED = [name for name in omearrow_ds.__all__ if inspect.isfunction(getattr(omearrow_ds, name))]
CALLED += ["OMEArrowDataset", "OMEArrowDataLoader"]
FLAGS = ("bool", "bool | None")
UNCHECKED = {"clock", "start_methods"}  # Functions and names that are not checked before use.


@pytest.mark.parametrize("name", RECORDERS)
def test_contract_equals_its_golden_file(name):
    if missing := missing_backends():
        pytest.skip(missing[0])
    if changes := difference(name, record(name)):
        pytest.fail(f"{changes}\n\nIf this change is intended, renew the file: {COMMAND} ARGS={name}", pytrace=False)


def test_each_golden_file_has_a_recorder():
    assert {file.name for file in FOLDER.iterdir() if file.suffix in (".json", ".txt")} == set(RECORDERS)


def test_json_has_one_line_per_short_value():
    value = {"a": [1, {"b": None}], "c": ["x" * 70, "y" * 70]}
    assert as_json(value).splitlines() == [
        "{",
        '  "a": [1, {"b": null}],',
        '  "c": [',
        f'    "{"x" * 70}",',
        f'    "{"y" * 70}"',
        "  ]",
        "}",
    ]


@pytest.mark.parametrize("name", CALLED)
def test_each_option_has_a_wrong_call(name):
    parameters = inspect.signature(getattr(omearrow_ds, name)).parameters
    options = {
        key
        for key, value in parameters.items()
        if value.kind is not value.VAR_KEYWORD and value.annotation not in FLAGS
    }
    called = {option for call, option, *_ in CALLS if call.startswith(f"{name}(")}
    assert options - called <= UNCHECKED
