"""`write_crops`: crops around objects as a separate collection in any format."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.axes import AXES, SampleAxes
from omearrow_ds.codec.encode import Image
from omearrow_ds.dataset.collection import Collection
from omearrow_ds.dataset.crop_boxes import Boxes, make_crops
from omearrow_ds.dataset.stored_images import PreloadOptions
from omearrow_ds.errors import ArgumentError, PathExistsError
from omearrow_ds.options import SampleSettings, WriteSettings, check_path, refuse_unknown
from omearrow_ds.resources import split_by_bytes
from omearrow_ds.storage.concat import Index
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.jobs import Material, opening_of
from omearrow_ds.storage.keys import IMAGE_ID
from omearrow_ds.storage.manifest import JOBS
from omearrow_ds.storage.objects import ObjectSettings
from omearrow_ds.storage.part_files import is_path
from omearrow_ds.storage.parts_stores import PartsStore
from omearrow_ds.storage.protocol import ImageSource, OpenOptions, Paths, StrPath
from omearrow_ds.storage.remote import Storage
from omearrow_ds.storage.source import Encoding, opened, refuse_over_source, write_parts
from omearrow_ds.storage.table_files import read_input_table
from omearrow_ds.storage.verified import verified_where_stored
from omearrow_ds.storage.writing import Target, is_parts, write
from omearrow_ds.text import count

_OF_FIELD = "Metadata_image_id"  # The name in `write_embeddings`.
_BOX = ("source_bbox_y_min", "source_bbox_x_min", "source_bbox_y_max", "source_bbox_x_max")  # Names of CytoTable.
_HELD_BYTES = 2**26  # Decoded fields with their crops in memory at once, or one field.


def write_crops(
    fields: Paths | ImageSource,
    objects: Any,
    dst: StrPath,
    format: str | None = None,  # noqa: A002  # Public name.
    *,
    crop_size: tuple[int, int] | None = None,
    center: Sequence[str] | None = None,
    box: Sequence[str] | bool | None = None,
    pad: Literal["constant", "edge", "reflect", "shift", "drop"] | None = None,
    encoding: Encoding = "bytes",
    compression: str | None = None,
    rows_per_group: int | None = None,
    chunk_shape: Sequence[int] | None = None,
    checksum: bool = True,
    progress: bool = False,
    overwrite: bool = False,
    part_bytes: int | None = None,
    shuffle_seed: int | None = None,
    group_by: str | Sequence[str] | None = None,
    executor: Executor | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    task: tuple[int, int] | None = None,
    target_storage: Storage | None = None,
    **opening: Unpack[OpenOptions],
) -> None:
    """Write a crop around each object as an image of a new collection, atomically.

    Crops have the stored pixels with all channels, Z and T, and the OME metadata of their field. Their ids are those of
    `OMEArrowDataset` with these objects, such as ``"B7_3:12"``. Columns are those of the object, then of its field,
    then ``Metadata_image_id`` (id of the field), and the position in the field in pixels with the names of CytoTable's
    ``image_crops``: ``source_bbox_y_min``, ``source_bbox_x_min``, and the exclusive ``source_bbox_y_max`` and
    ``source_bbox_x_max``. Existing columns of these names are kept.

    Crops are written field by field, in the order of the first object of each field. Each field is decoded once, and
    verified if it has a checksum, unless ``verify=False``. For crops of masks, call this function for their collection
    with these objects; ``masks=`` pairs both by id.

    Parameters
    ----------
    fields
        Path of a collection, or an open source.
    objects, crop_size, center, box, pad
        See `OMEArrowDataset`. A warning counts the objects that ``pad="drop"`` leaves out, or with ``None`` the crops
        that are larger than their field.
    dst, format, encoding, compression, rows_per_group, chunk_shape, checksum, progress, overwrite
        See `write_images`.
    part_bytes, shuffle_seed, group_by, executor, on_error, task, target_storage
        See `convert`; with ``on_error="skip"``, crops of skipped fields are left out. With ``shuffle_seed``, fields
        that cannot be read by region are decoded for each crop: it is faster to write the crops first and then convert
        them.
    **opening
        See `open_images`; ``nulls="skip"`` also leaves out objects without a position, and ``filter`` chooses objects
        by their columns and those of their fields. Unless ``columns`` is passed, ``on`` assigns objects to fields, and
        ``column_types`` applies to their table.

    Returns
    -------
    None

    Raises
    ------
    OMEArrowDSError
        Errors of `open_images`, `OMEArrowDataset` and `write_images`.

    Examples
    --------
    >>> from omearrow_ds import open_images, write_crops
    >>> write_crops("plate.arrow", "cells.parquet", "cells.arrow", crop_size=(32, 32))
    >>> with open_images("cells.arrow") as crops:
    ...     print(len(crops), crops.shapes[0].tolist(), crops.image_ids[0])
    20 [1, 2, 1, 32, 32] B02_1:1
    """
    settings = WriteSettings.take(locals())
    refuse_unknown(opening, OpenOptions.__annotations__, write_crops)
    of_objects = ObjectSettings.take(opening, objects)
    check_path("dst", dst)
    target = Target.choose(dst, format, settings)
    if isinstance(objects, str | os.PathLike) and Path(objects).resolve() == target.path.resolve():
        raise PathExistsError(f"{dst}: the target is the table of objects; choose another path")
    if objects is None:
        allowed = "the path of a table of objects, or a table in memory"
        raise ArgumentError(option="objects", value=None, allowed=allowed)
    samples = SampleSettings(crop_size=crop_size, center=center, box=box, pad=pad, normalize=False)
    cutting = _Cutting(samples, of_objects, opening.get("verify") is not False)
    if not is_path(fields):
        opening.pop("nulls", None)  # It applies to the objects, as column_types does.
        opening.pop("column_types", None)
    with opened("fields", fields, opening, skip_errors=settings.skips_errors) as source:
        refuse_over_source(source, dst)
        material = _Crops(source, objects, cutting)
        if material.crops.num_dropped:
            num_objects = count(len(material.crops) + material.crops.num_dropped, "object")
            problem = f"pad='drop' skips {material.crops.num_dropped:,} of {num_objects}"
            warnings.warn(f"{dst}: {problem}, whose crops extend beyond the field", UserWarning, stacklevel=2)
        if pad is None:
            _warn_of_larger_crops(material, dst)
        if is_parts(target.path):
            write_parts(material, target, settings)
            return
        images = material.images(np.arange(len(material.order)))
        write(images, target, material.index.columns, len(material.order), progress=progress)


def _warn_of_larger_crops(material: _Crops, dst: StrPath) -> None:
    crops, header = material.crops, material.source.header
    field_sizes = header.shapes[crops.corners[0], 3:]
    are_larger = (field_sizes < crops.sizes.T).any(axis=1)
    if not are_larger.any():
        return
    first = int(are_larger.argmax())
    crop_size, field_size = (" x ".join(map(str, size)) for size in (crops.size_of(first), field_sizes[first]))
    image = f"image {header.image_ids[int(crops.corners[0, first])]!r} of {field_size}"
    number = f"{are_larger.sum():,} of {count(len(crops), 'crop')} of {crop_size} pixels"
    problem = f"{number} are larger than their field, e.g. {image}, and padded with 0"
    remedy = "lower crop_size=, or pass pad='constant'"
    warnings.warn(f"{dst}: {problem}; {remedy}", UserWarning, stacklevel=3)


def _columns(collection: Collection, boxes: Boxes, order: Array) -> pa.Table:
    columns = collection.column_source.table.take(pa.array(order))
    if IMAGE_ID in columns.column_names and _OF_FIELD not in columns.column_names:
        columns = columns.rename_columns({IMAGE_ID: _OF_FIELD})
    corners = (*boxes[1:3], *(boxes[1:3] + boxes[3:]))
    ids = pa.array([collection.image_ids[field] for field in boxes[0].tolist()], pa.string())
    for name, values in zip((_OF_FIELD, *_BOX), (ids, *map(pa.array, corners)), strict=True):
        if name not in columns.column_names:
            columns = columns.append_column(name, values)
    return columns


class _Cutting(NamedTuple):
    samples: SampleSettings  # Without objects.
    of_objects: ObjectSettings
    verified: bool


class _Crops:
    """Crops around objects to be written field by field, a `omearrow_ds.storage.jobs.Material`."""

    def __init__(self, source: Images, objects: Any, cutting: _Cutting) -> None:
        self._whole, self._objects, self._cutting = source, objects, cutting
        verified = verified_where_stored(source) if cutting.verified else source
        chosen, self.crops = make_crops(verified, replace(cutting.samples, objects=objects), cutting.of_objects)
        self._collection = Collection(chosen, SampleAxes(AXES), PreloadOptions(), normalize=False, crops=self.crops)
        self.source = source if len(chosen) == len(source) else chosen
        # Samples are grouped by field, with fields in the order of their first sample.
        _, first, number = np.unique(self.crops.corners[0], return_index=True, return_inverse=True)
        self.order = np.argsort(first[number.reshape(-1)], kind="stable")
        boxes = self.crops.take(self.order)
        fields = boxes[0].tolist()
        ids = [self._collection.sample_ids[position] for position in self.order.tolist()]
        shapes = np.column_stack([chosen.header.shapes[fields, :3], *boxes[3:]]).astype(np.int64)
        dtypes = [chosen.header.dtypes[field] for field in fields]
        columns = _columns(self._collection, boxes, self.order)
        self.index = Index([0, len(ids)], ids, shapes, dtypes, columns, None)
        self.options: Mapping[str, Any] = {"pad": cutting.samples.pad}

    def images(self, numbers: Array) -> Iterator[Image]:
        collection = self._collection
        for positions in _plan_crop_reads(collection, self.crops.take(self.order[numbers]), self.order[numbers]):
            fields = collection.fields_of(positions).tolist()
            metadata = {field: collection.source.metadata(field) for field in dict.fromkeys(fields)}
            pixels = collection.batch(positions.tolist(), np.empty)
            for position, field, crop in zip(positions.tolist(), fields, pixels, strict=True):
                yield Image(crop, collection.sample_ids[position], metadata[field])

    def opening(self, store: PartsStore) -> Callable[[], Material]:
        if isinstance(self._objects, str | os.PathLike):
            objects: Callable[[], Any] = Path(self._objects).absolute
        else:
            name = f"{JOBS}/objects-{uuid.uuid4().hex[:12]}.parquet"
            with store.temporary(name) as file:
                pq.write_table(read_input_table(self._objects, "objects", self._cutting.of_objects.types).table, file)
                store.put(name, file)
            objects = partial(_read_table, store, name)
        return partial(_opened_again, opening_of(self._whole), objects, self._cutting)


def _read_table(store: PartsStore, name: str) -> pa.Table:
    return pq.read_table(pa.BufferReader(store.read_files([name])[0]))


def _opened_again(opening: Callable[[], Images], objects: Callable[[], Any], cutting: _Cutting) -> _Crops:
    return _Crops(opening(), objects(), cutting)


def _plan_crop_reads(collection: Collection, boxes: Boxes, order: Array) -> Iterator[Array]:
    """Yield parts of an order whose fields fit into memory with their crops; a larger field is decoded repeatedly."""
    fields, field_bytes = boxes[0], collection.image_bytes
    pixel_bytes = field_bytes // collection.shapes[:, 3:].prod(axis=1)  # Bytes per pixel, over all planes.
    begun = np.concatenate([[0], np.cumsum(boxes[3] * boxes[4] * pixel_bytes[fields])])
    new = np.diff(fields, prepend=-1) != 0
    part = (begun[:-1] - begun[:-1][new][np.cumsum(new) - 1]) // _HELD_BYTES
    starts = np.flatnonzero(new | (np.diff(part, prepend=0) != 0))
    stops = np.append(starts[1:], len(order))
    for runs in split_by_bytes(field_bytes[fields[starts]] + begun[stops] - begun[starts], _HELD_BYTES):
        yield order[starts[runs][0] : stops[runs][-1]]
