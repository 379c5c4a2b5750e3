"""The workflows: their commands can be run by hand, versions are pinned, and the gate's result reaches GitHub."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
DEPENDABOT = ROOT / ".github" / "dependabot.yml"
PINS = [ROOT / "constraints.txt", ROOT / "constraints-lowest.txt"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

# Jobs with more than read permission: they identify themselves to PyPI and to Pages.
WRITING = {"publish": {"id-token": "write"}, "pages": {"pages": "write", "id-token": "write"}}

workflows = pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=WORKFLOWS)

# Replaces `python -m benchmarks.gate`: records its arguments, writes the report and exits with $STATUS.
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$@" >arguments
echo run >>runs
if [[ -n ${AGAIN:-} && $(wc -l <runs) -gt 1 ]]; then STATUS=$AGAIN; fi
if [[ -n $REPORT ]]; then echo "$REPORT" >results/gate.md; fi
exit "$STATUS"
"""


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_three():
    assert set(WORKFLOWS) == {"ci", "benchmarks", "release"}


@workflows
def test_every_command_is_a_target_of_make(workflow):
    for command in (step["run"] for step in steps(workflow) if "run" in step):
        program, *words = shlex.split(command)
        assert program == "make"
        assert not set(command) & set("\n;|&$`"), "one plain command, as it would be typed"
        assert {word for word in words if "=" not in word} <= TARGETS


@workflows
def test_every_action_is_pinned_by_commit_and_says_its_version(workflow):
    for action in (step["uses"] for step in steps(workflow) if "uses" in step):
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action)
        assert any(re.search(rf"{action} # v\d+\.\d+\.\d+$", file.read_text(), re.MULTILINE) for file in FILES)


def test_an_action_has_one_version_everywhere():
    used = {step["uses"] for workflow in WORKFLOWS.values() for step in steps(workflow) if "uses" in step}
    assert len(used) == len({action.partition("@")[0] for action in used})


@workflows
def test_torch_is_its_cpu_build_everywhere(workflow):
    assert workflow["env"] == {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}
    assert not any(line.startswith(("nvidia-", "triton")) for file in PINS for line in file.read_text().splitlines())


def test_dependabot_brings_actions_and_pins_up_to_date_and_leaves_the_lowest_versions():
    updates = {update["package-ecosystem"]: update for update in yaml.safe_load(DEPENDABOT.read_text())["updates"]}
    assert updates.keys() == {"github-actions", "pip"}
    assert updates["pip"]["exclude-paths"] == ["constraints-lowest.txt"]
    assert (ROOT / updates["pip"]["exclude-paths"][0]).is_file()


@workflows
def test_permissions_are_the_least_and_every_job_ends(workflow):
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert job["permissions"] == WRITING.get(name, {"contents": "read"})
        assert 0 < job["timeout-minutes"] <= 120


@workflows
def test_what_may_write_runs_nothing_of_the_repository(workflow):
    for name, job in workflow["jobs"].items():
        if name in WRITING:
            assert all("run" not in step and not step["uses"].startswith("actions/checkout@") for step in job["steps"])
            assert job["environment"]


def test_only_a_tag_is_released_and_nothing_stops_it_half_way():
    release = WORKFLOWS["release"]
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true.
    assert release["concurrency"]["cancel-in-progress"] is False
    assert release["jobs"]["publish"]["needs"] == "build"
    assert {"run": "make dist"} in release["jobs"]["build"]["steps"]
    others = (workflow for name, workflow in WORKFLOWS.items() if name != "release")
    assert all(workflow["concurrency"]["cancel-in-progress"] is True for workflow in others)


def test_every_night_the_newest_versions_and_macos_are_tried():
    jobs = WORKFLOWS["ci"]["jobs"]
    assert {"run": "make unit PINS=/dev/null"} in jobs["canary"]["steps"]
    assert {"run": "make portable"} in jobs["macos"]["steps"]
    assert jobs["macos"]["runs-on"].startswith("macos-")
    for name in ("canary", "macos", "long"):
        assert "'schedule'" in jobs[name]["if"]


@pytest.fixture
def clone(tmp_path):
    """Return the folder of a branch that left origin/main one commit ago, and a function that runs .ci/gate there."""
    git(tmp_path, "init", "--quiet", "--initial-branch", "branch")
    commit(tmp_path, "base")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    commit(tmp_path, "head")
    (tmp_path / ".ci").mkdir()
    for name in ("gate", "report"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci")
    fake = tmp_path / "fake-python"
    fake.write_text(FAKE)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)

    def run(status, report="| table |", options=(), **variables):
        return subprocess.run(
            [".ci/gate", fake, *options],
            cwd=tmp_path,
            env=bare() | {"STATUS": str(status), "REPORT": report} | {"GITHUB_STEP_SUMMARY": "summary.md"} | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    return tmp_path, run


def bare():
    """Return the environment without variables that GitHub, make or a git hook may have set."""
    foreign = re.compile(r"BASE$|GIT_|GITHUB_")
    return {name: value for name, value in os.environ.items() if not foreign.match(name)}


def git(folder, *words):
    names = ["-c", "user.name=name", "-c", "user.email=mail", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *names, *words], cwd=folder, env=bare(), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder, message):
    """Commit only a message."""
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)


def base_of(folder):
    words = (folder / "arguments").read_text().split()
    return words[words.index("--base") + 1]


@pytest.mark.parametrize(
    ("status", "ends", "line"),
    [
        (0, 0, ""),
        (1, 1, "::error title=Benchmarks slower::"),
        (2, 2, "::error title=Benchmarks not compared::"),
        (3, 0, "::notice title=Benchmarks too noisy to judge::"),
        (137, 137, "::error title=Benchmarks not compared::"),
    ],
)
def test_each_end_of_the_gate_is_told_and_reported(clone, status, ends, line):
    folder, run = clone
    done = run(status)
    assert done.returncode == ends
    assert done.stdout.count("::") == (2 if line else 0)
    assert done.stdout.startswith(line)
    times = 2 if status == 3 else 1
    assert (folder / "summary.md").read_text() == "| table |\n" * times
    assert (folder / "runs").read_text() == "run\n" * times


@pytest.mark.parametrize(
    ("again", "ends", "line"), [(0, 0, ""), (1, 1, "::error title=Benchmarks slower::"), (2, 2, "::error")]
)
def test_too_noisy_is_tried_once_more(clone, again, ends, line):
    folder, run = clone
    done = run(3, options=["--threshold", "7"], AGAIN=str(again))
    assert (done.returncode, (folder / "runs").read_text()) == (ends, "run\nrun\n")
    assert done.stdout.startswith(line)
    assert "notice" not in done.stdout
    assert (folder / "arguments").read_text().split()[-2:] == ["--threshold", "7"]


@pytest.mark.parametrize("status", [0, 1, 3])
def test_no_report_is_no_verdict(clone, status):
    folder, run = clone
    (folder / "results").mkdir()
    (folder / "results" / "gate.md").write_text("an earlier run's")
    done = run(status, report="")
    assert done.returncode == 2
    assert done.stdout.startswith("::error title=Benchmarks not compared::")
    assert not (folder / "summary.md").exists()


def test_outside_github_the_report_is_a_file_alone(clone):
    folder, run = clone
    assert run(0, GITHUB_STEP_SUMMARY="").returncode == 0
    assert (folder / "results" / "gate.md").read_text() == "| table |\n"


def test_the_base_is_where_the_branch_left_main(clone):
    folder, run = clone
    run(0, options=["--threshold", "7"])
    assert base_of(folder) == git(folder, "rev-parse", "origin/main")
    assert (folder / "arguments").read_text().split()[-2:] == ["--threshold", "7"]


def test_the_base_of_a_pull_request_is_the_tip_it_is_merged_into(clone):
    folder, run = clone
    git(folder, "checkout", "--quiet", "-b", "release", "origin/main")
    commit(folder, "what others merged meanwhile")
    git(folder, "update-ref", "refs/remotes/origin/release", "HEAD")
    tip = git(folder, "rev-parse", "HEAD")
    git(folder, "merge", "--quiet", "--no-ff", "--no-edit", "branch")
    run(0, GITHUB_BASE_REF="release")
    assert base_of(folder) == tip


def test_the_base_can_be_named(clone):
    folder, run = clone
    run(0, BASE="v1.0", GITHUB_BASE_REF="release")
    assert base_of(folder) == "v1.0"


def test_no_base_is_no_comparison(clone):
    folder, run = clone
    done = run(0, GITHUB_BASE_REF="unknown")
    assert done.returncode == 2
    assert "no merge base with origin/unknown; name a commit with BASE=REF" in done.stdout
    assert not (folder / "arguments").exists()
