"""`profile_dataset`: the time of an epoch by stage, and the setting to try first."""

from __future__ import annotations

import copy
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from omearrow_ds.advise.profile.loop import Loop, Optimizer, make_step
from omearrow_ds.advise.profile.recorder import Breakdown
from omearrow_ds.advise.profile.result import ON_DEMAND, Profile, Trial, judge
from omearrow_ds.advise.turns import InterleavedRounds, noise
from omearrow_ds.dataset.collection import Collection, Preload, Select
from omearrow_ds.dataset.crop_boxes import DatasetOptions, split_options
from omearrow_ds.dataset.dataset import OMEArrowDataset
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.targets import Target
from omearrow_ds.errors import ArgumentError, AxesError, MemoryLimitError, OMEArrowDSError
from omearrow_ds.options import ProfileSettings, SampleSettings
from omearrow_ds.resources import available_bytes, available_cores, over_limit_message, preload_limit_bytes, workspace
from omearrow_ds.storage.compositions import select_rows
from omearrow_ds.storage.masks import Masks
from omearrow_ds.storage.part_files import is_path
from omearrow_ds.storage.protocol import OpenOptions, Paths, StrPath
from omearrow_ds.storage.source import convert, open_source, refuse_opening_again
from omearrow_ds.text import as_flags, as_keywords, duration

_LEAST_S, _MOST_S = 1.0, 10.0
_TURN_S = (0.1, 0.5)
_ROUNDS = 5
_AS_FAST = 1.15  # Clocks take some percent, and the speed of the machine varies.
_CACHED = "cached"  # Key of steps on one batch in rounds.
_REPEATED_S = 3.0  # Faster openings are repeated, as the first one in a process includes imports of libraries.
PRELOAD = "preload"
WAYS = (ON_DEMAND, PRELOAD, "cache_dir", "arrow")  # Trials that differ in the location of pixels.
_CONVERTED = "images.arrow"
_MOST_WORKERS = 4
_PIXEL_STAGES = ("read", "read+decode", "decode", "select", "normalize")
_STEPS = ("opening", "stages", "trials: setting up", "trials: taking turns")


def profile_dataset(
    data: Paths | StoredSamples,
    format: str | None = None,  # noqa: A002  # the public name
    *,
    batch_size: int = 16,
    num_workers: int | Literal["auto"] = "auto",
    preload: Preload | None = None,
    axes: str = "CYX",
    select: Select | None = None,
    crop_size: tuple[int, int] | None = None,
    normalize: bool = True,
    transform: Callable[..., Any] | None = None,
    masks: Masks | None = None,
    mask_background: bool = False,
    target: Target | None = None,
    model: nn.Module | Callable[..., nn.Module] | str | None = None,
    optimizer: Optimizer = "sgd",
    device: torch.device | str | None = None,
    shuffle: bool = True,
    seconds: float | None = None,
    epochs: int | None = None,
    trials: bool = True,
    work_dir: StrPath | None = None,
    progress: bool = False,
    **options: Unpack[DatasetOptions],
) -> Profile:
    """Measure the time per stage of a training epoch, and suggest settings to change.

    It runs the ordinary loader with clocks around its functions, and removes them afterwards.

    Parameters
    ----------
    data
        Path of a collection, or a dataset.
    format, axes, select, crop_size, normalize, transform, masks, mask_background, target
        See `OMEArrowDataset`. Only for a path.
    batch_size, num_workers
        See `OMEArrowDataLoader`.
    preload
        ``None`` reads a path on demand and leaves a dataset unchanged. Otherwise ``True``, ``False`` or ``"auto"``.
    model
        ``None``, a module, a function that returns one (called with the sample shape if it takes an argument), or
        ``"module:name"`` of either. The loss is the mean of its output; only a copy is trained.
    optimizer
        ``"sgd"``, ``"adam"``, or ``"none"`` for only the forward pass.
    device
        ``None`` is the CPU; otherwise the device of batches and model. On CUDA each stage is synchronized, so that
        stages add up to more than an overlapping loop takes.
    shuffle
        ``True`` for random order, ``False`` for stored order.
    seconds
        ``None`` measures the stages for 1 s to 10 s. Each of the five turns of a trial takes a twentieth of this time.
    epochs
        ``None``, or the number of whole epochs to measure instead of ``seconds``.
    trials
        ``True`` also tries other settings.
    work_dir
        Folder for files of trials, which are removed. ``None`` is the temporary folder of the system.
    progress
        ``False``, or ``True`` for a progress bar.
    **options
        See `open_images` and `OMEArrowDataset`, for example ``objects``.

    Returns
    -------
    Profile
        Stages, verdict and trials. ``print`` shows them as tables.

    Raises
    ------
    ArgumentError
        If the collection is empty, or an option is invalid.
    AxesError
        If samples differ in shape and cannot be batched.
    OMEArrowDSError
        Errors of `OMEArrowDataset` and `OMEArrowDataLoader`.

    Examples
    --------
    >>> from omearrow_ds import profile_dataset
    >>> profile = profile_dataset("plate.arrow", batch_size=4, num_workers=0, epochs=1, trials=False)
    >>> profile.images, profile.sample_shape
    (10, (2, 160, 160))
    """
    settings = ProfileSettings.take(locals())
    crops, opening = split_options(options)
    samples = SampleSettings.take({**locals(), **crops, "preload": True, "progress": None})
    if seconds is not None and epochs is not None:
        raise ArgumentError("conflicts with epochs=", option="seconds", value=seconds, remedy="pass one of them")
    if work_dir is not None and not Path(work_dir).is_dir():
        raise ArgumentError(option="work_dir", value=work_dir, allowed="an existing folder")
    with ExitStack() as stack, tqdm(_STEPS, disable=not progress, unit="step", leave=False) as bar:
        steps = map(bar.set_description, bar)
        next(steps)
        dataset, open_s, current = open_samples(data, format, samples, preload, opening, progress=progress)
        plain, first_batch_s = _begin(dataset, settings, stack)
        loader = plain.loader
        next(steps)
        least_s, most_s = settings.seconds or _LEAST_S, settings.seconds or _MOST_S
        if settings.epochs is not None:
            least_s, most_s = 0.0, inf
        # A second loop, so that workers of the trials contain no clocks.
        with replace(plain, num_workers=loader.num_workers, has_worker_clocks=True) as clocked:
            clocked.warm_up()
            breakdown = clocked.record(least_s, most_s, settings.epochs)
        next(steps)
        loops, alternatives = {current.name: plain}, list[Trial]()
        if model is not None:
            loops[_CACHED] = copy.copy(plain)
            loops[_CACHED].loader = [next(iter(replace(plain, num_workers=0).loader))]
        if settings.trials:
            pixels_s = sum(row.program_s + row.worker_s for row in breakdown.stages if row.stage in _PIXEL_STAGES)
            decode_s = current.setup_s or pixels_s / breakdown.samples * len(dataset)
            limit_s = max(2.0, 2 * min(most_s, 3 * _MOST_S))
            folder = stack.enter_context(workspace(settings.work_dir))
            candidates = find_candidates(plain, opening, decode_s, limit_s, folder)
            alternatives, ready = set_up(candidates, len(dataset), stack)
            loops |= ready
        next(steps)
        turn_s = min(max(most_s / 20, _TURN_S[0]), _TURN_S[1])
        turns = InterleavedRounds[str, float]()
        turns.run(loops, lambda name: loops[name].run(turn_s, turn_s).samples_per_s, _ROUNDS)
        next(steps, None)
    rates = turns.figures
    now, samples_per_s = rates[current.name], median(rates[current.name].values())
    ways = {way.name: way.measured(rates, current.name, len(dataset)) for way in (current, *alternatives)}
    current, *alternatives = ways.values()
    return Profile(
        path=str(dataset.path),
        format=dataset.source.format.name,
        images=len(dataset),
        sample_shape=dataset.shape,
        dtypes=tuple(sorted({str(dtype) for dtype in dataset.source.dtypes})),
        decoded_bytes=dataset.nbytes,
        preloaded=dataset.preloaded,
        open_s=open_s,
        preload_s=current.setup_s if dataset.preloaded else None,
        available_bytes=available_bytes(),
        batch_size=plain.batch_size,
        num_workers=loader.num_workers,
        num_workers_why=loader.settings["num_workers"].why,
        device=str(loader.device or "cpu"),
        model=model if isinstance(model, str | None) else getattr(model, "__name__", type(model).__name__),
        optimizer=None if model is None else settings.optimizer,
        first_batch_s=first_batch_s,
        samples_per_s=samples_per_s,
        noise=noise(1 / rate for rate in now.values()),
        rounds=turns.rounds,
        breakdown=replace(breakdown, remarks=tuple(_remarks(plain, breakdown, samples_per_s))),
        verdict=judge(breakdown, now, rates.get(_CACHED), alternatives, tried=settings.trials),
        trials=tuple(alternatives),
        preloading=tuple(ways[name] for name in WAYS if name in ways),
    )


def _begin(dataset: StoredSamples, settings: ProfileSettings, stack: ExitStack) -> tuple[Loop, float]:
    """Return the loop with the current settings, and the seconds until its first batches."""
    try:
        plain = Loop(dataset, settings.batch_size, settings.num_workers, settings.device, shuffle=settings.shuffle)
        stack.enter_context(plain)
        plain.step = make_step(settings.model, settings.optimizer, plain.loader.device, dataset)
        start = perf_counter()
        plain.warm_up()
        return plain, perf_counter() - start
    except AxesError as error:
        if dataset.shape is not None:
            raise
        height, width = dataset.source.shapes[:, 3:].min(axis=0).tolist()
        crop = f"crop_size=({height}, {width}) or smaller"
        remedy = crop if dataset.objects is None else "crop_size=, resize= or pad_to="
        problem = f"{dataset.path}: samples differ in shape and cannot be stacked"
        raise AxesError(f"{problem}; pass {remedy}, a transform that returns equal shapes, or batch_size=1") from error


def _remarks(plain: Loop, breakdown: Breakdown, samples_per_s: float) -> Iterator[str]:
    dataset, device, threads = plain.dataset, plain.loader.device, torch.get_num_threads()
    image = None if dataset.preloaded else dataset.source.images.read([0])[0]
    if image is None:
        yield "There is no stage read, because the pixels are decoded in memory."
    elif not image.flags.writeable and not image.flags.owndata:
        yield (
            "Images are views of mapped files. Their pages are read from disk at the first access, usually in the "
            "stage normalize, or in select for small images."
        )
    if not breakdown.workers and threads > 1:
        yield f"{threads} threads fill batches of 8 MiB or more; the stage normalize includes their time."
    if device is not None and device.type == "cuda":
        yield "Each stage waited for the device while it was timed; otherwise, copies and computation overlap."
    with_clocks = breakdown.samples / breakdown.wall_s
    if not samples_per_s / _AS_FAST <= with_clocks <= samples_per_s * _AS_FAST:
        rates = f"{with_clocks:,.4g} samples/s while stages were timed, and {samples_per_s:,.4g} otherwise"
        yield f"The loop reached {rates}, at different times or on other images; the shares above are from the first."


Candidate = tuple[Trial, Callable[[], Loop]]  # The function is not called if the trial has a note.


def find_candidates(
    plain: Loop, opening: OpenOptions, decode_s: float, limit_s: float, folder: Path
) -> Iterator[Candidate]:
    """Yield the settings to try, in increasing order of costs other than time, such as memory or disk space.

    ``plain`` is the loop with the current settings. No files are written if decoding takes longer than ``limit_s``.
    """
    demand, now, large = on_demand(plain.dataset), plain.loader.num_workers, plain.batch_size * 4
    size, has_user_code = demand.preload_bytes, demand._has_user_code
    workers = now if has_user_code else 0  # Without user code, a copy is faster than transfer between processes.
    note = over_limit_message(size, "disk", shutil.disk_usage(folder).free, f"the free space in {folder.parent}")
    if not note and decode_s > limit_s:
        note = f"not tried: decoding all images takes about {duration(decode_s)}; raise seconds= to try it"

    def preload() -> Loop:
        if decode_s <= limit_s:
            dataset = preloaded(demand)
        else:
            count = int(len(demand.source) * limit_s / 4 / decode_s)
            dataset = part_preloaded(demand, max(count, int(demand.fields.min()) + 1))
        return replace(plain, dataset=dataset, num_workers=workers, batch_size=min(plain.batch_size, len(dataset)))

    def to_arrow() -> Loop:
        convert(demand.source, file := folder / _CONVERTED)
        return replace(plain, dataset=demand._with_reader(demand._collection.on_demand(open_source(file))))

    if plain.dataset.preloaded:
        trial = Trial(ON_DEMAND, "--preload no", "OMEArrowDataset(path, preload=False)", "Read on demand")
        yield trial, lambda: replace(plain, dataset=demand)
    else:
        code, problem = "OMEArrowDataset(path, preload=True)", memory_problem(demand)
        trial = Trial(PRELOAD, "--preload yes", code, "Preload all pixels", held_bytes=size, room="memory")
        yield replace(trial, note=problem), preload
    code, advice = "OMEArrowDataset(path, preload=True, cache_dir=FOLDER)", "Keep decoded pixels in a mapped file"
    trial = Trial("cache_dir", code, code, f"{advice} (cache_dir=)", held_bytes=size, room="disk", note=note)
    yield trial, lambda: replace(plain, dataset=preloaded(demand, folder), num_workers=workers)
    if demand.source.images.mapped_stacks() is None:  # The pixels are not mapped yet.
        command = shlex.join(["omearrow-ds", "convert", "PATH", _CONVERTED, *as_flags(opening)])
        code = f"convert({', '.join(['path', repr(_CONVERTED), *as_keywords(opening)])})"
        trial = replace(trial, name="arrow", options=command, code=code, advice="Convert to Arrow IPC")
        yield trial, to_arrow
    if now or not plain.dataset.preloaded or has_user_code:  # Otherwise samples are only copied from memory.
        number = 0 if now else min(available_cores(), _MOST_WORKERS)
        advice = f"Create batches in {number} workers" if number else "Create batches without workers"
        code = f"OMEArrowDataLoader(dataset, {plain.batch_size}, num_workers={number})"
        yield Trial("workers", f"--workers {number}", code, advice), lambda: replace(plain, num_workers=number)
    if len(plain.dataset) >= large and plain.dataset.shape is not None:
        code, advice = f"OMEArrowDataLoader(dataset, {large})", "Use larger batches if training allows it"
        trial = Trial("batch", f"--batch-size {large}", code, advice)
        yield trial, lambda: replace(plain, num_workers=now, batch_size=large)


def set_up(candidates: Iterable[Candidate], images: int, stack: ExitStack) -> tuple[list[Trial], dict[str, Loop]]:
    """Return all trials, and a loop per name of each trial that can be measured; ``stack`` closes the loops."""
    trials, loops = [], {}
    for trial, make in candidates:
        setup_s, note, start = None, trial.note, perf_counter()
        try:
            if not note:
                loop = stack.enter_context(make())
                setup_s = (perf_counter() - start) * images / len(loop.dataset) if trial.room else None
                loop.warm_up()
                loops[trial.name] = loop
                note = "" if (count := len(loop.dataset)) == images else f"estimated from the first {count:,} images"
        except (OMEArrowDSError, OSError) as error:
            setup_s, note = None, f"could not be set up: {error}"
        trials.append(replace(trial, setup_s=setup_s, note=note))
    return trials, loops


def open_samples(
    data: Paths | StoredSamples,
    format_name: str | None,
    options: SampleSettings,
    preload: Preload | None,
    opening: OpenOptions,
    *,
    progress: bool,
) -> tuple[StoredSamples, float, Trial]:
    """Open the data to profile; return the dataset, the seconds, and the trial of the current location of pixels."""
    if isinstance(data, StoredSamples):
        for option in (*options.chosen, *([] if format_name is None else ["format"])):
            raise ArgumentError("does not apply to a dataset", option=option, remedy="pass it only with a path")
        refuse_opening_again(opening, "a dataset")
        preload = data.preloaded if preload is None else preload
    elif not is_path(data):
        remedy = "pass a path or a dataset of this package"
        raise ArgumentError(f"has the type {type(data).__name__}", option="data", remedy=remedy)
    chosen: dict[str, Any] = {**options.chosen, **opening, "preload": False, "progress": False}
    for _ in range(2):
        start = perf_counter()
        demand = on_demand(data) if isinstance(data, StoredSamples) else OMEArrowDataset(data, format_name, **chosen)
        len(demand.source)  # Opens the source of a dataset, which is lazy.
        open_s = perf_counter() - start
        if open_s > _REPEATED_S:
            break
    if not len(demand):
        raise ArgumentError("the collection is empty", path=demand.path, remedy="pass a collection with images")
    problem = memory_problem(demand)
    if not preload or (preload == "auto" and problem):
        return demand, open_s, Trial(ON_DEMAND, setup_s=0.0)
    if problem:
        raise MemoryLimitError(f"{demand.path}: preloading {problem}; pass preload=False or preload='auto'")
    start = perf_counter()
    dataset = preloaded(demand, progress=progress)
    setup_s, size = perf_counter() - start, demand.preload_bytes
    return dataset, open_s, Trial(PRELOAD, setup_s=setup_s, held_bytes=size, room="memory")


def memory_problem(dataset: StoredSamples) -> str:
    """Return why the decoded pixels exceed half of the available memory, or an empty string if they fit."""
    return over_limit_message(dataset.preload_bytes, "memory", preload_limit_bytes(), "half of the available memory")


def on_demand(dataset: StoredSamples) -> StoredSamples:
    return _moved(dataset, Collection.on_demand)


def preloaded(dataset: StoredSamples, folder: Path | None = None, *, progress: bool = False) -> StoredSamples:
    """Return a copy with all images and masks decoded into memory, or into memory-mapped files in ``folder``."""
    return _moved(dataset, lambda collection: collection.preloaded(folder, progress=progress))


def _moved(dataset: StoredSamples, move: Callable[[Collection], Collection]) -> StoredSamples:
    masks = None if dataset._masks is None else move(dataset._masks.collection)
    return dataset._with_reader(move(dataset._collection), masks)


def part_preloaded(dataset: StoredSamples, count: int) -> StoredSamples:
    """Return the samples of only the first ``count`` images, which are decoded into memory; masks are not."""
    collection = dataset._collection
    images = select_rows(collection.verified_source, np.arange(count), "")
    first = collection.first(count, PixelCache.load(images).block)
    return dataset._with_reader(first)._subset_at(collection.samples_of(count))
