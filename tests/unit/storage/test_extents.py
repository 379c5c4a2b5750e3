"""Chunks of images: the windows that regions meet, and reading of local files."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds.storage.byte_source import LocalFile
from omearrow_ds.storage.extents import ChunkLayout, ExtentReader, ImageChunks, chunk_windows

SHAPE = (2, 1, 3, 7, 30)


@st.composite
def regions(draw, shape=SHAPE):
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return [*starts, *(draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True))]


def crop(image, region):
    return image[tuple(map(slice, region[:5], region[5:]))]


@settings(deadline=None, max_examples=60)
@given(regions(), st.tuples(*(st.integers(1, size + 2) for size in SHAPE)))
def test_chunk_windows_cover_each_pixel_of_a_region_once(region, chunk_shape):
    image = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    expected = crop(image, region)
    array = np.full(expected.shape, -1)
    for chunk, inner, outer in chunk_windows(region, chunk_shape):
        starts = [number * length for number, length in zip(chunk, chunk_shape, strict=True)]
        pixels = crop(image, [*starts, *(start + length for start, length in zip(starts, chunk_shape, strict=True))])
        assert (array[outer] == -1).all()
        array[outer] = pixels[inner]
    np.testing.assert_array_equal(array, expected)


def planes_in(path, num_columns=30):
    """Write an image whose pixels encode their position; return a function that locates it, and the image."""
    shape = (*SHAPE[:4], num_columns)
    image = np.arange(np.prod(shape), dtype=">u4").reshape(shape)
    path.write_bytes(b"head" + image.tobytes())
    layout = ChunkLayout((1, 1, 1, *shape[3:]), 1, image.dtype, np.dtype(np.uint32))
    offsets = 4 + 4 * shape[3] * num_columns * np.arange(6).reshape(*shape[:3], 1)
    return lambda _: ImageChunks(layout, LocalFile.as_it_is(path), offsets), image


@settings(deadline=None, max_examples=60)
@given(st.lists(regions(), min_size=1, max_size=5), st.sampled_from([30, 5000]))
def test_reader_returns_regions_of_planes_for_any_width(tmp_path_factory, boxes, num_columns):
    locate, image = planes_in(tmp_path_factory.mktemp("planes") / "a.raw", num_columns)
    for region, array in zip(boxes, ExtentReader().read(locate, [0] * len(boxes), boxes), strict=True):
        np.testing.assert_array_equal(array, crop(image, region))
        assert array.dtype == np.uint32


def test_reader_opens_a_file_once_per_call(tmp_path, monkeypatch):
    locate, image = planes_in(tmp_path / "a.raw")
    reader = ExtentReader()
    reader.cached(0, lambda: locate(0))
    opened, open_file = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args, **kwargs: opened.append(path) or open_file(path, *args, **kwargs)
    )
    whole = [0, 0, 0, 0, 0, *SHAPE]
    arrays = reader.read(locate, [0, 0], [whole, whole])
    np.testing.assert_array_equal(arrays, [image, image])
    assert opened == [str(tmp_path / "a.raw")]


@pytest.mark.parametrize("is_cached", [False, True])
def test_reader_locates_a_replaced_file_once_more_when_its_chunks_are_cached(tmp_path, is_cached):
    locate, image = planes_in(tmp_path / "a.raw")
    located, reader = locate(0), ExtentReader()
    whole = [0, 0, 0, 0, 0, *SHAPE]
    if is_cached:
        reader.cached(0, lambda: located)
    (tmp_path / "b.raw").write_bytes(b"tail" + (image + 1).astype(image.dtype).tobytes())
    (tmp_path / "b.raw").rename(tmp_path / "a.raw")
    (array,) = reader.read(locate if is_cached else lambda _: located, [0], [whole])
    if is_cached:
        np.testing.assert_array_equal(array, image + 1)
    else:
        assert array is None


def test_reader_returns_none_when_a_file_is_too_short(tmp_path):
    locate, _ = planes_in(tmp_path / "a.raw")
    with (tmp_path / "a.raw").open("r+b") as file:
        file.truncate(130)  # The first row has 120 bytes after four others.
    first, last = [0, 0, 0, 0, 0, 1, 1, 1, 1, 5], [1, 0, 0, 0, 0, 2, 1, 1, 1, 5]
    assert ExtentReader().read(locate, [0], [last]) == [None]
    assert ExtentReader().read(locate, [0], [first])[0].ravel().tolist() == [0, 1, 2, 3, 4]
