"""DuckDB's keyed rows and OME-Zarr's chunk files: each fast way beside the slow one and beside another reader."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import ome_arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ColumnError, FormatError, MetadataError, WriteError, open_images, write_images
from omearrow_ds.dataset.preload import PixelCache
from tests.conftest import needs
from tests.support.strategies import DTYPES, all_same, collections, image_of, images_of, same

needs("duckdb")
needs("ome_zarr")

import duckdb  # noqa: E402
import numcodecs  # noqa: E402
import zarr  # noqa: E402
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec  # noqa: E402

from omearrow_ds.codec.schema import CHECKSUM_COLUMN  # noqa: E402
from omearrow_ds.storage import writing  # noqa: E402
from omearrow_ds.storage.formats import _sql, _zarr_chunks, get_format  # noqa: E402
from omearrow_ds.storage.formats import duckdb as duckdb_format  # noqa: E402

DUCKDB, ZARR = get_format("duckdb"), get_format("ome_zarr")
quick = settings(max_examples=6, deadline=None)
KEY = "omearrow_ds_row"
KEYED = "omearrow_ds_images"
MANY = [((1, 2, 1, 4, 5), "uint16")] * 40


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Return a function that gives a path where nothing is."""
    folder, numbers = tmp_path_factory.mktemp("fresh"), count()
    return lambda suffix: folder / f"{next(numbers)}{suffix}"


def scanned(source):
    return [image for _, part in source.scan() for image in part]


@contextmanager
def database(path, **options):
    with duckdb.connect(str(path), **options) as connection:
        yield connection


@contextmanager
def changed(owner, name, value):
    """Set an attribute for a while; the fixture of that name is one for a whole hypothesis test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


WAYS = {
    "by key": [],
    "by key alone": [(duckdb_format, "_SCANNED_BYTES", 0)],
    "by key, one by one": [(duckdb_format, "_SCANNED_BYTES", 0), (duckdb_format, "_PIECE_BYTES", 1)],
    "by row number": [(duckdb_format.Source, "_set_rows", lambda self, _: _sql.SqlSource._set_rows(self, None))],
    "short of memory": [(duckdb_format.Source, "_working_bytes", lambda _: 1)],
    "in small batches": [(_sql, "STREAMED_BYTES", 1)],
}


@pytest.mark.parametrize("way", WAYS)
@quick
@given(data=st.data(), images=collections(5), compression=st.sampled_from(DUCKDB.compressions))
def test_duckdb_rows(fresh, way, data, images, compression):
    listable = all(image.dtype.name in ("uint8", "uint16") for image in images)
    encoding = data.draw(st.sampled_from(["bytes", "list"] if listable else ["bytes"]))
    path = fresh(".duckdb")
    write_images(
        images, path, axes="TCZYX", encoding=encoding, compression=compression, columns={"n": range(len(images))}
    )
    with database(path, read_only=True) as connection:
        raw = connection.sql("FROM images").to_arrow_table()
    assert raw.column_names == ["ome_image", "n", CHECKSUM_COLUMN]
    for row, image in zip(raw["ome_image"], images, strict=True):
        assert same(ome_arrow.to_numpy(row.as_py(), dtype=image.dtype), image)
    with pytest.MonkeyPatch.context() as patch:
        for change in WAYS[way]:
            patch.setattr(*change)
        source = open_images(path)
        assert source.columns.to_pydict() == {"n": list(range(len(images)))}
        indices = data.draw(st.lists(st.integers(-len(images), len(images) - 1), max_size=8))
        assert all_same(source.take(indices), [images[index] for index in indices])
        assert all_same(scanned(source), images)
        assert all_same([source.read(index) for index in indices], [images[index] for index in indices])


@pytest.fixture(scope="module")
def numbered(fresh):
    """Five thousand images, each of its number."""
    path = fresh(".duckdb")
    write_images([np.full((2, 3), number, "uint16") for number in range(5000)], path)
    return path


@pytest.mark.parametrize(
    "indices", [[7], [7, 8], [0, 1], range(100, 116), [0, 4999], [4, 90, 2047, 2048, 2049], range(200)]
)
def test_rows_are_found_by_the_index(numbered, indices):
    source = open_images(numbered)
    found = source.take(indices)
    assert [int(image.max()) for image in found] == list(indices)
    plan = source._query("EXPLAIN ANALYZE SELECT *", source._wanted(np.array(indices)))["explain_value"][0].as_py()
    assert "Index Scan" in plan


@pytest.mark.parametrize("compression", DUCKDB.compressions)
def test_rows_of_many_row_groups(fresh, monkeypatch, compression):
    monkeypatch.setattr(writing, "format_of_target", lambda _: replace(DUCKDB, max_rows=97))
    path = fresh(".duckdb")
    images = [np.full((2, 3), number, "uint16") for number in range(1500)]
    write_images(images, path, compression=compression)
    with open_images(path) as source:
        assert [int(image.min()) for image in scanned(source)] == list(range(1500))
        some = np.random.default_rng(0).permutation(1500)[:700]
        assert [int(image.max()) for image in source.take(some)] == some.tolist()
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda start: source.take(range(start, 1500, 300)), range(30)))
        assert [[int(image.max()) for image in each] for each in taken] == [[*range(i, 1500, 300)] for i in range(30)]


def test_rows_that_were_lost_in_writing(fresh, monkeypatch):
    path = fresh(".duckdb")
    monkeypatch.setattr(duckdb_format._Counted, "__iter__", lambda tables: iter(tables._tables))
    for compression in DUCKDB.compressions:
        with pytest.raises(WriteError, match="4 of 0 rows"):
            write_images(images_of(MANY[:4]), path, compression=compression)
        assert not path.exists()


@pytest.fixture
def keyed(fresh):
    """Forty images, their numbers beside them, as this package writes them."""
    path, images = fresh(".duckdb"), images_of(MANY)
    write_images(images, path, columns={"n": range(40)})
    return path, images


def check(path, images, numbers, columns=("n",)):
    source = open_images(path)
    assert source.columns.column_names == list(columns)
    assert source.columns["n"].to_pylist() == numbers
    wanted = [images[number] for number in numbers]
    assert all_same(scanned(source), wanted)
    order = [len(numbers) - 1, 0, 3, 3, -2]
    assert all_same(source.take(order), [wanted[index] for index in order])
    assert all_same([source.read(index) for index in range(len(numbers))], wanted)
    return source


def test_rows_that_were_deleted(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"DELETE FROM {KEYED} WHERE n IN (0, 7, 8, 39)")
    assert check(path, images, [number for number in range(40) if number not in (0, 7, 8, 39)])._keyed


def test_keys_in_another_order(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"UPDATE {KEYED} SET {KEY} = 7 * (100 - {KEY})")
        numbers = [number for (number,) in connection.sql(f"SELECT n FROM {KEYED} ORDER BY rowid").fetchall()]
    assert check(path, images, numbers)._keyed


def test_rows_without_a_key(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"INSERT INTO {KEYED} BY NAME SELECT * FROM images WHERE n IN (5, 6)")
    source = check(path, images, [*range(40), 5, 6])
    assert not source._keyed


def test_the_key_without_its_index_is_a_column(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"DROP INDEX {KEY}")
    source = check(path, images, list(range(40)), ["n", KEY])
    assert source.columns[KEY].to_pylist() == list(range(40))
    assert not source._keyed


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (None, "n * 2"),
        (None, "'row ' || n"),
        (f"CREATE INDEX {KEY} ON pictures ({KEY})", "n * 2"),
        (f"CREATE UNIQUE INDEX {KEY} ON pictures (n)", "n * 2"),
        (f"CREATE UNIQUE INDEX {KEY} ON pictures (n, {KEY})", "NULL"),
        (f"CREATE UNIQUE INDEX {KEY} ON pictures (n, {KEY})", "n * 2"),
        (f"CREATE UNIQUE INDEX another ON pictures ({KEY})", "n * 2"),
        (f"CREATE UNIQUE INDEX another ON pictures ({KEY})", "'row ' || n"),
        (f"CREATE TABLE more AS SELECT n AS {KEY} FROM pictures; CREATE UNIQUE INDEX {KEY} ON more ({KEY})", "n * 2"),
    ],
)
def test_a_foreign_column_of_the_keys_name(fresh, keyed, index, value):
    images, path = keyed[1], fresh(".duckdb")
    with database(path) as connection:
        connection.execute(f"ATTACH '{keyed[0]}' AS ours (READ_ONLY)")
        connection.execute(f"CREATE TABLE pictures AS SELECT *, {value} AS {KEY} FROM ours.images")
        connection.execute("DETACH ours")
        connection.execute(index or "SELECT 1")
    source = check(path, images, list(range(40)), ["n", KEY])
    assert not source._keyed


def test_a_column_of_the_keys_name_is_refused_where_rows_have_keys(fresh):
    images = images_of(MANY)
    with pytest.raises(MetadataError, match=f"(?i){KEY}"):
        write_images(images, fresh(".duckdb"), columns={KEY.upper(): range(40)})
    write_images(images, fresh(".duck.parquet"), columns={KEY: range(40)})


def test_a_second_table_called_images(keyed):
    path, images = keyed
    with database(path) as connection:
        connection.execute(f"CREATE SCHEMA other; CREATE TABLE other.another AS FROM {KEYED}")
    check(path, images, list(range(40))).close()
    with database(path) as connection:
        connection.execute("CREATE TABLE other.images AS FROM other.another")
    with pytest.raises(ColumnError, match="one table of images is needed"):
        open_images(path)


def test_an_index_that_is_cut_off(keyed):
    path, _ = keyed
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FormatError, match=path.name):
        open_images(path)


def test_zstd_is_smaller_and_has_no_key(fresh):
    images = [np.zeros((100, 100), "uint16")] * 50
    paths = {compression: fresh(".duckdb") for compression in DUCKDB.compressions}
    for compression, path in paths.items():
        write_images(np.add(images, np.arange(10000, dtype="uint16").reshape(100, 100)), path, compression=compression)
    assert paths["zstd"].stat().st_size < paths["none"].stat().st_size / 1.5
    assert not open_images(paths["zstd"])._keyed
    with database(paths["zstd"]) as connection:
        assert connection.sql("SHOW TABLES").fetchall() == [("images",)]


@contextmanager
def only(fast):
    """Let nothing but chunk files be read, or nothing but zarr read."""
    with pytest.MonkeyPatch.context() as patch:
        if fast:
            patch.setattr(zarr, "open_array", None)
            patch.setattr(zarr, "open", None)
        else:
            patch.setattr(_zarr_chunks, "parse", lambda _: None)
        yield


@pytest.mark.parametrize("fast", [True, False])
@quick
@given(
    images=collections(4),
    compression=st.sampled_from(ZARR.compressions),
    side=st.sampled_from([1, 3, 1024]),
)
def test_zarr_arrays(fresh, fast, images, compression, side):
    path = fresh(".zarr")
    with changed(_zarr_chunks, "_CHUNK_SIDE", side):
        write_images(images, path, axes="TCZYX", compression=compression)
    members = sorted(path.glob("*.ome.zarr"))
    assert all_same([zarr.open_array(member / "0", mode="r")[...] for member in members], images)
    source = open_images(path)
    with only(fast):
        assert all_same(source.take(range(len(images))), images)
        cache = PixelCache.load(source)
        assert all_same([cache[index] for index in range(len(images))], images)
    (path / "columns.parquet").unlink()  # a folder like another tool's
    source = open_images(path)
    with only(fast):
        assert all_same(source.take(range(len(images))), images)


COMPRESSORS = {
    2: [
        None,
        numcodecs.Zstd(3),
        numcodecs.GZip(1),
        *(numcodecs.Blosc(name, 5, shuffle) for name in ("lz4", "zstd", "blosclz", "zlib") for shuffle in (0, 1, 2)),
    ],
    3: [
        None,
        ZstdCodec(checksum=True),
        GzipCodec(),
        *(BloscCodec(cname=name, shuffle=shuffle) for name in ("lz4", "zstd") for shuffle in ("shuffle", "bitshuffle")),
    ],
}


@st.composite
def foreign(draw):
    """Arguments of `zarr.create_array` for an array that may or may not be plain, and its pixels."""
    zarr_format = draw(st.sampled_from([2, 3]))
    shape = draw(st.tuples(*[st.integers(1, 2)] * 3, *[st.integers(1, 9)] * 2))
    dtype = draw(st.sampled_from([*DTYPES, np.dtype(">u2"), np.dtype(">f4")]))
    options = {
        "zarr_format": zarr_format,
        "shape": shape,
        "dtype": dtype,
        "chunks": draw(st.one_of(st.just(shape), st.tuples(*[st.integers(1, 10)] * 5))),
        "compressors": draw(st.sampled_from(COMPRESSORS[zarr_format])),
        "fill_value": draw(st.sampled_from([0, 7])),
        "chunk_key_encoding": {
            "name": "default" if zarr_format == 3 else "v2",
            "separator": draw(st.sampled_from("/.")),
        },
    }
    odd = draw(st.sampled_from(["no", "no", "no", "order", "shards", "serializer", "checksum"]))
    if odd == "order" and zarr_format == 2:
        options["order"] = "F"
    if odd == "order" and zarr_format == 3:
        options["filters"] = [TransposeCodec(order=(0, 1, 2, 4, 3))]
    if odd == "shards" and zarr_format == 3:
        options["shards"] = tuple(2 * length for length in options["chunks"])
    if odd == "serializer" and zarr_format == 3:
        options["serializer"] = BytesCodec(endian="big")
    if odd == "checksum" and zarr_format == 3:
        options["compressors"] = [*filter(None, [options["compressors"]]), Crc32cCodec()]
    written = draw(st.sampled_from(["all", "all", "some", "none"]))
    return options, image_of(shape, dtype.newbyteorder("=")).astype(dtype), written


@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore")
@given(case=foreign(), grouped=st.booleans(), consolidated=st.booleans())
def test_zarr_arrays_of_others(fresh, case, grouped, consolidated):
    options, pixels, written = case
    folder = fresh("")
    path = folder / "image.zarr"
    where = path / "level" / "0" if grouped else path
    if grouped:
        multiscale = {"axes": [{"name": name} for name in "tczyx"], "datasets": [{"path": "level/0"}]}
        v3 = options["zarr_format"] == 3
        attributes = {"ome": {"version": "0.5", "multiscales": [multiscale]}} if v3 else {"multiscales": [multiscale]}
        zarr.create_group(path, zarr_format=options["zarr_format"], attributes=attributes)
        zarr.create_group(path / "level", zarr_format=options["zarr_format"])
    array = zarr.create_array(where, **options)
    if written != "none":
        part = (slice(None),) * 4 + (slice(0, 1 if written == "some" else None),)
        array[part] = pixels[part]
    if grouped and consolidated:
        zarr.consolidate_metadata(path)
    wanted = zarr.open_array(where, mode="r")[...].astype(pixels.dtype.newbyteorder("="))
    source = open_images(folder)
    assert same(source.read(0), wanted)
    with only(fast=False):
        assert same(open_images(folder).read(0), wanted)


def test_plain_arrays_of_others_are_read_without_zarr(fresh, monkeypatch):
    images = images_of([((2, 3, 4, 9, 8), "uint16")] * 3)
    for zarr_format, version in ((2, "0.4"), (3, "0.5")):
        folder = fresh("")
        for number, image in enumerate(images):
            multiscale = {
                "version": version,
                "axes": [{"name": name} for name in "tczyx"],
                "datasets": [{"path": "s0"}],
            }
            given_to = {"multiscales": [multiscale]}
            attributes = given_to if version == "0.4" else {"ome": {"version": version, **given_to}}
            group = zarr.create_group(folder / f"{number}.zarr", zarr_format=zarr_format, attributes=attributes)
            group.create_array("s0", data=image, chunks=(1, 2, 3, 4, 5))
        source = open_images(folder)
        with only(fast=True):
            assert all_same(source.take([2, 0, 1]), [images[2], images[0], images[1]])
            assert all_same(scanned(source), images)


@pytest.mark.filterwarnings("ignore")
def test_a_node_of_both_zarr_formats(fresh):
    folder, images = fresh(""), images_of([((4, 5), "uint16")] * 2)
    for zarr_format, image in zip((2, 3), images, strict=True):
        array = zarr.create_array(fresh(""), data=image, zarr_format=zarr_format)
        shutil.copytree(array.store.root, folder / "image.zarr", dirs_exist_ok=True)
    assert same(open_images(folder).read(0)[0, 0, 0], zarr.open_array(folder / "image.zarr", mode="r")[...])


@st.composite
def meddled(draw):
    """A description of a Zarr 2 or 3 array with one field of it left out, or changed for another's value."""
    zarr_format = draw(st.sampled_from([2, 3]))
    fields = [
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "codecs",
        "node_type",
        "zarr_format",
        "fill_value",
    ]
    if zarr_format == 2:
        fields = ["shape", "dtype", "chunks", "order", "filters", "compressor", "dimension_separator", "zarr_format"]
    values = [
        None,
        0,
        1,
        2,
        3,
        "uint8",
        "<u2",
        "|u1",
        "F",
        "/",
        ".",
        [],
        {},
        [4, 6],
        [2, 3],
        [24],
        [4.0, 6],
        [-4, 6],
        "array",
    ]
    values += [
        [{"name": "bytes"}],
        [{"name": "zstd"}],
        {"id": "zlib", "level": 1},
        {"name": "regular"},
        [0, 6],
        [2**40, 2**40],
    ]
    values += [
        [{"name": "bytes", "configuration": {"endian": "big"}}],
        {"name": "v2", "configuration": {"separator": "."}},
    ]
    return zarr_format, draw(st.sampled_from([*fields, "new"])), draw(st.sampled_from(["left out", *values]))


@settings(max_examples=100, deadline=None)
@pytest.mark.filterwarnings("ignore")
@given(meddled())
def test_a_layout_is_what_zarr_makes_of_a_description(fresh, meddling):
    zarr_format, field, value = meddling
    path = fresh("")
    image = image_of((4, 6))
    zarr.create_array(path, data=image, chunks=(2, 3), zarr_format=zarr_format, compressors=None)
    file = path / ("zarr.json" if zarr_format == 3 else ".zarray")
    description = json.loads(file.read_text())
    description[field] = value
    if value == "left out":
        del description[field]
    file.write_text(json.dumps(description))
    layout = _zarr_chunks.parse(file.read_bytes())
    try:
        wanted = zarr.open_array(path, mode="r")
    except (KeyError, TypeError, ValueError):  # it is stricter with what does not matter here
        return
    if layout is not None:
        assert layout.shape == wanted.shape
        assert layout.dtype == wanted.dtype
        try:
            found = _zarr_chunks.read(_zarr_chunks.Found(str(path), layout, None))
        except ValueError as error:  # of chunks that hold more or less than the description says
            assert "holds 12 bytes, expected" in str(error)  # noqa: PT017
            return
        assert found is None or np.array_equal(found, wanted[...])


@pytest.mark.parametrize(
    "said", ["", "{", "[]", "3", "null", '"zarr_format"', '{"zarr_format": 3}', '{"zarr_format": 2}']
)
def test_what_describes_nothing(said):
    assert _zarr_chunks.parse(said.encode()) is None


def stored_zarr(fresh, images, **options):
    path = fresh(".zarr")
    write_images(images, path, axes="TCZYX", **options)
    return path, sorted(path.glob("*.ome.zarr"))[3] / "0"


REWRITTEN = [
    {"compressors": None},
    {"chunks": (1, 1, 1, 3, 2)},
    {"chunks": (1, 1, 2, 4, 5)},
    {"compressors": ZstdCodec(level=9)},
    {"compressors": GzipCodec()},
    {"shards": (1, 2, 1, 4, 5), "chunks": (1, 1, 1, 4, 5)},
    {"serializer": BytesCodec(endian="big")},
    {"filters": [TransposeCodec(order=(0, 1, 2, 4, 3))]},
    {"zarr_format": 3, "chunk_key_encoding": {"name": "default", "separator": "/"}},
]


@pytest.mark.parametrize("options", REWRITTEN, ids=str)
@pytest.mark.parametrize("touched", [False, True])
def test_a_member_rewritten_after_opening(fresh, options, touched):
    images = images_of(MANY)
    path, array = stored_zarr(fresh, images)
    source = open_images(path)
    if touched:
        assert same(source.read(3), images[3])
    shutil.rmtree(array)
    zarr.create_array(array, data=images[7], **options)
    assert same(source.read(3), images[7])
    assert same(source.read(4), images[4])
    assert same(PixelCache.load(source)[3], images[7])


@pytest.mark.parametrize("other", ["int16", "uint32", "float32"])
def test_a_member_of_another_dtype_or_shape_after_opening(fresh, other):
    images = images_of(MANY)
    path, array = stored_zarr(fresh, images)
    source = open_images(path)
    assert same(source.read(3), images[3])
    description = (array / "zarr.json").read_text()
    for changed_to in (description.replace('"uint16"', f'"{other}"'), description.replace("5\n", "4\n")):
        assert changed_to != description
        (array / "zarr.json").write_text(changed_to)
        for read in (lambda: source.read(3), lambda: source.take([2, 3]), lambda: PixelCache.load(source)):
            with pytest.raises(FormatError, match=array.parent.name):
                read()


@pytest.mark.parametrize("compression", ZARR.compressions)
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "one byte", "removed", "another's", "a folder", "header"])
def test_a_damaged_chunk(fresh, compression, damage):
    images = images_of([((1, 1, 1, 20, 30), "uint16")] * 5)
    path, array = stored_zarr(fresh, images, compression=compression)
    source = open_images(path)
    file = array / "c.0.0.0.0.0"
    data = file.read_bytes()
    changes = {
        "cut": data[:-1],
        "longer": data + b"\0",
        "empty": b"",
        "one byte": data[:1],
        "header": b"\xff" * 15 + data[15:],
    }
    file.unlink()
    if damage in changes:
        file.write_bytes(changes[damage])
    if damage == "a folder":
        file.mkdir()
    if damage == "another's":
        another = fresh(".zarr")
        write_images(images_of([((1, 1, 1, 20, 31), "uint16")]), another, axes="TCZYX", compression=compression)
        shutil.copy(next(another.glob("*.ome.zarr")) / "0/c.0.0.0.0.0", file)
    if damage == "header" and compression == "none":
        assert source.read(3).shape == (1, 1, 1, 20, 30)  # any bytes are pixels
        return
    for read in (lambda: source.read(3), lambda: source.take([2, 3]), lambda: PixelCache.load(source)):
        with pytest.raises(FormatError, match=array.parent.name):
            read()


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_changed_bytes_never_crash_the_decoder(fresh, compression):
    images = images_of([((1, 1, 1, 20, 30), "uint16")] * 5)
    path, array = stored_zarr(fresh, images, compression=compression)
    source = open_images(path)
    file = array / "c.0.0.0.0.0"
    data, random = file.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(data)
        for place in random.integers(0, len(data), 2):
            broken[place] = random.integers(0, 256)
        file.write_bytes(broken)
        try:
            assert source.read(3).shape == (1, 1, 1, 20, 30)
        except FormatError as error:
            assert array.parent.name in str(error)  # noqa: PT017


@pytest.mark.parametrize("level", ["../other.zarr/0", "/other.zarr/0", "0/../0"])
def test_a_level_outside_its_group(fresh, level):
    folder, image = fresh(""), image_of((4, 5))
    for name, path in (("image.zarr", level), ("other.zarr", "0")):
        multiscale = {"axes": [{"name": "y"}, {"name": "x"}], "datasets": [{"path": path}]}
        attributes = {"ome": {"version": "0.5", "multiscales": [multiscale]}}
        zarr.create_group(folder / name, attributes=attributes).create_array("0", data=image)
    with pytest.raises(FormatError, match=r"image\.zarr"):
        open_images(folder)
