"""A profile as people read it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from omearrow_ds.advise.profile.breakdown import CLOCKS, StageTime
from omearrow_ds.advise.profile.trials import Trial
from omearrow_ds.text import count, duration, size

if TYPE_CHECKING:
    from omearrow_ds.advise.profile.result import Profile

_WIDTH = 118


def as_text(profile: Profile) -> str:
    """Return what was profiled, the stages, the verdict, what else was tried, and whether preloading pays."""
    parts = [_head(profile), _stages(profile), _verdict(profile)]
    if profile.trials:
        parts += [_trials(profile), _preloading(profile)]
    return "\n\n".join(parts)


def seconds(value: float | None) -> str:
    """Return a time, or that there is none."""
    return "-" if value is None else duration(value)


def _head(profile: Profile) -> str:
    shape = "of several shapes" if profile.sample_shape is None else f"of {' x '.join(map(str, profile.sample_shape))}"
    held = "preloaded" if profile.preloaded else "on demand"
    model = f", {profile.model}" if profile.model else ""
    once = [f"open {seconds(profile.open_s)}", f"first batch {seconds(profile.first_batch_s)}"]
    rate = f"{profile.samples_per_s:,.4g} samples/s ({profile.rounds} turns within {profile.noise:.0%})"
    if profile.preload_s is not None:
        once.insert(1, f"preload {seconds(profile.preload_s)}")
    return "\n".join(
        [
            f"{profile.path}",
            f"{count(profile.images, 'sample')} {shape}, {', '.join(profile.dtypes)}, {profile.format}, {held}",
            f"batch {profile.batch_size}, {count(profile.num_workers, 'worker')}, {profile.device}{model}",
            f"{rate}, an epoch {seconds(profile.epoch_s)}; once: {', '.join(once)}",
        ]
    )


def _stages(profile: Profile) -> str:
    found = profile.breakdown
    workers = found.workers
    head = ["stage", "total", "share", "per sample", "at most", *(["in workers"] if workers else []), ""]
    shown = [stage for stage in found.stages if stage.calls or stage.total_s > 0.0]
    rows = [[*_stage(stage), *([_or_none(stage.worker_s)] if workers else []), stage.note] for stage in shown]
    total = ["sum", seconds(sum(each.total_s for each in found.stages)), "100 %", "", ""]
    rows.append([*total, *([seconds(sum(each.busy_s for each in workers))] if workers else []), ""])
    about = f"{found.samples:,} samples in {seconds(found.wall_s)}, with clocks in it."
    if workers:
        about += (
            f" Of that the program waited {seconds(found.wait_s)} for {len(workers)} workers, shared out among "
            f"the stages as the workers' own clocks counted their seconds."
        )
    remarks = [line for remark in found.remarks for line in _wrapped(remark)]
    return "\n".join([*_wrapped(about), "", *_table(head, rows), *([""] if remarks else []), *remarks])


def _stage(stage: StageTime) -> list[str]:
    ceiling = "" if stage.ceiling is None or stage.stage == CLOCKS else f"{stage.ceiling:.2f}x"
    return [stage.stage, seconds(stage.total_s), f"{stage.share:.1%}", seconds(stage.per_sample_s), ceiling]


def _or_none(value: float) -> str:
    return seconds(value) if value else ""


def _verdict(profile: Profile) -> str:
    return "\n".join([*_wrapped(profile.verdict.text), *_wrapped(f"Try first: {profile.verdict.advice}")])


def _trials(profile: Profile) -> str:
    head = ["tried", "samples/s", "gain", "in single turns", "once", ""]
    now = ["(as now)", f"{profile.samples_per_s:,.4g}", "1.00x", "", "", ""]
    rows = [now, *([trial.name, *_rate(trial), trial.note or trial.options] for trial in profile.trials)]
    return "\n".join(_table(head, rows))


def _rate(trial: Trial) -> list[str]:
    if trial.samples_per_s is None:
        return ["-", "-", "-", "-"]
    return [
        f"{trial.samples_per_s:,.4g}",
        f"{trial.gain:.2f}x",
        f"{trial.least_gain:.2f}x to {trial.most_gain:.2f}x",
        "" if trial.setup_s is None else seconds(trial.setup_s),
    ]


def _preloading(profile: Profile) -> str:
    rows = [
        [way.name, seconds(way.setup_s), seconds(way.epoch_s), _pays(way), _room(way)] for way in profile.preloading
    ]
    needed, free = size(profile.decoded_bytes), size(profile.available_bytes)
    about = f"Does preloading pay? {needed} decoded; {free} of memory are free."
    return "\n".join([about, "", *_table(["pixels", "once", "epoch", "pays after", "takes"], rows)])


def _pays(way: Trial) -> str:
    if way.name == "on demand":
        return ""
    if way.samples_per_s is None:
        return way.note
    if way.break_even_epochs is None:
        return "never" if way.clear else "not clear"
    return f"{way.break_even_epochs:,} epoch{'s' if way.break_even_epochs > 1 else ''}"


def _room(way: Trial) -> str:
    return f"{size(way.held_bytes)} of {way.room}" if way.room else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines: the first and the last column to the left, numbers to the right."""
    last = len(head) - 1
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(last)]
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, last))]
        yield "  ".join([*cells, row[last]]).rstrip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH)
