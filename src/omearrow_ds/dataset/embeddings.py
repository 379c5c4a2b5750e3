"""`write_embeddings`: embeddings of a model as a table of profiles, one row per image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError, MetadataError, PathExistsError, WriteError
from omearrow_ds.storage.incoming import Columns, as_table
from omearrow_ds.storage.protocol import StrPath
from omearrow_ds.storage.publish import check_target, publish
from omearrow_ds.text import count

Array = np.ndarray[Any, Any]
_GROUP_ROWS = 8192
_IDS, _OF_IMAGE = "image_id", "Metadata_image_id"


def write_embeddings(
    path: StrPath,
    image_ids: Iterable[str] | Iterable[Iterable[str]],
    embeddings: Any,
    *,
    columns: Columns | StoredSamples | None = None,
    prefix: str = "Embedding_",
    overwrite: bool = False,
) -> None:
    """Write embeddings to a Parquet table with one row per id and one column per feature.

    The write is atomic. Batches are written as they arrive; one row group is in memory.

    Parameters
    ----------
    path
        File to write.
    image_ids
        One id per embedding, as ``return_ids=True`` returns them, or an iterable of batches of ids. Ids may repeat.
    embeddings
        (N, D) array or tensor of numbers, finite or not, or an iterable of such batches. Integers become float64, and
        16-bit floats become float32.
    columns
        ``None``, or the dataset, or a table with a column ``image_id``: each embedding gets the row of its id. For
        datasets of objects, ``image_id`` is the id of the object, and ``Metadata_image_id`` that of its image.
    prefix
        Prefix of the feature columns: ``Embedding_0000`` and so on.
    overwrite
        ``False``, or ``True`` to replace an existing file.

    Returns
    -------
    None

    Raises
    ------
    MetadataError
        If numbers of ids and embeddings differ, ids are not text, column names repeat, or an id has no row in
        ``columns`` or several.
    ArgumentError
        If embeddings are empty, not two-dimensional numbers, or differ in features or dtype between batches.
    PathExistsError
        If ``path`` exists and cannot be replaced.
    WriteError
        If the file cannot be written, for example because the disk is full.

    Examples
    --------
    >>> import numpy as np
    >>> import pyarrow.parquet as pq
    >>> from omearrow_ds import write_embeddings
    >>> write_embeddings("profiles.parquet", ["A01", "A02"], np.zeros((2, 3)))
    >>> pq.read_table("profiles.parquet").column_names
    ['image_id', 'Embedding_0000', 'Embedding_0001', 'Embedding_0002']
    """
    target = Path(path)
    check_target(target, overwrite=overwrite)
    if target.is_dir():
        raise PathExistsError(f"{target}: the target is a folder; choose the path of a file")
    if not isinstance(prefix, str):
        raise ArgumentError(option="prefix", value=prefix, allowed="a string")
    whole = isinstance(embeddings, np.ndarray | torch.Tensor)
    batches = _checked([embeddings] if whole else embeddings, str(target))
    tables = _tables(batches, _flat(image_ids, str(target)), _by_id(columns, str(target)), prefix, str(target))

    def fill(temporary: Path) -> None:
        first = next(tables)
        with _translate_errors(target):
            writer = pq.ParquetWriter(temporary, first.schema)
        try:
            for table in chain([first], tables):
                with _translate_errors(target):
                    writer.write_table(table)
        finally:
            with _translate_errors(target):
                writer.close()

    publish(target, fill, overwrite=overwrite)


class _Rows(NamedTuple):
    columns: pa.Table
    of_id: dict[str, int]

    def of(self, image_ids: Sequence[str], path: str) -> pa.Table:
        absent = next((image_id for image_id in image_ids if image_id not in self.of_id), None)
        if absent is not None:
            raise MetadataError(f"{path}: columns= has no row with the id {absent!r}; pass the rows of all images")
        return self.columns.take([self.of_id[image_id] for image_id in image_ids])


def _by_id(columns: Any, path: str) -> _Rows | None:
    if columns is None:
        return None
    if isinstance(columns, StoredSamples):
        names = [_OF_IMAGE if name == _IDS else name for name in columns.columns.column_names]  # For objects.
        table, ids = as_table(columns.columns.rename_columns(names), path), list(columns.image_ids)
    else:
        table = as_table(columns, path)
        if table is None or _IDS not in table.column_names:
            raise MetadataError(
                f"{path}: columns= has no column {_IDS!r} to match embeddings; add it, or pass the dataset",
                column=_IDS,
            )
        ids, table = table[_IDS].to_pylist(), table.drop_columns(_IDS)
    of_id = dict(zip(ids, range(len(ids)), strict=True))
    if len(of_id) < len(ids):
        twice = next(image_id for image_id, row in zip(ids, range(len(ids)), strict=True) if of_id[image_id] != row)
        raise MetadataError(f"{path}: columns= has several rows with the id {twice!r}; remove duplicates")
    return _Rows(pa.table({}) if table is None else table, of_id)


@contextmanager
def _translate_errors(target: Path) -> Iterator[None]:
    """Convert errors of writing to `WriteError`, but not errors that the caller's batches raise."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise WriteError(f"{target}: writing failed and left no file: {error}") from error


def _checked(embeddings: Iterable[Any], path: str) -> Iterator[Array]:
    """Yield batches as float arrays (n, D) with equal D and dtype."""
    first: Array | None = None
    error = partial(ArgumentError, path=path, option="embeddings")
    if not isinstance(embeddings, Iterable):
        raise error(f"is {type(embeddings).__name__}", remedy="pass an array of shape (N, D), or batches of them")
    for number, batch_data in enumerate(embeddings):
        if isinstance(batch_data, torch.Tensor):
            batch_data = batch_data.detach().cpu()  # noqa: PLW2901
            batch_data = batch_data.float() if batch_data.dtype == torch.bfloat16 else batch_data  # noqa: PLW2901  # NumPy has no bfloat16.
        batch = np.asarray(batch_data)
        if batch.ndim != 2 or batch.dtype.kind not in "fiu" or not batch.shape[1]:
            problem = f"{batch.dtype} of shape {batch.shape}"
            raise error(f"batch {number} is {problem}", remedy="pass numbers of shape (N, D)")
        kind = np.float64 if batch.dtype.kind != "f" else np.float32 if batch.dtype.itemsize < 4 else batch.dtype
        batch = batch.astype(kind, copy=False)
        if first is None:
            first = batch[:0]
        if (batch.shape[1], batch.dtype) != (first.shape[1], first.dtype):
            problem = f"batch {number} has {batch.shape[1]} features of {batch.dtype}"
            earlier = f"earlier batches have {first.shape[1]} of {first.dtype}"
            raise error(f"{problem}, but {earlier}", remedy="make them equal")
        yield batch
    if first is None:
        raise error("is empty", remedy="pass an array of shape (0, D) for an empty table")


def _flat(image_ids: Any, path: str) -> Iterator[str]:
    if isinstance(image_ids, str) or not isinstance(image_ids, Iterable):
        raise MetadataError(f"{path}: image_ids is {image_ids!r}; pass a sequence of strings, one per embedding")
    for ids in image_ids:
        for image_id in [ids] if isinstance(ids, str) or not isinstance(ids, Iterable) else ids:
            if not isinstance(image_id, str):
                raise MetadataError(f"{path}: image_ids has {image_id!r}; pass strings, or batches of strings")
            yield image_id


def _tables(
    batches: Iterator[Array], ids: Iterator[str], columns: _Rows | None, prefix: str, path: str
) -> Iterator[pa.Table]:
    done, waiting = 0, []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= _GROUP_ROWS:
            yield _table(waiting, ids, columns, done, prefix, path)
            done += sum(map(len, waiting))
            waiting = []
    if waiting or not done:
        yield _table(waiting, ids, columns, done, prefix, path)
        done += sum(map(len, waiting))
    left = sum(1 for _ in ids)
    if left:
        raise MetadataError(
            f"{path}: there are {done + left:,} image_ids but {count(done, 'embedding')}; pass one id per embedding"
        )


def _table(
    batches: list[Array], ids: Iterator[str], columns: _Rows | None, start: int, prefix: str, path: str
) -> pa.Table:
    features = np.ascontiguousarray(np.concatenate(batches).T)
    size = features.shape[1]
    own = list(islice(ids, size))
    if len(own) < size:
        raise MetadataError(
            f"{path}: there are more embeddings than the {start + len(own):,} image_ids; pass one id per embedding"
        )
    extra = pa.table({}) if columns is None or not columns.columns.num_columns else columns.of(own, path)
    width = max(4, len(str(len(features) - 1)))
    names = [_IDS, *extra.column_names, *(f"{prefix}{number:0{width}}" for number in range(len(features)))]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise MetadataError(f"{path}: duplicate columns {twice}; remove them from columns=, or choose another prefix=")
    return pa.table([pa.array(own, pa.string()), *extra.columns, *map(pa.array, features)], names)
