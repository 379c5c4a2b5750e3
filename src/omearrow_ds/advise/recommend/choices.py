"""`StorageLayout`, `LoadingPlan` and `PlanCost`: ways to store and load a collection, their costs, and the choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple

from omearrow_ds.advise.turns import WORTH_IT, gains, mostly_agree, noise, tie_ratio, too_noisy, uncertainty_note
from omearrow_ds.advise.workspace import over_limit_message
from omearrow_ds.storage.formats import CHUNK_COMPRESSIONS, Format, formats, get_format
from omearrow_ds.storage.source import Encoding
from omearrow_ds.text import table

CLOSE = WORTH_IT - 1  # Plans whose costs differ by less are a close call.
_MOST_PRINTED = 8


@dataclass(frozen=True)
class StorageLayout:
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
        """Whether ``omearrow-ds convert`` writes this layout if ``--encoding`` and ``--compression`` are not passed."""
        return self.encoding == "bytes" and self.compression in (None, self.format.compressions[0])

    @property
    def write_options(self) -> dict[str, Any]:
        """Options with which `omearrow_ds.convert` writes this layout, without default values."""
        encoding = {} if self.encoding == "bytes" else {"encoding": self.encoding}
        return {} if self.is_default else {**encoding, "compression": self.compression}


@dataclass(frozen=True)
class LoadingPlan:
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
    """Return the layouts to try: the existing files, the default of each format of ``names``, then other layouts.

    Encoding ``"list"`` is tried last and only with the default compression, as compressions are chosen more often.
    """
    tried: list[StorageLayout] = []
    for fmt in formats() if names is None else map(get_format, dict.fromkeys(names)):
        if fmt.missing_backend:
            tried.append(StorageLayout(fmt))
            continue
        in_table = fmt.kind == "table"
        compressions = (*fmt.compressions, *CHUNK_COMPRESSIONS[:in_table])
        tried += [StorageLayout(fmt, compression=compression) for compression in compressions]
        tried += [StorageLayout(fmt, "list", fmt.compressions[0])] * in_table
    tried.sort(key=lambda layout: (layout.encoding == "list", not layout.is_default))
    return [StorageLayout(stored, as_it_is=True), *tried]


@dataclass(frozen=True)
class ReadBudget:
    """Number of epochs, decoded size of the collection, and budgets of memory and disk.

    ``disk_why`` names the source of the limit ``disk_bytes``.
    """

    epochs: int
    decoded_bytes: int
    memory_bytes: int
    disk_bytes: int
    disk_why: str = "the disk budget"


class PlanTiming(NamedTuple):
    """Times of one plan in one round, in seconds; all except ``batch_s`` are for the whole collection."""

    convert_s: float
    open_s: float
    epoch_s: float
    batch_s: float

    def total_s(self, epochs: int) -> float:
        return self.convert_s + self.open_s + epochs * self.epoch_s


Timings = tuple[PlanTiming, PlanTiming]  # On demand, and preloaded.


@dataclass(frozen=True)
class PlanCost:
    """Cost of one plan in seconds for the whole collection, or the reason why the plan is excluded.

    Each part is the minimum of all rounds. ``noise`` is the relative difference of median and minimum, 0.1 is 10 %.
    ``images`` is the number of sampled images, ``totals_s`` the total by round.
    """

    plan: LoadingPlan
    size_bytes: int = 0
    convert_s: float = 0.0
    open_s: float = 0.0
    epoch_s: float = 0.0
    batch_s: float = 0.0
    total_s: float = 0.0
    noise: float = 0.0
    rounds: int = 0
    images: int = 0
    totals_s: dict[int, float] = field(default_factory=dict)
    why_not: str | None = None

    @property
    def is_measured(self) -> bool:
        return self.rounds > 0 and self.total_s < inf

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name not in ("plan", "totals_s")}
        return {**self.plan.as_dict(), **(values if self.is_measured else {"why_not": self.why_not})}


def plan_costs(
    layout: StorageLayout,
    timings: Mapping[int, Timings],
    size_bytes: int,
    images: int,
    task: ReadBudget,
) -> list[PlanCost]:
    """Return two costs of a layout, computed from timings by round: with images read on demand, and preloaded."""
    costs = []
    why_not = "" if layout.as_it_is else over_limit_message(size_bytes, "disk", task.disk_bytes, task.disk_why)
    for preload in (False, True):
        by_round = {number: pair[preload] for number, pair in timings.items()}
        least = PlanTiming(*map(min, zip(*by_round.values(), strict=True)))
        totals_s = {number: timing.total_s(task.epochs) for number, timing in by_round.items()}
        if preload and not why_not:
            why_not = over_limit_message(task.decoded_bytes, "memory", task.memory_bytes, "the memory budget")
        if least.epoch_s == inf:
            why_not = "an epoch from memory could not be measured: no other format could be tried"
        plan, rounds = LoadingPlan(layout, preload), (noise(totals_s.values()), len(timings), images, totals_s)
        costs.append(PlanCost(plan, size_bytes, *least, least.total_s(task.epochs), *rounds, why_not or None))
    return costs


def plan_table(
    header: Sequence[str], lines: Iterable[tuple[LoadingPlan, list[str], str]], chosen: LoadingPlan
) -> list[str]:
    """Return a table of the first plans, the best per format, the existing files, and the chosen plan.

    Each plan has its cells, and a note below them or an empty string.
    """
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
    """Return the largest ratio of costs, of ``other`` to ``best``, at which two plans are tied."""
    return tie_ratio(min(best.rounds, other.rounds), best.noise, other.noise)


def choose(rows: Iterable[PlanCost]) -> PlanCost | None:
    """Return the simplest plan that is tied with the cheapest plan, or None if all plans exceed the budgets."""
    order = [row for row in ranked(rows) if row.why_not is None]
    tied = (row for row in order if row.total_s <= order[0].total_s * tie_of(order[0], row))
    return min(tied, key=simplicity, default=None)


@dataclass(frozen=True)
class Confidence:
    """Confidence in a chosen plan, its reason, and the ``rivals``: plans that cost up to `CLOSE` more or less."""

    level: Literal["sure", "close", "unsure"]
    why: str
    rivals: tuple[LoadingPlan, ...] = ()


def confidence(chosen: PlanCost, rows: Iterable[PlanCost]) -> Confidence:
    """Return the confidence in the chosen plan, which is lower if the next best plan was faster in some rounds."""
    others = [row for row in ranked(rows) if row.why_not is None and row is not chosen]
    if why := uncertainty_note(chosen.rounds, chosen.noise):
        return Confidence("unsure", why)
    if not others:
        return Confidence("sure", "sure: no other plan is within the budgets")
    next_best = min(others, key=lambda row: abs(row.total_s - chosen.total_s))
    excess = next_best.total_s / chosen.total_s - 1
    if abs(excess) <= CLOSE:
        rivals = tuple(row.plan for row in others if abs(row.total_s / chosen.total_s - 1) <= CLOSE)
        many = "" if len(rivals) == 1 else f", one of {len(rivals)} within {CLOSE:.0%}"
        cost = "the same" if abs(excess) < 0.005 else f"{abs(excess):.0%} {'less' if excess < 0 else 'more'}"
        return Confidence("close", f"a close call with {next_best.plan.label}, which costs {cost}{many}", rivals)
    next_best = others[0]
    won = [ratio > 1 for ratio in gains(next_best.totals_s, chosen.totals_s)]
    if not mostly_agree(won):
        why = f"{next_best.plan.label} was faster in {won.count(False)} of {len(won)} rounds"
        return Confidence("unsure", too_noisy(why))
    cost = f"costs {next_best.total_s / chosen.total_s - 1:.0%} more"
    return Confidence(
        "sure", f"sure: the next, {next_best.plan.label}, {cost}, and it won {won.count(True)} of {len(won)} rounds"
    )
