"""`Stream`: the iterator that the writer of a format reads from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """Iterator for writers that may read from any thread: it stores the exception that ends it, and can be stopped.

    Stream readers replace an exception of the items by their own; ``failure`` is the original. After an interrupt,
    `stop` waits for a reading thread, which would crash an exiting interpreter (seen with Lance 14).
    """

    _notice_s = 1.0

    def __init__(self, items: Iterator[Item], stopping: threading.Event) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._stopping = stopping
        self._noticed = threading.Event()
        self._puller = threading.get_ident()
        self.failure: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        with self._lock:
            self._puller = threading.get_ident()
            if self._stopping.is_set():
                self._noticed.set()
                raise StopIteration
            try:
                return next(self._items)
            except StopIteration:
                raise
            except BaseException as error:
                self.failure = error
                raise

    def stop(self) -> None:
        """End the stream after the current item, and wait for a reader in another thread."""
        self._stopping.set()
        with self._lock:
            elsewhere = self._puller != threading.get_ident()
        if elsewhere and self.failure is None and self._noticed.wait(self._notice_s):
            time.sleep(self._notice_s / 10)  # it still releases the stream, for which it needs the interpreter
