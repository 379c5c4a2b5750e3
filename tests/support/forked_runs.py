"""Runs of pytest that are processes of their own, forked from one that has imported what all of them would import.

``python -m tests.support.forked_runs`` reads a run a line, and answers each with its exit status. What notices whether
it was imported early stays out: pytest's plugins and conftest.py are each run's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("pytest_benchmark.plugin", "pytest_timeout")  # of those installed, others import hypothesis and zarr
_TIMEOUT_S = 240


class Runs:
    """Where runs are asked for: the process that forks them, and a folder for what they say."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def run(self, *words: str, path: Path | None = None, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run ``pytest WORDS`` at the repository's root, or at that of a copy; modules are found in ``path`` too."""
        said = self._folder / "said"
        said.unlink(missing_ok=True)
        plugins = PLUGINS if "no:benchmark" not in words else PLUGINS[1:]
        told = [f"-p{plugin}" for plugin in plugins] + ["-pno:cacheprovider", "-otimeout=0", *words]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"words": told, "path": str(path or ""), "root": str(root), "said": str(said)}) + "\n"
        )
        self._process.stdin.flush()
        return subprocess.CompletedProcess(told, int(self._process.stdout.readline()), said.read_text())


@contextmanager
def forked_runs(folder: Path) -> Iterator[Runs]:
    """Give the runs of one process, which ends on leaving."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Runs(process, folder)


def main() -> None:
    """Fork a run a line."""
    import matplotlib.figure  # noqa: F401
    import pytest
    import torch  # noqa: F401

    import omearrow_ds.loader.dataloader  # noqa: F401

    while line := sys.stdin.readline():
        asked = json.loads(line)
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        signal.alarm(_TIMEOUT_S)  # ends a run that hangs; pytest-timeout, which is for one test, would take it back
        output = os.open(asked["said"], os.O_WRONLY | os.O_CREAT)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(asked["root"])
        sys.path[:0] = filter(None, (asked["path"], asked["root"]))
        sys.exit(pytest.main(asked["words"]))


if __name__ == "__main__":
    main()
