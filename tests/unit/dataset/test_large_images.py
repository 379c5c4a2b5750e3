"""Batches of large images that share one read buffer; the oracles are tifffile and zarr."""

from __future__ import annotations

import threading
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import torch

from omearrow_ds import (
    FormatError,
    MemoryLimitError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    write_images,
)
from omearrow_ds.storage import byte_source
from omearrow_ds.storage.formats import _folder
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import slow_except

SHAPE = (1, 3, 1, 300, 310)
COUNT = 10
FOLDERS = ["tiff", "ome_zarr", "plate"]
INDICES = [7, 0, 3, 3, 9, 7, 1, 2]


def pixels_of(index):
    """Return an image whose pixels encode image, channel and position."""
    c, y, x = np.ogrid[: SHAPE[1], : SHAPE[3], : SHAPE[4]]
    return ((index * 7919 + c * 4099 + y * 311 + x) % 2**16).astype("uint16")


@pytest.fixture(scope="module")
def collections(tmp_path_factory):
    """Folders of the same images: TIFF and OME-Zarr of this package, and a plate with a file per channel."""
    needs("ome_zarr")
    folder = tmp_path_factory.mktemp("large")
    for name in ("tiff", "ome_zarr"):
        write_images([pixels_of(index) for index in range(COUNT)], folder / name, name, axes="CYX")
    (folder / "plate").mkdir()
    for index in range(COUNT):
        for channel, plane in enumerate(pixels_of(index)):
            tifffile.imwrite(folder / "plate" / f"w{index:02d}_{channel}.tif", plane)
    return folder


def open_dataset(folder, name, kind=OMEArrowDataset, **options):
    pattern = {"pattern": "{well}_{channel}.tif"} if name == "plate" else {}
    return kind(folder / name, preload=False, **pattern, **{"axes": "CYX", **options})


def batch_of(dataset):
    assert dataset._collection._filling_source is not None
    samples = np.stack([np.asarray(sample) for sample in dataset.__getitems__(INDICES)])
    assert samples.nbytes > 2**22
    return samples


@pytest.mark.parametrize(
    ("name", "threads", "kind"),
    slow_except(
        [("tiff", 1, OMEArrowDatasetNumpy), *((name, 2, OMEArrowDataset) for name in FOLDERS)],
        product(FOLDERS, [1, 2], [OMEArrowDataset, OMEArrowDatasetNumpy]),
    ),
)
def test_a_batch_holds_each_image_in_its_place_when_some_occur_twice(collections, name, threads, kind):
    known = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        batch = batch_of(open_dataset(collections, name, kind))
    finally:
        torch.set_num_threads(known)
    expected = np.stack([pixels_of(index) for index in INDICES]) / np.float32(65535)
    np.testing.assert_array_equal(batch, expected.astype("float32"))


@pytest.mark.parametrize(("compression", "threads"), [("zstd", 1), ("zstd", 2), ("none", 2)])
def test_threads_decode_parts_of_a_batch_of_compressed_parquet(tmp_path, monkeypatch, compression, threads):
    path = tmp_path / "images.parquet"
    write_images([pixels_of(index) for index in range(COUNT)], path, axes="CYX", compression=compression)
    dataset = OMEArrowDataset(path, preload=False, axes="CYX")
    source, names = dataset._collection.source, []
    read_arrays = source.read

    def read(rows, *rest):
        names.append(threading.current_thread().name)
        return read_arrays(rows, *rest)

    monkeypatch.setattr(source, "read", read)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    samples = dataset.__getitems__(INDICES)
    expected = np.stack([pixels_of(index) for index in INDICES]) / np.float32(65535)
    np.testing.assert_array_equal(np.stack([np.asarray(sample) for sample in samples]), expected.astype("float32"))
    assert len(names) == (threads if compression == "zstd" else 0)
    assert all(("omearrow_ds-batch" in name) == (threads > 1) for name in names)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_batch_is_cut_when_axes_and_channels_are_chosen(collections, name):
    dataset = open_dataset(collections, name, axes="YXC", select={"C": [2, 0], "X": slice(3, 303)}, normalize=False)
    expected = np.stack([pixels_of(index)[[2, 0], :, 3:303].transpose(1, 2, 0) for index in INDICES])
    np.testing.assert_array_equal(np.stack([np.asarray(sample) for sample in dataset.__getitems__(INDICES)]), expected)


@pytest.mark.parametrize("name", FOLDERS)
def test_batches_of_workers_are_those_of_the_files(collections, name):
    loader = OMEArrowDataLoader(open_dataset(collections, name, normalize=False), 5, num_workers=1, timeout=120)
    batches = np.concatenate([batch.numpy() for batch in loader])
    if name == "tiff":
        files = sorted((collections / name).glob("*.tif*"))
        stored = [tifffile.imread(file).reshape(SHAPE[1], *SHAPE[3:]) for file in files]
        assert sorted(image.tobytes() for image in stored) == sorted(image.tobytes() for image in batches)
    np.testing.assert_array_equal(batches, np.stack([pixels_of(index) for index in range(COUNT)]))


@pytest.mark.parametrize("name", ["tiff", "ome_zarr"])
def test_a_truncated_file_is_an_error_when_it_was_cut_after_opening(tmp_path, monkeypatch, name):
    needs("ome_zarr")
    for module in (byte_source, _folder):
        monkeypatch.setattr(module, "STATUS_NS", 0)
    path = tmp_path / name
    write_images([pixels_of(index) for index in range(COUNT)], path, name, axes="CYX")
    dataset = open_dataset(tmp_path, name)
    batch_of(dataset)
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1000])
    with raises(FormatError, path=largest, remedy=False):
        OMEArrowDataset(path, preload=False, axes="CYX").__getitems__(list(range(COUNT)))
    with raises(FormatError, path=largest, remedy=False):
        dataset.__getitems__(list(range(COUNT)))


def test_sizes_are_exact_when_invalid_shapes_exceed_int64(tmp_path):
    path, num_bytes = tmp_path / "images.parquet", 16 * 2**29 * (2**28 - 1) * 8
    write_images([np.zeros((2, 3))] * 16, path)
    table = pq.read_table(path)
    records = table["ome_image"].to_pylist()
    for record in records:
        record["pixels_meta"] |= {"size_x": 2**29, "size_y": 2**28 - 1}
    pq.write_table(table.set_column(0, table.schema.field(0), pa.array(records, table.schema.field(0).type)), path)
    dataset = OMEArrowDataset(path, preload=False)
    assert dataset.nbytes == dataset.preload_bytes == num_bytes > 2**63
    assert "PB decoded" in dataset._repr_html_()
    with raises(MemoryLimitError, path=path, mentions=f"{num_bytes:,}"):
        OMEArrowDataset(path)
