"""The data files of a Lance dataset, where each can be read by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from omearrow_ds.formats._stored import spread
from omearrow_ds.formats._table import ImageColumn, as_arrays, holds_pixels

if TYPE_CHECKING:
    import lance
    from lance.file import LanceFileReader, ReaderResults


class WholeFile(NamedTuple):
    """A data file that alone holds a fragment: its name, and the number of its column for each leaf of the schema."""

    name: str
    columns: dict[str, int]


class Readers(threading.local):
    """A thread's open readers by the number of the file: one is for one thread at a time."""

    def __init__(self) -> None:
        self.of_file: dict[int, LanceFileReader] = {}


def whole_files(dataset: lance.LanceDataset) -> list[WholeFile]:
    """Return the data file of each fragment, if that alone holds its rows, all of them and as they are, else [].

    It does not where rows were deleted, or columns were added, dropped or patched since; Lance knows how to read that.
    """
    leaves = dict(_leaf_ids(dataset.lance_schema.fields()))
    files = []
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        if len(metadata.files) != 1 or metadata.deletion_file is not None or getattr(metadata, "overlays", None):
            return []
        file = metadata.files[0]
        if "/" in file.path or file.path.startswith("."):  # of another folder than the data's
            return []
        if list(file.fields) != list(leaves.values()) or getattr(file, "base_id", None) is not None:
            return []
        files.append(WholeFile(file.path, dict(zip(leaves, file.column_indices, strict=True))))
    return files


def page_encodings(dataset: lance.LanceDataset, path: Path, column: ImageColumn) -> list[str]:
    """Return how Lance describes the encodings of the pixels' pages, in a few of the fragments."""
    from lance.file import LanceFileReader  # noqa: PLC0415  # an optional backend

    leaves = {number for leaf, number in _leaf_ids(dataset.lance_schema.fields()) if holds_pixels(leaf, column)}
    fragments = dataset.get_fragments()
    found = []
    for fragment in (fragments[number] for number in spread(len(fragments))):
        for file in fragment.metadata.files:
            columns = [place for leaf, place in zip(file.fields, file.column_indices, strict=True) if leaf in leaves]
            if columns and getattr(file, "base_id", None) is None:
                stored = LanceFileReader(str(path / "data" / file.path)).metadata().columns
                found += [page.encoding for place in columns if place >= 0 for page in stored[place].pages]
    return found


def _leaf_ids(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield path and id of the fields at the bottom of a Lance schema."""
    for field in fields:
        path = f"{prefix}{field.name()}"
        children = field.children()
        yield from _leaf_ids(children, f"{path}.") if children else [(path, field.id())]


def take_rows(reader: LanceFileReader, rows: list[int]) -> list[pa.Array]:
    """Return the chunks of rows by number, in ascending order."""
    return _chunks(reader.take_rows(rows, batch_size=len(rows) + 1, batch_readahead=1), len(rows))


def read_range(reader: LanceFileReader, start: int, count: int) -> list[pa.Array]:
    """Return the chunks of rows that follow each other."""
    return _chunks(reader.read_range(start, count, batch_size=count + 1, batch_readahead=1), count)


def _chunks(results: ReaderResults, count: int) -> list[pa.Array]:
    """Return ``count`` rows that come in one batch, if Lance can: to fill one to the brim takes it 0.1 ms longer."""
    reader = results.to_batches()
    batches = [reader.read_next_batch()]
    if len(batches[0]) < count:
        batches += reader
    return [array for batch in batches for array in as_arrays(batch.column(0), "chunks")]
