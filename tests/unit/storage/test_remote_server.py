"""SeaweedFS, a real object store: access, errors, and secrets that are never printed or stored."""

from __future__ import annotations

import logging
import pickle
import time

import numpy as np
import pytest

from omearrow_ds import (
    FORMATS,
    BackendError,
    OMEArrowDataset,
    Storage,
    StorageError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.storage import remote
from tests.support.errors import raises
from tests.support.parts import publish
from tests.support.sources import check

SIZES = [5, 1, 4, 4, 3]
PLENTY = 2**24
MARKER = "PLANTED-SECRET"


@pytest.fixture
def images():
    return list(np.arange(17 * 240, dtype=np.uint16).reshape(17, 1, 2, 1, 12, 10))


@pytest.fixture
def url(weed, bucket, images, tmp_path):
    publish(tmp_path / "a.parts", images, SIZES)
    weed.put_folder(bucket, tmp_path / "a.parts")
    return f"s3://{bucket}/a.parts"


@pytest.fixture
def options(tmp_path):
    return {"part_cache": tmp_path / "cache", "part_cache_bytes": PLENTY}


def test_images_are_those_of_the_local_folder(weed, url, images, options):
    with open_images(url, **options) as source:
        check(source, images, [16, 3, 3, -12, 5, 0])
    for storage in (Storage(endpoint=weed.url), Storage(endpoint=weed.url, region="us-east-1")):
        with open_images(url, storage=storage, **options) as source:
            check(source, images, [0, 9])


def test_anybody_reads_what_is_public_and_nobody_else_what_is_not(weed, url, bucket, images, options, tmp_path):
    anybody = Storage(anonymous=True)
    weed.put_folder(f"{weed.public}/{bucket}", tmp_path / "a.parts")
    with open_images(f"s3://{weed.public}/{bucket}/a.parts", storage=anybody, **options) as source:
        check(source, images, [2, 11])
    with raises(StorageError, path=f"{url}/parts.json", mentions=("anonymous", 403)):
        open_images(url, storage=anybody, **options)


def test_wrong_keys_are_refused_at_once_and_who_was_refused_is_told(url, options, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", MARKER)
    with raises(StorageError, path=f"{url}/parts.json", mentions=("AWS_ACCESS_KEY_ID", 403)):
        open_images(url, **options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with raises(StorageError, path=f"{url}/parts.json", mentions=("AWS_ACCESS_KEY_ID", 403)):
        open_images(url, **options)


@pytest.mark.parametrize(
    ("status", "code"), [(400, "ExpiredToken"), (403, "ExpiredToken"), (403, "RequestTimeTooSkewed")]
)
def test_credentials_that_expired_are_not_tried_again(proxy, url, options, status, code):
    with open_images(url, **options) as source:
        source.read(0)
        proxy.set(status=status, code=code)
        with raises(StorageError, mentions=("AWS_ACCESS_KEY_ID", status, code)):
            source.read(16)
    assert max(proxy.counts().per_path.values()) <= 2  # The reader and the prefetching thread.


def test_a_secret_is_in_nothing_that_is_kept_or_told(proxy, url, options, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    texts = []
    with open_images(url, **options) as source:
        dataset = OMEArrowDataset(url, preload=False, **options)
        texts += [pickle.dumps(value) for value in (source, dataset, remote.ObjectStore(source.path, Storage()))]
        texts += [repr(value).encode() for value in (source, dataset, vars(dataset), source.images.header.opened_by)]
        proxy.set(status=403, code="AccessDenied")
        with pytest.raises(StorageError) as refused:
            source.read(16)
        proxy.set(status=500, code="InternalError")
        monkeypatch.setattr(remote, "_SILENT_S", 0.5)
        with pytest.raises(StorageError) as failed:
            source.read(16)
    for error in (refused.value, failed.value):
        assert error.__suppress_context__ or error.__context__ is None
        texts.append(repr((error, error.args, error.__cause__, getattr(error, "__notes__", ""))).encode())
    texts.append(caplog.text.encode())
    texts += [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    secrets = ("test-SECRET", "test-key", "Signature")
    assert len(texts) > 15
    assert not [(secret, value[:200]) for secret in secrets for value in texts if secret.encode() in value]


def test_each_part_is_one_request_and_nothing_else_is_asked(proxy, url, images, options):
    with open_images(url, **options) as source:
        assert proxy.counts().requests == 2
        np.testing.assert_array_equal(np.stack(source.take(range(17))), images)
    counts = proxy.counts()
    assert counts.requests == 2 + len(SIZES)
    assert set(counts.per_path.values()) == {1}


@pytest.mark.parametrize("suffix", [fmt.name for fmt in FORMATS if not fmt.is_folder])
def test_opening_is_two_requests_whatever_the_parts(proxy, bucket, images, options, tmp_path, suffix):
    labels = list(range(17))
    write_images(images, tmp_path / "a.arrow", axes="TCZYX", columns={"label": labels})
    for parts in (1, 17):
        part_bytes = len(images) * images[0].nbytes // parts
        url = f"s3://{bucket}/{parts}.parts"
        try:
            convert(tmp_path / "a.arrow", url, suffix, part_bytes=part_bytes)
        except BackendError as error:
            pytest.skip(str(error))
        proxy.set()
        with open_images(url, **options) as source:
            assert len(source.images.parts.manifest.parts) == parts
            assert source.columns["label"].to_pylist() == labels
            assert source.shapes.tolist() == [[1, 2, 1, 12, 10]] * 17
            assert proxy.counts().requests == 2
            np.testing.assert_array_equal(source.read(9), images[9])
            assert proxy.counts().requests == 3


_ONE_BY_ONE = [pytest.param([kind], marks=pytest.mark.slow) for kind in ("503", "reset", "cut", "lost")]


@pytest.mark.parametrize("kinds", [["503", "reset", "cut", "lost"], *_ONE_BY_ONE], ids=",".join)
def test_three_in_ten_requests_that_fail_change_no_pixel(proxy, url, images, tmp_path, kinds):
    for seed in range(3):
        proxy.set(share=0.3, kinds=kinds, seed=seed)
        with open_images(url, part_cache=tmp_path / f"cache{seed}", part_cache_bytes=PLENTY) as source:
            np.testing.assert_array_equal(np.stack(source.take(range(17))), images)


def test_requests_that_stall_are_made_again(proxy, url, images, options, monkeypatch):
    monkeypatch.setattr(remote, "READ_S", 1)  # The default is 14 s, and two stalls in a row are an error.
    proxy.set(share=0.3, kinds=("stall", "cut"), seed=1)
    with open_images(url, **options) as source:
        np.testing.assert_array_equal(np.stack(source.take(range(17))), images)
    assert proxy.counts().failed["stall"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"share": 1.0, "kinds": ("stall",)}, {"down": True}], ids=["stall", "down"])
def test_a_server_that_does_not_answer_is_an_error_within_half_a_minute(proxy, url, options, settings):
    with open_images(url, **options) as source:
        source.read(0)
        proxy.set(**settings)
        began_s = time.monotonic()
        with raises(StorageError, path=url, mentions="00004"):
            source.read(16)
        assert time.monotonic() - began_s <= 31


@pytest.mark.slow
def test_a_slow_link_that_goes_on_never_fails(proxy, weed, bucket, images, options, monkeypatch, tmp_path):
    publish(tmp_path / "a.parts", images * 20, [len(images) * 20])
    weed.put_folder(bucket, tmp_path / "a.parts")
    with open_images(f"s3://{bucket}/a.parts", **options) as source:
        size_bytes = source.images.parts.manifest.parts[0].size_bytes
        proxy.set(link_bits=8 * size_bytes / 45)  # Longer than the limit on silence.
        began_s = time.monotonic()
        np.testing.assert_array_equal(source.read(3), images[3])
        assert time.monotonic() - began_s > 35


def test_files_and_folders_are_those_of_this_machine(weed, bucket, images, tmp_path, monkeypatch):
    """Listings, ranges and ETags, with keys and anonymously from a public bucket."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "all").mkdir()
    write_images(images, tmp_path / "all/a.tiffs", axes="TCZYX")
    tables = ["a.parquet", "a.lance", "a.vortex"]
    for name in tables:
        write_images(images, tmp_path / "all" / name, axes="TCZYX")
    files = sorted(file.name for file in (tmp_path / "all/a.tiffs").glob("*.tif"))
    for bucket_path, storage in (
        (bucket, Storage(endpoint=weed.url)),
        (f"{weed.public}/{bucket}", Storage(anonymous=True)),
    ):
        weed.put_folder(bucket_path, tmp_path / "all")
        listed = "".join(f"s3://{bucket_path}/all/a.tiffs/{name}\n" for name in files)
        (tmp_path / "load_data.csv").write_text(f"URL_DNA\n{listed}")
        paths = [*(f"s3://{bucket_path}/all/{name}" for name in ("a.tiffs", *tables)), tmp_path / "load_data.csv"]
        for path in (*paths, f"s3://{bucket_path}/all/a.tiffs/*.tif"):
            with open_images(path, storage=storage) as source:
                check(source, images, [16, 3, 3, -12, 5, 0])


def test_lance_is_told_the_keys_that_are_found_and_tells_none(weed, bucket, images, tmp_path, monkeypatch, capfd):
    write_images(images, tmp_path / "a.lance", axes="TCZYX")
    weed.put_folder(bucket, tmp_path / "a.lance")
    url, keys = f"s3://{bucket}/a.lance", weed.keys("reader")
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id={keys['AWS_ACCESS_KEY_ID']}\naws_secret_access_key={keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    source = open_images(url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", MARKER)
    with open_images(url, storage=Storage(profile="lab")) as of_profile:  # It overrides the environment.
        check(of_profile, images, [16, 3])
        texts = [pickle.dumps(value) for value in (source, of_profile)]
        check(pickle.loads(texts[1]), images, [2])
        texts += [
            repr(value).encode()
            for value in (source, vars(source), vars(of_profile), of_profile.images.header.opened_by)
        ]
    for storage in (Storage(), Storage(anonymous=True)):
        with raises(StorageError, path=url, mentions=403) as refused:
            open_images(url, storage=storage)
        assert refused.value.__suppress_context__
        texts.append(repr((refused.value, refused.value.args, refused.value.__cause__)).encode())
    texts += [text.encode() for text in capfd.readouterr()]
    secrets = ("-SECRET", "test-key", "reader-key", "<Signature")
    assert not [(secret, value[:200]) for secret in secrets for value in texts if secret.encode() in value]
