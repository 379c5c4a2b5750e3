"""Golden files of the public contract: the list of records, their text form and their comparison with the files."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omearrow_ds import FORMATS
from tests.support.loops import made_by

FOLDER = Path(__file__).resolve().parents[1] / "data" / "contract"
COMMAND = "make contract"

# The functions take an empty folder and return text for a ``.txt`` file, or data for a ``.json`` file.
RECORDERS: Mapping[str, str] = {
    "api.json": "tests.contract.api:record",
    "help.txt": "tests.contract.command_line:record_help",
    "exits.json": "tests.contract.command_line:record_exits",
    "outputs.json": "tests.contract.outputs:record_json",
    "tables.json": "tests.contract.outputs:record_tables",
    "files.json": "tests.contract.outputs:record_files",
    "errors.json": "tests.contract.wrong_calls:record",
    "crops.json": "tests.contract.orders:record_crops",
    "orders.json": "tests.contract.orders:record_orders",
    "states.json": "tests.contract.states:record",
}
_WIDTH, _ROW_WIDTH = 120, 250


def missing_backends() -> list[str]:
    """Return install commands for the libraries that a complete record needs."""
    backends = [fmt.missing_backend for fmt in FORMATS if fmt.missing_backend is not None]
    others = [name for name in ("PIL", "obstore") if importlib.util.find_spec(name) is None]
    return backends + [f"{name} is not installed: pip install 'omearrow-ds[all]'" for name in others]


def record(name: str) -> str:
    """Return the content that a golden file should have, recorded in a temporary folder."""
    module, function = RECORDERS[name].split(":")
    recorder: Callable[[Path], Any] = getattr(importlib.import_module(module), function)
    with tempfile.TemporaryDirectory() as folder, made_by("numpy"):
        recorded = recorder(Path(folder))
    return recorded if name.endswith(".txt") else f"{as_json(recorded)}\n"


def as_json(value: Any, indent: int = 0, width: int = _WIDTH) -> str:
    """Return JSON with one line per value, per short list or dict, and per row of a table."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if indent + len(line) < width or not isinstance(value, dict | list | tuple) or not value:
        return line
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{json.dumps(str(key))}: {as_json(item, indent + 2)}" for key, item in value.items()]
        first, last = "{", "}"
    else:
        items = [as_json(item, indent + 2, _ROW_WIDTH if isinstance(item, dict) else _WIDTH) for item in value]
        first, last = "[", "]"
    return f"{first}\n{pad}" + f",\n{pad}".join(items) + f"\n{' ' * indent}{last}"


def difference(name: str, recorded: str) -> str:
    """Return a unified diff from a golden file to a record; an empty text if they are equal."""
    file = FOLDER / name
    golden = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = difflib.unified_diff(
        golden.splitlines(), recorded.splitlines(), f"golden/{name}", f"now/{name}", lineterm=""
    )
    return "\n".join(lines)
