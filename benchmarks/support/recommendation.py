"""``python -m benchmarks.support.recommendation FOLDER``: every choice measured, to see whether a recommendation holds.

For each number of epochs and each kind of access it asks `omearrow_ds.advise.recommend` what to do with the images of
FOLDER. Then it does all that there is to choose from, on all images, as a user would: convert, make the dataset, and go
through the epochs by an `OMEArrowDataLoader`. Choices take turns. One that has cost several times the least stops.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.support.library import (
    InterleavedRounds,
    LoadingPlan,
    Recommendation,
    StorageLayout,
    gains,
    layouts,
    recommend,
    tiles_of,
)
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, OMEArrowDSError, convert, open_images, write_images

TARGET = 1.15
_HOPELESS = 3.0  # A choice that costs more than this multiple of the least is stopped.
_KEPT = 1.6  # A choice that cost more than this multiple of the least in a round gets no further round.


@dataclass(frozen=True)
class Job:
    """Work that is done with each choice."""

    folder: Path
    tile: int | None
    epochs: int
    access: str
    batch_size: int


def do(job: Job, plan: LoadingPlan, folder: Path, settings: dict[str, Any], most_s: float) -> float:
    """Do all steps of a choice and return the seconds, or ``inf`` as soon as they exceed ``most_s``."""
    layout = plan.layout
    path = job.folder if layout.as_it_is else folder / f"images{layout.format.suffix}"
    start_s = perf_counter()
    if not layout.as_it_is:
        _store(job, layout, path)
    dataset = OMEArrowDataset(path, preload=plan.preload)
    loader = OMEArrowDataLoader(dataset, job.batch_size, shuffle=job.access == "random", **settings)
    for _ in range(job.epochs):
        for _ in loader:
            if perf_counter() - start_s > most_s:
                return inf
    return perf_counter() - start_s


def _store(job: Job, layout: StorageLayout, path: Path) -> None:
    if job.tile is None:
        convert(job.folder, path, layout.format.name, encoding=layout.encoding, compression=layout.compression)
        return
    with open_images(job.folder) as source:
        tiles = tiles_of(map(source.read, range(len(source))), job.tile)
        write_images(tiles, path, layout.format.name, encoding=layout.encoding, compression=layout.compression)


def measure(
    job: Job, advice: Recommendation, rounds: int, work_dir: Path | None
) -> Mapping[LoadingPlan, Mapping[int, float]]:
    """Do all choices in turns, the recommended one with its settings, and return the seconds of each round."""
    with open_images(job.folder) as source:
        tried = [item for item in layouts(None, source.format) if item.format.missing_backend is None]
    if job.tile is not None:
        tried = [item for item in tried if not item.as_it_is]
    chosen = advice.chosen.plan
    plans = [LoadingPlan(layout, preload) for layout in tried for preload in (True, False)]
    plans.sort(key=lambda plan: plan != chosen)
    _warm_up(job, tried, work_dir)
    turns: InterleavedRounds[LoadingPlan, float] = InterleavedRounds()
    took_s: list[float] = []  # In the current round.

    def take(plan: LoadingPlan) -> float | None:
        settings = advice.settings.keywords if plan == chosen else {}
        most_s = inf if plan == chosen else _HOPELESS * min(took_s, default=inf)
        with tempfile.TemporaryDirectory(prefix="omearrow-ds-recommendation-", dir=work_dir) as folder:
            try:
                took_s.append(do(job, plan, Path(folder), settings, most_s))
            except OMEArrowDSError as error:
                print(f"  {plan.label}: {error}", file=sys.stderr)
                return None
        print(f"  round {turns.rounds + 1}: {plan.label}: {took_s[-1]:.3f} s", file=sys.stderr)
        return took_s[-1]

    for number in range(rounds):
        took_s.clear()
        turns.round(plans, take)
        most_s = _KEPT * min(took_s, default=inf)
        plans = [plan for plan in plans if plan == chosen or turns.figures.get(plan, {}).get(number, inf) <= most_s]
    return turns.figures


def _warm_up(job: Job, tried: Sequence[StorageLayout], work_dir: Path | None) -> None:
    """Do each format once untimed, so libraries are imported and files are in the page cache."""
    formats = {layout.format: layout for layout in tried}
    for layout in formats.values():
        folder = Path(tempfile.mkdtemp(dir=work_dir))
        try:
            do(replace(job, epochs=1), LoadingPlan(layout, preload=True), folder, {}, inf)
        finally:
            shutil.rmtree(folder)


@dataclass(frozen=True)
class Verdict:
    """Cost of the recommended choice relative to the cheapest: ratio of best rounds, and median ratio of rounds."""

    job: Job
    advice: Recommendation
    ratio: float
    paired: float
    times_s: Mapping[LoadingPlan, Mapping[int, float]]

    @property
    def holds(self) -> bool:
        """Whether the ratio is within the target."""
        return self.ratio <= TARGET

    @property
    def best(self) -> LoadingPlan:
        """Fastest choice."""
        return next(iter(self.times_s))

    def text(self) -> str:
        """Return the verdict as lines of text."""
        job = self.job
        outcome = "holds" if self.holds else "MISSED"
        chosen = f"{self.advice.chosen.plan.label} ({self.advice.confidence.level})"
        ratios = f"{self.ratio:.2f} x the best ({self.best.label}), median of rounds {self.paired:.2f} x"
        rows = [
            f"    {plan.label:<44}{min(by_round.values()):8.3f} s, rounds: {len(by_round)}"
            for plan, by_round in self.times_s.items()
        ]
        lines = [f"{job.epochs} epochs, {job.access}: recommended {chosen}: {ratios}: {outcome}", *rows[:6]]
        return "\n".join(lines)


def judge(job: Job, advice: Recommendation, times_s: Mapping[LoadingPlan, Mapping[int, float]]) -> Verdict:
    """Compare the recommended choice with all choices."""
    done = dict(sorted(times_s.items(), key=lambda item: min(item[1].values())))
    mine, least = done[advice.chosen.plan], next(iter(done.values()))
    # Do not use the least of each round, because among many equal choices one is always fast by chance.
    return Verdict(job, advice, min(mine.values()) / min(least.values()), median(gains(mine, least)), done)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every recommendation held."""
    program, description = "python -m benchmarks.support.recommendation", __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("folder", type=Path, help="folder of TIFF files")
    parser.add_argument("--tile", type=int, help="cut them into single-channel tiles of N x N pixels")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--access", nargs="+", choices=["random", "sequential"], default=["random", "sequential"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the best choices; others drop out")
    parser.add_argument("--seconds", type=float, default=90.0, help="time of each recommendation")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    verdicts = []
    for access in options.access:
        for epochs in options.epochs:
            job = Job(options.folder.absolute(), options.tile, epochs, access, options.batch_size)
            advice = recommend(
                job.folder,
                epochs=epochs,
                access=access,
                batch_size=options.batch_size,
                seconds=options.seconds,
                tile=options.tile,
                work_dir=options.work_dir,
            )
            verdict = judge(job, advice, measure(job, advice, options.rounds, options.work_dir))
            print(verdict.text(), flush=True)
            verdicts.append(verdict)
    if options.json is not None:
        options.json.write_text(json.dumps([_as_dict(verdict) for verdict in verdicts], indent=2), encoding="utf-8")
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON values; a stopped choice has None for its time."""
    times = {
        plan.label: [s if s < inf else None for s in by_round.values()] for plan, by_round in verdict.times_s.items()
    }
    return {
        "epochs": verdict.job.epochs,
        "access": verdict.job.access,
        "recommended": verdict.advice.chosen.plan.label,
        "confidence": verdict.advice.confidence.level,
        "best": verdict.best.label,
        "ratio": verdict.ratio,
        "paired_ratio": verdict.paired,
        "totals_s": times,
    }


if __name__ == "__main__":
    sys.exit(main())
