"""Chunks that are compressed one by one: bytes equal to ome-arrow's, read by ome-arrow, and shown by info."""

from __future__ import annotations

from itertools import product

import numpy as np
import ome_arrow
import pyarrow.parquet as pq
import pytest

from omearrow_ds import ArgumentError, OMEArrowDataset, open_images, write_images
from omearrow_ds.storage.describe import describe
from omearrow_ds.testing import synthetic_images
from tests.support.errors import raises
from tests.support.sources import check
from tests.support.strategies import DTYPES, MIXED, TABLES, all_same, images_of, same, slow_except

codecs = pytest.mark.parametrize("codec", ["zstd", "lz4"])


@pytest.mark.parametrize(
    ("name", "codec"), slow_except([("arrow", "lz4"), ("parquet", "zstd")], product(TABLES, ["zstd", "lz4"]))
)
def test_images_of_every_kind(stored, name, codec):
    images = images_of([*MIXED, *(((2, 3, 2, 5, 4), dtype) for dtype in DTYPES)])
    path = stored(name, images, compression=f"chunk-{codec}")
    source = open_images(path)
    check(source, images, [19, 0, 7, 7, 12])
    layout = describe(path).stored
    assert layout.compression == f"chunk-{codec}"
    assert not layout.in_place
    assert layout.reading.startswith("each chunk is decompressed separately; ")
    dataset = OMEArrowDataset(path, axes="TCZYX", normalize=False, preload=True)
    assert all(same(dataset[index].numpy(), image) for index, image in enumerate(images))


@codecs
def test_ome_arrow_reads_it(stored, codec):
    images = images_of([*MIXED, *(((2, 3, 2, 5, 4), dtype) for dtype in DTYPES)])
    column = pq.read_table(stored("parquet", images, compression=f"chunk-{codec}"))["ome_image"]
    assert {chunk["compression"] for row in column.to_pylist() for chunk in row["chunks"]} == {codec}
    decoded = [ome_arrow.to_numpy(scalar, dtype=image.dtype) for scalar, image in zip(column, images, strict=True)]
    assert all_same(decoded, images)


def test_as_ome_arrow_writes_it(stored, tmp_path):
    """Payloads of zstd level 1 are equal byte for byte."""
    (image,) = images_of([((1, 2, 1, 60, 50), "uint16")])
    ours = pq.read_table(stored("parquet", [image], compression="chunk-zstd"))["ome_image"][0].as_py()
    theirs = ome_arrow.from_numpy(
        image, dim_order="TCZYX", chunk_encoding="bytes", chunk_compression="zstd", chunk_compression_level=1
    ).as_py()
    assert [chunk["pixel_bytes"] for chunk in ours["chunks"]] == [chunk["pixel_bytes"] for chunk in theirs["chunks"]]


@pytest.mark.parametrize("name", slow_except(["parquet", "vortex"], TABLES))
def test_it_is_smaller_than_plain_pixels(stored, name):
    images = list(synthetic_images(64, (1, 1, 1, 100, 100)))
    sizes = {}
    for compression in (None, "chunk-zstd"):
        path = stored(name, images, stem=str(compression), compression=compression)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        sizes[compression] = sum(file.stat().st_size for file in files)
    limit = 1.05 if name == "vortex" else 0.7  # Vortex bit-packs these pixels itself.
    assert sizes["chunk-zstd"] < limit * sizes[None]


def test_lists_have_no_bytes_to_compress(tmp_path):
    image = images_of([((1, 1, 1, 3, 4), "uint8")])
    with raises(
        ArgumentError, option="compression", mentions=("'chunk-zstd'", "'snappy'", "encoding='list'"), remedy=False
    ):
        write_images(image, tmp_path / "x.parquet", encoding="list", compression="chunk-zstd")
    with raises(ArgumentError, option="compression", mentions=("OME-TIFF", "'none'", "'zlib'"), remedy=False):
        write_images(image, tmp_path / "x.tiffs", compression="chunk-zstd")


def test_large_chunks_and_one_that_fills_a_group(stored):
    images = [np.random.default_rng(0).integers(0, 300, (1, 2, 1, 1500, 3000), np.uint16), *images_of(MIXED[:2])]
    check(open_images(stored("arrow", images, compression="chunk-lz4")), images, [2, 0])
