"""Choice of compiled loops or NumPy for making samples; tests use NumPy by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from omearrow_ds.kernels import compiled


@contextmanager
def made_by(which: str) -> Iterator[None]:
    """Make samples with ``"numba"``, skipping the test if it is not installed, or with ``"numpy"``."""
    if which == "numba":
        pytest.importorskip("numba")
    counted = compiled.COUNTER
    before = vars(counted).copy()
    counted.made_bytes = 2 * compiled.WORTH_BYTES if which == "numba" else -(2**62)
    counted.worth = which == "numba"
    try:
        yield
    finally:
        vars(counted).clear()
        vars(counted).update(before)
