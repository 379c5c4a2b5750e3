"""Storage of golden files: one ZIP archive per collection, in sets by writer, and a manifest of their hashes."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.adversarial.golden.foreign import foreign_cases
from tests.adversarial.golden.own import Case, own_cases
from tests.adversarial.golden.tools import tool_cases

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def cases() -> dict[str, Case]:
    """Return every case by name."""
    by_name: dict[str, Case] = {}
    for case in (*own_cases(), *foreign_cases(), *tool_cases()):
        assert case.name not in by_name, case.name
        by_name[case.name] = case
    return by_name


def pack(stored: Path, archive: Path) -> None:
    """Return a file or folder as an archive; equal content gives equal bytes."""
    files = sorted(file for file in stored.rglob("*") if file.is_file()) if stored.is_dir() else [stored]
    with zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for file in files:
            entry = zipfile.ZipInfo(file.relative_to(stored.parent).as_posix(), _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, file.read_bytes())


def unpack(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)


def archives(folder: Path = GOLDEN) -> Iterator[tuple[str, Path]]:
    """Yield set and path of every archive."""
    for path in sorted(folder.glob("*/*.zip")):
        yield path.parent.name, path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest(folder: Path = GOLDEN) -> dict[str, dict[str, Any]]:
    """Return per set its writer (``made_by``) and the hash of each archive (``files``)."""
    path = folder / "manifest.json"
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return entries


def save_manifest(entries: dict[str, dict[str, Any]], folder: Path = GOLDEN) -> None:
    text = json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def differences(folder: Path = GOLDEN) -> list[str]:
    """Return the differences between the manifest and the archives; the list may be empty."""
    listed = {
        f"{name}/{file}": digest for name, entry in manifest(folder).items() for file, digest in entry["files"].items()
    }
    stored = {f"{name}/{path.name}": sha256(path) for name, path in archives(folder)}
    gone = [f"{file} is gone" for file in sorted(listed.keys() - stored.keys())]
    new = [f"{file} is not in the manifest" for file in sorted(stored.keys() - listed.keys())]
    changed = [f"{file} was changed" for file in sorted(listed.keys() & stored.keys()) if listed[file] != stored[file]]
    return gone + new + changed
