"""Modules that opening a collection and reading a batch import in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("pandas", reason="pandas is not installed, so nothing can import it")

PROGRAM = """
import sys
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
with_batch = len(next(iter(OMEArrowDataLoader(OMEArrowDataset(sys.argv[1], preload=False), batch_size=2))))
slow = {"pandas", "pyarrow.dataset"} & sys.modules.keys()
print(with_batch, *sorted(slow))
"""


@pytest.mark.parametrize("name", ["parquet", "arrow", "tiff", "ome_zarr"])
def test_opening_imports_neither_pandas_nor_pyarrow_dataset(name, stored):
    path = stored(name, [np.full((4, 4), value, np.uint16) for value in range(4)], columns={"well": ["A01"] * 4})
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
