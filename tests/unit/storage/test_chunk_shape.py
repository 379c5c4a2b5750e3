"""``chunk_shape=``: pixels in chunks or tiles are unchanged, also for the formats' libraries."""

from __future__ import annotations

import shutil

import ome_arrow
import pyarrow.parquet as pq
import pytest
import tifffile
import zarr
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import FORMATS, ArgumentError, ImageError, convert, open_images, write_images
from omearrow_ds.cli import main
from omearrow_ds.storage.source import open_source
from tests.support.errors import raises
from tests.support.sources import check
from tests.support.strategies import DTYPES, all_same, image_of, images_of, shapes

CHUNKED = {fmt.name: fmt for fmt in FORMATS if fmt.writer.chunk_multiple is not None}


def by_others(path, name, images):
    """Return the images, read by the format's library."""
    if name == "tiff":
        arrays = [
            tifffile.imread(file).reshape(image.shape)
            for file, image in zip(sorted(path.glob("*.tif")), images, strict=True)
        ]
    elif name == "ome_zarr":
        arrays = [zarr.open_array(member / "0", mode="r")[...] for member in sorted(path.glob("*.ome.zarr"))]
    else:
        source = ome_arrow.OMEArrowDataset(path)
        arrays = source.read_many(source.image_ids)
    return arrays


@pytest.mark.parametrize("name", CHUNKED)
@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(shapes(40), st.sampled_from(DTYPES)), min_size=1, max_size=2).map(images_of),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
)
def test_what_is_cut_comes_back(tmp_path_factory, name, images, factors, compressed):
    folder, fmt = tmp_path_factory.mktemp("cut"), CHUNKED[name]
    side = 16 if name == "tiff" else 7
    compression = fmt.writer.compressions[0 if (fmt.writer.compressions[0] == "none") != compressed else 1]
    path = folder / f"images{fmt.suffix}"
    write_images(images, path, axes="TCZYX", chunk_shape=[side * factor for factor in factors], compression=compression)
    assert all_same(by_others(path, name, images), images)
    check(open_images(path), images, [len(images) - 1, 0, 0])
    shutil.rmtree(folder)


def test_the_chunks_are_those_that_were_asked_for(stored):
    images = images_of([((1, 2, 1, 100, 70), "uint16"), ((1, 1, 1, 20, 300), "uint16")])
    paths = {name: stored(name, images, chunk_shape=(48, 32)) for name in CHUNKED}
    with tifffile.TiffFile(next(paths["tiff"].glob("000000*.tif"))) as tif:
        assert (tif.pages.first.tilelength, tif.pages.first.tilewidth) == (48, 32)
    members = sorted(paths["ome_zarr"].glob("*.ome.zarr"))
    chunks = [zarr.open_array(member / "0", mode="r").chunks for member in members]
    assert chunks == [(1, 1, 1, 48, 32), (1, 1, 1, 20, 32)]
    assert pq.ParquetFile(paths["ome_arrow"] / "chunks.parquet").metadata.num_rows == 2 * 9 + 10
    assert "tiles of 48 x 32" in open_source(paths["tiff"]).details.storage_info().chunking


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS])
def test_a_chunk_shape_that_cannot_be(tmp_path, name):
    (fmt,) = (fmt for fmt in FORMATS if fmt.name == name)
    path = tmp_path / f"images{fmt.suffix}"
    wrong = [(16, 0), (16,), (16, 16.0), 16, "ab", (-16, 16)]
    for chunk in wrong if name in CHUNKED else [(16, 16)]:
        facts = "height" if name in CHUNKED else ("tiff", "ome_zarr", "ome_arrow")
        with raises(ArgumentError, option="chunk_shape", mentions=facts, remedy=False):
            write_images([image_of((4, 5))], path, name, chunk_shape=chunk)
    if name == "tiff":
        with raises(ArgumentError, option="chunk_shape", mentions=("(16, 20)", "OME-TIFF", 16), remedy=False):
            write_images([image_of((4, 5))], path, name, chunk_shape=(16, 20))
    assert not path.exists()


def test_more_chunks_than_are_read_are_not_written(tmp_path):
    with raises(ImageError, mentions=("65,536", "chunk_shape")):
        write_images([image_of((300, 300), "uint8")], tmp_path / "images.zarr", chunk_shape=(1, 1))


def test_convert_cuts_images(stored, tmp_path):
    images = images_of([((1, 2, 1, 50, 70), "uint16")])
    path = stored("arrow", images)
    convert(path, tmp_path / "a.zarr", chunk_shape=(32, 64))
    done = CliRunner().invoke(main, ["convert", str(path), str(tmp_path / "b.zarr"), "--chunk-shape", "32x64"])
    assert done.exit_code == 0, done.output
    for name in "ab":
        (member,) = (tmp_path / f"{name}.zarr").glob("*.ome.zarr")
        assert zarr.open_array(member / "0", mode="r").chunks == (1, 1, 1, 32, 64)
        assert all_same([open_images(tmp_path / f"{name}.zarr").read(0)], images)
    failed = CliRunner().invoke(main, ["convert", str(path), str(tmp_path / "c.tiffs"), "--chunk-shape", "20"])
    assert "error: --chunk-shape 20x20: expected multiples of 16 as height and width for OME-TIFF" in failed.stderr
