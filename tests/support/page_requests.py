"""Page requests, and the reads of the process that they follow from, as tests watch and set them."""

from __future__ import annotations

import os
from types import SimpleNamespace

from omearrow_ds.kernels import page_requests, stacks


def watch_requests(monkeypatch):
    """Return a list that collects the byte ranges (first, length) that are requested."""
    ranges = []
    monkeypatch.setattr(page_requests, "_madvise", lambda: lambda first, length, _: ranges.append((first, length)))
    return ranges


def watch_file_requests(monkeypatch):
    """Return a list that collects the files whose bytes are requested, each once per request."""
    files = []

    def request(descriptor, first, length, advice):
        assert (length > 0, advice) == (True, os.POSIX_FADV_WILLNEED)
        if first == 0:
            files.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "posix_fadvise", request)
    return files


def set_reads(monkeypatch):
    """Set reads (``ru_majflt``) and time (``time_ns``) by the result, which counts the queries in ``num_calls``."""
    usage = SimpleNamespace(ru_majflt=0, ru_inblock=0, num_calls=0, time_ns=10**9)

    def getrusage(_):
        usage.num_calls += 1
        return usage

    for module in (stacks, page_requests):
        monkeypatch.setattr(module, "getrusage", getrusage)
        monkeypatch.setattr(module, "monotonic_ns", lambda: usage.time_ns)
    return usage


def address_of(array):
    """Return the address of the first byte of an array."""
    return array.__array_interface__["data"][0]


def covers(ranges, address):
    """Return whether a byte is in one of the ranges."""
    return any(first <= address < first + length for first, length in ranges)
