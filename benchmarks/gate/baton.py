"""Turns between the two processes of a gate's round: while one measures or sets up, the other waits.

The speed of a shared machine changes every few seconds. Two processes that measure a benchmark one after the other
see different speeds, while two that alternate every few milliseconds see the same. The process with the baton runs,
and passes it on by a message through a pipe. When a process ends, the pipe is closed and the other one stops waiting.
Outside of the gate there is only one process, and passing the baton does nothing.
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

VARIABLE = "OMEARROW_DS_GATE_BATON"  # "READ,WRITE,first" or "READ,WRITE,second": two file descriptors and the order.
TURNS = 24  # Turns per process and benchmark, about 6 ms each.
_MESSAGE = Struct("<II")  # Hash of the benchmark's name, and its number of rounds.


class Baton:
    """One process's end of the pipes; ``said`` is the value of `VARIABLE`, empty without another process."""

    def __init__(self, setting: str) -> None:
        self._ends: tuple[int, int] | None = None
        self._gate = os.getppid()
        self._heard = self._saying = (0, 0)
        if setting:
            reads, writes, turn = setting.split(",")
            self._ends = int(reads), int(writes)
            for end in self._ends:
                os.set_inheritable(end, False)  # A worker that inherits one would keep the pipe open.
            self._meet(first=turn == "first")

    def agreed(self, name: str, rounds: int) -> int:
        """Return the number of rounds of a benchmark in both processes, which the beginning process chooses.

        With separate choices, one process might run 1,000 rounds and the other one round per turn, with cold caches.
        """
        key = crc32(name.encode())
        rounds = self._heard[1] if self._heard[0] == key else rounds
        self._saying = key, rounds
        return rounds

    def hand_over(self) -> None:
        """Pass the turn to the other process, and wait for the next turn of this process."""
        if self._ends and os.getppid() != self._gate:
            os._exit(1)  # The gate was killed, so the results are not needed.
        self._write()
        self._wait()

    def _meet(self, *, first: bool) -> None:
        """Wait until both processes have started; the second one then waits for its turn."""
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
    """Return this process's baton; the first call waits until the other process has started."""
    return Baton(os.environ.pop(VARIABLE, ""))


def starts(rounds: int) -> list[int]:
    """Return the first round of each turn, for `TURNS` turns of at least one round."""
    turns = min(rounds, TURNS)
    return [rounds * turn // turns for turn in range(turns)]


def in_turns(rounds: int, setup: Callable[[], Any] = tuple) -> Callable[[], Any]:
    """Return a setup function, called before each of ``rounds`` rounds, that passes the turn after each turn's rounds.

    After the last round the caller must call `Baton.hand_over`, so that its next work is in the next turn.
    """
    numbers, begin = count(), set(starts(rounds)[1:])

    def set_up() -> Any:
        if next(numbers) in begin:
            baton().hand_over()
        return setup()

    return set_up


def least_of_turns(values: Sequence[float]) -> list[float]:
    """Return the least value of each turn, given one value per round."""
    return [min(values[first:after]) for first, after in pairwise([*starts(len(values)), len(values)])]
