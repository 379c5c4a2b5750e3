"""Fetches in threads that run before their results are needed, in the order of their use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from omearrow_ds.errors import OMEArrowDSError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class FetchCancelledError(Exception):
    """Raised by a fetch that ends early because its result is no longer needed."""


class Prefetcher(Generic[Key, Value]):
    """Queue of fetches by threads that stop early when the interpreter exits.

    Parameters
    ----------
    name
        Name of the threads.
    max_ahead
        Maximum number of fetches that were begun and whose results were not taken.
    max_running
        Maximum number of concurrent fetches.
    has_results
        Whether fetches return data. Otherwise, each `schedule` repeats finished ones, and begins with one at a time:
        one more runs after each finished fetch.
    """

    def __init__(self, name: str, max_ahead: int, max_running: int, *, has_results: bool = True) -> None:
        self.max_ahead, self._name, self._max_running, self._has_results = max_ahead, name, max_running, has_results
        self._queue: dict[Key, Callable[[], Value]] = {}
        self._futures: dict[Key, Future[Value]] = {}  # Fetches whose results were not taken.
        self._started: set[Key] = set()  # Fetches that do not count as ahead.
        self._num_running, self._limit = 0, max_running
        self._lock = threading.Lock()

    def schedule(self, fetches: Mapping[Key, Callable[[], Value]]) -> None:
        """Begin fetches in this order; forget previous ones that are not among them, unless all are queued already."""
        with self._lock:
            if self._has_results and fetches.keys() <= self._futures.keys() | self._queue.keys():
                return
            self._futures = {
                key: future
                for key, future in self._futures.items()
                if key in fetches and (self._has_results or not future.done())
            }
            self._queue = {key: fetch for key, fetch in fetches.items() if key not in self._futures}
            self._started, self._limit = set(), self._max_running if self._has_results else 1
            self._begin_next()

    def start(self, key: Key) -> None:
        """Begin a fetch immediately because its result is needed now, and allow another one in its place."""
        with self._lock:
            fetch = self._queue.pop(key, None)
            if fetch is not None and self.is_wanted:
                self._begin(key, fetch)
            self._started.add(key)
            self._begin_next()

    def take(self, key: Key) -> Future[Value] | None:
        """Return the future of a begun fetch; None, and remove the fetch from the queue, if it has not begun."""
        with self._lock:
            self._queue.pop(key, None)
            future = self._futures.pop(key, None)
            self._started.discard(key)
            self._begin_next()
        return future

    @property
    def is_wanted(self) -> bool:
        """Whether results are still needed; running fetches should stop otherwise."""
        return self.max_ahead > 0 and threading.main_thread().is_alive()

    def _begin_next(self) -> None:
        while self._queue and self.is_wanted and self._num_running < self._limit:
            if len(self._futures.keys() - self._started) >= self.max_ahead:
                return
            key = next(iter(self._queue))
            self._begin(key, self._queue.pop(key))

    def _begin(self, key: Key, fetch: Callable[[], Value]) -> None:
        future = self._futures[key] = Future()
        self._num_running += 1
        threading.Thread(target=self._run, args=(future, fetch), name=self._name).start()

    def _run(self, future: Future[Value], fetch: Callable[[], Value]) -> None:
        report: Callable[[], Any] = partial(future.set_exception, FetchCancelledError())
        try:
            report = partial(future.set_result, fetch())
        except (OMEArrowDSError, OSError, FetchCancelledError) as error:  # The thread that takes the result raises it.
            report = partial(future.set_exception, error)
        finally:
            with self._lock:
                self._num_running -= 1
                self._limit = min(self._limit + 1, self._max_running)
                self._begin_next()
            report()

    def close(self) -> list[Future[Value]]:
        """Begin no more fetches, and return those whose results were not taken; running ones are not wanted anymore."""
        with self._lock:
            futures = list(self._futures.values())
            self._queue, self._futures, self.max_ahead = {}, {}, 0
            return futures
