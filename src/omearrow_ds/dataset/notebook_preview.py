"""Notebook display of datasets: samples before scaling and transform, and facts."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from omearrow_ds.dataset.collection import Array, Collection
from omearrow_ds.dataset.targets import Targets
from omearrow_ds.storage.formats._html import Facts, kinds, shapes
from omearrow_ds.storage.formats._pictures import Pictures
from omearrow_ds.text import size


def preview_samples(
    collection: Collection,
    positions: Array,
    image_ids: Sequence[str],
    schema: pa.Schema,
    column: Callable[[str], pa.ChunkedArray],
) -> Pictures:
    """Return previews of the samples at ``positions``, which are cropped but neither scaled nor transformed."""
    fields = collection.fields_of(positions)

    def unscaled(image: Array, index: int) -> Array:
        with torch.random.fork_rng([], enabled=collection.is_random):  # Keeps the random state of training.
            return collection.unscaled(image, int(positions[index]))

    def channels(index: int) -> list[str | None]:
        field = int(fields[index])
        names = [channel["name"] for channel in collection.source.metadata(field)["channels"]]
        shape = tuple(collection.shapes[field].tolist())
        if collection.cache is not None:
            collection.source.close()
        if len(names) != shape[1]:
            return []
        numbers = np.arange(len(names), dtype=np.uint16).reshape(1, -1, 1, 1, 1)
        visible = unscaled(np.broadcast_to(numbers, shape), index)
        return [names[number] for number in visible.max(axis=(0, 2, 3, 4)).tolist()]  # 0 beyond an edge.

    def image(index: int) -> Array:
        return unscaled(collection.image(int(fields[index])), index)

    taken = collection.image_bytes[fields]
    return Pictures(str(collection.path), image_ids, schema, column, taken, image, channels)


def describe_samples(
    collection: Collection,
    fields: Array,
    shape: tuple[int, ...] | None,
    transform: Callable[..., Any] | None,
    targets: Targets | None,
    masks: Path | None,
) -> Facts:
    """Return pairs of a name and a text that describe a dataset for display, such as its path and sample shape."""
    classes = {} if targets is None or targets.classes is None else targets.classes
    of_targets = classes if isinstance(classes, dict) else {"": classes}
    access = "read on demand" if collection.cache is None else "preloaded"
    decoded = int(collection.image_bytes[fields].sum())
    return [
        ("path", str(collection.path)),
        ("images", shapes(collection.shapes[fields])),
        ("dtype", kinds(collection.dtypes[field].name for field in fields.tolist())),
        ("pixels", f"{access}, {size(decoded)} decoded"),
        ("sample", f"{collection.axes} {'' if shape is None else ' x '.join(map(str, shape))}"),
        ("transform", "" if transform is None else f"{reprlib.repr(transform)}; images are shown without it"),
        ("masks", "" if masks is None else f"{masks}; images are shown without them"),
        ("target", "" if targets is None else targets.text),
        *((f"classes {name}".strip(), reprlib.repr(list(item))) for name, item in of_targets.items()),
    ]
