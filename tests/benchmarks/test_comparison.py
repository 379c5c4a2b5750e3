"""Comparison with a stored run: another machine or workload is reported, and an empty comparison does not pass."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from pytest_benchmark.storage.file import FileStorage

from benchmarks.gate import environment
from benchmarks.report.stored_runs import KEY, RunStorage, Setting
from tests.support.small_suite import BENCHMARKS, Suite

pytest_plugins = ["pytester"]

USAGE, FAILED, OK = pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK
SAVE, COMPARE = "--benchmark-autosave", "--benchmark-compare"
FAIL = "--benchmark-compare-fail=min:50%"


@pytest.fixture
def suite(pytester, monkeypatch):
    return Suite(pytester, monkeypatch)


def test_first_run_is_stored_and_the_second_compared_with_it(suite):
    assert suite.run(SAVE, COMPARE) == OK
    assert "no stored run of these benchmarks on this machine, workload and profile" in suite.output
    assert "Warning" not in suite.output
    (first,) = suite.stored()
    setting = json.loads(first.read_text())[KEY]
    assert setting["description"].startswith("10 images of 100 x 100 uint16")
    assert setting["profile"] == "quick"
    assert {"CPU", "CPU flags", "cores", "Python", "torch", "numpy"} <= setting["machine"].keys()

    assert suite.run(SAVE, COMPARE, "--benchmark-compare-fail=min:100000%") == OK
    assert f"comparison: with {first.parent.name}/{first.name}" in suite.output
    assert suite.table_says("(NOW)")
    assert [path.name[:5] for path in suite.stored()] == ["0001_", "0002_"]

    # The latest run has the highest number, independent of the order of names.
    second = suite.stored()[1]
    second.rename(second.with_name(second.name.replace("0002_", "10000_")))
    assert suite.run(SAVE, COMPARE) == OK
    assert f"comparison: with {first.parent.name}/10000_" in suite.output
    assert suite.stored()[-1].name.startswith("10001_")


def test_comparing_alone_stores_the_run_and_the_next_is_compared_with_it(suite):
    assert suite.run(COMPARE) == OK
    assert "no stored run of these benchmarks on this machine" in suite.output
    (first,) = suite.stored()
    assert f"Stored: {first}\n" in suite.output
    assert suite.run(COMPARE, FAIL.replace("50", "100000")) == OK
    assert f"comparison: with {first.parent.name}/{first.name}" in suite.output
    assert suite.table_says("(NOW)")
    assert len(suite.stored()) == 2


def test_another_machine_is_never_taken_by_itself(suite):
    suite.on(torch="1.0")
    assert suite.run(SAVE) == OK
    suite.on()
    assert suite.run(COMPARE, FAIL) == USAGE
    assert "of other machines or library versions: 1" in suite.output
    assert not suite.table_says("(NOW)")
    assert not suite.measured()

    # Neither a run copied into this machine's folder nor one in the folder of all machines is used.
    (stored,) = suite.stored()
    mine = Setting(suite.real, "", "", "").machine_id
    for folder in (stored.parent.with_name(mine), stored.parents[1]):
        folder.mkdir(exist_ok=True)
        (folder / stored.name).write_text(stored.read_text())
    assert suite.run(COMPARE) == OK
    assert not suite.table_says("(NOW)")


def test_another_machine_that_is_named_is_shown_with_what_differs(suite):
    flags = suite.real["CPU flags"]
    suite.on(**{"CPU": "Abacus 9", "CPU flags": [*flags, "beads"], "numpy": "1.0"})
    assert suite.run(SAVE) == OK
    suite.on()
    (stored,) = suite.stored()
    for name in ("--benchmark-compare=Abacus*/0001", f"--benchmark-compare={stored}"):
        assert suite.run(name) == OK
        notice, table = suite.output.index("ANOTHER MACHINE"), suite.output.index("Name (time in")
        assert notice < table
        assert f"CPU Abacus 9, now {suite.real['CPU']}" in suite.output
        assert "CPU flags: no more beads" in suite.output
        assert "numpy 1.0, now" in suite.output
        assert "torch " not in suite.output[notice:table]
        assert suite.table_says("(NOW)")
        assert suite.run(name, FAIL) == USAGE
        assert "cannot show a regression" in suite.output


def test_clock_of_the_moment_is_no_other_machine():
    first, second = environment.fingerprint(2), environment.fingerprint(2)
    assert first == second
    assert not any("hz" in name.lower() or "clock" in name.lower() for name in first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((FAIL,), "--benchmark-compare-fail: nothing is compared; add --benchmark-compare"),
        ((COMPARE, FAIL), "store one by running with --benchmark-compare only"),
        ((COMPARE, "--benchmark-disable"), "measure nothing; remove these options"),
        ((COMPARE, "--benchmark-skip"), "measure nothing; remove these options"),
        ((COMPARE, "-p", "xdist.plugin", "-n", "1"), "measure nothing; remove these options"),
        ((COMPARE, FAIL, FAIL), "--benchmark-compare-fail: repeated 2 times"),
        ((COMPARE, "--benchmark-compare=0001"), "--benchmark-compare: repeated 2 times"),
        ((COMPARE, "."), "'.' is not a stored run"),
        ((COMPARE, "test_some.py::test_one"), "'test_some.py::test_one' is not a stored run"),
        (("--benchmark-compare=",), "'' is not a stored run"),
        (("--benchmark-compare=0007",), "no such run"),
        (("--benchmark-compare=a/b/c",), "acceptable glob"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_compared_is_refused_before_measuring(words, message, suite):
    assert suite.run(*words) == USAGE
    assert message in suite.output
    assert not suite.measured()


def test_option_of_the_environment_and_of_the_command_line_is_given_twice(suite):
    assert suite.run(COMPARE, FAIL, PYTEST_ADDOPTS="--benchmark-compare-fail=mean:5%") == USAGE
    assert "--benchmark-compare-fail: repeated 2 times" in suite.output


def test_several_expressions_after_one_option_are_one(suite):
    suite.save()
    words = (COMPARE, "--benchmark-compare-fail", "max:100000%", "min:0.05", "-v")
    assert suite.run(*words, SLEEP_S="0.1") == FAILED
    assert "Field 'min' has failed" in suite.output


def test_names_without_overlap_are_no_comparison_and_an_error_where_one_is_needed(suite):
    suite.save("-k", "test_one")
    none = "no stored run of these benchmarks on this machine"
    for words, message in (
        ((COMPARE, FAIL), none),
        (("--benchmark-compare=0001",), "this run measures no benchmark of"),
    ):
        assert suite.run(*words, "-k", "test_two") == USAGE
        assert message in suite.output
        assert not suite.measured()
    assert suite.run(COMPARE, "-k", "test_two") == OK
    assert none in suite.output
    assert "other runs of this machine: 1" in suite.output


def test_a_part_that_was_run_since_is_not_what_a_whole_run_is_compared_with(suite):
    assert suite.run(COMPARE) == OK
    (whole,) = suite.stored()
    assert suite.run(COMPARE, "-k", "test_one") == OK
    assert suite.run(COMPARE) == OK
    assert f"comparison: with {whole.parent.name}/{whole.name}" in suite.output
    assert "New, not in" not in suite.output
    assert suite.run(COMPARE, "-k", "test_one or test_two") == OK
    assert f"comparison: with {whole.parent.name}/0003_" in suite.output


def test_all_that_overlaps_being_skipped_is_an_error(suite):
    suite.save("-k", "test_three")
    assert suite.run(COMPARE, FAIL, SAVE, THREE="missing") == FAILED
    assert "this run measured no benchmark of" in suite.output
    assert len(suite.stored()) == 1


@pytest.mark.parametrize(
    ("three", "why", "status"),
    [
        ("fails", "a benchmark or test failed", FAILED),
        ("errs", "a benchmark or test failed", FAILED),
        ("interrupted", "the run was interrupted", pytest.ExitCode.INTERRUPTED),
    ],
)
@pytest.mark.parametrize("option", [SAVE, "--benchmark-save=mine"])
@pytest.mark.share(2, "three", "option")
def test_run_that_failed_is_not_stored(three, why, status, option, suite):
    assert suite.run(option, THREE=three) == status
    assert f"Not stored for later comparisons: {why}" in suite.output
    assert not suite.stored()


@pytest.mark.parametrize("silent", [(), ("--benchmark-quiet",), ("--no-summary",)], ids=" ".join)
def test_regression_fails_without_a_traceback_and_is_not_stored(silent, suite):
    suite.save("-k", "test_one")
    assert suite.run(SAVE, COMPARE, FAIL, *silent, "-k", "test_one", SLEEP_S="0.05") == FAILED
    assert "Traceback" not in suite.output
    assert "INTERNALERROR" not in suite.output
    assert "--no-summary" in silent or "Performance has regressed" in suite.output
    assert "--no-summary" in silent or "for later comparisons: 1 regressed" in suite.output
    assert len(suite.stored()) == 1


@pytest.mark.parametrize("words", [("--benchmark-disable",), ("-k", "nothing"), ("--collect-only",)], ids=" ".join)
def test_run_that_measured_nothing_is_not_stored(words, suite):
    assert suite.run(SAVE, *words) in (OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "Not stored" in suite.output
    assert not suite.stored()


def test_part_of_a_run_is_stored_and_what_is_new_and_gone_is_named(suite):
    suite.save("-k", "test_one or test_two")
    assert suite.run(SAVE, COMPARE, "-k", "not test_two") == OK
    assert "New, not in the stored run: 2: test_some.py::test_four, test_some.py::test_three\n" in suite.output
    assert "Missing, only in the stored run: 1: test_some.py::test_two\n" in suite.output
    assert suite.output.index("Name (time in") < suite.output.index("New, not in")
    assert len(suite.stored()) == 2


def test_long_lists_are_cut_with_a_count(suite):
    suite.save("-k", "test_two")
    suite.pytester.makepyfile(test_some=BENCHMARKS + "test_two_1 = test_two_2 = test_two_3 = test_one\n")
    assert suite.run(COMPARE) == OK
    assert "New, not in the stored run: 6: " in suite.output
    assert " and 1 more" in suite.output


@pytest.mark.parametrize(
    "words",
    [pytest.param(("--num-images", "11"), marks=pytest.mark.slow), ("--num-images", "10"), ("--profile", "full")],
    ids=" ".join,
)
def test_other_workload_is_never_compared_with(words, suite):
    """Ten images by request are another workload than ten by default: benchmarks of memory differ."""
    suite.save()
    assert suite.run(SAVE, *words) == OK
    first, second = suite.stored()
    for options, mine, other in (((), first, "0002"), (words, second, "0001")):
        assert suite.run(COMPARE, *options) == OK
        assert f"comparison: with {mine.parent.name}/{mine.name}" in suite.output
        suite.stored()[-1].unlink()
        assert suite.run(f"--benchmark-compare={other}", *options) == USAGE
        assert "its workload is " in suite.output
        assert suite.output.count(" images of 100 x 100 uint16, synthetic, seed 42") == 2
        assert not suite.measured()


def test_run_of_an_older_version_is_another_workload(suite):
    suite.save()
    (stored,) = suite.stored()
    content = json.loads(stored.read_text())
    del content[KEY]
    stored.write_text(json.dumps(content))
    assert suite.run(COMPARE) == OK
    assert "other runs of this machine: 1" in suite.output
    assert suite.run("--benchmark-compare=0001") == USAGE
    assert "an older version stored it without its workload" in suite.output


@pytest.mark.parametrize("damage", ["truncated", "empty", "a list", "no number", "no figures"])
@pytest.mark.parametrize("compare", [COMPARE, "--benchmark-compare=0001"])
@pytest.mark.share(2, "damage", "compare")
def test_damaged_run_is_an_error(damage, compare, suite):
    suite.save()
    (stored,) = suite.stored()
    text = stored.read_text()
    content = json.loads(text)
    if damage == "no number":
        content["benchmarks"][0]["stats"]["min"] = float("nan")
    if damage == "no figures":
        content["benchmarks"][0]["stats"].pop("rounds")
    contents = {"truncated": text[: len(text) // 2], "empty": "", "a list": "[]"}
    stored.write_text(contents.get(damage, json.dumps(content)))
    assert suite.run(compare) == USAGE
    assert f"the stored run {stored} is damaged" in suite.output.replace("\n", "")
    assert "delete it" in suite.output


def test_run_that_cannot_be_stored_is_an_error(suite):
    suite.pytester.mkdir(".benchmarks")
    (suite.pytester.path / ".benchmarks" / Setting(suite.real, "", "", "").machine_id).write_text("a file")
    assert suite.run(SAVE) == FAILED
    assert "ERROR: storing this run failed" in suite.output


def test_runs_at_once_get_numbers_of_their_own(tmp_path):
    def save(number):
        storage = RunStorage(FileStorage(tmp_path, logger=None), "here")
        storage.save({"number": number}, "same")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(24)))
    files = sorted((tmp_path / "here").glob("*.json"))
    assert [file.name for file in files] == [f"{number:04}_same.json" for number in range(1, 25)]
    assert {json.loads(file.read_text())["number"] for file in files} == set(range(24))
    assert not list((tmp_path / "here").glob("*.partial"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((COMPARE, "benchmarks/"), "as written, 'benchmarks/' is taken for the stored run"),
        (("tests", FAIL), "`pytest benchmarks/ --benchmark-compare-fail`"),
        pytest.param((".", SAVE), "`pytest benchmarks/ --benchmark-autosave`", marks=pytest.mark.slow),
        (
            ("benchmarks", COMPARE, FAIL, "--benchmark-storage=/dev/null/none"),
            "store one by running with --benchmark-compare only",
        ),
        (("benchmarks", COMPARE, "-p", "no:benchmark"), "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_suite_of_this_repository_is_guarded(words, message, runs):
    done = runs.run(*words)
    assert done.returncode == USAGE, done.stdout
    assert message in done.stdout
