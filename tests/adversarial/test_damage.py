"""Damaged files of every format: a seeded pass of `damage`, and one test per defect that it found."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile

from omearrow_ds import FORMATS, FormatError, MetadataError, MissingPathError, open_images
from omearrow_ds.storage.formats._error_translation import translate_errors
from tests.adversarial import damage
from tests.adversarial.mutations import Plan
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import NAMES, NAMES_OR_LONG, SUFFIX, images_of, slow_except

SMALL = [((1, 2, 1, 12, 10), "uint16")] * 5
SHARES = 10, pytest.param(1, marks=pytest.mark.slow)  # A tenth of the damages, or all.
MUTATIONS = {"duckdb": 42}  # Other formats get 150. DuckDB takes ten times as long to open a file.
formats = pytest.mark.parametrize("name", NAMES)
formats_or_long = pytest.mark.parametrize("name", NAMES_OR_LONG)
# Memory-mapped, decoded by pages, a file per image, a folder that a library reads.
DAMAGED = "arrow", "parquet", "tiff", "lance"
FILES = [fmt.name for fmt in FORMATS if not fmt.is_folder]


@pytest.mark.parametrize("name", slow_except(DAMAGED, NAMES))
@pytest.mark.parametrize("share", SHARES)
def test_damage_gives_the_same_pixels_or_an_error(name, share):
    needs(name)
    tally = damage.run(name, MUTATIONS.get(name, 150) // share, seed=2026)
    assert tally.faults == []
    assert tally.outcomes["error"] > tally.total / 3  # The mutations were damage.
    assert tally.outcomes["identical"] <= tally.total / 3  # For example in files that are not read.
    assert tally.largest_bytes < damage.RSS_LIMIT_BYTES
    assert name == "duckdb" or tally.caught > 0  # DuckDB has a checksum in each block.


@formats_or_long
def test_every_structural_damage_is_planned(stored, name):
    path = stored(name, images_of(SMALL))
    plan = Plan(path)
    kinds = Counter(mutation.kind for mutation in plan.structural)
    assert {"denied", "symlink loop", "symlink to nothing", "folder for a file", "cut at a boundary"} <= set(kinds)
    assert ("missing" in kinds) == path.is_dir()
    assert kinds["cut at a boundary"] > 30
    first, again = (plan.random(np.random.default_rng([3, 4])) for _ in range(2))
    assert (first.kind, first.detail) == (again.kind, again.detail)


def broken_main(folder, name, start, stop, *arguments):
    """Break, in the child, one guarantee after the other, one per mutation of the first collection."""
    from tests.adversarial import damaged_child as child

    whole, variants, calls = child.Examination.all, child.variants_of("arrow")[:1], []

    def all_and_more(self):
        whole(self)
        calls.append(self)
        number = len(calls) - 2 + start if len(calls) > 1 else None  # The first examination is of undamaged data.
        if number == 0:
            self._try(lambda: {}["foreign"], "test")
        if number == 1:
            self._try(lambda: open_images("/nothing/there.arrow"), "test")
        if number == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 3:
            time.sleep(60)

    child.variants_of = lambda name: variants
    child.Examination.all = all_and_more
    child.main(folder, name, start, stop, *arguments)


@pytest.mark.slow  # Waits for a child that hangs.
def test_the_harness_sees_what_it_looks_for(monkeypatch):
    monkeypatch.setattr(damage, "CHILD", "tests.adversarial.test_damage:broken_main")
    tally = damage.run("arrow", 5, seed=1, limit_s=3)
    assert [fault["fault"] for fault in tally.faults] == ["foreign", "unnamed", "crash", "hang"]
    assert tally.faults[2]["why"] == "SIGSEGV"
    assert tally.total == 5


def said_by(tmp_path, function, *arguments):
    """Return the exit status and the output of a child that calls a function of `damaged_child`."""
    child = damage.start(tmp_path / "said", f"tests.adversarial.damaged_child:{function}", *arguments)
    child.join(120)
    status = child.exitcode
    child.kill()
    return status, (tmp_path / "said").read_text()[-2000:]


@formats_or_long
def test_what_may_not_be_read(stored, tmp_path, name):
    path = stored(name, images_of(SMALL))
    for parent in list(path.parents)[:4]:  # With several test processes, each has a folder in that of the run.
        if parent.owner() == Path.home().owner():
            parent.chmod(parent.stat().st_mode | 0o055)
    try:
        assert said_by(tmp_path, "read_what_may_not_be_read", str(path), name) == (0, "")
    finally:
        path.chmod(0o700)


@formats
def test_symlinks_that_lead_nowhere(tmp_path, name):
    needs(name)
    path = tmp_path / f"images{SUFFIX[name]}"
    for target in (path.name, "nothing-there"):
        path.symlink_to(target)
        with raises(MissingPathError, path=path, remedy=False):
            open_images(path)
        path.unlink()


def patched(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


@pytest.mark.parametrize("name", ["parquet", "parquet_duck", "arrow", "vortex"])
def test_ids_and_columns_that_are_no_text(stored, name):
    wells = ["plate-1 well A01 of the treated cells"] * 4 + ["plate-1 well B77 of the treated cells"]
    path = stored(name, images_of(SMALL), columns={"well": wells})
    patched(path, b"B77", b"\xff\xfe\xff")
    with raises(FormatError, path=path, remedy=False):
        open_images(path)


def test_offsets_beyond_an_arrow_file(stored):
    path = stored("arrow", images_of(SMALL), columns={"well": ["A"] * 5})
    offsets = np.arange(6, dtype=np.int32).tobytes()
    data = path.read_bytes()
    offset = data.rindex(offsets)  # Buffer of the column, the last but one.
    path.write_bytes(data[: offset + 20] + (2**30).to_bytes(4, "little") + data[offset + 24 :])
    with raises(FormatError, path=path, remedy=False):
        open_images(path)


def test_a_date_that_no_calendar_has(stored, tmp_path):
    metadata = [{"acquisition_datetime": datetime(2024, 1, 1)}] * 5  # noqa: DTZ001
    path = stored("arrow", images_of(SMALL), metadata=metadata)
    stored_date = int(np.datetime64("2024-01-01", "us").astype(np.int64)).to_bytes(8, "little")
    patched(path, stored_date, (2**62).to_bytes(8, "little"))
    with open_images(path) as source:
        with raises(FormatError, path=path, remedy=False):
            source.metadata(0)
        assert np.array_equal(source.read(0), images_of(SMALL)[0])


def test_a_tiff_of_ours_that_lost_its_metadata(stored):
    path = stored("tiff", images_of(SMALL))
    file = sorted(path.glob("*.tif"))[2]
    patched(file, b"</OME>", b"</XXX>")
    with open_images(path) as source, raises(FormatError, path=file, mentions="OME-XML", remedy=False):
        source.metadata(2)


@pytest.mark.parametrize("column", ["ome_image.pixels_meta", "ome_image.chunks", "well"])
def test_a_column_of_other_rows_than_the_footer_says(stored, monkeypatch, column):
    """pyarrow returns the complete columns with the rows that they have."""
    path = stored("parquet", images_of(SMALL), columns={"well": list("ABCDE")})
    read = pq.ParquetFile.read

    def other(self, columns, **options):
        table = read(self, columns=columns, **options)
        return table[:4] if any(name.startswith(column) for name in columns) else table

    monkeypatch.setattr(pq.ParquetFile, "read", other)
    with raises(FormatError, path=path, mentions=(4, 5), remedy=False):
        open_images(path).read(0)  # Pixels are located at the first read.


@pytest.mark.parametrize(("name", "member"), [("tiff", "*.tif"), ("ome_zarr", "*.zarr/zarr.json")])
def test_metadata_of_unknown_fields_name_the_file(stored, name, member):
    path = stored(name, images_of(SMALL), metadata=[{"image_type": "brightfield"}] * 5)
    file = sorted(path.glob(member))[1]
    patched(file, b"image_type", b"imqge_type")
    with (
        open_images(path) as source,
        raises(MetadataError, path=file if name == "tiff" else file.parent, mentions="imqge_type", remedy=False),
    ):
        source.metadata(1)


def test_a_tiff_that_says_to_be_enormous(stored):
    path = stored("tiff", images_of(SMALL), compression="zlib")
    file = sorted(path.glob("*.tif"))[2]
    with tifffile.TiffFile(file, mode="r+") as tif:
        tif.pages[0].tags["ImageLength"].overwrite(2**31 - 1)
    with open_images(path) as source, raises(FormatError, path=file):
        source.read(2)


def test_a_missing_chunk_of_a_zarr_folder_of_ours(stored):
    """Zarr reads its fill value, as its specification says, but this package writes all chunks."""
    path = stored("ome_zarr", images_of(SMALL))
    array = sorted(path.glob("*.ome.zarr"))[1] / "0"
    described = json.loads((array / "zarr.json").read_text())
    (array / "zarr.json").write_text(
        json.dumps(described | {"note": {"must_understand": False}})
    )  # Needed for zarr to read it.
    assert np.array_equal(open_images(path).read(1), images_of(SMALL)[1])
    min(array.glob("c.*")).unlink()
    with raises(FormatError, path=array, mentions=(1, 2)):
        open_images(path).read(1)


@pytest.mark.parametrize("rows", [3, 7])
def test_a_row_group_with_other_rows_than_its_footer_says(stored, monkeypatch, rows):
    """A changed bit of a page's header causes this. It was found by mutation 1,000 of seed 1."""
    path = stored("parquet", images_of(SMALL))
    with open_images(path, engine="pyarrow") as source:
        file = source.images.table._file.get()
        whole = file.read_row_group

        def other(number, **options):
            results = whole(number, **options)
            return pa.concat_tables([results, results])[:rows]

        monkeypatch.setattr(file, "read_row_group", other)
        for read in (lambda: source.read(4), lambda: source.take([0, 3]), lambda: list(source.images.stream())):
            with raises(FormatError, path=path, mentions=("row group 0", rows, 5), remedy=False):
                read()


def test_panics_become_errors():
    class PanicException(BaseException):  # Libraries written in Rust use this name.
        pass

    with (
        raises(FormatError, path="there", mentions="index out of range", remedy=False),
        translate_errors(Path("there"), "X", ()),
    ):
        raise PanicException("index out of range")
    with pytest.raises(KeyboardInterrupt), translate_errors(Path("there"), "X", ()):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "encoding", "engine"),
    slow_except(
        [*DAMAGED, ("vortex", "list", None)],
        [
            *((name, "bytes", None) for name in NAMES),
            ("vortex", "list", None),
            ("parquet", "bytes", "pyarrow"),
            ("lance", "bytes", "lance"),
        ],
    ),
    ids=str,
)
def test_a_file_that_is_cut_short_while_it_is_open(stored, tmp_path, name, encoding, engine):
    """Runs in its own process, because access to a missing mapped page would end it (SIGBUS)."""
    images = images_of([((1, 1, 1, 80, 70), "uint16")] * 30)
    path = stored(name, images, encoding=encoding)
    status, output = said_by(tmp_path, "read_what_is_cut_short", str(path), name, engine, images, 30)
    assert (status, output[-5:]) == (0, "done\n"), output
