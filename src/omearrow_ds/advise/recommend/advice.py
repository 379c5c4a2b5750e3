"""`recommend`: measures a collection, and returns a `Recommendation` of a format and loader settings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Unpack

from tqdm import tqdm

from omearrow_ds.advise.recommend.choices import (
    Confidence,
    NetworkLink,
    PlanCost,
    ReadBudget,
    RemoteEstimate,
    choose,
    confidence,
    conversion,
    layouts,
    loading_code,
    plan_table,
    possible,
    ranked,
    unused_path_near,
)
from omearrow_ds.advise.recommend.sample import Clock, Limits, Resemblance, SampleCoverage, SampleFields, take_sample
from omearrow_ds.advise.recommend.trials import Access, LayoutRounds, LoaderTiming, Settings, Subject, best, scan
from omearrow_ds.axes import checked_size
from omearrow_ds.dataset.crop_boxes import check_needed
from omearrow_ds.errors import ArgumentError
from omearrow_ds.options import RecommendSettings, SampleSettings, refuse_unknown, refuse_value
from omearrow_ds.resources import available_bytes, available_cores, preload_limit_bytes, workspace
from omearrow_ds.storage.fields import warn_of_layout
from omearrow_ds.storage.formats._pictures import PixelRange
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.manifest import SUFFIX
from omearrow_ds.storage.objects import ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions, Paths, StrPath
from omearrow_ds.storage.source import open_source
from omearrow_ds.text import PythonName, count, duration, size, table

Choice = tuple[PlanCost, Settings, list[LoaderTiming]]
_ROUNDS_PART = 0.8  # Part of the time after which the rounds end.
_EPOCH_PART = 1 / 150
_WORKERS_MAY_HELP = 2.5  # Plans on demand that cost up to this multiple of the best are scanned as well.
_MOST_FINALISTS = 3
_COLUMNS = ("size", "convert", "open", "batch", "epoch", "total", "noise", "rounds", "images", "")


@dataclass(frozen=True)
class Recommendation:
    """Result of `recommend`: measured plans and the recommended one."""

    path: Path
    task: ReadBudget
    access: Access
    looked: SampleCoverage  # Size of the sample.
    rows: tuple[PlanCost, ...]  # All plans, the cheapest first, then plans that are excluded or could not be measured.
    chosen: PlanCost  # Recommended plan.
    settings: Settings  # Settings of the loader.
    scanned: tuple[LoaderTiming, ...]  # All settings that were tried.
    confidence: Confidence  # Certainty of the choice.
    command: str  # Command of the conversion, "" if none is needed.
    python: str  # Python code of dataset and loader.
    notes: tuple[str, ...]  # Further remarks.
    # Benchmark workload that the images resemble, or None. ``docs/how-to/choose-a-format.md`` has its tables.
    resembles: Resemblance | None
    over_link: RemoteEstimate | None = None  # Estimates for parts in a bucket, if a bandwidth was passed.
    pixel_range: PixelRange | None = None  # Largest value of uint16 images among the first 64 of the sample, or None.

    def as_text(self) -> str:
        """Return the recommendation as a text report."""
        epochs, plan = count(self.task.epochs, "epoch"), self.chosen.plan
        rows, timings = [], []
        for row in self.rows:
            cells, note = [row.why_not or ""], ""
            if row.is_measured:
                times = map(duration, (row.convert_s, row.open_s, row.batch_s, row.epoch_s, row.total_s))
                noise = f"{row.noise:.0%}" if row.rounds > 1 else "-"
                cells = [size(row.size_bytes), *times, noise, str(row.rounds), f"{row.images:,}", ""]
                note = f"ruled out: {row.why_not}" if row.why_not else ""
            rows.append((row.plan, cells, note))
        for timing in self.scanned:
            first, sample_s = f"first batch after {duration(timing.start_s)}", timing.sample_s
            speed = ["", ""] if sample_s is None else [f"{duration(sample_s)} per sample", f"({timing.ratio:.2f} x)"]
            timings.append([f"  {timing.settings.label}", *speed, first])
        notes = list(self.notes)
        if self.resembles:
            notes.append(f"The images resemble the benchmarks' workload {': '.join(self.resembles)}.")
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
            *(f"  {note}" for note in notes),
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
            "looked_at": self.looked._asdict(),
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


def recommend(
    path: Paths,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    epochs: int = 10,
    access: Access = "random",
    budget_bytes: int | None = None,
    memory_bytes: int | None = None,
    batch_size: int = 16,
    seconds: float = 90.0,
    tile: int | None = None,
    crop_size: tuple[int, int] | None = None,
    objects: Any = None,
    center: Sequence[str] | None = None,
    box: Sequence[str] | bool | None = None,
    pad: Literal["constant", "edge", "reflect", "shift", "drop"] | None = None,
    resize: tuple[int, int] | None = None,
    formats: Sequence[str] | None = None,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    work_dir: StrPath | None = None,
    start_methods: Sequence[str] = (),
    progress: bool = False,
    clock: Clock = perf_counter,
    **opening: Unpack[OpenOptions],
) -> Recommendation:
    """Recommend a storage format and loader settings, based on measurements of a sample.

    The sample is written in every format, encoding and compression to a private folder, which is always removed. It is
    read like a training, in turns, from a warm page cache.

    Parameters
    ----------
    path, format
        See `open_images`.
    epochs
        Number of epochs. With few, existing files win; with many, the fastest format wins.
    access
        ``"random"`` (shuffled) or ``"sequential"``.
    budget_bytes
        Disk space for a converted collection. ``None`` is the free space next to the images.
    memory_bytes
        Memory for preloaded pixels. ``None`` is half of the available memory.
    batch_size
        Samples per batch.
    seconds
        Approximate total time.
    tile
        ``None`` measures whole images. Otherwise the side of single-channel square tiles in pixels.
    crop_size, objects, center, box, pad, resize
        See `OMEArrowDataset`. With ``objects``, samples are crops, and images take turns as in a shuffled collection.
    formats
        ``None`` tries all formats. Otherwise names of formats to try in addition to the existing one.
    bandwidth, latency
        ``None``, or a link to a bucket: ``"1Gb"`` or ``"1Gbit"`` (bits/s), ``"100MB"`` (bytes/s), ``"20ms"``, or
        numbers in bytes/s and seconds. The result then estimates the first epoch of each plan over that unshared link.
    work_dir
        Parent of the private folder. ``None`` is the temporary folder of the system.
    start_methods
        Start methods of multiprocessing to compare with the default. They need a main script with a ``__main__`` guard.
    progress
        ``False``, or ``True`` to report progress on stderr.
    clock
        Function that returns the time in seconds.
    **opening
        See `open_images`.

    Returns
    -------
    Recommendation
        Measured plans, the chosen one, its certainty, and the commands to use it. ``print`` shows them as tables.

    Raises
    ------
    ArgumentError
        If a number is too small, the collection is empty, or the disk has no space for the sample.
    OMEArrowDSError
        Errors of `open_images`.

    Examples
    --------
    >>> from omearrow_ds import recommend
    >>> advice = recommend("plate.arrow", formats=["parquet"], seconds=2)
    >>> len(advice.rows) > 0, advice.chosen in advice.rows
    (True, True)
    """
    requested = RecommendSettings.take(locals())
    refuse_unknown(opening, OpenOptions.__annotations__, recommend)
    warn_of_layout(path, opening)
    check_needed("objects=", objects is not None, center=center, box=box, pad=pad, resize=resize)
    crops: Any = SampleSettings(objects=objects, center=center, box=box, pad=pad, resize=resize).chosen
    if crops and tile is not None:
        refuse_value("tile", tile, "conflicts with objects=", "pass only one of them")
    crop_size = None if crop_size is None else checked_size(crop_size)
    of_objects = ObjectSettings.take(opening, objects)
    link = NetworkLink.parse(bandwidth, latency)
    start_s = clock()
    with closing(open_source(path, format, **opening)) as opened, workspace(work_dir) as folder:
        # The existing files contain no tiles.
        tried = [layout for layout in layouts(formats, opened.header.format) if tile is None or not layout.as_it_is]
        limits = Limits.within(seconds, folder, len(tried))
        origin = SampleFields.open(opened, crop_size, crops, of_objects)
        sample = take_sample(origin, limits, clock, tile=tile, crop_size=crop_size)
        pixel_range = PixelRange.measure(sample.images)
        normalize = (pixel_range is not None and pixel_range.normalize) or True
        settings = SampleSettings(axes=sample.axes, crop_size=crop_size, normalize=normalize)
        subject = Subject(sample, opening, access, batch_size, settings, max(0.1, seconds * _EPOCH_PART), clock)
        task = _task(origin.source.header.path, sample.whole_bytes, requested)
        with tqdm(disable=not progress, unit="turn", leave=False) as bar:
            rounds = LayoutRounds(subject, task, folder, start_s + seconds * _ROUNDS_PART, bar)
            rounds.run(tried)
            choice = _choose(rounds, max(start_s + seconds, clock()), start_methods)
        looked = sample.coverage(clock() - start_s)
        return _report(rounds, choice, looked, pixel_range, link, {"format": format, **opening}, tile)


def _task(path: Path, decoded_bytes: int, requested: RecommendSettings) -> ReadBudget:
    memory_bytes = preload_limit_bytes() if requested.memory_bytes is None else requested.memory_bytes
    if requested.budget_bytes is not None:
        return ReadBudget(requested.epochs, decoded_bytes, memory_bytes, requested.budget_bytes)
    free_bytes = shutil.disk_usage(Path.cwd() if isinstance(path, Url) else path.parent).free
    return ReadBudget(requested.epochs, decoded_bytes, memory_bytes, free_bytes, "the free space next to the images")


def _choose(rounds: LayoutRounds, deadline_s: float, start_methods: Sequence[str]) -> Choice:
    """Scan loader settings of the first choice, and of plans that workers may make faster; return the final choice."""
    costs, subject, epochs = rounds.costs, rounds.subject, rounds.task.epochs
    first = choose(costs.values())
    if first is None:
        problem = f"no plan is possible: {ranked(costs.values())[0].why_not}"
        raise ArgumentError(problem, remedy="raise budget_bytes= or memory_bytes=, or name other formats")
    limit_s = _WORKERS_MAY_HELP * first.total_s if available_cores() > 1 else 0.0
    near = [row for row in possible(costs.values()) if row is not first and row.total_s <= limit_s]
    others = [row for row in near if row.plan.layout in rounds.trials and not row.plan.preload]
    finalists = [first, *others[: _MOST_FINALISTS - 1]]
    choices = {first.plan: (Settings(0, subject.batch_size), list[LoaderTiming]())}
    for position, row in enumerate(finalists):
        trial, now_s = rounds.trial_for(row.plan), subject.clock()
        left_s = max(0.0, deadline_s - now_s)
        if trial is not None and (left_s or not position):
            timings = scan(trial, row, now_s + left_s / (len(finalists) - position), rounds.progress, start_methods)
            fastest = best(timings, epochs * row.epoch_s)
            choices[row.plan], costs[row.plan] = (fastest.settings, timings), fastest.apply(row, epochs)
    row = choose(costs[row.plan] for row in finalists) or first
    return row, *choices.get(row.plan, choices[first.plan])


def _report(
    rounds: LayoutRounds,
    choice: Choice,
    looked: SampleCoverage,
    pixel_range: PixelRange | None,
    link: NetworkLink | None,
    opening: dict[str, Any],
    tile: int | None,
) -> Recommendation:
    (row, settings, timings), subject, task = choice, rounds.subject, rounds.task
    sample, source, layout, rows = subject.sample, subject.source, row.plan.layout, ranked(rounds.costs.values())
    path, of_fields = source.header.path, sample.origin.opening_of_fields(subject.opening)
    notes, over_link = _notes(row, rows, rounds, looked), None
    notes += [] if pixel_range is None else [f"Pixels: {pixel_range.text}."]
    if link is not None:
        on_server = source.header.part_layout is not None and source.header.part_layout.window is not None
        over_link = RemoteEstimate.choose(link, rows, task, on_server=on_server)
        notes += [] if over_link else ["Link not estimated: no measured format stores a part in one file."]
    if over_link is not None and tile is None:
        command = conversion(path, unused_path_near(path, SUFFIX), over_link.chosen.row.plan.layout, of_fields)
        over_link = over_link._replace(command=command)
    target = path if layout.as_it_is else unused_path_near(path, layout.format.suffix)
    dataset = {"preload": row.plan.preload, **subject.settings.chosen, **sample.origin.code}
    is_ragged = any(trial.is_ragged for trial in rounds.trials.values())
    loader = {"batch_size": subject.batch_size, "shuffle": subject.access == "random" or None, **settings.keywords}
    return Recommendation(
        path=path,
        task=task,
        access=subject.access,
        looked=looked,
        rows=tuple(rows),
        chosen=row,
        settings=settings,
        scanned=tuple(timings),
        confidence=confidence(row, rows),
        command=conversion(path, target, layout, of_fields, tile),
        python=loading_code(
            target,
            {**dataset, **(opening if layout.as_it_is else {})},
            {**loader, "collate_fn": PythonName("list") if is_ragged else None},
        ),
        notes=tuple(notes),
        resembles=Resemblance.of(sample.images),
        over_link=over_link,
        pixel_range=pixel_range,
    )


def _notes(row: PlanCost, rows: Sequence[PlanCost], rounds: LayoutRounds, looked: SampleCoverage) -> list[str]:
    source, objects, first = rounds.subject.source, rounds.subject.sample.origin.objects, rows[0]
    num_objects = 0 if objects is None else len(objects.rows)
    why = "and exists already" if row.plan.layout.as_it_is else "and is simpler"
    less = f"{row.total_s / first.total_s - 1:.1%} less, within the noise"
    notes = {
        f"Samples are crops around {count(num_objects, 'object')}; an epoch reads each crop once.": num_objects,
        f"{first.plan.label} took {less}; {row.plan.label} is equally fast {why}.": first is not row,
        "More rows are decoded together in the whole collection than in the sample; times on demand are scaled up.": (
            any(trial.growth > 1 for trial in rounds.trials.values())
        ),
        "The images exceed the available memory, so epochs also wait for the disk; the measured ones did not.": (
            not row.plan.preload and row.size_bytes > available_bytes()
        ),
        "Only the sample was read; converting or preloading all images shows whether others are damaged.": (
            not looked.whole
        ),
        "verify=True also compares checksums on demand; its cost was not measured.": source.header.columns.checksums
        is not None,
    }
    return [note for note, applies in notes.items() if applies]
