"""Kill writers at random moments; then old or new content must be complete, and the next run must work.

``python -m tests.adversarial.kills --kills 200`` (``make kills KILLS=200``) divides the kills among all formats and
kinds of work, prints a table, and exits with 1 after any failure. Forks of a process that has imported the libraries
but used none do the work, so a kill costs a fraction of a second. After SIGKILL another fork checks the files. The
clock starts when the fork says that it begins the work, and moments are drawn over the time of a whole run.
``--runs 5`` kills runs of ``pytest benchmarks`` as well.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.support.data import DataCache, encodings, writer_version
from benchmarks.support.workload import Workload
from omearrow_ds import FORMATS, OMEArrowDataset, OMEArrowDSError, convert, open_images, write_images
from omearrow_ds.storage.formats import get_format
from tests.adversarial.killed_run import kill_runs

COUNT, SIZE = 24, 64
_HELD = (8, 8)  # Repeats of an image in y and x for `cache_dir`: writing 13 MB takes long enough to be interrupted.
_LIMIT_S = 100
_WORKLOAD = Workload(count=100, shape=(1, 1, 1, 100, 100), seed=7)


@dataclass(frozen=True)
class Work:
    """Work to kill: prepared once in a folder, done repeatedly, and checked after each kill.

    ``look`` returns its finding as a word, or raises `AssertionError`; ``share`` is the share of kills.
    """

    prepare: Callable[[Path, str], None]
    do: Callable[[Path, str], None]
    look: Callable[[Path, str], str]
    share: float = 1.0


def images(content: str) -> list[np.ndarray]:
    """Return different images of the ``old`` or ``new`` content."""
    first = 0 if content == "old" else COUNT
    pixels = np.arange(SIZE * SIZE, dtype=np.uint16).reshape(SIZE, SIZE)
    return [pixels * np.uint16(7) + np.uint16(first + number) for number in range(COUNT)]


def path_of(folder: Path, name: str) -> Path:
    return folder / f"images{get_format(name).suffix}"


def write(content: str) -> Callable[[Path, str], None]:
    def do(folder: Path, name: str) -> None:
        labels = {"content": [content] * COUNT}
        write_images(images(content), path_of(folder, name), name, columns=labels, overwrite=True)

    return do


def whole_content(path: Path, name: str) -> str:
    """Return which content is at a path, after comparing every pixel and the column."""
    with open_images(path, name) as source:
        stored = source.take(range(len(source)))
        (content,) = set(source.columns["content"].to_pylist())
    expected = images(content)
    assert len(stored) == COUNT
    assert all(np.array_equal(pixels[0, 0, 0], image) for pixels, image in zip(stored, expected, strict=True))
    return content


def content_and_next_write(folder: Path, name: str) -> str:
    """Return the content, then write the old content again, which removes leftovers of the killed writer."""
    path = path_of(folder, name)
    content = whole_content(path, name)
    left = [entry for entry in folder.iterdir() if ".partial-" in entry.name]
    write("old")(folder, name)
    assert whole_content(path, name) == "old"
    strays = {entry.name for entry in folder.iterdir()} - {path.name, "source.arrow", "source.parquet"}
    assert not strays, strays
    return f"{content}{', leftover' if left else ''}"


def prepare_convert(folder: Path, name: str) -> None:
    write("old")(folder, name)
    labels = {"content": ["new"] * COUNT}
    write_images(images("new"), folder / f"source.{_other(name)}", columns=labels)


def _other(name: str) -> str:
    return "parquet" if name == "arrow" else "arrow"


def do_convert(folder: Path, name: str) -> None:
    convert(folder / f"source.{_other(name)}", path_of(folder, name), name, overwrite=True)


def large(content: str) -> list[np.ndarray]:
    """Return the images, enlarged, in memory that is read and not computed."""
    return [np.tile(image, _HELD) for image in images(content)]


def prepare_preload(folder: Path, name: str) -> None:
    write_images(large("old"), path_of(folder, name), name)


def do_preload(folder: Path, name: str) -> None:
    OMEArrowDataset(path_of(folder, name), name, cache_dir=folder / "held", normalize=False, axes="YX")


def look_at_preload(folder: Path, name: str) -> str:
    cache = folder / "held"
    left = Counter(file.suffix for file in cache.iterdir()) if cache.is_dir() else Counter()
    dataset = OMEArrowDataset(path_of(folder, name), name, cache_dir=cache, normalize=False, axes="YX")
    assert all(np.array_equal(dataset[index].numpy(), image) for index, image in enumerate(large("old")))
    assert sorted(file.suffix for file in cache.iterdir()) == [".lock", ".pixels"], list(cache.iterdir())
    shutil.rmtree(cache)
    return "whole" if left[".pixels"] else "leftover" if left[".partial"] else "nothing"


def do_data(folder: Path, name: str) -> None:
    fmt = get_format(name)
    with DataCache(folder / "cache", _WORKLOAD) as cache:
        for encoding in encodings(fmt):
            cache.path(fmt, encoding)


def look_at_data(folder: Path, name: str) -> str:
    fmt = get_format(name)
    left = [file.name for file in folder.glob("cache/*/.*.partial")]
    whole = [file.parent.name for file in folder.glob(f"cache/*/{name}-*/manifest.json")]
    with DataCache(folder / "cache", _WORKLOAD) as cache:
        expected = list(_WORKLOAD.images())
        for encoding in encodings(fmt):
            with open_images(cache.path(fmt, encoding), name) as source:
                stored = source.take(range(len(source)))
            assert all(np.array_equal(pixels, image) for pixels, image in zip(stored, expected, strict=True))
        assert not list(folder.glob("cache/*/.*.partial"))
    in_use = [file.name for file in folder.glob("cache/*/.*.use-*")]
    assert not in_use, in_use
    shutil.rmtree(folder / "cache")
    return ", ".join(([f"whole {len(whole)}"] if whole else []) + (["leftover"] if left else [])) or "nothing"


def nothing(folder: Path, name: str) -> None:
    """Prepare nothing."""


def do_parts(folder: Path, name: str) -> None:
    source, path = folder / f"source.{_other(name)}", folder / "images.parts"
    convert(source, path, name, part_bytes=3 * images("new")[0].nbytes, shuffle_seed=1, overwrite=path.exists())


def look_at_parts(folder: Path, name: str) -> str:
    """Return the progress, after resuming: every image is there once, without leftovers."""
    path = folder / "images.parts"
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    num_done = len(list(path.glob("jobs/0*.json")))
    progress = "published" if "parts.json" in names else "half of the parts or more" if num_done >= 4 else "begun"
    hidden = folder / ".images.parts.making"
    if "parts.json" not in names or "jobs" in names or hidden.is_dir():
        progress += ", another made" if hidden.is_dir() else ""
        do_parts(folder, name)
    with open_images(path, verify=True) as source:
        order = [int(image_id[6:]) for image_id in source.image_ids]
        assert sorted(order) == list(range(COUNT)), order
        expected = images("new")
        taken = source.take(range(COUNT))
        assert all(
            np.array_equal(pixels[0, 0, 0], expected[position]) for pixels, position in zip(taken, order, strict=True)
        )
    left = sorted(entry.name for entry in path.iterdir())
    assert left == ["index.parquet", "parts", "parts.json"], left
    assert len(list((path / "parts").iterdir())) == COUNT // 3
    strays = {entry.name for entry in folder.iterdir()} - {
        path.name,
        path_of(folder, name).name,
        f"source.{_other(name)}",
    }
    assert not strays, strays
    if os.getpid() % 2:
        shutil.rmtree(path)  # Otherwise the next run would replace it.
    return progress


WORKS = {
    "write": Work(write("old"), write("new"), content_and_next_write),
    "convert": Work(prepare_convert, do_convert, content_and_next_write),
    "parts": Work(prepare_convert, do_parts, look_at_parts),
    "preload": Work(prepare_preload, do_preload, look_at_preload),
    "data": Work(nothing, do_data, look_at_data, share=3 / 8),
}


def forked(action: Callable[[], object], kill_after_s: float | None = None) -> tuple[int, str, float]:
    """Run an action in a fork; if requested, kill it some time after it begins.

    Return its wait status, its result or error, and its duration.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        os.write(writing, b"!")
        try:
            output = str(action())
            status = 0
        except BaseException:  # noqa: BLE001  # told to the parent
            output = traceback.format_exc()
        os.write(writing, output.encode()[-4000:])
        os._exit(status)
    os.close(writing)
    os.read(reading, 1)  # The action begins.
    start = time.monotonic()
    stop = start + (_LIMIT_S if kill_after_s is None else kill_after_s)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < stop:
        time.sleep(0.0005)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    took_s = time.monotonic() - start
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read().decode()
    if kill_after_s is None and os.WIFSIGNALED(ended[1]):
        output = f"took more than {_LIMIT_S} s"
    return ended[1], output, took_s


def kill_often(work: Work, name: str, folder: Path, times: int, seed: int) -> Iterator[str]:
    """Kill a work ``times`` times, each at a random moment; yield the finding after each.

    The moment is drawn from the last duration of the whole work. If the work ended before it, it is drawn again.
    """
    draw = random.Random(seed)
    status, output, _ = forked(lambda: work.prepare(folder, name))
    assert status == 0, output
    takes_s, kills, tries = 1.0, 0, 0
    while kills < times and tries < 4 * times + 4:
        wanted_s = None if tries == 0 else draw.uniform(0, takes_s)
        status, output, took_s = forked(lambda: work.do(folder, name), kill_after_s=wanted_s)
        killed = os.WIFSIGNALED(status)
        if not killed:
            assert status == 0, output
            takes_s = took_s
        tries, kills = tries + 1, kills + killed
        status, output, _ = forked(lambda: work.look(folder, name))
        if status:
            yield f"WRONG: {output}"
            return
        if killed:
            yield output


def race(folder: Path, name: str, rounds: int) -> str:
    """Let two processes replace one target while this one reads it; return the reads, in words and numbers.

    Each writes ``rounds`` times. Each read must return one complete content, or raise the package's error that the
    collection was replaced.
    """
    status, output, _ = forked(lambda: write("old")(folder, name))  # Libraries with threads must not be forked.
    assert status == 0, output
    path = path_of(folder, name)
    children = []
    for content in ("old", "new"):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for _ in range(rounds):
                    write(content)(folder, name)
                status = 0
            except BaseException:  # noqa: BLE001  # told to the parent
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    reads: Counter[str] = Counter()
    statuses: list[int] = []
    while len(statuses) < len(children):
        try:
            reads[whole_content(path, name)] += 1
        except OMEArrowDSError as error:
            assert str(path) in str(error), error  # noqa: PT017
            reads[type(error).__name__] += 1
        done = [os.waitpid(child, os.WNOHANG) for child in children[len(statuses) :][:1]]
        statuses += [status for pid, status in done if pid]
    assert statuses == [0, 0], statuses
    assert whole_content(path, name) in ("old", "new")
    assert [entry.name for entry in folder.iterdir()] == [path.name], list(folder.iterdir())
    return ", ".join(f"{outcome} {count}" for outcome, count in sorted(reads.items()))


def run_races(names: list[str], rounds: int) -> int:
    """Run races for every format; print the reads, and return how many formats were wrong."""
    wrong = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="race-") as folder:
            status, reads, _ = forked(partial(race, Path(folder), name, rounds))
        wrong += status != 0
        print(f"race     {name:<13} {reads}", flush=True)
    return wrong


def run(works: list[str], names: list[str], kills: int, seed: int) -> int:
    """Divide the kills among the works of every format; print a table, and return the number of failures."""
    wrong = 0
    shares = len(names) * sum(WORKS[work].share for work in works)
    for work in works:
        times = max(1, round(kills * WORKS[work].share / shares))
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix="kills-"))
            try:
                findings = Counter(kill_often(WORKS[work], name, folder, times, seed))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            killed = sum(count for finding, count in findings.items() if not finding.startswith("WRONG"))
            wrong += sum(count for finding, count in findings.items() if finding.startswith("WRONG"))
            summary = "; ".join(f"{finding} {count}" for finding, count in sorted(findings.items()))
            print(f"{work:<8} {name:<13} {killed:>4} kills: {summary}", flush=True)
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all (default: 200)")
    parser.add_argument("--formats", nargs="+", default=[fmt.name for fmt in FORMATS])
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=4, help="rounds per race (default: 4)")
    parser.add_argument("--runs", type=int, default=0, help="benchmark runs that are killed (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = [name for name in options.formats if get_format(name).missing_backend is None]
    for name in names:
        importlib.import_module(f"omearrow_ds.storage.formats.{name}")
        importlib.import_module(get_format(name).backend)
        writer_version(get_format(name))  # All forks inherit the cached version, which takes a second.
    start = time.monotonic()
    wrong = run(options.works, names, options.kills, options.seed) + run_races(names, options.rounds)
    wrong += kill_runs(options.runs, options.seed)
    print(f"seed {options.seed}, {time.monotonic() - start:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
