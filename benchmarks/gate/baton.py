"""Turns between the two processes of a gate's round: while one measures or sets up, the other waits.

A shared machine is fast for some seconds and slow for others. Two processes that measure a benchmark one after the
other meet it in different moods; two that measure it in turns of some milliseconds meet the same ones. Whoever has the
baton runs; it is handed over by a byte through a pipe. The other's end closes the pipe, after which there is no one to
wait for. Outside of the gate there is no other, and handing over does nothing.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "OMEARROW_DS_GATE_BATON"  # "READ,WRITE,first" or "READ,WRITE,second": two file descriptors, and who begins
TURNS = 8  # of each process in each benchmark


class Baton:
    """One process's end; ``said`` is the value of `VARIABLE`, empty where there is no other process."""

    def __init__(self, said: str) -> None:
        self._ends: tuple[int, int] | None = None
        self._gate = os.getppid()
        if said:
            reads, writes, place = said.split(",")
            self._ends = int(reads), int(writes)
            for end in self._ends:
                os.set_inheritable(end, False)  # a worker that held one would keep the pipe open
            self._meet(first=place == "first")

    def hand_over(self) -> None:
        """Let the other process have its turn, and wait for the next one of this process."""
        if self._ends and os.getppid() != self._gate:
            os._exit(1)  # the gate was killed: nobody waits for what this would find
        self._write()
        self._wait()

    def _meet(self, *, first: bool) -> None:
        """Begin once both are there; the second one then waits for its turn."""
        if first:
            self._wait()
        else:
            self.hand_over()

    def _write(self) -> None:
        if self._ends:
            try:
                os.write(self._ends[1], b".")
            except BrokenPipeError:
                self._leave()

    def _wait(self) -> None:
        if self._ends and not os.read(self._ends[0], 1):
            self._leave()

    def _leave(self) -> None:
        for end in self._ends or ():
            os.close(end)
        self._ends = None


@cache
def baton() -> Baton:
    """Return this process's end; the first call waits for the other process to be there."""
    return Baton(os.environ.pop(VARIABLE, ""))


def in_turns(rounds: int, setup: Callable[[], Any] = tuple) -> Callable[[], Any]:
    """Return a set-up for each of ``rounds`` rounds that hands over between `TURNS` equal parts of them.

    After the last round `Baton.hand_over` is left to the caller, so that what follows is in the next turn.
    """
    numbers, part = count(), max(1, rounds // TURNS)

    def set_up() -> Any:
        number = next(numbers)
        if number and number % part == 0 and number < part * TURNS:
            baton().hand_over()
        return setup()

    return set_up
