"""Dask on two hosts converts a plate in one bucket to parts in another; then both train on them under torchrun.

``python -m tests.adversarial.node_bucket PLATE`` takes the folder of NF1's fields, one TIFF file per channel, and exits
with 1 after any failure. SeaweedFS runs on a third host. ``s3://plate/`` holds the channels' files and a LoadData table
of their URLs, as in the Cell Painting Gallery; parts go to ``s3://lab/``. Each host caches fetched data in its own
folder. All samples of a rank are compared with pixels read by tifffile.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.weed import Weed, missing, serving
from tests.adversarial.node_ranks import torchrun
from tests.support.bucket_rank import EPOCHS, fields
from tests.support.cluster import Node, cluster
from tests.support.engine import Engine

RANKS, PART_BYTES = 2, 2**23  # Ranks per host, and bytes per part of one field.
_TABLE, _PARTS = "s3://plate/images/load_data.csv", "s3://lab/nf1.parts"
_UPLOAD = """
import sys
from pathlib import Path
from benchmarks.support.weed import Weed
weed = Weed(*sys.argv[1:3])
for bucket in ("plate", "lab"):
    weed.make_bucket(bucket)
for file in map(Path, sys.argv[3:]):
    weed.put("plate", f"images/{file.name}", file.read_bytes())
"""
_CONVERT = """
import sys
from distributed import Client
from omearrow_ds import convert
address, source, target, part_bytes = sys.argv[1:]
with Client(address) as client:
    client.wait_for_workers(2, timeout=60)
    convert(source, target, "arrow", part_bytes=int(part_bytes), shuffle_seed=0, executor=client.get_executor())
"""


def _table(plate: Path) -> str:
    """Return a LoadData table with the URLs of a plate's files."""
    output = io.StringIO()
    rows = [
        {f"URL_{channel}": f"s3://plate/images/{file.name}" for channel, file in files.items()}
        | dict(zip(("Metadata_Plate", "Metadata_Well", "Metadata_Site"), name.split("_"), strict=True))
        for name, files in fields(plate).items()
    ]
    writer = csv.DictWriter(output, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return output.getvalue()


def _upload(node: Node, weed: Weed, plate: Path, folder: Path) -> None:
    table = folder / Path(_TABLE).name
    table.write_text(_table(plate))
    files = [file for of_field in fields(plate).values() for file in of_field.values()]
    node.run([sys.executable, "-c", _UPLOAD, weed.url, weed.filer, table, *files])


def go_through(plate: Path, nodes: Sequence[Node], folder: Path) -> str:
    """Convert and train on three nodes, and return the results in words; raise `AssertionError` after any failure."""
    first, second, third = nodes
    began_s = time.monotonic()

    def start(command: list[str], log: Path) -> int:
        with (log / "keeper.log").open("w") as log_file:
            return third.start(command, stdout=log_file, stderr=subprocess.STDOUT).pid

    with serving(folder / "server", third.address, start) as weed:
        os.environ.update({**weed.keys(), "AWS_ENDPOINT_URL": weed.url})
        _upload(first, weed, plate, folder)
        engine = Engine([first, second])
        convert = [sys.executable, "-W", "ignore", "-c", _CONVERT, engine.address, _TABLE, _PARTS, PART_BYTES]
        first.run(convert, timeout_s=400)  # The limit is for a busy machine; conversion takes a quarter of a minute.
        made_s = time.monotonic() - began_s
        reports = torchrun(
            [first, second], _PARTS, folder / "run", plate, ranks=RANKS, module="tests.support.bucket_rank"
        )
    names, shares = set(fields(plate)), []
    for epoch in range(EPOCHS):
        counts = Counter(name for report in reports for name in report["ids"][epoch])
        assert set(counts) == names, counts
        assert counts.total() - len(names) < len(reports), counts  # Repeats fill up the last ranks.
    assert len({tuple(report["weights"]) for report in reports}) == 1, "ranks differ in what they have learnt"
    for host in ("node1", "node2"):
        part_names = [report["kept"] for report in reports if report["host"] == host]
        assert len(part_names) == RANKS, reports
        shares.append(max(map(len, part_names)))
    return (
        f"{len(names)} fields converted by two hosts in {made_s:.0f} s, {EPOCHS} epochs of {len(reports)} ranks on two "
        f"hosts, which kept {' and '.join(map(str, shares))} parts, in {time.monotonic() - began_s - made_s:.0f} s"
    )


def main(plate: str) -> int:
    if reason := missing():
        print(reason)
        return 1
    with tempfile.TemporaryDirectory() as folder, cluster(3) as nodes:
        print(go_through(Path(plate).absolute(), nodes, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
