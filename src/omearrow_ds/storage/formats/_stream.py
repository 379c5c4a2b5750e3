"""`Stream`: what the writer of a format pulls from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """What a writer pulls from, in whatever thread: it keeps the exception that ends it, and can be stopped.

    Stream readers turn an exception of the items into one of their own; ``failure`` is the original. A writer that is
    interrupted may leave a thread behind that goes on pulling: `stop` gives it no more, and waits until it noticed, or
    it would crash an interpreter that is ending (seen with Lance 14).
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
        """End the stream, once the item that is being made is made, and see another thread off."""
        self._stopping.set()
        with self._lock:
            elsewhere = self._puller != threading.get_ident()
        if elsewhere and self.failure is None and self._noticed.wait(self._notice_s):
            time.sleep(self._notice_s / 10)  # it still lets go of the stream, for which it needs the interpreter
