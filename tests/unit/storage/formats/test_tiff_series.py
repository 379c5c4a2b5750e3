"""Descriptions of TIFF files that match or contradict their pages; the oracle is the pages in the file."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import FormatError, OMEArrowDataset, Storage, convert, open_images
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.strategies import same
from tests.support.tiff_files import (
    SIDE,
    imagej,
    ome_xml,
    planes_of,
    tiff_data,
    write_micro_manager,
    write_pages,
    write_raw,
)

C_OF_TWO = tiff_data((0, "C", 0), (1, "C", 1))
NO_DATA = (
    '<Image ID="Image:1"><Pixels DimensionOrder="XYCZT" SizeT="1" SizeC="1" SizeZ="1" SizeY="5" SizeX="5">'
    "<MetadataOnly/></Pixels></Image>"
)


def shaped(*shape, **more):
    return json.dumps({"shape": [*shape, *SIDE], **more})


# Name: description, number of pages, numbers in the error.
CONTRADICTIONS = {
    "OME-XML of one channel, two assigned": (ome_xml("T1 C1 Z1", C_OF_TWO), 2, [(1, 1, 1, *SIDE), "2 pages"]),
    "OME-XML of one time, two planes": (
        ome_xml("T1 C1 Z1", '<TiffData IFD="0" PlaneCount="2"/>'),
        2,
        [(1, 1, 1, *SIDE), "2 pages"],
    ),
    "OME-XML of too few channels": (ome_xml("T1 C2 Z1", "<TiffData/>"), 3, [(1, 2, 1, *SIDE), "3 pages"]),
    "OME-XML of too many channels": (ome_xml("T1 C3 Z1", "<TiffData/>"), 2, [(1, 3, 1, *SIDE), "2 pages"]),
    "OME-XML of too many slices": (ome_xml("T1 C1 Z5", "<TiffData/>"), 4, [(1, 1, 5, *SIDE), "4 pages"]),
    "OME-XML of too few times": (ome_xml("T2 C1 Z2", "<TiffData/>"), 5, [(2, 1, 2, *SIDE), "5 pages"]),
    "OME-XML that lists more channels": (ome_xml("T1 C2 Z1", C_OF_TWO, channels=3), 2, ["3 channels", "2 pages"]),
    "OME-XML with one plane twice": (
        ome_xml("T1 C2 Z1", tiff_data((0, "C", 0), (1, "C", 0))),
        2,
        [(1, 2, 1, *SIDE), "2 pages"],
    ),
    "OME-XML with one page twice": (
        ome_xml("T1 C2 Z1", tiff_data((0, "C", 0), (0, "C", 1))),
        1,
        [(1, 2, 1, *SIDE), "1 page"],
    ),
    "OME-XML with a page left over": (ome_xml("T1 C2 Z1", C_OF_TWO), 3, [(1, 2, 1, *SIDE), "3 pages"]),
    "OME-XML without TiffData": (ome_xml("T1 C2 Z1"), 2, [(1, 2, 1, *SIDE), "2 pages"]),
    "OME-XML without TiffData, one page": (ome_xml("T1 C4 Z1"), 1, [(1, 4, 1, *SIDE), "1 page"]),
    "OME-XML of other pixels": (ome_xml("T1 C1 Z1", side=(5, 7)), 1, [(1, 1, 1, 5, 7), "12 x 16"]),
    "OME-XML of other pixels, two pages": (ome_xml("T1 C2 Z1", C_OF_TWO, side=(5, 7)), 2, [(1, 2, 1, 5, 7), "12 x 16"]),
    "OME-XML cut short": (ome_xml("T1 C2 Z1", C_OF_TWO)[:-9], 2, ["2 pages"]),
    "ImageJ, stopped early": (imagej(images=8, channels=2, slices=4), 6, ["channels=2", "slices=4", "6 pages"]),
    "ImageJ, too many pages": (imagej(images=8, channels=2, frames=4), 9, ["channels=2", "frames=4", "9 pages"]),
    "ImageJ, of a channel only": (imagej(images=8, channels=2), 8, ["images=8", "channels=2", "8 pages"]),
    "ImageJ, one page": (imagej(images=8, slices=8), 1, ["slices=8", "1 page"]),
    "ImageJ, no slices": (imagej(images=2, slices=0), 2, ["slices=0", "2 pages"]),
    "ImageJ without axes, cut short": (imagej(images=8), 6, ["images=8", "6 pages"]),
    "shape of fewer pages": (shaped(4), 6, ["[4, 12, 16]", "6 pages"]),
    "shape of fewer channels": (shaped(4, axes="CYX"), 6, ["[4, 12, 16]", "6 pages"]),
    "shape of more pages": (shaped(8), 6, ["[8, 12, 16]", "6 pages"]),
    "shape of more pages than one": (shaped(2), 1, ["[2, 12, 16]", "1 page"]),
    "shape with other axes": (shaped(6, axes="CZYX"), 6, ["[6, 12, 16]", "'CZYX'"]),
    "shape of other pixels": (json.dumps({"shape": [4, 6, 16], "axes": "CYX"}), 2, ["[4, 6, 16]", "12 x 16"]),
}
contradictions = pytest.mark.parametrize(
    ("description", "num_pages", "numbers"), CONTRADICTIONS.values(), ids=CONTRADICTIONS
)
storage_info = pytest.mark.parametrize(
    "options",
    [{}, {"contiguous": True, "byteorder": ">"}, {"compression": "zlib"}, {"tile": (16, 16)}],
    ids=["plain", "contiguous", "compressed", "tiled"],
)


@contradictions
@storage_info
@pytest.mark.share(3, "description", "options")
def test_find_image_raises_when_the_description_contradicts_the_pages(
    tmp_path, description, num_pages, numbers, options
):
    write_pages(tmp_path / "a.tif", planes_of(num_pages), description, **options)
    with raises(FormatError, path="a.tif", mentions=numbers):
        open_images(tmp_path)


# Name: description, number of pages, (T, C, Z) of the image in the order of the pages.
READINGS = {
    "no description": (None, 6, (1, 1, 6)),
    "ImageJ without axes": (imagej(images=6), 6, (1, 1, 6)),
    "ImageJ without a number": (imagej(unit="um"), 6, (1, 1, 6)),
    "ImageJ of the first page": (imagej(images=1), 6, (1, 1, 6)),
    "ImageJ of three slices and two channels": (imagej(images=6, channels=2, slices=3), 6, (1, 2, 3)),
    "ImageJ with another number of images": (imagej(images=4, channels=2, frames=3), 6, (3, 2, 1)),
    "shape of all pages": (shaped(6), 6, (1, 1, 6)),
    "shape of the first page": (shaped(), 6, (1, 1, 6)),
    "shape of channels": (shaped(6, axes="CYX"), 6, (1, 6, 1)),
    "OME-XML with TiffData": (ome_xml("T1 C2 Z1", C_OF_TWO, channels=2), 2, (1, 2, 1)),
    "OME-XML that lists no channel": (ome_xml("T1 C2 Z3", "<TiffData/>"), 6, (1, 2, 3)),
    "OME-XML of one page": (ome_xml("T1 C1 Z1"), 1, (1, 1, 1)),
    "OME-XML of a cropped stack": (
        ome_xml("T1 C1 Z2", tiff_data(*((number, "Z", number) for number in range(5)))),
        2,
        (1, 1, 2),
    ),
    "OME-XML with an image without pixels": (ome_xml("T1 C2 Z1", C_OF_TWO, more=NO_DATA), 2, (1, 2, 1)),
    "malformed OME-XML of one page": (ome_xml("T1 C1 Z1").replace("Image:0", "Image & 0"), 1, (1, 1, 1)),
}


@pytest.mark.parametrize(("description", "num_pages", "lengths"), READINGS.values(), ids=READINGS)
@storage_info
@pytest.mark.share(3, "description", "options")
def test_find_image_reads_all_pages_when_one_reading_is_complete(tmp_path, description, num_pages, lengths, options):
    planes = planes_of(num_pages)
    write_pages(tmp_path / "a.tif", planes, description, **options)
    t, c, z = lengths
    image = planes.reshape(t, z, c, *SIDE).swapaxes(1, 2)
    with open_images(tmp_path) as source:
        assert same(source.read(0), np.ascontiguousarray(image))
        assert same(source.read(0, region=(3, 9, 2, 15)), np.ascontiguousarray(image[..., 3:9, 2:15]))


def test_find_image_reads_along_z_when_each_page_has_an_imagej_description(tmp_path):
    write_pages(tmp_path / "a.tif", planes_of(4), imagej(images=1), every=True)
    assert same(open_images(tmp_path).read(0)[0, 0], planes_of(4))


@pytest.mark.parametrize(
    ("description", "planar"),
    [
        (ome_xml("T1 C3 Z2", "<TiffData/>", channels=1, samples=3), 1),
        (imagej(images=2, slices=2), 1),
        (imagej(images=6, slices=2, channels=3), 2),
        (None, 1),
    ],
    ids=["OME-XML", "ImageJ", "ImageJ of planar samples", "none"],
)
def test_samples_are_channels_when_pages_are_rgb(tmp_path, description, planar):
    planes = planes_of(2, (*SIDE, 3))
    pages = planes if planar == 1 else planes.transpose(0, 3, 1, 2)
    write_pages(tmp_path / "a.tif", pages, description, photometric="rgb", planarconfig=planar)
    assert same(open_images(tmp_path).read(0), np.ascontiguousarray(planes.transpose(3, 0, 1, 2)[None]))


def test_find_image_raises_when_samples_are_not_the_channels(tmp_path):
    page = planes_of(1, (*SIDE, 3))
    write_pages(tmp_path / "a.tif", page, ome_xml("T1 C2 Z1", "<TiffData/>"), photometric="rgb")
    with raises(FormatError, path="a.tif", mentions=[(1, 2, 1, *SIDE), "3 samples"]):
        open_images(tmp_path)


@pytest.mark.parametrize("first", [0, 1], ids=["thumbnail last", "thumbnail first"])
def test_a_reduced_page_is_no_plane_but_another_page_is(tmp_path, first):
    planes = planes_of(2)
    xml = ome_xml("T1 C2 Z1", tiff_data((first, "C", 0), (first + 1, "C", 1)))
    for subfiletype in (1, 0):
        with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=False) as writer:
            options = {"photometric": "minisblack", "metadata": None, "contiguous": False}
            pages = [(plane, 0) for plane in planes]
            pages.insert(2 * (1 - first), (planes[0, :5, :6], subfiletype))
            for number, (page, kind) in enumerate(pages):
                writer.write(page, description=xml if number == 0 else None, subfiletype=kind, **options)
        if subfiletype == 1:
            assert same(open_images(tmp_path).read(0)[0, :, 0], planes)
        else:
            with raises(FormatError, path="a.ome.tif", mentions=["3 pages", "2 of them planes"]):
                open_images(tmp_path)


def test_sub_resolutions_are_no_planes_when_they_are_in_sub_ifds(tmp_path):
    planes = planes_of(3, (64, 48))
    with tifffile.TiffWriter(tmp_path / "a.ome.tif") as writer:
        options = {"photometric": "minisblack", "tile": (16, 16)}
        writer.write(planes, subifds=1, metadata={"axes": "CYX"}, **options)
        writer.write(planes[:, ::2, ::2], subfiletype=1, **options)
    assert same(open_images(tmp_path).read(0)[0, :, 0], planes)


@pytest.mark.parametrize("description", [imagej(images=5, slices=5), shaped(5)], ids=["ImageJ", "tifffile"])
@pytest.mark.parametrize("missing_bytes", [0, 1], ids=["whole", "cut short"])
def test_planes_without_pages_are_read_when_the_file_holds_all(tmp_path, description, missing_bytes):
    """For stacks of more than 4 GB, ImageJ writes only the first plane's header."""
    planes = planes_of(5)
    write_pages(tmp_path / "a.tif", planes[:1], description)
    data = (tmp_path / "a.tif").read_bytes()
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        (offset,) = tif.pages[0].dataoffsets
    (tmp_path / "a.tif").write_bytes((data[:offset] + planes.tobytes())[: -missing_bytes or None])
    if missing_bytes:
        with raises(FormatError, path="a.tif", mentions=["1 page"]):
            open_images(tmp_path)
    else:
        assert same(open_images(tmp_path).read(0)[0, 0], planes)


@pytest.mark.parametrize("options", [{}, {"byteorder": ">"}, {"compression": "zlib"}], ids=str)
@pytest.mark.parametrize(("axes", "lengths"), [("TYX", (3, 1, 1)), ("CYX", (1, 3, 1)), ("ZYX", (1, 1, 3))])
def test_pages_are_read_when_a_header_is_longer_than_the_planes(tmp_path, axes, lengths, options):
    """tifffile reads the bytes after the first plane, which are the second header."""
    planes = planes_of(3)
    write_pages(tmp_path / "a.tif", planes, shaped(3, axes=axes, notes="x" * 2000), **options)
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        expected = np.stack([page.asarray() for page in tif.pages]).reshape(*lengths, *SIDE)
    assert same(expected.reshape(planes.shape), planes)
    source = open_images(tmp_path)
    assert same(source.read(0), expected)
    assert same(source.read(0, region=(2, 9, 3, 16)), expected[..., 2:9, 3:16])
    dataset = OMEArrowDataset(tmp_path, axes="TCZYX", normalize=False)
    assert same(np.asarray(dataset[0]), expected)


def test_find_image_raises_when_only_the_header_follows_the_first_plane(tmp_path):
    """The bytes of the header must not be read as pixels."""
    write_raw(tmp_path / "a.tif", SIDE, more_tags={270: shaped(2).encode() + b"\0"})
    (tmp_path / "a.tif").write_bytes((tmp_path / "a.tif").read_bytes() + bytes(1000))
    with raises(FormatError, path="a.tif", mentions=["[2, 12, 16]", "1 page"]):
        open_images(tmp_path)


PLACES = [(number % 2, number // 2, 0, 0) for number in range(6)]  # C, Z, T and position.


@pytest.mark.parametrize(
    ("num_pages", "stored_planes", "sizes", "numbers"),
    [
        (6, PLACES, "T1 C2 Z3", []),
        (6, [PLACES[number] for number in (3, 0, 5, 2, 1, 4)], "T1 C2 Z3", []),
        (5, PLACES[:5], "T1 C2 Z3", [(1, 2, 3, *SIDE), "5 pages"]),
        (6, PLACES[:4], "T1 C2 Z3", [(1, 2, 3, *SIDE), "6 pages", "4 of them planes"]),
        (6, PLACES, "T1 C1 Z3", [(1, 1, 3, *SIDE), "6 pages"]),
    ],
    ids=["complete", "in another order", "stopped early", "index cut short", "other channels"],
)
def test_micro_manager_stacks_are_read_by_their_index_or_refused(tmp_path, num_pages, stored_planes, sizes, numbers):
    planes, name = planes_of(num_pages), "a_MMStack_Pos0.ome.tif"
    write_micro_manager(tmp_path / name, planes, stored_planes, "C2 Z3 T1", ome_xml(sizes, "<TiffData/>"))
    with tifffile.TiffFile(tmp_path / name) as tif:
        assert tif.series[0].kind == "mmstack"
    if numbers:
        with raises(FormatError, path=name, mentions=numbers):
            open_images(tmp_path)
        return
    image = open_images(tmp_path).read(0)
    for plane, (c, z, _, _) in zip(planes, stored_planes, strict=True):
        assert same(image[0, c, z], plane)


@pytest.mark.parametrize("axes", ["EYX", "PYX", "RYX", "AYX"])
def test_axes_with_another_meaning_are_no_z(tmp_path, axes):
    tifffile.imwrite(tmp_path / "a.tif", planes_of(3), photometric="minisblack", metadata={"axes": axes})
    with raises(FormatError, path="a.tif", mentions=[repr(axes)]):
        open_images(tmp_path)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["imagej", "ome", "shaped"]),
    st.tuples(*[st.integers(1, 3)] * 3),
    st.integers(-2, 2),
    st.sampled_from([{}, {"contiguous": True}, {"compression": "zlib"}]),
)
def test_a_stack_is_read_by_its_description_or_refused(tmp_path_factory, kind, lengths, lost, options):
    """Pages (T, Z, C) of every description; missing or extra pages are an error or become Z."""
    t, z, c = lengths
    planes = planes_of(max(1, t * z * c + lost))
    description = {
        "imagej": imagej(images=t * z * c, channels=c, slices=z, frames=t),
        "ome": ome_xml(f"T{t} C{c} Z{z}", "<TiffData/>"),
        "shaped": shaped(t, z, c, axes="TZCYX"),
    }[kind]
    folder = tmp_path_factory.mktemp("stack")
    write_pages(folder / "a.tif", planes, description, **options)
    if len(planes) == t * z * c:
        image = planes.reshape(t, z, c, *SIDE).swapaxes(1, 2)
        assert same(open_images(folder).read(0), np.ascontiguousarray(image))
    elif lengths == (1, 1, 1) and kind != "ome":  # It describes only the first page, without axes.
        assert same(open_images(folder).read(0)[0, 0], planes)
    else:
        with raises(FormatError, path="a.tif", mentions=f"{len(planes)} page{'s' * (len(planes) > 1)}"):
            open_images(folder)


GOOD, BAD = (imagej(images=6, channels=2, slices=3), 6), (imagej(images=6, channels=2, slices=3), 8)


@pytest.fixture(params=[{"contiguous": True}, {"compression": "zlib"}], ids=["contiguous", "compressed"])
def plate(request, tmp_path):
    """Return a folder of two fields; the second contradicts its description, which opening does not detect."""
    folder = tmp_path / "plate"
    folder.mkdir()
    for site, (description, num_pages) in enumerate((GOOD, BAD), 1):
        write_pages(folder / f"A01_s{site}.tif", planes_of(num_pages), description, **request.param)
    return folder


def by_table(folder):
    table = {"Metadata_Well": ["A01"] * 2, "Metadata_Site": [1, 2], "FileName_DNA": ["A01_s1.tif", "A01_s2.tif"]}
    pd.DataFrame(table | {"PathName_DNA": str(folder)}).to_csv(folder.parent / "load_data.csv", index=False)
    return folder.parent / "load_data.csv"


WAYS = {
    "pattern": lambda folder: open_images(folder, pattern="{well}_s{site}.tif").read(1),
    "pattern, region": lambda folder: open_images(folder, pattern="{well}_s{site}.tif").read(1, region=(0, 4, 0, 4)),
    "table": lambda folder: open_images(by_table(folder)).read(1),
    "table, region": lambda folder: open_images(by_table(folder)).read(1, region=(0, 4, 0, 4)),
    "file": lambda folder: open_images(folder / "A01_s2.tif"),
    "preloaded": lambda folder: OMEArrowDataset(by_table(folder), axes="CZYX"),
    "on demand": lambda folder: OMEArrowDataset(by_table(folder), axes="CZYX", preload=False)[1],
    "crops": lambda folder: OMEArrowDataset(
        by_table(folder), axes="CZYX", preload=False, crop="grid", crop_size=(4, 4)
    )[12],
    "convert": lambda folder: convert(by_table(folder), folder.parent / "out.arrow"),
    "masks": lambda folder: OMEArrowDataset(
        open_images(folder / "A01_s1.tif").path, axes="CZYX", masks=str(folder / "A01_s2.tif")
    )[0],
}


@pytest.mark.parametrize("read", WAYS.values(), ids=WAYS)
def test_each_way_to_read_raises_when_a_later_file_contradicts_its_description(plate, read):
    with raises(FormatError, path="A01_s2.tif", mentions=["8 pages", "channels=2", "slices=3"]):
        read(plate)


@pytest.mark.parametrize(
    "options", [{"contiguous": True}, {"contiguous": True, "byteorder": ">"}, {"compression": "zlib"}], ids=str
)
def test_an_open_source_raises_when_the_file_comes_to_contradict_its_description(tmp_path, options):
    file = tmp_path / "a.tif"
    write_pages(file, planes_of(GOOD[1]), GOOD[0], **options)
    with open_images(tmp_path) as source:  # Files in folders are not checked again, unlike a single file.
        source.read(0), source.read(0, region=(0, 4, 0, 4))
        write_pages(file, planes_of(BAD[1]), BAD[0], **options)
        for region in (None, (0, 4, 0, 4)):
            with raises(FormatError, path="a.tif", mentions=["8 pages"]):
                source.read(0, region=region)


@pytest.mark.parametrize("region", [None, (0, 4, 0, 4)], ids=["whole", "region"])
def test_a_url_raises_when_a_later_file_contradicts_its_description(plate, tmp_path, region):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    plate.rename(plate.with_name("lab"))
    with serving(tmp_path) as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with open_images("s3://lab", pattern="{well}_s{site}.tif", storage=storage) as source:
            image = planes_of(6).reshape(1, 3, 2, *SIDE).swapaxes(1, 2)
            rows, columns = (slice(None), slice(None)) if region is None else (slice(0, 4), slice(0, 4))
            assert same(source.read(0, region=region), np.ascontiguousarray(image[..., rows, columns]))
            with raises(FormatError, path="A01_s2.tif", mentions=["8 pages", "channels=2", "slices=3"]):
                source.read(1, region=region)
        with raises(FormatError, path="A01_s2.tif", mentions=["8 pages"]):
            open_images("s3://lab/*.tif", storage=storage)
