"""Ranks as processes, over parts: torchrun and the examples of ``docs/how-to/several-hosts.md``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support import numbered
from tests.support.objects import serving
from tests.support.parts import publish
from tests.support.rank import as_torchrun

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]
ROOT = Path(__file__).parents[3]
SIZES = [5, 1, 11, 6]
PAGE = (ROOT / "docs/how-to/several-hosts.md").read_text()
EXAMPLES = dict(re.findall(r"^## (.+)\n(?:(?!## ).*\n)*?```python.*\n((?:.*\n)*?)```", PAGE, re.MULTILINE))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    images = [numbered.image(number)[None, :, None] for number in range(sum(SIZES))]
    return publish(tmp_path_factory.mktemp("training") / "plate.parts", images, SIZES)


def torchrun(*words: object, ranks: int = 2, cwd: Path = ROOT) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]
    run(*launch, cwd=cwd)


def run(*words: object, cwd: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_have_all_parts_and_go_on_with_another_number(path, tmp_path, workers):
    def train(name: str, ranks: int, *words: object) -> list[list[int]]:
        folder = tmp_path / name
        folder.mkdir()
        torchrun("-m", "tests.support.rank", path, folder, "--workers", workers, *words, ranks=ranks)
        return [json.loads((folder / f"{rank}.json").read_text())["found"] for rank in range(ranks)]

    first = train("first", 2, "--batches", 2)
    assert [len(numbers) for numbers in first] == [6, 6]
    rest = train("rest", 3, "--resume", tmp_path / "first/state")
    counted = Counter(number for share in (*first, *rest) for number in share)
    assert set(counted) == set(range(sum(SIZES)))
    assert counted.total() == sum(SIZES) + -11 % 3


@pytest.mark.parametrize("name", ["Lightning", "Accelerate", "Ray Train"])
def test_the_examples_run(path, tmp_path, name):
    library = {"Ray Train": "ray"}.get(name, name.lower())
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = tmp_path / "train.py"
    program.write_text(EXAMPLES[name])
    if name == "Accelerate":
        torchrun(program, path, tmp_path, cwd=tmp_path)
    else:
        run(sys.executable, program, path, cwd=tmp_path)  # Lightning writes checkpoints to the working directory.


@pytest.fixture(params=["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def state_after(request, programs):
    """Return a function that runs the torchrun program and returns its saved state, even after a failure."""

    def run(folder: Path, code: str, path: object) -> dict[str, dict]:
        try:
            if request.param == "torchrun":
                (folder / "train.py").write_text(code)
                torchrun(folder / "train.py", path, folder / "run", cwd=folder)
            else:
                as_torchrun(programs, code, path, folder / "run", ranks=2)
        except AssertionError:
            assert "raise KeyboardInterrupt" in code
        return torch.load(folder / "run/state.pt", weights_only=True)

    return run


@pytest.mark.parametrize("last", [2, pytest.param(3, marks=pytest.mark.slow)])  # A rank has 3 batches.
def test_what_was_killed_and_goes_on_ends_as_what_ran_through(state_after, path, tmp_path, last):
    code = EXAMPLES["torchrun"].replace("SAVE_EVERY = 2, 100", "SAVE_EVERY = 2, 1; torch.manual_seed(0)")
    stop = f"            save()\n            if number == {last}: raise KeyboardInterrupt\n"
    killed = code.replace("            save()\n", stop)
    assert len({code, killed, EXAMPLES["torchrun"]}) == 3
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    whole = state_after(tmp_path / "whole", code, path)
    half = state_after(tmp_path / "again", killed, path)
    state = half["loader"]
    assert (state["epoch"], state["consumed"]) == ((0, 8 * last) if last < 3 else (1, 0))
    again = state_after(tmp_path / "again", code, path)
    assert (again["loader"]["epoch"], again["loader"]["consumed"]) == (2, 0)
    assert again["loader"] == whole["loader"]
    for name in ("module.weight", "module.bias"):
        assert not torch.equal(half["model"][name], whole["model"][name])
        torch.testing.assert_close(again["model"][name], whole["model"][name])
    momentum = [state["optimizer"]["state"][0]["momentum_buffer"] for state in (again, whole)]
    torch.testing.assert_close(*momentum)


def test_the_program_reads_from_a_bucket_as_the_page_says(state_after, path, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    lines = EXAMPLES["torchrun"].splitlines(keepends=True)
    line_number = next(number for number, line in enumerate(lines) if line.startswith("dataset = "))
    with serving(path.parent.parent) as server:
        dataset = EXAMPLES["From a bucket"].replace(
            'endpoint="http://minio:9000"', f'endpoint="{server.url}", anonymous=True'
        )
        dataset = dataset.replace('"/scratch/cache"', repr(str(tmp_path / "cache")))
        dataset = dataset.replace('"s3://bucket/plate.parts"', "collection")
        assert server.url in dataset
        assert "/scratch" not in dataset
        code = "from omearrow_ds import Storage\n" + "".join([*lines[:line_number], dataset, *lines[line_number + 1 :]])
        state = state_after(tmp_path, code, f"s3://{path.parent.name}/{path.name}")
        assert state["loader"]["epoch"] == 2
        fetched = [times for name, times in server.requests.items() if "/parts/" in name]
        assert fetched == [1] * len(SIZES)  # Once for two ranks and two epochs.


def test_every_example_is_found():
    assert list(EXAMPLES) == ["torchrun", "From a bucket", "Lightning", "Accelerate", "Ray Train"]
    assert all(EXAMPLES.values())
