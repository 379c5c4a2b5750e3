"""Fixtures of the loader's tests: collections with the image number as a column."""

from __future__ import annotations

import pytest

from omearrow_ds import OMEArrowDataset, write_images
from tests.support.strategies import image_of

COUNT = 14


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A collection of `COUNT` images."""
    return _numbered(tmp_path_factory.mktemp("seeded"), COUNT)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A dataset of 23 samples with the sample number as target."""
    return OMEArrowDataset(_numbered(tmp_path_factory.mktemp("numbers"), 23), target="number")


def _numbered(folder, count):
    path = folder / "images.arrow"
    write_images([image_of((2, 3), "uint16", n) for n in range(count)], path, columns={"number": [*range(count)]})
    return path
