"""Data files of a Lance dataset that each hold a whole fragment."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from omearrow_ds.storage.formats._image_columns import ImageColumn, holds_pixels
from omearrow_ds.storage.formats._stored import spread
from omearrow_ds.storage.formats._table import as_arrays
from omearrow_ds.storage.formats._urls import as_parsed

if TYPE_CHECKING:
    import lance
    from lance.file import LanceFileReader
    from lance.fragment import FragmentSession


Client = dict[str, str] | None  # storage options of a server


class WholeFile(NamedTuple):
    """Name of a data file that has all columns of a fragment, the fragment's id, and the file column of each leaf."""

    name: str
    fragment: int
    columns: dict[str, int]


class Sessions(threading.local):
    """Sessions that a thread has opened to read the pixels of fragments, by index of the data file."""

    def __init__(self) -> None:
        self.of_file: dict[int, FragmentSession] = {}


def whole_files(dataset: lance.LanceDataset) -> list[WholeFile]:
    """Return the data file of each fragment; an empty list unless each file has a complete, unchanged fragment.

    It does not if rows were deleted, or columns were added, dropped or patched since; Lance can read such fragments.
    """
    leaves = dict(_leaf_ids(dataset.lance_schema.fields()))
    files = []
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        if len(metadata.files) != 1 or metadata.deletion_file is not None or getattr(metadata, "overlays", None):
            return []
        file = metadata.files[0]
        if "/" in file.path or file.path.startswith("."):  # in another folder than the data files
            return []
        if list(file.fields) != list(leaves.values()) or getattr(file, "base_id", None) is not None:
            return []
        files.append(WholeFile(file.path, fragment.fragment_id, dict(zip(leaves, file.column_indices, strict=True))))
    return files


def open_file(path: Path, name: str, client: Client) -> LanceFileReader:
    """Return a reader for the metadata of one data file of a dataset."""
    from lance.file import LanceFileReader  # noqa: PLC0415  # an optional backend

    return LanceFileReader(as_parsed(path / "data" / name), storage_options=client)


def pixel_bytes(dataset: lance.LanceDataset, path: Path, column: ImageColumn, client: Client) -> dict[int, int]:
    """Return the number of stored bytes of pixel pages in a few fragments, by fragment index."""
    leaves = {number for leaf, number in _leaf_ids(dataset.lance_schema.fields()) if holds_pixels(leaf, column)}
    fragments = dataset.get_fragments()
    stored_bytes = {}
    for number in spread(len(fragments)):
        sizes = []
        for file in fragments[number].metadata.files:
            columns = [index for leaf, index in zip(file.fields, file.column_indices, strict=True) if leaf in leaves]
            if columns and getattr(file, "base_id", None) is None:
                stored = open_file(path, file.path, client).metadata().columns
                pages = [page for index in columns if index >= 0 for page in stored[index].pages]
                sizes += [buffer.size for page in pages for buffer in page.buffers]
        stored_bytes[number] = sum(sizes)
    return stored_bytes


def _leaf_ids(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield path and id of the leaf fields of a Lance schema."""
    for field in fields:
        path = f"{prefix}{field.name()}"
        children = field.children()
        yield from _leaf_ids(children, f"{path}.") if children else [(path, field.id())]


def open_session(dataset: lance.LanceDataset, fragment: int, columns: list[str]) -> FragmentSession:
    """Return a session that takes rows of a fragment, with only these columns."""
    found = dataset.get_fragment(fragment)
    if found is None:
        raise ValueError(f"fragment {fragment} is missing")
    return found.open_session(columns)


def take_rows(session: FragmentSession, rows: list[int]) -> list[pa.Array]:
    """Return the chunks of a fragment's rows by number, in ascending order.

    A session costs half of a `LanceFileReader` for small images, and raises a panic of Lance, such as for a damaged
    page, as an error. In a stream, such as that of the reader or a scan, a panic ends the process (Lance 14).
    """
    return as_arrays(session.take(rows).column(0), "chunks")  # type: ignore[no-untyped-call]
