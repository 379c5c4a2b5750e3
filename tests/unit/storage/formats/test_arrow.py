"""Arrow IPC: mapped files whose pixels are arrays as they lie."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from omearrow_ds import OMEArrowDataset, open_images
from tests.support.strategies import MIXED, images_of

MANY = [((1, 2, 3, 7, 5), "uint16")] * 40


def test_a_mapped_file_is_one_array_a_record_batch(tmp_path, stored):
    images = images_of(MANY)
    table = pa.ipc.open_file(stored("arrow", images)).read_all()
    with pa.ipc.new_file(tmp_path / "parts.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with open_images(tmp_path / "parts.arrow") as source:
        assert [len(stack) for stack in source.stacks()] == [7, 7, 7, 7, 7, 5]
    dataset = OMEArrowDataset(tmp_path / "parts.arrow", preload=False, normalize=False, axes="CZYX")
    assert all(np.array_equal(dataset[index].numpy(), image[0]) for index, image in enumerate(images))
    batch = dataset.__getitems__([39, 0, 7, 6, 6])
    assert all(np.array_equal(s.numpy(), images[i][0]) for s, i in zip(batch, [39, 0, 7, 6, 6], strict=True))


def test_images_that_differ_are_no_array(stored):
    assert open_images(stored("arrow", images_of(MIXED))).stacks() == []
