"""Write all results as one HTML file: ``python -m benchmarks.report [RESULTS]``.

The file needs no other files and no network. It has tables, figures, their readings, machine and versions, and the
history of each benchmark over the stored runs of this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.gate.selftest_report import caption
from benchmarks.gate.text import counted
from benchmarks.report.charts import HEIGHT, WIDTH, chart, moment, run_names
from benchmarks.report.drift import Drifts
from benchmarks.report.files import DRIFT, GATE, SELFTEST, SUMMARY, figure_file, replacing
from benchmarks.report.headlines import headlines
from benchmarks.report.history import MOST_RUNS, History, read_history
from benchmarks.report.html_tables import (
    absent_table,
    gate_table,
    headline_table,
    pairs_table,
    ratio_tables,
    row_tables,
    selftest_tables,
)
from benchmarks.report.inputs import Inputs, NoResultsError, read_inputs
from benchmarks.report.stored_runs import Setting
from benchmarks.tracks import TRACKS, track_of

_Built = TypeVar("_Built")
_TEMPLATES = Path(__file__).with_name("templates")


def page(results: Path, storage: Path) -> tuple[str, Drifts]:
    """Return the report of a results folder as HTML, and the drifts in a folder of stored runs, which may be missing.

    Raises
    ------
    NoResultsError
        If the results folder has no results.
    """
    inputs = read_inputs(results)
    history, why = _history(inputs, storage)
    values = {
        "title": _title(inputs.summary),
        "tracks": _tracks(inputs),
        "not_run": [track for track in TRACKS if track.number not in inputs.tables],
        "limits": [(limit, inputs.earlier(limit.name)) for limit in ratio_tables(inputs.limits)],
        "gate": _part(inputs.gate, GATE, inputs.problems, partial(_gate, inputs)),
        "selftest": _part(inputs.selftest, SELFTEST, inputs.problems, partial(_selftest, inputs.selftest)),
        "absent": absent_table({track_of(n, table.schema): table for n, table in inputs.tables.items()}, inputs.limits),
        "history": {"why": why} | _chart_values(history),
        "where": _environment_tables(inputs.summary),
        "problems": inputs.problems,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "folder": str(results),
    }
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters["moment"] = lambda stamp: moment(str(stamp))
    return environment.get_template("report.html").render(values), history.drifts


def _title(summary: Mapping[str, Any]) -> list[str]:
    """Return the known parts of the title: workload, processor, cores and time."""
    machine = summary.get("machine", {})
    cores = machine.get("cores_usable")
    finished = summary.get("finished")
    parts = [summary.get("workload"), machine.get("cpu"), cores and counted(cores, "core")]
    return [str(part) for part in (*parts, finished and f"finished {moment(str(finished))} UTC") if part]


def _tracks(inputs: Inputs) -> list[dict[str, Any]]:
    views = headlines(inputs.tables)
    tracks = []
    for number, table in inputs.tables.items():
        track = track_of(number, table.schema)
        tracks.append(
            {
                "track": track,
                "views": [(headline_table(view), view.reading) for view in views if view.track.number == number],
                "image": inputs.images.get(figure_file(number)),
                "rows": row_tables(track, table),
                "count": table.num_rows,
                "earlier": inputs.earlier(number),
            }
        )
    return tracks


def _gate(inputs: Inputs) -> dict[str, Any]:
    gate = inputs.gate
    result = {"conclusion": str(gate["conclusion"]), "exit": int(gate["exit"]), "seconds": float(gate["seconds"])}
    table, image = gate_table(gate), inputs.images.get("gate.png")
    return result | {"table": table, "image": image, "written": moment(inputs.gate_written)}


def _selftest(selftest: Mapping[str, Any]) -> dict[str, Any]:
    return {"caption": caption(selftest["runs"], selftest), "tables": selftest_tables(selftest)}


def _history(inputs: Inputs, storage: Path) -> tuple[History, str]:
    """Return the stored runs comparable with the last one, and the reason if they are missing."""
    history = History([])
    why = "The results lack the machine they were measured on, so they cannot be compared with stored runs."
    if "setting" in inputs.summary:

        def build() -> History:
            return read_history(storage, Setting(**inputs.summary["setting"]), inputs.problems)

        history = _part(inputs.summary, SUMMARY, inputs.problems, build) or history
        why = "" if history.runs else f"{storage} has no stored run of this machine, workload and profile."
    return history, why


def _chart_values(history: History) -> dict[str, Any]:
    names = run_names(history.runs)
    groups = {
        group: [chart(series, names) for series in group_series] for group, group_series in history.series().items()
    }
    counts = {name: getattr(history, name) for name in ("runs", "unread", "others")}
    drift = history.drifts.lines()
    return {"groups": groups, "most": MOST_RUNS, "width": WIDTH, "height": HEIGHT, "drift": drift, **counts}


def _environment_tables(summary: Mapping[str, Any]) -> list[Any]:
    known: dict[str, Mapping[str, Any]] = {
        "Run": {name: summary[name] for name in ("workload", "command", "finished") if name in summary},
        "Code": summary.get("git", {}),
        "Machine": summary.get("machine", {}),
        "Versions": summary.get("versions", {}),
        "Configuration": summary.get("configuration", {}),
    }
    return [pairs_table(name, pairs) for name, pairs in known.items() if pairs]


def _part(content: Mapping[str, Any], file: str, problems: list[str], build: Callable[[], _Built]) -> _Built | None:
    """Build a part of the report from the content of a file, or report that another version wrote the file."""
    if not content:
        return None
    try:
        return build()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        problems.append(f"{file}: written by another version ({type(error).__name__}: {error}); measure again")
        return None


def main(words: Sequence[str] | None = None) -> int:
    """Write the report and return the exit status: 2 without results, or if the file cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="file to write; default: RESULTS/report.html")
    parser.add_argument(
        "--history", type=Path, default=Path(".benchmarks"), help="folder of stored runs; default: %(default)s"
    )
    chosen = parser.parse_args(words)
    output = chosen.output or chosen.results / "report.html"
    try:
        text, drifts = page(chosen.results, chosen.history)
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as temporary:
            temporary.write_text(text, encoding="utf-8")
        with replacing(chosen.results / DRIFT) as temporary:  # The summary of a CI job shows it.
            temporary.write_text(drifts.as_markdown(), encoding="utf-8")
    except (NoResultsError, OSError) as error:
        failure = "writing the report failed: " if isinstance(error, OSError) else ""
        print(f"Error: {failure}{error}", file=sys.stderr)
        return 2
    print(f"Report: {output}, {output.stat().st_size / 1e6:.1f} MB")
    print("\n".join(drifts.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
