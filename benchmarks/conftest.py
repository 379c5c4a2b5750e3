"""Format x parameter fixtures, and what becomes of the results.

A benchmark carries ``@pytest.mark.track(number, operation)``, or ``@pytest.mark.limit(table, operation)`` where it is
measured against a reference or against memory, or ``@pytest.mark.gate(track, operation)`` where the gate measures it.
Its parameters, by name, are the columns of its table; ``format_name``, ``encoding``, ``engine`` and ``device`` are
given by this file, the others by ``parametrize``.
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
_BY_ENGINE = (("parquet_duck", "duckdb"),)  # read by this engine, beside the one that the source takes by itself
_BATCH_SIZES, _WORKERS = (1, 4, 16), (0, 2, 4)
_HOLDER = "arrow"  # from which pixels in memory come, where it is measured: they are the same from each
_HELD_BYTES = 2**30  # preloaded data sets kept for the next benchmarks


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, the comparison with stored runs, and the recorder where benchmarks are measured."""
    for option in ("model", "transform"):
        _imported(config, option)  # what is not there is said before anything is measured
    config.addinivalue_line("markers", "track(number, operation): the family and operation that a benchmark measures.")
    config.addinivalue_line("markers", "limit(table, operation): the table and operation of a ratio that is measured.")
    config.addinivalue_line("markers", "full: left out of the quick profile.")
    # A filter, since the versions that the gate compares may lack the warning. Workloads may have 12-bit pixels.
    config.addinivalue_line("filterwarnings", "ignore:.*pixels have at most 12 bits:UserWarning")
    config.addinivalue_line("markers", "gate(track, operation): what the gate measures; left out unless -m names it.")
    if config.get_verbosity() <= 0:  # its tables are hundreds of lines, of which ours, at the end, have the figures
        config.option.benchmark_quiet = True
    workload = _workload(config)
    comparison.register(config, partial(setting_now, config, workload))
    disabled = config.getoption("benchmark_disable") and not config.getoption("benchmark_enable")
    if not (disabled or config.getoption("benchmark_skip") or hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder(config, workload), "omearrow-ds-recorder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files without gated benchmarks to others: what they import may be missing in the gate's base."""
    asked = config.getoption("markexpr") == "gate" and collection_path.match("test_*.py")
    return True if asked and "mark.gate" not in collection_path.read_text(encoding="utf-8") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every benchmark all formats, in their order."""
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
    """Leave out other formats and what the quick profile leaves out, and measure a format's benchmarks together."""
    _refuse_empty_workload(config)
    _refuse_what_has_no_table(items)
    wanted = config.getoption("formats") or list(_FORMATS)
    installed = [name for name in wanted if _FORMATS[name].missing_backend is None] or wanted
    holder = _HOLDER if _HOLDER in installed else installed[0]
    quick, gate = config.getoption("profile") == "quick", "gate" in config.getoption("markexpr")
    left_out = [
        item
        for item in items
        if (family := family_of(item))
        and (
            params_of(item).get("format_name", wanted[0]) not in wanted
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
    # A preloaded data set serves its format's benchmarks, so a module's run format by format. Those that are pinned to
    # one core come last: a library that starts its threads meanwhile would have one for good.
    order = {name: place for place, name in enumerate(_FORMATS)}
    modules = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
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
    """Refuse before anything is measured what no result could be written of when all is."""
    for item in items:
        family = family_of(item)
        if "track" in family and not isinstance(family["track"], int):
            raise pytest.UsageError(f"{item.nodeid}: track {family['track']!r} is no number")
        if "table" in family and family["operation"] not in OPERATIONS.get(family["table"], {}):
            known = "benchmarks/report/targets.py names them"
            raise pytest.UsageError(f"{item.nodeid}: no table and operation {family}; {known}")


def _for_full(params: dict[str, Any], config: pytest.Config) -> bool:
    """Whether a benchmark is left to the full profile: starting workers takes longer than measuring them."""
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
    """Say in ``extra_info`` what a benchmark measures, and compare it with the other formats."""
    family, params = family_of(request.node), params_of(request.node)
    held = {name: value for name, value in params.items() if name != "format_name" and value is not None}
    benchmark.extra_info.update(**family, **label_of(request.node), **held)
    named = f"{'track ' if 'track' in family else ''}{' '.join(map(str, family.values()))}"
    benchmark.group = " ".join([named, *(f"{name}={value}" for name, value in held.items())])


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _loops_compiled() -> None:
    """Measure what a process comes to that makes samples for longer than a benchmark does."""
    as_after_some_epochs()


@pytest.fixture
def one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep every thread of this process on one core, where the system can, and torch to one thread."""
    request.getfixturevalue("one_thread")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    _pin({max(allowed)} if allowed else allowed)
    yield
    _pin(allowed)


def _pin(cores: set[int]) -> None:
    # A thread keeps what it inherited from the one that started it, so each is told.
    for thread in os.listdir("/proc/self/task") if cores else ():  # noqa: PTH208  # only the names
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@pytest.fixture(scope="session")
def profile(pytestconfig: pytest.Config) -> Profile:
    """Return how long to measure."""
    return next(known for known in PROFILES if known.name == pytestconfig.getoption("profile"))


@pytest.fixture
def compare(benchmark: BenchmarkFixture, profile: Profile) -> Compare:
    """Return what measures a benchmark and a reference in turns."""
    return Compare(benchmark, profile)


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of orders, transforms and weights."""
    return int(pytestconfig.getoption("seed"))


@pytest.fixture(scope="session")
def steps(pytestconfig: pytest.Config) -> int:
    """Return how many steps a loop of track 3 has."""
    return int(pytestconfig.getoption("steps"))


@pytest.fixture(scope="session")
def model(pytestconfig: pytest.Config) -> Any:
    """Return what makes the model of track 3, given the shape of a sample."""
    return _imported(pytestconfig, "model") or Embedder


def _imported(config: pytest.Config, option: str) -> Any:
    """Return what an option names as MODULE:NAME, or None where it is not given."""
    said = config.getoption(option)
    if said is None:
        return None
    module, _, name = said.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"--{option} {said}: {error}; it is MODULE:NAME of something importable") from error


@pytest.fixture(scope="session")
def workload(pytestconfig: pytest.Config) -> Workload:
    """Return what is measured."""
    return _workload(pytestconfig)


@pytest.fixture(scope="session")
def data(pytestconfig: pytest.Config, workload: Workload) -> Iterator[DataCache]:
    """Give the collections, made once."""
    with DataCache(pytestconfig.getoption("data").absolute(), workload) as cache:
        yield cache


@pytest.fixture(scope="session")
def cells(pytestconfig: pytest.Config, workload: Workload) -> Iterator[Cells]:
    """Give fields with objects and masks."""
    with Cells(pytestconfig.getoption("data").absolute(), workload) as made:
        yield made


@pytest.fixture(scope="session")
def images(data: DataCache) -> list[Any]:
    """Return all images of the workload."""
    return list(data.images())


@pytest.fixture
def scratch(data: DataCache) -> Iterator[Path]:
    """Give an empty folder on the disk of the data, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=data.folder) as folder:
        yield Path(folder)


@pytest.fixture
def fmt(format_name: str) -> Format:
    """Return the storage format; without its backend the benchmark is a row that says so."""
    found = _FORMATS[format_name]
    if found.missing_backend:
        pytest.skip(found.missing_backend)
    return found


class Datasets:
    """Data sets of the workload; preloaded ones are kept for the next benchmarks while they take little memory."""

    def __init__(self, data: DataCache, seed: int, augment: Any = None) -> None:
        """Take the transform of those that augment; where there is none, `Augment`."""
        self._augment = augment or Augment(seed)
        self._data = data
        self._known_shapes: Any = None  # the same in every format
        self._held: OrderedDict[tuple[str, str], OMEArrowDataset] = OrderedDict()

    def path(self, fmt: Format) -> Path:
        """Return the path of the collection in the format's default encoding."""
        return self._data.path(fmt, encodings(fmt)[0])

    def axes(self, fmt: Format) -> str:
        """Return the axes of a sample: ``"CYX"``, unless an image has several T or Z."""
        return "CYX" if (self._shapes(fmt)[:, [0, 2]] == 1).all() else "TCZYX"

    def image_shape(self, fmt: Format) -> str:
        """Write the shape that all images have, or `benchmarks.support.workload.DIFFERING`."""
        return common_size(self._shapes(fmt).tolist())

    def _shapes(self, fmt: Format) -> Any:
        if self._known_shapes is None:
            with open_images(self.path(fmt), fmt.name) as source:
                self._known_shapes = source.shapes
        return self._known_shapes

    def get(self, fmt: Format, access: str, transform: str = "normalize") -> OMEArrowDataset:
        """Return a data set of the format's default encoding, ``"preloaded"`` or ``"on_demand"``.

        The transform is ``"none"``, ``"normalize"``, or ``"augment"``, which normalizes too.
        """
        if access == "on_demand":
            return self._open(fmt, transform, preload=False)
        key = (fmt.name, transform)
        if key not in self._held:
            self._held[key] = self._open(fmt, transform, preload=True)
            while len(self._held) > 1 and sum(dataset.nbytes for dataset in self._held.values()) > _HELD_BYTES:
                self._held.popitem(last=False)
        return self._held[key]

    def batched(self, fmt: Format, access: str) -> OMEArrowDataset:
        """Return one whose samples make batches; skip where the images differ in shape."""
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
    """Return the maker of data sets."""
    return Datasets(data, seed, _imported(pytestconfig, "transform"))


@pytest.fixture(scope="module")
def preloaded(datasets: Datasets) -> Preloaded:
    """Return the collection in memory: whatever format it comes from, it is held in one way."""
    fmt = _FORMATS["arrow"]
    dataset = datasets.batched(fmt, "preloaded")
    with open_images(datasets.path(fmt), fmt.name) as source:
        if len(set(source.dtypes)) > 1:
            pytest.skip("the images differ in dtype, so they make no array")
        return Preloaded(dataset, source, datasets.image_shape(fmt))
