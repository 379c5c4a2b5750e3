"""Page requests, and the reads of the process that they follow from, as tests watch and set them."""

from __future__ import annotations

import os
from types import SimpleNamespace

from omearrow_ds.kernels import stacks
from omearrow_ds.storage import concat


def watch_requests(monkeypatch):
    """Return a list that collects the byte ranges (first, length) that are requested."""
    ranges = []
    monkeypatch.setattr(stacks, "request_pages", lambda pages: ranges.extend(map(tuple, pages.tolist())))
    monkeypatch.setattr(stacks.PageThread, "request", lambda _, pages: ranges.extend(map(tuple, pages.tolist())))
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
    """Set reads (``ru_majflt``), time (``time_ns``) and whether pages are resident (``is_resident``) by the result.

    It counts the queries in ``num_calls``.
    """
    usage = SimpleNamespace(ru_majflt=0, ru_inblock=0, num_calls=0, time_ns=10**9, is_resident=True)

    def getrusage(_):
        usage.num_calls += 1
        return usage

    monkeypatch.setattr(stacks, "getrusage", getrusage)
    monkeypatch.setattr(stacks, "is_resident", lambda _: usage.is_resident)
    for module in (stacks, concat):
        monkeypatch.setattr(module, "monotonic_ns", lambda: usage.time_ns)
    return usage


def address_of(array):
    """Return the address of the first byte of an array."""
    return array.__array_interface__["data"][0]


def covers(ranges, address):
    """Return whether a byte is in one of the ranges."""
    return any(first <= address < first + length for first, length in ranges)
