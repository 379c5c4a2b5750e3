"""Format x parameter fixtures, and what becomes of the results.

A benchmark carries ``@pytest.mark.track(number, operation)``. Its parameters, by name, are the columns of the track's
table; ``format_name``, ``encoding`` and ``device`` are given by this file, the others by ``parametrize``.
"""

from __future__ import annotations

import shlex
import tempfile
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import environment, results
from benchmarks.data import DataCache, encodings
from benchmarks.transforms import Augment
from benchmarks.workload import PROFILES, Profile, Workload
from omearrow_ds import FORMATS, Format, OMEArrowDataset, OMEArrowDSError, open_images

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

_FORMATS = {fmt.name: fmt for fmt in FORMATS}
_MEMORY = {"format": "memory", "label": "in memory"}
_HELD_BYTES = 2**30  # preloaded data sets kept for the next benchmarks


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the recorder where benchmarks are measured."""
    config.addinivalue_line("markers", "track(number, operation): the family and operation that a benchmark measures.")
    disabled = config.getoption("benchmark_disable") and not config.getoption("benchmark_enable")
    if not (disabled or config.getoption("benchmark_skip") or hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder(config), "omearrow-ds-recorder")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every benchmark all formats, in their order."""
    if "encoding" in metafunc.fixturenames:
        pairs = [(fmt.name, encoding) for fmt in FORMATS for encoding in encodings(fmt)]
        metafunc.parametrize(("format_name", "encoding"), pairs, ids=["-".join(pair) for pair in pairs])
    elif "format_name" in metafunc.fixturenames:
        metafunc.parametrize("format_name", list(_FORMATS))
    fixed = {name for mark in metafunc.definition.iter_markers("parametrize") for name in mark.args[0].split(",")}
    if "device" in metafunc.fixturenames and "device" not in fixed:
        metafunc.parametrize("device", [metafunc.config.getoption("device")])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other formats and what the quick profile leaves out, and measure a format's benchmarks together."""
    _refuse_empty_workload(config)
    wanted = config.getoption("formats") or list(_FORMATS)
    quick = config.getoption("profile") == "quick"
    left_out = [
        item
        for item in items
        if item.get_closest_marker("track")
        and (_params(item).get("format_name", wanted[0]) not in wanted or (quick and _for_full(_params(item))))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    # A preloaded data set serves its format's benchmarks, so a module's run format by format.
    order = {name: place for place, name in enumerate(_FORMATS)}
    modules = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (modules[item.path], order.get(_params(item).get("format_name", ""), len(order))))


def _refuse_empty_workload(config: pytest.Config) -> None:
    if config.getoption("images") is None:
        return
    try:
        next(_workload(config).images())
    except (OMEArrowDSError, ValueError) as error:
        raise pytest.UsageError(f"--images: {error}") from error


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _for_full(params: dict[str, Any]) -> bool:
    """Whether a benchmark is left to the full profile: starting workers takes longer than measuring them."""
    workers, batch_size = params.get("workers", 0), params.get("batch_size", 16)
    return bool(workers > 2 or (workers > 0 and batch_size != 16))


def _workload(config: pytest.Config) -> Workload:
    count, folder = config.getoption("num_images"), config.getoption("images")
    if folder is not None:
        return Workload(count, folder=folder.resolve(), tile=config.getoption("tile"))
    return Workload(count or 1000, config.getoption("image_shape"), seed=config.getoption("seed"))


class Recorder:
    """Collects what finished and what did not; at the end reports it and writes it, whatever else went wrong."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._finished: list[dict[str, Any]] = []
        self._absent: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep a finished benchmark's record, or the reason why there is none."""
        report = yield
        if item.get_closest_marker("track") is None or report.when == "teardown":
            return report
        if not report.passed:
            self._absent.append(_absent(item, report, call))
        elif report.when == "call":
            stats = item.funcargs["benchmark"].stats  # type: ignore[attr-defined]
            self._finished.append(stats.as_dict(include_data=True))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Show the report below everything else."""
        try:
            yield
        finally:
            if self._finished or self._absent:
                terminalreporter.section("omearrow-ds benchmarks")
                width = max(80, terminalreporter._tw.fullwidth)  # noqa: SLF001  # no public name
                terminalreporter.write_line(results.terminal_report(self._tables(), width))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Write the results once all is shown, so that a failure to write hides nothing."""
        try:
            yield
        finally:
            if self._finished or self._absent:
                self._write(session)

    def _tables(self) -> Any:
        return results.tidy(self._finished, self._absent)

    def _write(self, session: pytest.Session) -> None:
        folder = session.config.getoption("results").absolute()
        try:
            written = results.write_results(self._tables(), self._context(), folder)
        except OSError as error:
            pytest.exit(f"the results could not be written to {folder}: {error}", pytest.ExitCode.INTERNAL_ERROR)
        print(f"\nResults: {len(written)} files in {folder}")

    def _context(self) -> dict[str, Any]:
        config, workload = self._config, _workload(self._config)
        names = ("profile", "formats", "num_images", "image_shape", "seed", "images", "tile", "device")
        return {
            "workload": workload.describe(),
            "command": shlex.join(["pytest", *map(str, config.invocation_params.args)]),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "configuration": {name: config.getoption(name) for name in names} | {"workload_key": workload.key()},
            "versions": environment.versions(),
            "machine": environment.machine(),
            "git": environment.git(config.rootpath),
        }


def _absent(item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> dict[str, Any]:
    params = _params(item)
    fmt = _FORMATS.get(params.get("format_name", ""))
    number, operation = _track(item)
    missing = fmt is not None and fmt.missing_backend is not None
    error = call.excinfo.value if call.excinfo else None
    lines = str(getattr(error, "msg", error)).splitlines() or [""]
    reason = lines[0] if report.skipped else f"{type(error).__name__}: {lines[0]}"
    return {
        "track": number,
        "operation": operation,
        **({"format": fmt.name, "label": fmt.label} if fmt else _MEMORY),
        "params": {name: value for name, value in params.items() if name != "format_name"},
        "status": ("missing" if missing else "skipped") if report.skipped else "failed",
        "reason": reason,
        "name": item.name,
        "fullname": item.nodeid,
    }


def _track(item: pytest.Item) -> tuple[int, str]:
    marker = item.get_closest_marker("track")
    assert marker is not None
    number, operation = marker.args
    return number, operation


@pytest.fixture(autouse=True)
def _described(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> None:
    """Say in ``extra_info`` what a benchmark measures, and compare it with the other formats."""
    params, (number, operation) = _params(request.node), _track(request.node)
    fmt = _FORMATS.get(params.get("format_name", ""))
    of_format = {"format": fmt.name, "label": fmt.label} if fmt else _MEMORY
    held = {name: value for name, value in params.items() if name != "format_name"}
    benchmark.extra_info.update(track=number, operation=operation, **of_format, **held)
    benchmark.group = " ".join([f"track {number} {operation}", *(f"{name}={value}" for name, value in held.items())])


@pytest.fixture(scope="session")
def profile(pytestconfig: pytest.Config) -> Profile:
    """Return how long to measure."""
    return next(known for known in PROFILES if known.name == pytestconfig.getoption("profile"))


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of orders, transforms and weights."""
    return int(pytestconfig.getoption("seed"))


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
def images(workload: Workload) -> list[Any]:
    """Return all images of the workload."""
    return list(workload.images())


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
    """Data sets of the workload; preloaded ones are kept for the next benchmarks while they take little memory.

    Parameters
    ----------
    data
        Where the collections are.
    seed
        Of the transform.
    """

    def __init__(self, data: DataCache, seed: int) -> None:
        self._data = data
        self._seed = seed
        self._axes: str | None = None
        self._held: OrderedDict[tuple[str, str], OMEArrowDataset] = OrderedDict()

    def path(self, fmt: Format) -> Path:
        """Return the path of the collection in the format's default encoding."""
        return self._data.path(fmt, encodings(fmt)[0])

    def axes(self, fmt: Format) -> str:
        """Return the axes of a sample: ``"CYX"``, unless an image has several T or Z."""
        if self._axes is None:
            with open_images(self.path(fmt), fmt.name) as source:
                self._axes = "CYX" if (source.shapes[:, [0, 2]] == 1).all() else "TCZYX"
        return self._axes

    def get(self, fmt: Format, access: str, transform: str = "normalize") -> OMEArrowDataset:
        """Return a data set of the format's default encoding.

        Parameters
        ----------
        fmt
            Storage format.
        access
            ``"preloaded"`` or ``"on_demand"``.
        transform
            ``"none"``, ``"normalize"``, or ``"augment"``, which normalises too.
        """
        if access == "on_demand":
            return self._open(fmt, transform, preload=False)
        key = (fmt.name, transform)
        if key not in self._held:
            self._held[key] = self._open(fmt, transform, preload=True)
            while len(self._held) > 1 and sum(dataset.nbytes for dataset in self._held.values()) > _HELD_BYTES:
                self._held.popitem(last=False)
        return self._held[key]

    def _open(self, fmt: Format, transform: str, *, preload: bool) -> OMEArrowDataset:
        return OMEArrowDataset(
            self.path(fmt),
            fmt.name,
            preload=preload,
            axes=self.axes(fmt),
            normalize=transform != "none",
            transform=Augment(self._seed) if transform == "augment" else None,
        )


@pytest.fixture(scope="session")
def datasets(data: DataCache, seed: int) -> Datasets:
    """Return the maker of data sets."""
    return Datasets(data, seed)
