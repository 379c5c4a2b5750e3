"""`profile_dataset`: the time of an epoch by stage, and the setting to try first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from omearrow_ds.advise.profile.breakdown import Breakdown, break_down, differs
from omearrow_ds.advise.profile.candidates import HELD, ON_DEMAND, PRELOAD, CandidateFactory, decode_s
from omearrow_ds.advise.profile.loop import Duration, Loop, Run
from omearrow_ds.advise.profile.opening import ProfiledDataset, check_batches, open_samples, ragged, remarks
from omearrow_ds.advise.profile.recorder import ClockCost
from omearrow_ds.advise.profile.result import Profile
from omearrow_ds.advise.profile.training import NoStep, Optimizer, Training, as_model
from omearrow_ds.advise.profile.trials import Trial, prepare_loops
from omearrow_ds.advise.profile.verdict import Headroom, judge
from omearrow_ds.advise.turns import InterleavedRounds, Rounds, gains, median_ratio, noise
from omearrow_ds.advise.workspace import workspace
from omearrow_ds.dataset.collection import Preload, Select
from omearrow_ds.dataset.samples import DatasetOptions, StoredSamples, parted
from omearrow_ds.dataset.targets import Target
from omearrow_ds.errors import ArgumentError, AxesError
from omearrow_ds.options import ProfileSettings, SampleSettings
from omearrow_ds.resources import available_bytes
from omearrow_ds.storage.masks import Masks
from omearrow_ds.storage.protocol import Paths, StrPath

_LEAST_S, _MOST_S = 1.0, 10.0
_TURN_S = (0.1, 0.5)
_ROUNDS = 5
_NOW, _CACHED = "now", "cached"


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
    """Measure the time of an epoch by stage, whether preloading pays, and which setting to try first.

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
        ``"module:name"`` of either. The loss is the mean of its output. The model is copied; its weights do not change.
    optimizer
        ``"sgd"``, ``"adam"``, or ``"none"`` for only the forward pass.
    device
        Device of batches and model. ``None`` is the CPU. On CUDA each stage is synchronized, so that stages add up to
        more than an overlapping loop takes.
    shuffle
        ``True`` for random order, ``False`` for stored order.
    seconds
        Time to measure the stages. ``None`` measures 1 s to 10 s. Each of the five turns of a trial takes a twentieth.
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
    ProfileSettings.take(locals())
    if work_dir is not None and not Path(work_dir).is_dir():
        raise ArgumentError(option="work_dir", value=work_dir, allowed="an existing folder")
    duration = _duration(seconds, epochs)
    crops, opening = parted(options)
    samples = SampleSettings.take({**locals(), **crops, "preload": True, "progress": None})
    with ExitStack() as stack, tqdm(total=4, disable=not progress, unit="step", leave=False) as bar:
        bar.set_description("opening")
        opened = open_samples(data, format, samples, preload, opening, progress=progress)
        check_batches(opened.dataset, batch_size)
        plain = stack.enter_context(
            Loop(opened.dataset, batch_size, num_workers, device, NoStep(None), shuffle=shuffle)
        )
        plain.step = _step(opened.dataset, model, optimizer, plain.device)
        start = perf_counter()
        batch = _first_batch(plain, opened.dataset)
        first_batch_s = perf_counter() - start
        _next(bar, "stages")
        breakdown = _stages(opened.dataset, plain, duration)
        _next(bar, "trials: setting up")
        ready: list[tuple[Trial, Loop | None]] = []
        if trials:
            folder = stack.enter_context(workspace(work_dir))
            limit_s = max(2.0, 2 * min(duration.most_s, 3 * _MOST_S))
            ready = prepare_loops(
                CandidateFactory(opened, plain, decode_s(opened, breakdown), limit_s, folder).candidates(), stack
            )
        _next(bar, "trials: taking turns")
        loops = {_NOW: plain.run, **({} if model is None else {_CACHED: _Cached(plain.step, batch).run})}
        loops |= {trial.name: loop.run for trial, loop in ready if loop is not None}
        turns = _take_turns(loops, duration)
        _next(bar, "done")
    dataset, now = opened.dataset, turns.figures[_NOW]
    count = len(dataset)
    measured = [trial.measured(turns.figures[trial.name], now, count) if loop else trial for trial, loop in ready]
    ways = _held(opened, measured, turns.figures)
    measured = [next((way for way in ways if way.name == trial.name), trial) for trial in measured]
    cached = turns.figures.get(_CACHED)
    headroom = None if cached is None else Headroom(median_ratio(cached, now), gains(cached, now))
    rate, unquiet = median(now.values()), noise(1 / rate_per_s for rate_per_s in now.values())
    return Profile(
        path=str(dataset.path),
        format=dataset.source.format.name,
        images=count,
        sample_shape=dataset.shape,
        dtypes=tuple(sorted({str(dtype) for dtype in dataset.source.dtypes})),
        decoded_bytes=dataset.nbytes,
        preloaded=dataset.preloaded,
        open_s=opened.open_s,
        preload_s=opened.preload_s,
        available_bytes=available_bytes(),
        batch_size=batch_size,
        num_workers=plain.num_workers,
        num_workers_why=plain.loader.settings["num_workers"].why,
        device=str(plain.device or "cpu"),
        model=model if model is None or isinstance(model, str) else getattr(model, "__name__", type(model).__name__),
        optimizer=None if model is None else optimizer,
        first_batch_s=first_batch_s,
        samples_per_s=rate,
        noise=unquiet,
        rounds=turns.rounds,
        breakdown=replace(breakdown, remarks=(*breakdown.remarks, *differs(breakdown, rate))),
        verdict=judge(breakdown, headroom, measured, tried=trials, noise=unquiet),
        trials=tuple(measured),
        preloading=tuple(ways),
    )


def _duration(seconds: float | None, epochs: int | None) -> Duration:
    if seconds is not None and epochs is not None:
        raise ArgumentError("epochs= sets the duration too", option="seconds", value=seconds, remedy="pass one of them")
    if epochs is not None:
        return Duration(0.0, float("inf"), epochs)
    return Duration(_LEAST_S, _MOST_S) if seconds is None else Duration(seconds, seconds)


def _next(bar: Any, description: str) -> None:
    bar.update()
    bar.set_description(description)


def _step(dataset: StoredSamples, model: Any, optimizer: Optimizer, device: torch.device | None) -> NoStep:
    if model is None:
        return NoStep(device)
    sample = dataset[0]
    image = sample[0] if isinstance(sample, tuple | list) else sample
    return Training(as_model(model, tuple(np.shape(image))), optimizer, device)


def _first_batch(loop: Loop, dataset: StoredSamples) -> Any:
    try:
        return loop.warm_up()
    except AxesError as error:
        if dataset.shape is None:
            raise AxesError(ragged(dataset)) from error
        raise


def _stages(dataset: StoredSamples, plain: Loop, duration: Duration) -> Breakdown:
    """Record the stages; with workers, in a second loop, so that workers of the trials contain no clocks."""
    cost = ClockCost.measure()
    noted = remarks(dataset, plain.num_workers, plain.device)
    if not plain.num_workers:
        return break_down(plain.record(duration), cost, noted)
    with plain.like(dataset, plain.num_workers, probe=True) as probed:
        probed.warm_up()
        return break_down(probed.record(duration), cost, noted)


class _Cached:
    """Repeated steps on one batch that is already loaded."""

    def __init__(self, step: NoStep, batch: Any) -> None:
        self._step, self._batch = step, batch

    def run(self, duration: Duration) -> Run:
        samples = batches = 0
        start = perf_counter()
        while batches == 0 or perf_counter() - start < duration.least_s:
            samples += self._step(self._batch)
            batches += 1
        self._step.finish()
        return Run(samples, batches, perf_counter() - start)


def _take_turns(loops: Mapping[str, Callable[[Duration], Run]], duration: Duration) -> InterleavedRounds[str, float]:
    turn_s = min(max(duration.most_s / 20, _TURN_S[0]), _TURN_S[1])
    turn, turns = Duration(turn_s, turn_s), InterleavedRounds[str, float]()
    turns.run(loops, lambda name: loops[name](turn).samples_per_s, _ROUNDS)
    return turns


def _held(opened: ProfiledDataset, measured: Sequence[Trial], figures: Mapping[str, Rounds]) -> list[Trial]:
    """Return the ways to keep the pixels, including the current one, with their break-even epochs."""
    name, room = (PRELOAD, "memory") if opened.dataset.preloaded else (ON_DEMAND, "")
    used_bytes = opened.dataset.preload_bytes if room else 0
    current = Trial(name, "", "", "", opened.preload_s or 0.0, held_bytes=used_bytes, room=room)
    now, images = figures[_NOW], len(opened.dataset)
    ways = {way.name: way for way in (current.measured(now, now, images), *measured)}
    rates = {**figures, name: now}
    demand = rates.get(ON_DEMAND)
    for other in HELD[1:]:
        if demand is not None and other in rates:
            ways[other] = ways[other].paid(rates[other], demand, images)
    return [ways[way] for way in HELD if way in ways]
