"""The proxy of a server: rate of its link."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from urllib.request import urlopen

import pytest

from benchmarks.support.proxy import proxying
from tests.support.objects import serving

LINK_BYTES, OBJECT_BYTES, OBJECTS = 4 * 10**7, 10**7, 4


@pytest.mark.serial
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_link_carries_what_it_says_and_never_more(tmp_path, at_once):
    (tmp_path / "lab").mkdir()
    for number in range(OBJECTS):
        (tmp_path / "lab" / str(number)).write_bytes(bytes(OBJECT_BYTES))

    def receive(number):
        with urlopen(f"{proxy.url}/lab/{number}", timeout=30) as answer:
            while piece := answer.read(2**14):
                yield time.perf_counter(), len(piece)

    with serving(tmp_path) as server, proxying(server.url) as proxy, ThreadPoolExecutor(at_once) as threads:
        proxy.set(link_bits=8 * LINK_BYTES)
        time.sleep(0.2)  # Idle time does not increase the rate later.
        began_s = time.perf_counter()
        pieces = list(chain.from_iterable(threads.map(lambda number: list(receive(number)), range(OBJECTS))))
    times_s, counts = zip(*sorted(pieces), strict=True)
    assert all(total <= LINK_BYTES * (at_s - began_s) for at_s, total in zip(times_s, accumulate(counts), strict=True))
    assert sum(counts) == OBJECTS * OBJECT_BYTES >= 0.9 * LINK_BYTES * (times_s[-1] - began_s)
