"""Arrow IPC: memory-mapped files with zero-copy images."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from omearrow_ds import FormatError, OMEArrowDataset, Storage, open_images, write_images
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.strategies import MIXED, images_of

MANY = [((1, 2, 3, 7, 5), "uint16")] * 40


def test_a_mapped_file_is_one_array_a_record_batch(tmp_path, stored):
    images = images_of(MANY)
    table = pa.ipc.open_file(stored("arrow", images)).read_all()
    with pa.ipc.new_file(tmp_path / "parts.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with open_images(tmp_path / "parts.arrow") as source:
        assert [len(stack) for stack in source.images.mapped_stacks().arrays] == [7, 7, 7, 7, 7, 5]
    dataset = OMEArrowDataset(tmp_path / "parts.arrow", preload=False, normalize=False, axes="CZYX")
    assert all(np.array_equal(dataset[index].numpy(), image[0]) for index, image in enumerate(images))
    batch = dataset.__getitems__([39, 0, 7, 6, 6])
    assert all(np.array_equal(s.numpy(), images[i][0]) for s, i in zip(batch, [39, 0, 7, 6, 6], strict=True))


def test_images_that_differ_are_no_array(stored):
    assert open_images(stored("arrow", images_of(MIXED))).images.mapped_stacks() is None


def as_stream(source, path):
    """Write the table of an Arrow IPC file as a stream, like the caches of Hugging Face datasets."""
    table = pa.ipc.open_file(source).read_all()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def test_columns_of_a_single_record_batch_are_copied(tmp_path):
    path = tmp_path / "a.arrow"
    write_images(images_of([((1, 1, 1, 4, 5), "uint16")] * 3), path, columns={"dose": [1.5, 2.5, 3.5]})
    source = open_images(path)
    path.write_bytes(bytes(path.stat().st_size))  # A mapped column would change.
    assert source.columns["dose"].to_pylist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("name", ["s.arrow", "s.feather", "s.arrows", "s"])
def test_an_arrow_stream_is_named_with_a_remedy_that_works(tmp_path, stored, name):
    images = images_of(MANY[:3])
    path = as_stream(stored("arrow", images), tmp_path / name)
    with raises(FormatError, path=path, mentions=("stream", "pyarrow.feather.write_feather")):
        open_images(path)
    with path.open("rb") as file:
        pyarrow.feather.write_feather(pa.ipc.open_stream(file).read_all(), tmp_path / "copy.arrow", "uncompressed")
    with open_images(tmp_path / "copy.arrow") as source:
        assert all(np.array_equal(source.read(index), image) for index, image in enumerate(images))


def test_an_arrow_stream_among_files_is_named(tmp_path, stored):
    (tmp_path / "parts").mkdir()
    path = stored("arrow", images_of(MANY[:3]))
    (tmp_path / "parts" / "a.arrow").write_bytes(path.read_bytes())
    as_stream(path, tmp_path / "parts" / "b.arrow")
    with raises(FormatError, path="parts/b.arrow", mentions="stream"):
        open_images(tmp_path / "parts")


def test_an_arrow_stream_in_a_bucket_is_named(tmp_path, stored):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    (tmp_path / "served" / "lab").mkdir(parents=True)
    as_stream(stored("arrow", images_of(MANY[:3])), tmp_path / "served" / "lab" / "s.arrow")
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with raises(FormatError, path="s3://lab/s.arrow", mentions="stream"):
            open_images("s3://lab/s.arrow", storage=storage)
