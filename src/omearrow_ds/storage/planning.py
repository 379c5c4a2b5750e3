"""Plan of a collection in parts: images per part, determined by source and options, and equal in every process."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa

from omearrow_ds.errors import ColumnError
from omearrow_ds.options import WriteSettings
from omearrow_ds.resources import image_bytes, split_by_bytes
from omearrow_ds.storage.formats import PART_BYTES
from omearrow_ds.storage.formats._base import Array, BaseSource
from omearrow_ds.storage.hashes import new_hash
from omearrow_ds.storage.index import index_hash
from omearrow_ds.storage.materials import Material
from omearrow_ds.storage.parts import Index
from omearrow_ds.storage.writing import Target

PLATE = "Metadata_Plate"


@dataclass(frozen=True)
class Plan:
    """Assignment of images to parts: part k has the images ``order[starts[k]:starts[k + 1]]``."""

    order: Array
    starts: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    def part(self, number: int) -> Array:
        """Return the indices of the images in a part, in the order in which they are stored."""
        return self.order[self.starts[number] : self.starts[number + 1]]


@dataclass(frozen=True)
class Cut:
    """Rules that assign images to parts.

    Attributes
    ----------
    part_bytes
        Maximum decoded size of the images of a part; one image may exceed it.
    shuffle_seed
        Permutes images over all parts of a plate, or of a group; None keeps their order.
    group_by
        Columns in addition to the plate's; images with different values are never in one part.
    """

    part_bytes: int = PART_BYTES
    shuffle_seed: int | None = None
    group_by: tuple[str, ...] = ()

    @classmethod
    def choose(cls, settings: WriteSettings, default_bytes: int = PART_BYTES) -> Self:
        """Return the rules that write settings specify; without a part size, parts have ``default_bytes``."""
        group_by = settings.group_by
        names = (group_by,) if isinstance(group_by, str) else tuple(group_by or ())
        return cls(settings.part_bytes or default_bytes, settings.shuffle_seed, names)

    def plan(self, material: Material) -> Plan:
        """Assign the images to parts.

        Raises
        ------
        ColumnError
            If a column of ``group_by`` does not exist, or cannot be grouped by.
        """
        sizes_bytes = image_bytes(material.shapes, material.dtypes)
        order, starts = [np.zeros(0, np.int64)], [0]
        for number, rows in enumerate(self._groups(material)):
            seed = self.shuffle_seed
            group = rows if seed is None else rows[_permutation(seed, number, len(rows))]
            order.append(group)
            starts += [starts[-1] + part.stop for part in split_by_bytes(sizes_bytes[group], self.part_bytes)]
        return Plan(np.concatenate(order), np.array(starts if len(starts) > 1 else [0, 0]))

    def _groups(self, material: Material) -> list[Array]:
        """Return the indices of the images of each plate and group, in order of first occurrence."""
        columns, known = material.columns, material.columns.column_names
        odd = next((name for name in self.group_by if name not in known), None)
        if odd is not None:
            have = ", ".join(map(repr, known)) or "none"
            raise ColumnError(f"{material.source.path}: group_by={odd!r}: no such column; pass one of {have}")
        names = dict.fromkeys([*([PLATE] if PLATE in known else []), *self.group_by])
        codes = [_codes(columns[name], f"{material.source.path}: group_by={name!r}") for name in names]
        if not codes or not len(columns):
            return [np.arange(len(material.image_ids))] if len(material.image_ids) else []
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


def described(material: Material, target: Target, cut: Cut, plan: Plan) -> dict[str, Any]:
    """Return everything that determines the contents of the parts, as JSON values, to compare it in a later run."""
    source = material.source
    layout = {"format": target.format.name, **asdict(target.layout), "checksum": target.checksum, **asdict(cut)}
    layout["group_by"] = list(cut.group_by)
    layout["chunk_shape"] = target.layout.chunk_shape and list(target.layout.chunk_shape)
    return {
        "source": {
            "format": source.format.name,
            "images": len(material.image_ids),
            "chosen": [*source.image_column, *source.variant],
            "known": known_of(material),
            "files": _files_hash(source),
            "options": dict(material.options),
        },
        "layout": layout,
        "parts": len(plan),
    }


def known_of(material: Material) -> str:
    """Return a hash of the ids, shapes, dtypes, columns and checksums of the images."""
    count = len(material.image_ids)
    of_images = material.image_ids, material.shapes, material.dtypes, material.columns, material.checksums
    return index_hash(Index([0, count], *of_images, np.arange(count)))


def _files_hash(source: BaseSource) -> str:
    """Return the hash of names, sizes and times of a source's files; a missing file has no size and time."""
    digest = new_hash()
    for file in sorted(source.stored_files()):
        name = file.relative_to(source.path) if file.is_relative_to(source.path) else file
        try:
            status = os.stat(file)  # noqa: PTH116  # For tens of thousands of files, pathlib doubles the cost.
            said = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            said = "-"
        digest.update(f"{name} {said}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
