"""OME-Zarr: chunk files read without zarr; the oracle is zarr."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, FormatError, OMEArrowDataset, convert, open_images, write_images
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.storage.describe import describe
from tests.conftest import needs
from tests.support.plates import written_plate
from tests.support.sources import check, scanned, windows_are_cut
from tests.support.strategies import DTYPES, all_same, collections, image_of, images_of, same

needs("ome_zarr")

import numcodecs  # noqa: E402
import zarr  # noqa: E402
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec  # noqa: E402

from omearrow_ds.storage.extents import ExtentReader  # noqa: E402
from omearrow_ds.storage.formats import _zarr_chunks, get_format  # noqa: E402
from omearrow_ds.storage.formats._file_set import FileSet  # noqa: E402
from omearrow_ds.storage.formats._zarr_chunks import chunk_files  # noqa: E402
from tests.support.errors import raises  # noqa: E402

ZARR = get_format("ome_zarr")
quick = settings(max_examples=6, deadline=None)
MANY = [((1, 2, 1, 4, 5), "uint16")] * 40


@contextmanager
def changed(owner, name, value):
    """Patch an attribute within a block; pytest's fixture would last for a whole hypothesis test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextmanager
def only(fast):
    """Restrict reading to chunk files, or to zarr."""
    with pytest.MonkeyPatch.context() as patch:
        if fast:
            patch.setattr(zarr, "open_array", None)
            patch.setattr(zarr, "open", None)
        else:
            patch.setattr(_zarr_chunks, "parse", lambda *_: None)
        yield


@pytest.mark.parametrize("fast", [True, False])
@quick
@given(
    images=collections(4),
    compression=st.sampled_from(ZARR.writer.compressions),
    chunk=st.sampled_from([None, (1, 1), (3, 2), (5, 1024)]),
)
def test_zarr_arrays(fresh, fast, images, compression, chunk):
    path = fresh(".zarr")
    write_images(images, path, axes="TCZYX", compression=compression, chunk_shape=chunk)
    members = sorted(path.glob("*.ome.zarr"))
    assert all_same([zarr.open_array(member / "0", mode="r")[...] for member in members], images)
    source = open_images(path)
    with only(fast):
        assert all_same(source.take(range(len(images))), images)
        cache = PixelCache.load(source.images)
        assert all_same([cache[index] for index in range(len(images))], images)
        assert windows_are_cut(source, images)
    (path / "columns.parquet").unlink()  # A folder as another tool writes it.
    source = open_images(path)
    with only(fast):
        assert all_same(source.take(range(len(images))), images)
        assert windows_are_cut(source, images)


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
    """Draw arguments of `zarr.create_array` and pixels; the array may need zarr to be read."""
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
    array_path = path / "level" / "0" if grouped else path
    if grouped:
        multiscale = {"axes": [{"name": name} for name in "tczyx"], "datasets": [{"path": "level/0"}]}
        v3 = options["zarr_format"] == 3
        attributes = {"ome": {"version": "0.5", "multiscales": [multiscale]}} if v3 else {"multiscales": [multiscale]}
        zarr.create_group(path, zarr_format=options["zarr_format"], attributes=attributes)
        zarr.create_group(path / "level", zarr_format=options["zarr_format"])
    array = zarr.create_array(array_path, **options)
    if written != "none":
        part = (slice(None),) * 4 + (slice(0, 1 if written == "some" else None),)
        array[part] = pixels[part]
    if grouped and consolidated:
        zarr.consolidate_metadata(path)
    expected = zarr.open_array(array_path, mode="r")[...].astype(pixels.dtype.newbyteorder("="))
    source = open_images(folder)
    assert same(source.read(0), expected)
    assert windows_are_cut(source, [expected])
    with only(fast=False):
        assert same(open_images(folder).read(0), expected)
        assert windows_are_cut(open_images(folder), [expected])


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


@pytest.mark.parametrize("compressor", [None, ZstdCodec(), BloscCodec(cname="lz4")], ids=["none", "zstd", "blosc"])
def test_shards_are_read_without_zarr(fresh, compressor):
    path, image = fresh("") / "image.zarr", image_of((2, 3, 1, 25, 31))
    options = {"chunks": (1, 1, 1, 5, 4), "shards": (1, 2, 1, 15, 8), "compressors": compressor}
    zarr.create_array(path, data=image, **options)
    source = open_images(path)
    with only(fast=True):
        assert same(source.read(0), image)
        assert windows_are_cut(source, [image])


def test_shard_with_a_damaged_index_is_an_error(fresh):
    path, image = fresh("") / "image.zarr", image_of((20, 30))
    zarr.create_array(path, data=image, chunks=(5, 5), shards=(10, 10), compressors=None)
    source, shard = open_images(path), path / "c/1/2"
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    for damage in (bytes(data), bytes(data[:-1]), b""):
        shard.write_bytes(damage)
        for read in (lambda: source.read(0), lambda: source.read(0, (11, 13, 21, 22))):
            with raises(FormatError, path=shard):
                read()
        assert same(source.read(0, (0, 10, 0, 30))[0, 0, 0], image[:10])


@pytest.mark.filterwarnings("ignore")
def test_a_node_of_both_zarr_formats(fresh):
    folder, images = fresh(""), images_of([((4, 5), "uint16")] * 2)
    for zarr_format, image in zip((2, 3), images, strict=True):
        array = zarr.create_array(fresh(""), data=image, zarr_format=zarr_format)
        shutil.copytree(array.store.root, folder / "image.zarr", dirs_exist_ok=True)
    assert same(open_images(folder).read(0)[0, 0, 0], zarr.open_array(folder / "image.zarr", mode="r")[...])


@st.composite
def meddled(draw):
    """Draw metadata of a Zarr 2 or 3 array with a field missing or replaced."""
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
    array = _zarr_chunks.parse(file.read_bytes())
    try:
        expected = zarr.open_array(path, mode="r")
    except (KeyError, TypeError, ValueError):  # zarr rejects metadata that this reader does not use.
        return
    if array is not None:
        assert array.shape == (1, 1, 1, *expected.shape)
        assert array.layout.dtype == expected.dtype
        chunks = chunk_files(array, str(path), FileSet(), can_miss_chunks=True)
        try:
            (pixels,) = ExtentReader((FileNotFoundError,)).read(lambda _: chunks, [0], [[0] * 5 + [*array.shape]])
        except FormatError as error:  # The size of a chunk contradicts the metadata.
            assert "12 bytes" in str(error)  # noqa: PT017
            return
        assert pixels is None or np.array_equal(pixels[0, 0, 0], expected[...])


def test_names_of_chunks_are_shared_if_only_attributes_differ(fresh):
    arrays = []
    for number in range(2):
        path = fresh("")
        zarr.create_array(path, data=image_of((4, 6)), chunks=(2, 3), attributes={"number": number})
        arrays.append(_zarr_chunks.parse((path / "zarr.json").read_bytes()))
    assert arrays[0].names == ["c/0/0", "c/0/1", "c/1/0", "c/1/1"]
    assert arrays[1].names is arrays[0].names


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
@pytest.mark.share(2, "options", "touched")
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
    assert same(PixelCache.load(source.images)[3], images[7])


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
        for read in (lambda: source.read(3), lambda: source.take([2, 3]), lambda: PixelCache.load(source.images)):
            with raises(FormatError, path=array.parent, remedy=False):
                read()


@pytest.mark.parametrize("compression", ZARR.writer.compressions)
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "one byte", "removed", "another's", "a folder", "header"])
@pytest.mark.share(3, "compression", "damage")
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
        assert source.read(3).shape == (1, 1, 1, 20, 30)  # Uncompressed pixels have no invalid bytes.
        return
    reads = (lambda: source.read(3), lambda: source.take([2, 3]), lambda: PixelCache.load(source.images))
    for read in (*reads, lambda: source.read(3, (0, 1, 2, 3))):
        with raises(FormatError, path=array.parent, remedy=False):
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
        for offset in random.integers(0, len(data), 2):
            broken[offset] = random.integers(0, 256)
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
    with raises(FormatError, path=folder / "image.zarr", remedy=False):
        open_images(folder)


def test_a_zarr_array_stored_in_another_way_is_left_to_zarr(stored):
    images = images_of(MANY)
    path = stored("ome_zarr", images)
    folder = sorted(path.glob("*.ome.zarr"))[3]
    array = zarr.create_array(folder / "0", data=images[3], chunks=(1, 1, 1, 4, 4), compressors=None, overwrite=True)
    assert array.nchunks > 1
    assert all_same(open_images(path).take(range(len(images))), images)


WELLS = {"A/1": (0, 1), "B/12": (2, 3), "B/2": (4,)}


@pytest.fixture(params=["0.4", "0.5"])
def plate(request, tmp_path):
    """A plate of five fields in three wells, each with labels, and its images."""
    images = images_of([((1, 2, 1, 15, 20), "uint16")] * 5)
    wells = {well: [images[number] for number in numbers] for well, numbers in WELLS.items()}
    return written_plate(tmp_path / "p1.zarr", wells, request.param, labels=["cells", "nuclei"]), images


def test_a_plate_is_its_fields_with_plate_well_and_site(plate, tmp_path):
    path, images = plate
    source = open_images(path)
    assert source.format.name == "ome_zarr"
    assert list(source.image_ids) == ["A/1/0", "A/1/1", "B/2/0", "B/12/0", "B/12/1"]
    order = [images[number] for number in (0, 1, 4, 2, 3)]
    check(source, order, [4, 0, 2, 2])
    assert source.columns.to_pydict() == {
        "Metadata_Plate": ["p1"] * 5,
        "Metadata_Well": ["A01", "A01", "B02", "B12", "B12"],
        "Metadata_Site": [1, 2, 1, 1, 2],
        "Metadata_Field": ["0", "1", "0", "0", "1"],
    }
    assert all_same(pickle.loads(pickle.dumps(source)).take([3, 1]), [order[3], order[1]])
    assert describe(path).labels == ["cells", "nuclei"]
    convert(path, tmp_path / "copy.parquet")
    copy = open_images(tmp_path / "copy.parquet")
    assert copy.columns.equals(source.columns)
    assert all_same(copy.take(range(5)), order)
    dataset = OMEArrowDataset(path, preload=False, axes="CYX", target="Metadata_Site", normalize=False)
    assert same(dataset[3][0].numpy(), order[3][0, :, 0])


def test_a_level_of_a_plate(plate, tmp_path):
    path, images = plate
    source = open_images(path, level=1)
    order = [images[number][..., ::2, ::2] for number in (0, 1, 4, 2, 3)]
    check(source, order, [4, 0, 2, 2])
    assert all_same(pickle.loads(pickle.dumps(source)).take([3, 1]), [order[3], order[1]])
    assert [open_images(path, level=level).metadata(2)["physical_size_x"] for level in (0, 1)] == [0.5, 1.0]
    assert same(OMEArrowDataset(path, level=1, normalize=False)[1].numpy(), order[1][0, :, 0])
    with raises(ArgumentError, option="level", path=path, mentions=("level=2", "2 levels", 0), remedy=False):
        open_images(path, level=2)
    convert(path, tmp_path / "half.zarr", level=1)
    assert all_same(open_images(tmp_path / "half.zarr").take(range(5)), order)
    with raises(
        ArgumentError, option="level", path=tmp_path / "half.zarr", mentions=("level=1", "level 0"), remedy=False
    ):
        open_images(tmp_path / "half.zarr", level=1)


def test_levels_have_pixels_of_their_own_in_a_cache(tmp_path):
    """Levels of equal shape (planes of one column) must not share cache entries."""
    images = images_of([((1, 1, 1, 1, 1), "uint16")] * 2)
    path = written_plate(tmp_path / "p.zarr", {"A/1": images})
    for field, image in enumerate(images):
        zarr.open_array(path / "A" / "1" / str(field) / "1")[...] = image + 1
    for _ in range(2):
        for level in (0, 1):
            dataset = OMEArrowDataset(path, level=level, normalize=False, cache_dir=tmp_path / "cache")
            assert [int(dataset[index]) for index in range(2)] == [int(image.item()) + level for image in images]
    assert len(list((tmp_path / "cache").glob("*.pixels"))) == 2


def test_levels_that_cannot_be(tmp_path, stored):
    for level in (-1, 1.0, "0", True):
        with raises(ArgumentError, option="level", remedy=False):
            open_images(tmp_path, "ome_zarr", level=level)
    path = stored("arrow", images_of([((1, 1, 1, 3, 4), "uint8")]))
    with raises(ArgumentError, option="level", mentions="Arrow IPC"):
        open_images(path, level=1)
    zarr.create_array(tmp_path / "bare.zarr", data=np.zeros((3, 4), np.uint8))
    with raises(ArgumentError, option="level", path=tmp_path / "bare.zarr", remedy=False):
        open_images(tmp_path / "bare.zarr", level=1)


@pytest.mark.parametrize("name", ["2024.03.01_p1.zarr", "2024.03.01_p1.ome.zarr", "2024.03.01_p1"])
def test_a_plate_without_a_name_is_called_as_its_folder(tmp_path, name):
    path = written_plate(tmp_path / name, {"A/1": images_of([((1, 1, 1, 3, 4), "uint8")])})
    assert open_images(path).columns["Metadata_Plate"].to_pylist() == ["2024.03.01_p1"]


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_a_plate_without_fields(tmp_path, version):
    """iohub writes such plates: wells get fields when the first one is written."""
    path = written_plate(tmp_path / "p.zarr", {"A/1": []}, version)
    with raises(FormatError, path=path, remedy=False):
        open_images(path)
    zarr.open_group(path / "A" / "1", mode="a").attrs.clear()
    with raises(FormatError, path=path, mentions="'A/1'"):
        open_images(path)


def test_a_plate_that_misses_a_well_or_a_field(plate):
    path, _ = plate
    shutil.rmtree(path / "B" / "12" / "1")
    with raises(FormatError, path=path, mentions=("'B/12'", "'B/12/1'")):
        open_images(path)
    shutil.rmtree(path / "B" / "12")
    with raises(FormatError, path=path, mentions="'B/12'"):
        open_images(path)
    shutil.copytree(path / "A", path.parent / "elsewhere")
    shutil.rmtree(path / "A")
    (path / "A").symlink_to(path.parent / "elsewhere")
    with raises(FormatError, path=path / "A", mentions="symbolic link"):
        open_images(path)


@pytest.mark.parametrize("well", ["../p1.zarr/A/1", "A/../../outside", "/etc", ""])
def test_a_plate_that_leads_elsewhere(tmp_path, well):
    path = written_plate(tmp_path / "p1.zarr", {"A/1": images_of([((1, 1, 1, 3, 4), "uint8")])})
    described = json.loads((path / "zarr.json").read_text())
    described["attributes"]["ome"]["plate"]["wells"][0]["path"] = well
    (path / "zarr.json").write_text(json.dumps(described))
    with raises(FormatError, path=path, remedy=False):
        open_images(path)
