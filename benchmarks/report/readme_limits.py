"""The README's section of ratios: ours against peers and against the limit, from the tables of one run or several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.report.ratios import OPERATIONS, Row, entry
from benchmarks.report.tables import formats_of
from benchmarks.report.targets import Compared, number


@dataclass(frozen=True, slots=True)
class Run:
    """What a results folder holds.

    Attributes
    ----------
    rows : mapping of str to list
        By table, those that were measured.
    context : mapping
        The run's summary: when, where and by which command.
    formats : tuple of str
        Those that there were, in their order.
    """

    rows: Mapping[str, list[Row]]
    context: Mapping[str, Any]
    formats: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path) -> Run:
        """Read a results folder."""
        files = {name: folder / f"pytest_benchmark_{name}.parquet" for name in OPERATIONS}
        tables = {name: pq.read_table(file) for name, file in files.items() if file.exists()}
        found = {name: tables[name].to_pylist() if name in tables else [] for name in OPERATIONS}
        rows = {name: [row for row in of if row["status"] == "ok"] for name, of in found.items()}
        context = json.loads((folder / "pytest_benchmark_summary.json").read_text(encoding="utf-8"))
        return cls(rows, context, tuple(formats_of(*tables.values())))

    def images(self, table: str) -> str:
        """Say which images a table's rows are of."""
        if table == "reference":
            return str(self.context["workload"]).split(", synthetic")[0]
        return f"{self.rows[table][0]['images']:,} images of {self.rows[table][0]['image_shape']}"

    def caption(self) -> str:
        """Say when, where and how it was measured."""
        machine, versions = self.context["machine"], self.context["versions"]
        return (
            f"{self.context['workload']}: {self.context['finished'][:10]}, {machine['cpu']}, {machine['python']}, "
            f"torch {versions['torch']}, pyarrow {versions['pyarrow']}; `{self.context['command']}`"
        )


def section(folders: Iterable[Path]) -> str:
    """Return the tables and where they come from, in Markdown; empty if no folder has any."""
    runs = [run for run in map(Run.of, folders) if any(run.rows.values())]
    if not runs:
        return ""
    captions = "\n".join(f"- {run.caption()}" for run in runs)
    note = "Bold figures miss their target. Memory is what a fresh process holds of its own, over the decoded pixels."
    return "\n\n".join([*filter(None, [_of_paths(runs), _of_formats(runs)]), note, captions])


def _of_paths(runs: Sequence[Run]) -> str:
    """Lay out what has no format of its own: a line for each path and reference, a column for each run."""
    timed = [run for run in runs if run.rows["reference"]]
    lines = []
    for operation, compared in OPERATIONS["reference"].items():
        by_case: dict[tuple[str, int], dict[int, Row]] = {}
        for place, row in _rows_of(timed, "reference", operation):
            case = (entry(row) if row["kind"] else row["reference"], row["batch_size"])
            by_case.setdefault(case, {})[place] = row
        for (reference, batch_size), found in by_case.items() if not compared.of_formats else ():
            first = next(iter(found.values()))
            path = compared.title + (f", batches of {batch_size}" if batch_size else "")
            against = reference + (f" ({first['kind']})" if first["kind"] else "")
            figures = [_figure(found.get(place)) for place in range(len(timed))]
            lines.append(_line(path, against, _target(compared, found.values()), *figures))
    if not lines:
        return ""
    return "\n".join([*_head("ours", "against", "target", *(run.images("reference") for run in timed)), *lines])


def _of_formats(runs: Sequence[Run]) -> str:
    """Lay out the formats, a column each: for every operation a line of targets, and one of figures for each run."""
    of_formats = [
        (table, operation, compared)
        for table, operations in OPERATIONS.items()
        for operation, compared in operations.items()
        if compared.of_formats
    ]
    columns: dict[str, str] = {}
    for table, operation, _ in of_formats:
        for _, row in _rows_of(runs, table, operation):
            columns.setdefault(_column(row), entry(row))
    known = list(dict.fromkeys(name for run in runs for name in run.formats))
    order = sorted(columns, key=lambda column: (known.index(column.split()[0]), column))
    lines = []
    for table, operation, compared in of_formats:
        found: dict[int, dict[str, Row]] = {}
        for place, row in _rows_of(runs, table, operation):
            found.setdefault(place, {})[_column(row)] = row
        limits = {column: row["limit"] for rows in found.values() for column, row in rows.items() if row["target"]}
        if found:
            lines.append(_line(f"**{compared.title}**, {compared.unit}", *(limits.get(column, "") for column in order)))
        for place, rows in found.items():
            lines.append(_line(runs[place].images(table), *(_figure(rows.get(column)) for column in order)))
    return "\n".join([*_head("", *(columns[column] for column in order)), *lines]) if lines else ""


def _column(row: Row) -> str:
    """Return the format; where an engine was asked for, that too."""
    return f"{row['format']} {row['engine']}" if row.get("engine") and not row["case"] else str(row["format"])


def _rows_of(runs: Sequence[Run], table: str, operation: str) -> Iterator[tuple[int, Row]]:
    """Yield the number of each run, and its rows of one operation."""
    for place, run in enumerate(runs):
        yield from ((place, row) for row in run.rows[table] if row["operation"] == operation)


def _target(compared: Compared, rows: Iterable[Row]) -> str:
    limit = next((f"{row['limit']} " for row in rows if row["target"] is not None), "")
    return f"{limit}{compared.unit}"


def _figure(row: Row | None) -> str:
    if row is None or row["figure"] is None:
        return "-"
    return f"**{number(row['figure'])}**" if row["met"] is False else number(row["figure"])


def _head(*cells: str) -> list[str]:
    return [_line(*cells), "|---" * len(cells) + "|"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
