"""``python -m tests.adversarial.soak``: a long mixed run of everything against an oracle."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path

from omearrow_ds import FORMATS
from tests.adversarial.soak.report import report, text_of
from tests.adversarial.soak.supervisor import Supervisor, default_command


def main(arguments: list[str] | None = None) -> int:
    """Run it, print the report, and return 1 if anything failed, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="minutes to run; default: 60, unlimited with --cases"
    )
    parser.add_argument("--cases", type=int, metavar="N", help="number of cases, without a time limit")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the cases; default: a new one")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case; default: 0")
    parser.add_argument("--formats", nargs="+", default=[], choices=[fmt.name for fmt in FORMATS], metavar="NAME")
    parser.add_argument("--limit", type=float, default=180, metavar="S", help="seconds a case may take; default: 180")
    parser.add_argument("--report", type=Path, metavar="FILE", help="file for the results, as JSON")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    minutes = 60.0 if options.minutes is None and options.cases is None else options.minutes
    print(
        f"soak run, seed {seed}, {f'{options.cases} cases' if minutes is None else f'{minutes:g} minutes'}", flush=True
    )
    soak = Supervisor(default_command(), seed, options.formats, limit_s=options.limit)
    until_s = None if minutes is None else soak.begun_s + 60 * minutes
    ended = "interrupted"
    try:
        soak.run(options.first, until_s=until_s, cases=options.cases)
        ended = "done"
    except KeyboardInterrupt:
        pass
    results = report(soak, (time.monotonic() - soak.begun_s) / 60, ended=ended)
    if options.report is not None:
        options.report.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(text_of(results), flush=True)
    return 130 if ended == "interrupted" else int(bool(results["failures"]))


if __name__ == "__main__":
    sys.exit(main())
