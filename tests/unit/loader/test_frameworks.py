"""Real frameworks on two ranks, with their defaults and as in docs/how-to/several-hosts.md."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

from tests.support.emulated_frameworks import STORES, make, store
from tests.support.frameworks import by_accelerate, check_rows, launch, summary

FRAMEWORKS = ("lightning", "accelerate", "transformers")
MISSING = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; run make others")
def test_frameworks_see_each_image_in_each_epoch(tmp_path):
    store(tmp_path)
    launch(tmp_path)
    rows = summary(tmp_path)
    assert {name.partition(",")[0].partition(":")[0] for name in rows} == {
        "torchrun",
        "Lightning",
        "Fabric",
        "Accelerate",
        "Trainer of transformers",
    }
    check_rows(rows)


@pytest.mark.slow
@pytest.mark.skipif("accelerate" in MISSING, reason="accelerate is not installed; run make others")
@pytest.mark.parametrize(("name", "is_seedable"), [(STORES[0], True), (STORES[1], False), (STORES[1], True)])
def test_accelerate_has_an_order_that_is_independent_of_workers(tmp_path, name, is_seedable):
    store(tmp_path)
    orders = []
    for num_workers in (0, 2):
        torch.manual_seed(1)
        maker = functools.partial(make, tmp_path / name, num_workers=num_workers)
        orders.append(list(by_accelerate(maker, use_seedable_sampler=is_seedable)))
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
