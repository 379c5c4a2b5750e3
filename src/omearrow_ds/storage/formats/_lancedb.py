"""Folders in which LanceDB stores its tables, one Lance dataset each."""

from __future__ import annotations

from pathlib import Path

from omearrow_ds.errors import ArgumentError, FormatError
from omearrow_ds.storage.formats._detect import is_hidden

_TABLE = ".lance"


def table_path(folder: Path, table: str | None) -> Path | None:
    """Return the path of the table called ``table``, or of the only table, in a LanceDB folder; None without tables.

    Raises `ArgumentError` if the table does not exist; `FormatError` if none is requested and there are several.
    """
    entries = (entry for entry in folder.iterdir() if entry.name.endswith(_TABLE) and entry.is_dir())
    names = sorted(entry.name.removesuffix(_TABLE) for entry in entries)
    names = [name for name in names if name == table or not is_hidden(name)]
    if not names:
        return None
    listed = ", ".join(map(repr, names))
    if table is not None and table not in names:
        raise ArgumentError(
            "no such table in the folder", path=folder, option="table", value=table, remedy=f"pass one of {listed}"
        )
    if table is None and len(names) > 1:
        raise FormatError(
            f"{folder}: contains {len(names)} Lance tables: {listed}; pass table= with the name of one, "
            f"or {str(folder / f'*{_TABLE}')!r} to open all as one collection"
        )
    return folder / f"{table or names[0]}{_TABLE}"


def refuse_open_table(value: object) -> None:
    """Raise `ArgumentError` for a LanceDB object, which cannot be opened; the message has the path of a table."""
    if not type(value).__module__.startswith("lancedb."):
        return
    uri = getattr(value, "uri", None) if type(value).__name__ == "LanceTable" else None
    if uri is None or uri.startswith("memory:"):
        raise ArgumentError(
            f"{value!r}: expected a path, not a LanceDB object; pass the folder or URL of a table, or first copy it "
            f"from memory or LanceDB Cloud: lancedb.connect(FOLDER).create_table(NAME, table.to_arrow())"
        )
    raise ArgumentError(f"{value!r}: expected a path, not a LanceDB table; pass {uri!r} to read its newest version")
