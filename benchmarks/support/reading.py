"""A process that reads samples when told to: it has profiled its dataset before, or never imported the profiler."""

from __future__ import annotations

import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Self

import numpy as np

_ROOT = Path(__file__).resolve().parents[2]
_SEED = 42


class Reading:
    """The process, as a context manager: of a collection, and the axes of a sample; it may profile before it reads."""

    def __init__(self, path: Path, format_name: str, axes: str, *, profiled: bool) -> None:
        command = [sys.executable, "-m", __name__, str(path), format_name, axes, "profiled" if profiled else "never"]
        self._process = subprocess.Popen(  # noqa: S603  # this Python, this module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=_ROOT
        )

    def read(self, samples: int) -> None:
        """Have it read so many random samples, and wait until it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{samples}\n")
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"the process that reads ended with status {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main() -> None:
    """Read when told to, until nobody tells any more: ``python -m ... PATH FORMAT AXES profiled``."""
    from omearrow_ds import OMEArrowDataset  # noqa: PLC0415  # the process that starts this one has no use for it

    path, format_name, axes, profiled = sys.argv[1:]
    dataset = OMEArrowDataset(path, format_name, preload=False, axes=axes)
    if profiled == "profiled":
        from omearrow_ds import profile_dataset  # noqa: PLC0415  # the other process never imports it

        profile_dataset(dataset, batch_size=1, num_workers=0, seconds=0.2, trials=False)  # images may differ in shape
    else:
        assert "omearrow_ds.advise.profile" not in sys.modules
    order = cycle(np.random.default_rng(_SEED).permutation(len(dataset)).tolist())
    for line in sys.stdin:
        for index in islice(order, int(line)):
            dataset[index]
        print("done", flush=True)


if __name__ == "__main__":
    main()
