"""Files and tables at URLs, read by range requests or whole: pixels of the local files, and limits on requests."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tifffile

from omearrow_ds import (
    ArgumentError,
    FormatError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    Storage,
    StorageError,
    WriteError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.storage import byte_source, remote, urls
from omearrow_ds.storage.describe import describe
from omearrow_ds.storage.formats._base import stored_size
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.plates import written_plate
from tests.support.sources import check

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
BY_RANGES = ["parquet", "arrow"]
COMPRESSED_ARROW = [("arrow", {"compression": "zstd"}), ("arrow", {"compression": "lz4"})]
WELLS = ["A01", "A01", "B02", "B02", "C03", "C03"]
SITES = [1, 2] * 3


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served" / "lab").mkdir(parents=True)
    with serving(tmp_path / "served") as store:
        yield store


@pytest.fixture
def bucket(server):
    return server.folder / "lab"


@pytest.fixture
def opened(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return partial(open_images, storage=Storage(anonymous=True, endpoint=server.url, region="us-east-1"))


def plate(bucket, images, prefix="plate/Images", compression=None):
    """Write fields (C, Y, X) as one TIFF file per channel; return the columns of a table that lists them."""
    (bucket / prefix).mkdir(parents=True)
    names = {}
    for c, channel in enumerate(("OrigDNA", "OrigER")):
        names[channel] = [f"{well}_s{site} {channel}.tiff" for well, site in zip(WELLS, SITES, strict=True)]
        for name, image in zip(names[channel], images, strict=True):
            tifffile.imwrite(bucket / prefix / name, image[c], compression=compression)
    return names


def listing(path, names, **more):
    described = {"Metadata_Plate": "BR1", "Metadata_Well": WELLS, "Metadata_Site": SITES}
    pd.DataFrame(described | names | more).to_csv(path, index=False)
    return path


@pytest.fixture
def fields():
    return list(np.arange(6 * 2 * 90 * 100, dtype=np.uint16).reshape(6, 2, 90, 100))


def as_images(fields):
    return [field[None, :, None] for field in fields]


@pytest.mark.parametrize("how", ["URL_", "PathName_", "root"])
def test_load_data_lists_files_in_a_bucket(server, bucket, opened, tmp_path, fields, how):
    names = plate(bucket, fields, compression="zlib")
    folder_url = "s3://lab/plate/Images"
    if how == "URL_":
        columns = {f"URL_{channel}": [f"{folder_url}/{name}" for name in files] for channel, files in names.items()}
    else:
        columns = {f"FileName_{channel}": files for channel, files in names.items()}
        columns |= {f"PathName_{channel}": folder_url if how == "PathName_" else "/gone" for channel in names}
    path = listing(tmp_path / "load_data.csv", columns)
    root_option = {"root": folder_url} if how == "root" else {}
    with opened(path, **root_option) as source:
        assert sum(server.requests.values()) == 2  # The first file of each channel, for any number of fields.
        assert source.image_ids[2] == "BR1_B02_1"
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["OrigDNA", "OrigER"]
        server.requests.clear()
        np.testing.assert_array_equal(source.read(4), as_images(fields)[4])
        assert list(server.requests.values()) == [1, 1]
        check(source, as_images(fields), [5, 0, 0, -2])
        np.testing.assert_array_equal(
            source.read(3, (10, 20, 30, 50), "OrigER"), fields[3][None, 1:, None, 10:20, 30:50]
        )
        with pickle.loads(pickle.dumps(source)) as again:
            check(again, as_images(fields), [1])
    server.requests.clear()
    loaded = OMEArrowDataset(path, normalize=False, storage=opened.keywords["storage"], **root_option)
    np.testing.assert_array_equal(loaded[3].numpy(), fields[3])
    assert server.requests.pop("/lab/plate/Images/A01_s1 OrigDNA.tiff") == 2
    assert server.requests.pop("/lab/plate/Images/A01_s1 OrigER.tiff") == 2
    assert set(server.requests.values()) == {1}
    convert(path, tmp_path / "plate.arrow", storage=opened.keywords["storage"], **root_option)
    with open_images(tmp_path / "plate.arrow", verify=True) as copy:
        check(copy, as_images(fields), [5, 2])


def test_a_table_at_a_url_lists_files_beside_it(server, bucket, opened, fields):
    names = plate(bucket, fields)
    columns = {f"FileName_{channel}": files for channel, files in names.items()}
    listing(bucket / "plate/Images/load_data.csv.gz", columns)
    pd.DataFrame({"Metadata_Well": WELLS, "Metadata_Site": SITES, **columns}).to_parquet(
        bucket / "plate/Images/a.parquet"
    )
    for name in ("load_data.csv.gz", "a.parquet"):
        with opened(f"s3://lab/plate/Images/{name}") as source:
            check(source, as_images(fields), [5, 0])
    with open_images(f"{server.url}/lab/plate/Images/load_data.csv.gz") as source:  # From the host of the table.
        check(source, as_images(fields), [5, 0])


def test_files_that_are_odd_gone_or_changed_are_named(server, bucket, opened, tmp_path, fields):
    names = plate(bucket, fields)
    columns = {f"URL_{c}": [f"s3://lab/plate/Images/{name}" for name in files] for c, files in names.items()}
    path = listing(tmp_path / "load_data.csv", columns)
    source = opened(path)
    file = bucket / "plate/Images" / names["OrigER"][3]
    tifffile.imwrite(file, fields[3][1][:50])
    with raises(FormatError, path="s3://lab/plate/Images/B02_s2 OrigER.tiff", mentions="(1, 1, 1, 90, 100)"):
        source.read(3)
    file.write_bytes(file.read_bytes()[:300])
    with raises(FormatError, path="s3://lab/plate/Images/B02_s2 OrigER.tiff"):
        source.read(3)
    file.unlink()
    with raises(MissingPathError, path="s3://lab/plate/Images/B02_s2 OrigER.tiff"):
        source.take(range(6))
    np.testing.assert_array_equal(source.read(5), as_images(fields)[5])
    tifffile.imwrite(bucket / "plate/Images" / names["OrigDNA"][0], fields[1][0])  # Its header was read.
    with raises(FormatError, path="s3://lab/plate/Images/A01_s1 OrigDNA.tiff"):
        source.read(0)
    server.status = 403
    with raises(StorageError, option="storage", mentions=("anonymous", 403)):
        source.read(5)


def test_requests_that_fail_change_no_pixel(server, bucket, opened, tmp_path, fields):
    names = plate(bucket, fields)
    columns = {f"URL_{c}": [f"s3://lab/plate/Images/{name}" for name in files] for c, files in names.items()}
    server.faults = 0.3
    with opened(listing(tmp_path / "load_data.csv", columns)) as source:
        check(source, as_images(fields), [5, 0])
    assert len(server.failed) > 3


def test_a_table_sends_requests_to_no_host_that_the_user_did_not_name(server, bucket, opened, tmp_path, fields):
    names = plate(bucket, fields)
    columns = {f"URL_{c}": [f"{server.url}/lab/plate/Images/{name}" for name in files] for c, files in names.items()}
    path = listing(tmp_path / "load_data.csv", columns)
    with raises(FormatError, option="root", path=path, mentions=f"root='{server.url}'"):
        open_images(path)
    assert not server.requests
    with open_images(path, root=server.url) as source:
        check(source, as_images(fields), [5, 0])
    for name in ("/etc/a.tiff", "file:///etc/a.tiff", "../../a.tiff", "abfs://a@evil.example/a.tiff"):
        listing(bucket / "evil.csv", {"URL_OrigDNA": [name] * 6})
        with raises(FormatError, option="root", path="s3://lab/evil.csv"):
            opened("s3://lab/evil.csv")


def test_opening_raises_when_any_part_of_the_header_cannot_be_fetched(server, bucket, opened, monkeypatch):
    """tifffile may log and ignore errors while it reads."""
    tifffile.imwrite(bucket / "a.tif", np.zeros((3, 700, 500), np.uint16), tile=(32, 48), photometric="minisblack")
    read, reads, failing_read = byte_source.ObjectFile._read_into, [], [0]

    def read_or_fail(file, buffer):
        reads.append(1)
        if len(reads) == failing_read[0]:
            raise StorageError("s3://lab/a.tif: no byte came")
        return read(file, buffer)

    monkeypatch.setattr(byte_source.ObjectFile, "_read_into", read_or_fail)
    opened("s3://lab/a.tif")
    num_reads = len(reads)
    assert num_reads > 3
    for number in range(1, num_reads + 1):
        failing_read[0] = number
        reads.clear()
        with raises(StorageError, path="s3://lab/a.tif", remedy=False):
            opened("s3://lab/a.tif")


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("tile", [None, (32, 48)])
def test_a_window_of_a_tiff_file_fetches_what_it_meets(server, bucket, opened, compression, tile):
    image = np.random.default_rng(0).integers(0, 2**16, (3, 700, 500)).astype(np.uint16)
    tifffile.imwrite(bucket / "a.tif", image, compression=compression, tile=tile, photometric="minisblack")
    with opened("s3://lab/a.tif") as source:
        np.testing.assert_array_equal(source.read(0), image[None, None])
        whole_bytes = server.sent_bytes.total()
        window = source.read(0, (100, 140, 210, 260), z=[2])
        np.testing.assert_array_equal(window, image[None, None, 2:, 100:140, 210:260])
        if tile or not compression:
            assert server.sent_bytes.total() - whole_bytes < image[0].nbytes / 4


def test_a_folder_of_tiff_files_is_listed(server, bucket, opened, fields):
    images = as_images(fields)
    columns = {"label": list(range(6))}
    write_images(images, bucket / "a.tiffs", axes="TCZYX", columns=columns)
    plain = [image[..., : 20 + number, :] for number, image in enumerate(images)]
    (bucket / "plain").mkdir()
    for number, image in enumerate(plain):
        tifffile.imwrite(bucket / f"plain/{number}.tif", image[0, :, 0])
    as_z = [np.moveaxis(image, 1, 2) for image in plain]
    for path, expected in (("s3://lab/a.tiffs", images), ("s3://lab/plain", as_z), ("s3://lab/plain/*.tif", as_z)):
        with opened(path) as source:
            assert [tuple(shape) for shape in source.shapes.tolist()] == [image.shape for image in expected]
            check(source, expected, [5, 0, 3, 3])
            check(pickle.loads(pickle.dumps(source)), expected, [2])
    with opened("s3://lab/a.tiffs", verify=True) as source:
        assert source.columns["label"].to_pylist() == list(range(6))
        check(source, images, [5])
    loaded = OMEArrowDataset("s3://lab/a.tiffs", normalize=False, **opened.keywords)
    assert all(np.array_equal(loaded[number].numpy(), image[0, :, 0]) for number, image in enumerate(images))
    description = describe("s3://lab/a.tiffs", **opened.keywords)
    assert (description.sizes.disk_files, description.images, description.stored.in_place) == (7, 6, False)
    source = opened("s3://lab/plain")
    tifffile.imwrite(bucket / "plain/2.tif", plain[2][0, :, 0] + 1)
    with raises(FormatError, path="s3://lab/plain/2.tif"):
        source.read(2)
    with opened("s3://lab/plain", pattern="{site}.tif") as source:
        assert source.columns["Metadata_Site"].to_pylist() == list(range(6))


def test_what_is_no_image_at_a_url_is_told(server, bucket, opened, tmp_path):
    (bucket / "a.duckdb").write_bytes(b"x")
    (bucket / "notes").mkdir()
    (bucket / "notes/a.txt").write_bytes(b"x")
    for path, error, facts in (
        ("s3://lab/a.duckdb", FormatError, ("s3://lab/a.duckdb", "DuckDB")),
        ("s3://lab/none", MissingPathError, "s3://lab/none"),
        ("s3://lab/none.tif", MissingPathError, "s3://lab/none.tif"),
        ("s3://lab/notes", FormatError, ("s3://lab/notes", "'a.txt'")),
        (f"{server.url}/lab/notes", StorageError, (f"{server.url}/lab/notes", "URLs")),
        (["s3://lab/a.tif", "b.tif"], ArgumentError, ("'s3://lab/a.tif'", "'b.tif'")),
    ):
        with raises(error, mentions=facts, remedy=False):
            (opened if "s3" in str(path) else open_images)(path)


def numbered(count, shape=(1, 3, 1, 40, 50)):
    return list(np.arange(count * np.prod(shape), dtype=np.uint16).reshape(count, *shape))


@pytest.mark.parametrize("suffix", [*BY_RANGES, "lance", "vortex"])
def test_a_table_at_a_url_is_the_local_one(server, bucket, opened, suffix):
    images = numbered(23)
    columns = {"label": list(range(23)), "note": [None, "a"] * 11 + ["b"]}
    described = [{"name": f"field {number}", "physical_size_x": 0.5} for number in range(23)]
    write_images(images, bucket / f"a.{suffix}", columns=columns, axes="TCZYX", metadata=described)
    with opened(f"s3://lab/a.{suffix}", verify=True) as source, open_images(bucket / f"a.{suffix}") as local:
        assert source.columns.equals(local.columns)
        assert source.images.header.columns.checksums.equals(local.images.header.columns.checksums)
        assert list(source.image_ids) == list(local.image_ids)
        assert source.metadata(7) == local.metadata(7)
        check(source, images, [22, 3, 3, -12, 5, 0])
        with pickle.loads(pickle.dumps(source)) as again:
            check(again, images, [1, 20])
    loaded = OMEArrowDataset(f"s3://lab/a.{suffix}", normalize=False, target="label", **opened.keywords)
    np.testing.assert_array_equal(loaded[22][0].numpy(), images[22][0, :, 0])


@pytest.mark.parametrize("suffix", BY_RANGES)
@pytest.mark.parametrize(("side", "count"), [(40, 300), (217, 60)])
@pytest.mark.share(2, "suffix", "side")
def test_a_stored_image_is_one_request_of_its_own_bytes(server, bucket, opened, suffix, side, count):
    images = list(np.random.default_rng(0).integers(0, 2**16, (count, 1, 5, 1, side, side), np.uint16))
    write_images(images, bucket / f"a.{suffix}", axes="TCZYX")
    with opened(f"s3://lab/a.{suffix}") as source:
        assert server.sent_bytes.total() < 2**18 + sum(image.nbytes for image in images) / 10
        source.read(3)  # After this read, positions of images in this part of the file are known.
        for index in (4, 30, 3):
            server.requests.clear()
            server.sent_bytes.clear()
            np.testing.assert_array_equal(source.read(index), images[index])
            assert server.requests.total() == 1
            assert server.sent_bytes.total() <= 1.1 * images[index].nbytes
        server.requests.clear()
        server.sent_bytes.clear()
        some = [count - 1, 3, count // 2, count // 2 + 1, 4]
        assert all(map(np.array_equal, source.take(some), [images[index] for index in some]))
        assert server.sent_bytes.total() <= 1.1 * 5 * images[0].nbytes + 2**17


@pytest.mark.parametrize(
    ("suffix", "how"),
    [
        ("parquet", {"compression": "zstd"}),
        ("parquet", {"encoding": "list"}),
        ("parquet", {"compression": "chunk-zstd"}),
        ("arrow", {"encoding": "list"}),
        ("arrow", {"compression": "chunk-lz4"}),
    ],
)
def test_however_pixels_are_stored_they_are_right(bucket, opened, suffix, how):
    if suffix not in BY_RANGES:
        pytest.skip("no ranges of it")
    images = [image[..., : 20 + number % 7] for number, image in enumerate(numbered(40))]
    write_images(images, bucket / f"a.{suffix}", axes="TCZYX", rows_per_group=9, **how)
    with opened(f"s3://lab/a.{suffix}") as source:
        check(source, images, [39, 0, 17, 17])


def test_tables_of_others_are_read(bucket, opened):
    """pyarrow's defaults: dictionaries, pages of version 1, statistics, nulls, two image columns."""
    images = numbered(12)
    write_images(images, bucket / "a.parquet", axes="TCZYX")
    table = pq.read_table(bucket / "a.parquet")
    image = table["ome_image"].combine_chunks()
    holes = pc.if_else(pa.array([True] * 11 + [False]), image, pa.nulls(12, image.type))
    table = pa.table({"one": image, "two": holes, "text": ["x"] * 12})
    for options in ({}, {"compression": "none", "use_dictionary": False}, {"row_group_size": 5}):
        pq.write_table(table, bucket / "b.parquet", **options)
        with opened("s3://lab/b.parquet", image_column="one") as source:
            check(source, images, [11, 0, 4])
            assert source.columns["text"].to_pylist() == ["x"] * 12
        with opened("s3://lab/b.parquet", image_column=["one", "two"], nulls="skip") as source:
            check(source, [np.concatenate([one_image, one_image], axis=1) for one_image in images[:11]], [10, 0])


@pytest.mark.parametrize("suffix", BY_RANGES)
def test_a_table_that_changes_is_an_error(server, bucket, opened, suffix):
    images = numbered(300, (1, 1, 1, 60, 60))
    write_images(images, bucket / f"a.{suffix}", axes="TCZYX")
    source = opened(f"s3://lab/a.{suffix}")
    dataset = pickle.dumps(OMEArrowDataset(f"s3://lab/a.{suffix}", preload=False, **opened.keywords))
    np.testing.assert_array_equal(source.read(3), images[3])
    write_images(images[::-1], bucket / f"a.{suffix}", axes="TCZYX", overwrite=True)
    for read in (partial(source.read, 5), lambda: pickle.loads(dataset)[0]):
        with raises(FormatError, path=f"s3://lab/a.{suffix}"):
            read()
    (bucket / f"a.{suffix}").write_bytes((bucket / f"a.{suffix}").read_bytes()[:-30])
    with raises(FormatError, path=f"s3://lab/a.{suffix}", remedy=False):
        opened(f"s3://lab/a.{suffix}")
    (bucket / f"a.{suffix}").write_bytes(b"")
    with raises(FormatError, path=f"s3://lab/a.{suffix}", mentions="bytes"):
        opened(f"s3://lab/a.{suffix}")


@pytest.mark.parametrize(("suffix", "how"), [("vortex", {}), ("vortex", {"compression": "zstd"}), *COMPRESSED_ARROW])
def test_a_file_that_is_fetched_whole_is_fetched_once(server, bucket, opened, tmp_path, suffix, how):
    images = numbered(30)
    write_images(images, bucket / f"a.{suffix}", axes="TCZYX", **how)
    size_bytes = (bucket / f"a.{suffix}").stat().st_size
    server.faults = 0.2
    with opened(f"s3://lab/a.{suffix}", part_cache=tmp_path / "cache") as source:
        assert source.images.details.storage_info().reading.startswith("from a fetched copy of the object")
        assert stored_size(source.images) == (1, size_bytes, size_bytes)
        check(source, images, [29, 3, 3, -12, 0])
        server.faults = 0.0
        server.sent_bytes.clear()
        again = pickle.loads(pickle.dumps(source))
        check(again, images, [7, 2])
        assert server.sent_bytes.total() <= size_bytes / 2 + 2**17  # Format detection, and for Arrow the footer.
        assert len(list((tmp_path / "cache").glob("00000-*"))) == 1
        write_images(images[::-1], bucket / f"a.{suffix}", axes="TCZYX", overwrite=True, **how)
        np.testing.assert_array_equal(again.read(5), images[5])
        again.close()
        with raises(FormatError, path=f"s3://lab/a.{suffix}"):
            again.read(5)
    (bucket / f"a.{suffix}").write_bytes((bucket / f"a.{suffix}").read_bytes()[:-3])
    with raises(FormatError, path=f"s3://lab/a.{suffix}", remedy=False):
        opened(f"s3://lab/a.{suffix}")


def test_a_file_that_is_fetched_whole_needs_room(server, bucket, opened, tmp_path, monkeypatch):
    write_images(numbered(9), bucket / "a.vortex", axes="TCZYX")
    with raises(WriteError, path=tmp_path / "cache", mentions=("00000", "part_cache_bytes")):
        opened("s3://lab/a.vortex", part_cache=tmp_path / "cache", part_cache_bytes=1000)

    def full(descriptor, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raises(WriteError, path=tmp_path / "cache", mentions="00000"):
        opened("s3://lab/a.vortex", part_cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*00000*"))
    for path in ("s3://lab/a.parquet", "s3://lab/a.lance", "s3://lab/a.csv"):
        with raises(ArgumentError, option="part_cache", path=path):
            opened(path, part_cache=tmp_path / "cache")
    (bucket / "a.vortex").write_bytes(b"")
    with raises(FormatError, path="s3://lab/a.vortex", mentions="bytes"):
        opened("s3://lab/a.vortex")


def test_what_is_read_of_libraries_is_what_they_read(bucket, opened):
    """The oracles are Lance and pyarrow on the local files."""
    lance = pytest.importorskip("lance")
    images = numbered(12)
    write_images(images, bucket / "a.lance", axes="TCZYX")
    write_images(images, bucket / "a.arrow", axes="TCZYX", compression="zstd")
    for name, table in (
        ("a.lance", lance.dataset(str(bucket / "a.lance")).to_table()),
        ("a.arrow", pa.ipc.open_file(pa.memory_map(str(bucket / "a.arrow"))).read_all()),
    ):
        rows = table["ome_image"].to_pylist()
        with opened(f"s3://lab/{name}") as source:
            for index, row in enumerate(rows):
                stored = b"".join(chunk["pixel_bytes"] for chunk in row["chunks"])
                assert source.read(index).tobytes() == stored
                assert source.image_ids[index] == row["id"]


@pytest.mark.parametrize("encoding", ["bytes", "list"])
def test_a_stored_image_of_lance_is_one_request_of_its_own_bytes(server, bucket, opened, encoding):
    images = list(np.random.default_rng(0).integers(0, 2**16, (60, 1, 2, 1, 96, 96)).astype(np.uint16))
    write_images(images, bucket / "a.lance", axes="TCZYX", encoding=encoding)
    with opened("s3://lab/a.lance") as source:
        assert server.sent_bytes.total() < 2**19
        source.read(3)
        for index in (4, 50):
            server.requests.clear()
            server.sent_bytes.clear()
            np.testing.assert_array_equal(source.read(index), images[index])
            assert server.requests.total() == 1
            assert server.sent_bytes.total() <= 1.1 * images[index].nbytes + 2**13 * (encoding == "list")
        assert source.images.details.storage_info().reading == "by Lance, by row number, from a dataset on a server"
        assert stored_size(source.images)[0] == len(
            [item for item in (bucket / "a.lance").rglob("*") if item.is_file()]
        )
        check(source, images, [59, 0, 7])
        for _, block in source.images.stream():
            np.testing.assert_array_equal(np.stack(list(block)), np.stack(images))


def test_a_lance_dataset_stays_at_its_version_and_tells_what_is_wrong(server, bucket, opened):
    lance = pytest.importorskip("lance")
    images = numbered(12)
    write_images(images, bucket / "a.lance", axes="TCZYX")
    source = opened("s3://lab/a.lance")
    local = lance.dataset(str(bucket / "a.lance"))
    local.delete("true")
    lance.write_dataset(local.checkout_version(1).to_table().slice(0, 5), str(bucket / "a.lance"), mode="append")
    check(source, images, [11, 0])
    check(pickle.loads(pickle.dumps(source)), images, [3])
    with opened("s3://lab/a.lance") as newest:
        check(newest, images[:5], [4])
    for status, error, facts in (
        (403, StorageError, ("anonymous", 403)),
        (404, FormatError, "version 1"),
    ):
        server.status = status
        with raises(error, path="s3://lab/a.lance", mentions=facts) as raised:
            source.read(5)
        assert raised.value.__suppress_context__
        assert not [word for word in ("PLANTED", "Signature") if word in repr((raised.value, raised.value.__cause__))]
    server.status = 0
    pickled = pickle.dumps(source)
    write_images(images[::-1], bucket / "a.lance", axes="TCZYX", overwrite=True)
    for read in (lambda: source.read(7), lambda: pickle.loads(pickled)):
        with raises(FormatError, path="s3://lab/a.lance"):
            read()
    source = opened("s3://lab/a.lance")
    file = next((bucket / "a.lance/data").iterdir())
    file.unlink()
    with raises(FormatError, path="s3://lab/a.lance", mentions=file.name):
        source.read(2)
    with raises(MissingPathError, path="s3://lab/none.lance"):
        opened("s3://lab/none.lance")
    with raises(FormatError, path=f"{server.url}/lab/a.lance", mentions=("s3://", "gs://", "az://")):
        open_images(f"{server.url}/lab/a.lance")


def test_names_of_buckets_are_no_urls(bucket, opened):
    pytest.importorskip("lance")
    images = numbered(3)
    for name in ("50%25 of %41+b.lance", "50%25 of %41+b.parquet"):
        write_images(images, bucket / name, axes="TCZYX")
        with opened(f"s3://lab/{name}") as source:
            check(source, images, [2, 0])
            assert source.images.details.storage_info().compression == "none"


def test_requests_of_lance_that_fail_change_no_pixel(server, bucket, opened, monkeypatch):
    images = numbered(12)
    write_images(images, bucket / "a.lance", axes="TCZYX")
    server.faults = 0.3
    with opened("s3://lab/a.lance") as source:
        check(source, images, [11, 0, 3])
    assert len(server.failed) > 3
    server.faults = 0.0
    limits = urls._LANCE_LIMITS | {"read_timeout": "1s", "client_max_retries": "0"}
    monkeypatch.setattr(urls, "_LANCE_LIMITS", limits)
    monkeypatch.setattr(remote, "_SILENT_S", 1.0)
    source = opened("s3://lab/a.lance")
    server.stalled = True
    with raises(StorageError, path="s3://lab/a.lance"):
        source.read(3)


def test_several_tables_at_urls_are_one_collection(bucket, opened):
    images = numbered(9)
    for number in range(3):
        write_images(images[3 * number : 3 * number + 3], bucket / f"{number}.parquet", axes="TCZYX")
    for paths in ("s3://lab/*.parquet", [f"s3://lab/{number}.parquet" for number in range(3)]):
        with opened(paths) as source:
            check(source, images, [8, 0, 4])
            check(pickle.loads(pickle.dumps(source)), images, [5])


@pytest.mark.parametrize("suffix", BY_RANGES)
def test_looking_at_parts_fetches_no_part(server, bucket, opened, suffix, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    images = list(np.random.default_rng(0).integers(0, 2**16, (40, 1, 3, 1, 80, 90)).astype(np.uint16))
    write_images(images, tmp_path / f"a.{suffix}", axes="TCZYX", columns={"label": list(range(40))})
    convert(tmp_path / f"a.{suffix}", bucket / "a.parts", suffix, part_bytes=10 * images[0].nbytes)
    sizes = [part.stat().st_size for part in (bucket / "a.parts/parts").iterdir()]
    assert len(sizes) == 4
    source = opened("s3://lab/a.parts", verify=True)
    assert server.requests.total() <= 3
    server.sent_bytes.clear()
    np.testing.assert_array_equal(source.read(13), images[13])
    assert server.sent_bytes.total() < 1.1 * images[13].nbytes + 2**17  # Plus the other bytes of the part.
    server.requests.clear()
    server.sent_bytes.clear()
    np.testing.assert_array_equal(source.read(15), images[15])
    assert server.requests.total() == 1
    assert server.sent_bytes.total() <= 1.1 * images[15].nbytes
    check(pickle.loads(pickle.dumps(opened("s3://lab/a.parts"))), images, [39, 0, 3, 3, 22])
    source.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    dataset = OMEArrowDataset("s3://lab/a.parts", preload=False, normalize=False, target="label", **opened.keywords)
    np.testing.assert_array_equal(dataset[7][0].numpy(), images[7][0, :, 0])
    server.requests.clear()
    for workers in (0, 2):  # An epoch fetches whole parts, each once per host.
        loader = OMEArrowDataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
        for batch, labels in loader:
            for sample, label in zip(batch.numpy(), labels.tolist(), strict=True):
                np.testing.assert_array_equal(sample, images[label][0, :, 0])
    whole = {path: times for path, times in server.requests.items() if "/parts/" in path}
    assert set(whole.values()) == {1}
    assert len(whole) == 4
    convert(tmp_path / f"a.{suffix}", bucket / "b.parts", suffix, compression="zstd")
    np.testing.assert_array_equal(opened("s3://lab/b.parts").read(2), images[2])
    part = next((bucket / "a.parts/parts").iterdir())
    part.write_bytes(part.read_bytes()[:-1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with raises(FormatError, path=f"s3://lab/a.parts/parts/{part.name}"):
        opened("s3://lab/a.parts").take(range(40))


def test_a_bucket_alone_is_told_from_what_is_in_it(server, opened, tmp_path):
    pytest.importorskip("zarr")
    write_images([np.zeros((3, 8, 8), np.uint16)] * 2, tmp_path / "a.zarr", axes="CYX")
    images = [folder for folder in (tmp_path / "a.zarr").iterdir() if folder.is_dir()]
    shutil.copytree(images[0], server.folder / "image")
    shutil.copytree(tmp_path / "a.zarr", server.folder / "images")
    for url in ("s3://image/", "s3://image"):
        with raises(FormatError, path="s3://image"):
            opened(url)
    with opened("s3://images/") as source:
        assert len(source) == 2
    shutil.copytree(tmp_path / "a.zarr", server.folder / "more" / "b.zarr")
    (server.folder / "more" / "notes.txt").write_text("no image")
    with raises(FormatError, path="s3://more"):
        opened("s3://more/")


def test_replaced_shard_is_never_read_by_zarr_with_the_old_index(bucket, opened):
    zarr = pytest.importorskip("zarr")
    images = [np.random.default_rng(0).integers(0, 2**16, (size, size)).astype(">u2") for size in (40, 400)]
    options = {"compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")}  # zarr reads this byte order.

    def write(step):
        for name, image in zip(("small", "large"), images, strict=True):
            chunks = (image.shape[0] // 4, image.shape[1] // 4)
            shutil.rmtree(bucket / f"{name}.zarr", ignore_errors=True)
            zarr.create_array(bucket / f"{name}.zarr", data=image[::step], chunks=chunks, shards=image.shape, **options)

    write(1)
    small, large = (opened(f"s3://lab/{name}.zarr") for name in ("small", "large"))
    np.testing.assert_array_equal(small.read(0, (0, 3, 0, 5))[0, 0, 0], images[0][:3, :5])
    np.testing.assert_array_equal(large.read(0, (0, 3, 0, 5))[0, 0, 0], images[1][:3, :5])
    write(-1)
    np.testing.assert_array_equal(small.read(0, (37, 40, 0, 5))[0, 0, 0], images[0][37:, :5])  # Fetched with its index.
    with raises(FormatError, path="s3://lab/large.zarr/c/0/0"):
        large.read(0, (397, 400, 0, 5))


def test_ome_zarr_at_a_url_is_the_local_one(server, bucket, opened, fields):
    zarr = pytest.importorskip("zarr")
    images = as_images(fields)
    write_images(images, bucket / "a.zarr", axes="TCZYX", columns={"label": list(range(6))}, chunk_shape=(64, 64))
    fields = [image[..., 40:54, 30:46] for image in images]  # From chunks of 7 x 8.
    written_plate(bucket / "plate.zarr", {"B/3": fields[2:5], "A/1": fields[:2]})
    whole = np.random.default_rng(0).integers(0, 2**16, (2, 200, 300)).astype(np.uint16)
    shards = {"chunks": (1, 20, 30), "shards": (1, 100, 150), "dimension_names": ("c", "y", "x")}
    zarr.create_array(bucket / "shards.zarr", data=whole, **shards)
    with opened("s3://lab/a.zarr", verify=True) as source:
        assert server.requests.total() == 1  # The index next to the images lists them.
        assert source.columns["label"].to_pylist() == list(range(6))
        assert source.metadata(1) == open_images(bucket / "a.zarr").metadata(1)
        assert all(map(np.array_equal, source.take([5, 0, 2, 2]), [images[index] for index in (5, 0, 2, 2)]))
        np.testing.assert_array_equal(source.read(1, (50, 80, 60, 70), [1]), images[1][:, 1:, :, 50:80, 60:70])
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(5), images[5])
    for url in ("s3://lab/plate.zarr", f"{server.url}/lab/plate.zarr"):
        with opened(url) if "s3" in url else open_images(url) as source:
            assert all(map(np.array_equal, source.take(range(5)), fields))
            assert source.columns.equals(open_images(bucket / "plate.zarr").columns)
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(3), fields[3])
    with opened("s3://lab/plate.zarr", level=1) as source:
        np.testing.assert_array_equal(source.read(1), fields[1][..., ::2, ::2])
    with opened("s3://lab/plate.zarr/A/1/1") as source:
        np.testing.assert_array_equal(source.read(0), fields[1])
    with opened("s3://lab/shards.zarr") as source:
        np.testing.assert_array_equal(source.read(0), whole[None, :, None])
        server.sent_bytes.clear()
        np.testing.assert_array_equal(source.read(0, (10, 30, 40, 70), [1]), whole[None, 1:, None, 10:30, 40:70])
        assert server.sent_bytes.total() < whole.nbytes / 6  # The index and the chunks of one shard.
    for chunk in (bucket / "a.zarr").rglob("c*0.1.0.0.0"):
        chunk.unlink()
    with raises(FormatError, path="s3://lab/a.zarr/000003_image-00003.ome.zarr/0/c.0.1.0.0.0"):
        opened("s3://lab/a.zarr").read(3)
    with raises(FormatError, path="s3://lab/none.zarr", remedy=False):
        opened("s3://lab/none.zarr")


@pytest.mark.parametrize("kind", ["arrow", "parquet", "tiff"])
def test_threads_share_a_source(server, bucket, opened, tmp_path, kind):
    """Record batches of lists share a buffer, and headers of TIFF files are cached."""
    images = list(np.arange(12 * 40 * 50, dtype=np.uint8).reshape(12, 1, 1, 1, 40, 50))
    write_images(images, tmp_path / "lists.parquet", "parquet", encoding="list")
    table = pq.read_table(tmp_path / "lists.parquet").combine_chunks()
    if kind == "parquet":
        pq.write_table(table, bucket / "a.parquet", row_group_size=3, compression="zstd")
    elif kind == "arrow":
        with pa.ipc.new_file(str(bucket / "a.arrow"), table.schema) as file:
            for batch in table.to_batches(max_chunksize=3):
                file.write_batch(batch)
    else:
        (bucket / "folder").mkdir()
        for number, image in enumerate(images):
            tifffile.imwrite(bucket / f"folder/{number}.ome.tiff", image[0, 0, 0], tile=(16, 16), compression="zlib")
    url = "s3://lab/folder" if kind == "tiff" else f"s3://lab/a.{kind}"

    def right(seed):
        chosen = np.random.default_rng(seed).integers(0, 12, 8) % (2 if kind == "tiff" else 12)
        return all(
            source.metadata(number)
            and np.array_equal(source.read(number, (3, 30, 7, 40)), images[number][..., 3:30, 7:40])
            and np.array_equal(source.read(number), images[number])
            for number in chosen.tolist()
        )

    with opened(url) as source, ThreadPoolExecutor(6) as threads:
        assert all(threads.map(right, range(6)))


def test_a_glob_fits_what_it_would_on_this_machine(bucket, opened, fields):
    names = (
        "a/1.tif",
        "a/10.tif",
        "a/2.tif",
        "a/_3.tif",
        "a/.4.tif",
        "a/b/1.tif",
        "ab/1.tif",
        "a/c[1].tif",
        "d[1]/1.tif",
    )
    for number, name in enumerate(names):
        (bucket / name).parent.mkdir(exist_ok=True)
        tifffile.imwrite(bucket / name, fields[0][0] + np.uint16(number))
    for glob in (
        "a/*.tif",
        "a/**/*.tif",
        "*/1.tif",
        "**/1.tif",
        "a*/[0-9]*.tif",
        "a/_*.tif",
        "a/_3.t*",
        "a/c[1].tif",
        "d[1]",
    ):
        try:
            with open_images(bucket / glob) as local:
                expected = {"ids": local.image_ids, "images": [local.read(number) for number in range(len(local))]}
        except MissingPathError:
            with pytest.raises(MissingPathError):
                opened(f"s3://lab/{glob}")
            continue
        with opened(f"s3://lab/{glob}") as source:
            assert source.image_ids == expected["ids"]
            check(source, expected["images"], range(len(source)))


def test_names_at_web_servers_are_as_urls_have_them(server, bucket, fields):
    (bucket / "my plate").mkdir()
    for name in ("100% #1.tif", "a+b.tif"):
        tifffile.imwrite(bucket / "my plate" / name, fields[0])
    for name in ("my%20plate/100%25%20%231.tif", "my plate/a+b.tif", "my%20plate/a%2Bb.tif"):
        with open_images(f"{server.url}/lab/{name}") as source:
            np.testing.assert_array_equal(source.read(0).reshape(fields[0].shape), fields[0])


def test_a_server_without_ranges_is_told(server, bucket, fields):
    tifffile.imwrite(bucket / "a.tif", fields[0])
    server.ranges = False
    with raises(StorageError, option="part_cache", path=f"{server.url}/lab/a.tif"):
        open_images(f"{server.url}/lab/a.tif")


def test_a_pattern_is_for_the_folder_of_the_files_that_a_glob_fits(bucket, opened, fields):
    plate(bucket, fields)
    with opened("s3://lab/plate/Images/*.tiff") as source:
        assert len(source) == 12
    with raises(ArgumentError, option="pattern", path="s3://lab/plate/Images/A01_s1 OrigDNA.tiff"):
        opened("s3://lab/plate/Images/*.tiff", pattern="{well}_s{site} {channel}.tiff")
