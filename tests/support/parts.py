"""Collections in parts, made without the code that makes them for users."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from omearrow_ds import write_images
from omearrow_ds.storage.concat import Index
from omearrow_ds.storage.hashes import hash_of
from omearrow_ds.storage.manifest import INDEX, MANIFEST, PARTS, Manifest, PublishedPart
from omearrow_ds.storage.published_parts import write_index
from omearrow_ds.storage.source import open_source


def publish(folder: Path, images: Sequence[np.ndarray], sizes: Sequence[int], suffix: str = "arrow") -> Path:
    """Write images as a collection in parts of ``sizes`` images."""
    (folder / PARTS).mkdir(parents=True)
    parts, starts = [], [0]
    for number, size in enumerate(sizes):
        first = starts[-1]
        starts.append(first + size)
        part = folder / f"{number}.{suffix}"
        chosen = range(first, first + size)
        columns = {"label": list(chosen), "well": [f"A{index:02d}" for index in chosen]}
        write_images([images[i] for i in chosen], part, image_ids=[f"id-{i}" for i in chosen], columns=columns)
        size_bytes = sum(file.stat().st_size for file in ([part] if part.is_file() else part.rglob("*")))
        parts.append(PublishedPart(f"{number:05d}-{hash_of(part)}.{suffix}", size, size_bytes))
        part.rename(folder / PARTS / parts[-1].name)
    opened = [open_source(folder / PARTS / source.name) for source in parts]
    index = Index(
        starts,
        [f"id-{i}" for i in range(starts[-1])],
        np.concatenate([source.header.shapes for source in opened]),
        [dtype for source in opened for dtype in source.header.dtypes],
        pa.concat_tables([source.header.columns.table for source in opened]),
        pa.chunked_array([chunk for source in opened for chunk in source.header.columns.checksums.chunks]),
        np.arange(starts[-1]),
    )
    digest = write_index(folder / INDEX, index)
    format_name = opened[0].header.format.name
    (folder / MANIFEST).write_text(Manifest(format_name, parts, digest).as_json())
    return folder
