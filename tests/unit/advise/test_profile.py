"""The profiler on planted work: its verdicts, the unchanged samples, and the state that it restores."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from itertools import product
from statistics import median
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import omearrow_ds
from omearrow_ds import (
    ArgumentError,
    AxesError,
    MemoryLimitError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    Profile,
    profile_dataset,
    write_images,
)
from omearrow_ds.advise.profile import measure, recorder
from omearrow_ds.advise.profile.loop import Loop, Step
from omearrow_ds.advise.profile.recorder import TIMED_FUNCTIONS, stage_functions
from omearrow_ds.kernels import stacks
from omearrow_ds.storage import byte_source
from omearrow_ds.storage.formats import arrow
from omearrow_ds.storage.formats._table import TableImages
from tests.conftest import needs
from tests.support.code import TREES, imports
from tests.support.counting import calls_of
from tests.support.errors import raises
from tests.support.strategies import NAMES_OR_LONG, slow_except

# Send these functions to workers by value: importing this file takes seconds per worker.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# On a machine with one core torch warns of two workers, which the planted cases need.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

TIMED_MODULES = sorted({module for module, _, _ in TIMED_FUNCTIONS})
SLEEP_S = 0.003
BATCH = 8
QUICK = {"seconds": 0.3, "trials": False, "batch_size": BATCH}
ALONE = pytest.mark.serial
LONG = pytest.mark.slow
WORKERS = pytest.mark.parametrize("workers", [0, 2])
ONE_OF_TWO = pytest.mark.parametrize("workers", [pytest.param(0, marks=LONG), 2])
PATH_MODULES = (
    "dataset/collection dataset/samples dataset/dataset dataset/batch kernels/gather loader/dataloader "
    "loader/epoch loader/position dataset/shared_memory "
    "dataset/preload dataset/stored_images dataset/crop_boxes dataset/targets codec/leaves codec/decode codec/encode "
    "storage/source axes loader/worker_processes"
)


def images(count, side=32):
    """Return images whose pixels encode image and position."""
    pixels = np.arange(side * side, dtype=np.uint16).reshape(1, 1, 1, side, side)
    return [pixels + np.uint16(index * 100) for index in range(count)]


def slow(image):
    time.sleep(SLEEP_S)
    return image


def jittered(image):
    return image + torch.rand(())


def failing(image):
    raise KeyError("planted")


class SlowFile(arrow.ArrowTable):
    """A file with slow reads."""

    def read_images(self, rows):
        time.sleep(SLEEP_S * len(rows))
        return super().read_images(rows)

    def stream(self):
        for row in range(len(self.header.image_ids)):
            yield row, self.read_images([row])

    def mapped_stacks(self):
        return None


class Sleeping(nn.Module):
    """A model whose forward pass sleeps, by default for 6 ms."""

    def __init__(self, sleep_s=2 * SLEEP_S):
        super().__init__()
        self.sleep_s = sleep_s
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        time.sleep(self.sleep_s)
        return batch.mean() * self.weight


class Large(nn.Module):
    """A model with real work: about 10 ms per batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024) / 32)

    def forward(self, batch):
        hidden = batch.flatten(1)
        for _ in range(60):
            hidden = hidden @ self.weight
        return hidden


@pytest.fixture(autouse=True)
def short_turns(request, monkeypatch):
    """Shorten the turns of settings in tests that draw no verdict from them."""
    if "whole_turns" not in request.fixturenames:
        monkeypatch.setattr(measure, "_TURN_S", (0.01, 0.01))


@pytest.fixture
def whole_turns():
    """Keep turns at the length that users get."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("profiled") / "images.arrow"
    write_images(images(96), file)
    return file


def slow_store(path):
    dataset = OMEArrowDataset(path, preload=False)
    dataset._collection._source = TableImages("arrow", SlowFile, arrow.ERRORS, dataset.path)
    return dataset


def mostly(judged, tries=5):
    """Whether two of at most ``tries`` are right; a busy machine may spoil the others."""
    right = 0
    return any((right := right + judged()) == 2 for _ in range(tries))


def wrapped_functions():
    """Return every function that `profile` may wrap."""
    for module in TIMED_MODULES:
        importlib.import_module(module)
    functions = [vars(owner)[name] for _, owner, name, _ in stage_functions()]
    return functions + [kind.__getitems__ for kind in (OMEArrowDataset, OMEArrowDatasetNumpy)]


def all_the_same(before):
    return all(now is then for now, then in zip(wrapped_functions(), before, strict=True))


# Planted work


@ALONE
@LONG
@WORKERS
def test_a_slow_transform_is_what_binds(path, workers):
    def judged():
        profiled = profile_dataset(path, transform=slow, num_workers=workers, **QUICK)
        return profiled.verdict.bound == "transform" and profiled.verdict.kind == "data-bound"

    assert mostly(judged)


@ALONE
@ONE_OF_TWO
@pytest.mark.usefixtures("whole_turns")
@pytest.mark.slow
def test_a_slow_store_is_what_binds(path, workers):
    def judged():
        profile = profile_dataset(slow_store(path), model=Sleeping(), num_workers=workers, **QUICK)
        return profile.verdict.bound == "read" and profile.verdict.kind == "data-bound"

    assert mostly(judged)


@ALONE
@ONE_OF_TWO
@pytest.mark.parametrize("model", [pytest.param(Large, marks=LONG), Sleeping(10 * SLEEP_S)], ids=["work", "sleep"])
@pytest.mark.usefixtures("whole_turns")
def test_a_large_model_is_what_binds(path, workers, model):
    def judged():
        profiled = profile_dataset(path, model=model, preload=True, optimizer="none", num_workers=workers, **QUICK)
        return profiled.verdict.kind == "compute-bound" and profiled.verdict.first is None

    assert mostly(judged)


@ALONE
@pytest.mark.parametrize(("workers", "batch_size"), [(0, 8), pytest.param(2, 32, marks=LONG)])
def test_a_ceiling_is_what_removing_the_stage_gives(tmp_path, workers, batch_size):
    """A batch takes 24 ms in the model and 24 ms (48 ms in two workers) in the transform: its ceiling is about 2."""
    file, model = tmp_path / "images.arrow", Sleeping(8 * SLEEP_S)
    write_images(images(6 * batch_size), file)

    def rate(transform):
        dataset = OMEArrowDataset(file, preload=False, transform=transform)
        with Loop(dataset, batch_size, workers, step=Step(model, "sgd")) as loop:
            loop.warm_up()
            return loop.run(epochs=1).samples_per_s

    def judged():
        options = {"epochs": 1, "trials": False, "batch_size": batch_size, "num_workers": workers}
        ceiling = profile_dataset(file, transform=slow, model=model, **options).breakdown["transform"].ceiling
        return 0.9 < ceiling / (rate(None) / rate(slow)) < 1.1

    assert mostly(judged)


# Counts


@ALONE
@ONE_OF_TWO
def test_stages_are_all_the_wall_time(path, workers):
    dataset, step = OMEArrowDataset(path, preload=False, transform=slow), Step(Sleeping(), "sgd")
    with Loop(dataset, BATCH, workers, step=step, has_worker_clocks=True) as loop:
        loop.warm_up()
        start = time.perf_counter()
        breakdown = loop.record(epochs=1)
        outside_s = time.perf_counter() - start
    assert breakdown.wall_s <= outside_s
    assert -0.03 < breakdown["other"].share < 0.2  # It has the time that no clock counted.
    breakdown = profile_dataset(path, transform=slow, num_workers=workers, **QUICK).breakdown
    assert sum(row.total_s for row in breakdown.stages) == pytest.approx(breakdown.wall_s)
    assert sum(row.share for row in breakdown.stages) == pytest.approx(1.0)
    assert breakdown["other"].total_s >= 0


def test_stages_of_workers_are_counted_in_the_workers(path):
    breakdown = profile_dataset(path, transform=slow, num_workers=2, **QUICK).breakdown
    transform = breakdown["transform"]
    assert transform.calls == breakdown.samples
    assert transform.worker_s >= 0.99 * SLEEP_S * breakdown.samples
    assert transform.program_s == 0
    assert 0 < transform.total_s <= breakdown.wait_s
    pids = {worker.pid for worker in breakdown.workers}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert sum(worker.busy_s for worker in breakdown.workers) >= transform.worker_s
    assert breakdown["hand-over"].program_s > 0
    assert breakdown["hand-over"].worker_s > 0


@pytest.mark.slow
def test_without_workers_all_is_the_program(path):
    breakdown = profile_dataset(path, transform=slow, num_workers=0, model=Sleeping(), **QUICK).breakdown
    assert breakdown.wait_s == 0
    assert breakdown.workers == ()
    assert all(row.worker_s == 0 for row in breakdown.stages)
    assert breakdown["transform"].calls == breakdown.samples
    for stage in ("forward", "backward", "optimizer step"):
        assert breakdown[stage].calls == breakdown.batches
    assert breakdown["forward"].total_s >= 0.99 * Sleeping().sleep_s * breakdown.batches


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_every_format_shows_its_stages(tmp_path, name):
    needs(name)
    file = tmp_path / "stored"
    write_images(images(8), file, name)
    breakdown = profile_dataset(file, name, batch_size=3, num_workers=0, epochs=2, trials=False).breakdown
    in_place = bool(omearrow_ds.open_images(file, name).images.mapped_stacks())
    calls = {row.stage: row.calls for row in breakdown.stages}
    assert calls["normalize"] > 0
    assert in_place or calls["read"] + calls["read+decode"] + calls["decode"] > 0
    assert any("at the first access" in remark for remark in breakdown.remarks) >= in_place
    preloaded = profile_dataset(file, name, preload=True, batch_size=3, num_workers=0, epochs=1, trials=False)
    assert preloaded.preload_s > 0
    assert preloaded.breakdown["read"].calls == preloaded.breakdown["decode"].calls == 0
    assert any("There is no stage read" in remark for remark in preloaded.breakdown.remarks)


# Samples


class Keeping(Step):
    """A callable that keeps a copy of each batch."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def __call__(self, batch):
        self.batches.append(batch.clone())
        return super().__call__(batch)


def batches_of(dataset, workers, *, recorded):
    step = Keeping()
    torch.manual_seed(3)
    with Loop(dataset, 5, workers, step=step, has_worker_clocks=recorded) as loop:
        loop.warm_up()
        step.batches.clear()
        _ = loop.record(epochs=2) if recorded else loop.run(epochs=2)
    return step.batches


@pytest.mark.parametrize(("workers", "preload"), slow_except([(0, True), (2, False)], product([0, 2], [True, False])))
def test_samples_under_clocks_are_those_without(path, workers, preload):
    dataset = OMEArrowDataset(path, preload=preload, transform=jittered)
    plain, measured = (batches_of(dataset, workers, recorded=recorded) for recorded in (False, True))
    assert len(plain) == len(measured)
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_what_is_measured_is_what_was_stored(tmp_path, name):
    needs(name)
    stored, step = images(7, side=9), Keeping()
    write_images(stored, tmp_path / "stored", name)
    dataset = OMEArrowDataset(tmp_path / "stored", name, preload=False, normalize=False)
    with Loop(dataset, 3, step=step, shuffle=False) as loop:
        loop.warm_up()
        step.batches.clear()
        loop.record(epochs=1)
    np.testing.assert_array_equal(torch.cat(step.batches), np.stack(stored)[:, 0, :, 0])


def test_a_subclass_that_makes_samples_of_its_own(path):
    class Own(OMEArrowDataset):
        def __getitem__(self, index):
            return super().__getitem__(index) * 2

    profiled = profile_dataset(Own(path, preload=False, transform=slow), num_workers=0, **QUICK)
    assert profiled.breakdown["transform"].calls == profiled.breakdown.samples
    assert profiled.verdict.bound == "transform"


# State that is restored


@WORKERS
def test_everything_is_as_it_was(path, workers):
    before, model = wrapped_functions(), Sleeping()
    dataset = OMEArrowDataset(path, preload=False, transform=slow)
    state = {name: id(value) for name, value in vars(dataset).items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    profile_dataset(dataset, model=model, num_workers=workers, **QUICK)
    assert all_the_same(before)
    assert dataset._transform is slow
    assert {name: id(value) for name, value in vars(dataset).items()} == state
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.weight.grad is None


@WORKERS
def test_everything_is_as_it_was_after_an_error(path, workers):
    before = wrapped_functions()
    with pytest.raises(KeyError, match="planted"):
        profile_dataset(path, transform=failing, num_workers=workers, **QUICK)
    assert all_the_same(before)

    class Interrupting(Step):
        calls = 0

        def __call__(self, batch):
            self.calls += 1
            if self.calls > 4:
                raise KeyboardInterrupt
            return super().__call__(batch)

    step = Interrupting()
    with Loop(OMEArrowDataset(path, preload=False), 8, workers, step=step, has_worker_clocks=True) as loop:
        loop.warm_up()
        step.calls = 0
        with pytest.raises(KeyboardInterrupt):
            loop.record(epochs=1)
    assert all_the_same(before)
    assert not {"forward", "backward", "optimize"} & set(vars(step))


def test_not_profiling_costs_nothing(path, monkeypatch):
    monkeypatch.setattr(byte_source, "STATUS_NS", 10**15)  # Stat the file once, not periodically.
    monkeypatch.setattr(stacks, "_QUERY_NS", 10**15)  # As for waits of reads.
    dataset, batch, before = OMEArrowDataset(path, preload=False), list(range(16)), wrapped_functions()
    operations = (lambda: dataset[3], lambda: dataset.__getitems__(batch), lambda: list(OMEArrowDataLoader(dataset, 8)))
    for operation in operations:
        operation()
    calls = [calls_of(operation) for operation in operations]
    profile_dataset(dataset, num_workers=0, **QUICK)
    assert all_the_same(before)
    assert [calls_of(operation) for operation in operations] == calls


@pytest.mark.parametrize("name", [name for name in TREES if "/formats/" in name] + PATH_MODULES.split())
def test_no_clock_stands_in_the_path(name):
    """Modules read a clock only to check files for replacement, and how long a program uses a batch of cold pages."""
    allowed = {
        "loader/epoch.py": ["monotonic_ns"],
        "storage/byte_source.py": ["monotonic_ns"],
        "storage/formats/_folder.py": ["monotonic_ns"],
    }
    tree = TREES[name if name.endswith(".py") else f"{name}.py"]
    clocks = [module.removeprefix("time.") for module in imports(tree) if module.split(".")[0] == "time"]
    assert [clock for clock in clocks if clock != "time"] == allowed.get(f"{name.removesuffix('.py')}.py", [])


@pytest.mark.parametrize("module", TIMED_MODULES)
def test_stage_functions_exist(module):
    pytest.importorskip(module, reason="the format's library is not installed", exc_type=ImportError)
    functions = [vars(owner)[name] for name_of_module, owner, name, _ in stage_functions() if name_of_module == module]
    assert functions
    assert all(map(callable, functions))


def test_stage_functions_cover_all_of_making_samples():
    assert {"omearrow_ds.codec.decode", "omearrow_ds.kernels.gather"} < set(TIMED_MODULES)
    wrapped_functions()
    stages = {"read", "read+decode", "decode", "select", "normalize", "collate", "hand-over", "transfer"}
    assert {stage for *_, stage in stage_functions()} == stages


def test_stage_functions_refuse_an_unknown_stage(monkeypatch):
    monkeypatch.setattr(recorder, "formats", lambda: [SimpleNamespace(implementation=arrow.__name__)])
    monkeypatch.setattr(arrow, "STAGES", {"ArrowTable._image_structs": "reading"}, raising=False)
    with raises(
        ArgumentError, mentions=("omearrow_ds.storage.formats.arrow.STAGES", "'reading'", "open", "read"), remedy=False
    ):
        list(stage_functions())


# Trials and preloading


def test_other_settings_are_really_tried(tmp_path):
    file = tmp_path / "images.parquet"
    write_images(images(200), file, compression="zstd")
    result = profile_dataset(file, batch_size=BATCH, seconds=0.3, num_workers=0, work_dir=tmp_path)
    assert [way.name for way in result.preloading] == ["on demand", "preload", "cache_dir", "arrow"]
    assert all(way.samples_per_s > 0 and way.epoch_s > 0 and way.setup_s is not None for way in result.preloading)
    assert {trial.name for trial in result.trials} >= {"preload", "cache_dir", "arrow", "workers", "batch"}
    assert all(trial.gain > 0 and trial.least_gain <= trial.gain for trial in result.trials)
    first = [trial for trial in result.trials if trial.name == result.verdict.first]
    assert all(trial.gain >= 1.1 and trial.least_gain > 1 for trial in first)
    assert list(tmp_path.iterdir()) == [file]
    text = result.as_text()
    for word in ("normalize", "at most", "Preloading needs", "Try first", "sum"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_preloaded_dataset_is_held_against_access_on_demand(path):
    profiled = profile_dataset(OMEArrowDataset(path, transform=slow), batch_size=BATCH, seconds=0.2, num_workers=0)
    assert profiled.preloaded
    assert [way.name for way in profiled.preloading] == ["on demand", "preload", "cache_dir"]
    assert "preload" not in {trial.name for trial in profiled.trials}
    assert profiled.preloading[1].held_bytes == profiled.decoded_bytes


def test_preloading_that_takes_too_long_is_estimated(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.advise.test_profile.SLEEP_S", 0.01)
    file = tmp_path / "images.arrow"
    write_images(images(300, side=8), file)
    profiled = profile_dataset(slow_store(file), batch_size=BATCH, seconds=0.1, num_workers=0)
    ways = {way.name: way for way in profiled.preloading}
    assert "not tried" in ways["cache_dir"].note
    assert "first" in ways["preload"].note
    assert ways["preload"].setup_s > 0
    assert ways["preload"].gain > 10
    assert profiled.verdict.first == "preload"
    assert profiled.verdict.bound == "read"


def test_preloading_that_does_not_fit(path, monkeypatch):
    monkeypatch.setattr(measure, "preload_limit_bytes", lambda: 500)
    with raises(MemoryLimitError, path=path, mentions=("196,608", 500)):
        profile_dataset(path, preload=True, **QUICK)
    actual = profile_dataset(path, preload="auto", batch_size=BATCH, seconds=0.1, num_workers=0)
    assert not actual.preloaded
    ways = {way.name: way for way in actual.preloading}
    assert ways["preload"].samples_per_s is None
    assert "the limit is 500" in ways["preload"].note
    assert [line.split()[:2] for line in actual.as_text().splitlines() if "the limit is 500" in line] == [
        ["preload", "needs"],  # From the trials.
        ["preload", "needs"],  # From the list of ways to preload.
    ]


# Odd data and arguments


def test_one_image_and_an_epoch_shorter_than_a_batch(tmp_path):
    for count in (1, 3):
        file = tmp_path / f"{count}.arrow"
        write_images(images(count), file)
        profiled = profile_dataset(file, batch_size=16, epochs=2, num_workers=0)
        assert profiled.breakdown.samples == 2 * count
        assert profiled.breakdown.batches == 2
        assert "batch" not in {trial.name for trial in profiled.trials}
        assert f"{count:,} sample" in profiled.as_text()


def test_no_images(tmp_path):
    empty = tmp_path / "empty.parquet"
    write_images([], empty)
    with raises(ArgumentError, path=empty, remedy=False):
        profile_dataset(empty)


def test_images_that_make_no_batches(tmp_path):
    file = tmp_path / "images.parquet"
    sizes = [(8, 9), (10, 7), (12, 12), (9, 9)]
    write_images([np.zeros((1, 1, 1, *size), np.uint16) for size in sizes], file)
    with raises(AxesError, option="crop_size", path=file, mentions="crop_size=(8, 7)"):
        profile_dataset(file, batch_size=2, seconds=0.1)
    with raises(AxesError, option="crop_size", path=file):
        profile_dataset(file, batch_size=2, transform=torch.sqrt, num_workers=0, seconds=0.1)
    short = {"seconds": 0.1, "trials": False, "num_workers": 0}
    assert profile_dataset(file, batch_size=2, crop_size=(8, 7), **short).sample_shape == (1, 8, 7)
    assert profile_dataset(file, batch_size=2, transform=lambda image: image[:, :4, :4], **short).sample_shape is None
    assert profile_dataset(file, batch_size=1, **short).breakdown.samples > 0


def test_targets_and_numpy_datasets(tmp_path):
    file = tmp_path / "images.parquet"
    write_images(images(12), file, columns={"label": list(range(12))})
    profiled = profile_dataset(
        file, target="label", model=Sleeping(), batch_size=4, epochs=1, trials=False, num_workers=0
    )
    assert profiled.breakdown["collate"].calls > 0
    numpy = profile_dataset(OMEArrowDatasetNumpy(file), batch_size=4, epochs=1, trials=False, num_workers=0)
    assert numpy.breakdown.samples == 12
    assert numpy.preloaded


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": 1, "epochs": 1}, ("seconds=", "epochs=")),
        ({"epochs": 0}, "epochs=0"),
        ({"optimizer": "lamb"}, "optimizer='lamb'"),
        ({"work_dir": "/no/such/folder"}, "work_dir="),
        ({"preload": "maybe"}, "preload='maybe'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"model": "no_such_module:make"}, "'no_such_module'"),
        ({"model": "torch.nn:NoSuchLayer"}, "'NoSuchLayer'"),
        ({"model": "torch"}, ("torch", "module:name")),
        ({"model": "math:pi"}, "math:pi"),
        ({"model": lambda: 3}, "int"),
    ],
)
def test_arguments_that_cannot_be(path, options, facts):
    with raises(ArgumentError, option=next(iter(options)), mentions=facts, remedy=False):
        profile_dataset(path, **options)


def test_what_cannot_be_profiled(path, tmp_path):
    with pytest.raises(MissingPathError):
        profile_dataset(tmp_path / "none.parquet")
    with raises(ArgumentError, mentions="TensorDataset", remedy=False):
        profile_dataset(torch.utils.data.TensorDataset(torch.zeros(3)))
    with raises(ArgumentError, mentions="dataset"):
        profile_dataset(OMEArrowDataset(path), crop_size=(4, 4))
    with raises(ArgumentError, option="model", remedy=False):
        profile_dataset(path, model=nn.Identity(), normalize=False, num_workers=0, **QUICK)


def test_models_are_given_in_three_ways(path):
    options = {"epochs": 1, "trials": False, "num_workers": 0, "batch_size": 32}
    for model in (
        Sleeping(),
        Sleeping,
        "tests.unit.advise.test_profile:Sleeping",
        lambda shape: nn.LazyLinear(shape[-1]),
    ):
        profiled = profile_dataset(path, model=model, optimizer="adam", **options)
        assert profiled.breakdown["forward"].calls == 3
        assert profiled.model
    frozen = Sleeping().requires_grad_(False)
    assert profile_dataset(path, model=frozen, **options).breakdown["backward"].calls == 0
    forward = profile_dataset(path, model=Sleeping(), optimizer="none", **options).breakdown
    assert forward["backward"].calls == forward["optimizer step"].calls == 0


# Results


def test_a_recording_at_another_speed_has_a_remark(path):
    with Loop(OMEArrowDataset(path, preload=False), BATCH) as loop:
        breakdown = loop.record(epochs=1)
    rate = breakdown.samples / breakdown.wall_s
    remarks = [" ".join(measure._remarks(loop, breakdown, rate * factor)) for factor in (1.1, 1 / 1.1, 1.3, 1 / 1.3)]
    assert ["the shares above are from the first" in text for text in remarks] == [False, False, True, True]


def test_the_result_is_rows_for_machines(path):
    profiled = profile_dataset(path, model=Sleeping(), num_workers=2, batch_size=BATCH, seconds=0.1)
    assert isinstance(profiled, Profile)
    machine = profiled.as_dict()
    assert json.loads(json.dumps(machine, allow_nan=False)) == machine
    for rows in ("stages", "trials", "preloading"):
        assert all(not isinstance(value, dict | list) for row in machine[rows] for value in row.values())
    assert sum(row["total_s"] for row in machine["stages"]) == pytest.approx(machine["wall_s"])
    assert {row["stage"] for row in machine["stages"]} >= {"read", "decode", "transform", "forward", "other", "clocks"}
    assert machine["verdict"] == asdict(profiled.verdict)
    assert len(machine["workers"]) == 2
    assert str(profiled) == profiled.as_text()
    with pytest.raises(AttributeError):
        profiled.images = 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@WORKERS
def test_a_device_is_waited_for(path, workers):
    profiled = profile_dataset(path, model=Large, device="cuda", num_workers=workers, **QUICK)
    stages = profiled.breakdown
    assert all(stages[name].total_s > 0 for name in ("transfer", "forward", "backward", "optimizer step"))
    assert sum(stage.total_s for stage in stages.stages) == pytest.approx(stages.wall_s)
    assert profiled.verdict.kind in ("compute-bound", "balanced", "data-bound")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_device(path):
    with raises(ArgumentError, option="device", mentions="CUDA"):
        profile_dataset(path, device="cuda")


def test_a_stage_on_another_device_is_a_stage(path):
    breakdown = profile_dataset(path, device="meta", num_workers=0, epochs=1, trials=False, batch_size=32).breakdown
    assert breakdown["transfer"].calls == 3


@pytest.mark.usefixtures("whole_turns")
def test_profiling_takes_about_as_long_as_asked(path):
    start = time.perf_counter()
    profile_dataset(path, transform=slow, seconds=0.5, batch_size=BATCH, num_workers=0)
    assert time.perf_counter() - start < 60  # It takes 5 s on an idle machine.


@ALONE
def test_clocks_take_little(path):
    dataset = OMEArrowDataset(path, preload=False, transform=slow)
    shares = [profile_dataset(dataset, num_workers=0, **QUICK).breakdown["clocks"].share for _ in range(3)]
    assert median(shares) < 0.03
