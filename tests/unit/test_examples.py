"""Docstrings of public names have a runnable example; those of functions describe results and errors."""

from __future__ import annotations

import doctest
import inspect
import re
from itertools import pairwise

import pytest

import omearrow_ds
from tests.support import pages

FLAGS = doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE
WITHOUT_EXAMPLE = {"FORMATS"}  # A tuple, whose docstring would be that of tuples.


def documented_names():
    return sorted(set(omearrow_ds.__all__) - WITHOUT_EXAMPLE)


@pytest.fixture
def plate(tmp_path, monkeypatch):
    """Change to a folder with a plate as TIFF files, as one file, and with cells and masks; measurements are short."""
    monkeypatch.setattr("omearrow_ds.advise.profile.measure._TURN_S", (0.01, 0.01))
    pages.plate_of_files(tmp_path / "plate", tmp_path / "plate" / "masks")
    pages.plate_of_images(tmp_path / "plate.arrow")
    pages.cells(tmp_path / "cells.parquet")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", documented_names())
def test_example_of_docstring_runs(name, plate):
    docstring = inspect.getdoc(getattr(omearrow_ds, name)) or ""
    example = doctest.DocTestParser().get_doctest(docstring, {}, name, None, None)
    assert example.examples
    output: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=output.append)
    assert not output, "".join(output)


@pytest.mark.parametrize("name", documented_names())
def test_docstring_of_function_has_returns_and_raises(name):
    member = getattr(omearrow_ds, name)
    docstring = inspect.getdoc(member) or ""
    if inspect.isfunction(member):
        assert "\nReturns\n-------\n" in docstring
        assert "\nRaises\n------\n" in docstring


def sentences_of_parameters(docstring):
    """Return the number of sentences per parameter of a numpydoc docstring."""
    sections = re.split(r"^(\w[\w ]*)\n-+\n", docstring, flags=re.MULTILINE)
    (section,) = [text for title, text in pairwise(sections) if title == "Parameters"] or [""]
    parameters = re.findall(r"^(\S[^\n]*)\n((?: +[^\n]*\n?)+)", section, re.MULTILINE)
    return {name: len(re.findall(r"[.!?](?=\s+[A-Z`*\"]|\s*$)", " ".join(text.split()))) for name, text in parameters}


def test_sentences_of_parameters_are_counted():
    parameters = "a, b\n    One (`a.md`). ``Two``,\n    with 1.5 x.\nc\n    One.\n"
    docstring = f"Do it.\n\nParameters\n----------\n{parameters}\nReturns\n-------\nint\n    None."
    assert sentences_of_parameters(docstring) == {"a, b": 2, "c": 1}


@pytest.mark.parametrize("name", documented_names())
def test_parameters_have_one_or_two_sentences(name):
    counts = sentences_of_parameters(inspect.getdoc(getattr(omearrow_ds, name)) or "")
    assert set(counts.values()) <= {1, 2}, counts
