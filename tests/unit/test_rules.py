"""Design rules: layers of imports, the cost of importing, and no pixels as Python objects."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

import numpy as np

import omearrow_ds
from tests.support.code import SUITE_TREES, TEST_TREES, TREES, imports
from tests.support.strategies import NAMES

# A layer, a folder or a module at the root, imports only layers to its left.
LAYERS = [
    "errors",
    "options",
    "text",
    "axes",
    "resources",
    "codec",
    "kernels",
    "storage",
    "dataset",
    "testing",
    "loader",
    "advise",
    "cli",
]
WITH_TORCH = {"dataset", "loader", "advise", "cli"}
ROOT_FOLDERS = {"omearrow_ds": TREES.folder, "benchmarks": SUITE_TREES.folder}
# A package of the benchmarks imports only packages to its left; the benchmarks themselves import all.
SUITE_PACKAGES = ["gate", "tracks", "report", "support"]
PACKAGES_OF_RESULTS = {"gate", "tracks", "report"}
# Formats whose files are those of other formats.
FORMATS_OF_FILES = {"parquet_duck": {"parquet", "duckdb"}, "ome_arrow": {"parquet"}}
BACKENDS = {"duckdb", "lance", "lancedb", "vortex", "zarr", "tifffile", "imagecodecs"}


def parts_of(name):
    """Return the parts of a module's dotted name below the package."""
    return tuple(name.removesuffix(".py").removesuffix("/__init__").split("/"))


def layer_of(name):
    return parts_of(name)[0]


@cache
def package_of(dotted):
    """Return the package of a module or of a name in it: the deepest folder, or a module at the root or of storage."""
    root, *rest = dotted.removesuffix(".__init__").split(".")
    folder, names = ROOT_FOLDERS[root], [root]
    for name in rest:
        of_modules = folder in (TREES.folder, TREES.folder / "storage")
        if (folder / name).is_dir() or (of_modules and (folder / f"{name}.py").is_file()):
            folder, names = folder / name, [*names, name]
        else:
            break
    return ".".join(names)


def package_imports():
    """Return the imports of each package in src and benchmarks, as package names."""
    imported = {}
    for root, trees in (("omearrow_ds", TREES), ("benchmarks", SUITE_TREES)):
        for name, tree in trees.items():
            package = package_of(".".join((root, *parts_of(name))))
            targets = {package_of(target) for target in imports(tree) if target.split(".")[0] in ROOT_FOLDERS}
            imported.setdefault(package, set()).update(targets - {package})
    return imported


def own_imports(tree, package="omearrow_ds"):
    """Yield names that a module imports from the package, as their parts below it."""
    yield from (tuple(name.split(".")[1:]) for name in imports(tree) if name.split(".")[0] == package)


def roots(tree):
    return {name.split(".")[0] for name in imports(tree)}


def test_every_module_is_in_a_layer_of():
    assert {layer_of(name) for name in TREES} == {*LAYERS, "__init__", "__main__"}


def test_layers_import_only_layers_to_their_left():
    for name, tree in TREES.items():
        for target in own_imports(tree) if layer_of(name) in LAYERS else []:
            assert LAYERS.index(target[0]) <= LAYERS.index(layer_of(name)), f"{name} imports {target}"


def test_neither_modules_nor_packages_import_each_other_in_a_cycle():
    names = {parts_of(name): name for name in TREES}
    modules = {}
    for parts, name in names.items():
        targets = {target if target in names else target[:-1] for target in own_imports(TREES[name])}
        modules[parts] = targets & set(names) - {parts}
    TopologicalSorter(modules).prepare()  # Raises CycleError.
    TopologicalSorter(package_imports()).prepare()


def test_the_first_line_of_a_module_is_a_noun_phrase():
    question_words = ("What ", "Which ", "Where ", "Whether ", "How ", "Why ", "When ")
    for name, tree in ({**TREES, **{f"benchmarks/{name}": tree for name, tree in SUITE_TREES.items()}}).items():
        assert not (ast.get_docstring(tree) or "").startswith(question_words), name


def test_src_imports_neither_benchmarks_nor_tests_nor_ome_arrow():
    for name, tree in TREES.items():
        of_tests = {"benchmarks", "tests", "conftest", "ome_arrow", "pytest"}
        assert roots(tree) & of_tests == ({"pytest"} if name == "testing/conformance.py" else set()), name


def test_packages_of_the_benchmarks_import_only_packages_to_their_left():
    assert {layer_of(name) for name in SUITE_TREES if "/" in name} == set(SUITE_PACKAGES)
    for name, tree in SUITE_TREES.items():
        for target in own_imports(tree, "benchmarks") if layer_of(name) in SUITE_PACKAGES else []:
            assert SUITE_PACKAGES.index(target[0]) <= SUITE_PACKAGES.index(layer_of(name)), f"{name} imports {target}"


def test_results_are_processed_without_torch_and_without_the_package():
    for name, tree in SUITE_TREES.items():
        if layer_of(name) in PACKAGES_OF_RESULTS:
            assert not roots(tree) & {"torch", "omearrow_ds"}, name


def test_benchmarks_import_internals_of_the_package_in_one_module():
    for name, tree in SUITE_TREES.items():
        if name != "support/library.py":
            assert {target for target in own_imports(tree) if target} <= {
                (public_name,) for public_name in omearrow_ds.__all__
            }, name


def test_only_layers_from_the_dataset_on_import_torch():
    for name, tree in TREES.items():
        assert "torch" not in roots(tree) or layer_of(name) in WITH_TORCH, name


def test_a_format_imports_no_other_format_and_nothing_else_imports_a_backend():
    for name, tree in TREES.items():
        if name.startswith("storage/formats/"):
            others = set(NAMES) - {parts_of(name)[-1]} - FORMATS_OF_FILES.get(parts_of(name)[-1], set())
            modules = {target[2] for target in own_imports(tree) if target[:2] == ("storage", "formats") and target[2:]}
            assert not modules & others, name
        else:
            assert not roots(tree) & BACKENDS, name


def test_only_formats_compare_format_names():
    for name, tree in TREES.items():
        for node in ast.walk(tree) if not name.startswith("storage/formats/") else ():
            if isinstance(node, ast.Compare | ast.MatchValue):
                compared = {constant.value for constant in ast.walk(node) if isinstance(constant, ast.Constant)}
                assert not compared & set(NAMES), f"{name}:{node.lineno}"


def test_no_exception_is_swallowed_blindly():
    for name, node in ((name, node) for name, tree in TREES.items() for node in ast.walk(tree)):
        if isinstance(node, ast.ExceptHandler):
            caught = {
                exception_name.id
                for exception_name in ast.walk(node.type or ast.Name("BaseException"))
                if isinstance(exception_name, ast.Name)
            }
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            assert passes_on or not caught & {"Exception", "BaseException"}, f"{name}:{node.lineno}"


def test_match_is_a_literal_of_at_most_three_words():
    """Other facts are compared by `raises` and `warns` of `tests.support.errors`, so that wording can change."""
    for name in TEST_TREES:
        for node in ast.walk(TEST_TREES[name]) if "match=" in TEST_TREES.text(name) else ():
            if isinstance(node, ast.keyword) and node.arg == "match":
                is_short = isinstance(node.value, ast.Constant) and len(node.value.value.split()) <= 3
                assert is_short, f"{name}:{node.value.lineno}"


def test_pixels_never_become_python_objects():
    allowed = {
        "codec/leaves.py": {"column[row]", "pc.sum(lengths, min_count=0)", "encoded.dictionary.cast(pa.binary())"},
        "codec/decode.py": {"pc.unique(names.cast(pa.string()))"},
        "codec/schema.py": {"pa.scalar(values, type=METADATA)"},
        "storage/formats/_image_columns.py": {"encoded.dictionary.view(pa.binary())"},
        "storage/formats/_table.py": {
            "info['id']",
            "pc.unique(orders).view(pa.binary())",
            "info.slice(index, 1)",
        },
        "storage/formats/_folder.py": {
            *(f"columns[{name!r}]" for name in ("file", "id", "size_bytes", "pixel_offset")),
            "columns[name].is_null().index(True)",
            "names.dictionary",
            "names.indices",
        },
        "storage/formats/ome_arrow.py": {
            "images['image_id']",
            "chunks['dtype']",
            "pa.scalar(fields, schema.METADATA)",
            "self._records[index]",
            "records.field('id')",
            "records.field('image_id')",
        },
        "storage/formats/vortex.py": {"rows.scalar(index)"},
        "storage/formats/_pictures.py": {"column[row]"},
        "storage/published_parts.py": {
            "names.dictionary",
            "self._array[index]",
            "self._array.slice(first, _NUM_STRINGS)",
            "self._array[:3]",
        },
        "storage/remote_parts.py": {"pc.count_distinct(column, 'all')"},
        "storage/jobs.py": {"checksums"},
        "storage/stats.py": {"column", "self.table"},
        "storage/keys.py": {"encoded.dictionary"},
        "storage/masks.py": {"header.columns.column(column)"},
        "storage/listed.py": {
            "pc.index(pc.and_(pc.not_equal(column, expected), known), True)",
            *("values", "metadata[name]"),
            "pc.unique(column.drop_null())",
            *("table[column]", "table[channel.file]", "table[channel.folder]"),
        },
        "storage/table_files.py": {
            "column.slice(0, _FEW)",
            "column[row]",
            "pc.index(_match(column, _SPELLINGS[kind]), False)",
            "pc.index(is_valid, False)",
        },
        "storage/verified.py": {"checksums", "pc.all(pc.starts_with(checksums, KIND), skip_nulls=gaps, min_count=0)"},
        "dataset/embeddings.py": {"table[_IDS]"},
        "dataset/normalization.py": {"header.columns.column(name)", "column", "table"},
        "dataset/show.py": {"pictures.column(by)"},
        "dataset/targets.py": {
            *("self._columns.slice(index, 1)", "column", "pc.max(column)", "pc.unique(column)"),
            "pc.unique(column.drop_null().cast(pa.large_string()))",
        },
    }
    for name, tree in TREES.items():
        converted = {
            ast.unparse(node.func.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("as_py", "to_pylist", "to_pydict")
        }
        assert converted <= allowed.get(name, set()), name


def test_no_module_holds_state_that_changes():
    for name, node in ((name, node) for name, tree in TREES.items() for node in ast.walk(tree)):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno}"


def test_importing_does_no_work(tmp_path):
    late = BACKENDS | {"torch", "numba", "pandas", "ome_arrow", "matplotlib", "PIL"}
    code = f"import omearrow_ds, sys; print(*sorted(set(sys.modules) & {late!r}))"
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


def test_torch_is_imported_with_the_first_name_that_needs_it_and_pandas_never(tmp_path):
    """Importing pandas takes 0.3 s in each process."""
    omearrow_ds.write_images([np.arange(12, dtype=np.uint16).reshape(1, 3, 4)] * 3, tmp_path / "a.arrow", axes="CYX")
    code = f"""if True:
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
        assert OMEArrowDataset({str(tmp_path / "a.arrow")!r}, preload=False).__getitems__([2, 0])[1] is not None
        assert "pandas" not in sys.modules
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=120, check=True)


def test_the_version_is_that_of_the_installed_distribution():
    assert omearrow_ds.__version__ == importlib.metadata.version("omearrow-ds")


def public_objects():
    """Yield the public names of the package, and the members of its public classes."""
    for name in omearrow_ds.__all__:
        public = getattr(omearrow_ds, name)
        yield name, public
        for attribute, member in inspect.getmembers(public) if inspect.isclass(public) else ():
            function = getattr(member, "fget", getattr(member, "func", member))
            defined_in = getattr(function, "__module__", None) or ""
            if not attribute.startswith("_") and defined_in.startswith("omearrow_ds."):
                yield f"{name}.{attribute}", member


def test_all_public_names_and_their_members_have_docstrings():
    assert sorted(omearrow_ds.__all__) == sorted(set(omearrow_ds.__all__))
    objects = dict(public_objects())
    assert {"OMEArrowDataset.split", "OMEArrowDataLoader.state_dict", "Profile.epoch_s"} <= set(objects)
    assert [name for name, value in objects.items() if not inspect.getdoc(value)] == []
    assert (TREES.folder / "py.typed").is_file()
