"""Real frameworks on two ranks, with their defaults and as in docs/how-to/several-hosts.md."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.emulated_frameworks import store
from tests.support.frameworks import check_rows, launch, summary

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
