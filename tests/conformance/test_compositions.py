"""The law of compositions: reading through one equals composing reads of the images below it, in every format."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import convert, open_images, write_images
from tests.conftest import needs
from tests.support.raw_tables import store_table, struct_of
from tests.support.strategies import NAMES, SUFFIX, TABLES, image_of, same

COUNT = 9
SHAPE = (2, 3, 2, 11, 14)
IMAGES = [image_of(SHAPE, "uint16", number) for number in range(COUNT)]


def write(name, path):
    """Write the images with a column of their numbers."""
    columns = {"number": list(range(COUNT))}
    write_images(IMAGES, path, name, axes="TCZYX", columns=columns, image_ids=[f"i{n}" for n in range(COUNT)])
    return path


def selected_rows(name, folder):
    path = write(name, folder / f"images{SUFFIX[name]}")
    rows = [1, 2, 5, 6, 8]
    return open_images(path, name, filter="number in (1, 2, 5, 6, 8)"), lambda row: [
        (open_images(path, name), rows[row])
    ]


def joined_columns(name, folder):
    path = write(name, folder / f"images{SUFFIX[name]}")
    doses = pa.table({"image_id": [f"i{n}" for n in range(COUNT)], "dose": list(range(COUNT))})
    return open_images(path, name, columns=doses), lambda row: [(open_images(path, name), row)]


def verified(name, folder):
    path = write(name, folder / f"images{SUFFIX[name]}")
    return open_images(path, name, verify=True), lambda row: [(open_images(path, name), row)]


def several_files(name, folder):
    paths = [write(name, folder / f"{number}{SUFFIX[name]}") for number in range(2)]
    return open_images(paths, name), lambda row: [(open_images(paths[row // COUNT], name), row % COUNT)]


def parts(name, folder):
    path = write(name, folder / f"images{SUFFIX[name]}")
    convert(path, folder / "images.parts", name, part_bytes=4 * IMAGES[0].nbytes)
    return open_images(folder / "images.parts"), lambda row: [(open_images(path, name), row)]


def image_columns(name, folder):
    path = folder / f"images{SUFFIX[name]}"
    structs = {"a": struct_of([[image] for image in IMAGES], "bytes"), "b": struct_of([[IMAGES[0]]] * COUNT, "bytes")}
    store_table(name, pa.table(structs), path)
    below = [open_images(path, name, image_column=column) for column in ("b", "a")]
    return open_images(path, name, image_column=["b", "a"]), lambda row: [(source, row) for source in below]


def fields_of_files(name, folder):
    """Return fields of three channels, each in a file of its own along C."""
    del name
    for number, image in enumerate(IMAGES):
        for channel in range(3):
            pixels = image[:, channel : channel + 1]
            tifffile.imwrite(folder / f"{number}_{channel}.tif", pixels, metadata={"axes": "TCZYX"}, ome=True)
    files = open_images(folder, "tiff")
    return open_images(folder, pattern="{field}_{channel}.tif"), lambda row: [(files, 3 * row + n) for n in range(3)]


COMPOSITIONS = [
    *((compose, name) for compose in (selected_rows, joined_columns, verified, parts) for name in NAMES),
    *((compose, name) for compose in (several_files, image_columns) for name in TABLES),
    (fields_of_files, "tiff"),
]


@pytest.fixture(scope="module", params=COMPOSITIONS, ids=lambda pair: f"{pair[0].__name__}-{pair[1]}")
def composition(request, tmp_path_factory):
    """Return the images of a composition, and a function from a row to the sources and rows below it, along C."""
    compose, name = request.param
    needs(name)
    source, below = compose(name, tmp_path_factory.mktemp("composed"))
    opened = {}  # Sources below, by path and row, are opened once.

    def images_below(row):
        if row not in opened:
            opened[row] = [other.read(position) for other, position in below(row)]
        return opened[row]

    yield source.images, images_below
    source.close()


def regions_within(shape):
    """Return a strategy of regions: starts of T, C, Z, Y, X, then stops."""
    edges = [
        st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(lambda pair: pair[0] < pair[1])
        for size in shape
    ]
    return st.tuples(*edges).map(lambda pairs: [*(start for start, _ in pairs), *(stop for _, stop in pairs)])


@settings(deadline=None, max_examples=8)
@given(data=st.data())
@pytest.mark.share(6, "composition")
def test_a_read_through_a_composition_is_a_composition_of_reads(composition, data):
    images, images_below = composition
    rows = data.draw(st.lists(st.integers(0, len(images) - 1), min_size=1, max_size=6))
    expected = [np.concatenate(images_below(row), axis=1) for row in rows]
    arrays = images.read(rows)
    assert all(map(same, arrays, expected))
    out = [np.zeros(image.shape, image.dtype) for image in expected]
    filled = images.read(rows, out=out)
    assert all(map(same, filled, expected))
    assert not images.details.fills_out() or all(map(same, out, expected))
    regions = [data.draw(regions_within(image.shape)) for image in expected]
    crops = images.read(rows, regions)
    boxes = [tuple(map(slice, region[:5], region[5:])) for region in regions]
    assert all(same(np.array(crop), image[box].copy()) for crop, image, box in zip(crops, expected, boxes, strict=True))


@pytest.mark.share(6, "composition")
def test_a_stream_of_a_composition_has_every_image_once_in_order(composition):
    images, images_below = composition
    streamed = [np.array(image) for _, block in images.stream() for image in block]
    assert len(streamed) == len(images)
    for row, image in enumerate(streamed):
        assert same(image, np.concatenate(images_below(row), axis=1))
