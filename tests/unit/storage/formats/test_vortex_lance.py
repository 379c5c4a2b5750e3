"""Vortex and Lance: whatever path reads an image, its pixels are those that were written and that the library gives."""

from __future__ import annotations

import pickle
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, DecodeError, FormatError, open_images, write_images
from omearrow_ds.codec.schema import image_struct
from omearrow_ds.storage.formats import _leaf, _vortex_rows, get_format
from omearrow_ds.storage.formats import lance as lance_format
from omearrow_ds.storage.formats import vortex as vortex_format
from tests.conftest import needs
from tests.support.strategies import (
    SUFFIX,
    all_same,
    byte_chunk,
    dtypes,
    image_of,
    images_of,
    record_of,
    retyped,
    same,
    shapes,
)

FORMATS = ("vortex", "lance")
SETTINGS = settings(max_examples=8, deadline=None)
MANY = [((1, 2, 3, 7, 10), "uint16")] * 40  # chunks of 420 bytes: smaller values share blocks in Lance
LARGE = [((1, 2, 3, 200, 512), "uint16")] * 40
LARGE_MIXED = [((1, 1 + number % 3, 2, 200, 300 + number), "float32") for number in range(40)]
both = pytest.mark.parametrize("name", FORMATS)
encodings = pytest.mark.parametrize("encoding", ["bytes", "list"])

# What is taken away so that the next slower path is used.
PATHS = {
    "vortex": {
        "fastest": {},
        "not mapped": {(vortex_format, "in_place"): lambda *_: None},
        "no scalars": {
            (vortex_format, "in_place"): lambda *_: None,
            (vortex_format.Source, "_images_of_scalars"): lambda *_: None,
        },
        "views kept": {
            (vortex_format, "in_place"): lambda *_: None,
            (_vortex_rows, "without_views"): lambda lists: lists,
            (vortex_format, "without_views"): lambda lists: lists,
            (vortex_format.Source, "_images_of_scalars"): lambda *_: None,
        },
        "not cut": {
            (vortex_format, "in_place"): lambda *_: None,
            (vortex_format, "_MANY"): 0,
            (_leaf, "_cut"): lambda *_: None,
        },
        "scalars alone": {(vortex_format, "in_place"): lambda *_: None, (vortex_format, "_MANY"): 1000},
        "small blocks": {(vortex_format, "in_place"): lambda *_: None, (vortex_format, "_BLOCK_BYTES"): 500},
        "whole chunks": {(_leaf.LeafSource, "_leaf_and_places"): lambda *_: None},
    },
    "lance": {
        "fastest": {},
        "pages one by one": {(lance_format.PixelPages, "stack"): lambda *_: None},
        "pages not as they seemed": {(lance_format.Source, "_pages"): lambda *_: None},
        "by its files": {(lance_format, "find_places"): lambda *_: None},
        "not cut": {
            (lance_format, "find_places"): lambda *_: None,
            (_leaf, "_cut"): lambda *_: None,
            (_leaf.LeafSource, "_image"): lambda self, lists, index: self._checked(lists, np.array([index]))[0],
        },
        "small blocks": {(lance_format, "find_places"): lambda *_: None, (lance_format, "_BLOCK_BYTES"): 500},
        "small blocks of pages": {(lance_format, "_BLOCK_BYTES"): 500},
        "by the dataset": {(lance_format, "whole_files"): lambda _: []},
    },
}
paths = pytest.mark.parametrize(("name", "path"), [(name, path) for name in FORMATS for path in PATHS[name]])


@contextmanager
def only(name, path):
    """Leave the sources of the format only this path."""
    with pytest.MonkeyPatch.context() as patch:
        for (owner, attribute), value in PATHS[name][path].items():
            patch.setattr(owner, attribute, value)
        yield


def plain(images):
    """Return images of few values, which Vortex encodes; those of `images_of` look like noise and are stored as is."""
    pixels = [np.arange(image.size) // 3 % 4 for image in images]
    for number, values in enumerate(pixels):
        values[::7] = 10 + number % 100  # no two alike: else they are stored as a dictionary
    return [values.reshape(image.shape).astype(image.dtype) for values, image in zip(pixels, images, strict=True)]


def written(images, folder, name, **kwargs):
    target = Path(folder) / f"images{SUFFIX[name]}"
    write_images(images, target, name, **kwargs)
    return target


def raw_rows(path, name):
    """Return the images as the format's own library gives them, as Python objects."""
    if name == "lance":
        import lance

        return lance.dataset(str(path)).to_table()["ome_image"].to_pylist()
    import vortex

    return vortex.open(str(path)).to_arrow().read_all()["ome_image"].to_pylist()


def decoded(row):
    """Return the pixels of one row, which this package wrote."""
    sizes = [row["pixels_meta"][f"size_{axis}"] for axis in "tczyx"]
    chunks = row["chunks"]
    if "pixel_bytes" in chunks[0]:
        flat = np.frombuffer(b"".join(chunk["pixel_bytes"] for chunk in chunks), chunks[0]["dtype"])
    else:
        flat = np.concatenate([chunk["pixels"] for chunk in chunks]).astype(row["pixels_meta"]["type"])
    return flat.reshape(sizes)


def scanned(source):
    images = []
    for start, part in source.scan():
        assert start == len(images)
        images.extend(np.array(image) for image in part)
    return images


def check(source, images, indices):
    """Compare everything that a source gives with what was written."""
    wanted = [images[index] for index in indices]
    distinct = np.unique(np.array(indices, np.int64) % len(images))
    assert all_same(source.take(indices), wanted)
    assert all_same([source.read(index) for index in indices], wanted)
    assert all_same(source.views(distinct), [images[index] for index in distinct])
    assert all_same([source.view(index) for index in distinct.tolist()], [images[index] for index in distinct])
    assert all_same(scanned(source), images)


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
def test_every_path_gives_what_was_written(name, path, drawn, data):
    needs(name)
    images, indices, encoding = drawn
    compression = data.draw(st.sampled_from(get_format(name).compressions))
    with tempfile.TemporaryDirectory() as folder:
        target = written(images, folder, name, encoding=encoding, compression=compression)
        assert all_same(list(map(decoded, raw_rows(target, name))), images)
        with only(name, path), open_images(target, name) as source:
            check(source, images, indices)


@paths
@encodings
@pytest.mark.parametrize("look", [list, pytest.param(plain, marks=pytest.mark.long)])
def test_rows_beside_each_other_and_apart(stored, name, path, encoding, look):
    images = look(images_of(MANY))
    target = stored(name, images, encoding=encoding)
    with only(name, path), open_images(target, name) as source:
        for indices in ([0], [39], [20], [0, 1], [38, 39], [5, 6, 7], [0, 39], range(40), range(1, 40), [7, 3, 7, -1]):
            check(source, images, list(indices))


@both
@encodings
def test_own_files_are_read_by_the_leaf_alone(stored, name, encoding):
    with open_images(stored(name, images_of(MANY), encoding=encoding)) as source:
        lists, *_ = source._fetch("chunks", np.arange(3))
        assert [field.name for field in lists.type.value_type] == ["pixels" if encoding == "list" else "pixel_bytes"]


@encodings
@pytest.mark.parametrize("look", [list, plain])
def test_vortex_of_more_rows_than_a_part_holds(stored, encoding, look):
    images = look([image_of((1, 1, 1, 2, 4), "uint16", number) for number in range(8200)])
    source = open_images(stored("vortex", images, encoding=encoding))
    indices = [8191, 8192, 0, 8199, -1, 4096]
    assert all_same(source.take(indices), [images[index] for index in indices])
    assert all_same([source.view(index) for index in (8190, 8191, 8192, 8199)], [*images[8190:8193], images[8199]])
    assert all_same(scanned(source), images)


def test_vortex_pixels_without_an_encoding_are_read_where_they_lie(stored):
    noise = list(np.random.default_rng(0).integers(0, 2**16, (30, 1, 2, 1, 20, 20)).astype(np.uint16))
    for encoding in ("bytes", "list"):
        source = open_images(stored("vortex", noise, stem=encoding, encoding=encoding))
        stacks = source.stacks()
        assert all_same([image for stack in stacks for image in stack], noise)
        assert not stacks[0].flags.writeable
        assert np.shares_memory(source.view(3), stacks[0])
        check(source, noise, [3, 29, 0, 3])
        source.close()
        assert same(stacks[0][7], noise[7])  # the mapping lives as long as what is read from it
    assert open_images(stored("vortex", plain(noise), stem="encoded")).stacks() == []


def test_vortex_ragged_pixels_without_an_encoding_are_no_stack(stored):
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 2**16, (1, 1, 1, 20, 20 + number)).astype(np.uint16) for number in range(9)]
    source = open_images(stored("vortex", noise, encoding="list"))
    assert source._mapped_images()
    assert source.stacks() == []
    check(source, noise, [8, 0, 4])


def test_vortex_lists_of_uint8_are_no_view_of_the_file(stored):
    images = list(np.random.default_rng(0).integers(0, 2**8, (9, 1, 1, 1, 20, 20)).astype(np.uint8))
    source = open_images(stored("vortex", images, encoding="list"))
    assert source.stacks() == []
    check(source, images, [8, 0, 4])


def table_of(stored, look=plain, **kwargs):
    images = look(images_of(MANY))
    return images, pa.ipc.open_file(stored("arrow", images, stem="source", checksum=False, **kwargs)).read_all()


def put(table, folder, name, **kwargs):
    """Write a table as others would."""
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
    """Return the table with its image rows, as Python objects, put through ``change``."""
    rows = table["ome_image"].to_pylist()
    change(rows)
    return pa.table({"ome_image": pa.array(rows, table.schema.field("ome_image").type)})


@both
@encodings
def test_one_odd_image_and_whole_chunks_are_read(stored, tmp_path, name, encoding):
    images, table = table_of(stored, encoding=encoding)
    odd = changed(table, lambda rows: rows[7]["chunks"].reverse())
    source = open_images(put(odd, tmp_path, name))
    assert not source._all_placed
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
    assert source._all_placed
    for read in (lambda: source.read(7), lambda: source.take([0, 7]), lambda: scanned(source)):
        with pytest.raises(DecodeError, match="image 7"):
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
        with pytest.raises(DecodeError, match="image 7"):
            read()
    assert same(source.read(8), images[8])


@both
def test_null_pixels_are_named(stored, tmp_path, name):
    _, table = table_of(stored)

    def lose(rows):
        rows[7]["chunks"][1]["pixel_bytes"] = None

    source = open_images(put(changed(table, lose), tmp_path, name))
    for read in (lambda: source.read(7), lambda: source.take([0, 7])):
        with pytest.raises(DecodeError, match=r"image 7.*null pixels"):
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


@encodings
def test_lance_fragments(stored, tmp_path, encoding):
    images, table = table_of(stored, encoding=encoding)
    path = put(table, tmp_path, "lance", max_rows_per_file=7)
    source = open_images(path)
    assert len(source._files) == 6
    for indices in ([0], [6], [7], [39], [6, 7], [0, 13, 14, 39], [39, 0, 20, 20], [*range(40)]):
        check(source, images, indices)


def test_lance_of_more_files_than_are_kept_open(stored, tmp_path, monkeypatch):
    images, table = table_of(stored)
    monkeypatch.setattr(lance_format, "_FILES_LIMIT", 5)
    source = open_images(put(table, tmp_path, "lance", max_rows_per_file=7))
    assert not source._files
    check(source, images, [0, 13, 14, 39])


@encodings
def test_lance_rows_deleted(stored, tmp_path, encoding):
    import lance

    images, table = table_of(stored, encoding=encoding)
    path = put(table.append_column("number", pa.array(range(40))), tmp_path, "lance", max_rows_per_file=7)
    lance.dataset(str(path)).delete("number IN (0, 9, 10, 39)")
    left = [image for number, image in enumerate(images) if number not in (0, 9, 10, 39)]
    source = open_images(path)
    assert not source._files
    check(source, left, [0, 7, 8, 35, 8])


@pytest.mark.parametrize("kinds", [LARGE, LARGE_MIXED], ids=["uniform", "ragged"])
def test_lance_pages(stored, kinds):
    images = images_of(kinds)
    path = stored("lance", images)
    source = open_images(path)
    assert source.engine == "pages"
    check(source, images, [0, 39, 20, 21, 20])
    assert np.shares_memory(source.view(7), source.view(7))
    assert not source.view(7).flags.writeable
    by_lance = open_images(path, engine="lance")
    assert by_lance.engine == "lance"
    check(by_lance, images, [0, 39, 20, 21, 20])


def test_lance_engines(stored):
    images = images_of(MANY)
    path = stored("lance", images)
    for engine in ("pages", "lance"):
        source = open_images(path, engine=engine)
        assert source.engine == pickle.loads(pickle.dumps(source)).engine == engine
    path = stored("lance", plain(images), stem="other", encoding="list")
    assert open_images(path).engine == "lance"
    with pytest.raises(ArgumentError, match=r"lance.*uncompressed.*engine=None"):
        open_images(path, engine="pages")
    assert open_images(stored("lance", [], stem="empty"), engine="pages").take([]) == []
    with pytest.raises(ArgumentError, match="pages, lance"):
        lance_format.Source(path, engine="other")


def large_and_many(lance_limit_bytes=2**25):
    """Images of several channels in more than one page of compressed pixels."""
    rng = np.random.default_rng(5)
    large = [rng.integers(0, 2**16, (1, 5, 1, 1024, 1024), np.uint16) for _ in range(4)]
    assert sum(image.nbytes for image in large) > lance_limit_bytes
    return [*large, *images_of(MANY)]


def test_lance_frames_are_decompressed_one_by_one(stored):
    images = large_and_many()
    path = stored("lance", images, compression="zstd")
    for engine in ("pages", "lance"):
        source = open_images(path, engine=engine)
        assert source.engine == engine
        check(source, images, [0, 2, len(images) - 1, 7, 7])
        assert not source.stored_as().in_place
    assert source.stored_as().compression == "zstd"


def set_in_frames(path, where, value):
    """Set eight bytes of the header of the third of some images, compressed by zstd, in a Lance dataset."""
    source = open_images(path)
    (file,) = source._files
    with (path / "data" / file.name).open("r+b") as stored:
        stored.seek(int(file.places.starts[2]) + where)
        stored.write(value.to_bytes(8, "little"))


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**39, 2**63 - 1])
@pytest.mark.parametrize("where", [1, 9])
def test_a_damaged_size_of_a_lance_frame_is_an_error(stored, where, value):
    """Lance allocates what it says, and where there is not so much memory, that ends the process."""
    images = images_of(MANY)
    path = stored("lance", images, compression="zstd")
    set_in_frames(path, where, value)
    source = open_images(path)
    with pytest.raises(DecodeError, match=r"image 2: .*damaged"):
        source.read(2)
    with pytest.raises(DecodeError, match=r"image 2: .*damaged"):
        list(source.scan())
    assert same(source.read(3), images[3])


def test_lance_pages_of_short_lengths(stored, tmp_path):
    images, table = table_of(stored)
    chunk = table.schema.field("ome_image").type.field("chunks").type.value_type
    kind = retyped(table.schema.field("ome_image").type, {"pixel_bytes": lambda _: pa.binary()})
    assert chunk.field("pixel_bytes").type == pa.large_binary()
    source = open_images(put(table.cast(pa.schema([("ome_image", kind)])), tmp_path, "lance"))
    assert source._files[0].places.header_bytes == 5
    check(source, images, [7, 0, 39])


def test_lance_chunks_along_z_are_left_to_lance(stored, tmp_path):
    image = image_of((1, 1, 6, 30, 40))
    chunks = [byte_chunk(image, 0, 0, (slice(z, z + 2), slice(0, 30), slice(0, 40))) for z in (0, 2, 4)]
    rows = pa.array([record_of(image, chunks, [])] * 3, image_struct("bytes"))
    source = open_images(put(pa.table({"ome_image": rows}), tmp_path, "lance"))
    assert source._files
    assert source.engine == "lance"
    check(source, [image] * 3, [2, 0])


def test_lance_pages_that_lance_reads_otherwise_are_left_to_it(stored, monkeypatch):
    images = images_of(MANY)
    path = stored("lance", images)
    cut = lance_format.PixelPages.image
    monkeypatch.setattr(lance_format.PixelPages, "image", lambda self, row: cut(self, row) ^ 1)
    source = open_images(path)
    assert source.engine == "lance"
    check(source, images, [7, 0, 39])


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_a_lance_value_with_another_header_is_not_cut(stored, offset):
    images = images_of(MANY)
    path = stored("lance", images)
    source = open_images(path)
    start = int(source._files[0].places.starts[7])
    (file,) = (path / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[start + offset] ^= 1
    file.write_bytes(data)
    assert source._pages(0).image(7) is None
    assert source._pages(0).stack(5, 5) is None
    assert same(source.read(8), images[8])


@pytest.mark.parametrize("change", ["add", "drop", "rename", "drop and add again"])
def test_lance_columns_changed_since(stored, tmp_path, change):
    import lance

    images, table = table_of(stored)
    path = put(table.append_column("number", pa.array(range(40))), tmp_path, "lance")
    dataset = lance.dataset(str(path))
    wanted = {"number": list(range(40))}
    if change == "add":
        dataset.add_columns({"other": "number + 1"})
        wanted["other"] = list(range(1, 41))
    elif change == "rename":
        dataset.alter_columns({"path": "number", "name": "renamed"})
        wanted = {"renamed": wanted["number"]}
    else:
        dataset.drop_columns(["number"])
        wanted = {}
        if change == "drop and add again":
            lance.dataset(str(path)).add_columns(pa.schema([pa.field("number", pa.int64())]))
            wanted = {"number": [None] * 40}
    source = open_images(path)
    assert not source._files
    assert source.columns.to_pydict() == wanted
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
    with pytest.raises(FormatError, match=r"foreign\.lance"):
        source.read(0)


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
