"""Comparison of a run with a baseline: benchmarks beyond their limits are repeated, and fail the run in CI."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from pytest_benchmark.session import BenchmarkSession

from benchmarks.report.baselines import Baseline, Judgement, figure_of
from benchmarks.report.control import Control

REPEATED = pytest.StashKey[bool]()  # Marks an item that is repeated: the run keeps its first figures.
_REPEATS = 2


class Judge:
    """Plugin that compares a run with a baseline and controls. It is registered only if a baseline fits."""

    def __init__(self, session: BenchmarkSession, baseline: Baseline, control: Control) -> None:
        self._session = session
        self._baseline = baseline
        self._control = control
        self._figures: dict[str, float] = {}
        self._repeats = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Take the figure of a benchmark. After the last one, repeat those beyond their limits up to twice.

        pytest runs the items that are appended to its list. A short disturbance does not last until the repetition.
        """
        done = yield
        self._take(item)
        items = item.session.items
        if item is items[-1] and self._repeats < _REPEATS and self._figures:
            self._repeats += 1
            judgement = self._judge()
            over = set() if judgement.unjudged else set(judgement.over)
            again = [repeated for repeated in dict.fromkeys(items) if repeated.nodeid in over]
            for repeated in again:
                repeated.stash[REPEATED] = True
            items.extend(again)
        return done

    def _take(self, item: pytest.Item) -> None:
        benchmarks = self._session.benchmarks
        if not benchmarks or benchmarks[-1].fullname != item.nodeid or benchmarks[-1].has_error:
            return
        last = benchmarks.pop() if REPEATED in item.stash else benchmarks[-1]
        if figure := figure_of(last.extra_info, last.stats.min):
            self._figures[item.nodeid] = min(figure[1], self._figures.get(item.nodeid, figure[1]))

    def _judge(self) -> Judgement:
        return self._baseline.judge(self._figures, self._control.result())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail in CI. On a desktop, other programs may be the cause, so there the result is only printed."""
        if session.exitstatus == pytest.ExitCode.OK and self._figures and self._judge().slower and _in_ci():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Print the comparison below the tables."""
        try:
            yield
        finally:
            if self._figures:
                judgement = self._judge()
                first = "slower than its limits" if judgement.slower else "within its limits"
                first = "compared, not judged" if judgement.unjudged else first
                error = "ERROR: " if judgement.slower and _in_ci() else ""
                terminalreporter.write_line(f"{error}Baseline: {first}", red=judgement.slower)
                for line in judgement.lines():
                    terminalreporter.write_line(f"  {line}")


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
