"""`cache_bytes=`: LRU eviction that never changes a sample."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, OMEArrowDataset, OMEArrowDatasetNumpy
from omearrow_ds.dataset.stored_images import ImageCache
from tests.support.errors import raises
from tests.support.strategies import ENCODED, FEW_FORMATS, NAMES_OR_LONG, RAGGED, image_of, images_of, same, slow_except

SIZES = [3, 5, 8, 13, 40]


@given(requests=st.lists(st.sets(st.integers(0, 4), min_size=1).map(sorted), max_size=30), max_bytes=st.integers(1, 60))
def test_it_holds_what_was_used_last(requests, max_bytes):
    cache, model, fetched = ImageCache(max_bytes), OrderedDict(), []
    hits = misses = 0
    for indices in requests:

        def fetch(missing):
            fetched.append(missing)
            return [np.full(SIZES[index], index, np.uint8) for index in missing]

        images = cache.get(indices, fetch)
        assert [image.tolist() for image in images] == [[index] * SIZES[index] for index in indices]
        known = [index for index in indices if index in model]
        for index in known:
            model.move_to_end(index)
        new = [index for index in indices if index not in known]
        hits, misses = hits + len(known), misses + len(new)
        for index in new:
            if SIZES[index] <= max_bytes:
                model[index] = SIZES[index]
                while sum(model.values()) > max_bytes:
                    model.popitem(last=False)
        assert not new or fetched[-1] == new
        info = cache.info
        assert (info.hits, info.misses, info.images) == (hits, misses, len(model))
        assert info.held_bytes == sum(model.values()) <= info.max_bytes == max_bytes
        assert info.hit_rate == (hits / (hits + misses))


def test_an_unused_cache_has_no_hit_rate():
    assert ImageCache(10).info.hit_rate == 0.0


def test_a_view_does_not_keep_its_whole_block_alive():
    cache, block = ImageCache(100), np.zeros(10_000, np.uint8)
    cache.get([0], lambda missing: [block[5:15]])
    (cached,) = cache.get([0], lambda missing: [])
    assert cached.base is None


def test_threads_share_a_cache():
    cache, odd = ImageCache(300), []

    def work(seed):
        for indices in np.random.default_rng(seed).integers(0, 20, (300, 4)):
            indices_in_order = sorted(set(indices.tolist()))
            images = cache.get(indices_in_order, lambda missing: [np.full(20, index, np.uint8) for index in missing])
            odd.extend(1 for index, image in zip(indices_in_order, images, strict=True) if (image != index).any())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not odd
    assert cache.info.held_bytes <= 300


@pytest.mark.parametrize(("name", "encoding"), slow_except(FEW_FORMATS, ENCODED))
@pytest.mark.parametrize("kinds", [RAGGED, [((1, 2, 1, 6, 7), "uint16")] * 5], ids=["ragged", "uniform"])
def test_samples_are_the_same_with_a_cache(stored, name, encoding, kinds):
    images = images_of(kinds)
    path = stored(name, images, encoding=encoding)
    order = np.random.default_rng(0).integers(0, len(images), 60).tolist()
    for cache_bytes in (1, 400, 10**6):
        dataset = OMEArrowDatasetNumpy(path, preload=False, axes="TCZYX", normalize=False, cache_bytes=cache_bytes)
        for start in range(0, 60, 6):
            for index, sample in zip(order[start:], dataset.__getitems__(order[start : start + 6]), strict=False):
                assert same(sample, images[index])
                sample[...] = 0  # The caller may write to a sample without changing the cache.
            assert same(dataset[order[start]], images[order[start]])
        info = dataset.cache_info
        assert info.held_bytes <= cache_bytes
        if name != "arrow" and cache_bytes == 10**6 and info.misses:
            assert info.misses == len(set(order))


def test_the_hit_rate_is_visible_and_a_copy_starts_anew(stored):
    dataset = OMEArrowDataset(stored("duckdb", images_of(RAGGED)), preload=False, axes="TCZYX", cache_bytes=10**6)
    assert dataset.cache_info.hit_rate == 0.0
    for _ in range(4):
        for index in range(len(dataset)):
            dataset[index]
    assert dataset.cache_info.hit_rate == 0.75
    assert dataset.cache_info.images == len(dataset)
    assert pickle.loads(pickle.dumps(dataset)).cache_info.images == 0
    assert len(pickle.dumps(dataset)) < 10_000


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_there_is_no_cache_by_default(stored, name):
    assert OMEArrowDataset(stored(name, [image_of((1, 1, 1, 4, 4))]), preload=False).cache_info is None


@pytest.mark.parametrize("arguments", [{"cache_bytes": -1}, {"cache_bytes": 1.5}, {"cache_bytes": 10, "preload": True}])
def test_a_cache_that_cannot_be(stored, arguments):
    path = stored("parquet", [image_of((1, 1, 1, 4, 4))])
    with raises(ArgumentError, option="cache_bytes", remedy=False):
        OMEArrowDataset(path, **{"preload": False, **arguments})
