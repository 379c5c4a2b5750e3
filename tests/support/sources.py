"""All that a source gives, held against what was written."""

from __future__ import annotations

import random

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


def boxes_of(shape, drawn):
    """Return the whole of an image, one pixel of it, and two boxes between."""
    found = [tuple(slice(0, size) for size in shape), tuple(slice(size - 1, size) for size in shape)]
    for _ in range(2):
        starts = [drawn.randrange(size) for size in shape]
        stops = [drawn.randrange(start, size) + 1 for start, size in zip(starts, shape, strict=True)]
        found.append(tuple(map(slice, starts, stops)))
    return found


def windows_are_cut(source, images, seed=0):
    """Whether parts of images, asked for in any order, are what slices of the images are."""
    drawn = random.Random(seed)
    wanted = [(index, box) for index, image in enumerate(images) for box in boxes_of(image.shape, drawn)]
    drawn.shuffle(wanted)
    return all_same(read_boxes(source, wanted), [images[index][box] for index, box in wanted])


def read_boxes(source, wanted):
    """Return regions of a source, which are given as pairs of an image and five slices."""
    regions = [[*(cut.start for cut in box), *(cut.stop for cut in box)] for _, box in wanted]
    return source.read_regions([index for index, _ in wanted], regions)


def check(source, images, indices):
    """Compare everything that a source gives with what was written."""
    wanted = [images[index] for index in indices]
    distinct = np.unique(np.array(indices, np.int64) % len(images))
    assert all_same(source.take(indices), wanted)
    assert all_same([source.read(index) for index in indices], wanted)
    assert all_same(source.views(distinct.tolist()), [images[index] for index in distinct])
    assert all_same([source.views([index])[0] for index in distinct.tolist()], [images[index] for index in distinct])
    assert all_same(scanned(source), images)
    assert windows_are_cut(source, images)
