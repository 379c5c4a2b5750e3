"""`Recommendation`: the measured plans and the recommended one, as text and as JSON values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds.advise.recommend.choices import Confidence, PlanCost, ReadBudget, StorageLayout, plan_table
from omearrow_ds.advise.recommend.link import RemoteEstimate
from omearrow_ds.advise.recommend.loaders import LoaderTiming, Settings
from omearrow_ds.advise.recommend.trials import Access
from omearrow_ds.storage.formats._pixel_range import PixelRange
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.protocol import Array, OpenOptions
from omearrow_ds.text import as_flags, as_keywords, count, duration, size, table

_COLUMNS = ("size", "convert", "open", "batch", "epoch", "total", "noise", "rounds", "images", "")
_TILES = """from omearrow_ds import {names}
from omearrow_ds.advise.recommend import tiles_of

with open_images({source}) as source:
    tiles = tiles_of(map(source.read, range(len(source))), {tile})
    write_images(tiles, {target})"""
_CODE = """from omearrow_ds import {names}

dataset = OMEArrowDataset({dataset})
loader = OMEArrowDataLoader({loader})"""
_MOST_IMAGES = 64
_LARGE_PIXELS = 512 * 512  # Pixels per plane from which an image is a field, not a cell.
_FLAT_PART = 0.9  # Share of equal neighbors along X above which images are label images.


class Resemblance(NamedTuple):
    workload: str
    why: str


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
        whole, whole_size = count(self.whole_count, "image"), f"{size(self.whole_bytes)} decoded"
        if self.whole:
            return f"{'' if self.whole_count == 1 else 'all '}{whole} ({whole_size})"
        part = whole if self.images == self.whole_count else f"{self.images:,} of {whole}"
        cut = ", large images cropped to their center" if self.cut else ""
        return f"{part}{cut}, {size(self.size_bytes)} of {whole_size}; the values below are scaled to all images"

    @property
    def whole(self) -> bool:
        return self.images == self.whole_count and not self.cut


@dataclass(frozen=True)
class Recommendation:
    """Result of `recommend`: measured plans and the recommended one.

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
        """Return the recommendation as a text report."""
        epochs, plan = count(self.task.epochs, "epoch"), self.chosen.plan
        rows, timings = [], []
        for row in self.rows:
            rows.append((row.plan, [row.why_not or ""], ""))
            if row.is_measured:
                times = map(duration, (row.convert_s, row.open_s, row.batch_s, row.epoch_s, row.total_s))
                noise = f"{row.noise:.0%}" if row.rounds > 1 else "-"
                cells = [size(row.size_bytes), *times, noise, str(row.rounds), f"{row.images:,}", ""]
                rows[-1] = (row.plan, cells, f"ruled out: {row.why_not}" if row.why_not else "")
        for timing in self.scanned:
            first, sample_s = f"first batch after {duration(timing.start_s)}", timing.sample_s
            speed = ["", ""] if sample_s is None else [f"{duration(sample_s)} per sample", f"({timing.ratio:.2f} x)"]
            timings.append([f"  {timing.settings.label}", *speed, first])
        resembles = self.resembles and f"  The images resemble the benchmarks' workload {': '.join(self.resembles)}."
        lines = [
            f"{self.path}: measured on {self.looked.text}; {duration(self.looked.seconds)}, warm page cache",
            f"total = convert + open or preload + {epochs} of {self.access} access, without workers:",
            "",
            *plan_table(_COLUMNS, rows, plan),
            "",
            *([f"Loader settings for {plan.label}, measured in turns:", *table(timings), ""] if timings else []),
            *(self.over_link.as_lines() if self.over_link else []),
            f"Recommended: {plan.label}, {self.settings.label}",
            f"  {self.confidence.why[0].upper()}{self.confidence.why[1:]}.",
            *(f"  {note}" for note in self.notes),
            *([resembles] if resembles else []),
            "",
            *(f"  {line}" for line in (self.command or "nothing to convert").splitlines()),
            "",
            *(f"  {line}" for line in self.python.splitlines()),
        ]
        return "\n".join(line.rstrip() for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all values as a dictionary that `json.dumps` accepts.

        Times are in seconds. Times and sizes refer to the whole collection.
        """
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
            "rows": [row.as_dict() for row in self.rows],
            "settings": [asdict(timing) for timing in self.scanned],
            "notes": list(self.notes),
            "resembles": self.resembles and self.resembles._asdict(),
            "over_link": self.over_link and self.over_link.as_dict(),
            "pixel_range": self.pixel_range and self.pixel_range.as_dict(),
        }


def conversion(path: Path, target: Path, layout: StorageLayout, opening: OpenOptions, tile: int | None = None) -> str:
    """Return the command that writes a layout, or Python code if images are cut into tiles; "" for existing files."""
    if layout.as_it_is:
        return ""
    if tile is None:
        name = None if target.name.endswith(layout.format.suffix) else layout.format.name
        flags = as_flags({**opening, "format": name, **layout.write_options})
        return shlex.join(["omearrow-ds", "convert", str(path), str(target), *flags])
    names = f"{'Storage, ' if opening.get('storage') else ''}open_images, write_images"
    source, written = _arguments(path, opening), _arguments(target, layout.write_options)
    return _TILES.format(names=names, source=source, tile=tile, target=written)


def loading_code(path: Path, dataset: Mapping[str, Any], loader: Mapping[str, Any]) -> str:
    """Return Python code of a dataset and its loader with options."""
    names = f"OMEArrowDataLoader, OMEArrowDataset{', Storage' if dataset.get('storage') else ''}"
    loaded = ", ".join(["dataset", *as_keywords(loader)])
    return _CODE.format(names=names, dataset=_arguments(path, dataset), loader=loaded)


def unused_path_near(path: Path, suffix: str) -> Path:
    """Return an unused path for the converted files: next to ``path``, or in the current folder if it is a URL."""
    if isinstance(path, Url):
        path = Path(path.name)
    elif not path.exists():  # The folder of a glob pattern or a list.
        path = path.parent
    stem = path.name if path.is_dir() and "." not in path.name else path.name.split(".")[0] or path.name
    free, number = path.with_name(f"{stem}{suffix}"), 2
    while free.exists():
        free, number = path.with_name(f"{stem}-{number}{suffix}"), number + 1
    return free


def _arguments(path: Path, options: Mapping[str, Any]) -> str:
    return ", ".join([repr(str(path)), *as_keywords(options)])


def resemblance(images: Sequence[Array]) -> Resemblance | None:
    """Return the workload that images (T, C, Z, Y, X) resemble most, or None for dtypes without a workload.

    The number of distinct pixel values and the image size decide, as sizes and times of formats depend on them.
    """
    images = images[:: max(1, len(images) // _MOST_IMAGES)]
    dtypes = {str(image.dtype) for image in images}
    if dtypes not in ({"uint8"}, {"uint16"}):
        return None
    flat = np.mean([np.mean(image[..., 1:] == image[..., :-1]) for image in images if image.shape[-1] > 1] or [0])
    if flat > _FLAT_PART:
        return Resemblance("masks", f"{flat:.0%} of neighboring pixels are equal")
    if any(image.shape[2] > 1 for image in images):
        return Resemblance("stack", "images have several Z")
    if np.median([image.shape[-2] * image.shape[-1] for image in images]) >= _LARGE_PIXELS:
        return Resemblance("fields", "images are whole fields")
    if dtypes == {"uint8"}:
        return Resemblance("cells-uint8", "pixels are uint8")
    levels = np.count_nonzero(sum(np.bincount(image.reshape(-1), minlength=2**16) for image in images))
    bits = next(bits for bits in (8, 12, 16) if levels <= 2**bits)
    why = f"pixels have {levels:,} of the 2^{bits} values of a camera of {bits} bits"
    return Resemblance(f"cells-{bits}bit", why)
