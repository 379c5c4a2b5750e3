"""Program of each rank under ``torchrun`` in the tests: reads and checks batches of `tests.support.numbered` images.

``python -m tests.support.rank COLLECTION FOLDER [--batches N] [--resume FILE]`` writes ``FOLDER/RANK.json``; rank 0
also ``FOLDER/state``, once it has its batches.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path

import psutil
import torch
import torch.distributed

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset
from tests.support.numbered import number_of
from tests.support.programs import Programs


def as_torchrun(programs: Programs, code: str, *words: object, ranks: int) -> None:
    """Run a program on ranks of this host in torchrun's environment, without importing torch per rank (seconds).

    Raises
    ------
    AssertionError
        If one fails, with its output.
    """
    programs.prepare("torch._dynamo")  # DistributedDataParallel imports it.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    code = f"import torch; torch.set_num_threads(1)  # as OMP_NUM_THREADS, which torchrun sets, would\n{code}"
    started = [
        programs.start(code, *words, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, has_workers=True)
        for rank in range(ranks)
    ]
    for done in [program.wait() for program in started]:
        assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    """Run one epoch, or ``--batches`` batches of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collection", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--drop-last", action="store_true")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    dataset = OMEArrowDataset(options.collection, normalize=False, preload=False, axes="CYX")
    how = {"shuffle": True, "num_workers": options.workers, "drop_last": options.drop_last}
    loader = OMEArrowDataLoader(dataset, options.batch_size, **how)
    if options.resume:
        loader.load_state_dict(torch.load(options.resume, weights_only=False))
    numbers, open_parts = [], set()
    for number, batch in enumerate(loader, 1):
        numbers += [number_of(image.numpy()) for image in batch]
        open_parts |= _open_part_names(options.collection)
        if number == options.batches:
            break
    if rank == 0:
        torch.save(loader.state_dict(), options.folder / "state")
    report = {
        "host": socket.gethostname(),
        "found": numbers,
        "held": sorted(open_parts),
        "ranks": torch.distributed.get_world_size(),
    }
    (options.folder / f"{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def _open_part_names(collection: Path) -> set[str]:
    """Return the names of the parts of a collection that this rank or one of its workers has open or mapped."""
    paths = set()
    for process in [own := psutil.Process(os.getpid()), *own.children(recursive=True)]:
        for opened in [*process.memory_maps(), *process.open_files()]:
            paths.add(opened.path)
    return {path.rpartition("/")[2] for path in paths if path.startswith(f"{collection}/parts/")}


if __name__ == "__main__":
    main()
