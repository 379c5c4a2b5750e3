"""`profile_dataset`: the time of an epoch by stage, and the setting to try first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, Unpack

import torch
from torch import nn
from tqdm import tqdm

from omearrow_ds.advise.profile.loop import Duration, Loop, Optimizer, make_step
from omearrow_ds.advise.profile.recorder import Breakdown, break_down
from omearrow_ds.advise.profile.result import Profile, judge
from omearrow_ds.advise.profile.trials import WAYS, ProfiledDataset, Trial, find_candidates, open_samples, set_up
from omearrow_ds.advise.turns import InterleavedRounds, noise
from omearrow_ds.advise.workspace import workspace
from omearrow_ds.dataset.collection import Preload, Select
from omearrow_ds.dataset.samples import DatasetOptions, StoredSamples, split_options
from omearrow_ds.dataset.targets import Target
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.options import ProfileSettings, SampleSettings
from omearrow_ds.resources import available_bytes
from omearrow_ds.storage.masks import Masks
from omearrow_ds.storage.protocol import Paths, StrPath

_LEAST_S, _MOST_S = 1.0, 10.0
_TURN_S = (0.1, 0.5)
_ROUNDS = 5
_AS_FAST = 1.15  # Clocks take some percent, and the speed of the machine varies.
_CACHED = "cached"  # Key of steps on one batch in rounds.


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
    with ExitStack() as stack, tqdm(total=4, disable=not progress, unit="step", leave=False) as bar:
        bar.set_description("opening")
        opened = open_samples(data, format, samples, preload, opening, progress=progress)
        return _measure(opened, settings, stack, bar)


def _measure(opened: ProfiledDataset, settings: ProfileSettings, stack: ExitStack, bar: Any) -> Profile:
    dataset, current, model = opened.dataset, opened.current, settings.model
    plain, first_batch_s = _begin(dataset, settings, stack)
    loader = plain.loader
    _next(bar, "stages")
    duration = Duration(settings.seconds or _LEAST_S, settings.seconds or _MOST_S)
    if settings.epochs is not None:
        duration = Duration(0.0, inf, settings.epochs)
    # A second loop, so that workers of the trials contain no clocks.
    with replace(plain, num_workers=loader.num_workers, has_worker_clocks=True) as clocked:
        clocked.warm_up()
        breakdown = break_down(clocked.record(duration))
    _next(bar, "trials: setting up")
    loops, trials = {current.name: plain}, list[Trial]()
    if model is not None:
        loops[_CACHED] = copy.copy(plain)
        loops[_CACHED].loader = [next(iter(replace(plain, num_workers=0).loader))]
    if settings.trials:
        decode_s = current.setup_s or _decode_s(breakdown) * len(dataset)
        limit_s = max(2.0, 2 * min(duration.most_s, 3 * _MOST_S))
        folder = stack.enter_context(workspace(settings.work_dir))
        candidates = find_candidates(plain, opened.opening, decode_s, limit_s, folder)
        trials, ready = set_up(candidates, len(dataset), stack)
        loops |= ready
    _next(bar, "trials: taking turns")
    turn_s = min(max(duration.most_s / 20, _TURN_S[0]), _TURN_S[1])
    turns = InterleavedRounds[str, float]()
    turns.run(loops, lambda name: loops[name].run(Duration(turn_s, turn_s)).samples_per_s, _ROUNDS)
    _next(bar, "done")
    rates = turns.figures
    now, samples_per_s = rates[current.name], median(rates[current.name].values())
    current, *trials = [trial.measured(rates, current.name, len(dataset)) for trial in (current, *trials)]
    ways = {way.name: way for way in (current, *trials)}
    return Profile(
        path=str(dataset.path),
        format=dataset.source.format.name,
        images=len(dataset),
        sample_shape=dataset.shape,
        dtypes=tuple(sorted({str(dtype) for dtype in dataset.source.dtypes})),
        decoded_bytes=dataset.nbytes,
        preloaded=dataset.preloaded,
        open_s=opened.open_s,
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
        verdict=judge(breakdown, now, rates.get(_CACHED), trials, tried=settings.trials),
        trials=tuple(trials),
        preloading=tuple(ways[name] for name in WAYS if name in ways),
    )


def _next(bar: Any, description: str) -> None:
    bar.update()
    bar.set_description(description)


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
        raise AxesError(
            f"{dataset.path}: samples differ in shape and cannot be stacked; pass {remedy}, a transform that returns "
            f"equal shapes, or batch_size=1"
        ) from error


def _decode_s(breakdown: Breakdown) -> float:
    """Return the estimated seconds of decoding the pixels of one sample."""
    stages = [breakdown[stage] for stage in ("read", "read+decode", "decode", "select", "normalize")]
    return sum(row.program_s + row.worker_s for row in stages) / breakdown.samples


def _remarks(plain: Loop, breakdown: Breakdown, samples_per_s: float) -> Iterator[str]:
    """Yield remarks on unexpected stages of work, and on another speed of the recorded loop."""
    dataset, device, threads = plain.dataset, plain.loader.device, torch.get_num_threads()
    image = None if dataset.preloaded else dataset.source.images.read_arrays([0])[0]
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
