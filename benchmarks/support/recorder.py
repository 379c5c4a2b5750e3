"""Recorder of benchmarks: their results, and the reasons for missing results."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks.gate import environment
from benchmarks.report import ratios, results
from benchmarks.report.headlines import terminal_report
from benchmarks.report.judging import REPEATED
from benchmarks.report.stored_runs import Setting
from benchmarks.report.tables import IN_MEMORY, tidy
from benchmarks.support.library import available_cores, formats
from benchmarks.support.workload import Workload
from omearrow_ds import Format, OMEArrowDSError

_FORMATS = {fmt.name: fmt for fmt in formats()}
_LABELS = {fmt.name: fmt.label for fmt in formats()}


def family_of(item: pytest.Item) -> dict[str, Any]:
    """Return the track, table or gated track, and the operation of a benchmark; empty for other tests."""
    for key, name in (("track", "track"), ("table", "limit"), ("gate", "gate")):
        marker = item.get_closest_marker(name)
        if marker is not None:
            return {key: marker.args[0], "operation": marker.args[1]}
    return {}


def has_row(item: pytest.Item) -> bool:
    """Whether an item is a benchmark of a track or of a table."""
    return bool(family_of(item).keys() & {"track", "table"})


def params_of(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a test by name."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def in_memory(item: pytest.Item) -> bool:
    """Whether a benchmark of a track uses preloaded pixels, which are the same for all formats."""
    return "track" in family_of(item) and params_of(item).get("access") == "preloaded"


def label_of(item: pytest.Item) -> dict[str, str]:
    """Return the name and the label of the format, or those of memory."""
    fmt = None if in_memory(item) else _format_of(item)
    return {"format": fmt.name, "label": fmt.label} if fmt else {"format": IN_MEMORY, "label": "in memory"}


def _format_of(item: pytest.Item) -> Format | None:
    return _FORMATS.get(params_of(item).get("format_name", ""))


def setting_now(config: pytest.Config, workload: Workload) -> Setting:
    """Return the machine, workload and profile of this run.

    Raises
    ------
    pytest.UsageError
        If the workload's images cannot be read.
    """
    # Memory benchmarks have their own collection, unless the options set a workload.
    has_own_workload = any(config.getoption(name) is not None for name in ("num_images", "images"))
    try:
        description = workload.describe() + ("" if has_own_workload else ", of memory on its own")
    except (OMEArrowDSError, ValueError) as error:
        raise pytest.UsageError(f"--images: {error}") from error
    own = [f"-{config.getoption(name)}" for name in ("model", "transform") if config.getoption(name, None)]
    key = workload.key() + "".join(own) + ("" if has_own_workload else "-default")
    return Setting(environment.fingerprint(available_cores()), key, description, config.getoption("profile"))


class Recorder:
    """Collects results and reasons for missing ones, and finally reports and writes them even after errors."""

    def __init__(self, config: pytest.Config, workload: Workload) -> None:
        self._config = config
        self._workload = workload
        self._finished: list[dict[str, Any]] = []
        self._absent: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the result of a benchmark, or the reason for its absence."""
        report = yield
        if not has_row(item) or report.when == "teardown" or REPEATED in item.stash:
            return report
        if not report.passed:
            self._absent.append(_absent(item, report, call))
        elif report.when == "call":
            stats = item.funcargs["benchmark"].stats  # type: ignore[attr-defined]
            self._finished.append(stats.as_dict(include_data=True))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Write the report after all other output."""
        try:
            yield
        finally:
            if self._finished or self._absent:
                terminalreporter.section("omearrow-ds benchmarks")
                width = max(80, terminalreporter._tw.fullwidth)  # noqa: SLF001  # Not public.
                terminalreporter.write_line(terminal_report(self._tables(), width, self._ratios()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Write the results after the report, so a failed write does not hide it."""
        try:
            yield
        finally:
            if self._finished or self._absent:
                self._write(session)

    def _tables(self) -> Any:
        return tidy(self._finished, self._absent, _LABELS)

    def _ratios(self) -> Any:
        return ratios.tidy_ratios(self._finished, self._absent, _LABELS)

    def _write(self, session: pytest.Session) -> None:
        folder = session.config.getoption("results").absolute()
        try:
            written = results.write_results(self._tables(), self._context(), folder, self._ratios())
        except OSError as error:
            pytest.exit(f"the results could not be written to {folder}: {error}", pytest.ExitCode.INTERNAL_ERROR)
        print(f"\nResults: {len(written)} files in {folder}")

    def _context(self) -> dict[str, Any]:
        config, workload = self._config, self._workload
        names = (
            "profile",
            "formats",
            "workload",
            "num_images",
            "image_shape",
            "seed",
            "images",
            "tile",
            "device",
            "model",
            "transform",
        )
        return {
            "workload": workload.describe(),
            "command": shlex.join(["pytest", *map(str, config.invocation_params.args)]),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "configuration": {name: config.getoption(name) for name in names} | {"workload_key": workload.key()},
            "setting": setting_now(config, workload).as_dict(),
            "versions": environment.versions(),
            "machine": environment.machine(),
            "git": environment.git(config.rootpath),
        }


def _absent(item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> dict[str, Any]:
    params, fmt = params_of(item), _format_of(item)
    missing = fmt is not None and fmt.missing_backend is not None
    error = call.excinfo.value if call.excinfo else None
    lines = str(getattr(error, "msg", error)).splitlines() or [""]
    reason = lines[0] if report.skipped else f"{type(error).__name__}: {lines[0]}"
    return {
        **family_of(item),
        **label_of(item),
        "params": {name: value for name, value in params.items() if name != "format_name"},
        "status": ("missing" if missing else "skipped") if report.skipped else "failed",
        "reason": reason,
        "name": item.name,
        "fullname": item.nodeid,
    }
