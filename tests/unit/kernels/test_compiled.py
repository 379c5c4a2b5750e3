"""Compiling loops: only when it pays, without numba, without a home folder, and in threads and processes at once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from omearrow_ds.kernels import compiled
from omearrow_ds.kernels.crops import crops
from omearrow_ds.kernels.scaling import scale
from omearrow_ds.kernels.stacks import Stacks
from tests.support.loops import made_by

PROGRAM = """
import sys, os, warnings
warnings.simplefilter("error")
import numpy as np
from omearrow_ds.kernels import compiled
from omearrow_ds.kernels.scaling import scale
from omearrow_ds.kernels.stacks import Stacks
assert "numba" not in sys.modules
pixels, out = np.arange(60_000, dtype=np.uint16), np.empty(60_000, np.float32)
compiled.worth(compiled.WORTH_BYTES)
{act}
assert out.tobytes() == (pixels.astype(np.float32) / np.float32(65535)).tobytes()
print(compiled.compiled.cache_info().currsize, "numba" in sys.modules)
"""
DIVIDE = "scale(pixels, np.float32(65535), out)"


def run(act, home, **environment):
    """Start a process that has numba compile, with its output piped."""
    variables = {"HOME": str(home), "PATH": "/usr/bin:/bin", **environment}
    command = [sys.executable, "-c", PROGRAM.format(act=act)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output_words(process):
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), err
    return out.split()


def test_numba_is_not_imported_before_it_is_worth_it(monkeypatch):
    monkeypatch.setattr(compiled, "_numba", None)  # Calling it would raise.
    pixels, out = np.arange(10, dtype=np.uint8), np.empty(10, np.float32)
    scale(pixels, np.float32(255), out)
    assert not compiled.worth(10)
    assert out[3] == np.float32(3) / np.float32(255)


def test_a_process_changes_over_once_it_has_made_enough(monkeypatch):
    for modules, enough_bytes in (({}, compiled.WORTH_BYTES), ({"numba": None}, compiled.READY_BYTES)):
        monkeypatch.setattr(compiled.sys, "modules", modules)
        with made_by("numpy"):
            counted = compiled.COUNTER
            counted.made_bytes = 0
            assert not compiled.worth(enough_bytes - 1)
            assert compiled.worth(1)
            assert compiled.COUNTER.worth


def test_crops_count_four_times_their_bytes(monkeypatch):
    monkeypatch.setattr(compiled, "_numba", None)  # Calling it would raise.
    fields, out = np.zeros((1, 1, 1, 1, 20, 20), np.uint16), np.zeros((1, 1, 1, 1, 5, 5), np.float32)
    corner = np.zeros(1, np.int64)
    with made_by("numpy"):
        before = compiled.COUNTER.made_bytes
        crops(Stacks([fields]), [corner] * 3, out, np.float32(65535), "constant")
        assert compiled.COUNTER.made_bytes - before == compiled.CROP_WEIGHT * out.nbytes


def test_without_numba_it_is_numpy(tmp_path):
    assert output_words(run(f"sys.modules['numba'] = None\n{DIVIDE}", tmp_path)) == ["1", "True"]  # The cached None.


@pytest.mark.slow
def test_two_processes_and_the_next_share_what_is_kept(tmp_path):
    pytest.importorskip("numba")
    both = [run(DIVIDE, tmp_path) for _ in range(2)]
    assert [output_words(program) for program in both] == [["1", "True"]] * 2
    compiled_files = sorted((tmp_path / ".cache" / "omearrow_ds" / "numba").rglob("*.nbc"))
    assert compiled_files
    times = [file.stat().st_mtime_ns for file in compiled_files]
    assert output_words(run(DIVIDE, tmp_path)) == ["1", "True"]
    assert [file.stat().st_mtime_ns for file in compiled_files] == times
    for file in compiled_files:
        file.write_bytes(b"damaged")
    assert output_words(run(DIVIDE, tmp_path)) == ["1", "True"]


@pytest.mark.parametrize("act", ["no folder", pytest.param("full disk", marks=pytest.mark.slow)])
def test_what_cannot_be_kept_is_compiled_all_the_same(tmp_path, act):
    pytest.importorskip("numba")
    home = tmp_path / "home"
    home.write_text("no folder")
    full = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
{DIVIDE}"""
    process = run(DIVIDE, home) if act == "no folder" else run(full, tmp_path)
    assert output_words(process) == ["1", "True"]


def test_threads_that_race_and_a_child_that_is_forked(tmp_path):
    pytest.importorskip("numba")
    act = f"""
from concurrent.futures import ThreadPoolExecutor
outs = [np.empty_like(out) for _ in range(8)]
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda each: scale(pixels, np.float32(65535), each), outs))
assert all(each.tobytes() == outs[0].tobytes() for each in outs)
child = os.fork()
if not child:
    {DIVIDE}
    os._exit(out.tobytes() != outs[0].tobytes())
assert os.waitpid(child, 0)[1] == 0
out = outs[7]
"""
    assert output_words(run(act, tmp_path)) == ["1", "True"]
