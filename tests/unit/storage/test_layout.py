"""`compression=` and `rows_per_group=`: other readers find the chosen layout; pixels are unchanged."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile

from omearrow_ds import ArgumentError, convert, open_images, write_images
from omearrow_ds.storage.formats import FORMATS
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import NAMES, RAGGED, images_of, same

SMOOTH = [np.broadcast_to(np.arange(64, dtype=np.uint16) * 8 + i, (1, 1, 1, 64, 64)).copy() for i in range(20)]
INSTALLED = [fmt for fmt in FORMATS if not fmt.missing_backend]
CHOICES = [(fmt.name, compression) for fmt in INSTALLED for compression in fmt.writer.compressions]


def bytes_of(path):
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


@pytest.mark.parametrize(("name", "compression"), CHOICES)
@pytest.mark.parametrize("encoding", ["bytes", "list"])
@pytest.mark.share(2, "name", "encoding")
def test_every_compression_keeps_every_pixel(stored, name, compression, encoding):
    images = images_of(RAGGED)
    with open_images(stored(name, images, compression=compression, encoding=encoding)) as source:
        assert all(
            same(stored_image, image)
            for stored_image, image in zip(source.take(range(len(images))), images, strict=True)
        )


@pytest.mark.parametrize("name", NAMES)
def test_compressed_is_smaller_than_not(stored, name):
    needs(name)
    sizes = {
        compression: bytes_of(stored(name, SMOOTH, stem=compression, compression=compression))
        for fmt, compression in CHOICES
        if fmt == name
    }
    raw = sizes.pop("none", None)
    assert all(raw is None or size < raw for size in sizes.values())


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4", "snappy"])
def test_parquet_says_its_compression(stored, compression):
    group = pq.ParquetFile(stored("parquet", SMOOTH, compression=compression)).metadata.row_group(0)
    leaves = {group.column(n).path_in_schema: group.column(n).compression for n in range(group.num_columns)}
    (pixels,) = [codec for path, codec in leaves.items() if path.endswith("pixel_bytes")]
    assert pixels == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


@pytest.mark.parametrize("compression", ["zlib", "zstd", "lzw"])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "float64"])
def test_tiff_says_its_compression(stored, compression, dtype):
    images = [image.astype(dtype) for image in SMOOTH[:3]]
    path = stored("tiff", images, compression=compression)
    file = sorted(path.glob("*.tif"))[1]
    with tifffile.TiffFile(file) as tif:
        assert tif.pages.first.compression.name.lower().replace("adobe_deflate", "zlib") == compression
        assert np.array_equal(tif.asarray().reshape(images[1].shape), images[1])
    assert same(open_images(path).read(1), images[1])


@pytest.mark.parametrize("rows", [1, 3, 7, 20, 1000])
def test_row_groups_of_a_chosen_size(stored, rows):
    sizes = [min(rows, 20 - start) for start in range(0, 20, rows)]
    metadata = pq.read_metadata(stored("parquet", SMOOTH, rows_per_group=rows))
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == sizes
    reader = pa.ipc.open_file(stored("arrow", SMOOTH, rows_per_group=rows))
    assert [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)] == sizes
    for name in ("parquet", "arrow"):
        path = stored(name, SMOOTH, stem="again", rows_per_group=rows)
        assert all(same(*pair) for pair in zip(open_images(path).take(range(20)), SMOOTH, strict=True))


def test_convert_takes_the_layout_too(stored, tmp_path):
    source = stored("arrow", SMOOTH)
    convert(source, tmp_path / "out.parquet", compression="zstd", rows_per_group=5)
    metadata = pq.read_metadata(tmp_path / "out.parquet")
    assert metadata.num_row_groups == 4
    assert same(open_images(tmp_path / "out.parquet").read(19), SMOOTH[19])


@pytest.mark.parametrize(
    ("name", "arguments", "facts"),
    [
        ("parquet", {"compression": "zip"}, ("'zip'", "'none', 'lz4', 'zstd'")),
        ("tiff", {"compression": "lz4"}, ("'lz4'", "'none', 'zlib'")),
        ("tiff", {"rows_per_group": 4}, (4, "OME-TIFF")),
        ("parquet", {"rows_per_group": 0}, 0),
        ("parquet", {"rows_per_group": 2.5}, 2.5),
    ],
)
def test_a_layout_that_cannot_be(tmp_path, name, arguments, facts):
    with raises(ArgumentError, option=next(iter(arguments)), mentions=facts, remedy=False):
        write_images(SMOOTH, tmp_path / "images", name, **arguments)
    assert not list(tmp_path.iterdir())
