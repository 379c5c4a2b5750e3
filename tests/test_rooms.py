"""The rooms of the package: imports go one way, from what knows more to what knows less."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import omearrow_ds

PACKAGE = Path(omearrow_ds.__file__).parent
# A wing imports only wings to its left.
WINGS = ["errors", "text", "axes", "resources", "codec", "testing", "storage", "dataset", "loader", "advise", "cli"]
TORCHLESS = {"errors", "text", "axes", "resources", "codec", "testing", "storage"}
BACKENDS = {"lance", "vortex", "duckdb", "zarr", "tifffile", "imagecodecs"}


def imported(file):
    """Yield the dotted names that a module imports, within functions and for types too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules():
    return {file: file.relative_to(PACKAGE).with_suffix("").parts for file in PACKAGE.rglob("*.py")}


def own(names):
    """Return the parts, below the package, of what is imported of it."""
    return [tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "omearrow_ds"]


def test_every_module_is_in_a_wing():
    assert {parts[0] for parts in modules().values()} == {*WINGS, "__init__", "__main__"}


def test_a_wing_imports_only_wings_to_its_left():
    for file, parts in modules().items():
        for target in own(imported(file)) if parts[0] in WINGS else []:
            assert WINGS.index(target[0]) <= WINGS.index(parts[0]), f"{file} imports {target}"


def test_no_module_imports_itself_in_a_circle():
    """Nor for types alone."""
    known = {parts[:-1] if parts[-1] == "__init__" else parts: file for file, parts in modules().items()}
    graph = {}
    for module, file in known.items():
        found = {next((t[:n] for n in (len(t), len(t) - 1) if t[:n] in known), ()) for t in own(imported(file))}
        graph[module] = found - {module, ()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_formats_import_no_other_format_and_nothing_else_imports_their_backends():
    folder = PACKAGE / "storage" / "formats"
    formats = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")}
    for file, parts in modules().items():
        if parts[:2] == ("storage", "formats"):
            others = {names[2] for names in own(imported(file)) if names[:2] == parts[:2] and len(names) > 2}
            assert not others & formats - {file.stem}, file
        else:
            assert not BACKENDS & {name.split(".")[0] for name in imported(file)}, file


def test_torch_begins_with_the_dataset():
    for file, (wing, *_) in modules().items():
        if wing in TORCHLESS:
            assert "torch" not in {name.split(".")[0] for name in imported(file)}, file


def test_the_package_knows_neither_benchmarks_nor_tests():
    for file in modules():
        assert not {"benchmarks", "tests"} & {name.split(".")[0] for name in imported(file)}, file
