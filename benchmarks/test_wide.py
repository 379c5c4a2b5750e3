"""Tables with thousands of feature columns, such as profiles with images: open, one column, batches, and memory.

The quick profile has 1,000 rows of 1,000 columns, the full profile 5,000 rows of 4,000 columns. Columns are float64,
and images 16 x 16. The workload does not matter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.report.ratios import held_against
from benchmarks.support.data import DataCache
from benchmarks.support.memory import STATUS, Measured
from benchmarks.support.paired import Compare, Side, drain
from benchmarks.support.workload import Profile
from omearrow_ds import Format, ImageSource, OMEArrowDataLoader, OMEArrowDataset, open_images, write_images

_SIZES = {"quick": (1_000, 1_000), "full": (5_000, 4_000)}
_SIDE, _BATCH, _SHOWN = 16, 64, "16 x 16"
wide = pytest.mark.parametrize("format_name", ["arrow", "parquet", "lance", "vortex", "duckdb"])
pytestmark = pytest.mark.skipif(not hasattr(ImageSource, "column_table"), reason="this version reads all columns")


class Tables(NamedTuple):
    """Folder of collections with ``num_rows`` images and the float64 columns ``names``."""

    folder: Path
    num_rows: int
    names: list[str]

    def path(self, fmt: Format, num_columns: int | None = None) -> Path:
        """Return the path of a collection with the first columns, or all, and write it if missing."""
        names = self.names[:num_columns]
        path = self.folder / f"{len(names)}{fmt.suffix}"
        if not path.exists():
            random = np.random.default_rng(0)
            images = (np.full((_SIDE, _SIDE), number, np.uint16) for number in range(self.num_rows))
            columns = {name: random.random(self.num_rows) for name in names}
            write_images(images, path, fmt.name, axes="YX", columns=columns)
        return path


@pytest.fixture(scope="module")
def tables(profile: Profile, data: DataCache) -> Iterator[Tables]:
    """Yield the tables of this module, which are removed at its end."""
    num_rows, num_columns = _SIZES[profile.name]
    with tempfile.TemporaryDirectory(prefix=".wide-", dir=data.folder) as folder:
        yield Tables(Path(folder), num_rows, [f"Cells_Feature_{number}" for number in range(num_columns)])


@wide
@pytest.mark.usefixtures("one_core")
@pytest.mark.limit("reference", "wide_open")
def test_open(compare: Compare, fmt: Format, tables: Tables) -> None:
    """Opening a wide collection and closing it, compared with reading its columns too."""
    path = tables.path(fmt)
    ours, reference = (Side(act, repeat(path)) for act in (_open, _read_columns))
    compare(ours, reference, _SHOWN, fmt.name, images=tables.num_rows)


@wide
@pytest.mark.usefixtures("one_core")
@pytest.mark.limit("reference", "wide_column")
def test_column(compare: Compare, fmt: Format, tables: Tables) -> None:
    """One column of an open collection, compared with all of them."""
    with open_images(tables.path(fmt), fmt.name) as source:
        assert np.array_equal(source.column(tables.names[7]), source.column_table(tables.names[:9])[7])
        ours = Side(source.column, cycle(tables.names))
        compare(ours, Side(source.column_table, repeat(tables.names)), _SHOWN, fmt.name, images=tables.num_rows)


@wide
@pytest.mark.usefixtures("one_core")
@pytest.mark.limit("reference", "wide_batch")
def test_batch(compare: Compare, fmt: Format, tables: Tables) -> None:
    """A shuffled epoch in batches of 64 with a target, compared with a table of only this column."""
    sides = []
    for num_columns in (None, 1):
        path = tables.path(fmt, num_columns)
        dataset = OMEArrowDataset(path, fmt.name, preload=False, axes="YX", target=tables.names[0])
        loader = OMEArrowDataLoader(dataset, _BATCH, shuffle=True)
        sides.append(Side(drain, repeat(loader), len(dataset)))
    ours, reference = sides
    compare(ours, reference, _SHOWN, fmt.name, batch_size=_BATCH, images=tables.num_rows)


@wide
@pytest.mark.limit("memory", "wide_open")
@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc, which this system has not")
def test_memory(benchmark: BenchmarkFixture, fmt: Format, tables: Tables) -> None:
    """Memory of opening, compared with the bytes of the columns."""
    with Measured("open", tables.path(fmt)) as measured:
        benchmark.pedantic(measured.run, rounds=1)
    column_bytes = tables.num_rows * len(tables.names) * np.dtype(np.float64).itemsize
    benchmark.extra_info.update(
        measured.figures, images=tables.num_rows, image_shape=_SHOWN, decoded_bytes=column_bytes
    )
    benchmark.extra_info.update(held_against("wide_open", measured.figures["growth_bytes"], column_bytes))


def _open(path: Path) -> None:
    open_images(path).close()


def _read_columns(path: Path) -> Any:
    with open_images(path) as source:
        return source.columns
