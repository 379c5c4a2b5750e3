"""Shares of the cases of a test: `make test` runs a share, and `make test-long` the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_cases_outside_of_shares(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of tests with ``@pytest.mark.share(count, *names)`` slow, except one of ``count``.

    The cases of a share form diagonals through the table of the named parameters: the positions of their values add up
    to a multiple of ``count``. The share has every value of a parameter if another one has ``count`` values or more.
    """
    values: dict[tuple[str, ...], dict[int, int]] = defaultdict(dict)  # Positions by test and name, then by identity.
    for item in items:
        for mark in item.iter_markers("share"):
            count, *names = mark.args
            total = 0
            for name in names:
                positions = values[item.parent.nodeid, item.originalname, name]
                total += positions.setdefault(id(item.callspec.params[name]), len(positions))
            if total % count:
                item.add_marker(pytest.mark.slow)
