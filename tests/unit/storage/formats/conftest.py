"""Fixture shared by the tests of formats."""

from __future__ import annotations

from itertools import count

import pytest


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Return a function that returns an unused path."""
    folder, numbers = tmp_path_factory.mktemp("fresh"), count()
    return lambda suffix: folder / f"{next(numbers)}{suffix}"
