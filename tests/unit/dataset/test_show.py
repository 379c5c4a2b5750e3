"""HTML for notebooks and ``show``: pixels compared with loops over blocks, escaped text, and no exceptions."""

from __future__ import annotations

import base64
import io
import json
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pytest
import tifffile
import torch
from click.testing import CliRunner
from PIL import Image

from omearrow_ds import (
    ArgumentError,
    BackendError,
    ColumnError,
    FormatError,
    MissingPathError,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    PathExistsError,
    open_images,
    show,
    write_images,
)
from omearrow_ds.cli import main
from omearrow_ds.dataset.show import SIZE
from omearrow_ds.storage.formats import _pictures
from tests.support.errors import raises, warns
from tests.support.html_page import parse
from tests.support.strategies import NAMES_OR_LONG

RED, GREEN, BLUE, GREY = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def placed(channels=3, height=40, width=60, names=None, dtype=np.uint16):
    """Return an image whose channels are bright side by side in the upper half, from left to right."""
    image = np.zeros((1, channels, 1, height, width), dtype)
    for channel in range(channels):
        start, stop = channel * width // channels, (channel + 1) * width // channels
        image[:, channel, :, : height // 2, start:stop] = 1000 + channel
    return image


def described(*names):
    return {"channels": [{"name": name} for name in names]}


def pictures_in(html):
    """Return the images of valid HTML without external references."""
    page = parse(f"<!doctype html><html>{html}</html>")
    assert not page.all("script", "link", "iframe", "object", "style")
    sources = [element.attributes["src"] for element in page.all("img")]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "url(" not in html
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))) for source in sources]


def grid_of(grid):
    return np.asarray(Image.open(io.BytesIO(grid.png)))


def text_of_html(html):
    return parse(f"<!doctype html><html>{html}</html>").text


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_every_source_shows_channels_in_their_colours_where_they_are(stored, name):
    path = stored(name, [placed()] * 2, axes="TCZYX", metadata=[described("RFP", "DAPI", "GFP")] * 2)
    with open_images(path) as source:
        html = source._repr_html_()
    for picture in pictures_in(html):
        assert picture.shape == (80, 120, 3)  # Images far below thumbnail size are enlarged twice.
        for left, colour in ((0, RED), (40, BLUE), (80, GREEN)):
            assert (picture[:40, left : left + 40] == colour).all()
        assert (picture[40:] == 0).all()
    assert str(path) in text_of_html(html)
    assert "RFP" in text_of_html(html)
    assert "1 x 3 x 1 x 40 x 60" in text_of_html(html)


def test_a_thumbnail_is_the_means_of_blocks_in_the_contrast_that_it_says(tmp_path):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 65535, (1, 1, 1, 300, 517), dtype=np.uint16)
    image += (np.arange(300, dtype=np.uint16)[:, None] + np.arange(517, dtype=np.uint16)) * 3
    write_images([image], tmp_path / "one.arrow", axes="TCZYX")
    (picture,) = pictures_in(open_images(tmp_path / "one.arrow")._repr_html_())
    step = 5  # At most 128 of 517 pixels are shown.
    expected = np.array(
        [
            [image[0, 0, 0, y : y + step, x : x + step].astype(float).mean() for x in range(0, 515, step)]
            for y in range(0, 300, step)
        ]
    )
    low, high = np.percentile(expected, (1, 99.8))
    levels = np.round(np.clip((expected - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    assert (picture == levels[..., None]).all()


@pytest.mark.parametrize(
    "names",
    [
        {("a", "b", "c"): ("ff0000", "00ff00", "0000ff")},  # Unknown names: red, green, blue.
        {("DNA", "ER", "RNA", "AGP", "Mito"): ("0000ff", "00ff00", "ffffff", "00ffff", "ff0000")},
        {("Hoechst 33342", "Alexa 488"): ("0000ff", "00ff00")},
        {("DAPI", "Hoechst"): ("0000ff", "ff0000")},  # Each has its own color.
        {("OrigDNA",): ("ffffff",)},
        {("Other", "Marker"): ("ff0000", "00ff00")},
    ],
)
def test_stains_have_the_colours_that_they_are_known_by(tmp_path, names):
    ((names, expected),) = names.items()
    write_images([placed(len(names))], tmp_path / "x.arrow", axes="TCZYX", metadata=[described(*names)])
    assert [color_text["color"] for color_text in show(tmp_path / "x.arrow").channels] == [
        f"#{color_text}" for color_text in expected
    ]


def test_what_strangers_wrote_stays_text(tmp_path):
    bad = "<script>alert(1)</script>"
    folder = tmp_path / bad.replace("/", "")
    folder.mkdir()
    images = [placed()] * 3
    write_images(
        images,
        folder / "x.parquet",
        axes="TCZYX",
        image_ids=[f"{bad}{number}" for number in range(3)],
        metadata=[described(bad, '"><img src=x onerror=y>', None)] * 3,
        columns={bad: [bad, "<b>", "&amp;"], 'a"b': [1, 2, 3]},
    )
    for collection in (open_images(folder / "x.parquet"), OMEArrowDataset(folder / "x.parquet", target=bad)):
        html = collection._repr_html_()
        assert "<script" not in html
        assert "<b>" not in html
        assert html.count("<img ") == 3
        assert len(pictures_in(html)) == 3
        assert bad in text_of_html(html)
        assert "&amp;" in text_of_html(html)


def test_columns_have_names_types_and_first_rows_and_long_ones_an_end(tmp_path):
    columns = {f"f{number}": [float(number)] * 5 for number in range(300)}
    first = {"text": ["x" * 10_000] * 5, "null": [None, "a", "b", "c", "d"], "list": [list(range(1000))] * 5}
    late = pa.array([2**60] * 5, pa.timestamp("us"))  # Python has no value for this time.
    write_images([placed()] * 5, tmp_path / "x.arrow", columns=pa.table({**first, "late": late, **columns}))
    html = open_images(tmp_path / "x.arrow")._repr_html_()
    assert "timestamp[us]" in html
    assert "291 more columns" not in html
    assert "292 more columns" in html
    assert "f100 (double)" in html
    assert len(html) < 60_000


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (1, 1, 1, 1, 5000), (3, 2, 7, 30, 20), (1, 40, 1, 8, 9), (1, 1, 1, 2500, 4000)]
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.share(2, "shape", "dtype")
def test_any_shape_is_shown_in_little(tmp_path, shape, dtype):
    image = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    if dtype == np.float32:
        image.flat[::3], image.flat[1::7], image.flat[2::9] = np.nan, np.inf, 3e38
    write_images([image] * 2, tmp_path / "x.arrow", axes="TCZYX")
    html = open_images(tmp_path / "x.arrow")._repr_html_()
    assert all(max(picture.shape) <= 128 for picture in pictures_in(html))
    assert len(html) < 2 * 70_000
    assert ("the first of 3 T, the middle one of 7 Z" in html) == (shape[0] == 3)
    assert ("the first 7 of 40 channels" in html) == (shape[1] == 40)
    assert show(tmp_path / "x.arrow").images[1]["problem"] is None


def test_the_first_time_and_the_middle_plane_are_shown(tmp_path):
    image = np.zeros((2, 1, 5, 20, 20), np.uint8)
    image[0, 0, 2, :5] = 9
    image[1, 0, 2, 5:] = image[0, 0, 1, 5:] = 200
    write_images([image], tmp_path / "x.arrow", axes="TCZYX")
    (picture,) = pictures_in(open_images(tmp_path / "x.arrow")._repr_html_())
    assert (picture[:30] == GREY).all()
    assert (picture[30:] == 0).all()


def test_few_images_are_read_and_none_that_is_too_large(tmp_path, monkeypatch):
    write_images([placed()] * 500, tmp_path / "x.parquet", axes="TCZYX")
    source = open_images(tmp_path / "x.parquet")
    read = []
    read_arrays = source.images.read
    monkeypatch.setattr(source.images, "read", lambda rows: read.extend(rows) or read_arrays(rows))
    assert len(pictures_in(source._repr_html_())) == 6
    assert read == [0, 99, 199, 299, 399, 499]
    monkeypatch.setattr(_pictures, "_LARGEST_BYTES", 1000)
    assert "too large for a preview: 14.4 kB" in text_of_html(source._repr_html_())
    assert len(read) == 6


def damaged(folder):
    """Return a folder of four images, one of them truncated."""
    write_images([placed()] * 4, folder, "tiff", axes="TCZYX", columns={"well": ["A", "B", "A", None]})
    broken = sorted(folder.glob("*.tif*"))[2]
    broken.write_bytes(broken.read_bytes()[:-9000])
    return folder


def test_a_damaged_image_is_shown_as_its_error(tmp_path):
    path = damaged(tmp_path / "x.tiffs")
    source = open_images(path)
    html = source._repr_html_()
    assert len(pictures_in(html)) == 3
    with raises(FormatError, path=sorted(path.glob("*.tif"))[2], remedy=False) as error:
        source.read(2)
    assert " ".join(str(error.value).split()) in text_of_html(html)
    assert len(pictures_in(OMEArrowDataset(path, preload=False)._repr_html_())) == 3
    with warns(UserWarning, mentions="image-00002"):
        grid = show(path)
    assert [entry["problem"] is None for entry in grid.images] == [True, True, False, True]


@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
@pytest.mark.parametrize("preload", [True, False])
def test_a_dataset_shows_its_samples_before_they_are_scaled(tmp_path, kind, preload):
    path = tmp_path / "x.parquet"
    wells = {"well": ["A1", "B1"] * 5}
    write_images([placed()] * 10, path, axes="TCZYX", columns=wells, metadata=[described("RFP", "DAPI", "GFP")] * 10)
    options = {"select": {"C": [2, 0]}, "crop_size": (20, 60), "axes": "YXC", "target": "well"}
    dataset = kind(path, preload=preload, **options)
    for samples, number in ((dataset, 6), (dataset.split((0.3, 0.7), seed=1)[0], 3)):
        html = samples._repr_html_()
        pictures = pictures_in(html)
        assert len(pictures) == number
        for picture in pictures:
            assert (picture[:20, 80:] == GREEN).all()
            assert (picture[:20, :40] == RED).all()
            assert (picture[:20, 40:80] == 0).all()
            assert (picture[20:] == 0).all()
        text = text_of_html(html)
        assert f"{type(samples).__name__} of {len(samples)}" in text
        assert ("preloaded" in text) == preload
        assert "YXC 20 x 60 x 2" in text
        assert "['A1', 'B1']" in text
        assert text.index("GFP") < text.index("RFP")
        assert show(samples, sample=3).total == len(samples)


def test_looking_calls_no_transform_and_draws_no_number(tmp_path):
    write_images([placed()] * 3, tmp_path / "x.arrow", axes="TCZYX")
    dataset = OMEArrowDataset(tmp_path / "x.arrow", transform=lambda image: 1 / 0)
    before = torch.get_rng_state(), pickle.dumps(np.random.get_state())
    assert "images are shown without it" in dataset._repr_html_()
    show(dataset)
    assert torch.equal(before[0], torch.get_rng_state())
    assert pickle.loads(before[1])[2] == np.random.get_state()[2]


def test_what_has_gone_is_told_and_preloaded_pixels_are_shown(tmp_path):
    path = tmp_path / "x.parquet"
    write_images([placed()] * 3, path, axes="TCZYX", columns={"a": [1, 2, 3]})
    source, dataset, lazy = open_images(path), OMEArrowDataset(path), OMEArrowDataset(path, preload=False)
    other = pickle.loads(pickle.dumps(dataset))
    source.close()
    lazy.source.close()
    path.unlink()
    assert "was removed" in source._repr_html_()
    assert "was removed" in lazy._repr_html_()
    assert len(pictures_in(dataset._repr_html_())) == len(pictures_in(other._repr_html_())) == 3


def test_an_empty_collection_is_shown_as_one(tmp_path):
    write_images([], tmp_path / "x.parquet", axes="TCZYX")
    assert "0 images" in open_images(tmp_path / "x.parquet")._repr_html_()
    assert "0 images" in OMEArrowDataset(tmp_path / "x.parquet")._repr_html_()
    with raises(ArgumentError, path=tmp_path / "x.parquet", remedy=False):
        show(tmp_path / "x.parquet")


def squares(tmp_path, columns=None):
    """Return the path of 30 tile-sized images, each filled with 10 times its number."""
    path = tmp_path / "squares.arrow"
    images = [np.full((1, 1, 1, SIZE, SIZE), 10 * number, np.uint16) for number in range(30)]
    write_images(images, path, axes="TCZYX", columns=columns)
    return path


def tile_of(picture, rows, columns, row, column):
    """Return a tile of a grid, located from the lower right corner."""
    bottom = picture.shape[0] - (rows - 1 - row) * (SIZE + 26) - 26
    left = picture.shape[1] - (columns - column) * (SIZE + 8)
    return picture[bottom - SIZE : bottom, left : left + SIZE]


def test_images_of_a_grid_are_in_one_contrast(tmp_path):
    grid = show(squares(tmp_path), sample=30)
    picture = grid_of(grid)
    ((channel,), indices) = grid.channels, [tile_entry["index"] for tile_entry in grid.images]
    assert indices == list(range(30))
    assert (channel["low"], channel["high"]) == (0.0, 290.0)
    for tile_entry in grid.images:
        tile = tile_of(picture, 5, 6, tile_entry["row"], tile_entry["column"])
        assert (tile == round(tile_entry["index"] * 10 / 290 * 255)).all()


def test_what_is_drawn_depends_on_the_seed_alone(tmp_path):
    path = squares(tmp_path)
    drawn = [[entry["index"] for entry in show(path, sample=9, seed=seed).images] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(set(drawn[0]))
    assert drawn[0] == np.sort(np.random.RandomState(0).permutation(30)[:9]).tolist()


def test_groups_have_a_row_each_in_natural_order(tmp_path):
    wells = [("B2", "B10", "A1", None)[number % 4] for number in range(30)]
    path = squares(tmp_path, {"well": wells})
    grid = show(path, sample=13, by="well")
    assert [(entry["group"], entry["row"], entry["column"]) for entry in grid.images] == [
        (group, row, column) for row, group in enumerate(("(null)", "A1", "B2", "B10")) for column in range(3)
    ]
    assert all((wells[entry["index"]] or "(null)") == entry["group"] for entry in grid.images)
    assert grid.groups == 4
    few = show(path, sample=3, by="well")
    assert len({entry["group"] for entry in few.images}) == len(few.images) == 3
    assert few.groups == 4


@pytest.mark.parametrize("value", [0.0, -3e38, 3e38, np.nan, np.inf])
def test_pixels_of_one_value_are_black_or_as_bright_as_can_be(tmp_path, value):
    write_images([np.full((1, 1, 1, 20, 20), value, np.float64)] * 2, tmp_path / "x.arrow", axes="TCZYX")
    pictures = pictures_in(open_images(tmp_path / "x.arrow")._repr_html_())
    assert all((picture == (255 if value == np.inf else 0)).all() for picture in pictures)
    json.dumps(show(tmp_path / "x.arrow").as_dict(), allow_nan=False)


def test_channels_are_chosen_by_name_or_number_in_every_format(tmp_path):
    write_images([placed()] * 2, tmp_path / "n.arrow", axes="TCZYX", metadata=[described("RFP", "DAPI", "GFP")] * 2)
    write_images([placed()] * 2, tmp_path / "x.arrow", axes="TCZYX")
    assert [channel["name"] for channel in show(tmp_path / "n.arrow", channels=["GFP", "RFP"]).channels] == [
        "GFP",
        "RFP",
    ]
    assert show(tmp_path / "x.arrow", channels=["2"]).channels[0]["high"] == 1002
    with raises(
        ArgumentError,
        option="channels",
        path=tmp_path / "n.arrow",
        mentions=("['RFP', 'DAPI', 'GFP']", "['Cy5']"),
        remedy=False,
    ):
        show(tmp_path / "n.arrow", channels=["Cy5"])


def test_it_refuses_what_it_cannot_do(tmp_path, monkeypatch):
    path = squares(tmp_path)
    for options, error, facts in (
        ({"sample": 0}, ArgumentError, ("sample=0", 1, "1,024")),
        ({"sample": True}, ArgumentError, ("sample=True", 1, "1,024")),
        ({"seed": -1}, ArgumentError, "seed=-1"),
        ({"by": "plate"}, ColumnError, ("by=", "'plate'")),
        ({"out": tmp_path / "x.jpg"}, ArgumentError, ("out=", ".png")),
        ({"out": tmp_path / "no" / "x.png"}, MissingPathError, str(tmp_path / "no")),
    ):
        with raises(error, mentions=facts, remedy=False):
            show(path, **options)
    (tmp_path / "folder.png").mkdir()
    with raises(PathExistsError, path=tmp_path / "folder.png"):
        show(path, tmp_path / "folder.png", overwrite=True)
    with open_images(path) as source, raises(ArgumentError, option="nulls"):
        show(source, nulls="skip")
    with open_images(path) as source, raises(ArgumentError, option="format", remedy=False):
        show(source, format="arrow")
    with raises(ArgumentError, mentions=3, remedy=False):
        show(3)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(BackendError, mentions="omearrow-ds[show]", remedy=False):
        show(path)


def test_a_file_appears_whole_and_replaces_none_unasked(tmp_path):
    path, out = squares(tmp_path), tmp_path / "grid.png"
    grid = show(path, out)
    assert out.read_bytes() == grid.png == grid._repr_png_()
    with raises(PathExistsError, option="overwrite", path=out):
        show(path, out, seed=1)
    assert out.read_bytes() == grid.png
    again = show(path, out, seed=1, overwrite=True)
    assert out.read_bytes() == again.png != grid.png
    assert sorted(file.name for file in tmp_path.iterdir()) == ["grid.png", "squares.arrow"]


def test_the_command_draws_files_as_fields_and_says_what_is_where(tmp_path):
    plate = tmp_path / "plate"
    plate.mkdir()
    for well in ("A1", "A2"):
        for number, channel in enumerate(("GFP", "DAPI")):
            tifffile.imwrite(plate / f"{well}_{channel}.tif", placed(2)[0, number, 0])
    words = ["show", str(plate), "--pattern", "{well}_{channel}.tif", "--out", str(tmp_path / "x.png")]
    done = CliRunner().invoke(main, [*words, "--by", "Metadata_Well", "--json"])
    description = json.loads(done.stdout)
    assert description["out"] == str(tmp_path / "x.png")
    assert [(entry["image_id"], entry["group"]) for entry in description["images"]] == [("A1", "A1"), ("A2", "A2")]
    assert [(channel["name"], channel["color"]) for channel in description["channels"]] == [
        ("DAPI", "#0000ff"),
        ("GFP", "#00ff00"),
    ]
    picture = np.asarray(Image.open(tmp_path / "x.png"))
    for colour in (BLUE, GREEN):
        assert (picture == colour).all(axis=-1).sum() > 2 * 40 * 60
    green, blue = (np.argwhere((picture == colour).all(axis=-1)).mean(axis=0)[1] for colour in (GREEN, BLUE))
    assert green < blue  # As in the images, where GFP is bright on the left.
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "--overwrite" in done.stderr
    done = CliRunner().invoke(main, [*words, "--overwrite", "--channels", "GFP"])
    assert done.stdout.startswith(f"{tmp_path / 'x.png'}: 2 of 2 images, 1 channel, ")


def test_a_path_is_shown_without_torch(tmp_path):
    path = squares(tmp_path)
    code = f"import sys, omearrow_ds; omearrow_ds.show({str(path)!r}).png; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=120, check=True)


def test_labels_of_any_text_are_drawn(tmp_path):
    ids = ["\n\t\0", "µm 细胞 " * 50, chr(0x202E) + chr(0x200F), " "]
    write_images([placed()] * 4, tmp_path / "x.parquet", axes="TCZYX", image_ids=ids, columns={"by": [*ids[:3], ""]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grid_of(show(tmp_path / "x.parquet", by="by")).shape[1] < 700
