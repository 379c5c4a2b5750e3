"""Child process that runs cases one by one, and reports each result on a pipe."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from tests.adversarial.soak.plan import draw
from tests.adversarial.soak.programs import run
from tests.adversarial.soak.watch import Held


def main() -> None:
    """Run cases from ``FIRST`` on until the pipe is closed or it is killed: ``child.py FD SEED FIRST FORMAT...``."""
    pipe, seed, first = map(int, sys.argv[1:4])
    formats = tuple(sys.argv[4:])
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # More workers than cores.
    warnings.filterwarnings("ignore", ".*pixels have at most 12 bits", UserWarning)
    with os.fdopen(pipe, "w", buffering=1) as stream:
        number = first
        while True:
            say(stream, {"begun": number})
            say(stream, one(seed, number, formats))
            number += 1


def one(seed: int, number: int, formats: tuple[str, ...]) -> dict[str, Any]:
    """Run one case, and return its result."""
    counts: Counter[str] = Counter()
    begun_s = time.monotonic()
    case = draw(seed, number, formats=formats)
    error = None
    with tempfile.TemporaryDirectory(prefix=f"case-{number}-", ignore_cleanup_errors=True) as folder:
        try:
            run(case, Path(folder), counts)
        except Exception:  # noqa: BLE001  # whatever it is, it is a finding
            error = {"case": case.as_dict(), "traceback": traceback.format_exc()}
    took_s = time.monotonic() - begun_s
    return {"ended": number, "took_s": took_s, "counts": counts, "error": error, "held": Held.now().as_dict()}


def say(stream: Any, report: dict[str, Any]) -> None:
    """Write one line."""
    stream.write(json.dumps(report, default=repr) + "\n")


if __name__ == "__main__":
    main()
