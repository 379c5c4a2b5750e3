"""Checksums: a flipped bit is an error when preloading, and on every access with `verify=True`."""

from __future__ import annotations

import pickle
import shutil
import threading
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from omearrow_ds import (
    ArgumentError,
    ChecksumError,
    FormatError,
    MetadataError,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    convert,
    open_images,
)
from omearrow_ds.advise.profile.measure import part_preloaded, preloaded
from omearrow_ds.codec import schema
from omearrow_ds.storage.formats import _base
from omearrow_ds.storage.hashes import checksum_of
from omearrow_ds.storage.verified import VerifiedSource, decode
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import DTYPES, ENCODED_OR_LONG, NAMES, RAGGED, SUFFIX, images_of

SMALL = [((1, 2, 1, 12, 10), "uint16")] * 5
COLUMNS = {"well": ["A", "B", "C", "D", "E"]}
encoded = pytest.mark.parametrize(("name", "encoding"), ENCODED_OR_LONG)
formats = pytest.mark.parametrize("name", NAMES)


class Flipped(_base.ImagesWrapper):
    """A source with one flipped bit in one image, for every way to read pixels."""

    def __init__(self, source, damaged):
        super().__init__(source)
        self._damaged = damaged

    def __getattr__(self, name):
        return getattr(self.source, name)

    def __reduce__(self):
        return Flipped, (self.source, self._damaged)

    def _flip(self, index, image):
        image = np.array(image)
        if index == self._damaged:
            image.view(np.uint8).reshape(-1)[-1] ^= 1
        return image

    def read(self, rows, regions=None, out=None):
        if regions is not None:
            return _base.crop_images(self, rows, regions)
        return [self._flip(row, image) for row, image in zip(rows, self.source.read(rows), strict=True)]


@pytest.fixture
def flipped(monkeypatch):
    """Flip a bit in image 3 of sources that are opened from now on."""
    from omearrow_ds.storage import source

    get_format = source.get_format

    def with_flips(name):
        fmt = get_format(name)
        module = fmt.module()

        class Format:
            is_folder, label, name, kind = fmt.is_folder, fmt.label, fmt.name, fmt.kind
            engines, open_options = fmt.engines, ()

            def module(self):
                return self

            def open_collection(self, path, **options):
                return Flipped(module.open_collection(path, **options), 3)

        return Format()

    monkeypatch.setattr(source, "get_format", with_flips)


@encoded
@pytest.mark.parametrize("kinds", [SMALL, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.share(2, "name", "kinds")
def test_the_same_checksums_in_every_format_hidden_from_the_columns(stored, name, encoding, kinds):
    images = images_of(kinds)
    path = stored(name, images, encoding=encoding, columns=COLUMNS)
    expected = [
        f"xxh3-128:{xxhash.xxh3_128(f'{image.dtype.name} {image.shape}'.encode() + image.tobytes()).hexdigest()}"
        for image in images
    ]
    for verify in (False, True):
        with open_images(path, verify=verify) as source:
            assert source.columns.to_pydict() == COLUMNS
            assert source.images.header.columns.checksums.to_pylist() == expected
            assert all(np.array_equal(source.read(index - 5), images[index]) for index in range(5))
            taken = zip(source.take([4, 4, 0]), (images[4], images[4], images[0]), strict=True)
            assert all(np.array_equal(*pair) for pair in taken)
            scanned = [image for _, part in source.images.stream() for image in part]
            assert all(np.array_equal(*pair) for pair in zip(scanned, images, strict=True))
            assert source.metadata(0)["channels"] == []
    with pickle.loads(pickle.dumps(source)) as again:
        assert np.array_equal(again.read(2), images[2])
        assert repr(again).startswith("<verified <")


@formats
@pytest.mark.share(3, "name")
def test_without_columns_and_without_images(stored, name):
    with open_images(stored(name, images_of(SMALL)), verify=True) as source:
        assert (source.columns.num_columns, len(source.take(range(5)))) == (0, 5)
    if name not in ("tiff", "ome_zarr"):
        with open_images(stored(name, [], "none"), verify=True) as source:
            assert list(source.images.stream()) == []


@formats
@pytest.mark.share(2, "name")
def test_a_flipped_bit_is_an_error_on_every_way_to_the_pixels(stored, name, flipped, tmp_path):
    path = stored(name, images_of(SMALL))

    with open_images(path, name, verify=True) as source:
        for way in (
            lambda: source.read(3),
            lambda: source.read(-2),
            lambda: source.take([0, 3]),
            lambda: source.images.read([3])[0],
            lambda: source.images.read([1, 3]),
            lambda: list(source.images.stream()),
            lambda: decode(source.images, np.zeros((5, *SMALL[0][0]), np.uint16)),
            lambda: OMEArrowDataset(path, name),
            lambda: OMEArrowDatasetNumpy(path, name, preload="auto"),
            lambda: OMEArrowDataset(path, name, cache_dir=tmp_path / "cache"),
            lambda: preloaded(OMEArrowDataset(path, name, preload=False)),  # As if another's pixels were gone.
            lambda: OMEArrowDataset(path, name, verify=True),
            lambda: OMEArrowDataset(path, name, verify=True, preload=False)[3],
            lambda: OMEArrowDatasetNumpy(path, name, verify=True, preload=False).__getitems__([2, 3]),
        ):
            with raises(ChecksumError, path=path, mentions=("image 3", "'image-00003'")):
                way()
        assert source.images.mapped_stacks() is None
        assert np.array_equal(source.read(2), images_of(SMALL)[2])
    assert len(OMEArrowDataset(path, name, verify=False)) == 5
    assert OMEArrowDataset(path, name, preload=False)[3].shape == (2, 12, 10)  # On demand, verification is optional.


_FLIPS = 10


@formats
@pytest.mark.share(3, "name")
def test_bits_flipped_in_the_files_never_change_a_plain_dataset(stored, name):
    """Incompressible pixels make it likely that a flipped bit of the file is a pixel's."""
    images = [np.random.default_rng(index).integers(0, 2**16, (1, 2, 1, 40, 50), np.uint16) for index in range(4)]
    path = stored(name, images)
    random, refused, unseen = np.random.default_rng(5), 0, 0
    entries = [path / "chunks.parquet"] if name == "ome_arrow" else [path, *sorted(path.rglob("*"))]
    files = [file for file in entries if file.is_file() and file.stat().st_size > 4000]
    for _ in range(_FLIPS):
        file = files[random.integers(len(files))]
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[random.integers(len(whole) // 4, 3 * len(whole) // 4)] ^= 1 << int(random.integers(8))
        file.write_bytes(flipped)
        try:
            assert same_pixels(OMEArrowDatasetNumpy(path, name, axes="TCZYX", normalize=False), images)
        except FormatError as error:
            assert path.name in str(error)  # noqa: PT017  # no error is as good
            refused += 1
        with suppress(FormatError):
            unseen += not same_pixels(
                OMEArrowDatasetNumpy(path, name, axes="TCZYX", normalize=False, verify=False), images
            )
        file.write_bytes(whole)
    assert refused > _FLIPS / 2
    assert unseen > _FLIPS / 2 or name in ("duckdb", "ome_zarr"), "nothing was there to see"


def same_pixels(dataset, images):
    return all(np.array_equal(*pair) for pair in zip(dataset, images, strict=True))


@pytest.mark.parametrize("name", ["arrow", "parquet", "lance", "vortex", "tiff"])
def test_a_bit_flipped_in_the_file_while_it_is_open(stored, name):
    """Memory-mapped bytes may change after they were read once."""
    images = images_of(SMALL)
    path = stored(name, images, **({"encoding": "list"} if name == "vortex" else {}))
    dataset = OMEArrowDatasetNumpy(path, name, preload=False, verify=True, normalize=False, axes="TCZYX")
    assert np.array_equal(dataset[3], images[3])
    needle = images[3].tobytes()
    needle = needle if name in ("arrow", "tiff") else needle[:240]  # Other formats store chunks separately.
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        offset = file.read_bytes().find(needle) if file.is_file() else -1
        if offset >= 0:
            with file.open("r+b") as stream:
                stream.seek(offset + 100)
                stream.write(bytes([needle[100] ^ 4]))
            break
    else:
        pytest.fail("the pixels were not found")
    with raises(FormatError, path=path):
        dataset[3]


@formats
@pytest.mark.share(3, "name")
def test_verify_without_checksums(stored, name):
    path = stored(name, images_of(SMALL), checksum=False)
    assert open_images(path).images.header.columns.checksums is None
    assert len(OMEArrowDataset(path)) == len(OMEArrowDataset(path, verify=False)) == 5
    for opened in (lambda: open_images(path, verify=True), lambda: OMEArrowDataset(path, verify=True)):
        with raises(ArgumentError, path=path, mentions=("checksum=True", "verify=False")):
            opened()


@formats
@pytest.mark.share(3, "name")
def test_convert_carries_checksums_along_and_checks_them(stored, name, flipped, tmp_path):
    needs("arrow")
    images = images_of(SMALL)
    for first, second in ((name, "arrow"), ("arrow", name)):
        source = stored(first, images, f"from-{first}-{second}", overwrite=True)
        target = tmp_path / f"to-{first}-{second}{SUFFIX[second]}"
        convert(source, target, overwrite=True)
        with open_images(target, verify=True) as opened:
            assert opened.images.header.columns.checksums.to_pylist() == list(map(checksum_of, images))
        target = tmp_path / f"damaged-{first}-{second}{SUFFIX[second]}"
        for checksum in (False, True):
            with raises(ChecksumError, path=source), open_images(source, first) as opened:
                convert(opened, target, checksum=checksum)
            assert not target.exists()


@formats
@pytest.mark.share(3, "name")
def test_convert_adds_checksums(stored, name, tmp_path):
    images = images_of(RAGGED)
    target = tmp_path / f"with{SUFFIX[name]}"
    convert(stored(name, images, columns=COLUMNS, checksum=False), target)
    with open_images(target, verify=True) as source:
        assert source.images.header.columns.checksums.to_pylist() == list(map(checksum_of, images))
        assert source.columns.to_pydict() == COLUMNS
        convert(source, tmp_path / f"without{SUFFIX[name]}", checksum=False)
    with open_images(tmp_path / f"without{SUFFIX[name]}") as source:
        assert source.images.header.columns.checksums is None


def test_kept_pixels_are_checked_whoever_wrote_them(stored, tmp_path):
    path = stored("parquet", images_of(SMALL))
    options = {"preload": True, "cache_dir": tmp_path / "cache"}
    OMEArrowDataset(path, **options)
    assert len(OMEArrowDataset(path, verify=True, **options)) == 5
    (cache_file,) = (tmp_path / "cache").glob("*.pixels")
    with cache_file.open("r+b") as stream:
        stream.seek(500)
        stream.write(b"\xff\x00\xff")
    for verify in (None, True):
        with raises(ChecksumError, path=path, mentions=(options["cache_dir"], "image 1")):
            OMEArrowDataset(path, verify=verify, **options)
    assert len(OMEArrowDataset(path, verify=False, **options)) == 5


def test_checksums_that_are_gone_or_of_another_kind(stored, tmp_path):
    table = pq.read_table(stored("parquet", images_of(SMALL)))
    known = table[schema.CHECKSUM_COLUMN].to_pylist()
    changed, copy = tmp_path / "changed.parquet", tmp_path / "copy.arrow"
    for values, facts in (
        ([*known[:3], None, known[4]], "image 3"),
        ([*known[:4], "md5:00"], ("image 4", "'md5:00'")),
    ):
        pq.write_table(table.set_column(1, schema.CHECKSUM_COLUMN, pa.array(values, pa.string())), changed)
        with raises(FormatError, path=changed, mentions=facts):
            open_images(changed, verify=True)
        assert len(open_images(changed)) == len(OMEArrowDataset(changed, verify=False)) == 5
        if None not in values:
            with raises(FormatError, path=changed, mentions=facts):
                OMEArrowDataset(changed)
            continue
        assert len(OMEArrowDataset(changed)) == 5  # Rows that another program appended have no checksum.
        verified = pickle.loads(pickle.dumps(OMEArrowDataset(changed, preload=False)._collection.verified_source))
        assert np.array_equal(verified.read([3])[0], images_of(SMALL)[3])
        verified.close()
        convert(changed, copy)
        assert open_images(copy).images.header.columns.checksums.to_pylist() == known
        pq.write_table(table.set_column(1, schema.CHECKSUM_COLUMN, pa.array([*known[:3], None, known[3]])), changed)
        with raises(ChecksumError, path=changed, mentions="image 4"):
            OMEArrowDataset(changed)


@pytest.mark.parametrize("side", [20, 200])
def test_large_images_are_checked_beside_the_decoding(stored, tmp_path, monkeypatch, side):
    monkeypatch.setattr(_base, "_PIECE_BYTES", 1)  # One image per piece.
    check, checked, threads = VerifiedSource.check, [], threading.active_count()

    def noted(self, indices, *images):
        checked.append((*indices, threading.current_thread() is threading.main_thread()))
        check(self, indices, *images)

    monkeypatch.setattr(VerifiedSource, "check", noted)
    path = stored("parquet", images_of([((1, 1, 1, side, side), "uint16")] * 6))
    assert len(OMEArrowDataset(path)) == 6
    assert checked == [(index, side == 20) for index in range(6)]
    table = pq.read_table(path)
    known = table[schema.CHECKSUM_COLUMN].to_pylist()
    pq.write_table(
        table.set_column(1, schema.CHECKSUM_COLUMN, pa.array([*known[:2], *known[:4]])), tmp_path / "x.parquet"
    )
    with raises(ChecksumError, path=tmp_path / "x.parquet", mentions="image 2"):
        OMEArrowDataset(tmp_path / "x.parquet")
    assert threading.active_count() == threads


def test_rows_that_were_moved_together_with_their_checksums_are_right(stored, tmp_path):
    table = pq.read_table(stored("parquet", images_of(SMALL)))
    pq.write_table(table.take([3, 1]), tmp_path / "some.parquet")
    with open_images(tmp_path / "some.parquet", verify=True) as source:
        assert np.array_equal(source.read(0), images_of(SMALL)[3])


def test_the_part_that_is_preloaded_for_a_trial_is_verified_too(stored, flipped):
    dataset = OMEArrowDataset(stored("parquet", images_of(SMALL)), "parquet", preload=False)
    with raises(ChecksumError, mentions="image 3"):
        part_preloaded(dataset, 4)


def test_the_name_is_taken(stored):
    with raises(MetadataError, mentions="'omearrow_ds_checksum'", remedy=False):
        stored("arrow", images_of(SMALL), columns={schema.CHECKSUM_COLUMN: list("abcde")})


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: (
            st_numpy.arrays(dtype, st.tuples(*[st.integers(1, 5)] * 5), elements={"allow_nan": True})
            if dtype.kind == "f"
            else st_numpy.arrays(dtype, st.tuples(*[st.integers(1, 5)] * 5))
        )
    ),
    st.data(),
)
@settings(deadline=None)
def test_any_bit_shape_and_dtype_count(image, data):
    known = checksum_of(image)
    assert checksum_of(np.asfortranarray(image)) == checksum_of(image[:, ::-1][:, ::-1]) == known
    bit = data.draw(st.integers(0, 8 * image.nbytes - 1))
    other = image.copy()
    other.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum_of(other) != known
    assert image.shape[::-1] == image.shape or checksum_of(image.reshape(image.shape[::-1])) != known
    assert all(
        checksum_of(image.view(dtype)) != known
        for dtype in DTYPES
        if dtype.itemsize == image.itemsize != 0 and dtype != image.dtype
    )


def test_all_single_bits_of_an_image(stored):
    """All 19,200 bits of an image."""
    image = images_of(SMALL)[1]
    known, flat = checksum_of(image), image.reshape(-1).view(np.uint8)
    for bit in range(8 * image.nbytes):
        flat[bit // 8] ^= 1 << bit % 8
        assert checksum_of(image) != known
        flat[bit // 8] ^= 1 << bit % 8


def test_a_damaged_folder_member(stored):
    path = stored("ome_zarr", images_of(SMALL))
    first, second = sorted(path.glob("*.ome.zarr"))[:2]
    shutil.copy(next((second / "0").glob("c.*")), next((first / "0").glob("c.*")))
    open_images(path).read(0)
    with raises(ChecksumError, path=path, mentions="image 0"):
        open_images(path, verify=True).read(0)
