"""Hosts on one machine: each has its own network link, host name, processes and shared memory; files are shared.

A node is a process in its own namespaces that waits for the end of its input, which comes when the parent process ends
for any reason. With the first process of the namespaces, the kernel ends all others in them and removes links and
mounts. Nothing has a name outside, so nothing can be left over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.programs import ROOT

_NSENTER = ["nsenter", "--preserve-credentials"]
_ALL = ["--net", "--uts", "--ipc", "--pid", "--mount"]
_OWN = ["unshare", *_ALL, "--mount-proc", "--fork", "--kill-child"]
_SWITCH = "ip link set lo up && ip link add switch type bridge && ip link set switch up && echo ready && exec cat"
_NODE = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs none /dev/shm && ip link set lo up '
    "&& echo ready && exec cat"
)


class Node:
    """A host of a cluster.

    Parameters
    ----------
    name, address
        Its host name and address, which all nodes know.
    init, switch
        Process ids of the first processes of its namespaces and of those of the switch.
    """

    def __init__(self, name: str, address: str, init: int, switch: int) -> None:
        self.name, self.address = name, address
        self._enter = [*_NSENTER, "--user", *_ALL, "--target", str(init), f"--wd={ROOT}"]
        self._started: list[subprocess.Popen[str]] = []
        self._switch = [*_NSENTER, "--user", "--net", "--target", str(switch)]

    def start(
        self, command: Sequence[object], env: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start a program on this node, in the repository root; its output is piped unless ``options`` change this."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = [*self._enter, *map(str, command)]
        env = os.environ | {"PYTHONFAULTHANDLER": "1"} | (env or {})
        self._started.append(subprocess.Popen(words, env=env, **pipes | options))
        return self._started[-1]

    def run(self, command: Sequence[object], env: Mapping[str, str] | None = None, timeout_s: float = 120) -> str:
        """Run a program on this node, and return its output.

        Raises
        ------
        AssertionError
            If it fails, with its output.
        """
        process = self.start(command, env)
        output = outcome(process, timeout_s)
        assert process.returncode == 0, f"{self.name}: status {process.returncode}\n{output}"
        return output

    def link(self, state: str) -> None:
        """Disconnect this node from all others (``"down"``), or reconnect it (``"up"``), at the switch."""
        subprocess.run([*self._switch, "ip", "link", "set", self.name, state], check=True, capture_output=True)

    def end(self) -> None:
        """Kill the processes that were started here, after the node has ended."""
        for process in self._started:
            with process:
                process.kill()


def outcome(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Return the output of a program that has ended; after a timeout, end it, with the stacks of its processes."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as late:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True)[::-1]:
                child.send_signal(signal.SIGABRT)  # Python writes its stack.
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        kill(process)
        return f"{late}:\n{process.communicate()[0]}"


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a program that was started on a node, and its child processes."""
    with suppress(psutil.NoSuchProcess):
        for running in [*psutil.Process(process.pid).children(recursive=True), process]:
            running.kill()


@contextmanager
def cluster(nodes: int = 2) -> Iterator[list[Node]]:
    """Yield nodes, ``node1`` and so on, on one switch; skip the test, with the reason, without namespaces."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = {f"node{number}": f"10.77.0.{number}" for number in range(1, nodes + 1)}
        hosts = folder / "hosts"
        hosts.write_text(
            "".join(f"{address} {name}\n" for name, address in [("localhost", "127.0.0.1"), *names.items()])
        )
        started: list[Node] = []
        stack.callback(lambda: [node.end() for node in started])
        switch = stack.enter_context(_namespaces([*_OWN, "--map-root-user"], _SWITCH))
        own = [*_NSENTER, "--user", "--target", str(switch), *_OWN]
        for name, address in names.items():
            init = stack.enter_context(_namespaces(own, _NODE, name, hosts))
            _plug(switch, init, name, address)
            started.append(Node(name, address, init, switch))
        yield started


@contextmanager
def _namespaces(own: Sequence[str], script: str, *words: object) -> Iterator[int]:
    """Yield the id of the first process of new namespaces, which ``script`` has prepared."""
    command = [*own, "sh", "-c", script, "sh", *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    try:
        process = subprocess.Popen(command, start_new_session=True, **pipes)
    except FileNotFoundError as error:
        pytest.skip(f"a node needs the namespaces of Linux: {error}")
    with process:
        if process.stdout.readline() != "ready\n":
            pytest.skip(f"this user may not make nodes here: {process.communicate()[1].strip()[:200]}")
        try:
            yield psutil.Process(process.pid).children()[0].pid
        finally:
            process.kill()  # The kernel kills its first process, because of --kill-child.


def _plug(switch: int, node: int, name: str, address: str) -> None:
    """Connect a node to the switch by a pair of links."""
    into = [*_NSENTER, "--user", "--net", "--target", str(switch), "ip", "link"]
    within = [*_NSENTER, "--user", "--net", "--target", str(node), "ip"]
    for command in (
        [*into, "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(node)],
        [*into, "set", name, "master", "switch", "up"],
        [*within, "addr", "add", f"{address}/24", "dev", "eth0"],
        [*within, "link", "set", "eth0", "up"],
    ):
        subprocess.run(command, check=True, capture_output=True)
