"""Command that renews the golden files of the contract: ``python -m tests.contract [NAME ...]``."""

from __future__ import annotations

import logging
import sys
import warnings

from tests.contract.records import FOLDER, RECORDERS, difference, missing_backends, record


def main(names: list[str]) -> int:
    """Renew the golden files with these names, or all, and print their diffs."""
    unknown = set(names) - set(RECORDERS)
    if unknown:
        print(f"{', '.join(sorted(unknown))}: expected names of {', '.join(RECORDERS)}", file=sys.stderr)
        return 2
    if missing := missing_backends():
        print("\n".join(missing), file=sys.stderr)
        return 1
    warnings.simplefilter("error")  # As in tests, and without the warning that these silence.
    warnings.filterwarnings("ignore", ".*pixels have at most 12 bits", UserWarning)
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # It logs the damage that a record makes.
    FOLDER.mkdir(exist_ok=True)
    for name in names or RECORDERS:
        recorded = record(name)
        print(difference(name, recorded) or f"{name}: unchanged")
        (FOLDER / name).write_text(recorded, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
