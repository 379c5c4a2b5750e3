"""Files written once, by the oldest and newest supported libraries and by other software, stay readable."""

from __future__ import annotations

import shutil
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import ome_arrow
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from omearrow_ds import FORMATS, FormatError, ImageColumnError, open_images
from tests.adversarial.golden.__main__ import add, main
from tests.adversarial.golden.archive import GOLDEN, archives, cases, differences, manifest, pack, unpack
from tests.adversarial.golden.own import own_cases
from tests.adversarial.golden.reading import check
from tests.support.errors import raises
from tests.support.strategies import all_same, same

ROOT = Path(__file__).resolve().parents[2]
CASES = cases()
ARCHIVES = {f"{name}/{path.stem}": path for name, path in archives()}
PLATES = [name for name in ARCHIVES if "-plate-" in name]
# Removing a golden file requires a change here as well. New sets are added; existing sets stay.
WRITTEN = {
    "0.1.0-lowest": 55,
    "0.1.0-newest": 108,
    "0.1.0-small": 19,
    "cytodataframe-0.4.0": 1,
    "cytotable-1.2.6": 2,
    "duckdb-1.0.0": 2,
    "duckdb-1.4.5": 2,
    "iohub-0.2.3.post1": 1,
    "iohub-0.3.0a7": 2,
    "manifest-1": 1,
    "manifest-2": 1,
    "ome-zarr-0.18.0": 2,
    "pylance-0.20.0": 1,
    "pylance-1.0.0": 1,
    "vortex-data-0.70.0": 1,
}
IN_PLACE = tuple(f"0.1.0-newest/{name}-bytes-none" for name in ("parquet", "parquet_duck", "lance"))
# `make test` reads a third of the archives of this package, and all archives of other versions and tools.
READ = [
    pytest.param(
        name, marks=() if number % 3 == 0 or name in IN_PLACE or not name.startswith("0.1.0-") else pytest.mark.slow
    )
    for number, name in enumerate(ARCHIVES)
]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LIBRARIES = {*PROJECT["dependencies"], *(EXTRAS[fmt.extra][0] for fmt in FORMATS if fmt.extra)}


def _cannot_read(name):
    """Return why the installed libraries cannot read an archive that others can, or None."""
    if CASES.get(name.split("/")[1]) is None:
        return "the library of its format is not installed"
    of_newest = ("0.1.0-newest/lance-bytes", "0.1.0-newest/lance-edited")
    of_pylance_14 = name.startswith((*of_newest, "0.1.0-small/lance", "0.1.0-small/parts-lance"))
    if of_pylance_14 and Version(version("pylance")) < Version("7"):
        return "pylance before 7.0 raises an error on what pylance 14 writes"
    return None


@pytest.mark.parametrize("name", READ)
def test_a_golden_file_is_read_as_it_was_written(tmp_path, name):
    reason = _cannot_read(name)
    if reason:
        pytest.skip(reason)
    case = CASES[name.split("/")[1]]
    unpack(ARCHIVES[name], tmp_path)
    engines = check(case, tmp_path)
    assert "pages" in engines or not name.startswith(IN_PLACE)


@pytest.mark.parametrize("name", PLATES)
def test_a_plate_of_other_tools_is_what_zarr_reads(tmp_path, name):
    zarr = pytest.importorskip("zarr")
    unpack(ARCHIVES[name], tmp_path)
    path = tmp_path / "plate.zarr"
    for level in range(2 if "ome_zarr" in name else 1):
        source = open_images(path, level=level)
        for index, field in enumerate(source.image_ids):
            attributes = dict(zarr.open_group(path / field, mode="r").attrs)
            (multiscale,) = attributes.get("ome", attributes)["multiscales"]
            array = zarr.open_array(path / field / multiscale["datasets"][level]["path"], mode="r")
            assert same(source.read(index), array[...])


@pytest.mark.parametrize("name", PLATES)
def test_a_plate_of_other_tools_that_misses_a_well_or_a_field(tmp_path, name):
    pytest.importorskip("zarr")
    unpack(ARCHIVES[name], tmp_path)
    path = tmp_path / "plate.zarr"
    shutil.rmtree(path / "A" / "1" / "1")
    with raises(FormatError, path=path, mentions=("'A/1'", "'A/1/1'")):
        open_images(path)
    shutil.rmtree(path / "A" / "1")
    with raises(FormatError, path=path, mentions="'A/1'"):
        open_images(path)


@pytest.mark.parametrize("name", [name for name in ARCHIVES if "/by_cyto" in name])
def test_a_table_of_other_tools_is_what_pyarrow_and_ome_arrow_read(tmp_path, name):
    unpack(ARCHIVES[name], tmp_path)
    (path,) = tmp_path.iterdir()
    table = pq.read_table(path)
    with raises(ImageColumnError, option="image_column", path=path) as caught:
        open_images(path)
    for column in caught.value.columns:
        source = open_images(path, image_column=column, nulls="skip")
        records = [record for record in table[column].to_pylist() if record is not None]
        expected = [ome_arrow.to_numpy(record, dtype=np.dtype(record["pixels_meta"]["type"])) for record in records]
        assert all_same(source.take(range(len(source))), expected)
    names = [column_name for column_name in table.column_names if column_name not in caught.value.columns]
    assert source.columns.to_pydict() == table.select(names).take(source.rows).to_pydict()


def test_no_golden_file_was_changed_or_removed():
    assert differences() == []
    assert {name: len(entry["files"]) for name, entry in manifest().items()} == WRITTEN
    assert all(entry["made_by"]["pyarrow"] for entry in manifest().values())


def test_every_way_to_write_has_a_golden_file():
    """A new format, encoding or compression needs one, as the README of the golden files says."""
    counts = Counter(path.stem for _, path in archives())
    assert not [name for name in CASES if not counts[name]]
    if not any(fmt.missing_backend for fmt in FORMATS):
        assert not counts.keys() - CASES.keys()


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_the_lowest_versions_are_those_that_are_tested(library):
    needed = Requirement(library)
    (least,) = needed.specifier
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    (pinned,) = (pin for pin in pins if canonicalize_name(pin.name) == canonicalize_name(needed.name))
    assert least.operator == ">="
    assert Version(next(iter(pinned.specifier)).version) == Version(least.version)


def test_a_change_does_not_go_unnoticed(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "golden"
    shutil.copytree(GOLDEN, copy)
    first, second, *_ = (path for name, path in archives(copy) if name == "0.1.0-newest")
    changed = bytearray(first.read_bytes())
    changed[-1] ^= 1
    first.write_bytes(changed)
    second.unlink()
    shutil.copy(GOLDEN / "0.1.0-newest" / second.name, second.with_name("new.zip"))
    wrong = [
        f"0.1.0-newest/{second.name} is gone",
        "0.1.0-newest/new.zip is not in the manifest",
        f"0.1.0-newest/{first.name} was changed",
    ]
    assert differences(copy) == wrong
    assert add(copy) == 1  # It adds new archives, never changed ones.
    assert capsys.readouterr().err.splitlines() == [wrong[0], wrong[2]]
    first.write_bytes((GOLDEN / "0.1.0-newest" / first.name).read_bytes())
    shutil.copy(GOLDEN / "0.1.0-newest" / second.name, second)
    assert add(copy) == 0
    assert differences(copy) == []


def test_pixels_that_differ_are_refused(tmp_path):
    case = next(case for case in own_cases() if case.name == "arrow-bytes-none-uniform")
    unpack(ARCHIVES["0.1.0-newest/arrow-bytes-none-uniform"], tmp_path)
    stored = tmp_path / case.stored
    content = bytearray(stored.read_bytes())
    offset = content.index(case.content.written[3].tobytes()) + 100
    content[offset] ^= 1
    stored.write_bytes(content)
    with pytest.raises(AssertionError):
        check(case, tmp_path)


@pytest.mark.parametrize("name", ["parquet-bytes-none", "arrow-list-zstd", "tiff-bytes-zlib", "ome_zarr-bytes-zstd"])
def test_the_same_golden_file_is_written_again(tmp_path, name):
    case = CASES.get(f"{name}-uniform")
    if case is None:
        pytest.skip("the library of its format is not installed")
    packed = []
    for turn in ("one", "two"):
        stored = tmp_path / turn / case.stored
        stored.parent.mkdir()
        case.write(stored)
        pack(stored, tmp_path / f"{turn}.zip")
        packed.append((tmp_path / f"{turn}.zip").read_bytes())
    assert packed[0] == packed[1]


def test_the_command_writes_and_checks(tmp_path, capsys):
    assert main(["write", str(tmp_path / "sets" / "a set"), "--only", "arrow-bytes-*"]) == 0
    assert main(["check", str(tmp_path / "sets")]) == 0
    assert capsys.readouterr().out.endswith("7 archives, 0 not read right\n")
    archive = tmp_path / "sets" / "a set" / "arrow-bytes-none-ragged.zip"
    archive.with_name("arrow-bytes-lz4-uniform.zip").write_bytes(archive.read_bytes())
    assert main(["check", str(tmp_path / "sets")]) == 1
    assert "FAILED     a set/arrow-bytes-lz4-uniform" in capsys.readouterr().out
