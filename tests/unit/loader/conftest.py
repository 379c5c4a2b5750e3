"""A dataset that the loader's tests share."""

from __future__ import annotations

import pytest

from omearrow_ds import OMEArrowDataset, write_images
from tests.support.strategies import image_of


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A dataset of 23 samples whose target is the sample's number."""
    path = tmp_path_factory.mktemp("numbers") / "images.arrow"
    write_images([image_of((2, 3), "uint16", n) for n in range(23)], path, columns={"number": [*range(23)]})
    return OMEArrowDataset(path, target="number")
