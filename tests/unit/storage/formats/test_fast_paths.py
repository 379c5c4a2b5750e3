"""Each fast path gives what the slow path beside it gives, and steps aside where it does not hold."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import zarr

from omearrow_ds import FormatError, OMEArrowDataset, open_images
from tests.conftest import needs
from tests.support.strategies import images_of

MANY = [((1, 2, 3, 7, 5), "uint16")] * 40
MIXED = [((1, 1 + number % 3, 1, 4 + number, 5), ("uint8", "int32", "float64")[number % 3]) for number in range(12)]
both = pytest.mark.parametrize("shapes", [MANY, MIXED], ids=["uniform", "ragged"])


def all_equal(source, images):
    return all(np.array_equal(source.read(index), image) for index, image in enumerate(images))


@both
def test_tiff_pixels_are_read_in_place(stored, monkeypatch, shapes):
    images = images_of(shapes)
    source = open_images(stored("tiff", images))
    monkeypatch.setattr(tifffile, "TiffFile", None)  # no TIFF is parsed
    assert all_equal(source, images)


@pytest.mark.parametrize("options", [{"compression": "zlib"}, {"byteorder": ">", "software": "another"}], ids=str)
def test_a_tiff_rewritten_by_others_is_parsed(stored, options):
    images = images_of(MANY)
    path = stored("tiff", images)
    file = sorted(path.glob("*.tif"))[3]
    metadata = {"axes": "TCZYX", "Name": "rewritten"}
    tifffile.imwrite(file, images[3], ome=True, photometric="minisblack", metadata=metadata, **options)
    assert all_equal(open_images(path), images)


def test_a_tiff_that_is_cut_short_is_an_error(stored):
    path = stored("tiff", images_of(MANY))
    file = sorted(path.glob("*.tif"))[3]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError, match=file.name):
        open_images(path).read(3)


@both
@pytest.mark.parametrize("encoding", ["bytes", "list"])
def test_parquet_reads_the_pixel_leaf_alone(stored, monkeypatch, shapes, encoding):
    images = images_of(shapes if encoding == "bytes" else MANY)
    source = open_images(stored("parquet", images, encoding=encoding), engine="pyarrow")
    read, paths = pq.ParquetFile.read_row_group, set()

    def noted(file, number, columns, **options):
        paths.update(columns)
        return read(file, number, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    assert all_equal(source, images)
    assert len(paths) == 1
    assert ".pixel" in paths.pop()


def test_parquet_with_one_odd_image_reads_whole_chunks(stored, tmp_path):
    images = images_of(MANY)
    table = pq.read_table(stored("parquet", images))
    rows = table["ome_image"].to_pylist()
    rows[7]["chunks"] = rows[7]["chunks"][::-1]
    column = pa.array(rows, table.schema.field("ome_image").type)
    pq.write_table(pa.table({"ome_image": column}), tmp_path / "odd.parquet", row_group_size=16)
    assert all_equal(open_images(tmp_path / "odd.parquet"), images)


@both
def test_zarr_chunks_are_what_zarr_reads(stored, monkeypatch, shapes):
    images = images_of(shapes)
    path = stored("ome_zarr", images)
    for folder, image in zip(sorted(path.glob("*.ome.zarr")), images, strict=True):
        assert np.array_equal(zarr.open_array(folder / "0", mode="r")[...], image)
    source = open_images(path)
    monkeypatch.setattr(zarr, "open_array", None)  # no array is opened
    assert all_equal(source, images)


def test_a_zarr_array_stored_in_another_way_is_left_to_zarr(stored):
    images = images_of(MANY)
    path = stored("ome_zarr", images)
    folder = sorted(path.glob("*.ome.zarr"))[3]
    array = zarr.create_array(folder / "0", data=images[3], chunks=(1, 1, 1, 4, 4), compressors=None, overwrite=True)
    assert array.nchunks > 1
    assert all_equal(open_images(path), images)


@pytest.mark.parametrize(
    "indices", [[0], [39], [20], [0, 1], [38, 39], [5, 6, 7], [0, 39], [*range(40)], [*range(1, 40)]]
)
def test_vortex_rows_beside_each_other(stored, indices):
    needs("vortex")
    images = images_of(MANY)
    taken = open_images(stored("vortex", images)).take(indices)
    assert len(taken) == len(indices)
    assert all(np.array_equal(image, images[index]) for image, index in zip(taken, indices, strict=True))


def test_a_mapped_file_is_one_array_a_record_batch(tmp_path, stored):
    images = images_of(MANY)
    table = pa.ipc.open_file(stored("arrow", images)).read_all()
    with pa.ipc.new_file(tmp_path / "parts.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with open_images(tmp_path / "parts.arrow") as source:
        assert [len(stack) for stack in source.stacks()] == [7, 7, 7, 7, 7, 5]
    dataset = OMEArrowDataset(tmp_path / "parts.arrow", preload=False, normalize=False, axes="CZYX")
    assert all(np.array_equal(dataset[index].numpy(), image[0]) for index, image in enumerate(images))
    batch = dataset.__getitems__([39, 0, 7, 6, 6])
    assert all(np.array_equal(s.numpy(), images[i][0]) for s, i in zip(batch, [39, 0, 7, 6, 6], strict=True))


def test_images_that_differ_are_no_array(stored):
    assert open_images(stored("arrow", images_of(MIXED))).stacks() == []


def test_a_tiff_folder_put_in_the_place_of_another_is_never_read(stored, tmp_path):
    images = images_of(MANY)
    path = stored("tiff", images)
    source = open_images(path)
    assert np.array_equal(source.read(0), images[0])
    path.rename(tmp_path / "moved")
    stored("tiff", [image + 1 for image in images])  # the same names and sizes
    assert all_equal(source, images)  # what was opened, still there
    source.close()
    with pytest.raises(FormatError, match="replaced"):
        source.read(3)


def test_an_open_tiff_folder_leaves_no_descriptor(stored):
    path = stored("tiff", images_of(MANY))
    gc.collect()
    before = psutil.Process().num_fds()
    for _ in range(5):
        source = open_images(path)
        source.read(0)
    gc.collect()
    assert psutil.Process().num_fds() == before + 1
    del source
    gc.collect()
    assert psutil.Process().num_fds() == before


FOREIGN = {
    "plain": {},
    "rows": {"rowsperstrip": 3},
    "planar": {"photometric": "rgb", "planarconfig": "separate"},
    "imagej": {"imagej": True},
    "big": {"bigtiff": True},
}


@pytest.mark.parametrize("options", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_foreign_tiff_pixels_are_read_in_place_where_they_can_be(tmp_path, monkeypatch, options, dtype):
    wanted = []
    planes = 3 if options.keys() & {"planarconfig", "imagej"} else 1
    for image in images_of([((1, planes, 1, 7, 5), dtype)] * 5):
        options = {"photometric": "minisblack", "metadata": None, **options}
        if options.get("imagej"):
            options["metadata"] = {"axes": "ZYX"}
        tifffile.imwrite(tmp_path / f"{len(wanted)}.tif", image[0, :, 0], **options)
        wanted.append(tifffile.imread(tmp_path / f"{len(wanted)}.tif"))
    source = open_images(tmp_path)
    monkeypatch.setattr(tifffile, "TiffFile", None)
    assert all(np.array_equal(source.read(i).reshape(each.shape), each) for i, each in enumerate(wanted))


@pytest.mark.parametrize(
    "options",
    [{"compression": "zlib"}, {"byteorder": ">"}, {"photometric": "rgb"}, {"tile": (16, 16)}],
    ids=["compressed", "big-endian", "samples last", "tiled"],
)
def test_other_foreign_tiffs_are_not_read_in_place(tmp_path, options):
    pixels = images_of([((1, 1, 7, 5, 3), "uint16")])[0][0, 0]
    tifffile.imwrite(tmp_path / "a.tif", pixels, **{"photometric": "minisblack", "metadata": None, **options})
    source = open_images(tmp_path)
    assert source._members[0].pixel_offset is None
    read = source.read(0)
    found = read.reshape(3, 7, 5).transpose(1, 2, 0) if "photometric" in options else read.reshape(pixels.shape)
    assert np.array_equal(found, tifffile.imread(tmp_path / "a.tif"))


def test_a_foreign_tiff_that_changes_after_opening_is_read_as_it_is(tmp_path):
    first, second = images_of([((1, 1, 1, 7, 5), "uint16")] * 2)
    file = tmp_path / "a.tif"
    tifffile.imwrite(file, first[0, 0, 0], metadata=None)
    source = open_images(tmp_path)
    assert np.array_equal(source.read(0), first)
    tifffile.imwrite(file, second[0, 0, 0], metadata=None, byteorder=">")
    assert np.array_equal(source.read(0), second)
