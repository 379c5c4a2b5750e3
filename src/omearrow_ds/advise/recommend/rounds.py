"""`LayoutRounds`: rounds of measurements of all layouts, without those that cannot win."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

from tqdm import tqdm

from omearrow_ds.advise.recommend.choices import (
    LoadingPlan,
    PlanCost,
    ReadBudget,
    StorageLayout,
    Timings,
    plan_costs,
    ranked,
)
from omearrow_ds.advise.recommend.trials import LayoutTrial, Subject
from omearrow_ds.advise.turns import InterleavedRounds
from omearrow_ds.errors import OMEArrowDSError

_MOST_ROUNDS = 9
_SCREENED_PART = 8  # Every eighth image of the sample suffices to find layouts that cannot win.
_FEWEST_SCREENED = 16
_STAYING = (3.0, 2.0, 1.5, 1.3)  # Maximum cost of layouts that stay, as a multiple of the best, by round.
_LEAST_STAYING = 3
_ROUNDS_TO_AFFORD = 3
_FIRST_READS = 3
_TIME_IS_UP = "not measured: the time was up; raise --seconds, or name fewer formats"


class LayoutRounds:
    """Measurements of layouts until ``deadline_s``.

    Attributes
    ----------
    costs
        Cost of both plans of each measured layout, and a plan with the reason for each other layout.
    trials
        Trials of the measured layouts.
    """

    def __init__(self, subject: Subject, task: ReadBudget, folder: Path, deadline_s: float) -> None:
        self.subject, self.task, self._folder, self._deadline_s = subject, task, folder, deadline_s
        self._turns = InterleavedRounds[StorageLayout, Timings](lambda: subject.clock() > deadline_s)
        self._read_s = inf  # Minimum so far; reading is the same part of every conversion.
        self._took_s: dict[StorageLayout, float] = {}
        self.costs: dict[LoadingPlan, PlanCost] = {}
        self.trials: dict[StorageLayout, LayoutTrial] = {}

    def run(self, layouts: Iterable[StorageLayout], progress: tqdm) -> None:
        """Measure every layout once; then measure the layouts that may still be the best, until the deadline.

        The first round of a large sample uses a part of it. If time is short, the last layouts are left out.
        ``progress`` is updated after every measurement.
        """
        whole, figures = self.subject, self._turns.figures
        step = _SCREENED_PART if len(whole.sample.images) >= _SCREENED_PART * _FEWEST_SCREENED else 1
        live = [layout for layout in layouts if not self._leave_out(layout, layout.format.missing_backend)]
        for number in range(_MOST_ROUNDS):
            subject = whole if number or step == 1 else replace(whole, sample=whole.sample.part(step))
            if number == 1 and step > 1:
                figures.clear()
                self.trials.clear()
            num_images = len(subject.sample.images)
            progress.reset(total=len(live))
            progress.set_description(f"round {number + 1}: {len(live)} ways to store {num_images:,} images")
            for _ in range(1 if number else _FIRST_READS):
                self._read_s = min(self._read_s, subject.scan_s(lambda index, _: whole.source.metadata(index)))
            late = self._turns.round(live, partial(self._measure, progress, subject, number))
            for layout in late if number == 0 else ():
                self._leave_out(layout, _TIME_IS_UP)
            epochs_s = [by_round[number][1].epoch_s for by_round in figures.values() if number in by_round]
            memory_s = median([epoch_s for epoch_s in epochs_s if epoch_s < inf] or [inf])
            for layout, by_round in figures.items():
                if number in by_round:  # An epoch from memory does not depend on the layout.
                    on_demand, preloaded = by_round[number]
                    by_round[number] = on_demand, preloaded._replace(epoch_s=memory_s)
                    size_bytes = self.trials[layout].size_bytes
                    costs = plan_costs(layout, by_round, size_bytes, num_images, self.task)
                    self.costs |= {cost.plan: cost for cost in costs}
            if late:
                break
            live = self._remaining(live, number, step)
            next_s = sum(self._took_s[layout] for layout in live)
            if not live or (number and subject.clock() + next_s > self._deadline_s):
                break

    def trial_for(self, plan: LoadingPlan) -> LayoutTrial | None:
        """Return a trial with which to measure a plan, or None; preloaded pixels are equal in all trials."""
        if plan.preload and plan.layout.as_it_is:
            return next((trial for layout, trial in self.trials.items() if not layout.as_it_is), None)
        return self.trials.get(plan.layout)

    def _leave_out(self, layout: StorageLayout, why: str | None) -> bool:
        """Note the reason, if any, why a layout cannot be measured, and return whether it cannot."""
        if why is not None:
            plan = LoadingPlan(layout, preload=False)
            self.costs[plan] = PlanCost(plan, why_not=why)
        return why is not None

    def _measure(self, progress: tqdm, subject: Subject, number: int, layout: StorageLayout) -> Timings | None:
        """Measure a layout, or leave it out and return None if it cannot store the images."""
        progress.update()
        folder = self._folder / "-".join((layout.format.name, layout.encoding, str(layout.compression)))
        trial = self.trials.get(layout) or LayoutTrial(subject, layout, folder)
        is_warm = any((one.format, one.as_it_is) == (layout.format, layout.as_it_is) for one in self._took_s)
        try:
            if not is_warm:  # The first use of a library includes import and initialization.
                LayoutTrial(subject, layout, folder).measure(number, 0.0)
            self._took_s[layout], timing = subject.timed(trial.measure, number, self._read_s)
        except OMEArrowDSError as error:
            if layout.as_it_is:
                raise
            self._leave_out(layout, str(error).replace(f"{trial.path}: ", ""))
            return None
        self.trials[layout] = trial
        return timing

    def _remaining(self, live: Sequence[StorageLayout], number: int, step: int) -> list[StorageLayout]:
        """Return the layouts that may still win, and the existing files.

        Layouts may win that are near the best within the budgets. After the first round, time must also allow the
        required number of rounds.
        """
        rows = [row for row in ranked(self.costs.values()) if row.plan.layout in live]
        limit_s = rows[0].total_s * _STAYING[min(number, len(_STAYING) - 1)]
        left_s = (self._deadline_s - self.subject.clock()) / _ROUNDS_TO_AFFORD if number == 0 else inf
        remaining: list[StorageLayout] = []
        for row in rows:
            layout = row.plan.layout
            if layout not in remaining and row.rounds:
                left_s -= self._took_s[layout] * step
                is_near = len(remaining) < _LEAST_STAYING or (row.total_s <= limit_s and left_s >= 0)
                if (row.why_not is None and is_near) or layout.as_it_is:
                    remaining.append(layout)
        return remaining
