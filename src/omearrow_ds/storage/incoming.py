"""Validation and normalization of images, ids, metadata and columns that a caller passes for writing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from omearrow_ds.axes import to_tczyx
from omearrow_ds.codec import encode as codec
from omearrow_ds.codec import schema
from omearrow_ds.errors import ImageError, MetadataError
from omearrow_ds.storage.checksums import Hasher
from omearrow_ds.storage.formats._columns import plain_columns, refuse_extensions

Array = np.ndarray[Any, Any]
Columns: TypeAlias = pa.Table | Mapping[str, Sequence[Any]]
_TAKEN = (schema.COLUMN, schema.SIDECAR_COLUMN, schema.CHECKSUM_COLUMN)
Metadata: TypeAlias = Iterable[Mapping[str, Any] | None]
_ARRAYS = (np.ndarray, np.memmap)
_HELD = (list, tuple, *_ARRAYS)  # Containers that hold all images, so they do not reuse the memory of one.


def describe(
    images: Iterable[Array],
    axes: str | None,
    image_ids: Sequence[str] | None,
    metadata: Metadata | None,
    subject: str,
    hasher: Hasher | None,
) -> Iterator[codec.Image]:
    """Yield each image as (T, C, Z, Y, X) with its id, metadata and checksum; error messages start with ``subject``.

    Raises `ImageError` if an image is not an array, or its rank does not match ``axes``; `MetadataError` if the number
    of ids or metadata differs from that of images, or metadata does not fit its image.
    """
    error = partial(MetadataError, path=subject)
    if isinstance(metadata, Mapping):
        raise error("metadata is one dict, expected a sequence", remedy="pass one dict per image")
    records = None if metadata is None else iter(metadata)
    fleeting = type(images) not in _HELD
    count = 0
    for index, image in enumerate(images):
        name = f"{subject}: image {index}"
        _refuse_other(image, index, subject)
        pixels = to_tczyx(image, axes, name)
        if image_ids is not None and index >= len(image_ids):
            raise error(
                f"image_ids has {len(image_ids)} entries, expected one per image",
                remedy="pass one id per image",
            )
        image_id = f"image-{index:05d}" if image_ids is None else image_ids[index]
        try:
            record = None if records is None else next(records)
        except StopIteration:
            raise error(
                f"metadata has {index} entries, expected one per image", remedy="pass one dict per image"
            ) from None
        values = schema.normalize_metadata(record, pixels.shape[1], name)
        native = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
        stored = native.dtype in schema.DTYPES  # Other dtypes are refused later.
        checksum = None if hasher is None or not stored else hasher.checksum(native)
        yield codec.Image(native, image_id, values, checksum, fleeting)
        count += 1
    if image_ids is not None and len(image_ids) != count:
        raise error(f"image_ids has {len(image_ids)} entries, expected {count}", remedy="pass one id per image")
    if records is not None and next(records, None) is not None:
        raise error(f"metadata has more than {count} entries", remedy="pass one dict per image")


def _refuse_other(image: Array, index: int, subject: str) -> None:
    """Raise `ImageError` unless ``image`` is a plain numeric array: a mask or unit would be lost."""
    kind = type(image)
    if kind in _ARRAYS:
        return
    problem, remedy = f"image {index} is a {kind.__name__}, expected a numpy array", "convert it"
    if isinstance(image, np.ma.MaskedArray):
        problem = f"image {index} is a masked array, and its mask cannot be stored"
        remedy = "pass image.filled(0), and store the mask as another image"
    elif isinstance(image, np.ndarray):
        remedy = "pass numpy.asarray(image) to store only its numbers"
    raise ImageError(problem, path=subject, image=index, remedy=remedy)


def checked(images: Iterator[codec.Image], encoding: str, num_rows: int | None, subject: str) -> Iterator[codec.Image]:
    """Yield the images; raise an error if an image is unsupported, or the columns do not have one row per image."""
    error = partial(MetadataError, path=subject, remedy="pass one row per image")
    count = 0
    for image in images:
        codec.check_image(image, encoding, f"{subject}: image {count} ({image.image_id})")
        count += 1
        if num_rows is not None and count > num_rows:
            raise error(f"columns have {num_rows} rows, expected one per image")
        yield image
    if num_rows not in (None, count):
        raise error(f"columns have {num_rows} rows, expected {count}")


def distinct_ids(image_ids: Iterable[str], subject: str) -> list[str]:
    """Return the image ids as a list; raise `MetadataError` unless all are distinct, non-empty Unicode strings."""
    if isinstance(image_ids, str):
        raise MetadataError(
            f"image_ids is the string {image_ids!r}, expected a sequence",
            path=subject,
            remedy="pass one string per image",
        )
    ids = list(image_ids)
    previous = set()
    for index, image_id in enumerate(ids):
        if not isinstance(image_id, str) or not image_id or image_id in previous or not is_unicode(image_id):
            raise MetadataError(
                f"image_ids has {image_id!r} for image {index}",
                path=subject,
                image=index,
                allowed="distinct, non-empty Unicode strings",
                remedy="correct this id",
            )
        previous.add(image_id)
    return ids


def as_table(columns: Columns | None, subject: str) -> pa.Table | None:
    """Convert columns to a table of plain Arrow types; None remains None. Raise `MetadataError` for invalid columns."""
    if columns is None:
        return None
    try:
        table = columns if isinstance(columns, pa.Table) else _owned_table(columns, subject)
        table.validate(full=True)  # Otherwise a format could store invalid data, and report it as damage later.
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise MetadataError(
            f"columns cannot be converted to an Arrow table: {error}", path=subject, remedy="correct them"
        ) from error
    refuse_extensions(table.schema, subject)
    table = plain_columns(table, subject)
    return table.replace_schema_metadata(None) if table.num_columns else None


def refuse_names(names: Sequence[str], subject: str) -> None:
    """Raise `MetadataError` if column names are empty, duplicate or reserved."""
    if {*_TAKEN, ""} & set(names) or len(set(names)) != len(names):
        raise MetadataError(
            f"columns have the names {names}",
            path=subject,
            allowed=f"distinct, non-empty names other than {', '.join(map(repr, _TAKEN))}",
            remedy="rename columns",
        )


def _owned_table(columns: Mapping[str, Sequence[Any]], subject: str) -> pa.Table:
    """Return a copy of columns: Arrow would share an array's memory, which the caller may modify during writing."""
    owned = {}
    for name, values in dict(columns).items():
        if isinstance(values, list | tuple) or isinstance(getattr(values, "dtype", None), np.dtypes.ObjectDType):
            masked = (row for row, value in enumerate(values) if isinstance(value, np.ma.MaskedArray) and value.ndim)
            row = next(masked, None)
            if row is not None:
                raise MetadataError(
                    f"column {name!r}: row {row} is a masked array",
                    path=subject,
                    column=name,
                    remedy="pass its .tolist(), with None for masked values",
                )
        copied = getattr(values, "copy", None)  # Arrays and series have this method.
        owned[name] = values if copied is None else copied()
    return pa.table(owned)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; a file name with lone surrogates cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
