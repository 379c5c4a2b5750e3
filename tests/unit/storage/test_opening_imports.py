"""Modules imported in a process by opening a collection and reading a batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import needs

pytest.importorskip("pandas", reason="pandas is not installed, so nothing can import it")

PROGRAM = """
import sys
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
for path in sys.argv[1:]:
    for preload in (False, True):
        batch = next(iter(OMEArrowDataLoader(OMEArrowDataset(path, preload=preload), batch_size=2)))
        print(len(batch), *sorted({"pandas", "pyarrow.dataset"} & sys.modules.keys()))
"""


def test_opening_imports_neither_pandas_nor_pyarrow_dataset(stored, programs):
    needs("ome_zarr")
    images = [np.full((4, 4), value, np.uint16) for value in range(4)]
    names = ["parquet", "arrow", "tiff", "ome_zarr"]
    paths = [str(stored(name, images, columns={"well": ["A01"] * 4})) for name in names]
    done = programs.run(PROGRAM, *paths, has_workers=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2"] * 2 * len(names)
