"""The soak run: a short pass, and detection of wrong pixels, hangs, crashes and leaks."""

from __future__ import annotations

import json
import math
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import omearrow_ds.dataset.collection
import omearrow_ds.dataset.shared_memory
import omearrow_ds.kernels.gather
from omearrow_ds import FORMATS
from tests.adversarial.soak.__main__ import main
from tests.adversarial.soak.plan import Case, draw
from tests.adversarial.soak.programs import run
from tests.adversarial.soak.report import TOLERATED_BYTES_A_MINUTE, report, text_of
from tests.adversarial.soak.supervisor import Supervisor
from tests.adversarial.soak.watch import Held, grown, slope

pytestmark = pytest.mark.timeout(300)
HELD = {"private_bytes": 10**8, "allocated_bytes": 10**8, "shared_bytes": 0, "children_bytes": 0, "descriptors": 9}
HELD |= {"threads": 9, "children": 0}


@pytest.mark.slow
def test_a_short_pass_finds_nothing(tmp_path, capsys):
    told_to = tmp_path / "soak.json"
    status = main(["--seed", "4", "--cases", "5", "--report", str(told_to)])
    result = json.loads(told_to.read_text())
    assert result["errors"] == []
    assert status == 0, result["failures"]
    assert result["samples"] > 300
    assert capsys.readouterr().out.endswith("passed\n")


def test_a_case_is_always_the_same_for_a_seed():
    assert draw(3, 14) == draw(3, 14)
    assert draw(3, 14) != draw(3, 15) != draw(4, 15)
    assert json.dumps(draw(3, 14).as_dict(), default=repr)


def test_cases_come_to_everything():
    programs = [program for number in range(300) for program in draw(0, number).programs]
    stores = {(program.store.format, program.store.encoding, program.store.compression) for program in programs}
    for fmt in FORMATS:
        if not fmt.missing_backend:
            for encoding in ("bytes", "list") if fmt.kind == "table" else ("bytes",):
                assert {(fmt.name, encoding, compression) for compression in fmt.writer.compressions} <= stores
    assert {workers for program in programs for workers in program.loading.workers} == {0, 1, 2, "auto"}
    assert {program.view.preload for program in programs} == {True, False, "auto"}
    assert any(len(set(program.store.images.kinds)) > 1 for program in programs)
    assert any(not program.loading.listed and program.view.crop_size for program in programs)
    assert any(sum(map(nbytes, program.store.images.kinds)) > 2**25 for program in programs)


def nbytes(kind):
    shape, dtype = kind
    return math.prod(shape) * np.dtype(dtype).itemsize


def fits(program):
    view, kinds = program.view, program.store.images.kinds
    plain = view.normalize and view.crop_size is None and view.transform is None and not view.as_numpy
    return plain and len(set(kinds)) == 1 and len(kinds) == 33


def quick_case():
    """A case without workers, with an epoch."""
    cases = (draw(9, number, formats=("arrow",)) for number in range(1000))
    case = next(case for case in cases if fits(case.programs[0]))
    program = case.programs[0]
    loading = replace(program.loading, workers=(0, 0), batch_size=3, torchs_own=False, drop_last=False)
    return Case(9, case.number, (replace(program, loading=loading, acts=("epoch", "index")),), small_too=True)


def test_one_wrong_pixel_is_found(tmp_path, monkeypatch):
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    case, counts, scale = quick_case(), Counter(), omearrow_ds.kernels.gather.scale
    run(case, tmp_path / "right", counts)
    assert counts.total() > 5

    def damaged(pixels, divisor, out):
        scale(pixels, divisor, out)
        out.flat[-1] += 1

    monkeypatch.setattr(omearrow_ds.kernels.gather, "scale", damaged)
    monkeypatch.setattr(omearrow_ds.dataset.collection, "scale", damaged)
    with pytest.raises(AssertionError, match="sample is wrong"):
        run(case, tmp_path / "wrong", counts)


def test_memory_that_is_used_again_while_it_is_held_is_found(tmp_path, monkeypatch):
    counts = Counter()
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    run(quick_case(), tmp_path / "right", counts)
    assert counts["held and compared again"] > 5
    monkeypatch.setattr(omearrow_ds.dataset.shared_memory._ReusableBuffer, "is_free", True)
    with pytest.raises(AssertionError, match="held has changed"):
        run(quick_case(), tmp_path / "wrong", counts)


# Replaces the child: writes the given messages, and misbehaves as requested.
CHILD = """
import json, os, sys, time
pipe, seed, first = map(int, sys.argv[1:4])
said = os.fdopen(pipe, "w", buffering=1)
def stuck():
    time.sleep(600)
for number in range(first, first + 100):
    said.write(json.dumps({"begun": number}) + "\\n")
    if number == 2:
        print("before the crash", flush=True)
        os.kill(os.getpid(), 11)
    if number == 4:
        stuck()
    error = {"case": {}, "traceback": "Traceback:\\nValueError: no"} if number == 6 else None
    told = {"ended": number, "took_s": 0, "counts": {"samples: arrow": 10}, "error": error, "held": HELD}
    said.write(json.dumps(told) + "\\n")
"""


@pytest.fixture
def command(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace("HELD", repr({**HELD, "shm_files": 0})))
    return [sys.executable, str(child)]


def test_hangs_and_crashes_are_errors_with_stacks_and_the_run_goes_on(command, capsys):
    soak = Supervisor(command, 7, limit_s=1.0)
    soak.run(0, until_s=None, cases=9)
    crash, hang, error = soak.errors
    assert (crash["number"], crash["what"]) == (2, "the process ended with signal SIGSEGV")
    assert "before the crash" in crash["printed"]
    assert any("Segmentation fault" in line for line in crash["printed"])
    assert (hang["number"], hang["what"]) == (4, "hangs: it took more than 1 s")
    assert any("in stuck" in line for line in hang["printed"])
    assert (error["number"], error["what"]) == (6, "ValueError: no")
    assert error["again"] == "python -m tests.adversarial.soak --seed 7 --first 6 --cases 1"
    assert soak.cases == 7
    result = report(soak, 1.0, ended="done")
    assert result["samples"] == 70
    assert result["restarts"] == 2
    assert result["failures"] == ["3 errors"]
    assert "error in case 4: hangs" in text_of(result)
    assert "--first 2 --cases 1" in capsys.readouterr().err


def test_an_interrupted_run_reports_what_it_found(tmp_path):
    told_to = tmp_path / "soak.json"
    arguments = ["--minutes", "5", "--seed", "1", "--formats", "arrow", "--report", str(told_to)]
    done = subprocess.Popen(
        [sys.executable, "-m", "tests.adversarial.soak", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert "seed 1" in done.stdout.readline()
        time.sleep(1)
        done.send_signal(signal.SIGINT)
        output, _ = done.communicate(timeout=60)
    finally:
        done.kill()
        done.wait()
    assert done.returncode == 130
    assert "interrupted after" in output
    assert json.loads(told_to.read_text())["ended"] == "interrupted"


def watched(values, name="private_bytes", minutes=30):
    """Return a run in which a process had these values, one after each case."""
    soak = Supervisor([], 0)
    soak.counts["samples: arrow"] = 10 * len(values)
    minutes_of_cases = np.linspace(0, minutes, len(values)).tolist()
    resources = {**HELD, "shm_files": 0}
    soak.series = [
        [
            {"minutes": case_minutes, "samples": number, "number": number, "took_s": 0, **resources, name: int(value)}
            for number, (case_minutes, value) in enumerate(zip(minutes_of_cases, values, strict=True))
        ]
    ]
    return report(soak, minutes, ended="done")


def test_a_leak_is_found_and_noise_is_not():
    rng = np.random.default_rng(0)
    noise = 4e8 + 2e7 * rng.random(300)
    leak = np.linspace(0, 30 * 4 * TOLERATED_BYTES_A_MINUTE, 300)
    result = watched(noise + leak)
    assert result["memory"]["verdict"] == "grows"
    interval = result["memory"]["bytes_a_minute"]
    assert interval["low"] < 4 * TOLERATED_BYTES_A_MINUTE < interval["high"]
    assert "private memory grows by" in result["failures"][0]
    assert watched(noise)["failures"] == []
    assert watched(noise + leak, minutes=3)["failures"] == []  # The series is too short.
    assert watched(np.full(300, 4e8))["memory"]["verdict"] == "does not grow"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators cannot be asked")
def test_memory_that_is_free_is_not_held_and_what_is_in_use_is():
    before = Held.now()
    blocks = [b"x" * 65_536 for _ in range(2000)]
    pin = b"x" * 65_536  # Memory above free memory keeps an allocator from shrinking.
    during = Held.now()
    del blocks
    after = Held.now()
    assert len(pin) == 65_536
    for name, slack in (("private_bytes", 30_000_000), ("allocated_bytes", 1_000_000)):
        assert getattr(during, name) - getattr(before, name) > 2000 * 65_536 - slack
        assert getattr(after, name) - getattr(before, name) < slack


@pytest.mark.parametrize("name", ["descriptors", "threads", "children", "shared_bytes"])
def test_what_grows_and_never_falls_back_is_found(name):
    unit = 2**20 if name == "shared_bytes" else 1
    rng = np.random.default_rng(1)
    assert watched(unit * (10 + rng.integers(0, 5, 120)), name)["failures"] == []
    (failure,) = watched(unit * (10 + np.arange(120) // 6), name)["failures"]
    assert failure.startswith(f"{name} grow")


@pytest.mark.parametrize(("correlation", "most"), [(0.0, 0.03), (0.5, 0.03), (0.9, 0.03)])
def test_the_interval_means_what_it_says(correlation, most):
    """About 0.5 % of series without a slope may seem to rise. Correlated neighbors must not increase this."""
    rng = np.random.default_rng(2)
    rises, positions = 0, np.arange(240.0)
    for _ in range(200):
        values = rng.normal(size=240)
        for index in range(1, 240):
            values[index] += correlation * values[index - 1]
        rises += slope(positions, values).low > 0
    assert rises / 200 <= most


def test_a_short_series_has_no_slope():
    assert slope(range(20), range(20)) is None
    assert slope([1.0] * 60, range(60)) is None
    assert grown([1, 2, 3]) == 0
    assert grown([5, 1, 5, 1, 9, 9, 6, 6]) == 1
    assert slope(range(60), [2 * position for position in range(60)]).per_unit == pytest.approx(2)
