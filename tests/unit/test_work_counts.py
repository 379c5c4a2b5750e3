"""The work of the hot paths, counted exactly: a count that grew is a regression on any machine.

The tables of `work_counts` hold the current counts, with the libraries of ``constraints.txt``. Lower a count in the
commit that makes it smaller; one that grows needs a reason.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from omearrow_ds import OMEArrowDataset, open_images, write_images
from omearrow_ds.dataset.batch import collate
from omearrow_ds.kernels import gather as rows
from omearrow_ds.kernels import stacks
from omearrow_ds.storage import byte_source
from omearrow_ds.storage.formats import _folder, get_format, parquet
from omearrow_ds.storage.verified import decode
from omearrow_ds.testing import synthetic_images
from tests.conftest import needs
from tests.support.counting import LEAST_BYTES, SpiedConnection, calls_of, memory_of, torch_bytes_of
from tests.support.errors import raises
from tests.support.raw_tables import store_table, struct_of
from tests.support.strategies import FEW_FORMATS, SUFFIX, TABLES, slow_except
from tests.support.work_counts import (
    ALLOCATED,
    ARROW,
    ASKED,
    CALLED,
    CASES,
    HELD,
    OPENED,
    PRELOADED,
    SIDES,
    SLOW_ENGINES,
    STORE,
    VERIFIED,
)

pytestmark = pytest.mark.skipif(
    not hasattr(pa.MemoryPool, "total_bytes_allocated"), reason="this pyarrow does not count what it allocates"
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return a function that writes the images of a case once, and returns their path."""
    paths = {}
    folder = tmp_path_factory.mktemp("counted")

    def path_of(case, side):
        name, encoding = case.split()[:2]
        needs(name)
        key = name, encoding, side
        if key not in paths:
            paths[key] = folder / f"{encoding}-{side}{SUFFIX[name]}"
            count = SIDES[side]
            columns = {"well": [f"A{number}" for number in range(count)], "score": list(range(count))}
            images = synthetic_images(count, (1, 1, 1, side, side))
            write_images(images, paths[key], name, encoding=encoding, columns=columns)
        return paths[key]

    return path_of


@pytest.fixture(autouse=True)
def looked_at(monkeypatch):
    """Disable checks of files and disk reads, which run once per millisecond, not per call."""
    for module in (byte_source, _folder):
        monkeypatch.setattr(module, "STATUS_NS", 10**15)
    monkeypatch.setattr(stacks, "_QUERY_NS", 10**15)


@pytest.fixture
def spied(monkeypatch):
    """Record the queries of DuckDB connections that are opened from now on."""
    module = get_format("duckdb").module()
    connect = module.connect
    monkeypatch.setattr(module, "connect", lambda **settings: SpiedConnection(connect(**settings)))


def source_of(case, path):
    name, _, *engine = case.split()
    return open_images(path, name, engine=engine[-1] if engine else None)


def operations(case, path, side):
    """Return the operations to count, each after two warm-up calls; slow engines are counted for sources only."""
    source, batch = source_of(case, path), list(range(0, SIDES[side], 2))
    decoded = np.empty((SIDES[side], 1, 1, 1, side, side), np.uint16)
    of_source = [lambda: source.take(batch), lambda: decode(source.images, decoded)]
    dataset = OMEArrowDataset(path, preload=False)
    reads = [lambda: dataset[3], lambda: dataset.__getitems__(batch)]
    reads = [*(reads if case not in SLOW_ENGINES else []), *of_source]
    for operation in reads * 2:
        operation()
    return reads


def compare(case, names, counts, frozen):
    """Fail if a count differs from the table, and name the count and the remedy."""
    changed = [
        f"{case}, {name}: {'shrank' if now < then else 'grew'} from {then} to {now:g}"
        for name, now, then in zip(names, counts, frozen, strict=True)
        if now != then
    ]
    advice = "mend what grew, or say in the commit why it must; put what shrank into the table, so that it stays"
    assert not changed, f"{'; '.join(changed)} ({advice})"


FEW_CASES = [case for case in CASES if case.endswith(" bytes") or case.split()[0] in FEW_FORMATS]
FEW_SIZES = [(case, max(SIDES)) for case in FEW_CASES] + [(f"{name} bytes", min(SIDES)) for name in FEW_FORMATS]


@pytest.mark.parametrize(("case", "side"), slow_except(FEW_SIZES, product(CASES, SIDES)))
def test_memory(opened, case, side):
    memories = [memory_of(operation) for operation in operations(case, opened(case, side), side)]
    names = ("a sample", "a batch", "take", "decoding all")[-len(memories) :]
    sizes = (1, SIDES[side] // 2, SIDES[side] // 2, SIDES[side])[-len(memories) :]
    image_bytes, case_of_side = 2 * side**2, f"{case}, {side} x {side}"
    allocated = [memory.numpy_bytes / image_bytes / size for memory, size in zip(memories, sizes, strict=True)]
    frozen = ALLOCATED[case][[*SIDES].index(side)]
    compare(case_of_side, [f"images allocated for each of {name}" for name in names], allocated, frozen)
    if side == max(SIDES):  # For large images, KiB of Python objects and NumPy's cast buffers are less than an image.
        images_held = [memory.peak_bytes // image_bytes for memory in memories]
        compare(case_of_side, [f"images held for {name}" for name in names], images_held, HELD[case])
        arrow = [memory.arrow_bytes // image_bytes for memory in memories]
        frozen = ARROW.get(case, (0,) * len(memories))
        compare(case_of_side, [f"images of Arrow for {name}" for name in names], arrow, frozen)


@pytest.mark.parametrize("case", slow_except(FEW_CASES, CASES))
def test_calls(opened, spied, case):
    counted = [calls_of(operation) for operation in operations(case, opened(case, 100), 100)]
    names = ("a sample", "a batch of 16", "take of 16", "decoding all 32")[-len(counted) :]
    labels = [f"own functions called for {name}" for name in names]
    counts, frozen = [calls.own for calls in counted], [*CALLED[case]]
    of_engine = case in SLOW_ENGINES
    for position, calls in zip((0 if of_engine else 1, -1), STORE.get(case, ({}, {})), strict=True):
        store = counted[position].store
        kinds = sorted({*store, *calls})
        labels += [f"calls of {kind} for {names[position]}" for kind in kinds]
        counts += [store.get(kind, 0) for kind in kinds]
        frozen += [calls.get(kind, 0) for kind in kinds]
    compare(case, labels, counts, frozen)


@pytest.mark.parametrize("case", slow_except(FEW_CASES, [case for case in CASES if case.split()[0] in TABLES]))
def test_columns(opened, spied, case):
    path, sources = opened(case, 100), []
    opening = calls_of(lambda: sources.append(source_of(case, path)))
    # As the first read of Parquet does.
    locating = calls_of(lambda: getattr(getattr(sources[0].images, "table", None), "_leaf", None))
    reading = calls_of(lambda: (sources[0].take([5, 3]), list(sources[0].images.stream())))
    requests = (*opening.requests, *locating.requests)
    pixels = [request for request in requests if re.search(r"\b(pixels|pixel_bytes)\b", request)]
    assert len(pixels) == (case == VERIFIED), f"{case}: opening asks for pixels: {pixels}"
    others = len(opening.requests) - (case == VERIFIED)
    compare(case, ["requests of opening"], [others], [OPENED.get(case, OPENED[case.split()[0]])])
    requests = {item for item in reading.requests if item}
    assert requests == ASKED.get(case, set()), f"{case}: reading asks for {requests}, not for {ASKED.get(case, set())}"


OF_OTHERS = [*(f"{name} bytes" for name in TABLES if name != "parquet_duck"), "arrow zstd", "parquet zstd"]


def work_beside(others, case, column, path):
    """Return requests, calls and allocations of opening and reading a column in a table with other columns."""
    name, compression, *engine = case.split()
    table = pa.table({"row": range(len(column)), "a": column, **others})
    store_table(name, table, path, "zstd" if compression == "zstd" else None)
    open_it = partial(open_images, path, name, image_column="a", engine=engine[-1] if engine else None)
    opening = calls_of(open_it)
    opened, decoded = open_it(), np.empty((len(column), 1, 1, 1, 128, 128), np.uint16)
    reading = [
        partial(opened.take, [5, 3, 8, 0]),
        partial(decode, opened.images, decoded),
        partial(opened.images.read, [7]),
    ]
    for operation in reading * 2:
        operation()
    calls, memory = list(map(calls_of, reading)), list(map(memory_of, reading))
    assert not any("other" in request for item in [opening, *calls] for request in item.requests)
    counted = [(item.own, item.store, len(item.requests)) for item in calls]
    return counted, len(opening.requests), [(item.numpy_bytes, item.arrow_bytes // 2**18) for item in memory]


@pytest.mark.parametrize("case", slow_except(["lance bytes", "arrow zstd", "parquet zstd"], OF_OTHERS))
def test_other_image_columns_cost_nothing(tmp_path, spied, case):
    images = [[image] for image in synthetic_images(9, (1, 1, 1, 128, 128))]
    column = struct_of(images)
    dark = struct_of([[np.zeros((1, 1, 1, 128, 128), np.uint16)]] * len(images))
    alone = work_beside({}, case, column, tmp_path / f"alone{SUFFIX[case.split()[0]]}")
    others = dict.fromkeys(["other1", "other2", "other3"], dark)  # Small, but slow to decompress.
    beside = work_beside(others, case, column, tmp_path / f"beside{SUFFIX[case.split()[0]]}")
    assert alone == beside


@pytest.mark.parametrize(("kind", "side"), PRELOADED, ids=lambda each: getattr(each, "__name__", str(each)))
def test_preloaded(opened, kind, side):
    dataset, batch = kind(opened("arrow bytes", side)), list(range(0, SIDES[side], 2))
    found = [lambda: dataset[3], lambda: dataset.__getitems__(batch)]
    for operation in found * 2:
        operation()
    case, names, sizes = f"{kind.__name__}, preloaded, {side} x {side}", ("a sample", "a batch"), (1, len(batch))
    memory, calls = [memory_of(operation) for operation in found], [calls_of(operation) for operation in found]
    images = [each.numpy_bytes / (2 * side**2) / size for each, size in zip(memory, sizes, strict=True)]
    scaled = [each.scaled_bytes / (4 * side**2) / size for each, size in zip(calls, sizes, strict=True)]
    allocated, called = PRELOADED[kind, side]
    compare(case, [f"images allocated for each of {name}" for name in names], images, allocated)
    compare(case, [f"own functions called for {name}" for name in names], [each.own for each in calls], called)
    compare(case, [f"times that {name} is written" for name in names], scaled, (1, 1))
    compare(case, [f"bytes of Arrow for {name}" for name in names], [each.arrow_bytes for each in memory], (0, 0))
    assert [each.store for each in calls] == [{}, {}]


@pytest.mark.parametrize("preload", [True, False])
def test_torch_allocates_nothing(opened, preload):
    dataset, batch = OMEArrowDataset(opened("arrow bytes", 100), preload=preload), list(range(16))
    operations = {
        "a sample": lambda: dataset[3],
        "a batch": lambda: dataset.__getitems__(batch),
        "a batch of torch's loader": lambda: _MapDatasetFetcher(dataset, True, default_collate, False).fetch(batch),
        "a batch of our loader": lambda: _MapDatasetFetcher(dataset, True, collate, False).fetch(batch),
    }
    allocated = [torch_bytes_of(operation) for operation in operations.values()]
    compare(
        f"preload={preload}", [f"bytes of torch for {name}" for name in operations], allocated, (0,) * len(operations)
    )


def test_a_planted_copy_is_seen(opened, monkeypatch):
    dataset, scale = OMEArrowDataset(opened("arrow bytes", 100)), rows.scale
    monkeypatch.setattr(rows, "scale", lambda pixels, divisor, out: scale(pixels.copy(), divisor, out))
    assert memory_of(lambda: dataset[3]).numpy_bytes == 3 * 20_000
    zeros, table = np.zeros(LEAST_BYTES, np.uint8), pa.array(range(10_000))
    assert memory_of(lambda: pa.concat_arrays([table, table])).arrow_bytes >= 2 * table.nbytes
    assert memory_of(lambda: [bytes(zeros) for _ in range(10)]).peak_bytes >= 10 * LEAST_BYTES
    assert torch_bytes_of(lambda: torch.from_numpy(zeros).clone()) == LEAST_BYTES


def test_planted_calls_are_seen(opened, monkeypatch):
    dataset = OMEArrowDataset(opened("arrow bytes", 100))

    def one_by_one(self, positions, samples, threads=1):
        for index, position in enumerate(positions):
            samples[index] = self.sample(position)

    batched = calls_of(lambda: dataset.__getitems__(list(range(16))))
    monkeypatch.setattr(rows.DecodedRows, "batch", one_by_one)
    assert calls_of(lambda: dataset.__getitems__(list(range(16)))).own > batched.own + 16


def test_planted_reads_are_seen(opened, monkeypatch):
    source = source_of("parquet bytes by pyarrow", opened("parquet bytes", 100))
    source.images.table._located_leaf = replace(source.images.table._leaf, paths=["ome_image.chunks"])
    read_images = parquet.ParquetTable.read_images
    one_by_one = lambda self, rows: [read_images(self, [row])[0] for row in rows]  # noqa: E731
    monkeypatch.setattr(parquet.ParquetTable, "read_images", one_by_one)
    calls = calls_of(lambda: source.take(range(0, 32, 2)))
    assert calls.store["ParquetFile.read_row_group"] == 16
    assert set(calls.requests) == {"ome_image.chunks"}


def test_a_changed_count_says_what_to_do():
    with raises(AssertionError, mentions=("parquet", "reads", "1 to 16", "copies", "2 to 1")):
        compare("parquet", ["reads", "copies", "calls"], [16, 1, 3], [1, 2, 3])
