"""Kill workers, drivers and nodes, and cut links, while a Dask cluster on three nodes converts a plate to parts.

``python -m tests.adversarial.node_kills --kills 50`` prints a table, and exits with 1 after any failure. Two nodes have
a worker, the first also the scheduler; the third has the driver. After each kill the killed program is restarted, and
also the driver if it failed. Then every image must exist exactly once, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support import numbered
from tests.support.cluster import Node, cluster, kill
from tests.support.engine import Engine

COUNT, PART_BYTES = 96, 4000  # 48 parts of two images
_LIMIT_S = 120
FORMATS = ("arrow", "parquet", "vortex", "tiff", "ome_zarr")


class Run:
    """A cluster that converts one plate repeatedly."""

    def __init__(self, nodes: Sequence[Node], folder: Path) -> None:
        self.nodes, self.folder, self.engine = nodes, folder, Engine(nodes)
        self.plate = numbered.write_plate(folder / "plate", COUNT)
        self.driver: subprocess.Popen[str] | None = None

    def worker(self, drawn: random.Random) -> None:
        """Kill only a worker; its nanny starts another one."""
        kill_worker(self.engine.workers[drawn.randrange(2)])

    def both_programs(self, drawn: random.Random) -> None:
        """Kill the worker and its nanny, and start both again."""
        self.start_again(drawn.randrange(2))

    def start_again(self, which: int) -> None:
        """Kill all processes of a worker, and start it."""
        kill(self.engine.workers[which])
        self.engine.workers[which] = self.engine.start_worker(self.nodes[which])

    def driver_itself(self, drawn: random.Random) -> None:
        assert self.driver is not None
        kill(self.driver)

    def link(self, drawn: random.Random) -> None:
        """Cut off a worker or the driver for some seconds."""
        node = self.nodes[drawn.randrange(1, 3)]
        node.link("down")
        time.sleep(drawn.uniform(0, 3))
        node.link("up")

    def node(self, drawn: random.Random) -> None:
        """Cut off a worker until the conversion is done."""
        self.nodes[1].link("down")


KINDS: dict[str, Callable[[Run, random.Random], None]] = {
    "worker": Run.worker,
    "worker and nanny": Run.both_programs,
    "driver": Run.driver_itself,
    "link": Run.link,
    "node": Run.node,
}


def kill_worker(program: subprocess.Popen[str]) -> None:
    """Kill the last process in the chain that a program started."""
    import psutil

    below = psutil.Process(program.pid).children(recursive=True)
    worker = next((child for child in below if "spawn_main" in " ".join(child.cmdline())), None)
    if worker is not None:
        worker.kill()


def once(run: Run, kind: str, form: str, drawn: random.Random) -> str:
    """Convert with one kill; return the result, or raise `AssertionError` if the parts are wrong."""
    path = run.folder / "plate.parts"
    run.driver = run.engine.convert(run.nodes[2], run.plate, path, PART_BYTES, form)
    num_parts = numbered.wait_for_parts(path, drawn.randrange(1, 44))
    KINDS[kind](run, drawn)
    output = run.driver.communicate(timeout=_LIMIT_S)[0]
    result = "the same driver ended it"
    if run.driver.returncode:
        result = "the next driver ended it"
        run.driver = run.engine.convert(run.nodes[2], run.plate, path, PART_BYTES, form)
        again = run.driver.communicate(timeout=_LIMIT_S)[0]
        assert run.driver.returncode == 0, f"{output}\n{again}"
    if kind == "node":  # Its programs end with the link.
        run.nodes[1].link("up")
        run.start_again(1)
    parts = numbered.check_parts(path, COUNT)
    assert parts in ([], [2] * 48), parts
    shutil.rmtree(path)
    return result if num_parts < 48 else "it was over before"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    drawn, start = random.Random(options.seed), time.monotonic()
    results: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, cluster(3) as nodes:
        run = Run(nodes, Path(folder))
        for number in range(options.kills):
            kind = list(KINDS)[number % len(KINDS)]
            form = options.formats[number // len(KINDS) % len(options.formats)]
            begun = time.monotonic()
            try:
                result = once(run, kind, form, drawn)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(f"{kind}, {form}: WRONG: {error}", flush=True)
                results[kind]["WRONG"] += 1
                break
            results[kind][result] += 1
            print(f"{number + 1}: {kind}, {form}: {result}, {time.monotonic() - begun:.0f} s", flush=True)
    for kind, counts in results.items():
        listed = "; ".join(f"{result} {n}" for result, n in sorted(counts.items()))
        print(f"{kind:<17} {counts.total():>3} kills: {listed}")
    wrong = sum(counts["WRONG"] for counts in results.values())
    print(f"seed {options.seed}, {time.monotonic() - start:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
