"""Collections in Azurite, an emulator of Azure Blob Storage: written, read and rejected."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest

from omearrow_ds import (
    FORMATS,
    OMEArrowDataLoader,
    OMEArrowDataset,
    PathExistsError,
    StorageError,
    convert,
    open_images,
    write_images,
)
from tests.support.errors import raises
from tests.support.sources import check

PROGRAM = shutil.which("azurite-blob", path=f"{sys.prefix}/node_modules/.bin") or shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"  # Every Azurite has this account and key.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "plates"
PLENTY = 2**24

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Azurite is not installed: make servers")


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    """Yield the URL of a running server."""
    folder = tmp_path_factory.mktemp("azurite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [PROGRAM, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    words += ["--blobPort", str(port), "--location", str(folder)]
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as server:
        try:
            wait_for_container(server, url := f"http://127.0.0.1:{port}")
            yield url
        finally:
            server.terminate()


def wait_for_container(server, url):
    """Create the container as soon as the server answers."""
    for _ in range(300):
        date, version = formatdate(usegmt=True), "2021-12-02"
        headers = f"x-ms-date:{date}\nx-ms-version:{version}\n"
        request_text = "PUT" + "\n" * 12 + f"{headers}/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        signed = hmac.new(base64.b64decode(KEY), request_text.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(
            f"{url}/{ACCOUNT}/{CONTAINER}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": version,
                "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=10):
                return
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
        assert server.poll() is None
        time.sleep(0.1)
    pytest.fail("Azurite does not answer")


@pytest.fixture(autouse=True)
def known(azurite, monkeypatch):
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azurite)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)


@pytest.fixture
def images():
    return list(np.arange(17 * 240, dtype=np.uint16).reshape(17, 1, 2, 1, 12, 10))


@pytest.fixture
def url(request):
    """Return an unused URL."""
    return f"az://{CONTAINER}/{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"


def put(url, path):
    """Upload a file or a folder below a URL with obstore, and return its URL."""
    import obstore

    store = obstore.store.from_url(url, client_options={"allow_http": True})
    for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
        obstore.put(store, file.relative_to(path.parent).as_posix(), file.read_bytes())
    return f"{url}/{path.name}"


def test_parts_are_written_read_and_not_written_over(url, images, tmp_path):
    write_images(images, tmp_path / "a.arrow")
    target, cache_options = f"{url}.parts", {"part_cache": tmp_path / "cache", "part_cache_bytes": PLENTY}
    convert(tmp_path / "a.arrow", target, "parquet", part_bytes=4 * 480)
    with open_images(target) as source:  # By range requests.
        check(source, images, [16, 3, 3, -12, 5, 0])
    with open_images(target, **cache_options) as source:
        check(source, images, [16, 3, 3, -12, 5, 0])
    dataset = OMEArrowDataset(target, preload=False, normalize=False, **cache_options)
    loader = OMEArrowDataLoader(dataset, 4, num_workers=1)
    assert np.array_equal(np.concatenate([batch.numpy() for batch in loader]), np.stack(images)[:, 0, :, 0])
    with raises(PathExistsError, option="overwrite", path=target):
        convert(tmp_path / "a.arrow", target, "arrow")
    convert(tmp_path / "a.arrow", target, "vortex", overwrite=True)
    with open_images(target, **cache_options) as source:
        assert source.format.name == "vortex"
        check(source, images, [16, 0])


@pytest.mark.parametrize("name", ["parquet", "arrow", "lance", "vortex", "tiff", "ome_zarr"])
def test_what_was_copied_there_is_read(name, url, images, tmp_path):
    path = tmp_path / f"a{next(fmt.suffix for fmt in FORMATS if fmt.name == name)}"
    write_images(images, path, name)
    with open_images(put(url, path)) as source:
        check(source, images, [16, 3, 3, -12, 5, 0])


def test_a_wrong_key_is_refused_at_once_and_the_remedy_is_told(url, images, tmp_path, monkeypatch):
    write_images(images, tmp_path / "a.parquet")
    table_url = put(url, tmp_path / "a.parquet")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA" + KEY[4:])
    with raises(
        StorageError, path=table_url, mentions=(403, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME")
    ):
        open_images(table_url)
