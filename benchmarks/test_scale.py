"""Comparison with other libraries on one bucket, in turns: cold and warm epoch, first batch, bytes.

Only ``make scale`` runs it. It reads 4,000 crops of 5 x 96 x 96 uint16 in parts of 16 MiB from an object store,
SeaweedFS: directly, and through a proxy that counts and simulates a link of 20 ms and 1 Gb/s. This package is also
measured there while three in ten requests fail. It writes ``scale.json`` and ``scale.md`` to the results; the
latter is a marked section of docs/explanation/comparison.md. Each turn is a process with an empty cache, and the
time to the first batch includes opening.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gate import environment
from benchmarks.support import weed as server
from benchmarks.support.proxy import proxying
from benchmarks.support.scale import BATCH, READERS, SHAPE
from benchmarks.support.weed import Weed
from benchmarks.support.workload import NAMED
from omearrow_ds import write_images

_IMAGES, _ROUNDS, _LIMIT_S = 4000, 3, 600
_NONE, _LINK = "none", "20 ms, 1 Gb/s"
_LINK_BITS, _OF_LINK = 1e9, 0.9
_LONGER = "target 1.5, without pauses"
_FAULTS, _FAILING = ("503", "reset", "cut", "lost"), 0.3
_BARS = {"litdata": (1.2, 1.4), "mosaic": (2.0, 4.0), "webdataset": (1.3, 0.0), "local": (0.0, 0.9)}  # Cold, warm.
_MARK = "<!-- buckets: {} (make scale) -->"
ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.object_store, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """Yield the object store."""
    if missing := server.missing():
        pytest.skip(missing)
    with server.serving(tmp_path_factory.mktemp("weed")) as store:
        yield store


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Iterator[Path]:
    """Yield a folder with the images in one file of this package."""
    count = pytestconfig.getoption("num_images") or _IMAGES
    fields = [np.asarray(field).reshape(5, 1080, 1080) for field in NAMED["fields"].images()]
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        write_images(map(_crop, [fields] * count, range(count)), Path(name) / "data.arrow", axes="CYX")
        yield Path(name)


def _crop(fields: list[np.ndarray[Any, Any]], number: int) -> np.ndarray[Any, Any]:
    y, x = np.random.default_rng(number).integers(0, 1080 - SHAPE[1], 2)
    return np.ascontiguousarray(fields[number % len(fields)][:, y : y + SHAPE[1], x : x + SHAPE[2]])


def test_scale(benchmark: BenchmarkFixture, weed: Weed, folder: Path, pytestconfig: pytest.Config) -> None:
    """Measure all installed readers over both links, and write the table."""
    benchmark.pedantic(_measure, (weed, folder, pytestconfig), rounds=1)


def _measure(weed: Weed, folder: Path, pytestconfig: pytest.Config) -> None:
    bucket, count = "scale", pytestconfig.getoption("num_images") or _IMAGES
    weed.make_bucket(bucket)
    env = {**os.environ, **weed.keys()}
    names = [name for name, reader in READERS.items() if reader.missing is None]
    for name in names:
        _run(["write", name, folder / name, folder / "data.arrow", bucket], {**env, "AWS_ENDPOINT_URL": weed.url})
        if (folder / name).is_dir():
            weed.put_folder(bucket, folder / name)
            weed.put_folder(f"{weed.public}/{bucket}", folder / name)
    env["SHARDS"] = str(len(list((folder / "webdataset").glob("*.tar"))))
    turns: dict[str, dict[str, list[Any]]] = {link: {name: [] for name in names} for link in (_NONE, _LINK)}
    with proxying(weed.url) as proxy:
        for _ in range(_ROUNDS):
            for name in names:
                turns[_NONE][name].append(_turn(name, bucket, weed.url, env, folder))
            for name in names:
                proxy.set(latency_s=0.02, link_bits=_LINK_BITS)
                turn, counts = _turn(name, bucket, proxy.url, env, folder), proxy.counts()
                turns[_LINK][name].append({**turn, "requests": counts.requests, "bytes": counts.bytes})
        failing = []
        for seed in range(_ROUNDS):
            proxy.set(latency_s=0.02, link_bits=_LINK_BITS, share=_FAILING, kinds=_FAULTS, seed=seed)
            turn, counts = _turn("arrow", bucket, proxy.url, env, folder), proxy.counts()
            failing.append({**turn, "requests": counts.requests, "failed": counts.failed.total()})
    for repeats in (failing, *(repeats for of_link in turns.values() for repeats in of_link.values())):
        assert {turn[epoch]["images"] for turn in repeats for epoch in ("cold", "warm")} == {count}
    results = pytestconfig.getoption("results").absolute()
    results.mkdir(parents=True, exist_ok=True)
    (results / "scale.json").write_text(json.dumps({**turns, "failing": failing}, indent=1))
    table = _table(turns, failing, count)
    (results / "scale.md").write_text(table)
    print(f"\n{table}\n{results / 'scale.md'}: replaces the marked section of docs/explanation/comparison.md")


def _turn(name: str, bucket: str, url: str, env: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the cost of a reader's two epochs."""
    with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as cache:
        output = _run(["read", name, bucket, Path(cache)], {**env, "AWS_ENDPOINT_URL": url})
    costs: dict[str, Any] = json.loads(output.splitlines()[-1])
    return costs


def _run(words: list[Any], env: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.support.scale", *map(str, words)]
    options: dict[str, Any] = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": _LIMIT_S}
    done = subprocess.run(command, **options, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    output: str = done.stdout
    return output


def _table(turns: dict[str, dict[str, list[Any]]], failing: list[dict[str, Any]], count: int) -> str:
    """Return the medians as tables, between the markers of docs/explanation/comparison.md."""
    image_bytes = 2 * int(np.prod(SHAPE))
    machine, today = environment.machine(), datetime.now(UTC).strftime("%Y-%m-%d")
    caption = f"{count:,} images of {image_bytes:,} bytes in batches of {BATCH}, medians of {_ROUNDS} turns; {today}, "
    caption += f"{machine['cpu']}, {machine['cores_usable']} cores for server, proxy and reader, {machine['python']}"
    lines = [_MARK.format("begin"), caption, ""]
    lines += ["| reader | link | cold, images/s | ours, x | warm, images/s | ours, x | first batch, s | CPU, cold, s |"]
    lines += ["|" + "---|" * 8]
    for link, of_link in turns.items():
        for name, repeats in of_link.items():
            cold, warm = (_ratio(of_link, name, epoch, limited=link == _LINK) for epoch in ("cold", "warm"))
            first_s = statistics.median(turn["opening_s"] + turn["cold"]["first_s"] for turn in repeats)
            cpu_s = statistics.median(turn["cold"]["cpu_s"] for turn in repeats)
            rates = (f"{_rate(repeats, 'cold'):,.0f}", cold, f"{_rate(repeats, 'warm'):,.0f}", warm)
            cpu = "-" if name == "webdataset" else f"{cpu_s:.2f}"
            lines.append(f"| {' | '.join((READERS[name].name, link, *rates, f'{first_s:.2f}', cpu))} |")
    lines += ["", "| reader | requests | bytes, of the images' | of the link, cold |", "|---|---|---|---|"]
    for name, repeats in turns[_LINK].items():
        epochs = 1 if READERS[name].caches else 2
        requests, sent = (statistics.median(turn[key] for turn in repeats) for key in ("requests", "bytes"))
        used = statistics.median(8 * turn["bytes"] / epochs / turn["cold"]["seconds"] / _LINK_BITS for turn in repeats)
        share = f"{used:.0%}, >= {_OF_LINK:.0%}" if name == "arrow" else f"{used:.0%}"
        share = f"**{share}**" if name == "arrow" and used < _OF_LINK else share
        lines.append(f"| {READERS[name].name} | {requests:,.0f} | {sent / image_bytes / count:.2f} | {share} |")
    lines += ["", _failing(turns[_LINK]["arrow"], failing)]
    absent = [f"{reader.name}: {reader.missing}" for reader in READERS.values() if reader.missing]
    return "\n".join([*lines, "", *absent, _MARK.format("end")]) + "\n"


def _failing(clean: list[Any], failing: list[Any]) -> str:
    """Return a sentence with the time of an epoch while requests fail, including pauses before the next attempt."""
    clean_s = statistics.median(turn["opening_s"] + turn["cold"]["seconds"] for turn in clean)
    ratios = sorted((turn["opening_s"] + turn["cold"]["seconds"]) / clean_s for turn in failing)
    requests, failed = (sum(turn[key] for turn in failing) for key in ("requests", "failed"))
    faults = f"{failed} of {requests} requests fail ({', '.join(_FAULTS)})"
    times = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"Opening plus a cold epoch while {faults} took {times} times as long, including pauses ({_LONGER})."


def _ratio(turns: dict[str, list[Any]], name: str, epoch: str, *, limited: bool) -> str:
    """Return the speedup of our Arrow parts, in bold if it is less than required.

    A link that limits all readers equally caps the cold speedup, so it has no requirement there.
    """
    ratio, bar = _rate(turns["arrow"], epoch) / _rate(turns[name], epoch), _BARS.get(name, (0, 0))[epoch == "warm"]
    bar = 0 if limited and epoch == "cold" else bar
    return f"**{ratio:.2f}**, >= {bar}" if ratio < bar else f"{ratio:.2f}{f', >= {bar}' if bar else ''}"


def _rate(turns: list[Any], epoch: str) -> float:
    return float(statistics.median(turn[epoch]["images"] / turn[epoch]["seconds"] for turn in turns))
