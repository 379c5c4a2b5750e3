"""Kill runs of ``pytest benchmarks``, and check that the next run works with the leftover files."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import pyarrow.parquet as pq
from filelock import FileLock

from benchmarks.support import data

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 280
_RESULTS = 3  # Each run writes a table and a figure of track 0, and the summary.
_PHASES = ("data", "stored")  # The first file in a folder shows that a run makes data and measures, or that it stores.


def kill_runs(times: int, seed: int) -> int:
    """Kill runs alternately while they make data and while they store results; return how many were wrong."""
    if not times:
        return 0
    findings: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        try:
            for finding in _kill_often(Path(folder), times, random.Random(seed)):
                findings[finding] += 1
        except AssertionError as error:
            findings[f"WRONG: {error!r}"] += 1
    summary = "; ".join(f"{finding} {count}" for finding, count in sorted(findings.items()))
    print(f"run      {'parquet, tiff':<13} {sum(findings.values()):>4} kills: {summary}", flush=True)
    return sum(finding.startswith("WRONG") for finding in findings)


def _kill_often(folder: Path, times: int, draw: random.Random) -> Iterator[str]:
    with _started(folder, 0) as process:
        since = {phase: _appears(folder / phase / "0", process) for phase in _PHASES}
        assert process.wait(_LIMIT_S) == 0, _output(folder)
        lasts_s = {phase: time.monotonic() - start for phase, start in since.items()}
    lasts_s["data"] -= lasts_s["stored"]
    _look(folder, 0)
    kills, tries = 0, 0
    while kills < times and tries < 2 * times + 2:
        tries += 1
        phase = _PHASES[kills % len(_PHASES)]
        with _started(folder, tries) as process:
            _appears(folder / phase / str(tries), process)
            time.sleep(draw.uniform(0, lasts_s[phase]))
            killed = process.poll() is None
            if killed:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_LIMIT_S)
        left = _left(folder, tries)
        with _started(folder, tries) as process:
            assert process.wait(_LIMIT_S) == 0, _output(folder)
        _look(folder, tries)
        kills += killed
        if killed:
            yield f"while it {'made data or measured' if phase == 'data' else 'stored'}{', leftover' if left else ''}"


def _started(folder: Path, number: int) -> subprocess.Popen:
    options = [f"--data={folder / 'data' / str(number)}", f"--results={folder / 'results'}"]
    options += [f"--benchmark-storage=file://{folder / 'stored' / str(number)}", "--benchmark-autosave"]
    options += ["--num-images=40", "--image-shape=100x100", "--formats=parquet,tiff", "-q", "-p", "no:cacheprovider"]
    run = [sys.executable, "-m", "pytest", "benchmarks/test_track0_storage.py", *options]
    with (folder / "said.txt").open("wb") as log:
        return subprocess.Popen(run, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def _output(folder: Path) -> str:
    return (folder / "said.txt").read_text(errors="replace")[-2000:]


def _appears(path: Path, process: subprocess.Popen) -> float:
    """Wait for the first entry in a folder; return the time."""
    stop = time.monotonic() + _LIMIT_S
    while not list(path.glob("*")) and process.poll() is None:
        assert time.monotonic() < stop, path
        time.sleep(0.005)
    return time.monotonic()


def _left(folder: Path, number: int) -> list[Path]:
    """Return the incomplete files of a killed run."""
    patterns = [f"data/{number}/*/.*.partial", f"stored/{number}/*/*.partial", "results/.*.tmp", "data/*/*/.*.use-*"]
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _look(folder: Path, number: int) -> None:
    """Check the results of a run that ended well: all complete, no partial files, no locks."""
    results = sorted((folder / "results").iterdir())
    assert len(results) == _RESULTS, results
    for path in results:
        if path.suffix == ".parquet":
            assert pq.read_table(path).num_rows
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        else:
            assert matplotlib.image.imread(path).size
    stored = list(folder.glob(f"stored/{number}/*/*.json"))
    assert stored
    for path in stored:
        assert json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    pieces = [path.parent for path in folder.glob(f"data/{number}/*/*/{data.MANIFEST}")]
    assert len(pieces) >= 2, pieces
    assert all(map(data.intact, pieces))
    assert not _left(folder, number), _left(folder, number)
    for lock in [*folder.glob(f"data/{number}/*/.*.lock"), *folder.glob(f"stored/{number}/*/.lock")]:
        with FileLock(lock, timeout=0):
            pass
