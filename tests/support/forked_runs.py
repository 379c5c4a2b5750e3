"""Runs of pytest, each a program of `tests.support.programs` with its own plugins and conftest.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.programs import ROOT, Programs

PLUGINS = ("pytest_benchmark.plugin", "pytest_timeout")  # Other installed plugins import hypothesis and zarr.
_TIMEOUT_S = 240  # Ends a hanging run. pytest-timeout is for single tests, and would reset the alarm.
_RUN = """
import os, sys

import pytest

for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
root, path, *words = sys.argv[1:]
os.chdir(root)
sys.path[:0] = [*filter(None, [path]), root]
os.dup2(1, 2)


class Plugin:
    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_generate_machine_info(self):
        return {}  # what pytest-benchmark finds takes a second, and is not used


sys.exit(pytest.main(words, plugins=[Plugin()]))
"""


class Runs:
    """Starts runs of pytest."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        programs.prepare("matplotlib.figure")

    def run(self, *words: str, path: Path | None = None, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run ``pytest WORDS`` in the repository root or a copy of it; modules are also found in ``path``."""
        plugins = PLUGINS if "no:benchmark" not in words else PLUGINS[1:]
        arguments = [f"-p{plugin}" for plugin in plugins] + ["-pno:cacheprovider", "-otimeout=0", *words]
        return self._programs.run(_RUN, root, path or "", *arguments, timeout_s=_TIMEOUT_S)
