"""What a notebook shows of a dataset: its samples before they are scaled and transformed, and what is done to them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import image_bytes
from omearrow_ds.dataset.collection import Array, Collection
from omearrow_ds.dataset.targets import Targets
from omearrow_ds.storage.formats._html import Facts, kinds, shapes
from omearrow_ds.storage.formats._pictures import Pictures
from omearrow_ds.text import size


def pictures(collection: Collection, positions: Array, image_ids: Sequence[str], columns: pa.Table) -> Pictures:
    """Return the samples at ``positions`` as what they are shown from: cut, but neither scaled nor transformed."""

    def channels(index: int) -> list[str | None]:
        position = int(positions[index])
        names = [channel["name"] for channel in collection.source.metadata(position)["channels"]]
        shape = tuple(collection.shapes[position].tolist())
        if collection.cache is not None:
            collection.source.close()
        if len(names) != shape[1]:
            return []
        numbers = np.arange(len(names), dtype=np.uint16).reshape(1, -1, 1, 1, 1)
        kept = collection.unscaled(np.broadcast_to(numbers, shape), position)
        return [names[number] for number in kept[0, :, 0, 0, 0].tolist()]

    def image(index: int) -> Array:
        position = int(positions[index])
        return collection.unscaled(collection.image(position), position)

    taken = image_bytes(collection.shapes, collection.dtypes)[positions]
    return Pictures(str(collection.path), image_ids, columns, taken, image, channels)


def facts(
    collection: Collection,
    positions: Array,
    shape: tuple[int, ...] | None,
    transform: Callable[..., Any] | None,
    targets: Targets | None,
) -> Facts:
    """Return what a dataset is, in words."""
    classes = {} if targets is None or targets.classes is None else targets.classes
    of_targets = classes if isinstance(classes, dict) else {"": classes}
    held = "read on demand" if collection.cache is None else "preloaded"
    decoded = int(image_bytes(collection.shapes, collection.dtypes)[positions].sum())
    return [
        ("path", str(collection.path)),
        ("images", shapes(collection.shapes[positions])),
        ("dtype", kinds(collection.dtypes[position].name for position in positions.tolist())),
        ("pixels", f"{held}, {size(decoded)} decoded"),
        ("sample", f"{collection.axes} {'' if shape is None else ' x '.join(map(str, shape))}"),
        ("transform", "" if transform is None else f"{reprlib.repr(transform)}; images are shown without it"),
        ("target", "" if targets is None else targets.told),
        *((f"classes {name}".strip(), reprlib.repr(list(each))) for name, each in of_targets.items()),
    ]
