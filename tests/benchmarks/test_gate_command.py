"""The whole gate on a tiny repository: verdicts on slower, broken and renamed code, and no leftovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks.gate import baton, rounds
from benchmarks.gate.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = """
def work():
    return sum(range({count}))

def brisk():
    return sum(range({brisk}))

def pixels():
    return {pixels!r}
"""
SUITE = {
    "__init__": "",
    "conftest": """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--data")

        def pytest_benchmark_generate_machine_info():
            return {}  # what pytest-benchmark finds takes a second, and is not used

        def pytest_configure(config):
            config.addinivalue_line("markers", "gate(track, operation)")

        @pytest.fixture(autouse=True)
        def told(request, benchmark):
            benchmark.extra_info["gate"] = request.node.get_closest_marker("gate").args[0]
        """,
    "pixels": """
        import argparse, json, pathlib
        import tiny

        parser = argparse.ArgumentParser()
        parser.add_argument("--data", type=pathlib.Path)
        parser.add_argument("--json", type=pathlib.Path)
        chosen = parser.parse_args()
        chosen.data.mkdir()
        (chosen.data / "file").write_text(tiny.pixels())
        chosen.json.write_text(json.dumps({"read": tiny.pixels()}))
        """,
    "test_gate": """
        import pytest, tiny
        from time import process_time
        from benchmarks.baton import baton, in_turns, least_of_turns

        ROUNDS = 800

        def measure(benchmark, work):
            worked_s = []

            def working():
                start_s = process_time()
                work()
                worked_s.append(process_time() - start_s)

            work()
            rounds = baton().agreed(benchmark.name, ROUNDS)
            benchmark.pedantic(working, setup=in_turns(rounds), rounds=rounds)
            baton().hand_over()
            benchmark.extra_info["worked_s"] = least_of_turns(worked_s)

        @pytest.mark.gate("control", "control")
        def test_control(benchmark):
            measure(benchmark, lambda: sum(range(2000)))

        @pytest.mark.gate(1, "work")
        def test_work(benchmark):
            measure(benchmark, tiny.work)

        @pytest.mark.gate(1, "other")
        def test_other(benchmark):
            measure(benchmark, tiny.brisk)
        """,
}
MORE = '\n\n@pytest.mark.gate(1, "{name}")\ndef test_{name}(benchmark):\n    {body}\n'


class Repository:
    """A tiny package with a suite, in a git repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "src" / "tiny" / "__init__.py"
        self.suite = folder / "benchmarks" / "test_gate.py"
        self.package.parent.mkdir(parents=True)
        self.suite.parent.mkdir()
        self.write()
        for name, text in SUITE.items():
            (self.suite.parent / f"{name}.py").write_text(dedent(text))
        shutil.copy(baton.__file__, self.suite.parent / "baton.py")
        (folder / ".gitignore").write_text("__pycache__\n")
        self.configure()
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def write(self, count: int = 2000, brisk: int = 1000, pixels: str = "same") -> None:
        self.package.write_text(PACKAGE.format(count=count, brisk=brisk, pixels=pixels))

    def configure(self, options: str = "") -> None:
        (self.folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p pytest_benchmark.plugin {options}\n")

    def add(self, name: str, body: str = "measure(benchmark, tiny.work)") -> None:
        with self.suite.open("a") as file:
            file.write(MORE.format(name=name, body=body))

    def git(self, *words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *author, *words], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a state")

    def state(self) -> tuple[str, ...]:
        """State of the user's repository that the gate must not change."""
        commands = ("worktree", "list"), ("branch", "--all"), ("status", "--porcelain"), ("diff",), ("stash", "list")
        return tuple(self.git(*words) for words in commands)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for temporary folders, in which none may be left."""
    folder = tmp_path / "room"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the environment of these tests from the gates' processes, with any additions of users."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "COV_"))]:
        if name != "PYTEST_CURRENT_TEST":  # pytest removes this one itself.
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x -k nothing --benchmark-disable")


def words_of(repository: Repository, *words: str) -> list[str]:
    # One round more than the minimum shows that open benchmarks are measured again.
    few = ["--max-rounds", "6", "--threshold", "25"]
    return ["--base", "HEAD", "--head", str(repository.folder), *few, *words]


def start(repository: Repository, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gate", *words_of(repository, *words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def as_command(repository: Repository, *words: str) -> tuple[int, str]:
    process = start(repository, *words)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def in_process(repository: Repository, *words: str) -> tuple[int, str]:
    with StringIO() as output, redirect_stdout(output), redirect_stderr(output):
        try:
            status = main(words_of(repository, *words))
        except SystemExit as left:
            status = int(str(left.code))
        return status, output.getvalue()


def gate(
    repository: Repository,
    *words: str,
    run: Callable[..., tuple[int, str]] = in_process,
    expected_status: int | None = None,
) -> tuple[int, str]:
    """Run a gate; repeat if the machine was too busy for a verdict, or until the status is ``expected_status``.

    A shared machine may be faster during a whole round of one side, which shows as a change in benchmarks of 20 us.
    """
    before = repository.state()
    for _ in range(3):
        status, output = run(repository, *words)
        assert repository.state() == before
        if status == expected_status or (expected_status is None and status != 3):
            break
    return status, output


def running() -> list[str]:
    """Return the command lines of this machine's processes."""
    return [path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]


def left_behind(room: Path) -> list[Path]:
    shared = Path("/dev/shm")
    mine = [path for path in shared.glob("omearrow-ds-gate-*") if path.stat().st_uid == os.getuid()]
    return [path for path in [*room.glob("omearrow-ds-gate-*"), *mine] if not _in_use(path)]


def _in_use(folder: Path) -> bool:
    """Return whether the gate of another test uses the folder."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / ".in-use", timeout=0):
            return False
    except (Timeout, OSError):
        return True


@pytest.mark.serial
def test_no_change_and_what_base_cannot_run_is_new(repository: Repository, room: Path, tmp_path: Path) -> None:
    repository.package.write_text(repository.package.read_text() + "\n\nnewer = work\n")
    repository.configure("-x")  # If base stopped at the first failure, the rest would look new.
    repository.add("newer", "measure(benchmark, tiny.newer)")
    repository.add("later")
    repository.add("skipped", "pytest.skip('not here')")
    files = {name: tmp_path / "results" / f"gate.{name}" for name in ("json", "md", "png")}
    words = [f"--{option}={files[name]}" for option, name in (("json", "json"), ("summary", "md"), ("figure", "png"))]
    status, output = gate(repository, *words, run=as_command, expected_status=0)
    assert status == 0, output
    assert "No regression: none of 3 benchmarks" in output
    assert "New, only run by head: test_gate.py::test_newer (AttributeError" in output
    assert "Skipped: test_gate.py::test_skipped (not here)." in output
    assert "round 1 of 5: 4 benchmarks" in output
    assert "left" in output
    results = json.loads(files["json"].read_text())
    names = {row["name"].rpartition("::")[2] for row in results["benchmarks"]}
    assert names == {"test_work", "test_other", "test_later"}
    assert all(row["rounds"] >= 5 and len(row["base"]) == len(row["head"]) for row in results["benchmarks"])
    assert all(len(times["worked_s"]) == baton.TURNS for row in results["benchmarks"] for times in row["base"])
    assert results["exit"] == 0
    assert results["machine"]
    assert "### No regression" in files["md"].read_text()
    assert files["png"].stat().st_size > 10_000
    assert not left_behind(room)


@pytest.mark.serial
def test_a_slowdown_and_an_improvement_that_are_not_committed(repository: Repository, room: Path) -> None:
    repository.write(count=3000, brisk=500)
    status, output = gate(repository, expected_status=1)
    assert status == 1, output
    assert "Regression: work (+" in output
    assert "other" not in output.rpartition("\n")[0].rpartition("\n")[2]
    assert "improved" in next(line for line in output.splitlines() if line.startswith("other"))
    assert not left_behind(room)


@pytest.mark.slow
def test_what_is_open_is_measured_again_and_is_no_pass(repository: Repository) -> None:
    """With only six rounds, a change of 3 % is not resolved against 0.5 %, however small the noise."""
    repository.write(count=2060)
    status, output = gate(repository, "--threshold", "0.5", expected_status=3)
    assert status == 3, output
    assert "round 5 of 5: 3 benchmarks" in output
    assert "round 6 of 6: " in output
    assert "Too noisy to judge" in output
    assert "a slowdown of more than 0.50% is neither shown nor excluded" in output


@pytest.mark.slow
def test_no_further_round_is_begun_that_would_take_too_long(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_MOST_S", 1.0)
    monkeypatch.setattr(rounds, "_AGAIN", 0.0)
    repository.write(count=2060)
    status, output = gate(repository, "--threshold", "0.5", expected_status=3)
    assert status == 3, output
    assert "round 5 of 5" in output
    assert "round 6" not in output


@pytest.mark.slow
def test_new_and_gone_benchmarks(repository: Repository) -> None:
    repository.write()
    repository.add("later")
    repository.commit()
    repository.suite.write_text(repository.suite.read_text().replace("test_later", "test_renamed"))
    status, output = gate(repository, "--own-benchmarks", "--strict")
    assert status == 2, output
    assert "New, only run by head: test_gate.py::test_renamed." in output
    assert "Missing, only run by base: test_gate.py::test_later." in output
    assert "head lacks 1 benchmarks of base, which --strict forbids" in output


def test_different_pixels_are_not_compared_in_speed(repository: Repository, room: Path, tmp_path: Path) -> None:
    repository.write(pixels="other")
    summary = tmp_path / "gate.md"
    status, output = gate(repository, "--summary", str(summary))
    assert status == 2, output
    assert "give different pixels, so their speed is not compared:\n    read" in output
    assert "different pixels" in summary.read_text()
    assert "round 1" not in output
    assert not left_behind(room)


def test_a_base_that_does_not_run(repository: Repository, room: Path) -> None:
    good = repository.package.read_text()
    repository.package.write_text("raise ImportError('no good')\n")
    repository.commit()
    repository.package.write_text(good)
    status, output = gate(repository)
    assert status == 2, output
    assert "base (HEAD (" in output
    assert "cannot write and read its data" in output
    assert "no good" in output
    assert not left_behind(room)


def test_a_head_that_fails_its_benchmarks(repository: Repository, room: Path) -> None:
    repository.add("broken", "assert tiny.work() == 0")
    status, output = gate(repository)
    assert status == 2, output
    assert "fails its own benchmarks" in output
    assert not left_behind(room)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@pytest.mark.gate(1,", "@pytest.mark.skip('gone') #", "no benchmark in common"),
        ('"control", "control"', '1, "control"', "there is no control"),
        pytest.param(
            "import pytest, tiny", "import pytest, tiny, nothing_like_it", "does not run", marks=pytest.mark.slow
        ),
    ],
)
def test_suites_that_cannot_be_compared(repository: Repository, old: str, new: str, message: str) -> None:
    repository.suite.write_text(repository.suite.read_text().replace(old, new))
    status, output = gate(repository)
    assert status == 2, output
    assert message in output


def test_disabled_benchmarks_are_no_pass(repository: Repository) -> None:
    repository.configure("--benchmark-disable")
    status, output = gate(repository)
    assert status == 2, output
    assert "were they disabled?" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base", "no-such-ref"], "git rev-parse"),
        (["--head", "no-such-ref"], "git rev-parse"),
        (["--rounds", "4"], "fewer than 5 give no interval"),
        (["--rounds", "7", "--max-rounds", "6"], "less than --rounds"),
        (["--threshold", "0"], "above 0"),
        (["--threshold", "nan"], "above 0"),
        (["--figure", "figure.xyz"], "its suffix must be one of"),
        (["--summary", "/proc/none/gate.md"], "/proc/none"),
    ],
)
def test_bad_arguments(repository: Repository, words: list[str], message: str) -> None:
    status, output = gate(repository, *words)
    assert status == 2, output
    assert message in output


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_gate_leaves_nothing(repository: Repository, room: Path, number: int) -> None:
    repository.add("long", "__import__('time').sleep(60)")
    before = repository.state()
    process = start(repository)
    assert process.stdout is not None
    while "head: data written" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1.0)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert repository.state() == before
    assert not left_behind(room)
    assert not [words for words in running() if "benchmarks/test_gate.py" in words and str(room) in words]
