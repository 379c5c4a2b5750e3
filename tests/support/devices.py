"""CPU replacement of a missing CUDA device: the same code with torch's operations."""

from __future__ import annotations

import os

import pytest
import torch

from omearrow_ds.dataset import cuda, samples
from omearrow_ds.loader import settings

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = [pytest.param("stand-in"), pytest.param("cuda", marks=CUDA)]
FREE_BYTES = 10**9


def examples(count):
    """Return the number of examples. ``EXAMPLES`` may lower it, because a GPU compiles each kind of window."""
    return min(count, int(os.environ.get("EXAMPLES", count)))


def stand_in(monkeypatch, which):
    """Redirect ``"cuda"`` to the CPU unless ``which`` is ``"cuda"``; return the device in use."""
    if which == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    cpu = torch.device("cpu")

    def device_of(preload):
        return cpu if isinstance(preload, str) and preload.startswith("cuda") else None

    monkeypatch.setattr(samples, "device_of", device_of)
    monkeypatch.setattr(cuda, "free_bytes", lambda device: FREE_BYTES)
    monkeypatch.setattr(settings, "copied_to", lambda device: device is not None)
    return cpu
