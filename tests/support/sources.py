"""Comparison of all results of a source with the written images."""

from __future__ import annotations

import random

import numpy as np

from omearrow_ds.storage.collection_source import CollectionSource
from tests.support.strategies import all_same


def scanned(source):
    """Return copies of the images of a scan, after checking their order."""
    images = []
    for start, part in images_of(source).stream():
        assert start == len(images)
        images.extend(np.array(image) for image in part)
    return images


def all_read(source, images):
    """Return whether single reads return these images."""
    source = as_collection(source)
    return all_same([source.read(index) for index in range(len(source))], images)


def boxes_of(shape, drawn):
    """Return four boxes of an image: all of it, one pixel, and two random ones."""
    boxes = [tuple(slice(0, size) for size in shape), tuple(slice(size - 1, size) for size in shape)]
    for _ in range(2):
        starts = [drawn.randrange(size) for size in shape]
        stops = [drawn.randrange(start, size) + 1 for start, size in zip(starts, shape, strict=True)]
        boxes.append(tuple(map(slice, starts, stops)))
    return boxes


def windows_are_cut(source, images, seed=0):
    """Return whether regions, in any order, equal slices of the images."""
    drawn = random.Random(seed)
    requests = [(index, box) for index, image in enumerate(images) for box in boxes_of(image.shape, drawn)]
    drawn.shuffle(requests)
    return all_same(read_boxes(source, requests), [images[index][box] for index, box in requests])


def images_of(source):
    """Return the images of an open source, with which datasets read."""
    return getattr(source, "images", source)


def as_collection(source):
    """Return the public view of an open source or of its images."""
    return source if isinstance(source, CollectionSource) else CollectionSource(source)


def read_boxes(source, expected):
    """Return regions of a source, given as pairs of an image and five slices."""
    regions = [[*(cut.start for cut in box), *(cut.stop for cut in box)] for _, box in expected]
    return images_of(source).read([index for index, _ in expected], regions)


def check(source, images, indices):
    """Compare all results of a source with the written images."""
    source = as_collection(source)
    expected = [images[index] for index in indices]
    distinct = np.unique(np.array(indices, np.int64) % len(images))
    assert all_same(source.take(indices), expected)
    assert all_same([source.read(index) for index in indices], expected)
    assert all_same(source.images.read(distinct.tolist()), [images[index] for index in distinct])
    assert all_same(
        [source.images.read([index])[0] for index in distinct.tolist()], [images[index] for index in distinct]
    )
    assert all_same(scanned(source), images)
    assert windows_are_cut(source, images)
