"""What is worth trying beside the settings at hand."""

from __future__ import annotations

import shlex
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from omearrow_ds.advise.profile.breakdown import Breakdown
from omearrow_ds.advise.profile.loop import Loop
from omearrow_ds.advise.profile.opening import Opened, memory_problem
from omearrow_ds.advise.profile.stages import Stage
from omearrow_ds.advise.profile.training import Step
from omearrow_ds.advise.profile.trials import Candidate, Settings
from omearrow_ds.advise.profile.variants import Part, converted, on_demand, part_preloaded, preloaded
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.formats import get_format
from omearrow_ds.text import as_flags, as_keywords

ON_DEMAND, PRELOAD, CACHE_DIR, ARROW = "on demand", "preload", "cache_dir", "arrow"
HELD = (ON_DEMAND, PRELOAD, CACHE_DIR, ARROW)  # ways to hold the pixels
_IN_PLACE = "arrow"
_MOST_WORKERS = 4
_LARGER = 4
_STORED = (Stage.READ, Stage.READ_DECODE, Stage.DECODE, Stage.SELECT, Stage.NORMALISE)


@dataclass(frozen=True)
class Choice:
    """The settings at hand: what else is tried differs from them in one thing.

    Attributes
    ----------
    opened, batch_size, device, step, shuffle
        As profiled.
    asked_workers, num_workers
        As asked for, and what that came to.
    setup_limit_s
        What is expected to take longer is not set up.
    work_dir
        Where files are written for the time of the trial; None is the system's place for them.
    """

    opened: Opened
    batch_size: int
    asked_workers: Any
    num_workers: int
    device: torch.device | None
    step: Step
    shuffle: bool
    setup_limit_s: float
    work_dir: Path | None

    @property
    def workers_in_memory(self) -> int:
        """Workers for pixels in memory: where samples are only copied from there, handing them over takes longer."""
        return self.num_workers if self.opened.demand.calls else 0

    def loop(self, dataset: StoredSamples, workers: Any, *, batch_size: int | None = None, probe: bool = False) -> Loop:
        """Return a loop as at hand but for the arguments."""
        size = self.batch_size if batch_size is None else batch_size
        return Loop(dataset, size, workers, self.device, self.step, shuffle=self.shuffle, probe=probe)


def candidates(choice: Choice, found: Breakdown, stack: ExitStack) -> list[Candidate]:
    """Return what to try, in the order of what it costs besides time; the stack removes its files."""
    opened = choice.opened
    decode_s = opened.preload_s
    if decode_s is None:
        counted = sum(found[stage.label].program_s + found[stage.label].worker_s for stage in _STORED)
        decode_s = counted / found.samples * len(opened.demand)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="omearrow_ds-", dir=choice.work_dir)))
    ways = [_preload(choice, decode_s), _cache_dir(choice, decode_s, folder), _arrow(choice, decode_s, folder)]
    if opened.dataset.preloaded:
        demand = on_demand(opened.demand)
        settings = Settings(ON_DEMAND, "--preload no", "OMEArrowDataset(path, preload=False)", "Read on demand")
        ways[0] = Candidate(settings, lambda: choice.loop(demand, choice.asked_workers))
    return [*(way for way in ways if way is not None), *_workers(choice), *_larger_batches(choice)]


def _preload(choice: Choice, decode_s: float) -> Candidate:
    demand = choice.opened.demand
    settings = Settings(PRELOAD, "--preload yes", "OMEArrowDataset(path, preload=True)", "Preload all pixels")
    part: list[Part] = []
    workers = choice.workers_in_memory

    def make() -> Loop:
        if decode_s <= choice.setup_limit_s:
            return choice.loop(preloaded(demand), workers)
        part.append(part_preloaded(demand, choice.setup_limit_s / 4))
        return choice.loop(part[0].dataset, workers, batch_size=min(choice.batch_size, part[0].images))

    def extent() -> tuple[float, str]:
        images = part[0].images if part else len(demand)
        note = f"estimated from the first {images:,} images" if images < len(demand) else ""
        return len(demand) / images, note

    problem = memory_problem(demand)
    return Candidate(settings, make, demand.nbytes, "memory", problem, extent)


def _cache_dir(choice: Choice, decode_s: float, folder: Path) -> Candidate:
    demand = choice.opened.demand
    code = "OMEArrowDataset(path, preload=True, cache_dir=FOLDER)"
    settings = Settings(CACHE_DIR, code, code, "Keep decoded pixels in a mapped file (cache_dir=)")
    problem, workers = _disk_problem(demand, folder) or _time_problem(decode_s, choice), choice.workers_in_memory
    return Candidate(settings, lambda: choice.loop(preloaded(demand, folder), workers), demand.nbytes, "disk", problem)


def _arrow(choice: Choice, decode_s: float, folder: Path) -> Candidate | None:
    """Return the conversion to a format that is read where it lies, unless the pixels are so already."""
    opened = choice.opened
    demand = opened.demand
    if demand.source.stacks():
        return None
    file = folder / f"converted{get_format(_IN_PLACE).suffix}"
    command = " ".join(
        ["omearrow-ds convert PATH", f"images{file.suffix}", *map(shlex.quote, as_flags(opened.opening))]
    )
    code = f"convert({', '.join(['path', repr(f'images{file.suffix}'), *as_keywords(opened.opening)])})"
    settings = Settings(ARROW, command, code, "Convert to Arrow IPC")
    problem = _disk_problem(demand, folder) or _time_problem(decode_s, choice)

    def make() -> Loop:
        return choice.loop(converted(demand, file, _IN_PLACE), choice.asked_workers)

    return Candidate(settings, make, demand.nbytes, "disk", problem)


def _workers(choice: Choice) -> list[Candidate]:
    dataset = choice.opened.dataset
    if dataset.preloaded and not dataset.calls and not choice.num_workers:
        return []  # which only copies: handing batches over takes longer
    number = 0 if choice.num_workers else min(available_cores(), _MOST_WORKERS)
    advice = f"Let {number} workers make the batches" if number else "Make the batches in the program, without workers"
    code = f"OMEArrowDataLoader(dataset, {choice.batch_size}, num_workers={number})"
    settings = Settings("workers", f"--workers {number}", code, advice)
    return [Candidate(settings, lambda: choice.loop(dataset, number))]


def _larger_batches(choice: Choice) -> list[Candidate]:
    dataset, size = choice.opened.dataset, choice.batch_size * _LARGER
    if len(dataset) < size or dataset.shape is None:
        return []
    code = f"OMEArrowDataLoader(dataset, {size})"
    settings = Settings("batch", f"--batch-size {size}", code, "Make larger batches, if the training allows it")
    return [Candidate(settings, lambda: choice.loop(dataset, choice.num_workers, batch_size=size))]


def _disk_problem(dataset: StoredSamples, folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if dataset.nbytes <= free:
        return ""
    return f"needs {dataset.nbytes:,} bytes on disk, {free:,} are free in {folder.parent}"


def _time_problem(decode_s: float, choice: Choice) -> str:
    if decode_s <= choice.setup_limit_s:
        return ""
    return f"not tried: decoding all takes about {decode_s:.0f} s; allow it with a longer seconds="
