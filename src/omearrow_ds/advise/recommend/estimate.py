"""Costs of plans over all epochs, their ranking, the choice, and its confidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from omearrow_ds.advise.recommend.choices import LoadingPlan, StorageLayout
from omearrow_ds.advise.turns import WORTH_IT, gains, mostly_agree, noise, tie_ratio, too_noisy, uncertainty_note
from omearrow_ds.advise.workspace import over_limit_message

CLOSE = WORTH_IT - 1  # Plans whose costs differ by less are a close call.
Sure = Literal["sure", "close", "unsure"]


class LayoutTiming(NamedTuple):
    """Times of one layout in one round, in seconds; all except ``batch_s`` are for the whole collection.

    ``preloaded_s`` is an epoch from memory. It does not depend on the layout, so it is measured once per round.
    """

    number: int
    convert_s: float
    open_s: float
    preload_s: float
    epoch_s: float
    preloaded_s: float
    batch_s: float

    def total_s(self, epochs: int, *, preload: bool) -> float:
        if preload:
            return self.convert_s + self.preload_s + epochs * self.preloaded_s
        return self.convert_s + self.open_s + epochs * self.epoch_s


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


@dataclass(frozen=True)
class LayoutMeasurement:
    """Measurements of one layout, the number of sampled images, and the size of the whole collection in this layout."""

    layout: StorageLayout
    size_bytes: int
    turns: tuple[LayoutTiming, ...]
    images: int = 0


@dataclass(frozen=True)
class PlanCost:
    """One plan in the table, with its cost in seconds for the whole collection, or the reason of its exclusion.

    Each part is the minimum of all rounds. ``noise`` is the relative difference of median and minimum, 0.1 is 10 %.
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


def rows_of(measured: LayoutMeasurement, task: ReadBudget) -> list[PlanCost]:
    """Return two rows for a layout: one with images read on demand, one with preloaded images."""
    return [_row(measured, task, preload=False), _row(measured, task, preload=True)]


def _row(measured: LayoutMeasurement, task: ReadBudget, *, preload: bool) -> PlanCost:
    least = LayoutTiming(0, *(min(times_s) for times_s in list(zip(*measured.turns, strict=True))[1:]))
    totals_s = {turn.number: turn.total_s(task.epochs, preload=preload) for turn in measured.turns}
    return PlanCost(
        plan=LoadingPlan(measured.layout, preload),
        size_bytes=measured.size_bytes,
        convert_s=least.convert_s,
        open_s=least.preload_s if preload else least.open_s,
        epoch_s=least.preloaded_s if preload else least.epoch_s,
        batch_s=least.batch_s,
        total_s=least.total_s(task.epochs, preload=preload),
        noise=noise(totals_s.values()),
        rounds=len(totals_s),
        images=measured.images,
        totals_s=totals_s,
        why_not=_over_budget(measured, task, preload=preload),
    )


def _over_budget(measured: LayoutMeasurement, task: ReadBudget, *, preload: bool) -> str | None:
    why = (
        ""
        if measured.layout.as_it_is
        else over_limit_message(measured.size_bytes, "disk", task.disk_bytes, task.disk_why)
    )
    if preload and not why:
        why = over_limit_message(task.decoded_bytes, "memory", task.memory_bytes, "the memory budget")
        if measured.turns[0].preloaded_s == inf:
            why = "an epoch from memory could not be measured: no other format could be tried"
    return why or None


def ranked(rows: Iterable[PlanCost]) -> list[PlanCost]:
    """Return the plans within the budgets, the cheapest first, followed by the excluded plans."""
    return sorted(rows, key=lambda row: (row.why_not is not None, row.total_s, simplicity(row)))


def simplicity(row: PlanCost) -> tuple[bool, bool, int, bool]:
    """Return the sort key of tied plans; existing files, default layouts, small files and no preloading come first."""
    layout = row.plan.layout
    return not layout.as_it_is, not layout.is_default, row.size_bytes, row.plan.preload


def tie_of(best: PlanCost, other: PlanCost) -> float:
    """Return the largest ratio of the cost of ``other`` to that of ``best`` at which the two plans are tied."""
    return tie_ratio(min(best.rounds, other.rounds), best.noise, other.noise)


def choose(rows: Sequence[PlanCost]) -> PlanCost | None:
    """Return the simplest plan that is tied with the cheapest plan, or None if all plans exceed the budgets."""
    order = [row for row in ranked(rows) if row.why_not is None]
    if not order:
        return None
    return min((row for row in order if row.total_s <= order[0].total_s * tie_of(order[0], row)), key=simplicity)


@dataclass(frozen=True)
class Confidence:
    """Confidence in a chosen plan, its reason, and the ``rivals``: plans that cost up to `CLOSE` more or less."""

    level: Sure
    why: str
    rivals: tuple[LoadingPlan, ...] = ()


def confidence(chosen: PlanCost, rows: Sequence[PlanCost]) -> Confidence:
    """Return the confidence in the chosen plan; rounds in which the next best plan was faster reduce it."""
    others = [row for row in ranked(rows) if row.why_not is None and row is not chosen]
    if why := uncertainty_note(chosen.rounds, chosen.noise):
        return Confidence("unsure", why)
    if not others:
        return Confidence("sure", "sure: nothing else is possible within the budgets")
    rivals = [row for row in others if abs(row.total_s / chosen.total_s - 1) <= CLOSE]
    if rivals:
        plans = tuple(row.plan for row in rivals)
        return Confidence("close", _close(chosen, rivals), plans)
    runner_up = others[0]
    ratios = gains(runner_up.totals_s, chosen.totals_s)
    lost = sum(ratio <= 1 for ratio in ratios)
    if not mostly_agree(ratio > 1 for ratio in ratios):
        why = f"{runner_up.plan.label} was faster in {lost} of {len(ratios)} rounds"
        return Confidence("unsure", too_noisy(why))
    part = runner_up.total_s / chosen.total_s - 1
    won = f"it won {len(ratios) - lost} of {len(ratios)} rounds"
    return Confidence("sure", f"sure: the next, {runner_up.plan.label}, costs {part:.0%} more, and {won}")


def _close(chosen: PlanCost, rivals: Sequence[PlanCost]) -> str:
    nearest = min(rivals, key=lambda row: abs(row.total_s - chosen.total_s))
    part = nearest.total_s / chosen.total_s - 1
    side = "less" if part < 0 else "more"
    many = "" if len(rivals) == 1 else f", one of {len(rivals)} within {CLOSE:.0%}"
    difference = "the same" if abs(part) < 0.005 else f"{abs(part):.0%} {side}"
    return f"a close call with {nearest.plan.label}, which costs {difference}{many}"
