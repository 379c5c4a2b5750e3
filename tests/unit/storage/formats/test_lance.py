"""Lance: pixels cut out of pages, reads by Lance itself, and versions, fragments and files that change."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from omearrow_ds import ArgumentError, DecodeError, FormatError, open_images
from omearrow_ds.codec.schema import image_struct
from omearrow_ds.storage.image_extents import OtherLayoutError
from tests.support.errors import raises, warns
from tests.support.sources import check
from tests.support.strategies import byte_chunk, image_of, images_of, record_of, retyped, same
from tests.unit.storage.formats.test_leaf import MANY, changed, lance_format, plain, put, table_of

encodings = pytest.mark.parametrize("encoding", ["bytes", "list"])
LARGE = [((1, 2, 3, 200, 512), "uint16")] * 40
LARGE_MIXED = [((1, 1 + number % 3, 2, 200, 300 + number), "float32") for number in range(40)]


@encodings
def test_lance_fragments(stored, tmp_path, encoding):
    images, table = table_of(stored, encoding=encoding)
    path = put(table, tmp_path, "lance", max_rows_per_file=7)
    source = open_images(path)
    assert len(source.images.table._files) == 6
    for indices in ([0], [6], [7], [39], [6, 7], [0, 13, 14, 39], [39, 0, 20, 20], [*range(40)]):
        check(source, images, indices)


def test_lance_of_more_files_than_are_kept_open(stored, tmp_path, monkeypatch):
    images, table = table_of(stored)
    monkeypatch.setattr(lance_format, "_FILES_LIMIT", 5)
    source = open_images(put(table, tmp_path, "lance", max_rows_per_file=7))
    assert not source.images.table._files
    check(source, images, [0, 13, 14, 39])


@encodings
def test_lance_rows_deleted(stored, tmp_path, encoding):
    import lance

    images, table = table_of(stored, encoding=encoding)
    path = put(table.append_column("number", pa.array(range(40))), tmp_path, "lance", max_rows_per_file=7)
    lance.dataset(str(path)).delete("number IN (0, 9, 10, 39)")
    left = [image for number, image in enumerate(images) if number not in (0, 9, 10, 39)]
    source = open_images(path)
    assert not source.images.table._files
    check(source, left, [0, 7, 8, 35, 8])


@pytest.mark.parametrize("kinds", [LARGE, LARGE_MIXED], ids=["uniform", "ragged"])
def test_lance_pages(stored, kinds):
    images = images_of(kinds)
    path = stored("lance", images)
    source = open_images(path)
    assert source.images.table.engine == "pages"
    check(source, images, [0, 39, 20, 21, 20])
    assert np.shares_memory(source.images.read([7])[0], source.images.read([7])[0])
    assert not source.images.read([7])[0].flags.writeable
    by_lance = open_images(path, engine="lance")
    assert by_lance.images.table.engine == "lance"
    check(by_lance, images, [0, 39, 20, 21, 20])


def test_lance_engines(stored):
    images = images_of(MANY)
    path = stored("lance", images)
    for engine in ("pages", "lance"):
        source = open_images(path, engine=engine)
        assert source.images.table.engine == pickle.loads(pickle.dumps(source)).images.table.engine == engine
    path = stored("lance", plain(images), stem="other", encoding="list")
    assert open_images(path).images.table.engine == "lance"
    with raises(ArgumentError, option="engine", path=path, mentions=("'pages'", "engine=None")):
        open_images(path, engine="pages")
    assert open_images(stored("lance", [], stem="empty"), engine="pages").take([]) == []
    with raises(ArgumentError, option="engine", mentions=("'other'", "pages", "lance"), remedy=False):
        open_images(path, engine="other")


def large_and_many(lance_limit_bytes=2**25):
    """Images of several channels in several pages of compressed pixels."""
    rng = np.random.default_rng(5)
    large = [rng.integers(0, 2**16, (1, 5, 1, 1024, 1024), np.uint16) for _ in range(4)]
    assert sum(image.nbytes for image in large) > lance_limit_bytes
    return [*large, *images_of(MANY)]


def test_lance_frames_are_decompressed_one_by_one(stored):
    images = large_and_many()
    path = stored("lance", images, compression="zstd")
    for engine in ("pages", "lance"):
        source = open_images(path, engine=engine)
        assert source.images.table.engine == engine
        check(source, images, [0, 2, len(images) - 1, 7, 7])
        assert not source.images.details.storage_info().in_place
    assert open_images(path).images.details.storage_info().compression == "zstd"


def set_in_frames(path, offset, value):
    """Overwrite eight bytes in the header of the third zstd frame of a Lance dataset."""
    source = open_images(path)
    (file,) = source.images.table._files
    with (path / "data" / file.name).open("r+b") as stored:
        stored.seek(int(file.locations.starts[2]) + offset)
        stored.write(value.to_bytes(8, "little"))


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**39, 2**63 - 1])
@pytest.mark.parametrize("position", [1, 9])
@pytest.mark.share(2, "position", "value")
def test_a_damaged_size_of_a_lance_frame_is_an_error(stored, position, value):
    """Lance allocates the stored size; without enough memory, this aborts the process."""
    images = images_of(MANY)
    path = stored("lance", images, compression="zstd")
    set_in_frames(path, position, value)
    source = open_images(path)
    with raises(DecodeError, path=path, mentions="image 2"):
        source.read(2)
    with raises(DecodeError, path=path, mentions="image 2"):
        list(source.images.stream())
    assert same(source.read(3), images[3])


def test_lance_pages_of_short_lengths(stored, tmp_path):
    images, table = table_of(stored)
    chunk = table.schema.field("ome_image").type.field("chunks").type.value_type
    kind = retyped(table.schema.field("ome_image").type, {"pixel_bytes": lambda _: pa.binary()})
    assert chunk.field("pixel_bytes").type == pa.large_binary()
    source = open_images(put(table.cast(pa.schema([("ome_image", kind)])), tmp_path, "lance"))
    assert source.images.table._files[0].locations.header_bytes == 5
    check(source, images, [7, 0, 39])


def test_lance_chunks_along_z_are_left_to_lance(stored, tmp_path):
    image = image_of((1, 1, 6, 30, 40))
    chunks = [byte_chunk(image, 0, 0, (slice(z, z + 2), slice(0, 30), slice(0, 40))) for z in (0, 2, 4)]
    rows = pa.array([record_of(image, chunks, [])] * 3, image_struct("bytes"))
    source = open_images(put(pa.table({"ome_image": rows}), tmp_path, "lance"))
    assert source.images.table._files
    assert source.images.table.engine == "lance"
    check(source, [image] * 3, [2, 0])


def test_lance_pages_that_lance_reads_otherwise_are_left_to_it(stored, monkeypatch):
    images = images_of(MANY)
    path = stored("lance", images)
    cut = lance_format.PixelPages.images
    monkeypatch.setattr(lance_format.PixelPages, "images", lambda self, rows: [image ^ 1 for image in cut(self, rows)])
    source = open_images(path)
    assert source.images.table.engine == "lance"
    check(source, images, [7, 0, 39])


def test_a_lance_dataset_of_ours_that_is_not_read_in_place_says_so(stored, monkeypatch):
    large, small = stored("lance", images_of(LARGE)), stored("lance", images_of(MANY), stem="small")
    packed = stored("lance", images_of(LARGE), stem="packed", compression="zstd")
    assert open_images(large).images.details.storage_info().reading == "in place: from the mapped files"
    monkeypatch.setattr(lance_format, "find_places", lambda *_: None)  # As if Lance changed the layout of pages.
    with warns(UserWarning, path=large):
        source = open_images(large)
    assert "have a layout that this version does not know" in source.images.details.storage_info().reading
    assert same(pickle.loads(pickle.dumps(source)).read(7), images_of(LARGE)[7])  # Unpickling does not warn again.
    for path, engine in ((large, "lance"), (small, None), (packed, None)):
        assert open_images(path, engine=engine).images.details.storage_info().reading == "by Lance, by row number"


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_a_lance_value_with_another_header_is_not_cut(stored, offset):
    images = images_of(MANY)
    path = stored("lance", images)
    source = open_images(path)
    start = int(source.images.table._files[0].locations.starts[7])
    (file,) = (path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[start + offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(OtherLayoutError):
        source.images.table._pages(0).images([7])
    assert source.images.table._pages(0).stack(5, 5) is None
    assert same(source.read(8), images[8])


@pytest.mark.parametrize("change", ["add", "drop", "rename", "drop and add again"])
def test_lance_columns_changed_since(stored, tmp_path, change):
    import lance

    images, table = table_of(stored)
    path = put(table.append_column("number", pa.array(range(40))), tmp_path, "lance")
    dataset = lance.dataset(str(path))
    expected = {"number": list(range(40))}
    if change == "add":
        dataset.add_columns({"other": "number + 1"})
        expected["other"] = list(range(1, 41))
    elif change == "rename":
        dataset.alter_columns({"path": "number", "name": "renamed"})
        expected = {"renamed": expected["number"]}
    else:
        dataset.drop_columns(["number"])
        expected = {}
        if change == "drop and add again":
            lance.dataset(str(path)).add_columns(pa.schema([pa.field("number", pa.int64())]))
            expected = {"number": [None] * 40}
    source = open_images(path)
    assert not source.images.table._files
    assert source.columns.to_pydict() == expected
    check(source, images, [7, 0, 39])


def test_lance_image_columns_that_swapped_names(stored, tmp_path):
    import lance

    images, table = table_of(stored)
    other = changed(table, lambda rows: rows.reverse())
    path = put(table.append_column("other", other["ome_image"]), tmp_path, "lance")
    for old, new in (("ome_image", "third"), ("other", "ome_image"), ("third", "other")):
        lance.dataset(str(path)).alter_columns({"path": old, "name": new})
    check(open_images(path), images[::-1], [7, 0, 39])


@pytest.mark.parametrize("reopened", [False, True])
def test_lance_appended_and_overwritten_while_open(stored, tmp_path, reopened):
    import lance

    images, table = table_of(stored)
    path = put(table, tmp_path, "lance")
    source = open_images(path)
    source.read(0)
    lance.write_dataset(table.slice(0, 5), str(path), mode="append")
    lance.write_dataset(changed(table, lambda rows: rows.reverse()), str(path), mode="overwrite")
    if reopened:
        source.close()
    check(source, images, [7, 0, 39])
    check(open_images(path), images[::-1], [7, 0, 39])


def test_lance_data_files_removed_while_open(stored, tmp_path):
    _, table = table_of(stored)
    path = put(table, tmp_path, "lance")
    source = open_images(path)
    for file in (path / "data").iterdir():
        file.unlink()
    with raises(FormatError, path=path, remedy=False):
        source.read(0)
