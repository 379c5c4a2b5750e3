"""Insertion of measured tables into two documents: ``python -m benchmarks.report.readme [RESULTS]``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gate.text import markdown
from benchmarks.report.inputs import read_tables
from benchmarks.report.ratios import OPERATIONS, UNSTEADY, entry, figure_of
from benchmarks.report.tables import IN_MEMORY, formats_of
from benchmarks.report.targets import Compared
from benchmarks.tracks.track import Row

BEGIN = "<!-- {} on {}: begin (python -m benchmarks.report.readme) -->"
END = "<!-- {} on {}: end -->"
_TRACKS = (0, 1, 2)
_PAGES = (Path("docs/how-to/choose-a-format.md"), Path("docs/explanation/comparison.md"))
_NOTE = "Bold values miss their target. Memory is the private memory of a new process divided by the decoded pixels."


class Column(NamedTuple):
    """Column of the table: heading, selected row per format, metric (or ratio of two metrics) and text format."""

    heading: str
    track: int
    selection: Mapping[str, tuple[Any, ...]]
    metrics: tuple[str, ...]
    text: str


_STORED = {"encoding": ("bytes", "native")}
_WRITTEN = {"operation": ("write",), **_STORED}
_LOADED = {"batch_size": (16,), "workers": (0,)}
_ONE = {"order": ("random",), "transform": ("normalize",), "access": ("on_demand",)}
_RATE = (("samples_per_s",), "{:,.0f}")
COLUMNS = (
    Column("on disk / pixels", 0, _WRITTEN, ("allocated_bytes", "raw_bytes"), "{:.2f}"),
    Column("files / pixels", 0, _WRITTEN, ("size_bytes", "raw_bytes"), "{:.2f}"),
    Column("write, ms", 0, _WRITTEN, ("median_ms",), "{:,.0f}"),
    Column("open + preload, ms", 0, {"operation": ("preload",), **_STORED}, ("median_ms",), "{:,.0f}"),
    Column("open + preload from disk, ms", 0, {"operation": ("preload_cold",), **_STORED}, ("median_ms",), "{:,.0f}"),
    Column("one random image on demand, ms", 1, _ONE, ("p50_ms",), "{:.3g}"),
    Column("batches of 16 on demand, images/s", 2, {**_LOADED, "access": ("on_demand",)}, *_RATE),
)
_HELD = Column("", 2, {**_LOADED, "access": ("preloaded",)}, *_RATE)


@dataclass(frozen=True, slots=True)
class Run:
    """Content of a results folder: the rows of each track and table, the summary of the run, and all formats."""

    rows: Mapping[int | str, list[Row]]
    context: Mapping[str, Any]
    formats: Mapping[str, str]

    @classmethod
    def from_folder(cls, folder: Path) -> Run:
        """Read a results folder."""
        results = read_tables(folder)
        tables = results.tables | results.limits
        rows = {name: table.to_pylist() for name, table in tables.items()}
        return cls(rows, results.summary, formats_of(*tables.values()))

    @property
    def cpu(self) -> str:
        """Processor of the machine."""
        return str(self.context["machine"]["cpu"])

    def measured(self, table: int | str) -> list[Row]:
        """Return the rows of a track or table with the status ``"ok"``."""
        return [row for row in self.rows.get(table, ()) if row["status"] == "ok"]

    def images(self, table: str) -> str:
        """Return the number and shape of a table's images as text."""
        if table == "reference":
            return str(self.context["workload"]).split(", synthetic")[0]
        first = self.measured(table)[0]
        return f"{first['images']:,} images of {first['image_shape']}"

    def caption(self, then: str = ":", cores: str = "") -> str:
        """Return the workload, date, machine, versions and command as text."""
        machine, versions = self.context["machine"], self.context["versions"]
        return (
            f"{self.context['workload']}{then} {self.context['finished'][:10]}, {self.cpu}, {cores}"
            f"{machine['python']}, torch {versions['torch']}, pyarrow {versions['pyarrow']}; "
            f"`{self.context['command']}`"
        )


def formats_table(run: Run) -> str:
    """Return a table with one line per format, and a caption with machine, date and command."""
    lines = [
        [label, *(_cell(run.measured(column.track), name, column) for column in COLUMNS)]
        for name, label in {row["format"]: row["label"] for row in run.rows[0]}.items()
    ]
    caption = run.caption(";", f"{run.context['machine']['cores_usable']} cores, ")
    preloaded = _cell(run.measured(2), IN_MEMORY, _HELD)
    caption += (
        f", warm page cache, encoding bytes. Preloaded pixels of any format in batches of 16: {preloaded} images/s"
    )
    caption += ". Times and ratios do not transfer to another machine."
    return f"{markdown(['format', *(column.heading for column in COLUMNS)], lines)}\n\n{caption}"


def _cell(rows: Iterable[Row], name: str, column: Column) -> str:
    for row in rows:
        if row["format"] == name and all(row[key] in values for key, values in column.selection.items()):
            value, *divisor = (row[metric] for metric in column.metrics)
            return column.text.format(value / divisor[0] if divisor else value)
    return "-"


def limits_section(runs: Iterable[Run]) -> str:
    """Return the tables of ratios and their captions, or an empty text if the runs lack ratios."""
    having = [run for run in runs if any(map(run.measured, OPERATIONS))]
    captions = "\n".join(f"- {run.caption()}" for run in having)
    parts = [_of_paths(having), *map(_of_formats, having), f"{_NOTE} {UNSTEADY}", captions]
    return "\n\n".join(filter(None, parts)) if having else ""


def _of_paths(runs: Sequence[Run]) -> str:
    """Return a table of operations without a format: one line per path and reference, one column per run."""
    timed = [run for run in runs if run.measured("reference")]
    lines = []
    for operation, compared in OPERATIONS["reference"].items():
        by_case: dict[tuple[str, int], dict[int, Row]] = {}
        for run_index, row in _rows_of(timed, "reference", operation):
            case = (entry(row) if row["kind"] else row["reference"], row["batch_size"])
            by_case.setdefault(case, {})[run_index] = row
        for (reference, batch_size), rows in by_case.items() if not compared.of_formats else ():
            first = next(iter(rows.values()))
            path = compared.title + (f", batches of {batch_size}" if batch_size else "")
            against = reference + (f" ({first['kind']})" if first["kind"] else "")
            limit = next((f"{row['limit']} " for row in rows.values() if row["target"] is not None), "")
            figures = [_figure(rows.get(run_index)) for run_index in range(len(timed))]
            lines.append([path, against, f"{limit}{compared.unit}", *figures])
    return (
        markdown(["path", "reference", "target", *(run.images("reference") for run in timed)], lines) if lines else ""
    )


def _of_formats(run: Run) -> str:
    """Return the table of one run, with one line per format and one column per measured operation."""
    headings: list[str] = []
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for table, operations in OPERATIONS.items():
        of_its_own = f" ({run.images(table)})" if table == "memory" and run.measured(table) else ""
        for operation, compared in operations.items():
            rows = [row for _, row in _rows_of([run], table, operation)] if compared.of_formats else []
            headings += [heading := f"{compared.title}, {compared.unit}{of_its_own}"] if rows else []
            for row in rows:
                cells.setdefault(_line(row, compared), {})[heading] = _judged(row)
    known = list(run.formats)
    lines = [
        [run.formats[name] + engine, *(cells[name, engine].get(heading, "-") for heading in headings)]
        for name, engine in sorted(cells, key=lambda line: (known.index(line[0]), line[1]))
    ]
    caption = f"{str(run.context['workload']).split(', synthetic')[0]}:"
    return f"{caption}\n\n{markdown(['', *headings], lines)}" if lines else ""


def _line(row: Row, compared: Compared) -> tuple[str, str]:
    """Return the format, and the engine if it was an explicit choice without a target."""
    has_explicit_engine = row.get("engine") and not row["case"] and "" not in compared.targets
    return row["format"], f", by {row['engine']}" if has_explicit_engine else ""


def _judged(row: Row) -> str:
    """Return a figure and its target, if any, as text."""
    return _figure(row) + (f", {row['limit']}" if row["target"] is not None else "")


def _rows_of(runs: Sequence[Run], table: str, operation: str) -> Iterator[tuple[int, Row]]:
    """Yield pairs of the index of a run and one of its rows of an operation."""
    for index, run in enumerate(runs):
        yield from ((index, row) for row in run.measured(table) if row["operation"] == operation)


def _figure(row: Row | None) -> str:
    if row is None or row["figure"] is None:
        return "-"
    return f"**{figure_of(row)}**" if row["met"] is False else figure_of(row)


def main(*results: Path, readme: Path = _PAGES[0]) -> None:
    """Replace the text between the marks of a page by one table per folder of tracks, and a section of all limits.

    Each machine has its own sections: those of other machines stay, and those of a new machine come after them.
    Sections that the page lacks, or without results in the folders, are not changed.
    """
    runs = [Run.from_folder(folder) for folder in results or (Path("results"),)]
    text = readme.read_text(encoding="utf-8")
    for cpu in dict.fromkeys(run.cpu for run in runs):
        of_cpu = [run for run in runs if run.cpu == cpu]
        of_tracks = [run for run in of_cpu if set(_TRACKS) <= run.rows.keys()]
        text = _replaced(text, "measured", cpu, "\n\n".join(map(formats_table, of_tracks)))
        text = _replaced(text, "limits", cpu, limits_section(of_cpu))
    readme.write_text(text, encoding="utf-8")


def _replaced(text: str, name: str, cpu: str, section: str) -> str:
    begin, end = BEGIN.format(name, cpu), END.format(name, cpu)
    ends = [match.end() for match in re.finditer(END.format(name, ".*"), text)]
    if not section or not ends:
        return text
    block = f"{begin}\n**On {cpu}:**\n\n{section}\n{end}"
    if begin not in text:
        return f"{text[: ends[-1]]}\n\n{block}{text[ends[-1] :]}"
    before, rest = text.split(begin)
    return f"{before}{block}{rest.split(end)[1]}"


if __name__ == "__main__":
    for page in _PAGES:
        main(*map(Path, sys.argv[1:]), readme=page)
