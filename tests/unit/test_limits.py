"""Limits on package size and on steps of the main operations: `tests/limits.toml`."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest

import tests
from tests.support.code import TREES
from tests.support.size import all_members, count_tokens, find_classes, repeated_names

LIMITS = tomllib.loads((Path(tests.__file__).parent / "limits.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def classes():
    return find_classes(TREES)


@pytest.fixture(scope="module")
def walks(programs):
    code = "import runpy; runpy.run_module('tests.support.walks', run_name='__main__')"
    done = programs.run(code, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_limit_has_a_reason():
    limits = [
        LIMITS["tokens"],
        *LIMITS["members"].values(),
        LIMITS["class_names_used_twice"],
        *LIMITS["walks"].values(),
    ]
    assert all(limit["reason"].endswith(".") for limit in limits)


def test_tokens_of_the_package_are_limited():
    assert sum(count_tokens(TREES.text(name), tree) for name, tree in TREES.items()) <= LIMITS["tokens"]["limit"]


def test_tokens_exclude_comments_docstrings_and_line_breaks():
    source = '"""Module."""\n\n\ndef f(a):  # Comment.\n    """Docstring."""\n    return "text"\n'
    assert count_tokens(source, ast.parse(source)) == 8


def test_own_members_of_classes_are_limited(classes):
    largest = max(classes, key=lambda size: len(size.own_members))
    assert len(largest.own_members) <= LIMITS["members"]["own"]["limit"], largest[:2]


def test_members_of_classes_are_limited_with_inherited_ones(classes):
    sizes = {size[:2]: len(members) for size, members in all_members(classes).items()}
    largest = max(sizes, key=sizes.__getitem__)
    assert sizes[largest] <= LIMITS["members"]["inherited"]["limit"], largest


def test_repeated_class_names_are_limited(classes):
    repeated = repeated_names(classes)
    assert len(repeated) <= LIMITS["class_names_used_twice"]["limit"], repeated


def test_every_walk_has_a_limit(walks):
    assert set(walks) == set(LIMITS["walks"])


@pytest.mark.parametrize("operation", LIMITS["walks"])
def test_steps_of_operations_are_limited(walks, operation):
    calls, file_changes = walks[operation]
    limit = LIMITS["walks"][operation]
    assert calls <= limit["calls"]
    assert file_changes <= limit["file_changes"]
