"""Page requests, and the reads of the process that they follow from, as tests watch and set them."""

from __future__ import annotations

from types import SimpleNamespace

from omearrow_ds.kernels import page_requests, stacks


def watch_requests(monkeypatch):
    """Return a list that collects the byte ranges (first, length) that are requested."""
    ranges = []
    monkeypatch.setattr(page_requests, "_madvise", lambda: lambda first, length, _: ranges.append((first, length)))
    return ranges


def set_reads(monkeypatch):
    """Set reads (``ru_majflt``) and time (``time_ns``) by the result, which counts the queries in ``num_calls``."""
    usage = SimpleNamespace(ru_majflt=0, ru_inblock=0, num_calls=0, time_ns=10**9)

    def getrusage(_):
        usage.num_calls += 1
        return usage

    monkeypatch.setattr(stacks, "getrusage", getrusage)
    monkeypatch.setattr(stacks, "monotonic_ns", lambda: usage.time_ns)
    return usage


def address_of(array):
    """Return the address of the first byte of an array."""
    return array.__array_interface__["data"][0]


def covers(ranges, address):
    """Return whether a byte is in one of the ranges."""
    return any(first <= address < first + length for first, length in ranges)
