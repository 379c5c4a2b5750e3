"""The processes that `after_profiling` is measured in: they read, and one that cannot says so."""

from __future__ import annotations

import pytest

from benchmarks.support.reading import Reading
from tests.support.strategies import images_of


@pytest.mark.parametrize("profiled", [True, pytest.param(False, marks=pytest.mark.long)])
def test_it_reads_until_it_is_left(stored, profiled):
    path = stored("arrow", images_of([((1, 1, 1, 4, 5), "uint16")] * 3))
    with Reading(path, "arrow", "CYX", profiled=profiled) as reading:
        reading.read(7)
        reading.read(1)
    assert reading._process.returncode == 0


def test_one_that_cannot_read_is_an_error(tmp_path, capfd):
    with (
        Reading(tmp_path / "none.arrow", "arrow", "CYX", profiled=False) as reading,
        pytest.raises(RuntimeError, match="ended with status 1"),
    ):
        reading.read(1)
    assert "no such file" in capfd.readouterr().err
