"""Slowdowns planted in a scratch copy of the source, one per code path of a gated benchmark.

A module that wraps the public calls is added to the copy. Each call busy-waits for the CPU time that a table in the
module states for this call and collection. So the gate measures a program that is slower, not a multiplied number.

A copy with an empty table has the same wrappers, so their cost is equal on both sides.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MODULE = '''"""Planted by the gate's self-test."""

from collections import Counter
from functools import wraps
from mmap import mmap
from time import perf_counter, sleep, thread_time

import omearrow_ds
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.dataset import OMEArrowDatasetNumpy
from omearrow_ds.dataset.samples import StoredSamples

EXTRA_S, FORMS = {extra_s}, {forms}
calls = Counter()


def slowed(act, place_of):
    @wraps(act)
    def slower(*args, **kwargs):
        place = place_of(*args, **kwargs)
        extra_s, form = EXTRA_S.get(place), FORMS.get(place)
        calls[place] += 1
        if extra_s and (form != "one call in ten" or calls[place] % 10 == 0):
            now_s = thread_time if extra_s > 1e-4 else perf_counter  # the latter takes less, and seldom loses the core
            end_s = now_s() + extra_s
            while form != "waiting" and now_s() < end_s:
                pass
        if form == "waiting":
            sleep(extra_s)
        if form == "lost cache":
            args[0].source.close()
        done = act(*args, **kwargs)
        if form == "memory":
            done.planted = mmap(-1, done.block.size_bytes // 10)  # as pixels are held; glibc would keep what is freed
            done.planted.write(bytes(len(done.planted)))
        return done

    return slower


def preload(cls, source, *_, **__):
    header = source.header
    return f"preload {{header.format.name}} {{header.path.parent.name.split('-')[1]}} {{len(source)}}"


def sample(dataset, _):
    if isinstance(dataset, OMEArrowDatasetNumpy):
        return f"numpy {{dataset._collection.format_name}}"
    return f"sample {{dataset._collection.format_name}} {{dataset.preloaded}} {{dataset.shape[-1]}}"


def batch(dataset, indices):
    if not dataset.preloaded and not hasattr(dataset, "touched"):
        dataset.touched = True
        return f"first batch {{dataset._collection.format_name}} {{dataset.shape[-1]}} {{len(indices)}}"
    of = "batch" if dataset._collection.source.header.part_layout is None else "parts"
    return f"{{of}} {{dataset._collection.format_name}} {{dataset.preloaded}} {{dataset.shape[-1]}} {{len(indices)}}"


omearrow_ds.write_images = slowed(omearrow_ds.write_images, lambda images, path, format, **_: f"write {{format}}")
omearrow_ds.open_images = slowed(omearrow_ds.open_images, lambda path, format=None, **_: f"open {{format}}")
PixelCache.load = classmethod(slowed(PixelCache.load.__func__, preload))
StoredSamples.__getitem__ = slowed(StoredSamples.__getitem__, sample)
StoredSamples.__getitems__ = slowed(StoredSamples.__getitems__, batch)
'''
_PLACES: Mapping[str, str] = {
    "write": "write {0}",
    "open": "open {0}",
    "memory": "memory {0}",
    "preload": "preload {0} {1} 16",
    "preload_list": "preload {0} list 16",
    "preload_large": "preload {0} {1} 4",
    "getitem": "sample {0} False 100",
    "getitem_large": "sample {0} False 512",
    "getitem_numerous": "sample {0} False 8",
    "first_touch": "first batch {0} 100 8",
    "getitem_preloaded": "sample {0} True 100",
    "batch": "batch {0} False 100 16",
    "batch_parts": "parts {0} False 100 16",
    "batch_preloaded": "batch {0} True 100 16",
    "batch_preloaded_large": "batch {0} True 512 2",
    "batch_worker": "batch {0} True 100 32",
    "epoch_preloaded": "batch {0} True 100 8",
    "epoch_many": "batch {0} False 100 12",
    "epoch_many_preloaded": "batch {0} True 100 12",
    "train": "batch {0} True 100 2",
    "inference": "batch {0} False 100 2",
    "cells": "batch {0} False 64 64",
    "cells_preloaded": "batch {0} True 64 64",
    "cells_masked": "batch {0} True 64 32",
    "numpy_sample": "numpy {0}",
}
_FOLDERS = ("tiff", "ome_zarr", "ome_arrow")
FORMS: Mapping[str, str] = (
    MappingProxyType(  # Slowdowns that do not affect all calls equally, and the benchmark that should detect each.
        {
            "first touch": "first_touch[tiff]",
            "one call in ten": "epoch_many_preloaded[arrow]",
            "growth": "getitem_numerous[arrow]",
            "lost cache": "getitem[parquet]",
            "memory": "memory[arrow]",
            "waiting": "open[tiff]",
        }
    )
)


def place_of(name: str) -> str:
    """Return the call in which a gated benchmark spends its time, as named in the planted module.

    Raises
    ------
    KeyError
        If the call of this benchmark is unknown.
    """
    match = re.fullmatch(r"(\w+)\[(\w+)\]", name)
    if match is None:
        raise KeyError(name)
    return _PLACES[match[1]].format(match[2], "native" if match[2] in _FOLDERS else "bytes")


def in_forms(calls_s: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the arguments of `plant` for all `FORMS`: each slows the benchmark that should find it by at least 10 %.

    One call in ten takes twice as long. The cost that grows with the number of images, here 20,000, is 0.13 % of a call
    on 256. The lost cache and memory have no planted time. A wait adds no CPU time, so only the wall time shows it.
    """
    one_in_ten, numerous = (FORMS[form] for form in ("one call in ten", "growth"))
    per_image_s = 0.1 * calls_s[numerous] / 20_000
    extra_s = {
        place_of(FORMS["first touch"]): 0.1 * calls_s[FORMS["first touch"]],
        place_of(one_in_ten): calls_s[one_in_ten],
        place_of(FORMS["waiting"]): 0.1 * calls_s[FORMS["waiting"]],
        place_of(numerous): per_image_s * 20_000,
        place_of("getitem[arrow]"): per_image_s * 256,
    }
    forms = {
        place_of(one_in_ten): "one call in ten",
        place_of(FORMS["lost cache"]): "lost cache",
        place_of("preload_large[arrow]"): "memory",
        place_of(FORMS["waiting"]): "waiting",
    }
    return extra_s, forms


def plant(tree: Path, extra_s: Mapping[str, float], forms: Mapping[str, str] = MappingProxyType({})) -> None:
    """Slow the package in a scratch copy: calls, named by `place_of`, by ``extra_s`` seconds or in one of the forms."""
    package = tree / "src" / "omearrow_ds"
    (package / "_planted.py").write_text(_MODULE.format(extra_s=dict(extra_s), forms=dict(forms)), encoding="utf-8")
    with (package / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\nimport omearrow_ds._planted\n")
