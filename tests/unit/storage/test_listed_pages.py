"""Pages and series of files listed in Frame_ and Series_ columns; the oracle is tifffile."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ColumnError,
    FormatError,
    MetadataError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    Storage,
    convert,
    open_images,
)
from omearrow_ds.cli import main
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.sources import check

PAGES = np.arange(6 * 20 * 24, dtype=np.uint16).reshape(6, 20, 24)
MINISBLACK = {"photometric": "minisblack"}
KINDS = {
    "shaped": MINISBLACK,
    "plain": MINISBLACK | {"metadata": None},
    "OME, along T": MINISBLACK | {"ome": True, "metadata": {"axes": "TYX"}},
    "OME, along C": MINISBLACK | {"ome": True, "metadata": {"axes": "CYX"}},
    "ImageJ": {"imagej": True, "metadata": {"axes": "ZYX"}},
    "big-endian": MINISBLACK | {"byteorder": ">"},
    "BigTIFF": MINISBLACK | {"bigtiff": True},
    "strips": MINISBLACK | {"rowsperstrip": 7, "metadata": None},
    "compressed": MINISBLACK | {"compression": "zlib", "predictor": True},
    "tiles": MINISBLACK | {"compression": "zlib", "tile": (16, 16)},
    "one header": MINISBLACK | {"truncate": True},
    "ImageJ with one header": {"imagej": True, "truncate": True, "metadata": {"axes": "TYX"}},
}


def write_table(path, **columns):
    frame = pd.DataFrame(columns)
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


def write_series(path, *arrays, **options):
    """Write several series to one file."""
    with tifffile.TiffWriter(path, ome=options.pop("ome", False)) as writer:
        for array in arrays:
            writer.write(array, photometric="minisblack", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_page_of_each_channel_is_read_from_files_of_many_kinds(tmp_path, kind):
    tifffile.imwrite(tmp_path / "f.tif", PAGES, **KINDS[kind])
    pages = {"DNA": [0, 2, 5], "ER": [1, 4, 3]}
    columns = {f"FileName_{name}": ["f.tif"] * 3 for name in pages} | {f"Frame_{n}": p for n, p in pages.items()}
    path = write_table(tmp_path / "t.csv", **columns)
    expected = [
        np.stack([tifffile.imread(tmp_path / "f.tif")[number] for number in row])[None, :, None]
        for row in zip(*pages.values(), strict=True)
    ]
    with open_images(path) as source:
        check(source, expected, [2, 0, 1, 1])
        assert [channel["name"] for channel in source.metadata(1)["channels"]] == ["DNA", "ER"]
        np.testing.assert_array_equal(source.read(1, (3, 17, 5, 20), "ER"), expected[1][:, 1:, :, 3:17, 5:20])
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(2), expected[2])


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_page_of_samples_has_them_as_channels(tmp_path, planar):
    shape = (3, 20, 24, 3) if planar == "contig" else (3, 3, 20, 24)
    pixels = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    tifffile.imwrite(tmp_path / "f.tif", pixels, photometric="rgb", planarconfig=planar)
    path = write_table(tmp_path / "t.csv", FileName_RGB=["f.tif", "f.tif"], Frame_RGB=[2, 1])
    with open_images(path) as source:
        for index, page in enumerate((2, 1)):
            expected = tifffile.imread(tmp_path / "f.tif", key=page)
            expected = np.moveaxis(expected, -1, 0) if planar == "contig" else expected
            np.testing.assert_array_equal(source.read(index), expected[None, :, None])
            np.testing.assert_array_equal(source.read(index, (2, 9, 3, 8), 1)[0, 0, 0], expected[1, 2:9, 3:8])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_pages_of_any_series_are_those_of_tifffile(data):
    """The space is series x pages x channels x type of the column x type of the file."""
    lengths = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3), label="pages of each series")
    ome, compressed = data.draw(st.booleans(), label="OME"), data.draw(st.booleans(), label="compressed")
    positions = [(series, page) for series, length in enumerate(lengths) for page in range(length)]
    num_channels = data.draw(st.integers(1, min(3, len(positions))), label="channels")
    chosen = data.draw(st.permutations(positions), label="order")
    rows = [chosen[first : first + num_channels] for first in range(0, len(positions), num_channels)]
    rows = rows[: len(positions) // num_channels]
    write_as = data.draw(st.sampled_from([int, float, str, "{}.0".format]), label="type of numbers")
    suffix = data.draw(st.sampled_from([".csv", ".parquet"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrays = [
            (np.arange(length * 30, dtype=np.uint16) + 1000 * number).reshape(length, 5, 6)
            for number, length in enumerate(lengths)
        ]
        options = {"compression": "zlib"} if compressed else {}
        write_series(folder / "f.tif", *arrays, ome=ome, metadata={"axes": "TYX"}, **options)
        columns = {}
        for channel in range(num_channels):
            columns[f"Image_FileName_{channel}"] = ["f.tif"] * len(rows)
            columns[f"Image_Series_{channel}"] = [write_as(row[channel][0]) for row in rows]
            columns[f"Image_Frame_{channel}"] = [write_as(row[channel][1]) for row in rows]
        expected = [
            np.stack([tifffile.imread(folder / "f.tif", series=series)[page] for series, page in row])[None, :, None]
            for row in rows
        ]
        with open_images(write_table(folder / f"t{suffix}", **columns)) as source:
            np.testing.assert_array_equal(source.take(range(len(rows))), expected)
            region = [0, 0, 0, 1, 2, 1, num_channels, 1, 4, 6]
            crops = source.images.read(list(reversed(range(len(rows)))), [region] * len(rows))
            np.testing.assert_array_equal(crops, [image[..., 1:4, 2:6] for image in reversed(expected)])


@pytest.mark.parametrize("ome", [False, True])
def test_series_without_pages_is_a_whole_stack(tmp_path, ome):
    stacks = [PAGES[:3], PAGES[3:] + 1]
    write_series(tmp_path / "f.tif", *stacks, ome=ome, metadata={"axes": "ZYX"})
    path = write_table(tmp_path / "t.csv", FileName_DNA=["f.tif"] * 2, Series_DNA=[1, 0])
    with open_images(path) as source:
        assert source.image_ids == ["f_1", "f_0"]
        np.testing.assert_array_equal(source.take([0, 1]), [stacks[1][None, None], stacks[0][None, None]])


def test_metadata_is_of_the_series(tmp_path):
    with tifffile.TiffWriter(tmp_path / "f.ome.tif", ome=True) as writer:
        for size in (0.5, 0.25):
            metadata = {"axes": "YX", "PhysicalSizeX": size, "PhysicalSizeXUnit": "µm"}
            writer.write(PAGES[0], photometric="minisblack", metadata=metadata)
    path = write_table(tmp_path / "t.csv", FileName_DNA=["f.ome.tif"] * 2, Series_DNA=[0, 1])
    with open_images(path) as source:
        assert [source.metadata(index)["physical_size_x"] for index in (0, 1)] == [0.5, 0.25]


def movies(folder, lengths=(4, 6)):
    """Write movies of different lengths; return a table with a row per frame, and the expected pixels per row."""
    files, frames = [], []
    for number, length in enumerate(lengths):
        tifffile.imwrite(folder / f"m{number}.tif", PAGES[:length] + 1000 * number, photometric="minisblack")
        files += [f"m{number}.tif"] * length
        frames += range(length)
    columns = {"FileName_DNA": files, "Frame_DNA": frames, "Metadata_Well": files, "Metadata_T": frames}
    return write_table(folder / "t.csv", **columns), [
        tifffile.imread(folder / file)[frame] for file, frame in zip(files, frames, strict=True)
    ]


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.share(2, "preload", "workers")
def test_rows_of_movies_are_samples(tmp_path, preload, workers):
    path, expected = movies(tmp_path)
    dataset = OMEArrowDataset(path, preload=preload, normalize=False, target="Metadata_T")
    batches = list(OMEArrowDataLoader(dataset, batch_size=4, num_workers=workers))
    np.testing.assert_array_equal(np.concatenate([images.numpy()[:, 0] for images, _ in batches]), expected)
    assert [int(time) for _, times in batches for time in times] == [*range(4), *range(6)]


@pytest.mark.parametrize("preload", [True, False])
def test_objects_are_cut_from_their_frame(tmp_path, preload):
    path, expected = movies(tmp_path)
    keys = {"Metadata_Well": ["m1.tif", "m0.tif", "m1.tif"], "Metadata_T": [5, 3, 0]}
    centers = {"Nuclei_Location_Center_X": [10.0, 4.0, 12.0], "Nuclei_Location_Center_Y": [6.0, 9.0, 12.0]}
    dataset = OMEArrowDataset(path, objects=keys | centers, crop_size=(5, 5), normalize=False, preload=preload)
    for index, (frame, y, x) in enumerate(((9, 6, 10), (3, 9, 4), (4, 12, 12))):
        np.testing.assert_array_equal(dataset[index][0], expected[frame][y - 2 : y + 3, x - 2 : x + 3])
    del keys["Metadata_T"]
    with raises(MetadataError, option="objects", mentions="on"):
        OMEArrowDataset(path, objects=keys | centers, crop_size=(5, 5))


def test_movies_are_converted_by_python_and_the_command(tmp_path):
    path, expected = movies(tmp_path)
    convert(path, tmp_path / "a.arrow")
    done = CliRunner().invoke(main, ["convert", str(path), str(tmp_path / "b.parts"), "--format", "parquet"])
    assert done.exit_code == 0, done.output
    for target in ("a.arrow", "b.parts"):
        with open_images(tmp_path / target) as copy:
            np.testing.assert_array_equal([image[0, 0, 0] for image in copy.take(range(10))], expected)


def test_pages_of_a_long_movie_are_found_once(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "m.tif", np.zeros((200, 8, 9), np.uint16), photometric="minisblack", metadata=None)
    path = write_table(tmp_path / "t.csv", FileName_DNA=["m.tif"] * 200, Frame_DNA=range(200))
    opened = []
    wrapped = tifffile.TiffFile

    def counted(*args, **kwargs):
        opened.append(args)
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(tifffile, "TiffFile", counted)
    with open_images(path) as source:
        assert sum(len(images) for _, images in source.images.stream()) == 200
    assert len(opened) <= 3


def test_decoded_pixels_in_a_cache_depend_on_the_pages(tmp_path):
    tifffile.imwrite(tmp_path / "f.tif", PAGES, photometric="minisblack")
    for pages in ([0, 1], [1, 0], [1, 2]):
        path = write_table(tmp_path / "t.csv", FileName_DNA=["f.tif"] * 2, Frame_DNA=pages)
        dataset = OMEArrowDataset(path, normalize=False, cache_dir=tmp_path / "cache")
        for index, page in enumerate(pages):
            np.testing.assert_array_equal(dataset[index][0], tifffile.imread(tmp_path / "f.tif", key=page))


def test_rows_of_equal_pages_are_one_field(tmp_path):
    tifffile.imwrite(tmp_path / "f.tif", PAGES, photometric="minisblack")
    columns = {"FileName_DNA": ["f.tif"] * 4, "Frame_DNA": ["2", "2.0", "1", "2"], "Metadata_ObjectNumber": range(4)}
    with open_images(write_table(tmp_path / "t.csv", **columns)) as source:
        assert source.rows.tolist() == [0, 2]
        np.testing.assert_array_equal(source.read(0)[0, 0, 0], tifffile.imread(tmp_path / "f.tif", key=2))


@pytest.mark.parametrize("empty", [None, ""])
def test_empty_columns_of_pages_are_as_none(tmp_path, empty):
    tifffile.imwrite(tmp_path / "f.tif", PAGES, photometric="minisblack", metadata={"axes": "ZYX"})
    columns = {"FileName_DNA": ["f.tif"], "Frame_DNA": [empty], "Series_DNA": [empty]}
    with open_images(write_table(tmp_path / "t.csv", **columns)) as source:
        np.testing.assert_array_equal(source.read(0), PAGES[None, None])


def test_page_0_of_ordinary_files_is_the_file(tmp_path):
    """CellProfiler's Image tables have Frame and Series 0 for files of one page."""
    for name in ("a", "b"):
        tifffile.imwrite(tmp_path / f"{name}.tif", PAGES[0] + ord(name), photometric="minisblack")
    names = {"Image_FileName_DNA": ["a.tif", "b.tif"]}
    zeros = {"Image_Frame_DNA": [0.0, 0.0], "Image_Series_DNA": [0, 0]}
    with open_images(write_table(tmp_path / "t.parquet", **names, **zeros)) as source:
        assert source.image_ids == ["a", "b"]
        for index, name in enumerate("ab"):
            np.testing.assert_array_equal(source.read(index)[0, 0, 0], tifffile.imread(tmp_path / f"{name}.tif"))


@pytest.mark.parametrize("value", [-1, 1.5, "one", "1e0", "", None, "+1"])
@pytest.mark.parametrize("column", ["Frame_DNA", "Series_DNA"])
def test_pages_that_are_not_whole_numbers_are_refused(tmp_path, value, column):
    tifffile.imwrite(tmp_path / "f.tif", PAGES, photometric="minisblack")
    path = write_table(tmp_path / "t.csv", FileName_DNA=["f.tif"] * 3, **{column: [0, 1, value]})
    with raises(FormatError, path=path, mentions=["row 2", column]):
        open_images(path)


@pytest.mark.parametrize(
    ("kind", "column", "value", "count"),
    [
        *((kind, "Frame_DNA", 6, 6) for kind in KINDS),
        ("plain", "Frame_DNA", 10**12, 6),
        ("shaped", "Series_DNA", 1, 1),
        ("OME, along T", "Series_DNA", 7, 1),
    ],
)
def test_pages_out_of_range_name_row_file_and_count(tmp_path, kind, column, value, count):
    tifffile.imwrite(tmp_path / "f.tif", PAGES, **KINDS[kind])
    tifffile.imwrite(tmp_path / "g.tif", PAGES, **KINDS[kind])
    path = write_table(tmp_path / "t.csv", FileName_DNA=["g.tif", "f.tif"], **{column: [0, value]})
    with open_images(path) as source:
        source.read(0)
        for read in (lambda: source.read(1), lambda: source.read(1, (0, 4, 0, 4)), lambda: source.take([0, 1])):
            with raises(FormatError, path=tmp_path / "f.tif", mentions=[path, "row 1", value, count]):
                read()
    path = write_table(tmp_path / "t.csv", FileName_DNA=["f.tif"], **{column: [value]})
    with raises(FormatError, path=tmp_path / "f.tif", mentions=[path, "row 0", value, count]):
        open_images(path)


def test_file_of_several_series_needs_the_column(tmp_path):
    write_series(tmp_path / "f.tif", PAGES[:2], PAGES[2:5])
    path = write_table(tmp_path / "t.csv", FileName_DNA=["f.tif"], Frame_DNA=[1])
    with raises(FormatError, path=tmp_path / "f.tif", mentions="Series_<channel>"):
        open_images(path)


@pytest.mark.parametrize("column", [" Frame_DNA", "Series_DNA "])
def test_page_columns_with_a_space_are_refused(tmp_path, column):
    tifffile.imwrite(tmp_path / "f.tif", PAGES, photometric="minisblack")
    with pytest.raises(ColumnError, match="has a space"):
        open_images(write_table(tmp_path / "t.csv", **{"FileName_DNA": ["f.tif"], column: [0]}))


def test_masks_by_file_name_are_not_of_a_frame(tmp_path):
    path, _ = movies(tmp_path)
    (tmp_path / "masks").mkdir()
    for name in ("m0", "m1"):
        tifffile.imwrite(tmp_path / "masks" / f"{name}.tif", np.ones((20, 24), np.uint8), photometric="minisblack")
    with raises(MetadataError, remedy=False):
        OMEArrowDataset(path, masks=str(tmp_path / "masks" / "{field}.tif"))
    masks = write_table(
        tmp_path / "masks.csv", FileName_M=["m0.tif"] * 4, Frame_M=range(4), Metadata_T=range(4), Metadata_Well="m0.tif"
    )
    dataset = OMEArrowDataset(path, masks=str(masks), normalize=False, nulls="skip")
    for index in range(4):
        image, mask = dataset[index]
        np.testing.assert_array_equal(image[0], mask)


@pytest.mark.parametrize("table_at_url", [False, True])
def test_pages_at_urls_fetch_no_other_pages(tmp_path, table_at_url):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    pages = np.arange(40 * 200 * 210, dtype=np.uint16).reshape(40, 200, 210)
    (tmp_path / "served" / "lab").mkdir(parents=True)
    with serving(tmp_path / "served") as server:
        folder = server.folder / "lab"
        tifffile.imwrite(folder / "f.tif", pages, photometric="minisblack")
        tifffile.imwrite(folder / "z.tif", pages[:4], photometric="minisblack", compression="zlib", predictor=True)
        rgb = pages[:6, :, :210].reshape(2, 3, 200, 210).transpose(0, 2, 3, 1)
        tifffile.imwrite(folder / "rgb.tif", rgb, photometric="rgb")
        table = pa.table({"URL_DNA": ["s3://lab/f.tif"] * 3, "Frame_DNA": pa.array([7, 0, 39], pa.int32())})
        pq.write_table(table, folder / "t.parquet")
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with open_images("s3://lab/t.parquet" if table_at_url else folder / "t.parquet", storage=storage) as source:
            for index, page in enumerate((7, 0, 39)):
                expected = tifffile.imread(folder / "f.tif", key=page)
                np.testing.assert_array_equal(source.read(index)[0, 0, 0], expected)
                np.testing.assert_array_equal(source.read(index, (9, 30, 8, 50))[0, 0, 0], expected[9:30, 8:50])
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(2)[0, 0, 0], pages[39])
        assert server.sent_bytes["/lab/f.tif"] < pages.nbytes / 3
        dataset = OMEArrowDataset(folder / "t.parquet", storage=storage, preload=True, normalize=False)
        np.testing.assert_array_equal([image[0] for image in dataset], pages[[7, 0, 39]])
        for file, expected in (("z", pages[1:3, None]), ("rgb", rgb.transpose(0, 3, 1, 2))):
            frames = [1, 2] if file == "z" else [0, 1]
            table = pa.table({"URL_DNA": [f"s3://lab/{file}.tif"] * 2, "Frame_DNA": frames})
            pq.write_table(table, folder / "u.parquet")
            with open_images(folder / "u.parquet", storage=storage) as source:
                np.testing.assert_array_equal([image[0, :, 0] for image in source.take([0, 1])], expected)
        pq.write_table(pa.table({"URL_DNA": ["s3://lab/z.tif"] * 2, "Frame_DNA": [0, 4]}), folder / "u.parquet")
        source = open_images(folder / "u.parquet", storage=storage)
        with source, raises(FormatError, path="s3://lab/z.tif", mentions=["row 1", 4]):
            source.read(1)
