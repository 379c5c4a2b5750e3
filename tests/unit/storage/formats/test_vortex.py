"""Vortex: pixels of any encoding, and zero-copy reads of pixels without one."""

from __future__ import annotations

import numpy as np
import pytest

from omearrow_ds import open_images
from tests.support.sources import check, scanned
from tests.support.strategies import all_same, image_of, same
from tests.unit.storage.formats.test_leaf import plain

encodings = pytest.mark.parametrize("encoding", ["bytes", "list"])


@encodings
@pytest.mark.parametrize("look", [list, plain])
@pytest.mark.share(2, "encoding", "look")
def test_vortex_of_more_rows_than_a_part_holds(stored, encoding, look):
    images = look([image_of((1, 1, 1, 2, 4), "uint16", number) for number in range(8200)])
    source = open_images(stored("vortex", images, encoding=encoding))
    indices = [8191, 8192, 0, 8199, -1, 4096]
    assert all_same(source.take(indices), [images[index] for index in indices])
    some = [8190, 8191, 8192, 8199]
    assert all_same([source.images.read([index])[0] for index in some], [images[index] for index in some])
    assert all_same(scanned(source), images)


def test_vortex_pixels_without_an_encoding_are_read_where_they_lie(stored):
    noise = list(np.random.default_rng(0).integers(0, 2**16, (30, 1, 2, 1, 20, 20)).astype(np.uint16))
    for encoding in ("bytes", "list"):
        source = open_images(stored("vortex", noise, stem=encoding, encoding=encoding))
        stacks = source.images.mapped_stacks().arrays
        assert all_same([image for stack in stacks for image in stack], noise)
        assert not stacks[0].flags.writeable
        assert np.shares_memory(source.images.read([3])[0], stacks[0])
        check(source, noise, [3, 29, 0, 3])
        source.close()
        assert same(stacks[0][7], noise[7])  # The mapping lives as long as arrays that use it.
    assert open_images(stored("vortex", plain(noise), stem="encoded")).images.mapped_stacks() is None


def test_vortex_ragged_pixels_without_an_encoding_are_no_stack(stored):
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 2**16, (1, 1, 1, 20, 20 + number)).astype(np.uint16) for number in range(9)]
    source = open_images(stored("vortex", noise, encoding="list"))
    assert source.images.table._mapped_images()
    assert source.images.mapped_stacks() is None
    check(source, noise, [8, 0, 4])


def test_vortex_lists_of_uint8_are_no_view_of_the_file(stored):
    images = list(np.random.default_rng(0).integers(0, 2**8, (9, 1, 1, 1, 20, 20)).astype(np.uint8))
    source = open_images(stored("vortex", images, encoding="list"))
    assert source.images.mapped_stacks() is None
    check(source, images, [8, 0, 4])
