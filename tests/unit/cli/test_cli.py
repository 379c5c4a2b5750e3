"""The command line: its output agrees with third-party readers, and no exit leaves a partial file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import zarr
from click.testing import CliRunner

from omearrow_ds import ArgumentError, FormatError, open_images, write_images
from omearrow_ds import text as wording
from omearrow_ds.cli import _COMMANDS, failures, main
from omearrow_ds.storage.describe import describe
from omearrow_ds.storage.formats import FORMATS, get_format
from omearrow_ds.storage.formats._stored import spread
from tests.conftest import needs
from tests.support.strategies import (
    ENCODED_OR_LONG,
    METADATA,
    NAMES,
    NAMES_OR_LONG,
    RAGGED,
    SUFFIX,
    all_same,
    images_of,
)

formats = pytest.mark.parametrize("name", NAMES)
NOISE = [np.random.default_rng(i).integers(0, 65535, (1, 2, 1, 64, 64), dtype=np.uint16) for i in range(20)]
SMOOTH = [np.random.default_rng(i).poisson(300, (1, 2, 1, 64, 64)).astype(np.uint16) for i in range(20)]
COLUMNS = {"well": [f"A{i:02}" for i in range(20)], "cells": list(range(20))}
DESCRIBED = [METADATA] * 20
# Reported compression of formats whose library does not report the codec.
CALLED = dict.fromkeys(["ome_zarr", "vortex"], dict.fromkeys(["zstd", "lz4", "default"], "compressed"))
CHOICES = [(fmt.name, choice) for fmt in FORMATS if not fmt.missing_backend for choice in fmt.writer.compressions]


def run(*arguments, code=0):
    """Run a command; an error is one line on stderr with empty stdout."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="omearrow-ds")
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    if code == 1:
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    return done


def info(path, *options):
    return json.loads(run("info", path, "--json", *options).stdout)


def bytes_of(path):
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_of_each_command_contains_examples(name):
    command = main.get_command(None, name)
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    page = run(name, "--help").stdout
    assert f"Examples:\n    omearrow-ds {name} " in page
    assert name in run("--help").stdout


def test_the_version_and_an_unknown_command():
    assert run("--version").stdout.startswith("omearrow-ds")
    assert "No such command 'inform'" in run("inform", code=2).stderr
    assert "Usage" in run(code=2).output


@pytest.mark.parametrize(("name", "encoding"), ENCODED_OR_LONG)
@pytest.mark.share(2, "name", "encoding")
def test_info_says_what_was_written(stored, name, encoding):
    path = stored(name, SMOOTH, encoding=encoding, metadata=DESCRIBED, columns=COLUMNS)
    facts = info(path)
    assert facts["path"] == str(path)
    assert (facts["format"], facts["images"]) == (name, 20)
    assert facts["shapes"] == [{"shape": [1, 2, 1, 64, 64], "images": 20}]
    assert facts["dtypes"] == [{"dtype": "uint16", "images": 20}]
    assert facts["channels"] == ["DNA & <ER>", "Mito"]
    assert facts["physical_sizes"]["x"] == {"size": 0.5, "unit": "µm"}
    assert facts["columns"] == [{"name": "well", "type": "string"}, {"name": "cells", "type": "int64"}]
    assert (facts["disk_files"], facts["disk_bytes"]) == bytes_of(path)
    assert facts["decoded_bytes"] == sum(image.nbytes for image in SMOOTH)
    assert facts["preload_fits"] is True
    assert facts["encoding"] == (encoding if get_format(name).kind == "table" else None)
    page = run("info", path).stdout
    for part in (str(path), "1 x 2 x 1 x 64 x 64 (TCZYX)", "uint16", "2: DNA & <ER>, Mito", "well (string)", "328 kB"):
        assert part in page


@pytest.mark.parametrize(("name", "compression"), CHOICES)
@pytest.mark.share(3, "name", "compression")
def test_info_says_the_compression_that_was_asked_for(stored, name, compression):
    facts = info(stored(name, [np.tile(image, (1, 1, 1, 2, 2)) for image in SMOOTH], compression=compression))
    assert facts["compression"] == CALLED.get(name, {}).get(compression, compression)
    in_place = compression == "none" and name not in ("duckdb", "ome_zarr")
    assert facts["read_in_place"] is in_place
    assert facts["reading"].startswith("in place") is in_place


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_info_decodes_no_pixel(stored, monkeypatch, name):
    path = stored(name, SMOOTH, compression=get_format(name).writer.compressions[-1])
    with open_images(path) as source:
        source_type = type(source.images)
    for method in ("read", "stream", "mapped_stacks"):
        monkeypatch.setattr(source_type, method, lambda *_: pytest.fail("pixels were read"))
    assert describe(path).images == 20


@pytest.mark.parametrize("name", ["parquet", "parquet_duck"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_info_counts_row_groups_as_a_foreign_reader_does(stored, name, compression):
    path = stored(name, SMOOTH, rows_per_group=8, compression=compression)
    described, metadata = info(path), pq.ParquetFile(path).metadata
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert described["chunking"] == f"{len(sizes)} row groups of {min(sizes)} to {max(sizes)} images"
    assert sizes == [8, 8, 4]
    unit = "each image" if name == "parquet" else "a page of 8 images"
    expected = f"from the mapped file; {unit} is decompressed separately"
    assert compression == "none" or described["reading"] == expected


def test_info_of_arrow_files_of_others(tmp_path, stored):
    table = pa.ipc.open_file(stored("arrow", SMOOTH)).read_all()
    for compression in (None, "lz4", "zstd"):
        path = tmp_path / f"other-{compression}.arrow"
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(path, table.schema, options=options) as writer:
            for start in range(0, 20, 5):
                writer.write_table(table.slice(start, 5))
        described = info(path)
        assert described["compression"] == (compression or "none")
        assert described["chunking"] == "4 record batches of 5 images"


def test_info_of_lance_after_an_append(stored):
    needs("lance")
    import lance

    path = stored("lance", NOISE)
    lance.write_dataset(lance.dataset(path).to_table().slice(0, 3), path, mode="append")
    assert info(path)["chunking"].startswith("2 fragments of 3 to 20 images")
    assert info(path)["images"] == 23


def test_info_of_a_plain_folder_of_tiffs(tmp_path):
    folder = tmp_path / "plate 1"
    folder.mkdir()
    tifffile.imwrite(
        folder / "a.tif", np.zeros((3, 64, 48), np.uint8), compression="zlib", tile=(16, 32), photometric="minisblack"
    )
    tifffile.imwrite(folder / "b.tif", np.zeros((70, 40), np.uint16), rowsperstrip=16)
    (folder / "notes.txt").write_text("n" * 1000)
    described = info(folder)
    assert (described["images"], described["channels"], described["columns"]) == (2, [None], [])
    assert [row["shape"] for row in described["shapes"]] == [[1, 1, 3, 64, 48], [1, 1, 1, 70, 40]]
    assert described["disk_bytes"] == sum(file.stat().st_size for file in folder.glob("*.tif"))
    assert described["compression"] == "zlib, none"
    assert described["chunking"] == "one file per image, tiles of 16 x 32, strips of 16 rows"
    assert described["reading"] == "1 image in place, 1 by tifffile"
    printed = run("info", folder).stdout
    assert "1 x 1 x 3 x 64 x 48: 1 image; 1 x 1 x 1 x 70 x 40: 1 image (TCZYX)" in printed
    assert "1, no names" in printed
    alone = info(folder / "a.tif")
    assert (alone["images"], alone["disk_files"]) == (1, 1)


def test_info_of_fields_counts_files_that_were_read(tmp_path):
    for name in itertools.product("ABCDEF", ("DAPI", "GFP", "RFP")):
        tifffile.imwrite(tmp_path / f"{'_'.join(name)}.tif", np.zeros((8, 8), np.uint8))
    printed = run("info", tmp_path, "--pattern", "{well}_{channel}.tif").stdout
    assert "3 files per image, whole planes (in 16 files read)" in printed


def test_info_of_ome_zarr_04(tmp_path):
    needs("ome_zarr")
    group = zarr.open_group(tmp_path / "image.zarr", mode="w", zarr_format=2)
    group.create_array("0", data=np.zeros((2, 32, 48), np.uint16), chunks=(1, 16, 16))
    axes = [{"name": "c", "type": "channel"}, {"name": "y", "type": "space"}, {"name": "x", "type": "space"}]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": [{"path": "0"}]}]
    group.attrs["omero"] = {"channels": [{"label": "DNA"}, {"label": "ER"}]}
    described = info(tmp_path / "image.zarr")
    assert described["shapes"] == [{"shape": [1, 2, 1, 32, 48], "images": 1}]
    assert described["channels"] == ["DNA", "ER"]
    assert described["chunking"] == "one folder per image, chunks of 1 x 16 x 16, Zarr 2"
    assert described["compression"] == "compressed"


def test_info_of_images_that_differ(stored):
    described = info(stored("parquet", images_of(RAGGED)))
    assert described["channels"] is None
    assert sorted(tuple(entry["shape"]) for entry in described["shapes"]) == sorted(shape for shape, _ in RAGGED)
    assert described["dtypes"] == [{"dtype": "uint16", "images": 3}, {"dtype": "uint8", "images": 2}]


@formats
@pytest.mark.share(3, "name")
def test_info_of_nothing(stored, name):
    path = stored(name, [])
    facts = info(path)
    assert (facts["images"], facts["decoded_bytes"], facts["shapes"]) == (0, 0, [])
    assert "images       0" in run("info", path).stdout


@formats
@pytest.mark.share(3, "name")
def test_convert_keeps_everything_and_says_what_it_wrote(stored, tmp_path, name):
    needs(name)
    images = images_of(RAGGED)
    src = stored(
        "arrow", images, "from", metadata=[None, {"name": "two"}, *[None] * 3], columns={"well": list("abcde")}
    )
    dst = tmp_path / f"to here{SUFFIX[name]}"
    done = json.loads(run("convert", src, dst, "--json").stdout)
    assert done["src"] == str(src)
    assert done["seconds"] > 0
    differs = {name: done["written"][name] for name in ("available_bytes", "pixel_range")}  # `convert` reads no pixels.
    assert done["written"] | {"filter": None} == info(dst) | differs
    with open_images(dst) as source:
        assert all_same(source.take(range(5)), images)
        assert source.metadata(1)["name"] == "two"
        assert source.columns["well"].to_pylist() == list("abcde")


def test_convert_takes_encoding_compression_and_rows_per_group(stored, tmp_path):
    dst = tmp_path / "to.parquet"
    converted = run(
        "convert", stored("arrow", SMOOTH), dst, "--encoding", "list", "--compression", "zstd", "--rows-per-group", 6
    )
    assert converted.stderr == ""
    assert converted.stdout.startswith(f"{dst}: 20 images, ")
    described = info(dst)
    assert (described["encoding"], described["compression"]) == ("list", "zstd")
    assert described["chunking"] == "4 row groups of 2 to 6 images"


@pytest.mark.parametrize("suffix", [".parquet", ".tiffs"])
def test_convert_stores_checksums(stored, tmp_path, suffix):
    src, dst = stored("arrow", SMOOTH, checksum=False), tmp_path / f"to{suffix}"
    run("convert", src, dst)
    run("convert", dst, without := tmp_path / f"without{suffix}", "--no-checksum")
    assert [info(path)["checksums"] for path in (src, dst, without)] == [False, True, False]
    assert "checksums    one per image" in run("info", dst).stdout
    with open_images(dst, verify=True) as source:
        assert all_same(source.take(range(20)), SMOOTH)
        assert source.images.details.storage_info() == open_images(dst).images.details.storage_info()
        assert source.images.header.guard.fingerprint == open_images(dst).images.header.guard.fingerprint


def test_convert_replaces_only_when_asked(stored, tmp_path):
    src, dst = stored("arrow", SMOOTH), tmp_path / "to.lance"
    needs("lance")
    run("convert", src, dst)
    assert "already exists; pass --overwrite to replace it" in run("convert", src, dst, code=1).stderr
    run("convert", src, dst, "--overwrite")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years")
    run("convert", src, tmp_path / "work", "--format", "lance", "--overwrite", code=1)
    assert (tmp_path / "work" / "thesis.txt").read_text() == "years"


def test_a_source_of_two_formats_is_told_by_src_format(stored, tmp_path):
    needs("ome_zarr")
    both = stored("tiff", SMOOTH)
    (both / "columns.parquet").unlink()
    zarr.create_array(both / "more.zarr", data=np.zeros((8, 8), np.uint16))
    assert (
        "the content matches formats tiff and ome_zarr; pass --format with one of" in run("info", both, code=1).stderr
    )
    assert "pass --src-format with one of" in run("convert", both, tmp_path / "x.arrow", code=1).stderr
    run("convert", both, tmp_path / "x.arrow", "--src-format", "tiff")
    assert info(tmp_path / "x.arrow")["images"] == 20
    assert info(both, "--format", "tiff")["images"] == 20


def test_a_table_among_several_is_told_by_table(stored, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    path = stored("duckdb", SMOOTH, compression="zstd")
    with duckdb.connect(str(path)) as connection:
        connection.execute("ALTER TABLE images RENAME TO fields; CREATE TABLE few AS FROM fields LIMIT 3")
    copy = tmp_path / "few.arrow"
    for command in (("info", path), ("convert", path, copy), ("verify", path), ("profile", path), ("recommend", path)):
        message = run(*command, code=1).stderr
        assert f"{path}: 2 tables contain images; pass --table with one of 'main.few', 'main.fields'" in message
    assert [info(path, "--table", name)["images"] for name in ("few", "main.fields")] == [3, 20]
    run("convert", path, copy, "--table", "few")
    assert info(copy)["images"] == 3
    assert "3 images" in run("verify", path, "--table", "few").stdout
    assert "--table 'cells' is not a table with images" in run("info", path, "--table", "cells", code=1).stderr
    assert (
        "--table 'few': Arrow IPC does not store several tables" in run("info", copy, "--table", "few", code=1).stderr
    )


def test_errors_are_one_line_that_names_the_path_and_the_option(stored, tmp_path):
    src = stored("arrow", SMOOTH, "from")
    empty, plate, damaged = tmp_path / "empty", tmp_path / "plate", tmp_path / "damaged.parquet"
    empty.mkdir()
    (plate / "well A1").mkdir(parents=True)
    tifffile.imwrite(plate / "well A1" / "s1.tif", np.zeros((4, 4), np.uint8))
    damaged.write_bytes(b"PAR1" + bytes(100))
    locked = tmp_path / "é 細胞" / "none.tiffs"
    for arguments, part in [
        (("info", locked), f"{locked}: no such file or folder"),
        (("info", empty), "the folder is empty; pass the path"),
        (("info", plate), "its subfolder 'well A1' does; pass"),
        (("info", damaged), f"{damaged}: cannot be read as Parquet"),
        (
            ("info", src, "--format", "tiff"),
            "is not an image of format 'tiff'; correct the path, or pass another --format",
        ),
        (("convert", src, tmp_path / "x"), f"{tmp_path / 'x'}: the suffix is unknown"),
        (("convert", src, tmp_path / "no" / "x.arrow"), "the folder"),
        (("convert", src, src, "--overwrite"), "is or contains the source"),
        (("convert", src, tmp_path / "x.arrow", "--compression", "lzw"), "--compression 'lzw': expected one of 'none'"),
        (
            ("convert", src, tmp_path / "x.tiffs", "--rows-per-group", 3),
            "--rows-per-group 3: not supported by OME-TIFF",
        ),
    ]:
        assert part in run(*arguments, code=1).stderr
    run("info", src, "--format", "jpeg", code=2)
    run("convert", src, code=2)
    run("convert", src, tmp_path / "x.parquet", "--rows-per-group", 0, code=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["damaged.parquet", "empty", "from.arrow", "plate"]


def test_a_missing_backend_names_what_to_install(stored, tmp_path, monkeypatch):
    src = stored("arrow", SMOOTH)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install 'omearrow-ds[lance]'" in run("convert", src, tmp_path / "x.lance", code=1).stderr


def test_paths_that_are_no_text(stored, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff.parquet")
    try:
        os.link(stored("parquet", SMOOTH), odd)
    except OSError as error:
        pytest.skip(f"no such names on this file system: {error}")
    done = CliRunner().invoke(main, ["info", odd])
    assert done.exit_code == 1
    assert "the name is not valid UTF-8; rename it" in done.stderr


def test_errors_of_the_system_and_of_memory_are_one_line(stored, tmp_path, monkeypatch):
    src = stored("arrow", SMOOTH)
    for error, line in [
        (PermissionError(errno.EACCES, "Permission denied", "/a b"), "error: /a b: Permission denied\n"),
        (OSError("of a library\n  in two lines"), "error: of a library in two lines\n"),
        (MemoryError("Unable to allocate"), "error: out of memory: Unable to allocate\n"),
    ]:

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr("omearrow_ds.cli.files.describe", fail)
        assert run("info", src, code=1).stderr == line


def test_errors_of_the_package_itself_keep_their_traceback(stored, monkeypatch):
    monkeypatch.setattr("omearrow_ds.cli.files.describe", lambda *_, **__: {}[1])
    done = CliRunner().invoke(main, ["info", str(stored("arrow", SMOOTH))])
    assert isinstance(done.exception, KeyError)


def test_what_a_function_of_the_users_raises_is_named(capsys):
    def raised(error, **options):
        with pytest.raises(click.ClickException) as caught, failures.calling("transform flips:flip", **options):
            raise error
        return caught.value.message

    assert raised(ZeroDivisionError("by\n zero")) == (
        "transform flips:flip raised ZeroDivisionError: by zero (--traceback shows where)"
    )
    assert raised(KeyError()) == "transform flips:flip raised KeyError (--traceback shows where)"
    worker = RuntimeError("Caught it in a worker.\nTraceback (most recent call last):\n  x\nRuntimeError: no\n")
    assert raised(worker).startswith("transform flips:flip raised RuntimeError: no (")
    assert capsys.readouterr().err == ""
    assert raised(ZeroDivisionError("zero"), show_traceback=True).endswith("ZeroDivisionError: zero")
    assert "Traceback" in capsys.readouterr().err
    for passed in (ArgumentError("x"), KeyboardInterrupt(), click.exceptions.Exit(3)):
        with pytest.raises(type(passed)), failures.calling("it"):
            raise passed


def test_remedies_name_flags_and_paths_stay_as_they_are(capsys):
    def message_of(error):
        with pytest.raises(failures.Failure) as caught, failures.naming(**flags):
            raise error
        return caught.value.message

    flags = {"format": "--src-format", "overwrite": "--overwrite", "level": "--level", "crop_size": "--crop"}
    flags["target_endpoint"] = "--target-endpoint"
    remedy = "pass format=; or (format='tiff', overwrite=True.), target_storage=Storage(endpoint=), or lane=3"
    assert message_of(FormatError("no", path="/a/format=tiff/x", remedy=remedy)) == (
        "/a/format=tiff/x: no; pass --src-format; or (--src-format 'tiff', --overwrite.), --target-endpoint, or lane=3"
    )
    assert message_of(ArgumentError(option="level", value=-1, allowed="0")) == "--level -1: expected 0"
    assert message_of(ArgumentError("no", option="crop_size", value=(2, 3))) == "--crop 2x3: no"
    assert message_of(ArgumentError("no", option="lane", value="a=b")) == "lane='a=b': no"


def test_numbers_as_people_read_them():
    assert [wording.size(n) for n in (0, 1, 999, 1000, 20_500_000, 999_999)] == [
        "0 bytes", "1 byte", "999 bytes", "1 kB", "20.5 MB", "1 MB",
    ]  # fmt: skip
    assert [wording.duration(s) for s in (2.1e-5, 0.0021, 12.34, 250, 7260)] == [
        "21 µs", "2.1 ms", "12.3 s", "4.17 min", "2.02 h",
    ]  # fmt: skip
    assert [wording.count(n, "image") for n in (1, 12_000)] == ["1 image", "12,000 images"]


def test_a_table_is_aligned_and_a_remark_runs_over_its_columns():
    rows = [
        ["", "size", "took", "note"],
        ["> one", "20 MB", "1 s", "as it is"],
        ["two, longer", "no backend is installed"],
    ]
    assert wording.table([*rows, ["", "1 kB", "100 ms", ""]]) == [
        "              size    took  note",
        "> one        20 MB     1 s  as it is",
        "two, longer  no backend is installed",
        "              1 kB  100 ms",
    ]
    assert wording.table([("path", "a b"), ("dtype", "uint16")]) == ["path   a b", "dtype  uint16"]


def test_a_few_of_many_are_spread_evenly():
    assert spread(0) == []
    assert spread(3) == [0, 1, 2]
    few = spread(100_000)
    assert (few[0], few[-1], len(set(few))) == (0, 99_999, 16)


# Tests in separate processes: signals, pipes and terminals.
SLOWLY = """
import sys, time
from omearrow_ds.storage import jobs
from omearrow_ds.cli import main

def slowly(*given, images_of=jobs.SourceImages.in_order):
    for number, image in enumerate(images_of(*given)):
        if number == 5:
            print("writing", flush=True)
        if number >= 5:
            time.sleep(0.05)  # in a writer's own thread: until the main one has noticed
        yield image

jobs.SourceImages.in_order = slowly
main(prog_name="omearrow-ds")
"""
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


def started(*arguments, script):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


STOPS = {
    "parquet": "SIGINT",
    "lance": "SIGINT",
    "ome_zarr": "SIGINT",
    "vortex": "SIGTERM",
    "duckdb": "SIGTERM",
    "tiff": "SIGHUP",
}


# Each signal once; `write_images` has the tests of all writers.
@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(*pair, marks=() if pair[0] in ("parquet", "duckdb", "tiff") else pytest.mark.slow)
        for pair in STOPS.items()
    ],
)
def test_a_stopped_conversion_leaves_the_old_one_and_nothing_else(programs, stored, tmp_path, name, number):
    src = stored("arrow", SMOOTH * 100, "from")
    dst = stored(name, SMOOTH[:3], "to")
    program = programs.start(SLOWLY, "convert", src, dst, "--overwrite", timeout_s=60)
    assert program.first_line() == "writing"
    os.kill(program.pid, getattr(signal, number))
    done = program.wait()
    assert (done.returncode, done.stdout) == (SIGNALS[number], "writing\n")
    assert done.stderr == "stopped; nothing was left half-written\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([src.name, dst.name])
    with open_images(dst) as source:
        assert all_same(source.take(range(3)), SMOOTH[:3])


@pytest.mark.skipif(sys.platform != "linux", reason="the size of files is limited by RLIMIT_FSIZE")
@pytest.mark.parametrize("name", ["parquet", "tiff"])
def test_a_full_disk_is_one_line_and_leaves_nothing(programs, stored, tmp_path, name):
    """A limit on the file size simulates a full disk without a mount, and fails in the same system call."""
    src = stored("arrow", [np.tile(image, (1, 1, 1, 9, 9)) for image in NOISE], "from")
    script = """if True:
        import resource
        from omearrow_ds.cli import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        main()
    """
    dst = tmp_path / f"to{SUFFIX[name]}"
    done = programs.run(script, "convert", src, dst, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {dst}: the disk is full")
    assert [entry.name for entry in tmp_path.iterdir()] == [src.name]


RUN_AS_MODULE = "import runpy; runpy.run_module('omearrow_ds', run_name='__main__', alter_sys=True)"


def test_info_needs_no_torch_and_a_reader_may_go(programs, stored):
    path = stored("arrow", SMOOTH)
    script = """if True:
        import sys
        from omearrow_ds.cli import main
        try:
            main()
        finally:
            assert not {"torch", "lance", "vortex", "duckdb", "zarr"} & set(sys.modules)
    """
    with started("info", path, script=script) as process:
        process.stdout.close()  # Closed before the first line is written.
        err = process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, err) == (1, "")
    done = programs.run(RUN_AS_MODULE, "info", path)
    assert done.stdout.startswith("path "), done.stderr


@pytest.mark.parametrize("command", ["convert", pytest.param("verify", marks=pytest.mark.slow)])
def test_closed_streams_end_no_command(stored, tmp_path, command):
    """In particular, no message ends up in the file that is being written."""
    path, copy = stored("arrow", images_of(RAGGED)), tmp_path / "copy.parquet"
    words = [command, str(path), *([str(copy)] if command == "convert" else [])]
    closing = f'exec {sys.executable} -m omearrow_ds "$@" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closing, "sh", *words], timeout=60, check=False).returncode == 0
    if command == "convert":
        assert len(pq.read_table(copy)) == len(RAGGED)
        with open_images(copy) as source:
            assert all_same(source.take(range(len(RAGGED))), images_of(RAGGED))


ON_TERMINAL = """
import os, sys

os.dup2(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_NOCTTY), 2)
from omearrow_ds.cli import main

main(prog_name="omearrow-ds")
"""


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_progress_shows_on_a_terminal_alone_and_not_beside_json(programs, stored, tmp_path, options):
    src = stored("arrow", SMOOTH, "from")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    words = ["convert", src, tmp_path / "to.parquet", *options]
    try:
        done = programs.run(ON_TERMINAL, os.ttyname(theirs), *words, timeout_s=60)
        os.set_blocking(ours, False)
        try:
            on_terminal = os.read(ours, 10_000)
        except BlockingIOError:
            on_terminal = b""
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, (done.stderr, on_terminal)
    assert (b"20/20" in on_terminal) is not bool(options)
    assert done.stdout.startswith("{" if options else str(tmp_path / "to.parquet"))


def test_a_second_interrupt_does_not_stop_the_clearing_away(tmp_path, monkeypatch):
    import shutil

    rmtree, calls = shutil.rmtree, []

    def interrupted(folder, **options):
        calls.append(folder)
        if len(calls) == 1:
            raise KeyboardInterrupt
        rmtree(folder, **options)

    monkeypatch.setattr("omearrow_ds.storage.publish.shutil.rmtree", interrupted)

    def failing():
        yield SMOOTH[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_images(failing(), tmp_path / "x.tiffs")
    assert len(calls) == 2
    assert not list(tmp_path.iterdir())


@formats
@pytest.mark.share(3, "name")
def test_verify_says_which_image_is_not_what_was_written(stored, tmp_path, name):
    path = stored(name, SMOOTH[:5])
    assert run("verify", path).stdout.startswith(f"{path}: 5 images as written; ")
    assert json.loads(run("verify", path, "--json").stdout)["images"] == 5
    other = [*SMOOTH[:3], SMOOTH[9], SMOOTH[4]]
    with open_images(path) as source:
        columns = pa.table({"omearrow_ds_checksum": source.images.header.columns.checksums})
    forged = tmp_path / "forged.arrow"
    write_images(other, forged)
    table = pa.ipc.open_file(forged).read_all()
    with pa.ipc.new_file(tmp_path / "wrong.arrow", columns.append_column("ome_image", table[0]).schema) as writer:
        writer.write_table(columns.append_column("ome_image", table[0]))
    assert "image 3 ('image-00003') differs from the original" in run("verify", tmp_path / "wrong.arrow", code=1).stderr


def test_verify_needs_checksums(stored, tmp_path):
    path = stored("arrow", SMOOTH[:2], checksum=False)
    assert "has no checksums; create a copy with checksums" in run("verify", path, code=1).stderr
    write_images([], tmp_path / "none.parquet")
    assert "0 images as written" in run("verify", tmp_path / "none.parquet").stdout


IMPORTED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(%s)
print("imported", flush=True)
"""
IMPORTING = """
import sys
sys.path.insert(0, %r)
from omearrow_ds.cli import failures, files, main

def importing(*arguments, **options):
    import stopped_while_imported
    sys.stdin.read(1) or __import__("time").sleep(60)

failures._MOST_PUT_OFF = %d
files.describe = importing
main(prog_name="omearrow-ds")
"""


@pytest.mark.parametrize(("most", "said"), [(200, "imported\n"), (2, "")])
def test_a_stop_while_a_module_is_imported_waits_for_it(programs, tmp_path, most, said):
    """torch and DuckDB abort the process if a KeyboardInterrupt arrives during their import."""
    (tmp_path / "stopped_while_imported.py").write_text(IMPORTED % (0.3 if said else 30))
    done = programs.run(IMPORTING % (str(tmp_path), most), "info", tmp_path, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, said, "stopped; nothing was left half-written\n")


STOPPED_WITHIN = """
import os, signal, time, weakref
from omearrow_ds.cli import files, main

class Held: pass

def stopping(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)

def within_eval(*arguments, **options):
    eval("stopping()")

def within_a_callback(*arguments, **options):
    held = Held()
    watched = weakref.ref(held, stopping)
    del held
    time.sleep(20)

files.describe = %s
main(prog_name="omearrow-ds")
"""


@pytest.mark.parametrize("place", ["within_eval", "within_a_callback"])
def test_a_stop_that_python_would_drop_or_take_for_another_ends_the_command(programs, tmp_path, place):
    done = programs.run(STOPPED_WITHIN % place, "info", tmp_path, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "stopped; nothing was left half-written\n")


def test_a_stop_that_an_extension_module_wraps_into_its_own_error_is_a_stop():
    """Interrupted imports of DuckDB raise "ImportError: Encountered an error while initializing the extension"."""

    def ended_by(*causes):
        def stopped():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            except KeyboardInterrupt as error:
                for cause in causes:
                    cause.__cause__, error = error, cause
                raise error  # noqa: TRY201  # the last of the causes

        with pytest.raises(click.exceptions.Exit) as caught, failures.in_one_line():
            stopped()
        return caught.value.exit_code

    assert ended_by() == 143
    assert ended_by(ImportError("initializing")) == 143
    assert ended_by(ImportError("initializing"), ArgumentError("pip install duckdb")) == 143
    with pytest.raises(ImportError), failures.in_one_line():
        raise ImportError("initializing") from ValueError("its own")


def test_what_tifffile_logs_of_a_broken_file_does_not_stand_around_the_error(programs, tmp_path):
    tifffile.imwrite(tmp_path / "broken.tif", SMOOTH[0], compression="zlib")
    whole = (tmp_path / "broken.tif").read_bytes()
    (tmp_path / "broken.tif").write_bytes(whole[: len(whole) // 3])
    run = "from omearrow_ds.cli import main; main(prog_name='omearrow-ds')"
    done = programs.run(run, "convert", tmp_path / "broken.tif", tmp_path / "to.arrow", timeout_s=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "broken.tif" in done.stderr


def test_info_compares_files_with_decoded_pixels_only_without_a_filter(stored):
    path = stored("parquet", SMOOTH, columns=COLUMNS)
    assert "% of decoded" in run("info", path).stdout
    assert "% of decoded" not in run("info", path, "--filter", "cells < 3").stdout
