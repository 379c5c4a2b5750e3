"""`LayoutElimination`: rounds of measurements of all layouts, without those that cannot win."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

from tqdm import tqdm

from omearrow_ds.advise.recommend.choices import LoadingPlan, StorageLayout
from omearrow_ds.advise.recommend.estimate import LayoutMeasurement, LayoutTiming, ReadBudget, rows_of
from omearrow_ds.advise.recommend.sample import Sample
from omearrow_ds.advise.recommend.trials import (
    AccessPattern,
    LayoutTrial,
    OriginalCollection,
    StoredTrial,
    WrittenTrial,
)
from omearrow_ds.advise.turns import InterleavedRounds
from omearrow_ds.advise.workspace import remove
from omearrow_ds.errors import OMEArrowDSError
from omearrow_ds.storage.formats import Format

_MOST_ROUNDS = 9
_SCREENED_PART = 8  # Every eighth image of the sample suffices to find layouts that cannot win.
_FEWEST_SCREENED = 16
_KEPT = (3.0, 2.0, 1.5, 1.3)  # Maximum cost of layouts that stay, as a multiple of the best, by round.
_LEAST_KEPT = 3
_WANTED_ROUNDS = 3
_FIRST_READS = 3
_TIME_IS_UP = "not measured: the time was up; raise --seconds, or name fewer formats"


class LayoutElimination:
    """Measurements of layouts until ``deadline_s``; ``absent`` explains why a layout was not measured."""

    def __init__(
        self,
        whole: OriginalCollection,
        sample: Sample,
        use: AccessPattern,
        task: ReadBudget,
        folder: Path,
        deadline_s: float,
    ) -> None:
        self.use, self.task, self._whole, self._folder = use, task, whole, folder
        self.cells = sample.cells
        part = _SCREENED_PART if len(sample.images) >= _SCREENED_PART * _FEWEST_SCREENED else 1
        self._samples = (sample.part(part), sample) if part > 1 else (sample,)
        self._deadline_s = deadline_s
        self._turns: InterleavedRounds[StorageLayout, LayoutTiming] = InterleavedRounds(self._is_over)
        self._measured: dict[StorageLayout, LayoutMeasurement] = {}
        self._read_s = inf  # Minimum so far; reading is the same part of every conversion.
        self._took_s: dict[StorageLayout, float] = {}
        self._warm: set[Format] = set()
        self.trials: dict[StorageLayout, LayoutTrial] = {}
        self.absent: dict[StorageLayout, str] = {}

    def run(self, layouts: Sequence[StorageLayout], progress: tqdm) -> None:
        """Measure every layout once; then measure the layouts that may still be the best, until the deadline.

        The first round of a large sample uses a part of it. If time is short, the last layouts are left out.
        ``progress`` is updated after every measurement.
        """
        self.absent |= {layout: layout.missing for layout in layouts if layout.missing is not None}
        live = [layout for layout in layouts if layout not in self.absent]
        for number in range(_MOST_ROUNDS):
            sample = self._samples[min(number, len(self._samples) - 1)]
            if number == 1 and len(self._samples) > 1:
                self._start_anew()
            progress.reset(total=len(live))
            progress.set_description(f"round {number + 1}: {len(live)} ways to store {len(sample.images):,} images")
            if self._round(number, live, sample, progress):
                break
            live = self._going_on(live, number)
            if number and self.use.clock() + sum(self._took_s[layout] for layout in live) > self._deadline_s:
                break

    @property
    def measured(self) -> list[LayoutMeasurement]:
        return list(self._measured.values())

    def trial_for(self, plan: LoadingPlan) -> LayoutTrial | None:
        """Return a trial to measure a plan; a preloaded plan can use any written trial, since all decode alike."""
        trial = self.trials.get(plan.layout)
        written = (
            written_trial
            for written_trial in self.trials.values()
            if isinstance(written_trial, WrittenTrial) and written_trial.path.exists()
        )
        if trial is not None and trial.path.exists() and not (plan.preload and isinstance(trial, StoredTrial)):
            return trial
        return next(written, None) if plan.preload else None

    def _is_over(self) -> bool:
        return self.use.clock() > self._deadline_s

    def _start_anew(self) -> None:
        for trial in self.trials.values():
            if isinstance(trial, WrittenTrial):
                remove(trial.path.parent)
        self.trials.clear()
        self._turns.figures.clear()

    def _round(self, number: int, live: Sequence[StorageLayout], sample: Sample, progress: tqdm) -> list[StorageLayout]:
        """Measure every layout once, and return those that time did not allow."""
        for _ in range(1 if number else _FIRST_READS):
            self._read_s = min(self._read_s, self._whole.read_s(sample, self.use))
        preloaded_s: float | None = None

        def take(layout: StorageLayout) -> LayoutTiming | None:
            nonlocal preloaded_s
            turn = self._turn(layout, number, sample, preloaded_s)
            progress.update()
            if turn is not None and turn.preloaded_s < inf:
                preloaded_s = turn.preloaded_s
            return turn

        late = self._turns.round(live, take)
        if number == 0:
            self.absent |= dict.fromkeys(late, _TIME_IS_UP)
        for layout, turns in self._turns.figures.items():
            if number in turns:  # An epoch from memory does not depend on the layout.
                turns[number] = turns[number]._replace(preloaded_s=inf if preloaded_s is None else preloaded_s)
                known = self._measured.get(layout)
                size_bytes = known.size_bytes if known and len(turns) > 1 else self.trials[layout].size_bytes
                self._measured[layout] = LayoutMeasurement(
                    layout, size_bytes, tuple(turns.values()), len(sample.images)
                )
        return late

    def _turn(
        self, layout: StorageLayout, number: int, sample: Sample, preloaded_s: float | None
    ) -> LayoutTiming | None:
        trial = self.trials.get(layout) or self._made(layout, sample)
        try:
            if layout.format not in self._warm:
                self._warm_up(layout, sample)
            start_s = self.use.clock()
            turn = trial.turn(number, self._read_s, preloaded_s)
            self._took_s[layout] = self.use.clock() - start_s
        except OMEArrowDSError as error:
            if layout.as_it_is:
                raise
            self.absent[layout] = str(error).replace(f"{trial.path.with_name('fresh')}{layout.format.suffix}: ", "")
            return None
        self.trials[layout] = trial
        return turn

    def _warm_up(self, layout: StorageLayout, sample: Sample) -> None:
        """Use the format once without a clock, as the first use of its library includes import and initialization."""
        self._warm.add(layout.format)
        few = sample.part(max(1, len(sample.images) // 2))
        trial = WrittenTrial(layout, few, self.use, self._folder / f"{layout.format.name}-first")
        try:
            trial.turn(0, 0.0, None)
        finally:
            remove(trial.path.parent)

    def _made(self, layout: StorageLayout, sample: Sample) -> LayoutTrial:
        if layout.as_it_is:
            return StoredTrial(layout, self._whole, sample, self.use)
        words = (layout.format.name, layout.encoding, layout.compression or "")
        return WrittenTrial(layout, sample, self.use, self._folder / "-".join(words))

    def _going_on(self, live: Sequence[StorageLayout], number: int) -> list[StorageLayout]:
        """Return the layouts that may still win: those near the best within the budgets, and the existing files."""
        costs: dict[StorageLayout, float] = {}
        for layout in live:
            rows = rows_of(self._measured[layout], self.task) if layout in self._measured else []
            open_to_choice = [row.total_s for row in rows if row.why_not is None]
            if open_to_choice:
                costs[layout] = min(open_to_choice)
        order = sorted(costs, key=lambda layout: costs[layout])
        limit = costs[order[0]] * _KEPT[min(number, len(_KEPT) - 1)] if order else 0.0
        near = [layout for rank, layout in enumerate(order) if rank < _LEAST_KEPT or costs[layout] <= limit]
        if number == 0:
            near = self._affordable(near)
        going_on = [layout for layout in live if layout in near or (layout.as_it_is and layout in self._measured)]
        for layout, trial in self.trials.items():
            if layout not in going_on and not layout.as_it_is:
                remove(trial.path)
        return going_on

    def _affordable(self, order: Sequence[StorageLayout]) -> list[StorageLayout]:
        """Return the first layouts for which time allows the required number of rounds."""
        larger = len(self._samples[-1].images) / len(self._samples[0].images)
        left_s = (self._deadline_s - self.use.clock()) / _WANTED_ROUNDS
        affordable: list[StorageLayout] = []
        for layout in order:
            left_s -= self._took_s[layout] * larger
            if len(affordable) >= _LEAST_KEPT and left_s < 0:
                break
            affordable.append(layout)
        return affordable
