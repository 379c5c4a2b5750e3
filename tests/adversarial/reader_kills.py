"""Kill readers of collections on a server, and their workers, while several share a cache that holds a few parts.

``python -m tests.adversarial.reader_kills --kills 200`` prints a table, and exits with 1 after any failure. Two readers
run at a time, as two ranks of a host. One of them, or one of its workers, is killed (SIGKILL) at a random moment.
Readers compare every pixel. After each kill the cache must be within its limit. Every tenth time, and at the end, a
reader that is not killed must finish, and its completely fetched parts must equal those of the server bit for bit.

The collections have parts that are shuffled together, permuted parts, whose epochs start with one part, and permuted
parts that are fetched in byte ranges.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from omearrow_ds.storage.hashes import hash_of
from omearrow_ds.storage.manifest import MANIFEST, Manifest
from omearrow_ds.storage.remote_parts import RANGED_BYTES
from tests.support.objects import ObjectServer, serving
from tests.support.parts import publish
from tests.support.programs import Program, Programs, forked_programs

_LIMIT_S = 240  # The limit is for a busy machine; a reader that exceeds it hangs.
_WITH_WORKERS, _READING = 0.2, 0.5  # Shares of readers that have workers, and that are killed after their first batch.
_READER = """
import sys
import numpy as np
from omearrow_ds import OMEArrowDataset, OMEArrowDataLoader
url, cache, limit_bytes, workers, batch_size, *shape = sys.argv[1:]
shape = tuple(map(int, shape))
dataset = OMEArrowDataset(url, preload=False, normalize=False, target="label", part_cache=cache,
    part_cache_bytes=int(limit_bytes))
loader = OMEArrowDataLoader(dataset, batch_size=int(batch_size), num_workers=int(workers), shuffle=True)
seen = []
for images, labels in loader:
    if not seen:
        print("reading", flush=True)
    for image, label in zip(images.numpy(), labels.tolist()):
        first = label * np.prod(shape)
        wanted = (np.arange(first, first + np.prod(shape)) % 65521).astype(np.uint16).reshape(shape)
        assert np.array_equal(np.squeeze(image), wanted), f"WRONG {label}"
        seen.append(label)
assert sorted(seen) == list(range(len(dataset))), f"WRONG {sorted(seen)}"
print("all", flush=True)
"""


@dataclass(frozen=True)
class World:
    """A collection, and the size of its readers' cache, too small for all that two of them may fetch.

    Attributes
    ----------
    parts, images, shape
        Number of parts, number of images per part, and shape of an image.
    permuted
        Whether images were permuted when parts were made; an epoch then starts with one part.
    room
        Size of the cache in parts.
    share
        Share of the kills.
    """

    name: str
    parts: int
    images: int
    shape: tuple[int, int, int]
    permuted: bool
    room: int
    share: float

    def publish(self, folder: Path) -> Path:
        count = self.parts * self.images
        images = (np.arange(count * np.prod(self.shape)) % 65521).astype(np.uint16)
        images = images.reshape(count, 1, self.shape[0], 1, *self.shape[1:])
        path = publish(folder / f"{self.name}.parts", list(images), [self.images] * self.parts)
        if self.permuted:
            manifest = replace(Manifest.read(path), made={"layout": {"shuffle_seed": 0}})
            (path / MANIFEST).write_text(manifest.as_json())
        return path


WORLDS = (
    World("together", 40, 2, (2, 20, 30), permuted=False, room=24, share=0.4),
    World("permuted", 40, 2, (2, 20, 30), permuted=True, room=12, share=0.35),
    World("large", 13, 2, (2, 2100, 2048), permuted=True, room=11, share=0.25),
)


class Host:
    def __init__(self, world: World, server: ObjectServer, folder: Path, programs: Programs) -> None:
        path = world.publish(server.folder)
        self._programs, self.cache = programs, folder / f"cache-{world.name}"
        sizes = [part.stat().st_size for part in (path / "parts").iterdir()]
        assert world.name != "large" or min(sizes) > RANGED_BYTES
        self.limit_bytes = (path / "index.parquet").stat().st_size + world.room * max(sizes)
        self._url, self._shape = f"{server.url}/{path.name}", world.shape
        self._batch_size = 1 if world.name == "large" else 3

    def reader(self, workers: int) -> Program:
        """Start a reader of one epoch."""
        words = (self._url, self.cache, self.limit_bytes, workers, self._batch_size, *self._shape)
        return self._programs.start(_READER, *words, timeout_s=_LIMIT_S)

    def used_bytes(self) -> int:
        """Return the size of the cache."""
        total = 0
        for file in self.cache.iterdir():
            try:
                total += file.stat().st_size if file.name.lstrip(".")[:1].isdigit() else 0  # Index files do not count.
            except FileNotFoundError:  # It was evicted meanwhile.
                continue
        return total

    def wrong_parts(self) -> list[str]:
        """Return the names of cached files whose bytes do not match their names."""
        whole = [file for file in self.cache.iterdir() if file.name[:1].isdigit()]
        return [file.name for file in whole if not file.match("*.index.parquet") and hash_of(file) not in file.name]


def kill_often(host: Host, kills: int, seed: int) -> Counter[str]:
    """Kill ``kills`` readers and workers, and return the findings, in words and numbers."""
    drawn, findings = random.Random(seed), Counter[str]()
    readers = [(host.reader(0), 0), (host.reader(0), 0)]
    for kill in range(kills):
        which = kill % 2
        findings[_killed(*readers[which], drawn)] += 1
        if host.used_bytes() > host.limit_bytes:
            findings[f"WRONG: the cache takes {host.used_bytes():,} of {host.limit_bytes:,} bytes"] += 1
        workers = 2 if drawn.random() < _WITH_WORKERS else 0
        readers[which] = host.reader(workers), workers
        if kill % 10 == 9:
            findings[_ended(host.reader(0))] += 1
    for reader, _ in readers:
        findings[_ended(reader)] += 1
    findings.update(f"WRONG: {name}" for name in host.wrong_parts())
    return findings


def _killed(reader: Program, workers: int, drawn: random.Random) -> str:
    """Kill a reader, or one of its workers, and return which, or the output of the reader."""
    if workers or drawn.random() < _READING:
        reader.first_line(_LIMIT_S)
    time.sleep(drawn.uniform(0, 0.6))
    try:
        process = psutil.Process(reader.pid)
        children = [child for child in process.children(recursive=True) if child.ppid() != reader.pid]
        victim = drawn.choice(children) if workers and children else process
        os.kill(victim.pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return _ended(reader)
    done = reader.wait()
    if "WRONG" in done.stderr:
        return f"WRONG: {done.stderr[-300:]}"
    if victim is process:
        return "a reader killed"
    if done.returncode == 0:
        return "a worker killed that had ended its work"
    return "a worker killed, its reader ended" if done.returncode == 1 else f"WRONG: status {done.returncode}"


def _ended(reader: Program) -> str:
    """Wait for a reader that is not killed, and return whether it has read everything."""
    done = reader.wait()
    if done.returncode == 0 and done.stdout.endswith("all\n"):
        return "read to its end"
    return f"WRONG: status {done.returncode}: {done.stdout[-100:]} {done.stderr[-600:]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    start_s, findings = time.monotonic(), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory(prefix="reader-kills-") as name:
        folder = Path(name)
        (folder / "served").mkdir()
        with forked_programs(folder) as programs, serving(folder / "served") as server:
            server.latency_s = 0.02
            for world in WORLDS:
                world_findings = kill_often(
                    Host(world, server, folder, programs), round(options.kills * world.share), options.seed
                )
                findings.update({(world.name, finding): count for finding, count in world_findings.items()})
                for finding, count in sorted(world_findings.items()):
                    print(f"{world.name:<9}{count:>5}  {finding}", flush=True)
    wrong = sum(count for (_, finding), count in findings.items() if finding.startswith("WRONG"))
    print(f"seed {options.seed}, {time.monotonic() - start_s:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
