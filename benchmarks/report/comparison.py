"""Comparison with a stored run of the same machine and workload, which fails if nothing can be compared.

pytest-benchmark 5.3 compares with the last file of any machine that has the same system and Python, stores runs only on
request, stores failed runs, and passes silently if it compared nothing. It loads the stored run when it is configured,
which is last. `Comparison` therefore removes ``--benchmark-compare`` from the options before, and passes the stored run
to its session after collection. pytest-benchmark still computes and prints the comparison.
"""

from __future__ import annotations

import argparse
import os
import shlex
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.logger import PytestBenchmarkWarning
from pytest_benchmark.session import BenchmarkSession, PerformanceRegression
from pytest_benchmark.storage.file import FileStorage
from pytest_benchmark.utils import get_tag

from benchmarks.report import baselines
from benchmarks.report.control import Control
from benchmarks.report.judging import Judge
from benchmarks.report.stored_runs import CONTROL, KEY, RunStorage, Setting, StoredRun, few

_NAME, _BENCHMARK = "omearrow-ds-comparison", "pytest-benchmark"
_MOST_NAMES = 5
_ENDS: dict[int, str] = {
    pytest.ExitCode.TESTS_FAILED: "a benchmark or test failed",
    pytest.ExitCode.INTERRUPTED: "the run was interrupted",
    pytest.ExitCode.NO_TESTS_COLLECTED: "no benchmark was selected",
}


def register(config: pytest.Config, setting: Callable[[], Setting]) -> None:
    """Register the comparison, except in workers of xdist, which do not measure.

    ``setting`` returns the machine, workload and profile of this run. If pytest-benchmark is already configured, this
    is ``pytest .``, which finds benchmarks/ late. conftest.py then refuses to compare or store.
    """
    if not (hasattr(config, "workerinput") or config.pluginmanager.has_plugin(_BENCHMARK)):
        config.pluginmanager.register(Comparison(config, setting), _NAME)


class Comparison:
    """Plugin that chooses the stored run to compare with, reports the comparison, and stores a run that passed.

    Raises
    ------
    pytest.UsageError
        If options of the comparison contradict each other.
    """

    def __init__(self, config: pytest.Config, setting: Callable[[], Setting]) -> None:
        _refuse_repeated(config)
        self._config = config
        self._setting_now = setting
        self._run_name: Any = config.getoption("benchmark_compare")  # [] is not at all, True is the last run
        config.option.benchmark_compare = []
        if isinstance(self._run_name, str):
            _refuse_no_run(self._run_name)
        self._baselines: list[StoredRun] = []
        self._notices: list[str] = []
        self._ends: list[str] = []
        self._save: str | None = None
        self._control = Control()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Find the named runs before collection."""
        session = self._session = self._benchmark_session()
        self._refuse_impossible(session)
        if not (self._run_name or session.save or session.autosave or session.json):
            return
        self._setting = self._setting_now()
        session.machine_id = self._setting.machine_id
        session.storage = self._storage = RunStorage(session.storage, session.machine_id)
        # A run is stored at the end, if it passed. With --benchmark-compare, a run is always stored.
        self._save = session.save or session.autosave or (get_tag() if self._run_name else None)
        session.save = session.autosave = None
        if self._run_name and self._run_name is not True:
            self._take_named()

    def _benchmark_session(self) -> BenchmarkSession:
        session = self._config.pluginmanager.get_plugin(_BENCHMARK)
        assert isinstance(session, BenchmarkSession)
        return session

    def _refuse_impossible(self, session: BenchmarkSession) -> None:
        if session.compare_fail and not self._run_name:
            raise pytest.UsageError("--benchmark-compare-fail: nothing is compared; add --benchmark-compare")
        if self._run_name and (session.disabled or session.skip):
            raise pytest.UsageError(
                "--benchmark-compare: --benchmark-disable, --benchmark-skip and xdist (-n) measure nothing; "
                "remove these options or --benchmark-compare"
            )
        if not isinstance(session.storage, FileStorage):
            raise pytest.UsageError("--benchmark-storage: expected a folder; pass file://PATH")

    def _take_last(self, names: set[str]) -> None:
        last = self._storage.last_like(self._setting, names)
        if last:
            self._baselines = [last]
            return
        own_runs, other_runs = self._storage.count()
        notice = f"{self._storage.path}: no stored run of these benchmarks on this machine, workload and profile"
        if own_runs or other_runs:
            notice += f" (other runs of this machine: {own_runs}; of other machines or library versions: {other_runs})"
        if self._session.compare_fail:
            raise pytest.UsageError(
                f"--benchmark-compare-fail: {notice}; store one by running with --benchmark-compare only"
            )
        self._notices += [notice, self._take_baseline()]

    def _take_baseline(self) -> str:
        """Compare the run with the baseline of this class of machine, and return a notice about it."""
        try:
            file, baseline = baselines.find(self._setting)
        except baselines.NoBaselineError as error:
            return str(error)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        self._config.pluginmanager.register(Judge(self._session, baseline, self._control), f"{_NAME}-judge")
        origin = ", ".join(f"{name} {value}" for name, value in baseline.origin.items())
        return f"compared with the baseline {file.name} ({origin})"

    def _take_named(self) -> None:
        self._baselines = self._storage.named(self._run_name)
        for run in self._baselines:
            named, now = f"--benchmark-compare={self._run_name}: {run.path}", self._setting.say_workload()
            if run.setting is None:
                raise pytest.UsageError(f"{named}: an older version stored it without its workload; expected {now}")
            if not run.setting.same_workload(self._setting):
                raise pytest.UsageError(f"{named}: its workload is {run.setting.say_workload()}; expected {now}")
            differences = "; ".join(self._setting.machine_differences(run.setting))
            if differences and self._session.compare_fail:
                raise pytest.UsageError(
                    f"{named}: another machine or version ({differences}) cannot show a regression; "
                    "remove --benchmark-compare-fail, or name a run of this machine"
                )
            if differences:
                self._notices.append(f"{run.path}: ANOTHER MACHINE or version ({differences})")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Choose the stored run for the collected benchmarks, unless collection failed."""
        if session.items and not session.testsfailed and self._run_name:
            names = {item.nodeid for item in session.items}
            if self._run_name is True:
                self._take_last(names)
            self._refuse_disjoint(names)
        self._session.compared_mapping = {run.path: run.benchmarks for run in self._baselines}

    def pytest_runtest_logstart(self) -> None:
        """Sample the speed of the machine before each benchmark."""
        if self._run_name:
            self._control.sample()

    def pytest_report_collectionfinish(self) -> list[str]:
        """Return the stored runs to compare with, and the notices."""
        lines = [f"comparison: with {self._said_baselines()} in {self._storage.path}"] if self._baselines else []
        return lines + [f"comparison: {notice}" for notice in self._notices]

    def _refuse_disjoint(self, names: set[str]) -> None:
        if self._baselines and not names & self._known():
            raise pytest.UsageError(
                f"--benchmark-compare: this run measures no benchmark of {self._said_baselines()}; name another run "
                "with --benchmark-compare=NUM, or pass --benchmark-compare for the last run with these benchmarks"
            )

    def _known(self) -> set[str]:
        return {name for run in self._baselines for name in run.benchmarks}

    def _said_baselines(self) -> str:
        return ", ".join(str(run.path) for run in self._baselines)

    def _measured(self) -> set[str]:
        return {bench.fullname for bench in self._session.benchmarks if bench and not bench.has_error}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail if benchmarks regressed or none was compared, and store the run otherwise.

        pytest-benchmark has computed the comparison before, and prints it later.
        """
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            # pytest-benchmark warns about the benchmark that Ctrl-C ended. As an error it would hide the report.
            warnings.filterwarnings("ignore", "Benchmark fixture was not used", PytestBenchmarkWarning)
        failed = session.exitstatus != pytest.ExitCode.OK
        reason = _ENDS.get(session.exitstatus, "the run failed") if failed else ""
        if self._session.performance_regressions:
            reason = f"{len(self._session.performance_regressions)} regressed"
        elif not failed and self._baselines and not self._measured() & self._known():
            reason = f"this run measured no benchmark of {self._said_baselines()}"
            self._ends.append(f"ERROR: --benchmark-compare: {reason}")
        if reason and not failed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._save:
            self._store(session, reason or ("" if self._measured() else "no benchmark was measured"))

    def _store(self, session: pytest.Session, why_not: str) -> None:
        if why_not:
            self._ends.append(f"Not stored for later comparisons: {why_not}")
            return
        self._session.save, self._session.json = self._save, None  # the JSON of --benchmark-json is written
        try:
            self._session.handle_saving()
        except OSError as error:
            self._ends.append(f"ERROR: storing this run failed: {error}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self._ends.append(f"Stored: {self._storage.saved}")

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Add machine, workload and controls to the stored run."""
        output_json[KEY] = self._setting.as_dict()
        output_json[CONTROL] = self._control.result()

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Print notices above the table, and the benchmarks that were not compared below it."""
        for notice in self._notices:
            terminalreporter.write_line(f"Comparison: {notice}", yellow=True)
        try:
            yield
        except PerformanceRegression:
            pass  # pytest-benchmark has listed the regressions, and the exit status is set.
        finally:
            for line in [*self._uncompared(), *self._ends]:
                terminalreporter.write_line(line, red=line.startswith("ERROR"))

    def _uncompared(self) -> list[str]:
        if not self._baselines:
            return []
        new, gone = self._measured() - self._known(), self._known() - self._measured()
        pairs = (("New, not in the stored run", new), ("Missing, only in the stored run", gone))
        return [f"{heading}: {len(names)}: {few(sorted(names), _MOST_NAMES)}" for heading, names in pairs if names]


def _refuse_repeated(config: pytest.Config) -> None:
    # The last of repeated options wins, so some expressions for a failure would be ignored.
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, fromfile_prefix_chars="@")
    parser.add_argument("--benchmark-compare", nargs="?", action="append")
    parser.add_argument("--benchmark-compare-fail", nargs="+", action="append")
    words = [*config.getini("addopts"), *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    options, _ = parser.parse_known_args([*words, *map(str, config.invocation_params.args)])
    for option, uses in (("", options.benchmark_compare), ("-fail", options.benchmark_compare_fail)):
        if uses and len(uses) > 1:
            hint = ", followed by all expressions: --benchmark-compare-fail min:5% median:10%" if option else ""
            raise pytest.UsageError(
                f"--benchmark-compare{option}: repeated {len(uses)} times, including PYTEST_ADDOPTS and addopts; "
                f"set it once{hint}"
            )


def _refuse_no_run(value: str) -> None:
    path = Path(value.partition("::")[0])
    if not value or path.is_dir() or path.suffix == ".py":
        raise pytest.UsageError(
            f"--benchmark-compare: {value!r} is not a stored run; put paths before the options, as in "
            "`pytest benchmarks/ --benchmark-compare`, and name a stored run with --benchmark-compare=NUM"
        )
