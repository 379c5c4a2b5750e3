"""Images to be written as a collection in parts, and the assignment of images to parts.

The assignment depends only on source and options, so it is equal in every process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import encode as codec
from omearrow_ds.errors import ColumnError
from omearrow_ds.options import WriteSettings
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.checksums import Hasher
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.hashes import new_hash
from omearrow_ds.storage.index import index_hash
from omearrow_ds.storage.parts_source import Index
from omearrow_ds.storage.parts_stores import PartsStore
from omearrow_ds.storage.verified import verified_where_stored
from omearrow_ds.storage.writing import Target

PLATE = "Metadata_Plate"
Image = codec.Image  # Item that a material yields.
_GROUP_BYTES = 2**25  # Decoded images in memory at once.


class Material(Protocol):
    """Images to be written, with their ids, shapes, dtypes and columns, and methods that read the pixels.

    ``options`` are JSON values that affect the written pixels in addition to the source.
    """

    source: Images
    image_ids: Sequence[str]
    shapes: Array
    dtypes: Sequence[np.dtype[Any]]
    columns: pa.Table
    checksums: pa.ChunkedArray | None
    options: Mapping[str, Any]

    def images(self, indices: Array) -> Iterator[codec.Image]:
        """Yield the images at sorted, distinct indices."""

    def opening(self, store: PartsStore) -> Callable[[], Material]:
        """Return a picklable function that opens the images in another process by file names only.

        Data without a file name is written to ``store``.
        """


class SourceImages:
    """Images of a source that `omearrow_ds.convert` writes; images that have a checksum are verified.

    With ``checksum``, each image gets one: the stored one or, if none is stored, a new one.
    """

    def __init__(self, source: Images, *, checksum: bool) -> None:
        self.source, self._hasher = source, Hasher() if checksum else None
        self.image_ids, self.shapes, self.dtypes = source.image_ids, source.shapes, source.dtypes
        self.columns, self.checksums = source.columns, source.checksums
        self.options: Mapping[str, Any] = {}
        self._verified = verified_where_stored(source)
        self._stored = [None] * len(source) if self.checksums is None else self.checksums.to_pylist()

    def images(self, indices: Array) -> Iterator[codec.Image]:
        """Yield the images at sorted, distinct indices."""
        for group in _split_indices(self, indices):
            yield from map(self._image, group.tolist(), self._verified.read_arrays(group.tolist()))

    def in_order(self) -> Iterator[codec.Image]:
        """Yield all images in order; use an image before requesting the next one, which may reuse its memory."""
        for start, images in self._verified.stream():
            yield from (self._image(index, pixels) for index, pixels in enumerate(images, start=start))

    def _image(self, index: int, pixels: Array) -> codec.Image:
        checksum = None if self._hasher is None else self._stored[index] or self._hasher.checksum(pixels)
        return codec.Image(pixels, self.image_ids[index], self.source.metadata(index), checksum)

    def opening(self, store: PartsStore) -> Callable[[], Material]:
        """Return a function that opens the images in another process."""
        del store
        return partial(_open_source_images, opening_of(self.source), checksum=self._hasher is not None)


def _open_source_images(open_source: Callable[[], Images], *, checksum: bool) -> Material:
    return SourceImages(open_source(), checksum=checksum)


def opening_of(source: Images) -> Callable[[], Images]:
    """Return a function that opens ``source`` in another process."""
    return source.opened_by or partial(_itself, source)


def _itself(source: Images) -> Images:
    return source


def read_in_order(material: Material, indices: Array) -> Iterator[codec.Image]:
    """Yield images in the order of distinct indices; unsorted ones are read in sorted groups and held in memory."""
    if (np.diff(indices) > 0).all():
        yield from material.images(indices)
        return
    for group in _split_indices(material, indices):
        order = np.sort(group)
        images = dict(zip(order.tolist(), material.images(order), strict=True))
        yield from (images.pop(index) for index in group.tolist())


def _split_indices(material: Material, indices: Array) -> Iterator[Array]:
    """Yield consecutive indices whose images fit into memory."""
    sizes_bytes = image_bytes(material.shapes[indices], [material.dtypes[index] for index in indices.tolist()])
    return (indices[group] for group in split_by_bytes(sizes_bytes, _GROUP_BYTES))


@dataclass(frozen=True)
class PartitionOptions:
    """Rules that assign images to parts."""

    part_bytes: int  # Maximum decoded size of the images of a part; one image may exceed it.
    shuffle_seed: int | None = None  # Permutes images over all parts of a plate or group; None keeps their order.
    group_by: tuple[str, ...] = ()  # Columns in addition to the plate's; a part has one value of each.

    @classmethod
    def choose(cls, settings: WriteSettings, default_bytes: int) -> Self:
        """Return the rules that write settings specify; without a part size, parts have ``default_bytes``."""
        group_by = settings.group_by
        names = (group_by,) if isinstance(group_by, str) else tuple(group_by or ())
        return cls(settings.part_bytes or default_bytes, settings.shuffle_seed, names)

    def plan(self, material: Material) -> list[Array]:
        """Return the indices of the images of each part, in the order in which they are stored."""
        sizes_bytes = image_bytes(material.shapes, material.dtypes)
        parts: list[Array] = []
        for number, rows in enumerate(self._groups(material)):
            seed = self.shuffle_seed
            group = rows if seed is None else rows[_permutation(seed, number, len(rows))]
            parts += [group[part] for part in split_by_bytes(sizes_bytes[group], self.part_bytes)]
        return parts or [np.zeros(0, np.int64)]

    def _groups(self, material: Material) -> list[Array]:
        """Return the indices of the images of each plate and group, in order of first occurrence."""
        columns, known = material.columns, material.columns.column_names
        unknown = next((name for name in self.group_by if name not in known), None)
        if unknown is not None:
            names = ", ".join(map(repr, known)) or "none"
            raise ColumnError(f"{material.source.path}: group_by={unknown!r}: no such column; pass one of {names}")
        grouping = dict.fromkeys([*([PLATE] if PLATE in known else []), *self.group_by])
        codes = [_codes(columns[name], f"{material.source.path}: group_by={name!r}") for name in grouping]
        if not codes or not len(columns):
            return [np.arange(len(material.image_ids))]
        _, first, group = np.unique(np.stack(codes, axis=1), axis=0, return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))[group.reshape(-1)]
        order = np.argsort(rank, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(rank[order])) + 1)


def _codes(column: pa.ChunkedArray, subject: str) -> Array:
    """Return a code for each value of a column, including null."""
    try:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    except pa.ArrowNotImplementedError:
        raise ColumnError(
            f"{subject}: has the type {column.type}, which cannot be grouped; pass another column"
        ) from None
    codes: Array = encoded.indices.to_numpy(zero_copy_only=False)
    return codes


def _permutation(seed: int, group: int, length: int) -> Array:
    """Return a permutation of a group, from raw random numbers, as NumPy may change its shuffles between releases."""
    draws = np.random.Philox(np.random.SeedSequence([seed, group])).random_raw(length)
    return np.argsort(draws, kind="stable")


def describe_plan(material: Material, target: Target, options: PartitionOptions, num_parts: int) -> dict[str, Any]:
    """Return everything that determines the contents of the parts, as JSON values, to compare it in a later run."""
    source = material.source
    layout = {"format": target.format.name, **asdict(target.layout), "checksum": target.checksum, **asdict(options)}
    description = {
        "source": {
            "format": source.format.name,
            "images": len(material.image_ids),
            "chosen": [*source.image_column, *source.variant],
            "known": hash_images(material),
            "files": _files_hash(source),
            "options": dict(material.options),
        },
        "layout": layout,
        "parts": num_parts,
    }
    as_json: dict[str, Any] = json.loads(json.dumps(description))  # With lists instead of tuples.
    return as_json


def hash_images(material: Material) -> str:
    """Return a hash of the ids, shapes, dtypes, columns and checksums of the images."""
    of_images = material.image_ids, material.shapes, material.dtypes, material.columns, material.checksums
    return index_hash(Index([0, len(material.image_ids)], *of_images))


def _files_hash(source: Images) -> str:
    """Return the hash of names, sizes and times of a source's files; a missing file has no size and time."""
    digest = new_hash()
    for file in sorted(source.stored_files()):
        name = file.relative_to(source.path) if file.is_relative_to(source.path) else file
        try:
            status = os.stat(file)  # noqa: PTH116  # For tens of thousands of files, pathlib doubles the cost.
            version = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            version = "-"
        digest.update(f"{name} {version}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
