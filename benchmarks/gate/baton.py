"""Turns between the two processes of a gate's round: while one measures or sets up, the other waits.

A shared machine is fast for some seconds and slow for others. Two processes that measure a benchmark one after the
other meet it in different moods; two that measure it in turns of some milliseconds meet the same ones. Whoever has the
baton runs; it is handed over by a message through a pipe. The other's end closes the pipe, after which there is no one
to wait for. Outside of the gate there is no other, and handing over does nothing.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import count, pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VARIABLE = "OMEARROW_DS_GATE_BATON"  # "READ,WRITE,first" or "READ,WRITE,second": two file descriptors, and who begins
TURNS = 24  # of each process in each benchmark, some 6 ms each
_MESSAGE = Struct("<II")  # of which benchmark, and how many rounds of it


class Baton:
    """One process's end; ``said`` is the value of `VARIABLE`, empty where there is no other process."""

    def __init__(self, said: str) -> None:
        self._ends: tuple[int, int] | None = None
        self._gate = os.getppid()
        self._heard = self._saying = (0, 0)
        if said:
            reads, writes, place = said.split(",")
            self._ends = int(reads), int(writes)
            for end in self._ends:
                os.set_inheritable(end, False)  # a worker that held one would keep the pipe open
            self._meet(first=place == "first")

    def agreed(self, name: str, rounds: int) -> int:
        """Return how many rounds both processes make of a benchmark: as many as the one wants that begins.

        Were they to choose apart, one might make a thousand rounds, and the other one in each turn, with cold caches.
        """
        key = crc32(name.encode())
        rounds = self._heard[1] if self._heard[0] == key else rounds
        self._saying = key, rounds
        return rounds

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
                os.write(self._ends[1], _MESSAGE.pack(*self._saying))
            except BrokenPipeError:
                self._leave()

    def _wait(self) -> None:
        if self._ends:
            message = os.read(self._ends[0], _MESSAGE.size)
            if message:
                self._heard = _MESSAGE.unpack(message)
            else:
                self._leave()

    def _leave(self) -> None:
        for end in self._ends or ():
            os.close(end)
        self._ends = None


@cache
def baton() -> Baton:
    """Return this process's end; the first call waits for the other process to be there."""
    return Baton(os.environ.pop(VARIABLE, ""))


def starts(rounds: int) -> list[int]:
    """Return the rounds that turns begin with: `TURNS` of them, of one round at least."""
    turns = min(rounds, TURNS)
    return [rounds * turn // turns for turn in range(turns)]


def in_turns(rounds: int, setup: Callable[[], Any] = tuple) -> Callable[[], Any]:
    """Return a set-up for each of ``rounds`` rounds that hands over between their turns.

    After the last round `Baton.hand_over` is left to the caller, so that what follows is in the next turn.
    """
    numbers, begin = count(), set(starts(rounds)[1:])

    def set_up() -> Any:
        if next(numbers) in begin:
            baton().hand_over()
        return setup()

    return set_up


def least_of_turns(values: Sequence[float]) -> list[float]:
    """Return the least value of each turn, of one value a round."""
    return [min(values[first:after]) for first, after in pairwise([*starts(len(values)), len(values)])]
