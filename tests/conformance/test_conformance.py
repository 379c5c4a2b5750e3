"""One suite that every format must pass, in every encoding."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import ome_arrow
import pyarrow as pa
import pytest
import tifffile

from omearrow_ds import (
    ImageError,
    ImageSource,
    MetadataError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.codec.schema import CHECKSUM_COLUMN, normalize_metadata
from omearrow_ds.testing.conformance import FormatConformance, table_columns
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.raw_tables import raw_table, store_table, struct_of
from tests.support.strategies import (
    DTYPES,
    ENCODED,
    ENCODED_OR_LONG,
    METADATA,
    NAMES,
    RAGGED,
    SUFFIX,
    TABLES,
    all_same,
    image_of,
    images_of,
    same,
)

formats = pytest.mark.parametrize("name", NAMES)
encoded = pytest.mark.parametrize(("name", "encoding"), ENCODED)
PAIRS = [
    pytest.param(parameters.values, id="-".join(parameters.values), marks=parameters.marks)
    for parameters in ENCODED_OR_LONG
]
# Each format is read and written twice, because all pairs would repeat the same readers and writers.
CONVERSIONS = [
    pytest.param(src, dst, marks=() if (NAMES.index(dst) - NAMES.index(src)) % len(NAMES) < 2 else pytest.mark.slow)
    for src, dst in product(NAMES, NAMES)
]


def test_a_source_promises_what_users_need_and_no_more():
    promised = {name for name in vars(ImageSource) if not name.startswith("_")} | set(ImageSource.__annotations__)
    described = {"format", "path", "image_ids", "shapes", "dtypes", "columns", "rows"}
    by_name = {"column_names", "column", "column_table"}
    assert promised == described | by_name | {"metadata", "read", "take", "close"}


class TestEveryFormat(FormatConformance):
    """Suite for all formats, including those of other packages."""

    @pytest.fixture(params=PAIRS)
    def storage_info(self, request):
        needs(request.param[0])
        return request.param


READING = """
import pathlib, pickle, sys

pickled, found = map(pathlib.Path, sys.argv[1:])
images = []
for each in pickle.loads(pickled.read_bytes()):
    with pickle.loads(each) as source:
        images.append(source.take([2, 0]))
found.write_bytes(pickle.dumps(images))
"""


def _of_columns(name, path, images):
    """Return an open source that joins two columns, one of them with a null, and its images."""
    below = [image + image.dtype.type(1) for image in images]
    first = struct_of([[images[0]], [images[1]], [images[1]], [images[2]]])
    second = struct_of([[below[0]], None, [below[1]], [below[2]]])
    store_table(name, pa.table({"first": first, "second": second}), path)
    source = open_images(path, image_column=["second", "first"], nulls="skip")
    return source, [np.concatenate(pair, axis=1) for pair in zip(below, images, strict=True)]


def test_pickles_open_in_another_process(programs, tmp_path):
    images = images_of([((1, 1, 1, 3, 4), "uint16")] * 3)
    pickled, expected = [], []
    for name in NAMES:
        path = tmp_path / f"images{SUFFIX[name]}"
        try:
            needs(name)
        except pytest.skip.Exception:
            continue
        write_images(images, path, name)
        source = open_images(path)
        source.read(0)
        opened = [(source, images)]
        if name in TABLES:
            opened.append(_of_columns(name, tmp_path / f"columns{SUFFIX[name]}", images))
        pickled += [pickle.dumps(pickled_source) for pickled_source, _ in opened]
        expected += [joined for _, joined in opened]
    pickle_file, results_file = tmp_path / "pickled", tmp_path / "found"
    pickle_file.write_bytes(pickle.dumps(pickled))
    done = programs.run(READING, pickle_file, results_file)
    assert done.returncode == 0, done.stderr
    for results, images in zip(pickle.loads(results_file.read_bytes()), expected, strict=True):
        assert all_same(results, [images[2], images[0]])


def misaligned(array):
    """Return an array of equal values whose buffers are at odd addresses, as is possible in a mapped file."""
    buffers = [None if buffer is None else pa.py_buffer(b"?" + buffer.to_pybytes())[1:] for buffer in array.buffers()]
    assert any(buffer.address % 2 for buffer in buffers if buffer is not None)
    return pa.Array.from_buffers(array.type, len(array), buffers)


@pytest.mark.parametrize("count", [1, 3])
@encoded
@pytest.mark.share(2, "name", "count")
def test_what_lies_at_odd_addresses(stored, name, encoding, count):
    """Lance panics on such data. Parquet returns a single image as a view of the mapped file."""
    pixels = np.frombuffer(b"?" + np.arange(60, dtype=np.uint16).tobytes(), np.uint8)[1:].view(np.uint16)
    images = [pixels.reshape(1, 1, 1, 6, 10)] * count
    assert not images[0].flags.aligned
    arrays = [pa.array(range(count), pa.int64()), pa.array([0.5] * count), pa.array(["A1", "B2", "C3"][:count])]
    columns = pa.table(dict(zip(("count", "area", "well"), map(misaligned, arrays), strict=True)))
    with open_images(stored(name, images, encoding=encoding, columns=columns), name) as source:
        assert all_same([source.read(index) for index in range(count)], images)
        assert source.columns.equals(columns)


TEXTS = ["", " padded ", "line\nbreak\ttab\r", "a\x07bell", "\x00", "]]>", "&amp;", "\ufffe", "\x85\u2028"]


@formats
def test_no_text_is_lost_or_changed(stored, name):
    described = [
        {"name": text, "image_type": text, "physical_size_x_unit": text}
        | {"channels": [{"name": text, "illumination": text, "id": text}]}
        for text in TEXTS
    ]
    columns = {"text": TEXTS}
    source = open_images(stored(name, [image_of((2, 3))] * len(TEXTS), metadata=described, columns=columns))
    for index, metadata in enumerate(described):
        stored_metadata = source.metadata(index)
        (channel,) = stored_metadata["channels"]
        channel_fields = {key: channel[key] for key in metadata["channels"][0]}
        assert {key: stored_metadata[key] for key in metadata} | {"channels": [channel_fields]} == metadata
    assert source.columns.to_pydict() == columns


ODD_METADATA = [
    {"physical_size_x": 0.0, "physical_size_x_unit": "µm"},
    {"physical_size_x": 0.1},
    {"physical_size_x": 0.1, "physical_size_x_unit": "pixel"},
    {"physical_size_z": 3.0, "physical_size_z_unit": "nm"},
    {"physical_size_y_unit": "mm"},
    {"physical_size_y": 1e-20, "physical_size_y_unit": "m"},
    {"channels": [{}]},
    {"channels": [{"color_rgba": 0}]},
    {"channels": [{"emission_um": 0.0, "excitation_um": 0.561, "illumination": "Unknown", "color_rgba": 2**32 - 1}]},
    {"acquisition_datetime": datetime(1, 1, 1)},  # noqa: DTZ001
    {"acquisition_datetime": datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=UTC)},
]


@formats
def test_every_format_keeps_metadata_as_ome_arrow_stores_it(stored, name):
    source = open_images(stored(name, [image_of((2, 3))] * len(ODD_METADATA), metadata=ODD_METADATA))
    stored_metadata = [source.metadata(index) for index in range(len(source))]
    assert stored_metadata == [normalize_metadata(metadata, 1, "") for metadata in ODD_METADATA]


@pytest.mark.parametrize(("src", "dst"), CONVERSIONS)
@pytest.mark.share(2, "src")
def test_convert_keeps_everything(stored, tmp_path, src, dst):
    needs(dst)
    images = images_of([((1, 2, 1, 3, 4), "uint16"), ((2, 2, 3, 2, 2), "float32")])
    columns = table_columns().slice(0, 2)
    path = stored(src, images, columns=columns, metadata=[METADATA, None], image_ids=["b", "a"])
    target = tmp_path / f"converted{SUFFIX[dst]}"
    convert(path, target, dst)
    before, after = open_images(path), open_images(target)
    assert after.format.name == dst
    assert all_same(after.take([0, 1]), images)
    assert list(after.image_ids) == ["b", "a"]
    assert after.columns.equals(before.columns)
    assert after.columns.to_pydict() == columns.to_pydict()
    assert [after.metadata(index) for index in (0, 1)] == [before.metadata(index) for index in (0, 1)]


@formats
def test_convert_to_lists_refuses_floats_and_leaves_nothing(stored, tmp_path, name):
    path = stored(name, images_of([((1, 1, 1, 2, 2), "float32")]))
    with raises(ImageError, option="encoding", path=tmp_path / "lists.parquet", mentions="float32"):
        convert(path, tmp_path / "lists.parquet", encoding="list")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
@encoded
def test_an_image_of_ten_megapixels(stored, name, encoding):
    image = image_of((1, 1, 1, 3000, 3400))
    assert same(open_images(stored(name, [image], encoding=encoding)).read(0), image)


ODD_COLUMNS = [
    *("a.b", "Area", "area", "rowid", "file_row_number", "incoming", "omearrow_ds_row", "pixels", "OME_IMAGE"),
    *("ome_image.id", "with space; \"'", "a`b", "`a`", "a", "id", "planes", "chunks", "_rowid", "filename"),
    *("file", "shape", "dtype", "images", "select"),
]
REFUSED_COLUMNS = {
    "parquet_duck": ["area", "file_row_number", "OME_IMAGE"],
    "lance": ["a.b", "ome_image.id", "a`b", "`a`", "_rowid"],
    "duckdb": ["area", "rowid", "omearrow_ds_row", "OME_IMAGE"],
}


@formats
def test_no_column_name_gets_in_the_way(stored, name):
    """One table has all columns. A format must reject unsupported names with an error."""
    images = images_of([((1, 1, 1, 2, 3), "uint16")] * 3)
    columns = {column_name: [f"{column_name} {row}" for row in range(3)] for column_name in ODD_COLUMNS}
    refused, path = [], None
    while path is None:
        try:
            path = stored(name, images, columns=columns)
        except MetadataError as error:
            refused.append(next(column_name for column_name in columns if repr(column_name) in str(error)))
            del columns[refused[-1]]
    source = open_images(path)
    assert source.columns.to_pydict() == columns
    assert all_same(source.take([2, 0, 1]), [images[2], images[0], images[1]])
    assert refused == REFUSED_COLUMNS.get(name, [])


@pytest.mark.parametrize(("name", "encoding"), [pair for pair in ENCODED if pair[0] in TABLES])
def test_ome_arrow_reads_what_is_written(stored, name, encoding):
    images = images_of(RAGGED)
    columns = {"well": ["A", "B", "C", "D", "E"]}
    raw = raw_table(name, stored(name, images, encoding=encoding, columns=columns))
    assert raw.column_names == ["ome_image", "well", CHECKSUM_COLUMN]
    assert raw["well"].to_pylist() == columns["well"]
    for row, image in zip(raw["ome_image"], images, strict=True):
        record = row.as_py()
        dtype = np.dtype(record["pixels_meta"]["type"])
        assert same(ome_arrow.to_numpy(record, dtype=dtype), image)


def test_tifffile_reads_what_is_written(stored):
    images = images_of([((2, 3, 4, 5, 6), dtype) for dtype in DTYPES])
    path = stored("tiff", images, metadata=[{"name": "µ"}] * len(images))
    files = sorted(path.glob("*.tif"))
    for file, image in zip(files, images, strict=True):
        with tifffile.TiffFile(file) as tif:
            assert tif.is_ome
            assert tif.series[0].axes == "TCZYX"
        assert same(tifffile.imread(file), image)


def test_ome_xml_is_valid(stored):
    package = find_spec("ome_types")
    if package is None:
        pytest.skip("the OME-XML schema comes with the package ome-types")
    schema = (Path(package.origin).parent / "ome-2016-06.xsd").read_bytes()
    two, one = image_of((1, 2, 1, 3, 4)), image_of((1, 1, 1, 3, 4), "float64")
    path = stored("tiff", [two, one, one], metadata=[METADATA, None, {"channels": [{"name": "DNA"}]}])
    for file in path.glob("*.tif"):
        with tifffile.TiffFile(file) as tif:
            if tifffile.OmeXml.validate(tif.ome_metadata, schema) is None:
                pytest.skip("the OME-XML schema cannot be loaded offline")


def test_zarr_reads_valid_ngff(stored):
    needs("ome_zarr")
    import zarr

    images = images_of([((2, 2, 4, 5, 6), dtype) for dtype in DTYPES])
    path = stored("ome_zarr", images, metadata=[METADATA] * len(images))
    groups = sorted(group_path for group_path in path.iterdir() if group_path.is_dir())
    for folder, image in zip(groups, images, strict=True):
        group = zarr.open_group(folder, mode="r")
        assert group.metadata.zarr_format == 3
        ome = json.loads((folder / "zarr.json").read_text())["attributes"]["ome"]
        assert ome["version"] == "0.5"
        (multiscale,) = ome["multiscales"]
        assert [(axis["name"], axis["type"]) for axis in multiscale["axes"]] == [
            ("t", "time"),
            ("c", "channel"),
            ("z", "space"),
            ("y", "space"),
            ("x", "space"),
        ]
        assert {axis.get("unit") for axis in multiscale["axes"][2:]} <= {"micrometer", "nanometer"}
        (dataset,) = multiscale["datasets"]
        (transform,) = dataset["coordinateTransformations"]
        assert transform == {"type": "scale", "scale": [1, 1, 1.5, 0.25, 0.5]}
        assert len(ome["omero"]["channels"]) == 2
        array = group[dataset["path"]]
        assert array.metadata.dimension_names == tuple("tczyx")
        assert same(array[...], image)
