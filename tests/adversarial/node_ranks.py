"""Ranks under torchrun on one or two hosts, over a collection in parts, stopped at random and resumed by others.

``python -m tests.adversarial.node_ranks --runs 24`` prints a line per run, and exits with 1 after any failure. Runs
have 1 to 4 ranks per host, 0 to 2 workers per rank (every combination once in 24), and random batch sizes. A few runs
share an epoch; each except the last stops at random. Every image comes once. As padding, fewer images than ranks may
repeat; with ``drop_last``, the last incomplete batch of the ranks is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

from omearrow_ds import convert, write_images
from tests.support import numbered
from tests.support.cluster import Node, cluster, outcome

COUNT, PART_BYTES = 211, 12_000  # Images have 1,920 bytes.


class Run(NamedTuple):
    """Numbers of hosts, of ranks per host, and of workers per rank."""

    hosts: int
    ranks: int
    workers: int


_LIMIT_S = 400  # The limit is for a busy machine; a run takes half a minute.
_RUNS = list(starmap(Run, product((1, 2), (1, 2, 3, 4), (0, 1, 2))))


def torchrun(
    nodes: Sequence[Node],
    collection: Path | str,
    folder: Path,
    *words: object,
    ranks: int = 1,
    module: str = "tests.support.rank",
) -> list[dict[str, Any]]:
    """Run a module under torchrun with ``ranks`` ranks per node; return the report of each rank."""
    folder.mkdir()
    launched(nodes, ["-m", module, collection, folder, *words], ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(nodes) * ranks)]


def launched(nodes: Sequence[Node], program: Sequence[object], ranks: int = 1) -> None:
    """Run a program under torchrun with ``ranks`` ranks per node."""
    started = []
    for number, node in enumerate(nodes):
        launch = ["torch.distributed.run", "--nnodes", len(nodes), "--node-rank", number, "--nproc-per-node", ranks]
        launch += ["--master-addr", nodes[0].name, "--master-port", 29500]
        env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        started.append(node.start([sys.executable, "-m", *launch, *program], env))
    outputs = [outcome(process, _LIMIT_S) for process in started]
    assert [process.returncode for process in started] == [0] * len(nodes), "\n".join(outputs)


def runs(count: int, drawn: random.Random) -> list[Run]:
    """Return ``count`` runs; no combination repeats before all were used."""
    drawn_runs: list[Run] = []
    while len(drawn_runs) < count:
        drawn_runs += drawn.sample(_RUNS, len(_RUNS))
    return drawn_runs[:count]


class Epoch:
    """An epoch that several runs share: its samples so far, and the state that the last run saved."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.state: Path | None = None

    def go_on(self, nodes: Sequence[Node], collection: Path, folder: Path, run: Run, drawn: random.Random) -> str:
        """Continue with one run; return the result in words, or raise `AssertionError` if it is wrong."""
        before, ranks, batch_size = self.counts.total(), run.hosts * run.ranks, drawn.randint(1, 7)
        most = (COUNT - before) // (ranks * batch_size)  # Number of full batches per rank.
        stops = drawn.randint(1, most) if most > 1 and drawn.random() < 0.75 else None
        drops = stops is None and drawn.random() < 0.3
        words: list[object] = ["--workers", run.workers, "--batch-size", batch_size]
        words += [*(["--batches", stops] if stops else []), *(["--drop-last"] if drops else [])]
        words += ["--resume", self.state] if self.state else []
        reports = torchrun(nodes[: run.hosts], collection, folder, *words, ranks=run.ranks)
        for report in reports:
            self.counts.update(report["found"])
        self.state = folder / "state" if stops else None
        again, missing = self.counts.total() - len(self.counts), COUNT - len(self.counts)
        summary = f"{run} from {before}, batches of {batch_size}: {again} again, {missing} missing"
        if stops:
            assert (again, self.counts.total()) == (0, before + stops * batch_size * ranks), summary
        elif drops:
            assert again == 0 <= missing < ranks * batch_size, summary
        else:
            assert missing == 0 <= again < ranks, summary
        return f"{summary}{', stopped' if stops else ', the rest dropped' if drops else ''}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=len(_RUNS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    drawn, start, wrong, ended = random.Random(options.seed), time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as name, cluster(2) as nodes:
        folder, epoch = Path(name), Epoch()
        write_images([numbered.image(number) for number in range(COUNT)], folder / "images.arrow", axes="CYX")
        convert(folder / "images.arrow", folder / "plate.parts", part_bytes=PART_BYTES)
        for number, run in enumerate(runs(options.runs, drawn)):
            try:
                print(epoch.go_on(nodes, folder / "plate.parts", folder / str(number), run, drawn), flush=True)
            except AssertionError as error:
                print(f"{run}: WRONG: {error}", flush=True)
                wrong, epoch = wrong + 1, Epoch()
            if epoch.state is None:
                ended, epoch = ended + 1, Epoch()
    print(
        f"seed {options.seed}, {options.runs} runs, {ended} epochs ended, "
        f"{time.monotonic() - start:.0f} s, {wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
