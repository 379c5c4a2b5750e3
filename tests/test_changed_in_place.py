"""A collection that is changed where it stands while datasets have it open: a new version, a log, other bytes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from omearrow_ds import open_images
from tests.strategies import NAMES, all_same

formats = pytest.mark.parametrize("name", NAMES)
COUNT = 12
IMAGES = [np.full((1, 1, 1, 40, 50), number, np.uint16) for number in range(COUNT)]


@pytest.fixture
def numbered(stored):
    return lambda name, images=IMAGES, **options: stored(
        name, images, columns={"number": [int(image.flat[0]) for image in images]}, **options
    )


@formats
def test_a_scan_goes_on_where_its_source_is_closed(numbered, name):
    source = open_images(numbered(name), name)
    scan = source.scan()
    _, first = next(scan)
    source.close()
    assert all_same([*first, *(image for _, part in scan for image in part)], IMAGES)


@formats
def test_threads_read_on_where_another_closes(numbered, name):
    source = open_images(numbered(name), name)
    failures, done = [], threading.Event()

    def read():
        try:
            while not done.is_set():
                failures.extend(() if all_same(source.take([3, 1]), [IMAGES[3], IMAGES[1]]) else ["other pixels"])
        except Exception as error:  # noqa: BLE001  # a thread's would be lost
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        source.take([2])
        source.close()
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
