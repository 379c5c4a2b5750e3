"""Channel names from the index that Harmony writes next to its images or above their folder."""

from __future__ import annotations

import os
import shutil
from itertools import product

import numpy as np
import pytest
import tifffile

from omearrow_ds import ArgumentError, FormatError, OMEArrowDataset, Storage, convert, open_images
from tests.support.errors import raises, warns
from tests.support.objects import serving

NAMES = ("Index.idx.xml", "Index.xml")
FILES = {(f, c): f"r01c01f{f:02d}p01-ch{c}sk1fk1fl1.tiff" for f, c in product((1, 2), (1, 2))}


def index_of(*channels):
    """Return an index as Harmony 5 writes it."""
    images = "".join(
        f"<Image><ChannelID>{number}</ChannelID><ChannelName>{name}</ChannelName>"
        f'<ImageResolutionX Unit="m">3e-07</ImageResolutionX></Image>'
        for number, name in enumerate(channels, start=1)
    )
    return f'<EvaluationInputData xmlns="http://www.perkinelmer.com/PEHH/HarmonyV5"><Images>{images}</Images></EvaluationInputData>'


@pytest.fixture
def images(tmp_path):
    """Return the folder ``Images`` of a measurement with two fields, two channels and no index."""
    folder = tmp_path / "measurement" / "Images"
    folder.mkdir(parents=True)
    for (field, channel), name in FILES.items():
        tifffile.imwrite(folder / name, np.arange(30, dtype=np.uint16).reshape(5, 6) + 1000 * field + 100 * channel)
    return folder


def names_in(source):
    return [channel["name"] for channel in source.metadata(0)["channels"]]


@pytest.mark.parametrize("name", NAMES)
def test_channels_have_the_names_of_an_index_above_the_images(images, name):
    (images.parent / name).write_text(index_of("HOECHST", "A488"))
    with open_images(images, pattern="phenix") as source:
        assert names_in(source) == ["HOECHST", "A488"]
        assert source.metadata(1)["physical_size_x"] == pytest.approx(0.3)
    with open_images(images, pattern="phenix", channels=["A488"]) as source:
        assert np.array_equal(source.read(1)[0, 0, 0], tifffile.imread(images / FILES[2, 2]))
    with raises(ArgumentError, "channels", mentions=("'HOECHST'", "'A488'"), remedy=False):
        open_images(images, pattern="phenix", channels=["1"])


def test_channels_have_the_names_of_the_index_above_after_a_conversion(images, tmp_path):
    (images.parent / "Index.xml").write_text(index_of("HOECHST", "A488"))
    convert(images, tmp_path / "x.parquet", pattern="phenix", channels=["A488", "HOECHST"])
    with open_images(tmp_path / "x.parquet") as source:
        assert names_in(source) == ["A488", "HOECHST"]
        assert np.array_equal(source.read(0)[0, 0, 0], tifffile.imread(images / FILES[1, 2]))


@pytest.mark.parametrize("path", [".", "../Images", "../images"])
def test_an_index_is_found_above_a_relative_folder(images, monkeypatch, path):
    (images.parent / "Index.idx.xml").write_text(index_of("HOECHST", "A488"))
    if path == "../images":  # As on a case-insensitive file system.
        images = images.rename(images.with_name("images"))
    monkeypatch.chdir(images)
    dataset = OMEArrowDataset(path, pattern="phenix", normalize=False)
    assert names_in(dataset.source) == ["HOECHST", "A488"]


@pytest.mark.parametrize(("above", "other"), [(True, "Index.xml"), (True, "Index.idx.xml"), (False, "Index.xml")])
def test_the_nearest_index_counts_with_a_warning_when_there_are_two(images, above, other):
    (images / "Index.idx.xml").write_text(index_of("HOECHST", "A488"))
    unused = (images.parent if above else images) / other
    unused.write_text(index_of("DAPI", "GFP"))
    nearest = images / "Index.idx.xml"
    with warns(UserWarning, path=unused, mentions=nearest) as warned, open_images(images, pattern="phenix") as source:
        assert names_in(source) == ["HOECHST", "A488"]
    assert len(warned) == 1


def test_an_index_above_a_folder_of_another_name_is_not_of_its_images(images):
    (images.parent / "Index.xml").write_text(index_of("HOECHST", "A488"))
    with open_images(images.rename(images.with_name("other")), pattern="phenix") as source:
        assert names_in(source) == ["1", "2"]


def test_a_damaged_index_above_the_images_is_an_error(images):
    (images.parent / "Index.xml").write_text(index_of("HOECHST", "A488")[:-40])
    with raises(FormatError, path="measurement/Index.xml"):
        open_images(images, pattern="phenix")


def test_a_pipe_above_the_images_is_an_error(images):
    os.mkfifo(images.parent / "Index.xml")
    with raises(FormatError, path="measurement/Index.xml"):
        open_images(images, pattern="phenix")


@pytest.mark.parametrize("above", [True, False])
def test_an_index_in_a_bucket_names_channels(images, tmp_path, above):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    ((images.parent if above else images) / "Index.idx.xml").write_text(index_of("HOECHST", "A488"))
    shutil.copytree(images.parent, tmp_path / "served" / "lab" / "m")
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with open_images("s3://lab/m/Images", pattern="phenix", storage=storage) as source:
            assert names_in(source) == ["HOECHST", "A488"]
            assert np.array_equal(source.read(1)[0, 1, 0], tifffile.imread(images / FILES[2, 2]))
