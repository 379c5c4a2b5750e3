"""OME-TIFF files whose OME-XML lists all files of a dataset, as Micro-Manager and ``bfconvert %c`` write them."""

from __future__ import annotations

import json
import shutil
import struct
from functools import partial
from itertools import product

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import FormatError, OMEArrowDataset, OMEArrowDatasetNumpy, Storage, convert, open_images, write_images
from tests.support.errors import raises
from tests.support.objects import serving

NAMESPACE = "http://www.openmicroscopy.org/Schemas/OME/2016-06"


def identifier(name):
    return f"urn:uuid:00000000-0000-4000-8000-{sum(map(ord, name)):012d}"


def image_xml(number, shape, planes, order="XYCZT", *, identified=True, unit=1):
    """Return an Image element of (T, C, Z, Y, X) pixels; ``planes`` lists (t, c, z) with page and file."""
    sizes = " ".join(f'Size{axis}="{size}"' for axis, size in zip("TCZYX", shape, strict=True))
    channels = "".join(
        f'<Channel ID="Channel:{number}:{c}" Name="dye {c}" SamplesPerPixel="1"/>' for c in range(shape[1])
    )
    data = "".join(
        f'<TiffData IFD="{page}" FirstT="{t}" FirstC="{c}" FirstZ="{z}" PlaneCount="{unit}">'
        f'<UUID FileName="{name}">{identifier(name) if identified else ""}</UUID></TiffData>'
        for (t, c, z), page, name in planes
    )
    return (
        f'<Image ID="Image:{number}" Name="position {number}"><Pixels ID="Pixels:{number}" DimensionOrder="{order}" '
        f'Type="uint16" {sizes} PhysicalSizeX="0.{number + 1}">{channels}{data}</Pixels></Image>'
    )


def write(path, pages, images, *, identified=True, **options):
    uuid = f' UUID="{identifier(path.name)}"' if identified else ""
    xml = f'<?xml version="1.0"?><OME xmlns="{NAMESPACE}"{uuid}>{"".join(images)}</OME>'
    with tifffile.TiffWriter(path) as writer:
        for number, page in enumerate(pages):
            description = xml if number == 0 else None
            writer.write(
                page, photometric="minisblack", metadata=None, description=description, contiguous=False, **options
            )


def pixels(number, shape=(1, 2, 1, 6, 8)):
    return (np.arange(np.prod(shape)).reshape(shape) + 1000 * number).astype(np.uint16)


def positions(folder, count=3, shape=(1, 2, 1, 6, 8), **options):
    """Write a file per position, each listing all files, and return the images."""
    folder.mkdir(parents=True, exist_ok=True)
    images_of_positions = [pixels(number, shape) for number in range(count)]
    planes = list(product(*map(range, shape[:3])))
    names = [f"Pos{number}.ome.tif" for number in range(count)]
    listed = [[(plane, page, name) for page, plane in enumerate(planes)] for name in names]
    identified = options.pop("identified", True)
    images = [image_xml(number, shape, entries, identified=identified) for number, entries in enumerate(listed)]
    for image, name in zip(images_of_positions, names, strict=True):
        write(folder / name, [image[plane] for plane in planes], images, identified=identified, **options)
    return images_of_positions


def split_files(folder, axis, shape=(2, 2, 2, 6, 8), wells=("A01", "B02")):
    """Write a file per well and index along an axis, each listing its image; return the images by well."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for number, well in enumerate(wells):
        images[well] = pixels(number, shape)
        planes_of_files = {}
        for plane in product(*map(range, shape[:3])):
            planes_of_files.setdefault(f"{well}_{axis}{plane['TCZ'.index(axis)]}.ome.tif", []).append(plane)
        listed = [(plane, page, name) for name, planes in planes_of_files.items() for page, plane in enumerate(planes)]
        for name, planes in planes_of_files.items():
            write(folder / name, [images[well][plane] for plane in planes], [image_xml(0, shape, listed)])
    return images


def same(source, images):
    return len(source) == len(images) and all(np.array_equal(source.read(i), image) for i, image in enumerate(images))


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}, {"tile": (16, 16)}, {"identified": False}], ids=str)
def test_positions_are_images_with_their_own_metadata(tmp_path, options):
    images = positions(tmp_path / "m", shape=(2, 2, 3, 6, 8), **options)
    (tmp_path / "m.csv").write_text(
        "FileName_all,PathName_all\n" + "".join(f"Pos{n}.ome.tif,{tmp_path / 'm'}\n" for n in range(3))
    )
    for source in (
        open_images(tmp_path / "m"),
        open_images(tmp_path / "m", pattern="Pos{site}.ome.tif"),
        open_images(tmp_path / "m.csv"),
    ):
        assert same(source, images)
        assert np.array_equal(source.read(2, region=(1, 4, 2, 7), t=1, z=[2, 0]), images[2][1:, :, [2, 0], 1:4, 2:7])
        assert [source.metadata(number)["physical_size_x"] for number in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    with open_images(tmp_path / "m") as source:
        assert [source.metadata(number)["name"] for number in range(3)] == [f"position {number}" for number in range(3)]
        assert [channel["name"] for channel in source.metadata(1)["channels"]] == ["dye 0", "dye 1"]
    convert(tmp_path / "m", tmp_path / "m.arrow")
    assert same(open_images(tmp_path / "m.arrow"), images)


@pytest.mark.parametrize("preload", [True, False])
def test_positions_are_masks_by_name(tmp_path, preload):
    masks = positions(tmp_path / "m", shape=(1, 1, 1, 6, 8))
    write_images(masks, tmp_path / "i.arrow", image_ids=["0", "1", "2"])
    for path in (f"{tmp_path}/m/Pos{{field}}.ome.tif", {"path": tmp_path / "m", "pattern": "Pos{site}.ome.tif"}):
        dataset = OMEArrowDatasetNumpy(tmp_path / "i.arrow", masks=path, axes="YX", preload=preload, normalize=False)
        assert all(np.array_equal(mask, masks[number][0, 0, 0]) for number, (_, mask) in enumerate(dataset))


def test_positions_in_a_bucket_are_images(tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    images = positions(tmp_path / "served" / "lab" / "m")
    split = split_files(tmp_path / "served" / "lab" / "c", "C")
    with serving(tmp_path / "served") as server:
        opened = partial(open_images, storage=Storage(anonymous=True, endpoint=server.url, region="us-east-1"))
        with opened("s3://lab/m") as source:
            assert same(source, images)
            assert source.metadata(2)["name"] == "position 2"
            assert np.array_equal(source.read(1, region=(1, 3, 2, 4)), images[1][..., 1:3, 2:4])
        with opened("s3://lab/c", pattern="{well}_C{channel}.ome.tif") as source:
            assert same(source, list(split.values()))


@pytest.mark.parametrize(("axis", "name"), [("C", "channel"), ("Z", "z"), ("T", "t")])
def test_planes_in_several_files_are_joined_as_the_pattern_names_them(tmp_path, axis, name):
    images = split_files(tmp_path / "s", axis)
    pattern = f"{{well}}_{axis}{{{name}}}.ome.tif"
    with open_images(tmp_path / "s", pattern=pattern) as source:
        assert same(source, list(images.values()))
        assert np.array_equal(source.read(1, region=(0, 2, 3, 8), z=1), images["B02"][:, :, 1:, :2, 3:])
        assert source.metadata(0)["physical_size_x"] == pytest.approx(0.1)
    dataset = OMEArrowDataset(tmp_path / "s", pattern=pattern, axes="TCZYX", normalize=False)
    assert np.array_equal(dataset[1].numpy(), images["B02"])
    if axis == "C":
        with open_images(tmp_path / "s", pattern=pattern, channels=["1"]) as source:
            assert same(source, [image[:, 1:] for image in images.values()])


def test_channels_in_several_files_are_joined_by_a_table(tmp_path):
    images = split_files(tmp_path / "s", "C", shape=(1, 2, 1, 6, 8))
    rows = "".join(f"{well}_C0.ome.tif,{well}_C1.ome.tif,{well}\n" for well in images)
    (tmp_path / "s" / "list.csv").write_text(f"FileName_DNA,FileName_ER,Metadata_Well\n{rows}")
    with open_images(tmp_path / "s" / "list.csv") as source:
        assert same(source, list(images.values()))


@pytest.mark.parametrize("how", ["folder", "pattern without channel", "masks", "one file"])
def test_a_file_that_needs_its_siblings_is_refused(tmp_path, how):
    images = split_files(tmp_path / "s", "C")
    write_images([image[:, :1] for image in images.values()], tmp_path / "i.arrow", image_ids=list(images))
    with raises(FormatError, path=tmp_path / "s" / "A01_C0.ome.tif", mentions=("pattern", "{channel}")):
        if how == "masks":
            OMEArrowDataset(tmp_path / "i.arrow", masks=f"{tmp_path}/s/{{field}}_C0.ome.tif", axes="TZYX")
        elif how == "one file":
            open_images(tmp_path / "s" / "A01_C0.ome.tif")
        else:
            open_images(tmp_path / "s", **({} if how == "folder" else {"pattern": "{well}_{site}.ome.tif"}))


def test_renamed_positions_are_told_by_their_identifiers(tmp_path):
    images = positions(tmp_path / "m")
    for name in ("Pos0", "Pos1", "Pos2"):
        (tmp_path / "m" / f"{name}.ome.tif").rename(tmp_path / "m" / f"_{name}.ome.tif")
    for number, other in enumerate((1, 2, 0)):
        (tmp_path / "m" / f"_Pos{number}.ome.tif").rename(tmp_path / "m" / f"Pos{other}.ome.tif")
    assert same(open_images(tmp_path / "m"), [images[2], images[0], images[1]])


def test_one_position_without_the_others_is_read(tmp_path):
    images = positions(tmp_path / "m")
    shutil.move(tmp_path / "m" / "Pos1.ome.tif", tmp_path / "alone.ome.tif")
    assert same(open_images(tmp_path / "alone.ome.tif"), images[1:2])


def test_a_position_that_misses_a_page_is_an_error(tmp_path):
    shape, planes = (1, 3, 1, 6, 8), [(0, c, 0) for c in range(3)]
    listed = [[(plane, page, f"Pos{n}.ome.tif") for page, plane in enumerate(planes)] for n in range(2)]
    images = [image_xml(number, shape, entries) for number, entries in enumerate(listed)]
    for number in range(2):
        write(
            tmp_path / f"Pos{number}.ome.tif", [pixels(number, shape)[plane] for plane in planes[: 3 - number]], images
        )
    with raises(FormatError, path="Pos1.ome.tif", remedy=True):
        open_images(tmp_path)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 3),
    st.permutations("CZT"),
    st.sampled_from("TCZ"),
    st.randoms(use_true_random=False),
)
def test_planes_are_found_by_any_order_of_pages(tmp_path_factory, sizes, order, axis, random):
    """Pages are in random order in the files of an image that is split along one axis, next to a whole image."""
    folder = tmp_path_factory.mktemp("s")
    shape = (*sizes, 3, 4)
    image, other = pixels(0, shape), pixels(1, shape)
    planes = list(product(*map(range, sizes)))
    planes_of_files = {"other.ome.tif": random.sample(planes, len(planes))}
    for plane in random.sample(planes, len(planes)):
        planes_of_files.setdefault(f"x_{plane['TCZ'.index(axis)]}.ome.tif", []).append(plane)
    files = [
        [
            (plane, page, name)
            for name, planes_of_file in planes_of_files.items()
            for page, plane in enumerate(planes_of_file)
            if (name[0] == "o") == whole
        ]
        for whole in (False, True)
    ]
    xml = [image_xml(number, shape, listed, f"XY{''.join(order)}") for number, listed in enumerate(files)]
    for name, planes_of_file in planes_of_files.items():
        write(folder / name, [(other if name[0] == "o" else image)[plane] for plane in planes_of_file], xml)
    assert np.array_equal(open_images(folder / "other.ome.tif").read(0), other)
    (folder / "other.ome.tif").unlink()
    name = {"T": "t", "C": "channel", "Z": "z"}[axis]
    with open_images(folder, pattern=f"{{well}}_{{{name}}}.ome.tif") as source:
        assert same(source, [image])


def micro_manager_file(path, images, number, count):
    """Write a file with the index of Micro-Manager 1.4, from which tifffile would read all positions."""
    sizes = {"Positions": count, "Channels": 2, "Slices": 1, "Frames": 1}
    summary = json.dumps({"MicroManagerVersion": "1.4.23", "Prefix": "m", **sizes}).encode()
    names = [f"m_MMStack_Pos{position}.ome.tif" for position in range(count)]
    xml = [image_xml(n, (1, 2, 1, 6, 8), [((0, c, 0), c, name) for c in range(2)]) for n, name in enumerate(names)]
    text = f'<OME xmlns="{NAMESPACE}" UUID="{identifier(path.name)}">{"".join(xml)}</OME>'.encode()
    page_offset = start = 40 + len(summary) + len(summary) % 2
    pages, offsets, metadata = b"", [], b"{}".ljust(8)
    for c in range(2):
        data, described = (
            images[number][0, c, 0].tobytes(),
            text.ljust(len(text) + len(text) % 2) if c == 0 else b"page".ljust(8),
        )
        first = page_offset + 2 + 12 * 11 + 4
        tags = [
            *((256, 3, 1, 8), (257, 3, 1, 6), (258, 3, 1, 16), (259, 3, 1, 1), (262, 3, 1, 1)),
            (270, 2, len(described), first),
            (273, 4, 1, first + len(described) + len(metadata)),
            *((277, 3, 1, 1), (278, 3, 1, 6), (279, 4, 1, len(data))),
            (51123, 2, len(metadata), first + len(described)),
        ]
        stop = first + len(described) + len(metadata) + len(data)
        pages += struct.pack("<H", 11) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
        pages += struct.pack("<I", stop if c == 0 else 0) + described + metadata + data
        offsets.append(page_offset)
        page_offset = stop
    header = struct.pack(
        "<2sHI8I", b"II", 42, start, 54773648, page_offset, 483765892, 0, 99384722, 0, 2355492, len(summary)
    )
    entries = b"".join(struct.pack("<5I", c, 0, 0, number, offset) for c, offset in enumerate(offsets))
    path.write_bytes((header + summary).ljust(start, b"\0") + pages + struct.pack("<2I", 3453623, 2) + entries)


def test_positions_with_the_index_of_micro_manager_are_images(tmp_path):
    images = [pixels(number) for number in range(2)]
    for number in range(2):
        micro_manager_file(tmp_path / f"m_MMStack_Pos{number}.ome.tif", images, number, 2)
    with tifffile.TiffFile(tmp_path / "m_MMStack_Pos1.ome.tif") as tif:
        assert tif.is_mmstack
        assert tif.series[0].is_multifile
    assert same(open_images(tmp_path), images)
