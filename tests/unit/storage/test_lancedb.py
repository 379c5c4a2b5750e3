"""Tables written by LanceDB; the oracle is LanceDB."""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import numpy as np
import ome_arrow
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ome_arrow.ingest import from_numpy

from omearrow_ds import (
    ArgumentError,
    FormatError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    convert,
    open_images,
)
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import image_of, same

SHAPE = (1, 2, 1, 48, 64)  # Each channel is too large for LanceDB to pack with others.
ENCODINGS = ["list", "bytes"]
NUM_IMAGES = 6
pytestmark = pytest.mark.filterwarnings("ignore:optimize.cleanup_older_than=0. removes:UserWarning")


@pytest.fixture(scope="module")
def lancedb():
    needs("lance")
    return pytest.importorskip("lancedb", reason="LanceDB is not installed: pip install lancedb")


@cache
def records(encoding, first):
    """Return the type and the records of images whose pixels encode image number and position."""
    build = {"clamp_to_uint16": False, "chunk_encoding": encoding, "chunk_shape": (1, *SHAPE[3:])}
    scalars = [
        from_numpy(image_of(SHAPE, "uint16", number), image_id=f"image-{number}", **build)
        for number in range(first, first + NUM_IMAGES)
    ]
    return scalars[0].type, [scalar.as_py() for scalar in scalars]


def arrow_table(encoding, first=0, number=None):
    """Return a table of images with numbers from ``first`` or from ``number``."""
    kind, images = records(encoding, first)
    numbers = range(first, first + NUM_IMAGES) if number is None else number
    return pa.table({"number": pa.array(numbers, pa.int64()), "ome_image": pa.array(images, kind)})


def image_from(scalar):
    return ome_arrow.to_numpy(scalar, dtype=np.dtype(scalar.as_py()["pixels_meta"]["type"]))


def check(source, expected):
    """Compare a source with a LanceDB table: numbers, ids, single images and regions."""
    images = list(map(image_from, expected["ome_image"]))
    assert len(source) == len(images)
    for name in set(expected.column_names) - {"ome_image"}:
        assert source.columns[name].to_pylist() == expected[name].to_pylist()
    assert list(source.image_ids) == [scalar["id"].as_py() for scalar in expected["ome_image"]]
    for index in reversed(range(len(images))):
        assert same(source.read(index), images[index])
        assert same(source.read(index, region=(5, 21, 11, 64)), images[index][..., 5:21, 11:64])
    assert all(map(same, source.take(range(len(images))), images))


def added(table, encoding):
    table.add(arrow_table(encoding, first=10))


def replaced(table, encoding):
    """Replace the images of three rows, and insert three rows."""
    rows = arrow_table(encoding, first=20, number=[1, 3, 5, 30, 31, 32])
    table.merge_insert("number").when_matched_update_all().when_not_matched_insert_all().execute(rows)


def indexed(table, encoding):
    from lancedb.index import BTree

    table.create_index("number", config=BTree())


CHANGES = {
    "none": lambda table, encoding: None,
    "add": added,
    "delete": lambda table, encoding: table.delete("number in (0, 2, 11)"),
    "update": lambda table, encoding: table.update(where="number in (1, 4, 12)", values={"number": 99}),
    "merge_insert": replaced,
    "optimize": lambda table, encoding: table.optimize(),
    "clean up": lambda table, encoding: table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True),
    "index": indexed,
    "restore the first version": lambda table, encoding: table.restore(table.list_versions()[0]["version"]),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.share(2, "encoding", "change")
def test_table_is_read_as_lancedb_returns_it_when_changed(tmp_path, lancedb, encoding, change):
    table = lancedb.connect(tmp_path / "db").create_table("plate", arrow_table(encoding))
    CHANGES[change](table, encoding)
    check(open_images(tmp_path / "db", table="plate"), table.to_arrow())
    check(open_images(tmp_path / "db" / "plate.lance"), table.to_arrow())


@given(st.sampled_from(ENCODINGS), st.lists(st.sampled_from(list(CHANGES)), min_size=2, max_size=6))
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_table_is_read_as_lancedb_returns_it_after_any_changes(tmp_path_factory, lancedb, encoding, changes):
    folder = tmp_path_factory.mktemp("db")
    table = lancedb.connect(folder).create_table("plate", arrow_table(encoding))
    for change in changes:
        CHANGES[change](table, encoding)
    check(open_images(folder), table.to_arrow())


@pytest.mark.parametrize("engine", ["pages", "lance"])
def test_engines_agree_with_lancedb_when_rows_were_added(tmp_path, lancedb, engine):
    table = lancedb.connect(tmp_path).create_table("plate", arrow_table("bytes"))
    added(table, "bytes")
    source = open_images(tmp_path, engine=engine)
    assert source.images.table.engine == engine
    check(source, table.to_arrow())


def test_columns_that_lancedb_adds_renames_and_drops_are_read(tmp_path, lancedb):
    table = lancedb.connect(tmp_path).create_table("plate", arrow_table("bytes"))
    table.add_columns({"twice": "number * 2"})
    check(open_images(tmp_path), table.to_arrow())
    table.alter_columns({"path": "twice", "rename": "double"})
    table.drop_columns(["number"])
    source = open_images(tmp_path)
    assert source.columns.column_names == ["double"]
    check(source, table.to_arrow())


class TestVersions:
    @pytest.fixture
    def table(self, tmp_path, lancedb):
        """Return a table with four versions."""
        table = lancedb.connect(tmp_path).create_table("plate", arrow_table("bytes"))
        for change in ("add", "update", "delete"):
            CHANGES[change](table, "bytes")
        return table

    def test_path_opens_the_newest_version_when_another_is_checked_out(self, tmp_path, lancedb, table):
        newest = table.to_arrow()
        older = lancedb.connect(tmp_path).open_table("plate")
        older.checkout(1)
        assert older.to_arrow()["number"].to_pylist() == list(range(NUM_IMAGES))
        check(open_images(tmp_path), newest)

    @pytest.mark.parametrize("index", range(4))
    def test_restored_version_is_read(self, tmp_path, lancedb, table, index):
        older = lancedb.connect(tmp_path).open_table("plate")
        older.checkout(table.list_versions()[index]["version"])
        expected = older.to_arrow()
        older.restore()
        check(open_images(tmp_path), expected)

    def test_copy_of_an_older_version_is_read(self, tmp_path, lancedb, table):
        older = lancedb.connect(tmp_path).open_table("plate")
        older.checkout(1)
        copy = lancedb.connect(tmp_path / "copy").create_table("plate", older.to_arrow())
        check(open_images(tmp_path / "copy"), copy.to_arrow())

    def test_open_source_keeps_its_version_when_the_table_changes(self, tmp_path, table):
        expected = table.to_arrow()
        source = open_images(tmp_path)
        for change in ("add", "merge_insert", "optimize"):
            CHANGES[change](table, "bytes")
        check(source, expected)
        check(open_images(tmp_path), table.to_arrow())

    def test_open_source_asks_to_be_opened_again_when_its_version_is_removed(self, tmp_path, table):
        source = open_images(tmp_path, engine="lance")
        for change in ("merge_insert", "clean up"):
            CHANGES[change](table, "bytes")
        with raises(FormatError, path=tmp_path / "plate.lance", mentions="open it again"):
            source.read(0)


class TestDatasets:
    @pytest.fixture(params=ENCODINGS)
    def stored(self, request, tmp_path, lancedb):
        """Return the folder of a changed table, and its images as LanceDB returns them."""
        table = lancedb.connect(tmp_path).create_table("plate", arrow_table(request.param))
        for change in ("add", "update", "delete", "merge_insert"):
            CHANGES[change](table, request.param)
        return tmp_path, [image_from(scalar)[0, :, 0] for scalar in table.to_arrow()["ome_image"]]

    @pytest.mark.parametrize("preload", [True, False])
    def test_samples_are_the_images(self, stored, preload):
        folder, images = stored
        dataset = OMEArrowDatasetNumpy(folder, axes="CYX", normalize=False, preload=preload)
        assert all(map(np.array_equal, dataset.__getitems__(list(range(len(images)))), images))
        assert all(np.array_equal(dataset[index], image) for index, image in enumerate(images))

    @pytest.mark.parametrize("preload", [True, False])
    def test_crops_are_windows_of_the_images(self, stored, preload):
        folder, images = stored
        dataset = OMEArrowDatasetNumpy(
            folder, axes="CYX", normalize=False, preload=preload, crop="grid", crop_size=(24, 32)
        )
        windows = [image[:, y : y + 24, x : x + 32] for image in images for y in (0, 24) for x in (0, 32)]
        assert len(dataset) == len(windows)
        assert all(np.array_equal(dataset[index], window) for index, window in enumerate(windows))

    @pytest.mark.parametrize("preload", [True, False])
    @pytest.mark.share(2, "preload", "stored")
    def test_batches_of_workers_are_the_images(self, stored, preload):
        folder, images = stored
        dataset = OMEArrowDataset(folder, axes="CYX", normalize=False, preload=preload)
        loader = OMEArrowDataLoader(dataset, 4, num_workers=2, timeout=120)
        batches = np.concatenate([batch.numpy() for batch in loader])
        np.testing.assert_array_equal(batches, np.stack(images))


class TestOpenTables:
    @pytest.mark.parametrize("opening", [open_images, OMEArrowDataset], ids=lambda opening: opening.__name__)
    def test_open_table_is_refused_with_the_path_to_pass(self, tmp_path, lancedb, opening):
        table = lancedb.connect(tmp_path).create_table("plate", arrow_table("bytes"))
        with raises(ArgumentError, path=table.uri, mentions="newest version"):
            opening(table)
        assert len(opening(table.uri)) == NUM_IMAGES

    def test_convert_refuses_an_open_table_with_the_path_to_pass(self, tmp_path, lancedb):
        table = lancedb.connect(tmp_path).create_table("plate", arrow_table("bytes"))
        with raises(ArgumentError, path=table.uri):
            convert(table, tmp_path / "copy.arrow")

    def test_table_in_memory_is_refused_with_the_way_to_a_folder(self, lancedb):
        table = lancedb.connect("memory://").create_table("plate", arrow_table("bytes"))
        with raises(ArgumentError, mentions=("memory", "create_table(NAME, table.to_arrow())")):
            open_images(table)

    def test_connection_is_refused(self, tmp_path, lancedb):
        with raises(ArgumentError, mentions="LanceDB"):
            open_images(lancedb.connect(tmp_path))
