"""Input of `write_images`: later changes by the caller have no effect, or the input is rejected."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ImageError, MetadataError, open_images, write_images
from omearrow_ds.codec.encode import Image, encode_tables
from omearrow_ds.storage.hashes import checksum_of
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import ENCODED_OR_LONG, NAMES, NO_METADATA, SUFFIX, all_same, collections, image_of
from tests.unit.codec.test_codec import oracle

formats = pytest.mark.parametrize("name", NAMES)


def refilled(images):
    """Yield images from one buffer per shape and dtype; each is wiped when the next is requested."""
    memory = {}
    for image in images:
        buffer = memory.setdefault((image.shape, image.dtype), np.empty_like(image))
        buffer[...] = image
        yield buffer
        buffer[...] = 0


@pytest.mark.parametrize(("name", "encoding"), ENCODED_OR_LONG)
@pytest.mark.share(2, "name", "encoding")
def test_a_generator_may_fill_one_buffer_again_and_again(tmp_path, name, encoding):
    """The generator also reuses a metadata dict and fills a column while it runs."""
    needs(name)
    images = [image_of((1, 2, 1, 5, 4 + number // 8), "uint16", number) for number in range(12)]
    record, wells = {}, np.arange(12)

    def records():
        for number in range(12):
            record["name"] = f"field {number}"
            wells[number] = -1
            yield record

    path = tmp_path / f"images{SUFFIX[name]}"
    columns = {"well": wells}
    write_images(
        refilled(images), path, encoding=encoding, metadata=records(), columns=columns, checksum=True, overwrite=True
    )
    source = open_images(path, verify=True)
    assert all_same(source.take(range(12)), images)
    assert source.images.header.columns.checksums.to_pylist() == list(map(checksum_of, images))
    assert [source.metadata(index)["name"] for index in range(12)] == [f"field {number}" for number in range(12)]
    assert source.columns["well"].to_pylist() == list(range(12))


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_a_buffer_may_be_filled_again_where_each_image_is_a_group(tmp_path, name):
    """Both formats write the table before the next request, and use the image without a copy."""
    images = [image_of((1, 2, 1, 40, 50), "uint16", number) for number in range(4)]
    path = tmp_path / f"images{SUFFIX[name]}"
    write_images(refilled(images), path, rows_per_group=1)
    assert all_same(open_images(path).take(range(4)), images)


@settings(max_examples=40, deadline=None)
@given(images=collections(6), rows=st.integers(1, 4), fleeting=st.booleans(), strided=st.booleans())
def test_groups_of_any_size_hold_the_images_as_they_came(images, rows, fleeting, strided):
    """Row groups limited by rows or by bytes; images in reused or separate buffers, contiguous or not."""
    handed = [np.asfortranarray(image) if strided else image for image in images]
    stream = refilled(handed) if fleeting else iter(handed)
    described = (Image(image, f"{number}", NO_METADATA, fleeting=fleeting) for number, image in enumerate(stream))
    limit = 2 * max(image.nbytes for image in images)
    tables = list(encode_tables(described, pa.table({}), "bytes", max_rows=rows, max_bytes=limit))
    assert all(1 <= len(table) <= rows for table in tables)
    decoded = [oracle(record) for table in tables for record in table["ome_image"].to_pylist()]
    assert all_same(decoded, images)


def test_an_image_that_stays_is_not_copied_to_stand_alone():
    images = [image_of((1, 1, 1, 8, 8), "uint16", number) for number in range(3)]
    described = (Image(image, "", NO_METADATA) for image in images)
    for image, table in zip(
        images, encode_tables(described, pa.table({}), "bytes", max_rows=1, max_bytes=2**20), strict=True
    ):
        chunks = table["ome_image"].chunk(0).field("chunks").values
        assert chunks.field("pixel_bytes").buffers()[2].address == image.ctypes.data


class Quantity(np.ndarray):
    """Numbers with a unit."""


MASKED = np.ma.masked_array(image_of((8, 8)), mask=np.eye(8, dtype=bool))


@formats
@pytest.mark.parametrize(
    ("image", "facts"),
    [
        (MASKED, ["masked array", "image.filled(0)"]),
        (image_of((8, 8)).view(Quantity), ["Quantity", "numpy.asarray(image)"]),
        (image_of((8, 8)).view(np.matrix), ["matrix", "numpy.asarray(image)"]),
        ([[1, 2]], ["list", "numpy"]),
    ],
    ids=["masked", "unit", "matrix", "list"],
)
@pytest.mark.share(4, "name", "image")
def test_arrays_that_mean_more_than_their_numbers_are_refused(tmp_path, name, image, facts):
    needs(name)
    path = tmp_path / f"images{SUFFIX[name]}"
    with raises(ImageError, path=path, mentions=("image 1", *facts), remedy=False):
        write_images([image_of((8, 8)), image], path)
    assert not any(tmp_path.iterdir())


def test_a_mapped_file_is_an_array_like_any_other(tmp_path):
    images = np.stack([image_of((6, 5), number=number) for number in range(4)])
    np.save(tmp_path / "images.npy", images)
    write_images(np.load(tmp_path / "images.npy", mmap_mode="r"), tmp_path / "images.tiffs")
    files = sorted((tmp_path / "images.tiffs").glob("*.tif"))
    assert all_same([tifffile.imread(file) for file in files], list(images))


@pytest.mark.parametrize("column", [[MASKED[0], MASKED[1]], np.array([MASKED[0], None], object)], ids=["list", "array"])
def test_masked_arrays_within_a_column_are_refused(tmp_path, column):
    """Masked values of a masked column become nulls; of masked arrays in a list, pyarrow drops the mask."""
    with raises(MetadataError, path=tmp_path / "a.arrow", mentions=("'box'", "row 0", ".tolist()")):
        write_images([image_of((8, 8))] * 2, tmp_path / "a.arrow", columns={"box": column})
    write_images([image_of((8, 8))] * 8, tmp_path / "b.arrow", columns={"box": MASKED[0]})
    nulls = open_images(tmp_path / "b.arrow").columns["box"].is_null().to_pylist()
    assert nulls == MASKED[0].mask.tolist()
