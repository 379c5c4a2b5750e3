"""A suite of four benchmarks, for tests of the results of its runs."""

from __future__ import annotations

from textwrap import dedent

from benchmarks.gate import environment
from benchmarks.report import baselines
from benchmarks.support import recorder  # noqa: F401  # here, as each run would import it anew
from omearrow_ds.resources import available_cores

PLUGIN = ("-p", "pytest_benchmark.plugin")

CONFTEST = dedent("""
    from functools import partial
    from benchmarks.report import comparison
    from benchmarks.support.recorder import setting_now
    from benchmarks.support.workload import Workload

    def pytest_addoption(parser):
        for name in ("--num-images", "--images", "--profile"):
            parser.addoption(name, default="quick" if name == "--profile" else None)

    def pytest_benchmark_generate_machine_info():
        return {}  # what pytest-benchmark finds takes a second, and is not used

    def pytest_configure(config):
        workload = Workload(int(config.getoption("num_images") or 10))
        comparison.register(config, partial(setting_now, config, workload))
""")
BENCHMARKS = dedent("""
    import os, time, pytest

    def test_one(benchmark):
        sleep_s = os.environ.pop("SLEEP_ONCE_S", "") or os.environ.get("SLEEP_S", "0.001")
        benchmark.pedantic(time.sleep, (float(sleep_s),), rounds=2)

    def test_two(benchmark):
        benchmark.pedantic(int, rounds=2)

    def test_three(benchmark):
        what = os.environ.get("THREE", "")
        if what == "missing":
            pytest.skip("no backend")
        if what == "interrupted":
            raise KeyboardInterrupt
        benchmark.pedantic(int, rounds=2)
        assert what != "fails"

    @pytest.fixture
    def broken():
        yield
        assert os.environ.get("THREE") != "errs"

    def test_four(benchmark, broken):
        benchmark.pedantic(int, rounds=2)
""")


_SAVED = {}  # Stored runs by their arguments: name and text of the file.


class Suite:
    """Four benchmarks in their own folder, run in this process."""

    def __init__(self, pytester, monkeypatch):
        self.pytester, self.monkeypatch = pytester, monkeypatch
        self.real = environment.fingerprint(available_cores())
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "CI"):  # set by the tests' own run
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # Otherwise each run would import all plugins again.
        monkeypatch.setattr(baselines, "FOLDER", pytester.path / "baseline")
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_some=BENCHMARKS)

    def run(self, *words, **env):
        with self.monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            done = self.pytester.runpytest_inprocess(*PLUGIN, "test_some.py", *words, no_reraise_ctrlc=True)
        self.output = done.stdout.str() + done.stderr.str()
        return done.ret

    def save(self, *words):
        """Store a successful run: the first call makes it, later calls write the same file."""
        if words not in _SAVED:
            assert self.run("--benchmark-autosave", *words) == 0, self.output
            (file,) = self.stored()
            _SAVED[words] = file.relative_to(self.pytester.path), file.read_text()
        name, text = _SAVED[words]
        (self.pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.pytester.path / name).write_text(text)

    def on(self, **changed):
        self.monkeypatch.setattr(environment, "fingerprint", lambda _: {**self.real, **changed})

    def stored(self):
        return sorted(self.pytester.path.glob(".benchmarks/*/*.json"), key=lambda path: path.stat().st_mtime_ns)

    def measured(self):
        return "passed" in self.output

    def table_says(self, word):
        return any(line.startswith("test_") and word in line for line in self.output.splitlines())
