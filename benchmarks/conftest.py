"""Fixtures and parameters of benchmarks, and recording of their results.

A benchmark has the marker ``@pytest.mark.track(number, operation)``, ``@pytest.mark.limit(table, operation)`` if it is
compared with a reference or with memory, or ``@pytest.mark.gate(track, operation)`` if the gate measures it.
Its parameters, by name, are the columns of its table. This file sets ``format_name``, ``encoding``, ``engine`` and
``device``, and ``batch_size`` and ``workers`` unless ``parametrize`` does; ``parametrize`` sets the others.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.report import comparison
from benchmarks.report.ratios import OPERATIONS
from benchmarks.support.cells import Cells
from benchmarks.support.data import DataCache, encodings
from benchmarks.support.library import as_after_some_epochs, formats
from benchmarks.support.model import Embedder
from benchmarks.support.paired import Compare, Preloaded
from benchmarks.support.recorder import Recorder, family_of, in_memory, label_of, params_of, setting_now
from benchmarks.support.transforms import Augment
from benchmarks.support.workload import NAMED, NO_BATCH, PROFILES, Profile, Workload, common_size
from omearrow_ds import Format, OMEArrowDataset, OMEArrowDSError, open_images

_FORMATS = {fmt.name: fmt for fmt in formats()}
_BY_ENGINE = (("parquet_duck", "duckdb"),)  # Formats read by another engine than their default.
_BATCH_SIZES, _WORKERS = (1, 4, 16), (0, 2, 4)
_HOLDER = "arrow"  # Source of preloaded pixels, which are equal for all formats.
_HELD_BYTES = 2**30  # Limit of preloaded datasets kept for the next benchmarks.


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, the comparison with stored runs and, if benchmarks are measured, the recorder."""
    for option in ("model", "transform"):
        _imported(config, option)  # Refuse missing modules before anything is measured.
    config.addinivalue_line("markers", "track(number, operation): the family and operation that a benchmark measures.")
    config.addinivalue_line("markers", "limit(table, operation): the table and operation of a ratio that is measured.")
    config.addinivalue_line("markers", "full: left out of the quick profile.")
    # A filter, since the versions that the gate compares may lack the warning. Workloads may have 12-bit pixels.
    config.addinivalue_line("filterwarnings", "ignore:.*pixels have at most 12 bits:UserWarning")
    config.addinivalue_line("markers", "gate(track, operation): what the gate measures; left out unless -m names it.")
    if config.get_verbosity() <= 0:  # Our tables at the end replace its hundreds of lines.
        config.option.benchmark_quiet = True
    workload = _workload(config)
    comparison.register(config, partial(setting_now, config, workload))
    disabled = config.getoption("benchmark_disable") and not config.getoption("benchmark_enable")
    if not (disabled or config.getoption("benchmark_skip") or hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder(config, workload), "omearrow-ds-recorder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without gated benchmarks for the gate, as its base may lack modules that they import."""
    is_gate_run = config.getoption("markexpr") == "gate" and collection_path.match("test_*.py")
    return True if is_gate_run and "mark.gate" not in collection_path.read_text(encoding="utf-8") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize each benchmark with the formats, encodings, engines, batch sizes, workers and device it asks for."""
    fixed = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])}
    if "encoding" in metafunc.fixturenames:
        pairs = [(fmt.name, encoding) for fmt in formats() for encoding in encodings(fmt)]
        metafunc.parametrize(("format_name", "encoding"), pairs, ids=["-".join(pair) for pair in pairs])
    elif "engine" in metafunc.fixturenames:
        cases = [pytest.param(name, None, id=name) for name in _FORMATS]
        cases += [pytest.param(*pair, id="-".join(pair)) for pair in _BY_ENGINE]
        metafunc.parametrize(("format_name", "engine"), cases)
    elif "format_name" in metafunc.fixturenames and "format_name" not in fixed:
        metafunc.parametrize("format_name", list(_FORMATS))
    for name, option, default in (("batch_size", "batch_sizes", _BATCH_SIZES), ("workers", "workers", _WORKERS)):
        if name in metafunc.fixturenames and name not in fixed:
            values = metafunc.config.getoption(option) or default
            metafunc.parametrize(name, values, ids=f"{name.removesuffix('_size')}{{}}".format)
    if "device" in metafunc.fixturenames and "device" not in fixed:
        metafunc.parametrize("device", [metafunc.config.getoption("device")])


def _names(argument: str | Sequence[str]) -> list[str]:
    return argument.split(",") if isinstance(argument, str) else list(argument)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect benchmarks that the options exclude, and sort the others by module and format."""
    _refuse_empty_workload(config)
    _refuse_what_has_no_table(items)
    selected = config.getoption("formats") or list(_FORMATS)
    installed = [name for name in selected if _FORMATS[name].missing_backend is None] or selected
    holder = _HOLDER if _HOLDER in installed else installed[0]
    quick, gate = config.getoption("profile") == "quick", "gate" in config.getoption("markexpr")
    left_out = [
        item
        for item in items
        if (family := family_of(item))
        and (
            params_of(item).get("format_name", selected[0]) not in selected
            or (in_memory(item) and params_of(item).get("format_name", holder) != holder)
            or (quick and (item.get_closest_marker("full") is not None or _for_full(params_of(item), config)))
            or ("gate" in family and not gate)
        )
    ]
    if "scale" not in config.getoption("markexpr"):
        left_out += [item for item in items if item.get_closest_marker("scale") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    # Benchmarks of a format share a preloaded dataset, so they run one after another. Benchmarks pinned to one core
    # run last, because a library that starts its threads meanwhile would stay on one core.
    order = {name: index for index, name in enumerate(_FORMATS)}
    modules = {path: index for index, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(
        key=lambda item: (
            item.get_closest_marker("limit") is not None,
            modules[item.path],
            order.get(params_of(item).get("format_name", ""), len(order)),
        )
    )


def _refuse_empty_workload(config: pytest.Config) -> None:
    if config.getoption("images") is None:
        return
    try:
        next(_workload(config).images())
    except (OMEArrowDSError, ValueError) as error:
        raise pytest.UsageError(f"--images: {error}") from error


def _refuse_what_has_no_table(items: Sequence[pytest.Item]) -> None:
    """Refuse benchmarks without a table for their results before anything is measured."""
    for item in items:
        family = family_of(item)
        if "track" in family and not isinstance(family["track"], int):
            raise pytest.UsageError(f"{item.nodeid}: track {family['track']!r} is no number")
        if "table" in family and family["operation"] not in OPERATIONS.get(family["table"], {}):
            known = "benchmarks/report/targets.py names them"
            raise pytest.UsageError(f"{item.nodeid}: no table and operation {family}; {known}")


def _for_full(params: dict[str, Any], config: pytest.Config) -> bool:
    """Whether only the full profile has a benchmark, as starting its workers takes longer than measuring them."""
    workers, batch_size = params.get("workers", 0), params.get("batch_size", _BATCH_SIZES[-1])
    many = workers > 2 and config.getoption("workers") is None
    small = workers > 0 and batch_size != _BATCH_SIZES[-1] and config.getoption("batch_sizes") is None
    return bool(many or small or "start_method" in params)


def _workload(config: pytest.Config) -> Workload:
    count, folder = config.getoption("num_images"), config.getoption("images")
    if folder is not None:
        return Workload(count, folder=folder.resolve(), tile=config.getoption("tile"))
    name, shape = config.getoption("workload"), config.getoption("image_shape")
    if name not in NAMED:
        raise pytest.UsageError(f"--workload: unknown {name}; known are {', '.join(NAMED)}")
    known = NAMED[name]
    return replace(known, count=count or known.count, shape=shape or known.shape, seed=config.getoption("seed"))


@pytest.fixture(autouse=True)
def _described(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> None:
    """Describe a benchmark in its ``extra_info``, and group it with the same benchmark of other formats."""
    family, params = family_of(request.node), params_of(request.node)
    other_params = {name: value for name, value in params.items() if name != "format_name" and value is not None}
    benchmark.extra_info.update(**family, **label_of(request.node), **other_params)
    named = f"{'track ' if 'track' in family else ''}{' '.join(map(str, family.values()))}"
    benchmark.group = " ".join([named, *(f"{name}={value}" for name, value in other_params.items())])


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _loops_compiled() -> None:
    """Put this process in the state after some epochs, with compiled loops."""
    as_after_some_epochs()


@pytest.fixture
def one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pin all threads of this process to one core if the system can, and limit torch to one thread."""
    request.getfixturevalue("one_thread")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    _pin({max(allowed)} if allowed else allowed)
    yield
    _pin(allowed)


def _pin(cores: set[int]) -> None:
    # Running threads do not inherit a change of affinity, so set it for each one.
    for thread in os.listdir("/proc/self/task") if cores else ():  # noqa: PTH208  # Only names are needed.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@pytest.fixture(scope="session")
def profile(pytestconfig: pytest.Config) -> Profile:
    """Return the profile, which sets how long to measure."""
    return next(known for known in PROFILES if known.name == pytestconfig.getoption("profile"))


@pytest.fixture
def compare(benchmark: BenchmarkFixture, profile: Profile) -> Compare:
    """Return a function that measures a benchmark and a reference alternately."""
    return Compare(benchmark, profile)


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of orders, transforms and weights."""
    return int(pytestconfig.getoption("seed"))


@pytest.fixture(scope="session")
def steps(pytestconfig: pytest.Config) -> int:
    """Return the number of steps in a loop of track 3."""
    return int(pytestconfig.getoption("steps"))


@pytest.fixture(scope="session")
def model(pytestconfig: pytest.Config) -> Any:
    """Return the factory of the model of track 3, which takes the shape of a sample."""
    return _imported(pytestconfig, "model") or Embedder


def _imported(config: pytest.Config, option: str) -> Any:
    """Return the object that an option names as MODULE:NAME, or None without the option."""
    target = config.getoption(option)
    if target is None:
        return None
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"--{option} {target}: {error}; it is MODULE:NAME of something importable") from error


@pytest.fixture(scope="session")
def workload(pytestconfig: pytest.Config) -> Workload:
    """Return the workload that the options select."""
    return _workload(pytestconfig)


@pytest.fixture(scope="session")
def data(pytestconfig: pytest.Config, workload: Workload) -> Iterator[DataCache]:
    """Yield the cache of generated collections."""
    with DataCache(pytestconfig.getoption("data").absolute(), workload) as cache:
        yield cache


@pytest.fixture(scope="session")
def cells(pytestconfig: pytest.Config, workload: Workload) -> Iterator[Cells]:
    """Yield the cache of fields with objects and masks."""
    with Cells(pytestconfig.getoption("data").absolute(), workload) as cache:
        yield cache


@pytest.fixture(scope="session")
def images(data: DataCache) -> list[Any]:
    """Return all images of the workload."""
    return list(data.images())


@pytest.fixture
def scratch(data: DataCache) -> Iterator[Path]:
    """Yield an empty folder on the disk of the data, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=data.folder) as folder:
        yield Path(folder)


@pytest.fixture
def fmt(format_name: str) -> Format:
    """Return the storage format, or skip the benchmark if its backend is missing."""
    selected = _FORMATS[format_name]
    if selected.missing_backend:
        pytest.skip(selected.missing_backend)
    return selected


class Datasets:
    """Datasets of the workload; preloaded ones are cached up to `_HELD_BYTES`."""

    def __init__(self, data: DataCache, seed: int, augment: Any = None) -> None:
        """Use ``augment`` as the transform of augmenting datasets, by default `Augment`."""
        self._augment = augment or Augment(seed)
        self._data = data
        self._known_shapes: Any = None  # All formats have the same shapes.
        self._preloaded: OrderedDict[tuple[str, str], OMEArrowDataset] = OrderedDict()

    def path(self, fmt: Format) -> Path:
        """Return the path of the collection in the format's default encoding."""
        return self._data.path(fmt, encodings(fmt)[0])

    def axes(self, fmt: Format) -> str:
        """Return the axes of a sample: ``"TCZYX"`` if an image has several T or Z, else ``"CYX"``."""
        return "CYX" if (self._shapes(fmt)[:, [0, 2]] == 1).all() else "TCZYX"

    def image_shape(self, fmt: Format) -> str:
        """Return the common shape of all images as text, or `benchmarks.support.workload.DIFFERING`."""
        return common_size(self._shapes(fmt).tolist())

    def _shapes(self, fmt: Format) -> Any:
        if self._known_shapes is None:
            with open_images(self.path(fmt), fmt.name) as source:
                self._known_shapes = source.shapes
        return self._known_shapes

    def get(self, fmt: Format, access: str, transform: str = "normalize") -> OMEArrowDataset:
        """Return a dataset of the format's default encoding, ``"preloaded"`` or ``"on_demand"``.

        The transform is ``"none"``, ``"normalize"``, or ``"augment"``, which normalizes too.
        """
        if access == "on_demand":
            return self._open(fmt, transform, preload=False)
        key = (fmt.name, transform)
        if key not in self._preloaded:
            self._preloaded[key] = self._open(fmt, transform, preload=True)
            while (
                len(self._preloaded) > 1 and sum(dataset.nbytes for dataset in self._preloaded.values()) > _HELD_BYTES
            ):
                self._preloaded.popitem(last=False)
        return self._preloaded[key]

    def batched(self, fmt: Format, access: str) -> OMEArrowDataset:
        """Return a dataset whose samples can be batched; skip the benchmark if the images differ in shape."""
        dataset = self.get(fmt, access)
        if dataset.shape is None:
            pytest.skip(NO_BATCH)
        return dataset

    def _open(self, fmt: Format, transform: str, *, preload: bool) -> OMEArrowDataset:
        return OMEArrowDataset(
            self.path(fmt),
            fmt.name,
            preload=preload,
            axes=self.axes(fmt),
            normalize=transform != "none",
            transform=self._augment if transform == "augment" else None,
        )


@pytest.fixture(scope="session")
def datasets(pytestconfig: pytest.Config, data: DataCache, seed: int) -> Datasets:
    """Return the factory of datasets."""
    return Datasets(data, seed, _imported(pytestconfig, "transform"))


@pytest.fixture(scope="module")
def preloaded(datasets: Datasets) -> Preloaded:
    """Return the preloaded collection, which is the same for all formats."""
    fmt = _FORMATS["arrow"]
    dataset = datasets.batched(fmt, "preloaded")
    with open_images(datasets.path(fmt), fmt.name) as source:
        if len(set(source.dtypes)) > 1:
            pytest.skip("the images differ in dtype, so they make no array")
        return Preloaded(dataset, source, datasets.image_shape(fmt))
