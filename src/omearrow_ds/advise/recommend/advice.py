"""`recommend`: measures a collection and recommends a format and loader settings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Unpack, cast

from tqdm import tqdm

from omearrow_ds.advise.recommend import report
from omearrow_ds.advise.recommend.cells import Cells
from omearrow_ds.advise.recommend.choices import LoadingPlan, layouts
from omearrow_ds.advise.recommend.estimate import PlanCost, ReadBudget, choose, confidence, ranked, rows_of
from omearrow_ds.advise.recommend.link import NetworkLink, RemoteEstimate
from omearrow_ds.advise.recommend.loaders import LoaderTiming, Settings, best, scan
from omearrow_ds.advise.recommend.report import Recommendation, SampleCoverage
from omearrow_ds.advise.recommend.resemblance import resemblance
from omearrow_ds.advise.recommend.rounds import LayoutElimination
from omearrow_ds.advise.recommend.sample import Clock, Limits, Sample, take_sample
from omearrow_ds.advise.recommend.trials import Access, AccessPattern, OriginalCollection
from omearrow_ds.advise.workspace import most_sample_bytes, workspace
from omearrow_ds.dataset.places import CropOptions
from omearrow_ds.errors import ArgumentError
from omearrow_ds.options import RecommendSettings, SampleSettings
from omearrow_ds.resources import available_bytes, available_cores, image_bytes, preload_limit_bytes
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.formats._pixel_range import PixelRange
from omearrow_ds.storage.formats._urls import Url
from omearrow_ds.storage.manifest import SUFFIX
from omearrow_ds.storage.objects import ObjectSettings
from omearrow_ds.storage.protocol import OpenOptions, Paths, StrPath
from omearrow_ds.storage.source import open_source
from omearrow_ds.text import count

_SAMPLE_PART, _ROUNDS_PART = 0.1, 0.8  # Parts of the time after which reading the sample and the rounds end.
_WHOLE_SAMPLE_S = 60.0  # With less time, the sample is smaller.
_EPOCH_PART = 1 / 150
_WORKERS_MAY_HELP = 2.5  # Plans on demand that cost up to this multiple of the best are scanned as well.
_MOST_FINALISTS = 3


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
    """Measure on a sample of a collection how to store and load it.

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
    values = {"objects": objects, "center": center, "box": box, "pad": pad, "resize": resize}
    crops = cast(CropOptions, {name: value for name, value in values.items() if value is not None})
    _refuse_apart(crops, tile)
    of_objects = ObjectSettings.take(opening, objects)
    network_link = NetworkLink.parse(bandwidth, latency)
    start_s = clock()
    with open_source(path, format, **opening) as opened, workspace(work_dir) as folder:
        tried = layouts(formats, opened.format)
        if tile is not None:
            tried = [layout for layout in tried if not layout.as_it_is]  # The existing files contain no tiles.
        limits = _limits(seconds, most_sample_bytes(folder, len(tried), Limits.size_bytes))
        cells = None if objects is None else Cells(opened, crop_size, crops, of_objects)
        source = opened if cells is None else cells.source
        sample = take_sample(source, limits, clock, tile=tile, crop_size=crop_size, cells=cells)
        pixel_range = PixelRange.measure(sample.images)
        normalize = (pixel_range is not None and pixel_range.normalize) or True
        samples = SampleSettings(axes=sample.axes, crop_size=crop_size, normalize=normalize)
        use = AccessPattern(access, batch_size, samples, max(0.1, seconds * _EPOCH_PART), clock)
        task = _task(source, sample, requested)
        original = OriginalCollection(source, image_bytes(source.shapes, source.dtypes), opening)
        elimination = LayoutElimination(original, sample, use, task, folder, start_s + seconds * _ROUNDS_PART)
        with tqdm(disable=not progress, unit="turn", leave=False) as bar:
            elimination.run(tried, bar)
            rows = [row for measurement in elimination.measured for row in rows_of(measurement, task)]
            deadline_s = max(start_s + seconds, clock())
            row, scanned, settings, rows = _scanned(rows, elimination, deadline_s, bar, start_methods)
        settings = settings or Settings(0, batch_size)
        of_whole = (sample.whole_count, sample.whole_bytes, clock() - start_s, sample.cut)
        coverage = SampleCoverage(len(sample.images), sample.size_bytes, *of_whole)
        absent = [
            PlanCost(LoadingPlan(layout, preload=False), why_not=why) for layout, why in elimination.absent.items()
        ]
        target = report.target_of(source.path, row.plan)
        in_parts = report.unused_path_near(source.path, SUFFIX)

        of_fields = opening if cells is None else cells.opening_of_fields(opening)

        def command_of(plan: LoadingPlan) -> str:
            return "" if tile is not None else report.command_for(source.path, in_parts, plan, of_fields)

        on_server = source.parted is not None and source.parted.window is not None
        over_link = (
            None
            if network_link is None
            else RemoteEstimate.choose(network_link, rows, task, command_of, on_server=on_server)
        )
        pixels = [] if pixel_range is None else [f"Pixels: {pixel_range.text}."]
        notes = [*_notes(row, rows, elimination, source, coverage), *pixels]
        if network_link is not None and over_link is None:
            notes.append("Nothing can be said of the link: no format was measured whose parts are a file each.")
        as_opened = (format, opening) if row.plan.layout.as_it_is else (None, OpenOptions())
        of_one_size = crop_size is not None or resize is not None
        ragged = (cells is not None and not of_one_size) or len(
            {image.shape[: 3 if of_one_size else 5] for image in sample.images}
        ) > 1
        return Recommendation(
            path=source.path,
            task=task,
            access=access,
            looked=coverage,
            rows=(*ranked(rows), *absent),
            chosen=row,
            settings=settings,
            scanned=tuple(scanned),
            confidence=confidence(row, rows),
            command=report.command_for(source.path, target, row.plan, of_fields)
            if tile is None
            else report.tiles_for(source.path, target, row.plan, tile, opening),
            python=report.python_for(
                target, row.plan, settings, access, samples, *as_opened, cells=cells, ragged=ragged
            ),
            notes=tuple(notes),
            resembles=resemblance(sample.images),
            over_link=over_link,
            pixel_range=pixel_range,
        )


def _refuse_apart(crops: CropOptions, tile: int | None) -> None:
    """Raise `ArgumentError` for options of objects without ``objects``, or together with ``tile``."""
    for name in crops:
        if "objects" not in crops:
            raise ArgumentError("it goes with objects=", option=name, remedy="pass that too")
        if tile is not None:
            raise ArgumentError(
                "it does not go with objects=", option="tile", value=tile, remedy="leave one of them out"
            )


def _limits(seconds: float, size_bytes: int) -> Limits:
    part = min(1.0, seconds / _WHOLE_SAMPLE_S)
    return Limits(max(32, int(Limits.images * part)), max(1, int(size_bytes * part)), seconds * _SAMPLE_PART)


def _task(source: BaseSource, sample: Sample, requested: RecommendSettings) -> ReadBudget:
    memory_bytes, disk_bytes = requested.memory_bytes, requested.budget_bytes
    if memory_bytes is None:
        memory_bytes = preload_limit_bytes()
    if disk_bytes is not None:
        return ReadBudget(requested.epochs, sample.whole_bytes, memory_bytes, disk_bytes)
    folder = Path.cwd() if isinstance(source.path, Url) else source.path.parent
    free_bytes = shutil.disk_usage(folder).free
    return ReadBudget(
        requested.epochs, sample.whole_bytes, memory_bytes, free_bytes, "the free space next to the images"
    )


def _scanned(
    rows: list[PlanCost],
    elimination: LayoutElimination,
    deadline_s: float,
    progress: tqdm,
    start_methods: Sequence[str],
) -> tuple[PlanCost, list[LoaderTiming], Settings | None, list[PlanCost]]:
    """Scan loader settings of the first choice and of plans that workers may make faster; return the final choice."""
    chosen = choose(rows)
    if chosen is None:
        raise ArgumentError(f"nothing is possible within the budgets: {ranked(rows)[0].why_not}")
    limit_s = _WORKERS_MAY_HELP * chosen.total_s
    others = [
        row
        for row in ranked(rows)
        if row.why_not is None
        and not row.plan.preload
        and row.total_s <= limit_s
        and row.plan.layout in elimination.trials
    ]
    few = [row for row in others if row is not chosen][: _MOST_FINALISTS - 1]
    finalists = [chosen, *(few if available_cores() > 1 else [])]
    use, task = elimination.use, elimination.task
    scans: dict[LoadingPlan, list[LoaderTiming]] = {}
    for position, row in enumerate(finalists):
        now_s = use.clock()
        share_s = max(0.0, deadline_s - now_s) / (len(finalists) - position)
        trial = elimination.trial_for(row.plan)
        if trial is None or (position and share_s <= 0):
            continue
        dataset = trial.dataset(preload=row.plan.preload)
        deadline = now_s + share_s
        scans[row.plan] = scan(dataset, trial.indices, use, deadline, progress, start_methods, trial.fields)
        dataset.source.close()
    taken = {row.plan: best(scans[row.plan], task.epochs * row.epoch_s) for row in finalists if row.plan in scans}
    with_workers = {row.plan: _with(row, taken[row.plan], task) for row in finalists if row.plan in scans}
    rows = [with_workers.get(row.plan, row) for row in rows]
    again = choose([with_workers.get(row.plan, row) for row in finalists]) or chosen
    settings = taken[again.plan].settings if again.plan in taken else None
    return again, scans.get(again.plan, []), settings, rows


def _with(row: PlanCost, scanned: LoaderTiming, task: ReadBudget) -> PlanCost:
    if not scanned.settings.num_workers or scanned.ratio is None:
        return row
    gained_s = task.epochs * row.epoch_s * (1 - scanned.ratio) - scanned.start_s
    totals_s = {number: max(0.0, total_s - gained_s) for number, total_s in row.totals_s.items()}
    return replace(
        row, epoch_s=row.epoch_s * scanned.ratio, total_s=max(0.0, row.total_s - gained_s), totals_s=totals_s
    )


def _notes(
    row: PlanCost, rows: Sequence[PlanCost], elimination: LayoutElimination, source: BaseSource, looked: SampleCoverage
) -> list[str]:
    notes = []
    cells = elimination.cells
    if cells is not None:
        notes.append(f"Samples are the crops around {count(len(cells), 'object')}, each of which an epoch reads once.")
    first = ranked(rows)[0]
    if first is not row:
        why = "and is there already" if row.plan.layout.as_it_is else "and is simpler"
        part = row.total_s / first.total_s - 1
        notes.append(f"{first.plan.label} measured {part:.1%} less, within the noise; {row.plan.label} ties {why}.")
    if any(trial.growth > 1 for trial in elimination.trials.values()):
        notes.append("On demand, rows that are decoded together are more in the whole than in the sample: scaled up.")
    if not row.plan.preload and row.size_bytes > available_bytes():
        notes.append("It is larger than the memory available: epochs will wait for the disk too, unlike these.")
    if not looked.whole:
        notes.append("Only the sample was read: whether all images can be is what converting or preloading them shows.")
    if source.checksums is not None:
        notes.append("With verify=True its checksums are compared on demand too, at a cost not measured here.")
    return notes
