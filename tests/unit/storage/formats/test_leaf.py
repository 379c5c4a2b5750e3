"""Tests shared by Vortex and Lance: every way to read returns the written pixels, like the format's library."""

from __future__ import annotations

import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import DecodeError, open_images, write_images
from omearrow_ds.storage.formats import _table, get_format
from omearrow_ds.storage.image_extents import OtherLayoutError
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.sources import check, scanned
from tests.support.strategies import SUFFIX, all_same, dtypes, images_of, same, shapes

for needed in ("lance", "vortex"):
    pytest.importorskip(needed)

from omearrow_ds.storage.formats import lance as lance_format  # noqa: E402
from omearrow_ds.storage.formats import vortex as vortex_format  # noqa: E402

FORMATS = ("vortex", "lance")
SETTINGS = settings(max_examples=4, deadline=None)
MANY = [((1, 2, 3, 7, 10), "uint16")] * 40  # Chunks of 420 bytes: Lance packs smaller values into shared blocks.
both = pytest.mark.parametrize("name", FORMATS)
encodings = pytest.mark.parametrize("encoding", ["bytes", "list"])


# Patches that disable the faster ways to read.
class OtherPages:
    """Pages of a Lance file whose bytes before chunks are unexpected."""

    def images(self, rows):
        raise OtherLayoutError

    def stack(self, first, count):
        return None

    def mapped_stacks(self, refuse):
        return None


PATHS = {
    "vortex": {
        "fastest": {},
        "not mapped": {(vortex_format, "in_place"): lambda *_: None},
        "no scalars": {
            (vortex_format, "in_place"): lambda *_: None,
            (vortex_format.VortexTable, "_images_of_scalars"): lambda *_: None,
        },
        "views kept": {
            (vortex_format, "in_place"): lambda *_: None,
            (vortex_format, "without_views"): lambda lists: lists,
            (vortex_format.VortexTable, "_images_of_scalars"): lambda *_: None,
        },
        "not cut": {
            (vortex_format, "in_place"): lambda *_: None,
            (vortex_format, "_MANY"): 0,
            (_table, "_cut"): lambda *_: None,
        },
        "scalars alone": {(vortex_format, "in_place"): lambda *_: None, (vortex_format, "_MANY"): 1000},
        "small blocks": {(vortex_format, "in_place"): lambda *_: None, (vortex_format, "_BLOCK_BYTES"): 500},
        "whole chunks": {(_table.TableHeader, "leaf_fields"): lambda *_: (None, [])},
    },
    "lance": {
        "fastest": {},
        "pages one by one": {(lance_format.PixelPages, "stack"): lambda *_: None},
        "pages not as they seemed": {(lance_format.LanceTable, "_pages"): lambda *_: OtherPages()},
        "by its files": {(lance_format, "find_places"): lambda *_: None},
        "not cut": {
            (lance_format, "find_places"): lambda *_: None,
            (_table, "_cut"): lambda *_: None,
        },
        "small blocks": {(lance_format, "find_places"): lambda *_: None, (lance_format, "_BLOCK_BYTES"): 500},
        "small blocks of pages": {(lance_format, "_BLOCK_BYTES"): 500},
        "by the dataset": {(lance_format, "whole_files"): lambda _: []},
    },
}

paths = pytest.mark.parametrize(("name", "path"), [(name, path) for name in FORMATS for path in PATHS[name]])


@contextmanager
def only(name, path):
    """Restrict sources of the format to one way to read."""
    with pytest.MonkeyPatch.context() as patch:
        for (owner, attribute), value in PATHS[name][path].items():
            patch.setattr(owner, attribute, value)
        yield


def plain(images):
    """Return images of few values, which Vortex encodes; those of `images_of` look like noise and are stored as is."""
    pixels = [np.arange(image.size) // 3 % 4 for image in images]
    for number, values in enumerate(pixels):
        values[::7] = 10 + number % 100  # Unique images, as equal ones would be dictionary-encoded.
    return [values.reshape(image.shape).astype(image.dtype) for values, image in zip(pixels, images, strict=True)]


def written(images, folder, name, **kwargs):
    target = Path(folder) / f"images{SUFFIX[name]}"
    write_images(images, target, name, **kwargs)
    return target


def raw_rows(path, name):
    """Return the image rows as Python objects, read by the format's library."""
    if name == "lance":
        import lance

        return lance.dataset(str(path)).to_table()["ome_image"].to_pylist()
    import vortex

    return vortex.open(str(path)).to_arrow().read_all()["ome_image"].to_pylist()


def decoded(row):
    """Return the pixels of one row that this package wrote."""
    sizes = [row["pixels_meta"][f"size_{axis}"] for axis in "tczyx"]
    chunks = row["chunks"]
    if "pixel_bytes" in chunks[0]:
        flat = np.frombuffer(b"".join(chunk["pixel_bytes"] for chunk in chunks), chunks[0]["dtype"])
    else:
        flat = np.concatenate([chunk["pixels"] for chunk in chunks]).astype(row["pixels_meta"]["type"])
    return flat.reshape(sizes)


@st.composite
def collections_and_indices(draw):
    encoding = draw(st.sampled_from(["bytes", "list"]))
    kind = st.tuples(shapes(), st.sampled_from(["uint8", "uint16"]) if encoding == "list" else dtypes)
    count = draw(st.integers(1, 12))
    uniform = draw(st.booleans())
    images = images_of([draw(kind)] * count if uniform else [draw(kind) for _ in range(count)])
    images = plain(images) if draw(st.booleans()) else images
    start, stop = sorted((draw(st.integers(0, count - 1)), draw(st.integers(1, count))))
    run = list(range(start, max(stop, start + 1)))
    scattered = st.lists(st.integers(-count, count - 1), min_size=1, max_size=8)
    indices = draw(st.sampled_from([[0], [count - 1], [0, count - 1], run, list(range(count))]) | scattered)
    return images, indices, encoding


@paths
@SETTINGS
@given(drawn=collections_and_indices(), data=st.data())
@pytest.mark.share(2, "path")
def test_every_path_gives_what_was_written(name, path, drawn, data):
    needs(name)
    images, indices, encoding = drawn
    compression = data.draw(st.sampled_from(get_format(name).writer.compressions))
    with tempfile.TemporaryDirectory() as folder:
        target = written(images, folder, name, encoding=encoding, compression=compression)
        assert all_same(list(map(decoded, raw_rows(target, name))), images)
        with only(name, path), open_images(target, name) as source:
            check(source, images, indices)


@paths
@encodings
@pytest.mark.parametrize("look", [list, pytest.param(plain, marks=pytest.mark.slow)])
@pytest.mark.share(2, "path", "encoding")
def test_rows_beside_each_other_and_apart(stored, name, path, encoding, look):
    images = look(images_of(MANY))
    target = stored(name, images, encoding=encoding)
    with only(name, path), open_images(target, name) as source:
        check(source, images, [7, 3, 7, -1])
        for indices in ([0], [39], [20], [0, 1], [38, 39], [5, 6, 7], [0, 39], range(40), range(1, 40)):
            assert all_same(source.take(indices), [images[index] for index in indices])
            assert all_same(source.images.read(indices), [images[index] for index in indices])


@both
@encodings
def test_own_files_are_read_by_the_leaf_alone(stored, name, encoding):
    with open_images(stored(name, images_of(MANY), encoding=encoding)) as source:
        lists, *_ = source.images.table.fetch("chunks", np.arange(3))
        assert [field.name for field in lists.type.value_type] == ["pixels" if encoding == "list" else "pixel_bytes"]


def table_of(stored, look=plain, **kwargs):
    images = look(images_of(MANY))
    return images, pa.ipc.open_file(stored("arrow", images, stem="source", checksum=False, **kwargs)).read_all()


def put(table, folder, name, **kwargs):
    """Write a table with the format's library."""
    needs(name)
    path = folder / f"foreign{SUFFIX[name]}"
    if name == "lance":
        import lance

        lance.write_dataset(table, str(path), **kwargs)
    else:
        import vortex.io

        vortex.io.write(table, str(path))
    return path


def changed(table, change):
    """Return the table after applying ``change`` to its image rows as Python objects."""
    rows = table["ome_image"].to_pylist()
    change(rows)
    return pa.table({"ome_image": pa.array(rows, table.schema.field("ome_image").type)})


@both
@encodings
def test_one_odd_image_and_whole_chunks_are_read(stored, tmp_path, name, encoding):
    images, table = table_of(stored, encoding=encoding)
    odd = changed(table, lambda rows: rows[7]["chunks"].reverse())
    source = open_images(put(odd, tmp_path, name))
    assert not source.images.table.is_placed
    check(source, images, [7, 6, 39])


@both
@encodings
def test_a_leaf_of_the_wrong_size_is_an_error(stored, tmp_path, name, encoding):
    images, table = table_of(stored, encoding=encoding)
    leaf = "pixels" if encoding == "list" else "pixel_bytes"

    def shorten(rows):
        chunk = rows[7]["chunks"][1]
        chunk[leaf] = chunk[leaf][:-2]

    source = open_images(put(changed(table, shorten), tmp_path, name))
    assert source.images.table.is_placed
    for read in (lambda: source.read(7), lambda: source.take([0, 7]), lambda: scanned(source)):
        with raises(DecodeError, mentions="image 7", remedy=False):
            read()
    assert all_same(source.take([0, 6, 8]), [images[0], images[6], images[8]])


@both
def test_bytes_that_only_add_up_are_an_error(stored, tmp_path, name):
    images, table = table_of(stored)

    def shift(rows):
        first, second = rows[7]["chunks"]
        first["pixel_bytes"], second["pixel_bytes"] = (
            first["pixel_bytes"][:-2],
            first["pixel_bytes"][-2:] + second["pixel_bytes"],
        )

    source = open_images(put(changed(table, shift), tmp_path, name))
    for read in (lambda: source.read(7), lambda: source.take([0, 7]), lambda: scanned(source)):
        with raises(DecodeError, mentions="image 7", remedy=False):
            read()
    assert same(source.read(8), images[8])


@both
def test_null_pixels_are_named(stored, tmp_path, name):
    _, table = table_of(stored)

    def lose(rows):
        rows[7]["chunks"][1]["pixel_bytes"] = None

    source = open_images(put(changed(table, lose), tmp_path, name))
    for read in (lambda: source.read(7), lambda: source.take([0, 7])):
        with raises(DecodeError, mentions=("image 7", "null"), remedy=False):
            read()


@both
@pytest.mark.parametrize("dtype", [">u2", ">f4"])
def test_big_endian_pixels(stored, tmp_path, name, dtype):
    images, table = table_of(stored)

    def swap(rows):
        for row in rows:
            row["pixels_meta"]["type"] = dtype
            for chunk in row["chunks"]:
                values = np.frombuffer(chunk["pixel_bytes"], np.uint16)
                chunk["pixel_bytes"], chunk["dtype"] = values.astype(dtype).tobytes(), None

    source = open_images(put(changed(table, swap), tmp_path, name))
    check(source, [image.astype(np.dtype(dtype).newbyteorder("=")) for image in images], [7, 0, 39, 7])


@both
def test_lists_of_another_item_name(stored, tmp_path, name):
    images, table = table_of(stored)
    image = table.schema.field("ome_image")
    fields = [
        field.with_type(pa.list_(pa.field("element", field.type.value_type))) if field.name == "chunks" else field
        for field in image.type
    ]
    schema = pa.schema([image.with_type(pa.struct(fields))])
    source = open_images(put(table.cast(schema), tmp_path, name))
    check(source, images, [7, 0, 39])


@both
@encodings
def test_large_lists_and_columns_around(stored, tmp_path, name, encoding):
    images, table = table_of(stored, encoding=encoding)
    image = table.schema.field("ome_image")
    fields = [
        field.with_type(pa.large_list(field.type.value_field)) if field.name == "chunks" else field
        for field in image.type
    ]
    cast = table.cast(pa.schema([image.with_type(pa.struct(fields))]))
    cast = cast.append_column("number", pa.array(range(40))).select(["number", "ome_image"])
    source = open_images(put(cast, tmp_path, name))
    assert source.columns["number"].to_pylist() == list(range(40))
    check(source, images, [7, 0, 39])


@both
@encodings
def test_threads_that_read_batches(stored, name, encoding):
    images = images_of(MANY)
    source = open_images(stored(name, images, encoding=encoding))
    right = []

    def read(seed):
        for indices in np.random.default_rng(seed).integers(0, 40, (20, 6)).tolist():
            right.append(all_same(source.take(indices), [images[index] for index in indices]))
            right.append(same(source.read(indices[0]), images[indices[0]]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 160
    assert all(right)
