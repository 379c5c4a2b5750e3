"""Formats registered by other packages: available everywhere, or skipped with a warning if they fail to load."""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow as pa
import pytest

from omearrow_ds import (
    FORMATS,
    FormatError,
    MetadataError,
    OMEArrowDataset,
    convert,
    formats,
    open_images,
    profile_dataset,
    write_images,
)
from omearrow_ds.testing.conformance import FormatConformance
from tests.support.errors import raises, warns
from tests.support.papyrus import PAPYRUS, install_papyrus
from tests.support.strategies import all_same, images_of

SHAPES = [((1, 2, 1, 5, 4), "uint16"), ((1, 2, 1, 3, 6), "float32"), ((1, 1, 2, 3, 6), "uint8")]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs the format for this test."""

    def install(*arguments):
        (tmp_path / "site").mkdir()
        install_papyrus(tmp_path / "site", *arguments)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        formats.cache_clear()
        return tmp_path

    yield install
    monkeypatch.undo()
    formats.cache_clear()
    sys.modules.pop("papyrus", None)


def test_it_is_written_opened_converted_and_loaded(installed):
    folder, images = installed(), images_of(SHAPES)
    assert [fmt.name for fmt in formats()] == [*(fmt.name for fmt in FORMATS), "papyrus"]
    write_images(images, folder / "a.papyrus", columns={"well": ["A1", "A2", "A3"]}, compression="lz4")
    assert pa.ipc.open_file(folder / "a.papyrus").read_all().num_rows == 3
    source = open_images(folder / "a.papyrus")
    assert (source.format.name, source.format.label) == ("papyrus", "Papyrus")
    assert all_same(source.take(range(3)), images)
    convert(folder / "a.papyrus", folder / "b.parquet")
    convert(folder / "b.parquet", folder / "c", "papyrus")
    assert all_same(open_images(folder / "c", "papyrus").take(range(3)), images)
    for axes in ("TCZYX",):
        preloaded = OMEArrowDataset(folder / "a.papyrus", axes=axes, target="well")
        read = OMEArrowDataset(folder / "a.papyrus", axes=axes, target="well", preload=False)
        for index in range(3):
            assert preloaded[index][0].numpy().tobytes() == read[index][0].numpy().tobytes()
            assert preloaded[index][1] == read[index][1]


def test_it_passes_the_suite_that_every_format_passes(installed, runs):
    """As its developer would: one line of test code in a separate folder."""
    folder = installed()
    (folder / "test_papyrus.py").write_text(
        "from omearrow_ds.testing.conformance import FormatConformance\n"
        "class TestPapyrus(FormatConformance):\n    format_name = 'papyrus'\n"
        "class TestLists(FormatConformance):\n    format_name, encoding = 'papyrus', 'list'\n"
    )
    done = runs.run("test_papyrus.py", path=folder / "site", root=folder)
    tests = [name for name in vars(FormatConformance) if name.startswith("test_")]
    assert done.returncode == 0, done.stdout
    assert f"{2 * (len(tests) + 2)} passed" in done.stdout  # Two tests have two cases.


def test_columns_are_refused_as_the_module_of_a_format_states(installed):
    pytest.importorskip("duckdb")
    of_duckdb = PAPYRUS.replace("import arrow", "import duckdb").replace("arrow.ArrowTable", "duckdb.DuckDBTable")
    of_duckdb = f"{of_duckdb.replace('arrow.', 'duckdb.')}UNSUPPORTED_TYPES = duckdb.UNSUPPORTED_TYPES\n"
    folder = installed(of_duckdb.replace('("none", "lz4")', '("none",)'))
    columns = {"span": pa.array([1, 2, 3], pa.duration("s"))}
    with raises(MetadataError, path=folder / "a.papyrus", mentions="'span'"):
        write_images(images_of(SHAPES), folder / "a.papyrus", columns=columns)


def test_profile_tells_the_stages_that_it_names(installed, monkeypatch):
    monkeypatch.setattr("omearrow_ds.advise.profile.measure._TURN_S", (0.01, 0.01))
    reading = (
        "    def read_images(self, *args):\n        return super().read_images(*args)\n\n"
        "    def mapped_stacks(self):\n        return None\n"
    )
    module = PAPYRUS.replace("    pass\n", reading)
    folder = installed(f"{module}\nSTAGES = {{'PapyrusTable.read_images': 'decode'}}\n")
    write_images([np.full((8, 8), number, np.uint16) for number in range(4)], folder / "a.papyrus")
    results = profile_dataset(folder / "a.papyrus", num_workers=0, batch_size=2, epochs=1, trials=False).breakdown
    assert results["decode"].calls == 2


def test_the_commands_know_it(installed, programs):
    folder = installed()
    write_images([np.full((8, 8), number, np.uint16) for number in range(4)], folder / "a.parquet")
    script = (
        "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, sys.argv[2])\n"
        "from click.testing import CliRunner; from omearrow_ds.cli import main; run = CliRunner().invoke\n"
        "print(run(main, ['convert', 'a.parquet', 'a.papyrus']).exit_code)\n"
        "print(run(main, ['info', 'a.papyrus', '--json']).stdout)\n"
        "print('papyrus' in run(main, ['recommend', '--help']).stdout)\n"
    )
    done = programs.run(script, folder, sys.path[0])
    code, *info_lines, known = done.stdout.strip().splitlines()
    assert (code, json.loads("\n".join(info_lines))["format"], known) == ("0", "papyrus", "True")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("raise OSError('no library')",), ["OSError", "no library"]),
        ((PAPYRUS, "papyrus:NOTHING"), ["AttributeError", "NOTHING"]),
        ((PAPYRUS, "papyrus:write_collection"), ["write_collection", "Format"]),
        ((PAPYRUS.replace('"papyrus"', '"parquet"', 1),), ["'parquet'"]),
        ((PAPYRUS.replace('".papyrus"', '".my.parquet"'),), ["'.my.parquet'"]),
        ((PAPYRUS.replace(", implementation=__name__", ""),), ["Format", "implementation"]),
    ],
    ids=["broken", "missing", "function", "taken name", "taken suffix", "no implementation"],
)
def test_one_that_cannot_be_is_left_out_with_a_word(installed, arguments, facts):
    folder = installed(*arguments)
    with warns(UserWarning, mentions=("'papyrus'", "'papyrus-format'", *facts)):
        assert formats() == FORMATS
    write_images([np.zeros((2, 2), np.uint8)], folder / "a.parquet")
    assert len(open_images(folder / "a.parquet")) == 1
    with raises(FormatError, option="format", path=folder / "a.papyrus"):
        write_images([], folder / "a.papyrus")
