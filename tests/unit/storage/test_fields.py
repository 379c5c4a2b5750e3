"""Fields of several files, by file name and by tables; the oracle is tifffile, file by file."""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import tifffile
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    FormatError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    convert,
    open_images,
)
from omearrow_ds.cli import main
from omearrow_ds.storage import patterns
from omearrow_ds.storage.verified import decode
from tests.support.errors import raises, warns
from tests.support.strategies import NAMES, NF1, SUFFIX, same

NF1_PATTERN = "{well}_01_{channel_index}_{site}_{channel}_001.tif"
needs_nf1 = pytest.mark.skipif(not NF1.is_dir(), reason=f"the NF1 fields are not at {NF1}")


def plane(name, shape=(6, 7), dtype=np.uint16):
    """Return pixels that encode their position and file name."""
    number = sum(ord(letter) * (index + 1) for index, letter in enumerate(name)) % 251
    return (np.arange(np.prod(shape)).reshape(shape) + number * 7).astype(dtype)


def write(folder, *names, **how):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(folder / name, plane(Path(name).name, **how), photometric="minisblack")


def plate(folder, wells=("B2", "B10"), sites=(1, 2), channels=("DNA", "ER", "Mito")):
    write(folder, *(f"{well}_s{site}_{channel}.tif" for well in wells for site in sites for channel in channels))
    return folder


PATTERN = "{well}_s{site}_{channel}.tif"


def check(source, folder, files):
    """Compare every way to read with tifffile; ``files`` has a grid (T, C, Z) of names per image."""
    for index, grid in enumerate(files):
        expected = np.stack([np.stack([np.stack([tifffile.imread(folder / z) for z in c]) for c in t]) for t in grid])
        assert same(source.read(index), expected)
        assert same(source.images.read([index])[0], expected)
        assert tuple(source.shapes[index]) == expected.shape
        assert source.dtypes[index] == expected.dtype
    assert all(same(one, source.read(index)) for index, one in enumerate(source.take(range(len(files)))))
    for start, images in source.images.stream():
        assert same(images[0], source.read(start))
    decoded = [np.empty(shape, dtype) for shape, dtype in zip(source.shapes, source.dtypes, strict=True)]
    decode(source.images, decoded)
    assert all(same(image, source.read(index)) for index, image in enumerate(decoded))


def test_names_become_fields_with_channels_and_columns(tmp_path):
    folder = plate(tmp_path)
    (folder / "notes.txt").write_text("no image")
    write(folder / "masks", "B2_s1_mask.tif")
    with open_images(folder, pattern=PATTERN) as source:
        assert source.image_ids == ["B2_1", "B2_2", "B10_1", "B10_2"]
        assert source.columns.to_pydict() == {
            "Metadata_Well": ["B2", "B2", "B10", "B10"],
            "Metadata_Site": [1, 2, 1, 2],
        }
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["DNA", "ER", "Mito"]
        assert source.rows.tolist() == [0, 1, 2, 3]
        rows = source.columns.to_pylist()
        check(
            source,
            folder,
            [
                [[[f"{row['Metadata_Well']}_s{row['Metadata_Site']}_{name}.tif"] for name in ("DNA", "ER", "Mito")]]
                for row in rows
            ],
        )
        again = pickle.loads(pickle.dumps(source))
        assert same(again.read(2), source.read(2))
        assert again.columns.equals(source.columns)


@pytest.mark.parametrize(
    "pattern",
    [
        re.compile(PATTERN.replace("{", "(?P<").replace("}", ">[^_]+)")),
        r"(?P<well>[A-P]\d+)_s(?P<site>\d)_(?P<channel>.+)\.tif",
    ],
)
def test_a_regular_expression_says_the_same(tmp_path, pattern):
    plate(tmp_path)
    with open_images(tmp_path, pattern=PATTERN) as one, open_images(tmp_path, pattern=pattern) as other:
        assert other.image_ids == one.image_ids
        assert all(same(other.read(index), one.read(index)) for index in range(4))


def test_channels_are_chosen_and_ordered(tmp_path):
    plate(tmp_path)
    with open_images(tmp_path, pattern=PATTERN, channels=["Mito", "DNA"]) as source:
        check(source, tmp_path, [[[["B2_s1_Mito.tif"], ["B2_s1_DNA.tif"]]]])
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["Mito", "DNA"]
    with open_images(tmp_path, pattern=PATTERN, channels="ER") as source:
        assert source.shapes[0, 1] == 1
    for wrong in (["DNA", "RNA"], [], ["DNA", "DNA"]):
        with raises(ArgumentError, option="channels", mentions="'DNA', 'ER', 'Mito'", remedy=False):
            open_images(tmp_path, pattern=PATTERN, channels=wrong)
    with raises(ArgumentError, option="channels", mentions=("pattern=", "{channel}")):
        open_images(tmp_path, pattern="{well}_{_}.tif", channels=["DNA"])


def test_an_index_orders_channels_and_is_their_name_where_there_is_no_other(tmp_path):
    write(tmp_path, "A1_1_RFP.tif", "A1_2_DAPI.tif", "A1_10_Brightfield.tif")
    with open_images(tmp_path, pattern="{well}_{channel_index}_{channel}.tif") as source:
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["RFP", "DAPI", "Brightfield"]
        check(source, tmp_path, [[[["A1_1_RFP.tif"], ["A1_2_DAPI.tif"], ["A1_10_Brightfield.tif"]]]])
    with open_images(tmp_path, pattern="{well}_{channel_index}_{_}.tif") as source:
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["1", "2", "10"]
        check(source, tmp_path, [[[["A1_1_RFP.tif"], ["A1_2_DAPI.tif"], ["A1_10_Brightfield.tif"]]]])
    write(tmp_path, "A2_2_RFP.tif", "A2_1_DAPI.tif", "A2_10_Brightfield.tif")
    with raises(FormatError, path=tmp_path, mentions=("DAPI", 2, "'A1_2_DAPI.tif'", 1, "'A2_1_DAPI.tif'")):
        open_images(tmp_path, pattern="{well}_{channel_index}_{channel}.tif")


def test_z_and_t_become_axes_in_natural_order(tmp_path):
    names = [f"A1_t{t}_z{z}_{c}.tif" for t, z, c in product((0, 1), (2, 9, 10), "ab")]
    write(tmp_path, *names)
    with open_images(tmp_path, pattern="{well}_t{t}_z{z}_{channel}.tif") as source:
        check(source, tmp_path, [[[[f"A1_t{t}_z{z}_{c}.tif" for z in (2, 9, 10)] for c in "ab"] for t in (0, 1)]])
    (tmp_path / names[3]).unlink()
    with raises(FormatError, path=tmp_path, mentions=("A1", "t 0", "channel b", "z 9")):
        open_images(tmp_path, pattern="{well}_t{t}_z{z}_{channel}.tif")


def test_a_plane_that_all_channels_lack_is_not_the_next_one(tmp_path):
    pattern = "{well}_z{z}_{channel}.tif"
    write(tmp_path, *(f"{well}_z{z}_{c}.tif" for well, z, c in product(("A1", "A2", "A3"), (1, 2, 3), "ab")))
    for name in ("A2_z2_a.tif", "A2_z2_b.tif", "A3_z3_a.tif", "A3_z3_b.tif"):
        (tmp_path / name).unlink()
    with raises(FormatError, path=tmp_path, mentions=("A2", "channel a", "z 2")):
        open_images(tmp_path, pattern=pattern)
    with warns(UserWarning, path=tmp_path, mentions="1 of 3"):
        source = open_images(tmp_path, pattern=pattern, incomplete="skip")
    wells = (("A1", 3), ("A3", 2))
    grids = [[[[f"{well}_z{z}_{c}.tif" for z in range(1, 1 + last)] for c in "ab"]] for well, last in wells]
    check(source, tmp_path, grids)
    write(tmp_path / "times", *(f"{well}_t{t}_{c}.tif" for (well, t), c in product([("A1", 5), ("A2", 6)], "ab")))
    with open_images(tmp_path / "times", pattern="{well}_t{t}_{channel}.tif") as source:  # Each well has its own times.
        check(source, tmp_path / "times", [[[[f"{w}_t{t}_{c}.tif"] for c in "ab"]] for w, t in (("A1", 5), ("A2", 6))])


def test_files_that_are_stacks_stay_stacks(tmp_path):
    for channel in "ab":
        stack = np.stack([plane(f"{channel}{z}") for z in range(3)])
        tifffile.imwrite(
            tmp_path / f"A1_{channel}.tif", stack, photometric="minisblack", metadata={"axes": "ZYX"}, ome=True
        )
    with open_images(tmp_path, pattern="{well}_{channel}.tif") as source:
        assert source.shapes.tolist() == [[1, 2, 3, 6, 7]]
        for index, channel in enumerate("ab"):
            assert same(source.read(0)[0, index], tifffile.imread(tmp_path / f"A1_{channel}.tif"))


def test_folders_take_part_where_the_pattern_has_them(tmp_path):
    for name in ("P1", "P2"):
        plate(tmp_path / name / "images", wells=("A1",), sites=(1,))
        write(tmp_path / name / "thumbs", "A1_s1_DNA_thumb.tif")
    for pattern in (
        "{plate}/images/" + PATTERN,
        r"(?P<plate>P\d)/images/(?P<well>..)_s(?P<site>\d)_(?P<channel>\w+)\.tif",
    ):
        if "?P" in pattern:  # It does not distinguish folders.
            with raises(FormatError, path=tmp_path, mentions="thumbs/A1_s1_DNA_thumb.tif"):
                open_images(tmp_path, pattern=pattern)
            for name in ("P1", "P2"):
                (tmp_path / name / "thumbs" / "A1_s1_DNA_thumb.tif").unlink()
        with open_images(tmp_path, pattern=pattern) as source:
            assert source.image_ids == ["P1_A1_1", "P2_A1_1"]
            assert source.columns["Metadata_Plate"].to_pylist() == ["P1", "P2"]
            grids = [[[[f"{name}/images/A1_s1_{c}.tif"] for c in ("DNA", "ER", "Mito")]] for name in ("P1", "P2")]
            check(source, tmp_path, grids)


def test_a_plate_that_lacks_a_file_is_refused_or_its_field_left_out(tmp_path):
    plate(tmp_path)
    (tmp_path / "B10_s1_ER.tif").unlink()

    with raises(FormatError, path=tmp_path, mentions=("B10_1", "channel ER")):
        open_images(tmp_path, pattern=PATTERN)
    with warns(UserWarning, path=tmp_path, mentions=("1 of 4", "B10_1", "channel ER")):
        source = open_images(tmp_path, pattern=PATTERN, incomplete="skip")
    assert source.image_ids == ["B2_1", "B2_2", "B10_2"]
    check(source, tmp_path, [[[[f"B2_s1_{c}.tif"] for c in ("DNA", "ER", "Mito")]]])
    assert same(source.read(2)[0, 1, 0], tifffile.imread(tmp_path / "B10_s2_ER.tif"))
    assert len(open_images(tmp_path, pattern=PATTERN, channels=["DNA", "Mito"])) == 4
    with raises(ArgumentError, option="incomplete", mentions="'maybe'", remedy=False):
        open_images(tmp_path, pattern=PATTERN, incomplete="maybe")


def test_names_are_known_as_cellprofiler_has_them_and_slips_are_told(tmp_path):
    plate(tmp_path)
    write(tmp_path, "._B2_s1_DNA.tif")  # macOS creates such files.
    regex = r"(?P<Well>[A-P]\d+)_s(?P<Site>\d)_(?P<Channel>.+)\.tif"
    with open_images(tmp_path, pattern=regex) as source, open_images(tmp_path, pattern=PATTERN) as plain:
        assert source.shapes.tolist() == plain.shapes.tolist()
        assert source.columns.equals(plain.columns)
        assert same(source.read(2), plain.read(2))
    with raises(ArgumentError, option="pattern", mentions=("'chanel'", "'channel'")):
        open_images(tmp_path, pattern="{well}_s{site}_{chanel}.tif")
    with raises(FormatError, path=tmp_path, mentions=(4, "B2_s1_DNA")):
        open_images(tmp_path, pattern=r"(?P<channel>(?P<well>\w+)_s(?P<site>\d)_.+)\.tif")


def test_two_files_for_one_plane_are_named(tmp_path):
    plate(tmp_path)
    write(tmp_path, "B2_s1_DNA.tiff")
    with raises(FormatError, path=tmp_path, mentions=("B2_1", "B2_s1_DNA.tif", "B2_s1_DNA.tiff")):
        open_images(tmp_path, pattern=r"(?P<well>\w\d+)_s(?P<site>\d)_(?P<channel>\w+)\.tiff?")


def test_files_that_match_nothing_are_named(tmp_path):
    plate(tmp_path)
    write(tmp_path, "overview.tif")
    with raises(FormatError, option="pattern", path=tmp_path, mentions=("1 of 13", "'overview.tif'")):
        open_images(tmp_path, pattern=PATTERN)
    with raises(FormatError, option="pattern", path=tmp_path, mentions="13 of 13"):
        open_images(tmp_path, pattern="{plate}/" + PATTERN)
    plate(tmp_path / "in" / "Images")
    with raises(FormatError, option="pattern", path=tmp_path / "in", mentions="'Images'"):
        open_images(tmp_path / "in", pattern=PATTERN)
    with raises(FormatError, option="pattern", path=tmp_path / "in", mentions="'Images'"):
        open_images(tmp_path / "in")
    write(tmp_path / "png", "A1_s1_DNA.tif")
    (tmp_path / "png" / "A1_s1_DNA.tif").rename(tmp_path / "png" / "A1_s1_DNA.png")
    with raises(FormatError, option="pattern", path=tmp_path / "png", mentions="'A1_s1_DNA.png'", remedy=False):
        open_images(tmp_path / "png", pattern="{well}_s{site}_{channel}.png")


@pytest.mark.parametrize(
    ("pattern", "facts"),
    [
        ("image.tif", ["'{well}_{site}_{channel}.tif'"]),
        ("phoenix", ["'phenix'"]),
        ("{well}{site}.tif", ["{well}{site}"]),
        ("{well_{site}.tif", ["brace"]),
        ("{}_{site}.tif", ["brace"]),
        ("(?P<well>[A-P", ["regular expression"]),
        (7, []),
    ],
)
def test_patterns_that_say_nothing_are_refused(tmp_path, pattern, facts):
    plate(tmp_path)
    with raises(ArgumentError, option="pattern", mentions=(repr(pattern), *facts), remedy=False):
        open_images(tmp_path, pattern=pattern)


def test_names_that_are_one_column_are_refused(tmp_path):
    write(tmp_path, "A1_x_1.tif", "A1_y_1.tif")
    with raises(ArgumentError, option="pattern", mentions="'Metadata_Well'"):
        open_images(tmp_path, pattern="{well}_{Well}_{channel}.tif")


def test_folders_that_are_links_are_refused(tmp_path):
    write(tmp_path / "P1", "A1_1.tif")
    (tmp_path / "other").symlink_to(tmp_path / "P1")
    with open_images(tmp_path, pattern="P{plate}/{well}_{channel}.tif") as source:
        assert source.image_ids == ["1_A1"]
    for pattern in ("{plate}/{well}_{channel}.tif", r"(?P<plate>[^/]+)/(?P<well>.+)_(?P<channel>.)\.tif"):
        with raises(FormatError, path=tmp_path / "other", mentions="symbolic link"):
            open_images(tmp_path, pattern=pattern)


def test_names_that_are_no_text_are_refused(tmp_path):
    (tmp_path / os.fsdecode(b"A\xe4_1.tif")).write_bytes(b"")
    with raises(FormatError, path=tmp_path, mentions="UTF-8"):
        open_images(tmp_path, pattern="{well}_{channel}.tif")


@pytest.mark.parametrize("channels", [{"DNA", "ER"}, 5, [["DNA"]], [0], [], ""])
def test_channels_that_have_no_order_are_refused(tmp_path, channels):
    plate(tmp_path)
    with raises(ArgumentError, option="channels", remedy=False):
        open_images(tmp_path, pattern=PATTERN, channels=channels)


def test_one_field_is_called_as_its_folder_is(tmp_path):
    write(tmp_path / "A1", "DNA.tif", "ER.tif")
    with open_images(tmp_path / "A1", pattern="{channel}.tif") as source:
        assert (source.image_ids, source.columns.num_columns) == (["A1"], 0)
        check(source, tmp_path / "A1", [[[["DNA.tif"], ["ER.tif"]]]])


def test_options_that_do_not_go_together_are_refused(tmp_path, stored):
    plate(tmp_path)
    with raises(ArgumentError, option="pattern", path=tmp_path / "B2_s1_DNA.tif"):
        open_images(tmp_path / "B2_s1_DNA.tif", pattern=PATTERN)
    for options in ({"image_column": "x"}, {"level": 1}, {"engine": "pages"}, {"table": "x"}):
        with raises(ArgumentError, option=next(iter(options))):
            open_images(tmp_path, pattern=PATTERN, **options)
    with raises(ArgumentError, option="format", mentions="'parquet'"):
        open_images(tmp_path, "parquet", pattern=PATTERN)
    with raises(ArgumentError, option="root", remedy=False):
        open_images(tmp_path, pattern=PATTERN, root=tmp_path)
    path = stored("parquet", [plane("x")])
    for options in ({"channels": ["DNA"]}, {"root": tmp_path}, {"incomplete": "skip"}):
        with raises(ArgumentError, option=next(iter(options)), path=path, mentions="TIFF", remedy=False):
            open_images(path, **options)


def test_channels_of_another_kind_are_refused_when_opened(tmp_path):
    plate(tmp_path, wells=("A1",), sites=(1,))
    write(tmp_path, "A1_s1_ER.tif", dtype=np.uint8)
    with raises(FormatError, path=tmp_path, mentions=("A1_1", "A1_s1_DNA.tif", "uint16", "A1_s1_ER.tif", "uint8")):
        open_images(tmp_path, pattern=PATTERN)
    assert len(open_images(tmp_path, pattern=PATTERN, channels=["DNA", "Mito"])) == 1


@pytest.mark.parametrize("how", [{"shape": (6, 8)}, {"dtype": np.uint8}])
def test_a_file_of_another_kind_is_refused_when_it_is_read(tmp_path, how):
    plate(tmp_path)
    write(tmp_path, "B10_s1_ER.tif", **how)
    source = open_images(tmp_path, pattern=PATTERN)
    assert len(source.take([0, 1, 3])) == 3
    with raises(
        FormatError, path=tmp_path / "B10_s1_ER.tif", mentions=("B10_1", "channel ER", "(1, 1, 1, 6, 7) uint16")
    ):
        source.read(2)
    with raises(FormatError, path=tmp_path / "B10_s1_ER.tif", mentions=("B10_1", "channel ER")):
        OMEArrowDataset(tmp_path, pattern=PATTERN)


def test_files_that_go_or_are_cut_are_named_when_they_are_read(tmp_path):
    plate(tmp_path)
    source = open_images(tmp_path, pattern=PATTERN)
    (tmp_path / "B2_s2_ER.tif").unlink()
    with raises(FormatError, path=tmp_path / "B2_s2_ER.tif", remedy=False):
        source.read(1)
    data = (tmp_path / "B10_s2_ER.tif").read_bytes()
    (tmp_path / "B10_s2_ER.tif").write_bytes(data[:-20])
    with raises(FormatError, path=tmp_path / "B10_s2_ER.tif", remedy=False):
        source.read(3)


def test_a_pipe_or_a_link_in_place_of_a_file_is_refused(tmp_path):
    plate(tmp_path / "one")
    (tmp_path / "one" / "B2_s1_ER.tif").unlink()
    os.mkfifo(tmp_path / "one" / "B2_s1_ER.tif")
    with raises(FormatError, path=tmp_path / "one" / "B2_s1_ER.tif", mentions="pipe"):
        open_images(tmp_path / "one", pattern=PATTERN)
    plate(tmp_path / "two")
    (tmp_path / "two" / "B2_s1_ER.tif").unlink()
    (tmp_path / "two" / "B2_s1_ER.tif").symlink_to(tmp_path / "two" / "B2_s1_DNA.tif")
    with raises(FormatError, path=tmp_path / "two" / "B2_s1_ER.tif", mentions="symbolic link"):
        open_images(tmp_path / "two", pattern=PATTERN)


PHENIX = [f"r02c{c:02d}f0{f}p0{z}-ch{ch}sk1fk1fl1.tiff" for c, f, z, ch in product((1, 11), (1, 2), (1, 2), (1, 2))]
NAMED = {
    "phenix": (PHENIX, ["B01_01", "B01_02", "B11_01", "B11_02"], (1, 2, 2), ["1", "2"]),
    "imagexpress": (
        [
            f"plate7_{well}_s{site}_w{w}6F1C3B2A-0001-4E2D-9C3B-1234567890{w}B.tif"
            for well, site, w in product(("A01", "H12"), (1, 2), (1, 2))
        ]
        + ["plate7_A01_s1_w1_thumb6F1C3B2A-0001-4E2D-9C3B-12345678901B.tif"],
        ["plate7_A01_1", "plate7_A01_2", "plate7_H12_1", "plate7_H12_2"],
        (1, 2, 1),
        ["1", "2"],
    ),
    "cellvoyager": (
        [f"A0{w}_T0001F00{f}L01A0{c}Z0{z}C0{c}.tif" for w, f, z, c in product((1, 2), (1, 2), (1, 2), (1, 2))],
        ["A01_001", "A01_002", "A02_001", "A02_002"],
        (1, 2, 2),
        ["01", "02"],
    ),
    "cytation": (
        [f"{w}_01_{i}_{f}_{c}_001.tif" for w, f, (i, c) in product(("B7", "H12"), (1, 2), ((1, "RFP"), (2, "DAPI")))],
        ["B7_1", "B7_2", "H12_1", "H12_2"],
        (1, 2, 1),
        ["RFP", "DAPI"],
    ),
}


@pytest.mark.parametrize("layout", patterns.LAYOUTS)
def test_names_of_known_layouts(tmp_path, layout):
    names, ids, tcz, channels = NAMED[layout]
    write(tmp_path, *names)
    with open_images(tmp_path, pattern=layout) as source:
        assert source.image_ids == ids
        assert tuple(source.shapes[0, :3]) == tcz
        assert source.columns["Metadata_Site"].to_pylist() == [1, 2, 1, 2]
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == channels
        read = {
            source.read(index)[index_tcz].tobytes()
            for index in range(4)
            for index_tcz in product(range(tcz[0]), range(tcz[1]), range(tcz[2]))
        }
        assert read == {tifffile.imread(tmp_path / name).tobytes() for name in names if "thumb" not in name}
    done = CliRunner().invoke(main, ["info", str(tmp_path)])
    assert f"looks like   4 fields x 2 channels, one file per channel; add --pattern {layout}" in done.output
    described = json.loads(CliRunner().invoke(main, ["info", str(tmp_path), "--json"]).stdout)
    assert described["looks_like"] == {"pattern": layout, "fields": 4, "channels": 2}
    assert described["images"] == len(names)  # The layout is only suggested.
    described = json.loads(CliRunner().invoke(main, ["info", str(tmp_path), "--pattern", layout, "--json"]).stdout)
    assert (described["images"], described["channels"], described["looks_like"]) == (4, channels, None)


INDEX = """<?xml version="1.0" encoding="utf-8"?>
<EvaluationInputData xmlns="http://www.perkinelmer.com/PEHH/HarmonyV5"><Images>
<Image Version="1"><id>0101K1F1P1R1</id><URL>r02c01f01p01-ch1sk1fk1fl1.tiff</URL><ChannelID>1</ChannelID>
<ChannelName>HOECHST 33342</ChannelName><ImageResolutionX Unit="m">2.98e-07</ImageResolutionX>
<ImageResolutionY Unit="m">2.98e-07</ImageResolutionY></Image>
<Image Version="1"><ChannelID>2</ChannelID><ChannelName>{second}</ChannelName></Image>
</Images></EvaluationInputData>"""
ENTRIES = """<EvaluationInputData xmlns="http://www.perkinelmer.com/PEHH/HarmonyV6"><Maps><Map>
<Entry ChannelID="1"><ChannelName>HOECHST 33342</ChannelName><ImageResolutionX Unit="m">2.98e-07</ImageResolutionX>
<ImageResolutionY Unit="m">2.98e-07</ImageResolutionY></Entry>
<Entry ChannelID="2"><ChannelName>Alexa 488</ChannelName></Entry></Map></Maps></EvaluationInputData>"""


@pytest.mark.parametrize(
    ("name", "index"), [("Index.idx.xml", INDEX.format(second="Alexa 488")), ("Index.xml", ENTRIES)]
)
def test_harmonys_index_names_channels(tmp_path, name, index):
    write(tmp_path, *PHENIX)
    (tmp_path / name).write_text(index)
    with open_images(tmp_path, pattern="phenix") as source:
        metadata = source.metadata(0)
        assert [channel["name"] for channel in metadata["channels"]] == ["HOECHST 33342", "Alexa 488"]
        assert metadata["physical_size_x"] == pytest.approx(0.298)
        assert metadata["physical_size_y_unit"] == "µm"
    with open_images(tmp_path, pattern="phenix", channels=["Alexa 488"]) as source:
        assert same(source.read(0)[0, 0, 0], tifffile.imread(tmp_path / "r02c01f01p01-ch2sk1fk1fl1.tiff"))


def test_harmonys_index_that_says_little_or_is_damaged(tmp_path):
    write(tmp_path, *PHENIX)
    (tmp_path / "Index.idx.xml").write_text(INDEX.format(second="HOECHST 33342"))
    with open_images(tmp_path, pattern="phenix") as source:  # Two exposures of one dye.
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["HOECHST 33342 1", "HOECHST 33342 2"]
    (tmp_path / "Index.idx.xml").write_text("<Images></Images>")
    with open_images(tmp_path, pattern="phenix") as source:
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["1", "2"]
    for bad in ("<Images><Image>", "<!DOCTYPE lolz [<!ENTITY a 'b'>]><Images/>"):
        (tmp_path / "Index.idx.xml").write_text(bad)
        with raises(FormatError, path=tmp_path / "Index.idx.xml"):
            open_images(tmp_path, pattern="phenix")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["A1", "A01", "B2", "AA12"]), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 120), min_size=1, max_size=3, unique=True),
    st.lists(
        st.text("abcXYZ_- .", min_size=1, max_size=5).map(str.strip).filter(bool), min_size=1, max_size=3, unique=True
    ),
    st.lists(st.integers(0, 12), min_size=1, max_size=2, unique=True),
    st.sampled_from([np.uint8, np.uint16, np.float32]),
)
def test_any_plate_reads_as_its_files(wells, sites, channels, depths, dtype):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grid = list(product(wells, sites, channels, depths))
        write(folder, *(f"{w}#{s}#{c}#{z}.tif" for w, s, c, z in grid), dtype=dtype)
        with open_images(folder, pattern="{well}#{site}#{channel}#{z}.tif") as source:
            assert len(source) == len(wells) * len(sites)
            for index, row in enumerate(source.columns.to_pylist()):
                names = [channel_metadata["name"] for channel_metadata in source.metadata(index)["channels"]]
                assert sorted(names) == sorted(channels)
                for c, z in product(range(len(names)), range(len(depths))):
                    file = f"{row['Metadata_Well']}#{row['Metadata_Site']}#{names[c]}#{sorted(depths)[z]}.tif"
                    assert same(source.read(index)[0, c, z], tifffile.imread(folder / file))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(3, "name")
def test_every_format_keeps_what_the_names_said(tmp_path, name):
    plate(tmp_path / "tiffs")
    with open_images(tmp_path / "tiffs", pattern=PATTERN) as source:
        path = tmp_path / f"copy{SUFFIX[name]}"
        convert(tmp_path / "tiffs", path, name, pattern=PATTERN)
        with open_images(path) as copy:
            assert copy.image_ids == source.image_ids
            assert copy.columns.equals(source.columns)
            for index in range(4):
                assert same(copy.read(index), source.read(index))
                assert [c["name"] for c in copy.metadata(index)["channels"]] == ["DNA", "ER", "Mito"]


@pytest.mark.parametrize("preload", [True, False])
def test_datasets_of_fields(tmp_path, preload):
    plate(tmp_path / "p")
    dataset = OMEArrowDataset(tmp_path / "p", pattern=PATTERN, preload=preload, normalize=False, target="Metadata_Site")
    loader = OMEArrowDataLoader(dataset, batch_size=3, num_workers=1)
    samples = [
        (image.numpy(), int(site)) for images, sites in loader for image, site in zip(images, sites, strict=True)
    ]
    with open_images(tmp_path / "p", pattern=PATTERN) as source:
        assert [site for _, site in samples] == [1, 2, 1, 2]
        assert all(same(image, source.read(index)[0, :, 0]) for index, (image, _) in enumerate(samples))


def test_decoded_pixels_are_kept_by_what_is_joined_of_them(tmp_path):
    plate(tmp_path / "p")
    opened = {"cache_dir": tmp_path / "cache", "normalize": False}
    one = OMEArrowDataset(tmp_path / "p", pattern=PATTERN, **opened)
    other = OMEArrowDataset(tmp_path / "p", pattern=PATTERN, channels=["Mito", "ER", "DNA"], **opened)
    assert same(one[0].numpy(), other[0].numpy()[::-1])
    assert len(list((tmp_path / "cache").glob("*.pixels"))) == 2
    assert same(OMEArrowDataset(tmp_path / "p", pattern=PATTERN, **opened)[3].numpy(), one[3].numpy())


def test_the_commands_take_patterns(tmp_path):
    plate(tmp_path / "p")
    for number, channels in enumerate((["--channels", "Mito, DNA"], ["--channels", "Mito", "--channels", "DNA"])):
        path = tmp_path / f"{number}.parquet"
        words = ["--pattern", PATTERN, *channels]
        done = CliRunner().invoke(main, ["convert", str(tmp_path / "p"), str(path), *words])
        assert done.exit_code == 0, done.output
        with open_images(path) as copy:
            assert same(copy.read(3)[0, 0, 0], tifffile.imread(tmp_path / "p" / "B10_s2_Mito.tif"))
            assert same(copy.read(3)[0, 1, 0], tifffile.imread(tmp_path / "p" / "B10_s2_DNA.tif"))
    done = CliRunner().invoke(main, ["info", str(tmp_path / "p"), "--pattern", "{well}_{channel}.tif"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, ["info", str(tmp_path / "p"), "--pattern", "{well}.png"])
    assert done.exit_code == 1
    assert "TIFF files do not match --pattern '{well}.png'" in done.output


# Tables that list files.


def load_data(folder, path, **columns):
    """Return a CellProfiler LoadData table of the plate in ``folder``, with the extra columns of real ones."""
    wells, sites = zip(*product(("B2", "B10"), (1, 2)), strict=True)
    table = {
        **{f"FileName_{c}": [f"{w}_s{s}_{c}.tif" for w, s in zip(wells, sites, strict=True)] for c in ("Mito", "DNA")},
        **{f"PathName_{c}": [str(folder)] * 4 for c in ("Mito", "DNA")},
        "FileName_IllumDNA": ["plate_IllumDNA.npy"] * 4,
        "FileName_CellOutlines": ["outlines.png"] * 4,
        "Metadata_Plate": ["0012"] * 4,
        "Metadata_Well": wells,
        "Metadata_Site": sites,
        **columns,
    }
    pd.DataFrame(table).to_csv(path, index=False)
    return path


def check_listed(source, folder, channels=("Mito", "DNA")):
    for index, row in enumerate(source.columns.to_pylist()):
        files = [[[f"{row['Metadata_Well']}_s{row['Metadata_Site']}_{c}.tif"] for c in channels]]
        expected = np.stack([tifffile.imread(folder / c[0]) for c in files[0]])[None, :, None]
        assert same(source.read(index), expected)
    assert [c["name"] for c in source.metadata(0)["channels"]] == list(channels)


def test_load_data_lists_fields(tmp_path):
    path = load_data(plate(tmp_path / "p"), tmp_path / "load_data.csv")
    with open_images(path) as source:
        assert source.columns.to_pydict() == {
            "Metadata_Plate": ["0012"] * 4,
            "Metadata_Well": ["B2", "B2", "B10", "B10"],
            "Metadata_Site": [1, 2, 1, 2],
            "FileName_IllumDNA": [str(tmp_path / "plate_IllumDNA.npy")] * 4,
        }
        assert source.image_ids == ["0012_B2_1", "0012_B2_2", "0012_B10_1", "0012_B10_2"]
        check_listed(source, tmp_path / "p")
        assert same(pickle.loads(pickle.dumps(source)).read(3), source.read(3))
    with open_images(path, channels=["DNA", "Mito"]) as source:
        check_listed(source, tmp_path / "p", ("DNA", "Mito"))
    with raises(ArgumentError, option="root", mentions=5, remedy=False):
        open_images(path, root=5)
    with raises(ArgumentError, option="channels", path=path, mentions=("'ER'", "'Mito', 'DNA'"), remedy=False):
        open_images(path, channels=["ER"])


@pytest.mark.parametrize("kind", ["gz", "parquet", "relative", "url", "root", "image"])
def test_tables_name_files_in_many_ways(tmp_path, kind):
    folder = plate(tmp_path / "p")
    table = pd.read_csv(load_data(folder, tmp_path / "load_data.csv"), dtype={"Metadata_Plate": str})
    root_option = {}
    for channel in ("Mito", "DNA"):
        if kind == "relative":
            table[f"PathName_{channel}"] = "p"
        elif kind == "url":
            table[f"URL_{channel}"] = [f"file://{folder}/{name}" for name in table.pop(f"FileName_{channel}")]
            del table[f"PathName_{channel}"]
        elif kind == "root":
            table[f"PathName_{channel}"] = "C:\\images\\plate"
            root_option = {"root": folder}
    if kind == "image":
        table = table.add_prefix("Image_").rename(columns={"Image_Metadata_Well": "Image_Metadata_Well_x"})
        table["Image_Metadata_Well_y"] = "Z9"
    path = tmp_path / {"gz": "t.csv.gz", "parquet": "t.parquet", "image": "t.pq"}.get(kind, "t.csv")
    if path.suffix in (".parquet", ".pq"):
        pq.write_table(pa.Table.from_pandas(table), path)
    else:
        table.to_csv(path, index=False)
    with open_images(path, **root_option) as source:
        check_listed(source, folder)


def test_cells_of_one_field_are_one_image(tmp_path):
    folder = plate(tmp_path / "p")
    table = pd.read_csv(load_data(folder, tmp_path / "load_data.csv"), dtype={"Metadata_Plate": str})
    cells = table.loc[np.repeat(np.arange(4), [3, 1, 2, 4])].assign(
        Metadata_ObjectNumber=range(10), ImageNumber=np.repeat([5, 6, 7, 8], [3, 1, 2, 4])
    )
    cells.to_parquet(tmp_path / "cells.parquet")
    with open_images(tmp_path / "cells.parquet") as source:
        assert len(source) == 4
        assert source.rows.tolist() == [0, 3, 4, 6]
        assert source.columns["ImageNumber"].to_pylist() == [5, 6, 7, 8]
        assert "Metadata_ObjectNumber" not in source.columns.column_names
        check_listed(source, folder)


def test_listed_files_that_are_not_there(tmp_path):
    folder = plate(tmp_path / "p")
    path = load_data(folder, tmp_path / "load_data.csv")
    (folder / "B10_s1_DNA.tif").unlink()
    with raises(FormatError, option="root", path=path, mentions=("0012_B10_1", "channel DNA")):
        open_images(path)
    with warns(UserWarning, path=path, mentions="1 of 4"):
        source = open_images(path, incomplete="skip")
    assert source.rows.tolist() == [0, 1, 3]
    check_listed(source, folder)
    with raises(FormatError, option="incomplete", path=path, mentions=(4, "channel Mito")):
        open_images(path, root=tmp_path / "elsewhere", incomplete="skip")
    load_data(folder, path, FileName_DNA=["B2_s1_DNA.tif", None, "B10_s2_DNA.tif", "B2_s2_DNA.tif"])
    with raises(FormatError, option="root", path=path, mentions=("0012_B2_2", "channel DNA", "None")):
        open_images(path)


def test_tables_without_files_say_so(tmp_path):
    pd.DataFrame({"FileName_IllumDNA": ["a.npy"], "FileName_Outlines": [None]}).to_csv(tmp_path / "a.csv", index=False)
    with raises(ColumnError, path=tmp_path / "a.csv", mentions="TIFF", remedy=False):
        open_images(tmp_path / "a.csv")
    pd.DataFrame({"Metadata_Well": ["A1"]}).to_csv(tmp_path / "b.csv", index=False)
    with raises(FormatError, path=tmp_path / "b.csv", mentions="CSV"):
        open_images(tmp_path / "b.csv")
    pd.DataFrame({"URL_DNA": ["ftp://host/a.tif"]}).to_csv(tmp_path / "c.csv", index=False)
    with raises(MissingPathError, path="ftp://host/a.tif"):
        open_images(tmp_path / "c.csv")
    (tmp_path / "d.csv").write_bytes(b"FileName_DNA,Metadata_Well\na.tif\n")
    with raises(FormatError, path=tmp_path / "d.csv", remedy=False):
        open_images(tmp_path / "d.csv")
    pq.write_table(pa.table({"Metadata_Well": ["A1"]}), tmp_path / "e.parquet")
    with raises(ColumnError, path=tmp_path / "e.parquet", mentions="OME-Arrow", remedy=False):
        open_images(tmp_path / "e.parquet")


@pytest.mark.parametrize(
    ("old", "new", "error", "facts"),
    [
        ("FileName_DNA", " FileName_DNA", ColumnError, "' FileName_DNA'"),
        ("FileName_DNA", "FileName_Mito", ColumnError, "'FileName_Mito'"),
        ("Metadata_Well", "Metadata_Site", ColumnError, "'Metadata_Site'"),
        ("B2_s1_DNA.tif", "B2_s1_DNA.png", FormatError, ("'FileName_DNA'", "TIFF", "'B2_s1_DNA.png'")),
        ("0012", "\xb5", FormatError, ("line 2", "UTF-8")),
    ],
)
def test_tables_that_would_lose_a_channel_are_refused(tmp_path, old, new, error, facts):
    path = load_data(plate(tmp_path / "p"), tmp_path / "load_data.csv")
    path.write_text(path.read_text().replace(old, new, 1), encoding="latin-1")
    with raises(error, path=path, mentions=facts, remedy=False):
        open_images(path)


def test_tables_as_other_programs_write_them(tmp_path, monkeypatch):
    folder = plate(tmp_path / "p")
    path = load_data(folder, tmp_path / "load_data.csv")
    pd.read_csv(path, dtype=str).astype("category").to_parquet(tmp_path / "categories.parquet")
    path.write_text("\n\n" + path.read_text().replace("0012", "\xb5"), encoding="utf-8-sig")
    for name in (path, tmp_path / "categories.parquet"):
        with open_images(name) as source:
            check_listed(source, folder)
    monkeypatch.setattr("omearrow_ds.storage.table_files._HEAD_BYTES", path.read_bytes().index(b"\xb5"))
    with open_images(path) as source:
        check_listed(source, folder)


def test_pixels_kept_of_listed_files_are_made_anew_where_one_changes(tmp_path):
    folder = plate(tmp_path / "p")
    path = load_data(folder, tmp_path / "load_data.csv")
    opened = {"cache_dir": tmp_path / "cache", "normalize": False}
    before = OMEArrowDataset(path, **opened)[0].numpy().copy()
    tifffile.imwrite(folder / "B2_s1_DNA.tif", plane("other"), photometric="minisblack")
    after = OMEArrowDataset(path, **opened)[0].numpy()
    assert same(after[0], before[0])
    assert same(after[1], plane("other"))


@needs_nf1
def test_nf1_opens_from_its_folder_and_from_its_table():
    with open_images(NF1, pattern=NF1_PATTERN, columns=NF1 / "profiles.parquet") as source:
        assert source.image_ids == ["B7_3", "D6_2", "D7_1", "F7_2", "H12_1"]
        assert source.shapes.tolist() == [[1, 3, 1, 904, 1224]] * 5
        assert source.columns["Metadata_Plate"].to_pylist() == ["Plate_2"] * 5
        for index, name in enumerate(source.columns["Image_FileName_GFP"].to_pylist()):
            assert same(source.read(index)[0, 1, 0], tifffile.imread(NF1 / name))
        with open_images(NF1 / "profiles.parquet", root=NF1) as listed:
            order = [f"{row['Metadata_Well']}_{row['Metadata_Site']}" for row in listed.columns.to_pylist()]
            for index, image_id in enumerate(order):
                assert same(listed.read(index), source.read(source.image_ids.index(image_id)))
    output = CliRunner().invoke(main, ["info", str(NF1)]).output
    assert "looks like   5 fields x 3 channels, one file per channel; add --pattern cytation" in output


@pytest.mark.parametrize("opened", [OMEArrowDataset, lambda path: convert(path, path.with_suffix(".arrow"))])
def test_folder_without_pattern_is_reported_when_file_names_suggest_channels(tmp_path, opened):
    write(tmp_path / "plate", "B07_01_1_1_DAPI_001.tif", "B07_01_1_1_GFP_001.tif")
    with warns(UserWarning, "pattern", tmp_path / "plate", mentions=("1 field", "2 channels", "'cytation'")):
        opened(tmp_path / "plate")


def test_channels_of_a_converted_file_are_refused_with_select_as_remedy(tmp_path):
    convert(plate(tmp_path / "plate"), tmp_path / "plate.arrow", pattern=PATTERN)
    with raises(ArgumentError, "channels", tmp_path / "plate.arrow", mentions=["select={'C': [0]}"]):
        OMEArrowDataset(tmp_path / "plate.arrow", channels=["ER"])
