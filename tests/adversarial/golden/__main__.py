"""``python -m tests.adversarial.golden``: write golden files, check existing ones, add new ones to the manifest."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
import traceback
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.adversarial.golden.archive import (
    GOLDEN,
    archives,
    cases,
    differences,
    manifest,
    pack,
    save_manifest,
    sha256,
    unpack,
)

_PACKAGES = ("numpy", "pyarrow", "pylance", "vortex-data", "duckdb", "zarr", "tifffile", "ome-arrow", "omearrow-ds")
_TOOLS = ("ome-zarr", "iohub", "cytotable", "cytodataframe")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.golden", description=__doc__)
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write", help="write one set with the installed libraries")
    writing.add_argument("folder", type=Path, metavar="DIR", help="new folder; its name names the set")
    writing.add_argument("--only", default="*", metavar="PATTERN", help="only cases of such names, e.g. 'tiff-*'")
    writing.set_defaults(act=lambda options: write(options.folder, options.only))
    checking = commands.add_parser("check", help="read every archive below a folder, and say which are not read right")
    checking.add_argument("folder", type=Path, nargs="?", default=GOLDEN, metavar="DIR", help="default: %(default)s")
    checking.set_defaults(act=lambda options: read_all(options.folder))
    adding = commands.add_parser("add", help="enter new archives in the manifest; entries are never changed or removed")
    adding.set_defaults(act=lambda _: add())
    options = parser.parse_args(arguments)
    status: int = options.act(options)
    return status


def write(folder: Path, only: str) -> int:
    """Write one archive per case, and ``made_by.json``."""
    folder.mkdir(parents=True)
    for name, case in cases().items():
        if not fnmatchcase(name, only):
            continue
        missing = [module for module in case.needs if importlib.util.find_spec(module) is None]
        if missing:
            print(f"left out   {name}: {', '.join(missing)} is not installed")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            stored = Path(temporary) / case.stored
            case.write(stored)
            pack(stored, folder / f"{name}.zip")
        print(f"written    {name}")
    versions = json.dumps(_versions(), indent=1)
    (folder / "made_by.json").write_text(versions + "\n", encoding="utf-8")
    return 0


def read_all(folder: Path) -> int:
    """Read every archive, print each result, and return 1 if one was read wrongly."""
    from tests.adversarial.golden.reading import check  # Needs torch, which writing does not.

    known, failed, count = cases(), 0, 0
    for name, path in archives(folder):
        case = known.get(path.stem)
        count += 1
        if case is None:
            print(f"not read   {name}/{path.stem}: its format is not installed")
            continue
        try:
            with tempfile.TemporaryDirectory() as temporary:
                unpack(path, Path(temporary))
                check(case, Path(temporary))
        except Exception:  # noqa: BLE001  # whatever it is, it is what is to be told
            failed += 1
            print(f"FAILED     {name}/{path.stem}\n{traceback.format_exc()}")
    print(f"{count} archives, {failed} not read right")
    return int(failed > 0)


def add(folder: Path = GOLDEN) -> int:
    """Add new archives to the manifest; those in the manifest must be unchanged."""
    wrong = [difference for difference in differences(folder) if not difference.endswith("not in the manifest")]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    entries = manifest(folder)
    for name, path in archives(folder):
        made_by = path.parent / "made_by.json"
        entry = entries.setdefault(name, {"files": {}, "made_by": {}})
        if not entry["made_by"]:
            entry["made_by"] = json.loads(made_by.read_text(encoding="utf-8"))
        entry["files"].setdefault(path.name, sha256(path))
    save_manifest(entries, folder)
    return 0


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_TOOLS):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    sys.exit(main())
