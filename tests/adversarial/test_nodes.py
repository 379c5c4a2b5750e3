"""Two hosts: ranks under torchrun on both, and programs that are disconnected from each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner

from benchmarks.support.weed import missing
from omearrow_ds import convert, open_images, write_images
from omearrow_ds.cli import main
from tests.adversarial.node_ranks import launched, torchrun
from tests.support import numbered
from tests.support.cluster import cluster, kill
from tests.support.engine import Engine
from tests.support.programs import ROOT
from tests.support.rank import as_torchrun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
COUNT = 23


@pytest.fixture
def tmp_path():
    """Return a folder on disk, because each node has its own memory in place of the usual temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def nodes():
    with cluster(2) as started:
        yield started


HOLDS = """
import signal, sys
from tests.support.cluster import cluster
with cluster(2) as nodes:
    for node in nodes:
        assert node.start(["sh", "-c", f"echo ready; exec sleep {sys.argv[1]}"]).stdout.readline() == "ready\\n"
    print("ready", flush=True)
    signal.sigtimedwait([], 60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_is_left_of_nodes_however_who_made_them_ended(nodes, number):
    length = str(10**6 + os.getpid() + 10**7 * number)  # Programs of another run sleep for another time.

    def running():
        return [
            process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", length]
        ]

    def come_to(count):
        end_s = time.monotonic() + 10
        while len(running()) != count and time.monotonic() < end_s:
            time.sleep(0.01)
        return len(running()) == count

    words = [sys.executable, "-c", HOLDS, length]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        try:
            assert program.stdout.readline() == b"ready\n"
            assert come_to(2)  # A shell reports it before it becomes the program.
        finally:
            program.send_signal(number)
    assert come_to(0)


CALLS = "import socket; socket.create_connection(('node2', 7777), %s)"
ANSWERS = "import socket; s = socket.create_server(('node2', 7777)); print('ready', flush=True)\nwhile True: s.accept()"


def test_a_node_has_a_name_and_a_link_that_can_be_cut(nodes):
    first, second = nodes
    assert second.run(["hostname"]) == "node2\n"
    server = second.start([sys.executable, "-c", ANSWERS])
    assert server.stdout.readline() == "ready\n"
    first.run([sys.executable, "-c", CALLS % 20])
    second.link("down")
    with pytest.raises(AssertionError, match="timed out"):
        first.run([sys.executable, "-c", CALLS % 0.5])
    second.link("up")
    first.run([sys.executable, "-c", CALLS % 20])


@pytest.mark.slow
def test_ranks_of_two_nodes_have_all_images_of_one_file(nodes, tmp_path):
    path = tmp_path / "images.arrow"
    write_images([numbered.image(number) for number in range(COUNT)], path, axes="CYX")
    reports = torchrun(nodes, path, tmp_path / "epoch")
    assert [report["host"] for report in reports] == ["node1", "node2"]
    counted = Counter(number for report in reports for number in report["found"])
    assert set(counted) == set(range(COUNT))
    assert counted.total() == COUNT + 1  # One repeat fills up the last rank.


PART_BYTES = 2000  # One image.


@pytest.mark.slow
def test_a_worker_that_is_killed_changes_nothing(nodes, tmp_path):
    plate, path = numbered.write_plate(tmp_path / "plate", 60), tmp_path / "plate.parts"
    engine = Engine(nodes)
    driver = engine.convert(nodes[0], plate, path, PART_BYTES)
    num_parts = numbered.wait_for_parts(path, 5)
    kill(engine.workers[0])
    output = driver.communicate(timeout=100)[0]
    assert driver.returncode == 0, output
    assert num_parts < 60
    assert numbered.check_parts(path, 60) == [1] * 60


@pytest.mark.slow
def test_a_node_that_is_cut_off_changes_nothing(nodes, tmp_path):
    plate, path = numbered.write_plate(tmp_path / "plate", 60), tmp_path / "plate.parts"
    engine = Engine(nodes)
    driver = engine.convert(nodes[0], plate, path, PART_BYTES)
    num_parts = numbered.wait_for_parts(path, 5)
    nodes[1].link("down")
    output = driver.communicate(timeout=100)[0]
    assert driver.returncode == 0, output
    assert num_parts < 60
    assert numbered.check_parts(path, 60) == [1] * 60


@pytest.mark.slow
def test_whatever_is_killed_or_cut_off_all_images_are_there_once(programs):
    run = "import sys; from tests.adversarial.node_kills import main; sys.exit(main())"
    done = programs.run(run, "--kills", 5, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 wrong\n")


@pytest.mark.slow
def test_ranks_that_are_stopped_and_gone_on_with_by_others_have_every_image_once(programs):
    run = "import sys; from tests.adversarial.node_ranks import main; sys.exit(main())"
    done = programs.run(run, "--runs", 6, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 wrong\n")


@pytest.mark.slow
@pytest.mark.timeout(1000)  # At a load of 20 on one core it took 300 s.
def test_a_plate_in_a_bucket_is_converted_and_trained_on_by_two_hosts(programs, nodes, nf1_folder):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    if reason := missing():
        pytest.skip(reason)
    run = "import sys; from tests.adversarial.node_bucket import main; sys.exit(main(sys.argv[1]))"
    done = programs.run(run, nf1_folder, timeout_s=950)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("5 fields")


def test_shares_of_two_nodes_are_published_as_one(nodes, tmp_path):
    plate, path = numbered.write_plate(tmp_path / "plate", 21), tmp_path / "plate.parts"
    command = [sys.executable, "-m", "omearrow_ds"]
    words = ["--pattern", numbered.PATTERN, "--part-bytes", PART_BYTES, "--format", "parquet"]
    early = CliRunner().invoke(main, ["publish", str(path)])
    assert (early.exit_code, "parts" in early.output) == (1, True)
    tasks = [
        node.start([*command, "convert", plate, path, *words, "--task", f"{number}/2"])
        for number, node in enumerate(nodes, 1)
    ]
    for task in tasks:
        output = task.communicate(timeout=100)[0]
        assert task.returncode == 0, output
    nodes[1].run([*command, "publish", path])
    numbered.check_parts(path, 21)
    assert len(list((path / "parts").iterdir())) == 21


@pytest.mark.slow
def test_a_plate_is_made_by_two_nodes_of_which_one_is_cut_off_and_trained_on_by_both(nodes, nf1_folder, tmp_path):
    """Follow docs/how-to/parts.md and docs/how-to/several-hosts.md, then convert again as a job array."""
    program = [sys.executable, "-m", "omearrow_ds"]
    pattern = "{well}_01_{channel_index}_{site}_{channel}_001.tif"
    words = ["--format", "vortex", "--pattern", pattern, "--part-bytes", 7 * 10**6]
    engine, (first, second) = Engine(nodes), nodes
    path, shares = tmp_path / "plate.parts", tmp_path / "shares.parts"
    driver = first.start([*program, "convert", nf1_folder, path, *words, "--executor", f"dask:{engine.address}"])
    num_parts = numbered.wait_for_parts(path, 1)
    second.link("down")
    output = driver.communicate(timeout=100)[0]
    assert driver.returncode == 0, output
    assert num_parts < 5
    second.link("up")
    for number, node in enumerate(nodes, 1):
        node.run([*program, "convert", nf1_folder, shares, *words, "--task", f"{number}/2"])
    second.run([*program, "publish", shares])
    assert (shares / "parts.json").read_bytes() == (path / "parts.json").read_bytes()
    first.run([*program, "verify", path])
    with open_images(path) as source, open_images(nf1_folder, pattern=pattern) as plate:
        fields = {name: index for index, name in enumerate(plate.image_ids)}
        assert sorted(source.image_ids) == sorted(fields)
        for index, name in enumerate(source.image_ids):
            np.testing.assert_array_equal(source.read(index), plate.read(fields[name]))
    train = tmp_path / "train.py"
    train.write_text(
        (ROOT / "docs/how-to/several-hosts.md").read_text().partition("```python\n")[2].partition("```")[0]
    )
    launched(nodes, [train, path, tmp_path / "run"])
    state = torch.load(tmp_path / "run/state.pt", weights_only=True)["loader"]
    assert (state["epoch"], state["nodes"], state["samples"]) == (2, 2, 5)


@pytest.mark.slow
def test_each_node_reads_its_own_parts_and_another_number_of_nodes_goes_on(programs, nodes, tmp_path):
    path = tmp_path / "plate.parts"
    write_images([numbered.image(number) for number in range(COUNT)], tmp_path / "images.arrow", axes="CYX")
    convert(tmp_path / "images.arrow", path, part_bytes=PART_BYTES)
    begun = torchrun(nodes, path, tmp_path / "begun", "--batches", 2)
    first, second = (set(record["held"]) for record in begun)
    assert len(first) > 1
    assert len(second) > 1
    assert all(part.startswith("00000-") for part in first & second)  # The first part has the layout of all parts.
    (tmp_path / "rest").mkdir()
    words = path, tmp_path / "rest", "--resume", tmp_path / "begun" / "state"
    as_torchrun(programs, "from tests.support.rank import main; main()", *words, ranks=1)
    rest = json.loads((tmp_path / "rest" / "0.json").read_text())
    counted = Counter(number for record in [*begun, rest] for number in record["found"])
    assert set(counted) == set(range(COUNT))
    assert counted.total() <= COUNT + 1
