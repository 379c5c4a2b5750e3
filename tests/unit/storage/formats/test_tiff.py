"""TIFF: zero-copy reads of pixels, and files that must be parsed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import tifffile

from omearrow_ds import FormatError, OMEArrowDataset, open_images
from tests.support.errors import raises
from tests.support.sources import all_read
from tests.support.strategies import MIXED, images_of

MANY = [((1, 2, 3, 7, 5), "uint16")] * 40
both = pytest.mark.parametrize("shapes", [MANY, MIXED], ids=["uniform", "ragged"])


@both
def test_tiff_pixels_are_read_in_place(stored, monkeypatch, shapes):
    images = images_of(shapes)
    source = open_images(stored("tiff", images))
    monkeypatch.setattr(tifffile, "TiffFile", None)  # No TIFF is parsed.
    assert all_read(source, images)


@pytest.mark.parametrize("options", [{"compression": "zlib"}, {"byteorder": ">", "software": "another"}], ids=str)
def test_a_tiff_rewritten_by_others_is_parsed(stored, options):
    images = images_of(MANY)
    path = stored("tiff", images)
    file = sorted(path.glob("*.tif"))[3]
    metadata = {"axes": "TCZYX", "Name": "rewritten"}
    tifffile.imwrite(file, images[3], ome=True, photometric="minisblack", metadata=metadata, **options)
    assert all_read(open_images(path), images)


def test_a_tiff_that_is_cut_short_is_an_error(stored):
    path = stored("tiff", images_of(MANY))
    file = sorted(path.glob("*.tif"))[3]
    file.write_bytes(file.read_bytes()[:-1])
    with raises(FormatError, path=file, remedy=False):
        open_images(path).read(3)


def test_a_folder_raises_when_a_link_to_an_image_is_broken(tmp_path):
    """Git annex stores files that were not fetched as broken links."""
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 5), np.uint8))
    (tmp_path / "notes.txt").symlink_to("missing")
    assert open_images(tmp_path).image_ids == ["a"]
    (tmp_path / "b.tif").symlink_to("missing")
    with raises(FormatError, path=tmp_path / "b.tif", mentions="symbolic link"):
        open_images(tmp_path)


def test_a_tiff_folder_put_in_the_place_of_another_is_never_read(stored, tmp_path):
    images = images_of(MANY)
    path = stored("tiff", images)
    source = open_images(path)
    assert np.array_equal(source.read(0), images[0])
    path.rename(tmp_path / "moved")
    stored("tiff", [image + 1 for image in images])  # With the same names and sizes.
    assert all_read(source, images)  # Open files keep the old pixels.
    source.close()
    with raises(FormatError, path=path):
        source.read(3)


def test_an_open_tiff_folder_leaves_no_descriptor(stored):
    path = stored("tiff", images_of(MANY))

    def count_descriptors():
        # Of this folder only, as threads of an earlier test's object store may close their sockets meanwhile.
        gc.collect()
        descriptors = Path("/proc/self/fd").iterdir()
        return sum(Path(os.path.realpath(descriptor)).is_relative_to(path) for descriptor in descriptors)

    for _ in range(5):
        source = open_images(path)
        source.read(0)
    assert count_descriptors() == 1
    del source
    assert count_descriptors() == 0


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
    expected = []
    planes = 3 if options.keys() & {"planarconfig", "imagej"} else 1
    for image in images_of([((1, planes, 1, 7, 5), dtype)] * 5):
        options = {"photometric": "minisblack", "metadata": None, **options}
        if options.get("imagej"):
            options["metadata"] = {"axes": "ZYX"}
        tifffile.imwrite(tmp_path / f"{len(expected)}.tif", image[0, :, 0], **options)
        expected.append(tifffile.imread(tmp_path / f"{len(expected)}.tif"))
    source = open_images(tmp_path)
    monkeypatch.setattr(tifffile, "TiffFile", None)
    assert all(
        np.array_equal(source.read(i).reshape(image_read.shape), image_read) for i, image_read in enumerate(expected)
    )


@pytest.mark.parametrize(
    "options",
    [{"compression": "zlib"}, {"byteorder": ">"}, {"photometric": "rgb"}, {"tile": (16, 16)}],
    ids=["compressed", "big-endian", "samples last", "tiled"],
)
def test_other_foreign_tiffs_are_not_read_in_place(tmp_path, options):
    pixels = images_of([((1, 1, 7, 5, 3), "uint16")])[0][0, 0]
    tifffile.imwrite(tmp_path / "a.tif", pixels, **{"photometric": "minisblack", "metadata": None, **options})
    source = open_images(tmp_path)
    assert source.images._folder.members[0].pixel_offset is None
    read = source.read(0)
    page = read.reshape(3, 7, 5).transpose(1, 2, 0) if "photometric" in options else read.reshape(pixels.shape)
    assert np.array_equal(page, tifffile.imread(tmp_path / "a.tif"))


def test_a_foreign_tiff_that_changes_after_opening_is_read_as_it_is(tmp_path):
    first, second = images_of([((1, 1, 1, 7, 5), "uint16")] * 2)
    file = tmp_path / "a.tif"
    tifffile.imwrite(file, first[0, 0, 0], metadata=None)
    source = open_images(tmp_path)
    assert np.array_equal(source.read(0), first)
    tifffile.imwrite(file, second[0, 0, 0], metadata=None, byteorder=">")
    assert np.array_equal(source.read(0), second)


@pytest.mark.parametrize("preload", [True, False])
def test_an_imagej_file_of_other_planes_than_it_says_is_named_itself(tmp_path, preload):
    for name, num_planes in {"a.tif": 6, "b.tif": 5}.items():
        with tifffile.TiffWriter(tmp_path / name) as writer:
            for plane in range(6):  # In another order, as ImageJ would find consecutive planes by number.
                description = f"ImageJ=1.53\nimages={num_planes}\nchannels={num_planes}\n" if plane == 0 else None
                writer.write(np.full((8, 8), plane, "uint8"), metadata=None, description=description, contiguous=False)
    with raises(FormatError, path=tmp_path / "b.tif", remedy=False):
        dataset = OMEArrowDataset(tmp_path, preload=preload)
        dataset[1]
