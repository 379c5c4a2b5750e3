"""`Recommendation`: the measured plans and the recommended one, as text and as JSON values."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from omearrow_ds.advise.recommend.cells import Cells
from omearrow_ds.advise.recommend.choices import LoadingPlan
from omearrow_ds.advise.recommend.estimate import Confidence, PlanCost, ReadBudget
from omearrow_ds.advise.recommend.link import RemoteEstimate
from omearrow_ds.advise.recommend.loaders import LoaderTiming, Settings
from omearrow_ds.advise.recommend.resemblance import Resemblance
from omearrow_ds.advise.recommend.trials import Access
from omearrow_ds.options import SampleSettings
from omearrow_ds.storage.formats._pixel_range import PixelRange
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.text import as_flags, as_keywords, count, duration, size, table

_SHOWN = 8
_VALUES = ("size_bytes", "convert_s", "open_s", "epoch_s", "batch_s", "total_s", "noise", "rounds", "images", "why_not")


@dataclass(frozen=True)
class SampleCoverage:
    """Size of the measured sample in images and decoded bytes; ``cut`` is True if large images were cropped."""

    images: int
    size_bytes: int
    whole_count: int
    whole_bytes: int
    seconds: float
    cut: bool = False

    @property
    def text(self) -> str:
        whole = count(self.whole_count, "image")
        if self.whole:
            return f"{'' if self.whole_count == 1 else 'all '}{whole} ({size(self.whole_bytes)} decoded)"
        part = whole if self.images == self.whole_count else f"{self.images:,} of {whole}"
        part += ", large ones cut to their middle" if self.cut else ""
        return (
            f"{part}, {size(self.size_bytes)} of {size(self.whole_bytes)} decoded; the figures below are scaled to all"
        )

    @property
    def whole(self) -> bool:
        return self.images == self.whole_count and not self.cut


@dataclass(frozen=True)
class Recommendation:
    """How to store and load a collection of images.

    Attributes
    ----------
    path
        The collection.
    task, access
        Requested task and access.
    looked
        Size of the sample.
    rows
        All plans, the cheapest first, then plans that are excluded or could not be measured.
    chosen
        Row of the recommended plan.
    settings
        Settings of the loader.
    scanned
        All settings that were tried.
    confidence
        Certainty of the choice.
    command, python
        Command of the conversion ("" if none is needed), and Python code of dataset and loader.
    notes
        Further remarks.
    resembles
        Benchmark workload that the images resemble, or None. ``docs/how-to/choose-a-format.md`` has its tables.
    over_link
        Estimates for parts in a bucket, if a bandwidth was passed.
    pixel_range
        Largest value of uint16 images among the first 64 of the sample, or None.
    """

    path: Path
    task: ReadBudget
    access: Access
    looked: SampleCoverage
    rows: tuple[PlanCost, ...]
    chosen: PlanCost
    settings: Settings
    scanned: tuple[LoaderTiming, ...]
    confidence: Confidence
    command: str
    python: str
    notes: tuple[str, ...]
    resembles: Resemblance | None
    over_link: RemoteEstimate | None = None
    pixel_range: PixelRange | None = None

    def as_text(self) -> str:
        """Return a report for people."""
        epochs = count(self.task.epochs, "epoch")
        lines = [
            f"{self.path}: measured on {self.looked.text}; {duration(self.looked.seconds)}, warm page cache",
            f"total = convert + open or preload + {epochs} of {self.access} access, without workers:",
            "",
            *_table(self.rows, self.chosen),
            "",
            *self._loader_lines(),
            *([] if self.over_link is None else self.over_link.as_lines()),
            f"Recommended: {self.chosen.plan.label}, {self.settings.label}",
            f"  {self.confidence.why[0].upper()}{self.confidence.why[1:]}.",
            *(f"  {note}" for note in self.notes),
            *self._resembles_lines(),
            "",
            *(f"  {line}" for line in (self.command.splitlines() or ["nothing to convert"])),
            "",
            *(f"  {line}" for line in self.python.splitlines()),
        ]
        return "\n".join(line.rstrip() for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON; times are in seconds, and times and sizes are of the whole collection."""
        return {
            "path": str(self.path),
            "epochs": self.task.epochs,
            "access": self.access,
            "memory_budget_bytes": self.task.memory_bytes,
            "disk_budget_bytes": self.task.disk_bytes,
            "looked_at": asdict(self.looked),
            "scaled": not self.looked.whole,
            "recommended": {
                **self.chosen.plan.as_dict(),
                "settings": asdict(self.settings),
                "command": self.command,
                "python": self.python,
                "confidence": self.confidence.level,
                "why": self.confidence.why,
                "rivals": [plan.as_dict() for plan in self.confidence.rivals],
            },
            "rows": [_row(row) for row in self.rows],
            "settings": [asdict(timing) for timing in self.scanned],
            "notes": list(self.notes),
            "resembles": None if self.resembles is None else self.resembles._asdict(),
            "over_link": None if self.over_link is None else self.over_link.as_dict(),
            "pixel_range": None if self.pixel_range is None else self.pixel_range.as_dict(),
        }

    def _resembles_lines(self) -> list[str]:
        if self.resembles is None:
            return []
        name, why = self.resembles
        return [f"  The images resemble the benchmarks' workload {name}: {why}."]

    def _loader_lines(self) -> list[str]:
        if not self.scanned:
            return []
        rows = []
        for timing in self.scanned:
            times = (
                ("", "")
                if timing.sample_s is None
                else (f"{duration(timing.sample_s)} a sample", f"({timing.ratio:.2f} x)")
            )
            rows.append([f"  {timing.settings.label}", *times, f"first batch after {duration(timing.start_s)}"])
        return [f"Loader settings, {self.chosen.plan.label}, in turns:", *table(rows), ""]


def command_for(path: Path, target: Path, plan: LoadingPlan, opening: OpenOptions) -> str:
    """Return the command that converts ``path``, or an empty string if no conversion is needed."""
    layout = plan.layout
    if layout.as_it_is:
        return ""
    named = [] if target.name.endswith(layout.format.suffix) else ["--format", layout.format.name]
    words = [str(path), str(target), *as_flags(opening), *named, *layout.as_flags()]
    return shlex.join(["omearrow-ds", "convert", *words])


def tiles_for(path: Path, target: Path, plan: LoadingPlan, tile: int, opening: OpenOptions) -> str:
    layout = plan.layout
    write_options = "" if layout.is_default else f", encoding={layout.encoding!r}, compression={layout.compression!r}"
    return "\n".join(
        [
            f"from omearrow_ds import {'Storage, ' if opening.get('storage') else ''}open_images, write_images",
            "from omearrow_ds.advise.recommend import tiles_of",
            "",
            f"with open_images({', '.join([repr(str(path)), *as_keywords(opening)])}) as source:",
            f"    tiles = tiles_of(map(source.read, range(len(source))), {tile})",
            f"    write_images(tiles, {str(target)!r}{write_options})",
        ]
    )


def target_of(path: Path, plan: LoadingPlan) -> Path:
    """Return the path that a plan reads: the existing path, or the target of the conversion."""
    return path if plan.layout.as_it_is else unused_path_near(path, plan.layout.format.suffix)


def unused_path_near(path: Path, suffix: str) -> Path:
    """Return an unused path for the converted files: next to ``path``, or in the current folder if it is a URL."""
    if isinstance(path, Url):
        path = Path(path.name)
    elif not path.exists():  # The folder of a glob pattern or a list.
        path = path.parent
    stem = path.name if path.is_dir() and "." not in path.name else path.name.split(".")[0] or path.name
    free = path.with_name(f"{stem}{suffix}")
    number = 2
    while free.exists():
        free = path.with_name(f"{stem}-{number}{suffix}")
        number += 1
    return free


def python_for(
    target: Path,
    plan: LoadingPlan,
    settings: Settings,
    access: Access,
    samples: SampleSettings,
    format_name: str | None,
    opening: OpenOptions,
    *,
    cells: Cells | None,
    ragged: bool,
) -> str:
    dataset = [repr(str(target)), *([] if format_name is None else [repr(format_name)])]
    dataset += as_keywords({"preload": plan.preload, **samples.chosen, **opening})
    dataset += [] if cells is None else cells.as_keywords(opening)
    loader_options = {"batch_size": settings.batch_size, "shuffle": access == "random" or None, **settings.keywords}
    loader = ["dataset", *as_keywords(loader_options), *(["collate_fn=list"] if ragged else [])]
    names = ["OMEArrowDataLoader", "OMEArrowDataset", *(["Storage"] if opening.get("storage") else [])]
    return "\n".join(
        [
            f"from omearrow_ds import {', '.join(names)}",
            "",
            f"dataset = OMEArrowDataset({', '.join(dataset)})",
            f"loader = OMEArrowDataLoader({', '.join(loader)})",
        ]
    )


def _row(row: PlanCost) -> dict[str, Any]:
    if not row.rounds or row.total_s == inf:
        return {**row.plan.as_dict(), "why_not": row.why_not}
    return {**row.plan.as_dict(), **{name: getattr(row, name) for name in _VALUES}}


def _shown(rows: Sequence[PlanCost], chosen: PlanCost) -> tuple[list[PlanCost], int]:
    """Return the rows to print (the first ones and the best per format), and the number of other rows."""
    printed: list[PlanCost] = []
    formats: set[str] = set()
    for row in rows:
        new = row.plan.layout.format.name not in formats
        if len(printed) < _SHOWN or new or row is chosen or row.plan.layout.as_it_is:
            printed.append(row)
            formats.add(row.plan.layout.format.name)
    return printed, len(rows) - len(printed)


def _table(rows: Sequence[PlanCost], chosen: PlanCost) -> list[str]:
    printed, num_omitted = _shown(rows, chosen)
    lines = [["", "size", "convert", "open", "batch", "epoch", "total", "noise", "rounds", "images", ""]]
    for row in printed:
        name = f"{'>' if row is chosen else ' '} {row.plan.label}"
        if not row.rounds or row.total_s == inf:
            lines.append([name, row.why_not or ""])
            continue
        times = (row.convert_s, row.open_s, row.batch_s, row.epoch_s, row.total_s)
        noise = f"{row.noise:.0%}" if row.rounds > 1 else "-"
        lines.append([name, size(row.size_bytes), *map(duration, times), noise, str(row.rounds), f"{row.images:,}", ""])
        if row.why_not is not None:
            lines.append(["", f"ruled out: {row.why_not}"])
    return [*table(lines), *([f"  ... and {num_omitted} more in --json (as_dict())"] if num_omitted else [])]
