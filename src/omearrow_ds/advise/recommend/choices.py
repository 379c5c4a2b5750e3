"""`PlanCost` and `RemoteEstimate`: costs of ways to store and load a collection, and the choice among them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omearrow_ds.advise.turns import WORTH_IT, doubt_note, gains, mostly_agree, tie_ratio, too_noisy
from omearrow_ds.dataset.crop_boxes import check_needed
from omearrow_ds.options import refuse_value
from omearrow_ds.storage.formats import CHUNK_COMPRESSIONS, Format, default_part_bytes, formats, get_format
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.remote_parts import MAX_AHEAD
from omearrow_ds.storage.source import Encoding
from omearrow_ds.text import RATES, TIMES, as_flags, as_keywords, as_rate, as_seconds, count, duration, size, table

CLOSE = WORTH_IT - 1  # Plans whose costs differ by less are a close call.
_MOST_PRINTED = 8
_TILES = """from omearrow_ds import {names}
from omearrow_ds.advise.recommend import tiles_of

with open_images({source}) as source:
    tiles = tiles_of(map(source.read, range(len(source))), {tile})
    write_images(tiles, {target})"""
_CODE = """from omearrow_ds import {names}

dataset = OMEArrowDataset({dataset})
loader = OMEArrowDataLoader({loader})"""
_OPENING = 2  # Number of sequential requests before the first part of a collection in a bucket.


class StorageLayout(NamedTuple):
    """Format, encoding and compression of stored images; ``as_it_is`` is True for the existing files."""

    format: Format
    encoding: Encoding = "bytes"
    compression: str | None = None
    as_it_is: bool = False

    @property
    def label(self) -> str:
        if self.as_it_is:
            return f"{self.format.label}, as it is"
        encoding = "" if self.encoding == "bytes" else self.encoding
        compression = "uncompressed" if self.compression == "none" else self.compression
        return ", ".join(filter(None, (self.format.label, encoding, compression)))

    @property
    def is_default(self) -> bool:
        return self.encoding == "bytes" and self.compression in (None, self.format.writer.compressions[0])

    @property
    def write_options(self) -> dict[str, Any]:
        """Options with which `omearrow_ds.convert` writes this layout, without default values."""
        encoding = {} if self.encoding == "bytes" else {"encoding": self.encoding}
        return {} if self.is_default else {**encoding, "compression": self.compression}


class LoadingPlan(NamedTuple):
    layout: StorageLayout
    preload: bool

    @property
    def label(self) -> str:
        return f"{self.layout.label}, {'preloaded' if self.preload else 'on demand'}"

    def as_dict(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "format": layout.format.name,
            "encoding": layout.encoding if layout.format.kind == "table" and not layout.as_it_is else None,
            "compression": layout.compression,
            "as_it_is": layout.as_it_is,
            "preload": self.preload,
            "label": self.label,
        }


def layouts(names: Sequence[str] | None, stored: Format) -> list[StorageLayout]:
    """Return the layouts to try: the existing files, the default of each format of ``names``, then other layouts."""
    tried: list[StorageLayout] = []
    for fmt in formats() if names is None else map(get_format, dict.fromkeys(names)):
        in_table = fmt.kind == "table" and not fmt.missing_backend
        compressions = (None,) if fmt.missing_backend else (*fmt.writer.compressions, *CHUNK_COMPRESSIONS[:in_table])
        tried += [StorageLayout(fmt, compression=compression) for compression in compressions]
        tried += [StorageLayout(fmt, "list", fmt.writer.compressions[0])] * in_table
    tried.sort(key=lambda layout: (layout.encoding == "list", not layout.is_default))
    return [StorageLayout(stored, as_it_is=True), *tried]


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
    names = f"OMEArrowDataLoader, OMEArrowDataset{', Storage' if dataset.get('storage') else ''}"
    loaded = ", ".join(["dataset", *as_keywords(loader)])
    return _CODE.format(names=names, dataset=_arguments(path, dataset), loader=loaded)


def unused_path_near(path: Path, suffix: str) -> Path:
    """Return an unused path for the converted files: next to ``path``, or in the current folder if it is a URL."""
    if isinstance(path, Url):
        path = Path(path.name)
    elif not path.exists():  # The folder of a glob pattern or a list.
        path = path.parent
    stem = path.name.split(".")[0] or path.name
    free, number = path.with_name(f"{stem}{suffix}"), 2
    while free.exists():
        free, number = path.with_name(f"{stem}-{number}{suffix}"), number + 1
    return free


def _arguments(path: Path, options: Mapping[str, Any]) -> str:
    return ", ".join([repr(str(path)), *as_keywords(options)])


@dataclass(frozen=True)
class ReadBudget:
    """Number of epochs, decoded size of the collection, and budgets of memory and disk."""

    epochs: int
    decoded_bytes: int
    memory_bytes: int
    disk_bytes: int
    disk_why: str = "the disk budget"  # Source of that limit.


@dataclass(frozen=True)
class PlanCost:
    """Cost of one plan for the whole collection, each part the minimum of all rounds, or why the plan is excluded."""

    plan: LoadingPlan
    size_bytes: int = 0
    convert_s: float = 0.0
    open_s: float = 0.0
    epoch_s: float = 0.0
    batch_s: float = 0.0
    total_s: float = 0.0
    noise: float = 0.0  # Relative difference of median and minimum.
    rounds: int = 0
    images: int = 0  # In the sample.
    totals_s: dict[int, float] = field(default_factory=dict)  # By round.
    why_not: str | None = None

    @property
    def is_measured(self) -> bool:
        return self.rounds > 0 and self.total_s < inf

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name not in ("plan", "totals_s")}
        return {**self.plan.as_dict(), **(values if self.is_measured else {"why_not": self.why_not})}


def plan_table(
    header: Sequence[str], lines: Iterable[tuple[LoadingPlan, list[str], str]], chosen: LoadingPlan
) -> list[str]:
    """Return a table of the first plans, the best per format, the existing files, and the chosen plan, with notes."""
    rows, names, num_omitted = [["", *header]], set(), 0
    for number, (plan, cells, note) in enumerate(lines):
        name, is_chosen = plan.layout.format.name, plan == chosen
        if number < _MOST_PRINTED or is_chosen or plan.layout.as_it_is or name not in names:
            rows += [[f"{'>' if is_chosen else ' '} {plan.label}", *cells], *([["", note]] if note else [])]
            names.add(name)
        else:
            num_omitted += 1
    return [*table(rows), *([f"  ... and {num_omitted} more in --json (as_dict())"] if num_omitted else [])]


def ranked(rows: Iterable[PlanCost]) -> list[PlanCost]:
    """Return the plans within the budgets, the cheapest first, then excluded plans, then plans without measurements."""
    return sorted(rows, key=lambda row: (row.why_not is not None, not row.rounds, row.total_s, simplicity(row)))


def simplicity(row: PlanCost) -> tuple[bool, bool, int, bool]:
    """Return a sort key for tied plans that prefers existing files, default layouts, small files and no preloading."""
    layout = row.plan.layout
    return not layout.as_it_is, not layout.is_default, row.size_bytes, row.plan.preload


def tie_of(best: PlanCost, other: PlanCost) -> float:
    return tie_ratio(min(best.rounds, other.rounds), best.noise, other.noise)


def possible(rows: Iterable[PlanCost]) -> list[PlanCost]:
    """Return the plans within the budgets, the cheapest first."""
    return [row for row in ranked(rows) if row.why_not is None]


def choose(rows: Iterable[PlanCost]) -> PlanCost | None:
    """Return the simplest plan that is tied with the cheapest plan, or None if all plans exceed the budgets."""
    order = possible(rows)
    tied = (row for row in order if row.total_s <= order[0].total_s * tie_of(order[0], row))
    return min(tied, key=simplicity, default=None)


class Confidence(NamedTuple):
    """Confidence in a chosen plan, its reason, and the ``rivals``: plans that cost up to `CLOSE` more or less."""

    level: Literal["sure", "close", "unsure"]
    why: str
    rivals: tuple[LoadingPlan, ...] = ()


def confidence(chosen: PlanCost, rows: Iterable[PlanCost]) -> Confidence:
    """Return the confidence in the chosen plan, which is lower if the next best plan was faster in some rounds."""
    others = [(row.total_s / chosen.total_s - 1, row) for row in possible(rows) if row is not chosen]
    if why := doubt_note(chosen.rounds, chosen.noise):
        return Confidence("unsure", why)
    if not others:
        return Confidence("sure", "sure: no other plan is within the budgets")
    if rivals := [(abs(excess), excess, row) for excess, row in others if abs(excess) <= CLOSE]:
        distance, excess, nearest = min(rivals, key=lambda rival: rival[0])
        many = "" if len(rivals) == 1 else f", one of {len(rivals)} within {CLOSE:.0%}"
        cost = "the same" if distance < 0.005 else f"{distance:.0%} {'less' if excess < 0 else 'more'}"
        why = f"a close call with {nearest.plan.label}, which costs {cost}{many}"
        return Confidence("close", why, tuple(row.plan for *_, row in rivals))
    excess, following = others[0]
    label = following.plan.label
    won = [ratio > 1 for ratio in gains(following.totals_s, chosen.totals_s)]
    if not mostly_agree(won):
        return Confidence("unsure", too_noisy(f"{label} was faster in {won.count(False)} of {len(won)} rounds"))
    rounds = f"it won {won.count(True)} of {len(won)} rounds"
    return Confidence("sure", f"sure: the next, {label}, costs {excess:.0%} more, and {rounds}")


class NetworkLink(NamedTuple):
    """Bandwidth in bytes/s and latency in seconds of the link to an object store."""

    bytes_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, bandwidth: str | float | None, latency: str | float | None) -> NetworkLink | None:
        """Parse bandwidth and latency, strings with units or numbers, into a link; return None without a bandwidth."""
        check_needed("bandwidth=", bandwidth is not None, latency=latency)
        if bandwidth is None:
            return None
        bytes_s = as_rate(bandwidth) if isinstance(bandwidth, str) else bandwidth
        latency_s = as_seconds(latency) if isinstance(latency, str) else latency or 0.0
        if bytes_s is None or not 0 < bytes_s < inf:
            refuse_value("bandwidth", bandwidth, "is not a rate", RATES)
        if latency_s is None or not 0 <= latency_s < inf:
            refuse_value("latency", latency, "is not a time", TIMES)
        return cls(bytes_s, latency_s)

    @property
    def text(self) -> str:
        latency = f" with a latency of {duration(self.latency_s)}" if self.latency_s else ""
        return f"{size(self.bytes_s)}/s ({self.bytes_s * 8 / 1e6:,.4g} Mbit/s){latency}"


class RemoteCost(NamedTuple):
    """Estimated times in seconds of a plan whose parts are fetched from an object store, while others are decoded."""

    row: PlanCost  # Measurement from a local disk.
    link_s: float  # Fetching all parts.
    decode_s: float  # Decoding meanwhile: an epoch on demand, or preloading.
    epoch_s: float  # First epoch.
    later_epoch_s: float  # With all parts in the cache, or pixels in memory.
    total_s: float  # All epochs.
    limit: Literal["link", "decoding"]  # The longer of fetching and decoding.

    @classmethod
    def over(cls, link: NetworkLink, row: PlanCost, task: ReadBudget) -> RemoteCost:
        """Return the times of a plan whose parts are fetched over ``link`` by several concurrent requests."""
        parts = math.ceil(task.decoded_bytes / default_part_bytes(row.plan.layout.format))
        link_s = row.size_bytes / link.bytes_s + link.latency_s * (_OPENING + math.ceil(parts / MAX_AHEAD))
        decode_s, after_s = (row.open_s, row.epoch_s) if row.plan.preload else (row.epoch_s, 0.0)
        first_s = max(link_s, decode_s) + after_s
        total_s = first_s + (task.epochs - 1) * row.epoch_s
        return cls(row, link_s, decode_s, first_s, row.epoch_s, total_s, "link" if link_s >= decode_s else "decoding")

    def as_dict(self) -> dict[str, Any]:
        row, times_s = self.row, self._asdict()
        del times_s["row"]
        return {**row.plan.as_dict(), "size_bytes": row.size_bytes, **times_s}


class RemoteEstimate(NamedTuple):
    """Estimated times of the measured plans if their files are fetched over a link."""

    link: NetworkLink
    rows: tuple[RemoteCost, ...]  # Plans that can be read from a bucket, ordered by the first epoch.
    absent: tuple[str, ...]  # Labels of formats whose parts are folders, which a bucket cannot serve.
    chosen: RemoteCost  # Least total time among those tied for the fastest first epoch.
    in_all: RemoteCost  # Least total time of all.
    epochs: int
    command: str = ""  # Writes the parts of `chosen`.

    @classmethod
    def choose(
        cls, link: NetworkLink, rows: Iterable[PlanCost], task: ReadBudget, *, on_server: bool
    ) -> RemoteEstimate | None:
        """Return estimates for the plans that a bucket can serve, or None if it can serve no measured plan.

        ``on_server`` is whether the existing collection consists of parts on a server.
        """
        layouts = [(row, row.plan.layout) for row in rows if row.why_not is None]
        absent = dict.fromkeys(layout.format.label for _, layout in layouts if layout.format.is_folder)
        served = [row for row, layout in layouts if not layout.format.is_folder and (on_server or not layout.as_it_is)]
        costs = sorted((RemoteCost.over(link, row, task) for row in served), key=lambda cost: cost.epoch_s)
        if not costs:
            return None
        tied = [cost for cost in costs if cost.epoch_s <= costs[0].epoch_s * tie_of(costs[0].row, cost.row)]
        chosen, in_all = (min(some, key=lambda cost: (cost.total_s, simplicity(cost.row))) for some in (tied, costs))
        return cls(link, tuple(costs), tuple(absent), chosen, in_all, task.epochs)

    def as_lines(self) -> list[str]:
        header = ("stored", "over the link", "decoding", "first epoch", "from cache or memory", "limit")
        costs = []
        for row, *times_s, _, slower in self.rows:
            costs.append((row.plan, [size(row.size_bytes), *map(duration, times_s), slower], ""))
        chosen, in_all = self.chosen, self.in_all
        limit = f"The link is the limit; decoding takes {duration(chosen.decode_s)}"
        if chosen.limit == "decoding":
            limit = f"Decoding is the limit; the link takes {duration(chosen.link_s)}"
        lines = [f"In parts on a server, over {self.link.text}:", "", *plan_table(header, costs, chosen.row.plan), ""]
        lines.append(f"On the server: {chosen.row.plan.label}, one epoch in {duration(chosen.epoch_s)}. {limit}")
        if chosen.total_s > in_all.total_s * tie_of(chosen.row, in_all.row):
            less = f"{in_all.row.plan.label} takes {1 - in_all.total_s / chosen.total_s:.0%} less"
            lines.append(f"  If the cache holds all parts for {count(self.epochs, 'epoch')}, {less}.")
        if self.absent:
            absent = ", ".join(self.absent)
            lines.append(f"  Formats not supported on servers, because their parts are folders: {absent}.")
        return [*lines, *(["", f"  {self.command}"] if self.command else []), ""]

    def as_dict(self) -> dict[str, Any]:
        return {
            "bandwidth_bytes_s": self.link.bytes_s,
            "latency_s": self.link.latency_s,
            "recommended": {**self.chosen.as_dict(), "command": self.command},
            "least_in_all": self.in_all.as_dict(),
            "rows": [cost.as_dict() for cost in self.rows],
            "not_on_servers": list(self.absent),
        }
