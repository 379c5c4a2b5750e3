"""Put measured tables into docs/CHOOSING.md and docs/LIMITS.md: ``python -m benchmarks.report.readme [RESULTS]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from benchmarks.report import readme_limits

BEGIN = "<!-- {}: begin (python -m benchmarks.report.readme) -->"
END = "<!-- {}: end -->"
_TRACKS = (0, 1, 2)
_PAGES = (Path("docs/CHOOSING.md"), Path("docs/LIMITS.md"))


class Column(NamedTuple):
    """A column of the table: its heading, the row wanted of each format, the metric (or two, divided) and its text."""

    heading: str
    track: int
    wanted: Mapping[str, tuple[Any, ...]]
    metrics: tuple[str, ...]
    text: str


STORED = {"encoding": ("bytes", "native")}
LOADED = {"batch_size": (16,), "workers": (0,)}
ONE = {"order": ("random",), "transform": ("normalize",), "access": ("on_demand",)}
COLUMNS = (
    Column("size / pixels", 0, {"operation": ("write",), **STORED}, ("size_bytes", "raw_bytes"), "{:.2f}"),
    Column("write, ms", 0, {"operation": ("write",), **STORED}, ("median_ms",), "{:,.0f}"),
    Column("open + preload, ms", 0, {"operation": ("preload",), **STORED}, ("median_ms",), "{:,.0f}"),
    Column("one random image on demand, ms", 1, ONE, ("p50_ms",), "{:.3g}"),
    Column("batches of 16 on demand, images/s", 2, {**LOADED, "access": ("on_demand",)}, ("samples_per_s",), "{:,.0f}"),
    Column("batches of 16 preloaded, images/s", 2, {**LOADED, "access": ("preloaded",)}, ("samples_per_s",), "{:,.0f}"),
)


def table(results: Path) -> str:
    """Return the Markdown table of a results folder, with the machine, date and command that made it."""
    rows = {track: pq.read_table(_parquet(results, track)).to_pylist() for track in _TRACKS}
    context = json.loads((results / "pytest_benchmark_summary.json").read_text())
    formats = {row["format"]: row["label"] for row in rows[0]}
    headings = " | ".join(column.heading for column in COLUMNS)
    lines = [f"| format | {headings} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, label in formats.items():
        cells = [_cell(rows[column.track], name, column) for column in COLUMNS]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _caption(context)])


def _caption(context: Mapping[str, Any]) -> str:
    machine, versions = context["machine"], context["versions"]
    return (
        f"{context['workload']}; {context['finished'][:10]}, {machine['cpu']}, {machine['cores_usable']} cores, "
        f"{machine['python']}, torch {versions['torch']}, pyarrow {versions['pyarrow']}; `{context['command']}`, warm "
        f"page cache, encoding bytes. Ratios carry over to another machine, times do not."
    )


def _cell(rows: Iterable[Mapping[str, Any]], name: str, column: Column) -> str:
    for row in rows:
        fits = all(row[key] in values for key, values in column.wanted.items())
        if row["format"] == name and row["status"] == "ok" and fits:
            value, *divisor = (row[metric] for metric in column.metrics)
            return column.text.format(value / divisor[0] if divisor else value)
    return "-"


def main(*results: Path, readme: Path = _PAGES[0]) -> None:
    """Replace what stands between the marks in a page: a table for each folder of tracks, a section of all limits.

    A section whose marks are not there, or that no folder has results for, is left as it is.
    """
    folders = list(results) or [Path("results")]
    of_tracks = [folder for folder in folders if all(_parquet(folder, track).exists() for track in _TRACKS)]
    text = readme.read_text(encoding="utf-8")
    text = _replaced(text, "measured", "\n\n".join(map(table, of_tracks)))
    text = _replaced(text, "limits", readme_limits.section(folders))
    readme.write_text(text, encoding="utf-8")


def _replaced(text: str, name: str, section: str) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    if not section or begin not in text:
        return text
    before, rest = text.split(begin)
    return f"{before}{begin}\n{section}\n{end}{rest.split(end)[1]}"


def _parquet(results: Path, track: int) -> Path:
    return results / f"pytest_benchmark_track{track}.parquet"


if __name__ == "__main__":
    for page in _PAGES:
        main(*map(Path, sys.argv[1:]), readme=page)
