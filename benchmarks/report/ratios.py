"""Tables that compare times with a reference, and memory with the decoded pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.gate.text import aligned, duration, number, wrapped
from benchmarks.report.tables import IN_MEMORY, NO_FORMATS, why, with_formats
from benchmarks.report.targets import FULL_BYTES, HELD, KINDS, TIMED, Compared
from benchmarks.tracks.track import FLOAT, IDENTITY, INT, TEXT, Row, finite

_FAR_APART = 1.25
UNSTEADY = "~: the ratio of the best rounds and the median ratio of all rounds differ by more than 25 %."
_FIGURE = (("figure", FLOAT), ("said", TEXT), ("target", FLOAT), ("limit", TEXT), ("met", pa.bool_()))
_IMAGES = (("images", INT), ("image_shape", TEXT))
SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "reference": pa.schema(
            [
                *((name, TEXT) for name in IDENTITY),
                *((name, TEXT) for name in ("reference", "kind", "case", "engine")),
                ("batch_size", INT),
                *_IMAGES,
                *((name, FLOAT) for name in ("ours_us", "reference_us", "ratio", "paired_ratio")),
                *_FIGURE,
                ("rounds", INT),
                ("iterations", INT),
            ]
        ),
        "memory": pa.schema(
            [
                *((name, TEXT) for name in IDENTITY),
                *_IMAGES,
                *(
                    (name, INT)
                    for name in ("decoded_bytes", "growth_bytes", "later_bytes", "mapped_bytes", "resident_bytes")
                ),
                ("ratio", FLOAT),
                *_FIGURE,
                ("seconds", FLOAT),
            ]
        ),
    }
)
TITLES: Mapping[str, str] = MappingProxyType(
    {
        "reference": "Comparison with references: alternating with the reference, on one core",
        "memory": "Memory: private memory of one operation, in a new process",
    }
)
OPERATIONS: Mapping[str, Mapping[str, Compared]] = MappingProxyType({"reference": TIMED, "memory": HELD})


def judged(
    operation: str, ours_s: Sequence[float], reference_s: Sequence[float], image_shape: str, case: str = ""
) -> Row:
    """Compare paired seconds and say whether the target is met.

    ``image_shape`` and ``case`` select the target of the operation. The row has ``ratio`` (best of ours / best of the
    reference), ``paired_ratio`` (median ratio of the rounds), ``figure`` (the ratio that the target limits) and its
    text ``said``, ``target`` and its text ``limit`` (None and ``"-"`` without a target), and ``met``.
    """
    compared = TIMED[operation]
    ratio = min(ours_s) / min(reference_s)
    paired_ratio = float(np.median(np.divide(ours_s, reference_s)))
    target = compared.target(case, image_shape)
    row = {"case": case, "image_shape": image_shape, "ratio": ratio, "paired_ratio": paired_ratio}
    return row | _comparison(compared, ratio, target)


def held_against(operation: str, growth_bytes: int, decoded_bytes: int) -> Row:
    """Return the memory of an operation as a multiple of the decoded pixels, and whether that meets the target.

    Only collections of `FULL_BYTES` or more have targets. In smaller ones, constant costs dominate.
    """
    compared, ratio = HELD[operation], growth_bytes / decoded_bytes
    target = compared.targets.get("") if decoded_bytes >= FULL_BYTES else None
    return {"ratio": ratio} | _comparison(compared, ratio, target)


def _comparison(compared: Compared, ratio: float, target: float | None) -> Row:
    figure = compared.figure(ratio)
    is_met = compared.is_met(ratio, target)
    words, limit = compared.words(figure), compared.limit(target)
    return {"figure": figure, "said": words, "target": target, "limit": limit, "met": is_met}


def tidy_ratios(
    benchmarks: Sequence[Mapping[str, Any]],
    absent: Sequence[Mapping[str, Any]],
    formats: Mapping[str, str] = NO_FORMATS,
) -> dict[str, pa.Table]:
    """Sort finished and absent benchmarks into the tables of `SCHEMAS`, each in the order of its operations.

    The parameters are those of `benchmarks.report.tables.tidy`. Benchmarks of a track are omitted.

    Raises
    ------
    ValueError
        If a table or an operation is unknown.
    """
    rows: dict[str, list[Row]] = {table: [] for table in SCHEMAS}
    for benchmark in benchmarks:
        extra, stats = benchmark["extra_info"], benchmark.get("stats") or {}
        if "table" in extra:
            times = {name: stats.get(name) for name in ("rounds", "iterations", "min")}
            _add(rows, extra | times | {"name": benchmark["name"], "status": "ok"})
    for missing in absent:
        if "table" in missing:
            _add(rows, {**(missing.get("params") or {}), **missing})
    for table, table_rows in rows.items():
        order = list(OPERATIONS[table])
        table_rows.sort(key=lambda row: order.index(row["operation"]))
    tables = {table: pa.Table.from_pylist(table_rows, schema=SCHEMAS[table]) for table, table_rows in rows.items()}
    return {name: with_formats(table, formats) for name, table in tables.items()}


def _add(rows: dict[str, list[Row]], values: Row) -> None:
    table, operation = values["table"], values["operation"]
    compared = OPERATIONS.get(table, {}).get(operation)
    if compared is None:
        raise ValueError(
            f"benchmark {values['name']!r} has operation {operation!r} of table {table!r}; expected one of {_known()}"
        )
    seconds, reference_s = values.get("min"), values.get("reference_s")
    values = {
        "reference": compared.reference,
        "kind": KINDS.get(values.get("reference", "")),
        "seconds": seconds,
        "ours_us": None if seconds is None else seconds * 1e6,
        "reference_us": min(reference_s) * 1e6 if reference_s else None,
        **values,
    }
    row = {name: values.get(name) for name in SCHEMAS[table].names}
    rows[table].append({name: finite(value) for name, value in row.items()})


def _known() -> str:
    return "; ".join(f"{table}: {', '.join(operations)}" for table, operations in OPERATIONS.items())


def summarise_ratios(tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Return the title, the rows, and the number of targets and of met targets of each table with rows."""
    return {
        table: {"title": TITLES[table], "targets": len(_judged(rows)), "met": len(_met_rows(rows)), "rows": rows}
        for table, rows in _with_rows(tables)
    }


COLUMNS = ("", "omearrow-ds", "reference", "ratio", "target", "")


def ratio_report(tables: Mapping[str, pa.Table], width: int = 100) -> list[str]:
    """Return all figures and their targets in lines of at most ``width``."""
    lines: list[str] = []
    for table, (groups, verdict) in ratio_groups(tables).items():
        rows = [
            (f"  {name}", *cells)
            for name, *cells in (COLUMNS, *(line for group_rows in groups.values() for line in group_rows))
        ]
        heading, *row_lines = (line if len(line) <= width else f"{line[: width - 4]} ..." for line in aligned(rows))
        lines += [*wrapped(TITLES[table], width), "-" * min(len(TITLES[table]), width), heading]
        for title, group_rows in groups.items():
            lines += [*wrapped(title, width), *row_lines[: len(group_rows)]]
            del row_lines[: len(group_rows)]
        lines += [*wrapped(verdict, width), ""]
    return lines


def ratio_groups(tables: Mapping[str, pa.Table]) -> dict[str, tuple[dict[str, list[list[str]]], str]]:
    """Return the lines by heading, and the reading, of each table with rows.

    A line has the cells of `COLUMNS`. The line of an absent row has two cells: its name and the reason.
    """
    groups_by_table = {}
    for table, rows in _with_rows(tables):
        groups: dict[str, list[list[str]]] = {}
        for row in rows:
            groups.setdefault(heading(OPERATIONS[table][row["operation"]], row), []).append(_cells(row))
        groups_by_table[table] = groups, _verdict(rows)
    return groups_by_table


def heading(compared: Compared, row: Row) -> str:
    """Return the heading of an operation: its title, the reference and the unit."""
    size = f", batches of {row['batch_size']}" if row.get("batch_size") else ""
    reference = f"compared with {compared.reference}" if compared.reference else f"the reference {row['kind']}"
    return f"{compared.title}{size}, {reference} · {compared.unit}"


def entry(row: Row) -> str:
    """Return the name of a row below its heading: the format and its engine, or the reference."""
    if row.get("kind"):
        return str(row["reference"]) + ("" if row["format"] == IN_MEMORY else f", {row['label']}")
    return str(row["label"]) + (f" ({row['engine']})" if row.get("engine") else "")


def _cells(row: Row) -> list[str]:
    """Return the cells of `COLUMNS`, or the name and the reason of an absent row."""
    if row["status"] != "ok":
        return [entry(row), why(row)]
    if "growth_bytes" in row:
        ours, other = (f"{row[name] / 1e6:,.1f} MB" for name in ("growth_bytes", "decoded_bytes"))
        ours += "" if row.get("later_bytes") is None else f" ({row['later_bytes'] / 1e6:,.1f})"
    else:
        ours, other = duration(row["ours_us"]), duration(row["reference_us"])
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    return [entry(row), ours, other, figure_of(row), row["limit"], verdict]


def figure_of(row: Row) -> str:
    """Return the figure of a row as text, with a mark if it is unsteady."""
    later = row.get("later_bytes")
    apart = "" if later is None else f" ({number(later / row['decoded_bytes'])})"
    return ("~" if unsteady(row) else "") + number(row["figure"]) + apart


def unsteady(row: Row) -> bool:
    """Whether the ratio of the best rounds is far from the median ratio of all rounds."""
    best, paired = row["ratio"], row.get("paired_ratio")
    return bool(best and paired) and not 1 / _FAR_APART < paired / best < _FAR_APART


def _verdict(rows: Sequence[Row]) -> str:
    judged_rows, met_rows = _judged(rows), _met_rows(rows)
    marked = f" {UNSTEADY}" if any(map(unsteady, rows)) else ""
    if not judged_rows:
        return f"Reading: images of this size and number have no targets.{marked}"
    return f"Reading: {len(met_rows)} of {len(judged_rows)} targets are met.{marked}"


def _judged(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["met"] is not None]


def _met_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["met"]]


def _with_rows(tables: Mapping[str, pa.Table]) -> list[tuple[str, list[Row]]]:
    return [(table, tables[table].to_pylist()) for table in SCHEMAS if table in tables and tables[table].num_rows]
