"""Orders by windows of images."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, OMEArrowDataLoader, OMEArrowDataset, write_images
from omearrow_ds.loader.samplers import SharedWindowedSampler, windowed_order
from tests.support.errors import raises
from tests.support.strategies import image_of

FIELDS, CELLS = 12, 10


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12), st.integers(0, 9))
def test_an_order_has_every_sample_once_and_windows_one_after_the_other(fields, window, seed):
    fields = np.array(fields, np.int64)
    actual = windowed_order(fields, window, torch.Generator().manual_seed(seed))
    assert sorted(actual.tolist()) == list(range(len(fields)))
    locations = {field: np.flatnonzero(fields[actual] == field) for field in set(fields.tolist())}
    for field, index in locations.items():
        between = fields[actual][index.min() : index.max() + 1]
        assert len(set(between.tolist())) <= window, field


@pytest.fixture
def dataset(tmp_path):
    images = [image_of((1, 1, 1, 20, 20), "uint16", number) for number in range(FIELDS)]
    write_images(images, tmp_path / "i.parquet", compression="zstd", rows_per_group=1)
    cells = pa.table(
        {
            "image_id": [f"image-{number % FIELDS:05d}" for number in range(FIELDS * CELLS)],
            "centroid_y": [float(number % 20) for number in range(FIELDS * CELLS)],
            "centroid_x": [float(number % 19) for number in range(FIELDS * CELLS)],
        }
    )
    return lambda **options: OMEArrowDataset(tmp_path / "i.parquet", objects=cells, crop_size=(4, 4), **options)


def test_each_image_is_decoded_once_a_window(dataset):
    lazy = dataset(preload=False, cache_bytes=3 * 800, return_ids=True)
    read_arrays = lazy.source.images.read
    decoded = []
    lazy.source.images.read = lambda rows, _: decoded.extend(rows) or read_arrays(rows)
    loader = OMEArrowDataLoader(lazy, 8, shuffle_fields=3, num_workers=0)
    expected = {image_id: image for image, image_id in dataset(return_ids=True)}
    orders = []
    for _ in range(2):
        decoded.clear()
        read_ids = []
        for images, image_ids in loader:
            read_ids += image_ids
            assert all(
                torch.equal(image, expected[image_id]) for image, image_id in zip(images, image_ids, strict=True)
            )
        assert sorted(read_ids) == sorted(expected)
        assert len(decoded) <= FIELDS + 3 * (FIELDS // 3 - 1)  # A batch may span two windows.
        orders.append(read_ids)
    assert orders[0] != orders[1]
    why = loader.settings["sampler"].why
    assert "random over 3 images at a time" in why
    assert "7.56% in a full shuffle" in why


def test_the_order_is_that_of_the_generator_resumes_and_is_the_same_with_workers(dataset):
    data = dataset(return_ids=True)

    def make_loader(**options):
        return OMEArrowDataLoader(data, 7, shuffle_fields=4, generator=torch.Generator().manual_seed(5), **options)

    first = [ids for _, ids in make_loader()]
    assert first == [ids for _, ids in make_loader(num_workers=1)]
    loader = make_loader()
    iterator = iter(loader)
    next(iterator), next(iterator)
    other = make_loader()
    other.load_state_dict(loader.state_dict())
    assert [ids for _, ids in other] == first[2:]


def test_ranks_share_windows_out(dataset, monkeypatch):
    data = dataset()
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sampler = SharedWindowedSampler(data, 2, seed=1, drop_last=False)
        parts.append(list(sampler))
        assert len(parts[-1]) == len(sampler) == 60
        assert len(set(data.fields[parts[-1]].tolist())) <= FIELDS // 2 + 2
        sampler.set_epoch(1)
        assert list(sampler) != parts[-1]
    assert sorted(parts[0] + parts[1]) == list(range(120))


def test_what_cannot_be_is_said(dataset):
    with raises(ArgumentError, option="shuffle_fields", mentions=("cache_bytes=2400", 100)):
        OMEArrowDataLoader(dataset(preload=False, cache_bytes=100), 8, shuffle_fields=3)
    for data, options in [
        (dataset(), {"shuffle_fields": 0}),
        (dataset(), {"shuffle_fields": True}),
        (dataset(), {"shuffle_fields": 3, "sampler": [1, 2]}),
        (torch.utils.data.TensorDataset(torch.zeros(3)), {"shuffle_fields": 3}),
    ]:
        with raises(ArgumentError, option="shuffle_fields", remedy=False):
            OMEArrowDataLoader(data, 8, **options)
