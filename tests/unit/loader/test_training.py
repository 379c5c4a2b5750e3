"""Ranks that are processes, over parts: under torchrun, and the examples of ``docs/TRAINING.md``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support import numbered
from tests.unit.test_parts import publish

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]
ROOT = Path(__file__).parents[3]
SIZES = [5, 1, 11, 6]
EXAMPLES = {
    section.partition("\n")[0]: section.partition("```python\n")[2].partition("```")[0]
    for section in (ROOT / "docs/TRAINING.md").read_text().split("\n## ")[1:]
}


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


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_have_all_parts_and_go_on_with_another_number(path, tmp_path, workers):
    def found(name: str, ranks: int, *words: object) -> list[list[int]]:
        folder = tmp_path / name
        folder.mkdir()
        torchrun("-m", "tests.support.rank", path, folder, "--workers", workers, *words, ranks=ranks)
        return [json.loads((folder / f"{rank}.json").read_text())["found"] for rank in range(ranks)]

    first = found("first", 2, "--batches", 2)
    assert [len(each) for each in first] == [6, 6]
    rest = found("rest", 3, "--resume", tmp_path / "first/state")
    counted = Counter(number for share in (*first, *rest) for number in share)
    assert set(counted) == set(range(sum(SIZES)))
    assert counted.total() == sum(SIZES) + -11 % 3


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_run(path, tmp_path, name):
    library = {"torchrun": "torch", "Ray Train": "ray"}.get(name, name.lower())
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = tmp_path / "train.py"
    program.write_text(EXAMPLES[name])
    if name in ("torchrun", "Accelerate"):
        torchrun(program, path, tmp_path, cwd=tmp_path)
    else:
        run(sys.executable, program, path, cwd=tmp_path)  # Lightning leaves checkpoints where it runs
    if name == "torchrun":
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert (state["epoch"], state["consumed"]) == (1, 0)
        torchrun(program, path, tmp_path, cwd=tmp_path)
        assert torch.load(tmp_path / "state.pt", weights_only=True)["epoch"] == 2


def test_every_example_is_found():
    assert list(EXAMPLES) == ["torchrun", "Lightning", "Accelerate", "Ray Train"]
    assert all(EXAMPLES.values())
