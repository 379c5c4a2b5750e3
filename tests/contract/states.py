"""Saved states of loaders, written once, and the record of the batches that follow when they are loaded.

``python -m tests.contract.states`` writes files that are missing, and never changes one that exists.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.adversarial.golden.archive import pack, sha256, unpack
from tests.contract.loading import (
    IMAGE_SHAPE,
    NUM_BATCHES,
    Run,
    as_rank,
    checksums,
    numbers,
    open_crops,
    open_images,
    write_collection,
    write_parts,
)
from tests.contract.records import FOLDER, as_json
from tests.support.strategies import image_of

STATES = FOLDER / "states"
DIGESTS = STATES / "SHA256SUMS"
_PARTS = STATES / "images-23.parts.zip"  # The state of a collection in parts fits these files only.
_OTHER_SEED = 99
_SLOW_IMAGE = 19  # It is in the first batch of the second epoch.


@dataclass(frozen=True)
class Case:
    """A loader, and when its state was saved.

    Attributes
    ----------
    is_in_parts, has_crops
        Whether images are in parts, and whether samples are random crops.
    position
        Number of batches of the second epoch that were delivered. At 0 the epoch was not begun.
    """

    position: int
    is_in_parts: bool = False
    has_crops: bool = False
    options: Mapping[str, Any] | None = None
    workers: int = 0
    ranks: tuple[int, int, int | None] = (0, 1, None)  # Rank, world size, ranks per host.


CASES = {
    "one-file-start": Case(0),
    "one-file-middle": Case(3),
    "one-file-end": Case(NUM_BATCHES),
    "one-file-workers": Case(3, workers=2),
    "one-file-out-of-order": Case(2, workers=2, options={"in_order": False}),
    "one-file-not-shuffled": Case(3, options={"shuffle": False}),
    "one-file-single-samples": Case(3, options={"batch_size": None}),
    "one-file-shuffle-fields": Case(3, options={"shuffle_fields": 5}),
    "one-file-crops": Case(3, has_crops=True),
    "one-file-rank-1-of-2": Case(1, ranks=(1, 2, None)),
    "parts-start": Case(0, is_in_parts=True),
    "parts-middle": Case(3, is_in_parts=True),
    "parts-end": Case(NUM_BATCHES, is_in_parts=True),
    "parts-workers": Case(3, is_in_parts=True, workers=2),
    "parts-out-of-order": Case(2, is_in_parts=True, workers=2, options={"in_order": False}),
    "parts-not-shuffled": Case(3, is_in_parts=True, options={"shuffle": False}),
    "parts-crops": Case(3, is_in_parts=True, has_crops=True),
    "parts-rank-1-of-2": Case(1, is_in_parts=True, ranks=(1, 2, None)),
    "parts-rank-3-of-4-on-2-hosts": Case(1, is_in_parts=True, ranks=(3, 4, 2)),
}


def record(folder: Path) -> dict[str, Any]:
    """Return for each state the rest of its epoch, and the next epoch, of all ranks."""
    datasets = _Datasets(folder)
    recorded = {}
    for name, case in CASES.items():
        run = datasets.run(case)
        _, world_size, per_host = case.ranks
        recorded[name] = [_resume(run, load(name)["state"], rank, world_size, per_host) for rank in range(world_size)]
    return recorded


def _resume(run: Run, state: dict[str, Any], rank: int, world_size: int, per_host: int | None) -> list[Any]:
    with as_rank(rank, world_size, per_host):
        loader = run.loader(seed=_OTHER_SEED)
        loader.load_state_dict(state)
        return run.epochs(loader)


def load(name: str) -> dict[str, Any]:
    """Return a saved state, and the batches of its epoch that were delivered before."""
    saved: dict[str, Any] = json.loads((STATES / f"{name}.json").read_text(encoding="utf-8"))
    return {**saved, "state": {key: _decode(value) for key, value in saved["state"].items()}}


class _Datasets:
    """The collections, unpacked or written into a folder."""

    def __init__(self, folder: Path) -> None:
        self._one = write_collection(folder)
        unpack(_PARTS, folder)
        self._parts = folder / _PARTS.stem

    def run(self, case: Case) -> Run:
        """Return the way to load of a case."""
        path = self._parts if case.is_in_parts else self._one
        dataset = open_crops(path) if case.has_crops else open_images(path)
        options = {"shuffle": True, **(case.options or {})}
        if "shuffle_fields" in options:
            del options["shuffle"]
        return Run(dataset, options, _summary(case))


def _summary(case: Case) -> Any:
    if case.options and "batch_size" in case.options:
        return _number
    return checksums if case.has_crops else numbers


def _number(sample: Any) -> int:
    return int(sample[1])


def write_missing(folder: Path) -> Iterator[Path]:
    """Write the files that are missing, and yield them."""
    STATES.mkdir(exist_ok=True)
    if not _PARTS.exists():
        pack(write_parts(write_collection(_new(folder / "parts"))), _PARTS)
        yield _PARTS
    datasets = _Datasets(_new(folder / "datasets"))
    for name, case in CASES.items():
        file = STATES / f"{name}.json"
        if not file.exists():
            file.write_text(as_json(_save(datasets.run(case), case)) + "\n", encoding="utf-8")
            yield file


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _save(run: Run, case: Case) -> dict[str, Any]:
    if "in_order" in run.options:
        run = replace(run, dataset=run.dataset.with_transform(_wait_for_slow_image))
    with as_rank(*case.ranks):
        loader = run.loader(case.workers)
        list(loader)
        batches = iter(loader) if case.position else iter(())
        delivered = [run.summarize(batch) for batch in islice(batches, case.position)]
        state = loader.state_dict()
    versions = {package: version(package) for package in ("omearrow-ds", "torch", "numpy")}
    return {
        "written by": versions,
        "delivered": delivered,
        "state": {key: _encode(value) for key, value in state.items()},
    }


def _wait_for_slow_image(image: torch.Tensor) -> torch.Tensor:
    """Delay a batch in a worker, so that later ones are delivered before it."""
    is_slow = image.flatten()[0].item() == np.float32(image_of(IMAGE_SHAPE, "uint16", _SLOW_IMAGE)[0, 0] / 65535)
    time.sleep(1 if is_slow else 0)
    return image


def _encode(value: Any) -> Any:
    """Return a value of a state as JSON. Tensors of bytes are compressed, in base 64."""
    if isinstance(value, torch.Tensor):
        assert value.dtype == torch.uint8
        return {"uint8": base64.b64encode(zlib.compress(value.numpy().tobytes(), 9)).decode()}
    if isinstance(value, list):
        return list(map(_encode, value))
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_decode, value))
    if isinstance(value, dict) and set(value) == {"uint8"}:
        data = zlib.decompress(base64.b64decode(value["uint8"]))
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return value


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for written in write_missing(Path(temporary)):
            with DIGESTS.open("a", encoding="utf-8") as digests:
                print(f"{sha256(written)}  {written.name}", file=digests)
            print(f"{written.name}: written", file=sys.stderr)
