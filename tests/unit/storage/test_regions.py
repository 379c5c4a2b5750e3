"""Regions of images, with and without a format's support; the oracle is a slice."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import AxesError, FormatError, MemoryLimitError, open_images, write_images
from omearrow_ds.errors import SelectError
from omearrow_ds.storage.formats._regions import spans_of
from omearrow_ds.testing.conformance import METADATA as NAMED
from tests.support.errors import raises
from tests.support.sources import boxes_of, read_boxes, windows_are_cut
from tests.support.strategies import NAMES, image_of, images_of, same

SHAPE = (2, 3, 2, 21, 34)


def span(size):
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
        lambda drawn: (drawn[0], min(size, drawn[0] + drawn[1]))
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_spans_of_indices_are_their_runs(indices):
    spans = spans_of(indices)
    assert [index for span in spans for index in range(*span)] == indices
    assert all(after[0] != before[1] for before, after in pairwise(spans))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("regions") / "images.arrow"
    channels = [*NAMED["channels"], NAMED["channels"][0] | {"name": "AGP"}]
    write_images([image_of(SHAPE)], path, metadata=[NAMED | {"channels": channels}])
    return open_images(path)


@pytest.mark.parametrize(
    ("asked", "cut"),
    [
        ({"region": (3, 9, 0, 34)}, np.s_[:, :, :, 3:9]),
        ({"region": np.array([20, 21, 33, 34], np.uint8)}, np.s_[..., 20:, 33:]),
        ({"channels": 1}, np.s_[:, 1:2]),
        ({"channels": -1, "t": -1}, np.s_[1:, 2:]),
        ({"channels": "Mito"}, np.s_[:, 1:2]),
        ({"channels": ["AGP", 0, "AGP"]}, np.s_[:, [2, 0, 2]]),
        ({"channels": slice(None, None, 2)}, np.s_[:, ::2]),
        ({"channels": slice(None, None, -1), "z": [1, 0]}, np.s_[:, ::-1, ::-1]),
        ({"z": np.int8(1), "t": range(2), "region": [0, 1, 0, 1]}, np.s_[:, :, 1:, :1, :1]),
    ],
    ids=str,
)
def test_a_part_is_what_a_slice_is(source, asked, cut):
    part = source.read(0, **asked)
    assert same(part, np.ascontiguousarray(image_of(SHAPE)[cut]))
    assert part.flags.writeable
    assert part.flags.c_contiguous
    assert not np.shares_memory(part, source.read(0, **asked))


@pytest.mark.parametrize(
    ("asked", "error", "facts"),
    [
        ({"region": (0, 22, 0, 34)}, AxesError, ("images.arrow", "image 0", "21 x 34", "region=(0, 22, 0, 34)")),
        ({"region": (-1, 3, 0, 34)}, AxesError, "region=(-1, 3, 0, 34)"),
        ({"region": (3, 3, 0, 34)}, AxesError, "region=(3, 3, 0, 34)"),
        ({"region": (3, 2, 0, 34)}, AxesError, "region=(3, 2, 0, 34)"),
        ({"region": (3, 4)}, AxesError, ("region=(3, 4)", "(y0, y1, x0, x1)")),
        ({"region": (0.0, 1.0, 0.0, 1.0)}, AxesError, ("region=(0.0, 1.0, 0.0, 1.0)", "(y0, y1, x0, x1)")),
        ({"region": 5}, AxesError, ("region=5", "(y0, y1, x0, x1)")),
        ({"channels": "ER"}, AxesError, ("'ER'", "'DNA & <ER>', 'Mito', 'AGP'")),
        ({"channels": 3}, SelectError, ("C", "length 3")),
        ({"channels": []}, SelectError, ("[]", "C")),
        ({"channels": True}, SelectError, ("True", "C")),
        ({"channels": 1.0}, AxesError, (1.0, "C")),
        ({"z": "DNA"}, AxesError, ("'DNA'", "Z")),
        ({"z": slice(2, 9)}, SelectError, ("slice(2, 9, None)", "Z")),
        ({"t": slice(0, 1, 0)}, AxesError, ("slice(0, 1, 0)", "T")),
        ({"t": [0, -3]}, SelectError, (-3, "T")),
    ],
    ids=str,
)
def test_a_part_that_is_not_there(source, asked, error, facts):
    with raises(error, mentions=facts, remedy=False):
        source.read(0, **asked)


def test_channels_without_names_are_told_by_index(stored):
    source = open_images(stored("tiff", [image_of(SHAPE)]))
    with raises(AxesError, mentions=("image 0", "'DNA'", "3 channels")):
        source.read(0, channels="DNA")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(3, "name")
def test_windows_of_images_that_are_not_held_at_once(stored, monkeypatch, name):
    monkeypatch.setattr("omearrow_ds.storage.formats._base._REGIONS_BYTES", 1)
    images = images_of([(SHAPE, "uint16"), ((1, 1, 1, 9, 5), "uint8"), (SHAPE, "uint16")])
    path = stored(name, images)
    for verify in (None, True):
        assert windows_are_cut(open_images(path, verify=verify), images)


def test_columns_joined_rows_picked_and_columns_beside(tmp_path):
    images, others = images_of([((1, 2, 1, 9, 8), "uint16")] * 4), images_of([((1, 1, 1, 9, 8), "uint16")] * 4)
    tables = []
    for name, image in (("a", images), ("b", others)):
        write_images(image, tmp_path / f"{name}.parquet")
        tables.append(pq.read_table(tmp_path / f"{name}.parquet")["ome_image"])
    rows = pa.array([0, None, 2, 3])
    columns = [column.combine_chunks().take(rows) for column in tables]
    table = pa.table({"a": columns[0], "b": columns[1]})
    pq.write_table(table, tmp_path / "both.parquet")
    beside = pa.table({"image_id": [f"image-{row:05d}" for row in (0, 2, 3)], "dose": [1, 2, 3]})
    source = open_images(
        tmp_path / "both.parquet", image_column=["a", "b"], nulls="skip", columns=beside, on={"image_id": "image_id"}
    )
    expected = [np.concatenate([images[row], others[row]], axis=1) for row in (0, 2, 3)]
    assert windows_are_cut(source, expected)


def test_fields_of_several_files_read_those_alone_that_a_window_meets(tmp_path):
    fields = image_of((3, 4, 33, 50), "uint16")
    for number, field in enumerate(fields):
        for channel, plane in enumerate(field):
            tifffile.imwrite(tmp_path / f"{number}_{channel}.tif", plane)
    source = open_images(tmp_path, pattern="{well}_{channel}.tif")
    assert windows_are_cut(source, list(fields[:, None, :, None]))
    for channel in (0, 3):
        (tmp_path / f"1_{channel}.tif").unlink()
    assert same(source.read(1, (2, 5, 9, 50), channels=[2, 1]), fields[1, [2, 1], 2:5, 9:][None, :, None].copy())
    with raises(FormatError, path=tmp_path / "1_3.tif", remedy=False):
        source.read(1, (2, 5, 9, 50), channels=3)


TIFFS = st.fixed_dictionaries(
    {"byteorder": st.sampled_from("<>"), "metadata": st.sampled_from([None, {"axes": "CYX"}])},
    optional={
        "compression": st.sampled_from(["zlib", "lzw", "zstd", "lzma"]),
        "predictor": st.booleans(),
        "tile": st.sampled_from([(16, 16), (32, 16), (16, 64)]),
        "bigtiff": st.just(True),
    },
)


@settings(deadline=None, max_examples=50)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from(["uint8", "uint16", "int32", "float32", "float64"]),
    TIFFS,
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_windows_of_every_tiff(tmp_path_factory, shape, dtype, options, rows, drawn):
    folder = tmp_path_factory.mktemp("tiff")
    image, file = image_of(shape, dtype), folder / "image.tif"
    options |= {} if "tile" in options else {"rowsperstrip": rows}
    options |= {"predictor": options.get("predictor", False) and "compression" in options}
    tifffile.imwrite(file, image, photometric="minisblack", **options)
    source = open_images(file)
    (laid_out,) = source.images.read([0])
    expected = [(0, box) for box in boxes_of(laid_out.shape, drawn)]
    oracle = tifffile.imread(file).astype(dtype, copy=False).reshape(laid_out.shape)
    for _ in range(2):  # Without and with cached positions.
        assert all(
            same(results, oracle[box]) for results, (_, box) in zip(read_boxes(source, expected), expected, strict=True)
        )
    shutil.rmtree(folder)


def test_windows_of_wide_planes_are_read_row_by_row(stored, monkeypatch):
    image = image_of((1, 2, 1, 12, 20_000))
    source = open_images(stored("tiff", [image]))
    read = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(preadv(*arguments)) or read[-1])
    assert same(source.read(0, (3, 6, 100, 164)), image[..., 3:6, 100:164].copy())
    assert read == [128] * 6


@pytest.mark.parametrize("options", [{}, {"tile": (16, 16)}, {"compression": "zlib", "rowsperstrip": 8}], ids=str)
def test_a_tiff_that_is_cut_short_or_written_anew(tmp_path, options):
    file = tmp_path / "image.tif"
    image = image_of((40, 48), "uint16")
    tifffile.imwrite(file, image, **options)
    source = open_images(tmp_path)
    region = (30, 40, 3, 40)
    assert same(source.read(0, region)[0, 0, 0], image[30:40, 3:40].copy())
    tifffile.imwrite(file, image + 1, **options)
    os.utime(file, ns=(1, 1))
    if options:  # Uncompressed files were located when they were opened; tifffile reads the others.
        assert same(source.read(0, region)[0, 0, 0], image[30:40, 3:40] + 1)
    data = file.read_bytes()
    for length in (0, 9, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with raises(FormatError, path=file, remedy=False):
            source.read(0, region)


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([{"tile": (16, 32), "compression": "zlib", "predictor": True}, {"tile": (16, 16)}, {}]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_damaged_tiff_is_an_error_or_what_the_whole_image_is(tmp_path_factory, options, changes, opened_before):
    folder = tmp_path_factory.mktemp("damaged")
    file, region = folder / "image.tif", (10, 30, 5, 40)
    tifffile.imwrite(file, image_of((3, 40, 48)), photometric="minisblack", metadata={"axes": "CYX"}, **options)
    source = open_images(folder)
    source.read(0, region)
    data = bytearray(file.read_bytes())
    for offset, value in changes:
        data[offset % len(data)] = value
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    with suppress(FormatError, MemoryLimitError):
        source = source if opened_before else open_images(folder)
        if source.shapes.tolist() == [[1, 3, 1, 40, 48]]:
            part = source.read(0, region, channels=[0, 2])
            assert same(part, source.read(0)[:, [0, 2], :, 10:30, 5:40].copy())
    shutil.rmtree(folder)
