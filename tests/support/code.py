"""Syntax trees of the package and of the benchmarks, for tests of their code."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import benchmarks
import omearrow_ds
import tests


class Trees(Mapping[str, ast.Module]):
    """Modules of a folder by their names in it. Each is parsed on first access, because all take a second.

    Trees stay for the whole run, so they are frozen: traversing those of the package takes the garbage collector 0.5 s.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*.py"))}
        self._parsed: dict[str, ast.Module] = {}

    def __getitem__(self, name: str) -> ast.Module:
        if name not in self._parsed:
            gc.disable()
            self._parsed[name] = ast.parse(self.text(name))
            gc.freeze()
            gc.enable()
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def text(self, name: str) -> str:
        return self._files[name].read_text(encoding="utf-8")


TREES = Trees(Path(omearrow_ds.__file__).parent)
SUITE_TREES = Trees(Path(benchmarks.__file__).parent)
TEST_TREES = Trees(Path(tests.__file__).parent)


@cache
def imports(tree: ast.AST) -> list[str]:
    """Return the dotted names that a module imports anywhere, also for types."""
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    return imported
