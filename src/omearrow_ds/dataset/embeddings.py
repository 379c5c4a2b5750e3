"""`write_embeddings`: embeddings of a model as a table of profiles, one row per image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from omearrow_ds.axes import Array
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.errors import ArgumentError, MetadataError, WriteError
from omearrow_ds.options import check_path
from omearrow_ds.storage.protocol import StrPath
from omearrow_ds.storage.publish import check_target, publish
from omearrow_ds.storage.writing import Columns, as_table
from omearrow_ds.text import count

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
    target, subject = check_path("path", path), str(path)
    check_target(target, overwrite=overwrite, is_file=True)
    if not isinstance(prefix, str):
        raise ArgumentError(option="prefix", value=prefix, allowed="a string")
    is_one_batch = isinstance(embeddings, np.ndarray | torch.Tensor)
    batches = _float_batches([embeddings] if is_one_batch else embeddings, subject)
    tables = _tables(batches, _flat_ids(image_ids, subject), _read_columns(columns, subject), prefix, subject)

    def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
        """Convert errors of writing to `WriteError`, but not errors that the caller's batches raise."""
        try:
            return function(*arguments)
        except (OSError, pa.ArrowException) as error:
            raise WriteError(f"{target}: writing failed and left no file: {error}") from error

    def fill(temporary: Path) -> None:
        first = next(tables)
        writer = attempt(pq.ParquetWriter, temporary, first.schema)
        try:
            for table in chain([first], tables):
                attempt(writer.write_table, table)
        finally:
            attempt(writer.close)

    publish(target, fill, overwrite=overwrite)


def _read_columns(columns: Any, subject: str) -> Callable[[list[str]], pa.Table]:
    if isinstance(columns, StoredSamples):
        # Datasets of objects have a column with the ids of images.
        names = [_OF_IMAGE if name == _IDS else name for name in columns.column_names]
        table, ids = as_table(columns.columns.rename_columns(names), subject), list(columns.image_ids)
    elif columns is None:
        table, ids = pa.table({}), []
    else:
        table = as_table(columns, subject)
        if _IDS not in table.column_names:
            problem = f"columns= lacks the column {_IDS!r}, which assigns rows to embeddings"
            raise MetadataError(f"{subject}: {problem}; add it, or pass the dataset", column=_IDS)
        ids, table = table[_IDS].to_pylist(), table.drop_columns(_IDS)
    row_of = {image_id: row for row, image_id in enumerate(ids)}
    if len(row_of) < len(ids):
        duplicate = next(image_id for row, image_id in enumerate(ids) if row_of[image_id] != row)
        raise MetadataError(f"{subject}: columns= has several rows with the id {duplicate!r}; remove duplicates")

    def take(image_ids: list[str]) -> pa.Table:
        if not table.num_columns:
            return pa.table({})
        absent = next((image_id for image_id in image_ids if image_id not in row_of), None)
        if absent is not None:
            raise MetadataError(f"{subject}: columns= has no row with the id {absent!r}; pass the rows of all images")
        return table.take([row_of[image_id] for image_id in image_ids])

    return take


def _float_batches(embeddings: Iterable[Any], subject: str) -> Iterator[Array]:
    """Yield batches as float arrays (n, D) with equal D and dtype."""
    first: Array | None = None
    error = partial(ArgumentError, path=subject, option="embeddings")
    if not isinstance(embeddings, Iterable):
        remedy = "pass an array of shape (N, D), or batches of such arrays"
        raise error(f"is {type(embeddings).__name__}", remedy=remedy)
    for number, values in enumerate(embeddings):
        if isinstance(values, torch.Tensor):
            is_bfloat16 = values.dtype == torch.bfloat16  # NumPy has no bfloat16.
            values = (values.float() if is_bfloat16 else values).detach().cpu()  # noqa: PLW2901
        batch = np.asarray(values)
        if batch.ndim != 2 or batch.dtype.kind not in "fiu" or not batch.shape[1]:
            problem = f"batch {number} is {batch.dtype} of shape {batch.shape}"
            raise error(problem, remedy="pass numbers of shape (N, D)")
        dtype = np.promote_types(batch.dtype, np.float32 if batch.dtype.kind == "f" else np.float64)
        batch = batch.astype(dtype, copy=False)
        first = batch[:0] if first is None else first
        if (batch.shape[1], batch.dtype) != (first.shape[1], first.dtype):
            problem = f"batch {number} has {batch.shape[1]} features of {batch.dtype}"
            earlier = f"earlier batches have {first.shape[1]} of {first.dtype}"
            raise error(f"{problem}, but {earlier}", remedy="pass batches of one width and dtype")
        yield batch
    if first is None:
        raise error("is empty", remedy="pass an array of shape (0, D) for an empty table")


def _flat_ids(image_ids: Any, subject: str) -> Iterator[str]:
    if isinstance(image_ids, str) or not isinstance(image_ids, Iterable):
        raise MetadataError(f"{subject}: image_ids is {image_ids!r}; pass a sequence of strings, one per embedding")
    for ids in image_ids:
        for image_id in [ids] if isinstance(ids, str) or not isinstance(ids, Iterable) else ids:
            if not isinstance(image_id, str):
                raise MetadataError(f"{subject}: image_ids has {image_id!r}; pass strings, or batches of strings")
            yield image_id


def _tables(
    batches: Iterator[Array], ids: Iterator[str], take: Callable[[list[str]], pa.Table], prefix: str, subject: str
) -> Iterator[pa.Table]:
    """Yield tables of a few thousand rows, at least one."""
    num_rows, waiting = 0, list[Array]()
    for batch in chain(batches, [None]):
        waiting += [] if batch is None else [batch]
        if not waiting or (batch is not None and sum(map(len, waiting)) < _GROUP_ROWS):
            continue
        features = np.ascontiguousarray(np.concatenate(waiting).T)
        group_ids, waiting = list(islice(ids, features.shape[1])), []
        num_rows += len(group_ids)
        if len(group_ids) < features.shape[1]:
            problem = f"there are more embeddings than the {num_rows:,} image_ids"
            raise MetadataError(f"{subject}: {problem}; pass one id per embedding")
        columns = take(group_ids)
        width = max(4, len(str(len(features) - 1)))
        names = [_IDS, *columns.column_names, *(f"{prefix}{number:0{width}}" for number in range(len(features)))]
        duplicates = sorted(name for name, number in Counter(names).items() if number > 1)
        if duplicates:
            remedy = "remove them from columns=, or choose another prefix="
            raise MetadataError(f"{subject}: duplicate columns {duplicates}; {remedy}")
        yield pa.table([pa.array(group_ids, pa.string()), *columns.columns, *map(pa.array, features)], names)
    num_left = sum(1 for _ in ids)
    if num_left:
        problem = f"there are {num_rows + num_left:,} image_ids but {count(num_rows, 'embedding')}"
        raise MetadataError(f"{subject}: {problem}; pass one id per embedding")
