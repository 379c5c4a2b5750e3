"""All that a source gives, held against what was written."""

from __future__ import annotations

import numpy as np

from tests.support.strategies import all_same


def scanned(source):
    """Return copies of the images of a scan, which come in order."""
    images = []
    for start, part in source.blocks():
        assert start == len(images)
        images.extend(np.array(image) for image in part)
    return images


def all_read(source, images):
    """Whether images that are read one by one are these."""
    return all_same([source.read(index) for index in range(len(source))], images)


def check(source, images, indices):
    """Compare everything that a source gives with what was written."""
    wanted = [images[index] for index in indices]
    distinct = np.unique(np.array(indices, np.int64) % len(images))
    assert all_same(source.take(indices), wanted)
    assert all_same([source.read(index) for index in indices], wanted)
    assert all_same(source.views(distinct.tolist()), [images[index] for index in distinct])
    assert all_same([source.views([index])[0] for index in distinct.tolist()], [images[index] for index in distinct])
    assert all_same(scanned(source), images)
