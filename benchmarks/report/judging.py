"""Judging a run by a baseline: what is beyond its limit is measured again, and fails the run in CI if it stays so."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from pytest_benchmark.session import BenchmarkSession

from benchmarks.report.baselines import Baseline, Judgement, figure_of
from benchmarks.report.control import Control

REPEATED = pytest.StashKey[bool]()  # of an item that is measured again: its first figures are the run's
_REPEATS = 2


class Judge:
    """A plugin that is registered once it is known that a run is judged, by a baseline and with a control beside it."""

    def __init__(self, session: BenchmarkSession, baseline: Baseline, control: Control) -> None:
        self._session = session
        self._baseline = baseline
        self._control = control
        self._figures: dict[str, float] = {}
        self._repeats = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Take the figure of a benchmark; after the last, have those measured again that are beyond their limits.

        pytest goes on with what is added to its list. What a moment slowed has its second and third chance in others.
        """
        done = yield
        self._take(item)
        items = item.session.items
        if item is items[-1] and self._repeats < _REPEATS and self._figures:
            self._repeats += 1
            judgement = self._judge()
            over = set() if judgement.unjudged else set(judgement.over)
            again = [each for each in dict.fromkeys(items) if each.nodeid in over]
            for each in again:
                each.stash[REPEATED] = True
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
        return self._baseline.judge(self._figures, self._control.told())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail in CI: elsewhere it is said, as other programs of a desk may be what is slow."""
        if session.exitstatus == pytest.ExitCode.OK and self._figures and self._judge().slower and _in_ci():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Say how the run compares, below the tables."""
        try:
            yield
        finally:
            if self._figures:
                judgement = self._judge()
                first = "slower than the baseline allows" if judgement.slower else "within the baseline's limits"
                first = "compared, not judged" if judgement.unjudged else first
                error = "ERROR: " if judgement.slower and _in_ci() else ""
                terminalreporter.write_line(f"{error}Baseline: {first}", red=judgement.slower)
                for line in judgement.lines():
                    terminalreporter.write_line(f"  {line}")


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
