"""Content of a results folder for the report, with a list of missing and damaged files."""

from __future__ import annotations

import base64
import json
import re
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report.files import GATE, SELFTEST, SUMMARY, figure_file, table_file
from benchmarks.report.ratios import SCHEMAS
from benchmarks.report.tables import formats_of, with_formats
from benchmarks.tracks import track_of

_OBJECTS = ("tracks", "limits", "configuration", "setting", "machine", "versions", "git")  # Objects in the summary.
_OF_TRACK = re.compile(r"pytest_benchmark_track(\d+)\.parquet")
_PNG_BEGIN, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


class NoResultsError(Exception):
    """A folder has no results."""


class Image(NamedTuple):
    """PNG image as a data URI, with its width and height in pixels."""

    uri: str
    width: int
    height: int


@dataclass(slots=True)
class Inputs:
    """Tables of tracks and limits, images by file name, and the summary of the last run.

    ``gate`` and ``selftest`` are their JSON files, ``gate_written`` is the ISO 8601 time of the former, and
    ``problems`` lists missing and damaged files.
    """

    tables: dict[int, pa.Table] = field(default_factory=dict)
    limits: dict[str, pa.Table] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)
    selftest: dict[str, Any] = field(default_factory=dict)
    gate_written: str = ""
    problems: list[str] = field(default_factory=list)

    def earlier(self, name: int | str) -> bool:
        """Whether the table of a track or of limits is from an earlier run than the summary."""
        family, table = ("tracks", self.tables[name]) if isinstance(name, int) else ("limits", self.limits[name])
        try:
            rows = self.summary[family][str(name)]["rows"]
        except (KeyError, TypeError):
            return bool(self.summary)
        return bool(rows != table.to_pylist())


def read_inputs(folder: Path) -> Inputs:
    """Read a results folder.

    Raises
    ------
    NoResultsError
        If the folder has no results.
    """
    inputs = read_tables(folder)
    inputs.gate_written = _written(folder / GATE)
    for name, into in ((GATE, inputs.gate), (SELFTEST, inputs.selftest)):
        into.update(_mapping(folder / name, inputs.problems))
    for name in [*(figure_file(track) for track in inputs.tables), *(["gate.png"] if inputs.gate else [])]:
        _add_image(folder / name, inputs)
    if not (inputs.tables or inputs.limits or inputs.gate or inputs.selftest):
        why = "".join(f"\n  {problem}" for problem in inputs.problems)
        raise NoResultsError(f"{folder}: no results; write them with `make bench` or `pytest benchmarks`{why}")
    if not (folder / SUMMARY).exists():
        inputs.problems.append(f"{SUMMARY}: missing, so workload, machine, versions and history are unknown")
    _name_missing_tables(inputs)
    return inputs


def read_tables(folder: Path) -> Inputs:
    """Read the tables and the summary of a results folder."""
    inputs = Inputs()
    _add_tables(folder, inputs)
    inputs.summary.update(_mapping(folder / SUMMARY, inputs.problems))
    for name in _OBJECTS:
        if not isinstance(inputs.summary.get(name, {}), dict):
            inputs.problems.append(f"{SUMMARY}: {name} has another type than this version writes; measure again")
            del inputs.summary[name]
    return inputs


def _written(file: Path) -> str:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat() if file.exists() else ""


def _add_tables(folder: Path, inputs: Inputs) -> None:
    names = (_OF_TRACK.fullmatch(file.name) for file in folder.glob("pytest_benchmark_track*.parquet"))
    for number in sorted(int(name[1]) for name in names if name):
        inputs.tables.update(_table(folder, number, inputs.problems))
    for limit in SCHEMAS:
        inputs.limits.update(_table(folder, limit, inputs.problems) if (folder / table_file(limit)).exists() else {})


def _table(folder: Path, name: Any, problems: list[str]) -> dict[Any, pa.Table]:
    """Return a mapping of the track's number or limit's name to its table, or an empty one if it is unusable."""
    file = folder / table_file(name)
    try:
        table = pq.ParquetFile(file).read()
        schema = SCHEMAS[name] if name in SCHEMAS else track_of(name, table.schema).schema
        return {name: with_formats(table.select(schema.names).cast(schema), formats_of(table))}
    except KeyError as error:
        problems.append(f"{file.name}: written by another version, column {error.args[0]} is missing; measure again")
    except (OSError, ValueError) as error:  # Arrow raises one of both for a damaged file.
        problems.append(f"{file.name}: damaged ({_first_line(error)})")
    return {}


def _mapping(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        problems.append(f"{file.name}: damaged ({_first_line(error)})")
        return {}
    if isinstance(content, dict):
        return content
    problems.append(f"{file.name}: damaged (not a JSON object)")
    return {}


def _add_image(file: Path, inputs: Inputs) -> None:
    try:
        data = file.read_bytes()
    except OSError as error:
        inputs.problems.append(f"{file.name}: {'missing' if isinstance(error, FileNotFoundError) else error}")
        return
    if not (data.startswith(_PNG_BEGIN) and data.endswith(_PNG_END)):
        inputs.problems.append(f"{file.name}: damaged (not a complete PNG)")
        return
    width, height = struct.unpack(">II", data[16:24])  # The first chunk of a PNG is IHDR.
    inputs.images[file.name] = Image(f"data:image/png;base64,{base64.b64encode(data).decode()}", width, height)


def _name_missing_tables(inputs: Inputs) -> None:
    missing = [f"track{name}" for name in inputs.summary.get("tracks", ()) if name not in map(str, inputs.tables)]
    missing += [str(name) for name in inputs.summary.get("limits", ()) if name not in inputs.limits]
    damaged = {problem.partition(":")[0] for problem in inputs.problems}
    names = [f"pytest_benchmark_{name}.parquet" for name in missing]
    inputs.problems.extend(
        f"{name}: missing, although the last run measured it" for name in names if name not in damaged
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
