"""A Dask cluster on nodes: a scheduler on the first, a worker on each of the first two, and drivers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.cluster import Node
from tests.support.numbered import PATTERN

PORT = 8786
_ENV = {
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11s",  # A node is lost after this silence; 30 s by default.
    "DASK_TEMPORARY_DIRECTORY": "/dev/shm",  # Each node has its own, which disappears with it.
    "OMP_NUM_THREADS": "1",
}
_DRIVER = """
import sys
from distributed import Client
from omearrow_ds import convert

address, source, target, form, pattern, part_bytes = sys.argv[1:]
with Client(address) as client:
    client.wait_for_workers(2, timeout=60)
    print("ready", flush=True)
    convert(source, target, form, pattern=pattern, part_bytes=int(part_bytes), executor=client.get_executor())
"""


class Engine:
    """A scheduler and two workers, each with a nanny that restarts it.

    Attributes
    ----------
    address
        Address of the scheduler.
    workers
        Programs of the workers, in the order of the nodes.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.address = f"tcp://{nodes[0].name}:{PORT}"
        self._start(nodes[0], "scheduler", "--host", nodes[0].name, "--port", PORT, "--no-dashboard")
        self.workers = [self.start_worker(node) for node in nodes[:2]]

    def start_worker(self, node: Node) -> subprocess.Popen[str]:
        """Start a worker; it waits for the scheduler."""
        return self._start(node, "worker", self.address, "--nthreads", 1, "--host", node.name, "--no-dashboard")

    def convert(
        self, node: Node, source: Path, target: Path, part_bytes: int, form: str = "arrow"
    ) -> subprocess.Popen[str]:
        """Start a driver that converts a plate of `tests.support.numbered` to parts."""
        words = [self.address, source, target, form, PATTERN, part_bytes]
        driver = node.start([sys.executable, "-W", "ignore", "-c", _DRIVER, *words], _ENV)
        assert driver.stdout is not None
        first_line = driver.stdout.readline()
        assert first_line == "ready\n", first_line + driver.communicate()[0]
        return driver

    def _start(self, node: Node, service: str, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", f"distributed.cli.dask_{service}", *words]
        return node.start(command, _ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
