"""Candidates: settings that are worth trying in addition to the current ones."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from omearrow_ds.advise.profile.breakdown import Breakdown
from omearrow_ds.advise.profile.loop import Loop
from omearrow_ds.advise.profile.opening import ProfiledDataset, memory_problem
from omearrow_ds.advise.profile.stages import Stage
from omearrow_ds.advise.profile.trials import Candidate, PreparedLoop, Trial
from omearrow_ds.advise.profile.variants import converted, on_demand, part_preloaded, preloaded
from omearrow_ds.advise.workspace import over_limit_message
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.formats import get_format
from omearrow_ds.text import as_flags, as_keywords, duration

ON_DEMAND, PRELOAD, CACHE_DIR, ARROW = "on demand", "preload", "cache_dir", "arrow"
HELD = (ON_DEMAND, PRELOAD, CACHE_DIR, ARROW)  # Ways to keep the pixels.
_IN_PLACE = "arrow"
_MOST_WORKERS = 4
_LARGER = 4
_STORED = (Stage.READ, Stage.READ_DECODE, Stage.DECODE, Stage.SELECT, Stage.NORMALIZE)


def decode_s(opened: ProfiledDataset, breakdown: Breakdown) -> float:
    """Return the seconds of decoding all pixels: measured if they were preloaded, else estimated from the stages."""
    if opened.preload_s is not None:
        return opened.preload_s
    counted = sum(breakdown[stage.label].program_s + breakdown[stage.label].worker_s for stage in _STORED)
    return counted / breakdown.samples * len(opened.demand)


@dataclass(frozen=True)
class CandidateFactory:
    """Current settings of the profiled loop, from which each candidate differs in one setting."""

    # The profiled dataset, and the loop over it.
    opened: ProfiledDataset
    plain: Loop
    # Seconds of decoding all pixels, and the maximum for candidates that decode all of them.
    decode_s: float
    limit_s: float
    folder: Path  # Temporary files of the trials.

    def candidates(self) -> list[Candidate]:
        """Return the settings to try, in increasing order of costs other than time, such as memory or disk space."""
        pixel_candidate = self._on_demand() if self.opened.dataset.preloaded else self._preload()
        possible = (pixel_candidate, self._cache_dir(), self._arrow(), self._workers(), self._larger_batches())
        return [candidate for candidate in possible if candidate is not None]

    @property
    def _workers_in_memory(self) -> int:
        """Workers for pixels in memory: 0 without user code, as transfer between processes is slower than a copy."""
        return self.plain.num_workers if self.opened.demand._has_user_code else 0

    def _on_demand(self) -> Candidate:
        demand = on_demand(self.opened.demand)
        trial = Trial(ON_DEMAND, "--preload no", "OMEArrowDataset(path, preload=False)", "Read on demand")
        return Candidate(trial, lambda: PreparedLoop(self.plain.like(demand)))

    def _preload(self) -> Candidate:
        demand, workers = self.opened.demand, self._workers_in_memory
        code, advice = "OMEArrowDataset(path, preload=True)", "Preload all pixels"
        problem = memory_problem(demand)
        trial = Trial(
            PRELOAD, "--preload yes", code, advice, held_bytes=demand.preload_bytes, room="memory", note=problem
        )

        def make() -> PreparedLoop:
            if self.decode_s <= self.limit_s:
                return PreparedLoop(self.plain.like(preloaded(demand), workers))
            part = part_preloaded(demand, self.limit_s / 4)
            loop = self.plain.like(part, workers, batch_size=min(self.plain.batch_size, len(part)))
            note = f"estimated from the first {len(part):,} images" if len(part) < len(demand) else ""
            return PreparedLoop(loop, len(demand) / len(part), note)

        return Candidate(trial, make)

    def _on_disk(self, name: str, options: str, code: str, advice: str) -> Trial:
        """Return a trial that writes all pixels to disk, with a note if that takes too much space or time."""
        needed, free = self.opened.demand.preload_bytes, shutil.disk_usage(self.folder).free
        note = over_limit_message(needed, "disk", free, f"what is free in {self.folder.parent}")
        if not note and self.decode_s > self.limit_s:
            note = f"not tried: decoding all takes about {duration(self.decode_s)}; allow it with a longer seconds="
        return Trial(name, options, code, advice, held_bytes=needed, room="disk", note=note)

    def _cache_dir(self) -> Candidate:
        code = "OMEArrowDataset(path, preload=True, cache_dir=FOLDER)"
        trial = self._on_disk(CACHE_DIR, code, code, "Keep decoded pixels in a mapped file (cache_dir=)")
        demand, workers = self.opened.demand, self._workers_in_memory
        return Candidate(trial, lambda: PreparedLoop(self.plain.like(preloaded(demand, self.folder), workers)))

    def _arrow(self) -> Candidate | None:
        """Return the conversion to Arrow IPC, which is memory-mapped, or None if the pixels are already mapped."""
        demand, opening = self.opened.demand, self.opened.opening
        if demand.source.stacked() is not None:
            return None
        name = f"images{get_format(_IN_PLACE).suffix}"
        command = " ".join(["omearrow-ds convert PATH", name, *map(shlex.quote, as_flags(opening))])
        code = f"convert({', '.join(['path', repr(name), *as_keywords(opening)])})"
        trial = self._on_disk(ARROW, command, code, "Convert to Arrow IPC")
        return Candidate(trial, lambda: PreparedLoop(self.plain.like(converted(demand, self.folder / name, _IN_PLACE))))

    def _workers(self) -> Candidate | None:
        dataset, now = self.opened.dataset, self.plain.num_workers
        if dataset.preloaded and not dataset._has_user_code and not now:
            return None  # Samples are only copied, which is faster than transfer from workers.
        number = 0 if now else min(available_cores(), _MOST_WORKERS)
        advice = (
            f"Let {number} workers make the batches" if number else "Make the batches in the program, without workers"
        )
        code = f"OMEArrowDataLoader(dataset, {self.plain.batch_size}, num_workers={number})"
        trial = Trial("workers", f"--workers {number}", code, advice)
        return Candidate(trial, lambda: PreparedLoop(self.plain.like(dataset, number)))

    def _larger_batches(self) -> Candidate | None:
        dataset, size = self.opened.dataset, self.plain.batch_size * _LARGER
        if len(dataset) < size or dataset.shape is None:
            return None
        code, advice = f"OMEArrowDataLoader(dataset, {size})", "Make larger batches, if the training allows it"
        trial = Trial("batch", f"--batch-size {size}", code, advice)
        return Candidate(trial, lambda: PreparedLoop(self.plain.like(dataset, self.plain.num_workers, batch_size=size)))
