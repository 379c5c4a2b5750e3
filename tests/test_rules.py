"""Rules of the design that no type checker holds: who imports whom, what importing costs, what pixels never become."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import omearrow_ds
from tests.strategies import NAMES

PACKAGE = Path(omearrow_ds.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in FILES}
_RIGHT = "batch batch_memory cache samples dataset seeds resume trial settings workers delivery dataloader __init__"
_RIGHT += " cli/profile cli/recommend"
_RIGHT += " recommend/__init__ recommend/advice recommend/loaders recommend/report recommend/rounds recommend/trials"
WITH_TORCH = {f"{name}.py" for name in _RIGHT.split()} | {name for name in TREES if name.startswith("profile/")}
BACKENDS = {"duckdb", "lance", "vortex", "zarr", "ome_arrow", "pandas", "matplotlib"}

modules = pytest.mark.parametrize("name", TREES)


def imports(tree):
    """Return the dotted names that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def roots(tree):
    return {name.split(".")[0] for name in imports(tree)}


@modules
def test_src_imports_neither_benchmarks_nor_tests_nor_ome_arrow(name):
    assert not roots(TREES[name]) & {"benchmarks", "tests", "conftest", "ome_arrow", "pytest"}


@modules
def test_torch_stands_from_the_cache_rightwards(name):
    assert "torch" not in roots(TREES[name]) or name in WITH_TORCH
    right = {f"omearrow_ds.{each.removesuffix('.py').replace('/', '.')}" for each in WITH_TORCH - {"__init__.py"}}
    assert not set(imports(TREES[name])) & right or name in WITH_TORCH


@pytest.mark.parametrize("name", NAMES)
def test_a_format_imports_no_other_format(name):
    found = set(imports(TREES[f"formats/{name}.py"]))
    assert not found & {f"omearrow_ds.storage.formats.{other}" for other in NAMES if other != name}
    assert not roots(TREES[f"formats/{name}.py"]) & BACKENDS - {name, "duckdb", "zarr", "vortex", "lance"}


@modules
def test_only_formats_compare_format_names(name):
    if name.startswith("formats/"):
        return
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Compare | ast.MatchValue):
            compared = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            assert not compared & set(NAMES), f"{name}:{node.lineno}"


@modules
def test_no_exception_is_swallowed_blindly(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ExceptHandler):
            caught = {
                each.id for each in ast.walk(node.type or ast.Name("BaseException")) if isinstance(each, ast.Name)
            }
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            assert passes_on or not caught & {"Exception", "BaseException"}, f"{name}:{node.lineno}"


def test_pixels_never_become_python_objects():
    allowed = {
        "leaves.py": {"column[row]", "pc.sum(lengths, min_count=0)"},
        "schema.py": {"pa.scalar(given, type=METADATA)"},
        "formats/_image_columns.py": {"encoded.dictionary.cast(pa.binary())"},
        "formats/_table.py": {"info['id']", "self._info.slice(row, 1)"},
        "formats/_folder.py": {
            *(f"columns[{name!r}]" for name in ("file", "id", "size_bytes", "pixel_offset")),
            "columns[name].is_null().index(True)",
            "names.dictionary",
            "names.indices",
        },
        "formats/vortex.py": {"rows.scalar(index)"},
        "source.py": {"source.checksums"},
        "verified.py": {"checksums", "pc.any(odd)", "pc.index(odd, True)"},
        "targets.py": {"self._columns.slice(index, 1)", "column"},
    }
    for name, tree in TREES.items():
        found = {
            ast.unparse(node.func.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("as_py", "to_pylist", "to_pydict")
        }
        assert found <= allowed.get(name, set()), name


@modules
def test_no_module_holds_state_that_changes(name):
    for node in ast.walk(TREES[name]):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno}"


def test_importing_does_no_work(tmp_path):
    code = f"import omearrow_ds, sys; print(*sorted(set(sys.modules) & {BACKENDS | {'torch'}!r}))"
    environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == []
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_what_needs_torch_is_imported_when_it_is_asked_for():
    code = """if True:
        import sys
        import omearrow_ds
        assert set(omearrow_ds.__all__) <= set(dir(omearrow_ds))
        assert "torch" not in sys.modules
        from omearrow_ds import *
        assert "torch" in sys.modules
        assert OMEArrowDataset is omearrow_ds.OMEArrowDataset
        try:
            omearrow_ds.OMEArrowDatasets
        except AttributeError as error:
            assert "OMEArrowDatasets" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=120, check=True)


def test_all_that_is_public_is_there():
    assert sorted(omearrow_ds.__all__) == sorted(set(omearrow_ds.__all__))
    for name in omearrow_ds.__all__:
        assert getattr(omearrow_ds, name).__doc__
    assert (PACKAGE / "py.typed").is_file()
