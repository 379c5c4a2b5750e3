"""Records of the samples that seeded loaders deliver: their order, and the pixels of random crops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.contract.loading import (
    NUM_BATCHES,
    SEED,
    Run,
    as_rank,
    checksums,
    open_crops,
    open_images,
    write_collection,
    write_parts,
)

_WORKERS, _FEW_WORKERS = (0, 1, 2, 5), (0, 2)
_RANKS = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))  # Rank and world size.
_POSITIONS = {"at the start": 0, "after 3 batches": 3, "after the last batch": NUM_BATCHES}
_OTHER_SEED = 99
_SHUFFLE = {"shuffle": True}


def record_orders(folder: Path) -> dict[str, Any]:
    """Return the numbers of the images in each batch."""
    one, sixty = write_collection(folder), write_collection(folder, 60)
    single, parts = Run(open_images(one), _SHUFFLE), Run(open_images(write_parts(one)), _SHUFFLE)
    windows = Run(single.dataset, {"shuffle_fields": 5})
    many = Run(open_images(write_parts(sixty, 2)), _SHUFFLE)
    return {
        "one file": _record(single, _WORKERS),
        "parts": {
            **_record(parts, _WORKERS),
            "on 2 hosts": {f"rank {rank} of 4": _of_rank(parts, rank, 4, per_host=2) for rank in range(4)},
            "resumed by 3 ranks after 1 batch of 2 ranks": _resumed_by_other_ranks(parts),
        },
        "shuffle_fields=5": _record(windows, _FEW_WORKERS),
        "30 parts": many.epochs(many.loader()),
        "not shuffled": _merge_equal(
            (name, Run(run.dataset, {}).epochs(Run(run.dataset, {}).loader()))
            for name, run in (("one file", single), ("parts", parts))
        ),
    }


def record_crops(folder: Path) -> dict[str, Any]:
    """Return the number of the image and the CRC-32 of the pixels of each random crop."""
    one = write_collection(folder)
    return {
        "one file": _record(Run(open_crops(one), _SHUFFLE, checksums), _WORKERS),
        "parts": _record(Run(open_crops(write_parts(one)), _SHUFFLE, checksums), _FEW_WORKERS),
    }


def _record(run: Run, workers: Iterable[int]) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        seeded_globally = run.epochs(run.loader(seed=None))
    return {
        "by number of workers": _merge_equal((str(count), run.epochs(run.loader(count), 3)) for count in workers),
        "seeded by torch.manual_seed": seeded_globally,
        "by rank": {f"rank {rank} of {size}": _of_rank(run, rank, size) for rank, size in _RANKS},
        "resumed": {name: _merge_equal(_resumed(run, position)) for name, position in _POSITIONS.items()},
    }


def _merge_equal(records: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return records by label. Equal records have one entry with all their labels."""
    labels: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for label, value in records:
        labels.setdefault(repr(value), []).append(label)
        values[repr(value)] = value
    return {", ".join(labels[key]): value for key, value in values.items()}


def _of_rank(run: Run, rank: int, world_size: int, per_host: int | None = None) -> list[Any]:
    with as_rank(rank, world_size, per_host):
        return run.epochs(run.loader())


def _resumed(run: Run, position: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the rest of the second epoch, and the third, as a new loader delivers them from a state."""
    for before, after in ((0, 0), (2, 0), (0, 2)):
        resumed = run.loader(after, _OTHER_SEED)
        resumed.load_state_dict(state_after(run, position, before))
        yield f"{before} then {after} workers", run.epochs(resumed)


def state_after(run: Run, position: int | None, workers: int = 0) -> dict[str, Any]:
    """Return the state after a whole epoch and ``position`` batches of the next. None and 0 do not begin it."""
    loader = run.loader(workers)
    list(loader)
    batches = iter(loader) if position else iter(())
    list(islice(batches, position))
    return loader.state_dict()


def _resumed_by_other_ranks(run: Run) -> dict[str, Any]:
    with as_rank(1, 2):
        state = state_after(run, 1)
    recorded = {}
    for rank in range(3):
        with as_rank(rank, 3):
            resumed = run.loader(seed=_OTHER_SEED)
            resumed.load_state_dict(state)
            recorded[f"rank {rank} of 3"] = run.epochs(resumed)
    return recorded
