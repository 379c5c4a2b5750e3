"""Paths that are not collections: never opened if that may hang, and described with a remedy."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import ome_arrow
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import tifffile
import zarr
from click.testing import CliRunner

from omearrow_ds import (
    ArgumentError,
    FormatError,
    MissingPathError,
    OMEArrowDataset,
    PathExistsError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.cli import main
from tests.conftest import needs
from tests.support.errors import find_problems, raises
from tests.support.plates import written_plate
from tests.support.strategies import FOLDERS, NAMES, SUFFIX, all_same, image_of, images_of

IMAGES = images_of([((1, 1, 1, 4, 5), "uint16")] * 3)
FILES = [name for name in NAMES if name not in (*FOLDERS, "lance")]


# ---- pipes, devices, sockets: opening them may block forever


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("known", [True, False])
def test_only_files_are_opened_as_files(tmp_path, monkeypatch, name, known):
    needs(name)
    monkeypatch.chdir(tmp_path)  # Paths of sockets are limited in length.
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    for target, kind in (("pipe", "a pipe"), ("socket", "a socket"), ("/dev/zero", "a device")):
        path = Path(f"images{SUFFIX[name]}")
        path.symlink_to(target)
        with raises(FormatError, path=path, mentions=kind):
            open_images(path, name if known else None)
        path.unlink()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_devices_have_no_format(path):
    with raises(FormatError, path=path, mentions="device"):
        open_images(path)


def _members(path):
    """Return a file of each kind in the folder of a collection."""
    files = sorted(file_path.relative_to(path) for file_path in path.rglob("*") if file_path.is_file())
    return {(len(file.parts), file.suffix): file for file in reversed(files)}.values()


def _read_all(source):
    for index in range(len(source)):
        source.metadata(index)
    return source.take(range(len(source)))


@pytest.mark.parametrize("name", ["lance", *FOLDERS])
@pytest.mark.parametrize("known", [True, False])
def test_a_pipe_in_place_of_any_member_does_not_hang(stored, tmp_path, name, known):
    path = stored(name, IMAGES, columns={"well": ["A", "B", "C"]})
    for member in _members(path):
        copy = Path(shutil.copytree(path, tmp_path / "copy" / path.name))
        (copy / member).unlink()
        os.mkfifo(copy / member)
        if str(member) != "zarr.json":  # This file describes the whole folder, and is not needed.
            with raises(FormatError, path=copy, remedy=False):
                _read_all(open_images(copy, name if known else None))
        else:
            assert all_same(_read_all(open_images(copy, name if known else None)), IMAGES)
        shutil.rmtree(copy)


def test_a_pipe_in_place_of_attributes_or_a_log_does_not_hang(stored, tmp_path):
    group = tmp_path / "group.zarr"
    group.mkdir()
    (group / ".zgroup").write_text('{"zarr_format": 2}')
    os.mkfifo(group / ".zattrs")
    with raises(FormatError, path=group / ".zattrs", mentions="pipe"):
        open_images(group, "ome_zarr")
    path = stored("duckdb", IMAGES)
    os.mkfifo(f"{path}.wal")
    with raises(FormatError, path=f"{path}.wal", mentions="pipe"):
        open_images(path)


@pytest.mark.parametrize("overwrite", [True, False])
def test_no_pipe_or_device_is_replaced(tmp_path, overwrite):
    """A rename over it would remove ``/dev/null`` for all users."""
    os.mkfifo(tmp_path / "pipe.arrow")
    (tmp_path / "null.arrow").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with raises(PathExistsError, path=tmp_path / f"{name}.arrow"):
            write_images(IMAGES, tmp_path / f"{name}.arrow", overwrite=overwrite)
    assert (tmp_path / "pipe.arrow").is_fifo()
    assert Path("/dev/null").is_char_device()


# ---- likely mistakes


URLS = ("s3://bucket/plate.parquet", "gs://bucket/plate.zarr", "https://host/a/b.arrow", "abfs://x/y.parquet")


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", [str, Path])
def test_urls_are_called_urls(tmp_path, url, kind):
    """A `Path` keeps only one of two slashes."""
    write_images(IMAGES, tmp_path / "a.arrow")
    for attempt in (
        lambda path: convert(tmp_path / "a.arrow", path),
        lambda path: write_images(IMAGES, path),
    ):
        with raises(ArgumentError, path=url, mentions=".parts"):
            attempt(kind(url))


def test_a_url_is_no_folder_that_looks_like_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    with raises(ArgumentError, path="s3://bucket/a.arrow"):
        write_images(IMAGES, "s3://bucket/a.arrow")
    assert not list(Path("s3:/bucket").iterdir())
    write_images(IMAGES, "./s3:/bucket/a.arrow")
    assert all_same(open_images("./s3:/bucket/a.arrow").take(range(3)), IMAGES)
    with raises(MissingPathError, path="c:/nothing.arrow", remedy=False):
        open_images("c:/nothing.arrow")


def test_ome_arrows_export_is_read_as_its_example_writes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = image_of((1, 2, 1, 6, 7), "uint16")
    ome_arrow.OMEArrow(image, dim_order="TCZYX").export(how="ome-parquet", out="field.ome.parquet")
    assert all_same(open_images("field.ome.parquet").take([0]), [image])
    with raises(FormatError, option="format", path="field.ome.parquet", mentions="format='ome_arrow'"):
        open_images("field.ome.parquet", "parquet")


def test_parts_and_folders_of_ome_arrows_datasets_name_one(tmp_path):
    path = tmp_path / "field.ome.parquet"
    ome_arrow.OMEArrow(IMAGES[0], dim_order="TCZYX").export(how="ome-parquet", out=str(path))
    for name in ("images", "chunks", "index"):
        assert said_of(path / f"{name}.parquet").endswith(f"; pass its folder {str(path)!r}")
    assert said_of(tmp_path).endswith(f"; pass {str(path)!r}")


def test_a_lancedb_folder_names_its_tables(tmp_path):
    needs("lance")
    for name in ("cells", "fields"):
        write_images(IMAGES, tmp_path / f"{name}.lance")

    with raises(FormatError, option="table", path=tmp_path, mentions=(2, "'cells'", "'fields'")):
        open_images(tmp_path)
    with raises(
        ArgumentError, option="table", path=tmp_path, mentions=("'wells'", "'cells'", "'fields'"), remedy=False
    ):
        open_images(tmp_path, table="wells")
    assert all_same(open_images(tmp_path, table="cells").take(range(3)), IMAGES)
    assert all_same(open_images(tmp_path / "*.lance").take(range(6)), [*IMAGES, *IMAGES])


def _passed(error):
    """Return the path that an error recommends."""
    return re.search(r"(?:pass|e\.g\.) '(.*?)'", str(error.value))[1]


def test_a_folder_with_a_plate_in_it_names_the_plate(tmp_path):
    needs("ome_zarr")
    written_plate(tmp_path / "plate.zarr", {"A/1": IMAGES[:2]})
    with raises(FormatError, path=tmp_path / "plate.zarr"):
        open_images(tmp_path)


def said_of(path):
    """Return the messages about a path, from Python and, with its own names of arguments, from each command."""
    with pytest.raises(FormatError) as error:
        open_images(path)
    with pytest.raises(FormatError) as of_dataset:
        OMEArrowDataset(path)
    assert str(of_dataset.value) == str(error.value)
    as_options = re.sub(r"\bformat=", "--format ", str(error.value)).replace("columns=", "--columns")
    for command in ("info", "verify", "profile", "recommend"):
        done = CliRunner().invoke(main, [command, str(path)])
        assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"error: {as_options}\n")
    return str(error.value).removeprefix(f"{path}: ")


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
KINDS = {
    "scan.png": (PNG, ("PNG", "TIFF", "omearrow_ds.write_images")),
    "png of no suffix": (PNG, ("PNG", "TIFF")),
    "scan.JPG": (b"\xff\xd8\xff\xe0", ("JPEG", "TIFF")),
    "stack.h5": (b"\x89HDF\r\n\x1a\n", ("HDF5", "TIFF")),
    "stack.npy": (b"\x93NUMPY\x01\0", ("NumPy", "TIFF")),
    "field.czi": (b"ZISRAWFILE", ("Zeiss CZI", "OME-TIFF", "bfconvert", "OME-Zarr")),
    "field.lif": (b"p\0\0\0", ("Leica LIF", "OME-TIFF", "bfconvert", "OME-Zarr")),
    "layout.xlsx": (b"PK\x03\x04", ("Excel", "CSV", "Parquet")),
    "profiles.csv": (b"Metadata_Well,area\nA01,3\n", ("CSV", "TIFF")),
    "profiles.sqlite": (b"SQLite format 3\0", "SQLite"),
    "profiles.csv.gz": (b"\x1f\x8b", "gzip"),
    "plate.zip": (b"PK\x03\x04", "ZIP"),
}


@pytest.mark.parametrize("name", KINDS)
def test_files_of_other_kinds_are_called_what_they_are(tmp_path, name):
    content, facts = KINDS[name]
    (tmp_path / name).write_bytes(content)
    assert not find_problems(said_of(tmp_path / name), mentions=facts)


def test_content_goes_before_the_suffix_of_another_kind(stored, tmp_path):
    path = stored("arrow", IMAGES).rename(tmp_path / "images.png")
    assert all_same(open_images(path).take(range(3)), IMAGES)


def test_folders_of_other_kinds(tmp_path):
    for name in ("a.csv", "b.CSV", "c.xlsx"):
        (tmp_path / name).touch()
    assert not find_problems(said_of(tmp_path), mentions=("Excel", "CSV"))
    (tmp_path / "A01").mkdir()
    (tmp_path / "A01" / "d.png").write_bytes(PNG)
    assert not find_problems(said_of(tmp_path), mentions=("PNG", "Excel", "CSV", "TIFF"))


def test_a_pipe_says_what_to_do(tmp_path):
    os.mkfifo(tmp_path / "images")
    assert not find_problems(said_of(tmp_path / "images"), mentions="pipe")


@pytest.mark.parametrize("kind", ["tiff", "ome_zarr"])
def test_a_folder_of_mixed_files_says_what_it_holds(tmp_path, kind):
    needs(kind)
    for number, image in enumerate(IMAGES):
        if kind == "tiff":
            tifffile.imwrite(tmp_path / f"{number}.tif", image[0, 0, 0])
        else:
            zarr.create_array(tmp_path / f"{number}", data=image[0, 0, 0])
    for name in ("notes.csv", "readme.txt", "illumination.npy", ".DS_Store"):
        (tmp_path / name).touch()
    pq.write_table(pa.table({"Metadata_Well": ["A01"], "area": [3]}), tmp_path / "profiles.parquet")
    assert all_same(open_images(tmp_path).take(range(3)), IMAGES)
    write_images(IMAGES, tmp_path / "a.parquet")
    (tmp_path / "thumbnail.png").write_bytes(PNG)
    label = {"tiff": "OME-TIFF", "ome_zarr": "OME-Zarr"}[kind]
    facts = (label, "1 Parquet table", "1 PNG image", f"format='{kind}'")
    assert not find_problems(said_of(tmp_path), option="format", mentions=facts)
    assert all_same(open_images(tmp_path, kind).take(range(3)), IMAGES)


def test_a_folder_of_several_kinds_of_tables_names_one(tmp_path):
    write_images(IMAGES, tmp_path / "a.arrow")
    for name in ("b.parquet", "c.parquet", "d.csv"):
        write_images(IMAGES[:1], tmp_path / name, "parquet")
    message = said_of(tmp_path)
    assert not find_problems(
        message, option="format", mentions=("2 Parquet collections", "1 Arrow IPC collection", "a.arrow")
    )
    assert re.search(r"\b[bc]\.parquet\b", message)
    assert all_same(open_images(tmp_path, "arrow").take(range(3)), IMAGES)
    assert len(open_images(tmp_path, "parquet")) == 2


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_zarr_group_without_images(tmp_path, zarr_format):
    needs("ome_zarr")
    path = tmp_path / "store.zarr"
    root = zarr.create_group(path, zarr_format=zarr_format)
    assert not find_problems(said_of(path), mentions=("Zarr group", "multiscales"))
    root.require_group("experiment").create_group("field").create_array("0", data=IMAGES[0])
    with raises(FormatError, path=path / "experiment", mentions="'field'"):
        open_images(path)
    said_of(path)


def test_a_folder_of_folders_of_zarr_images_names_one(tmp_path):
    needs("ome_zarr")
    write_images(IMAGES, tmp_path / "a.zarr")

    with raises(FormatError, path=tmp_path / "a.zarr") as error:
        open_images(tmp_path)
    assert len(open_images(_passed(error))) == 3


def test_an_array_of_unknown_axes_says_what_to_do(tmp_path):
    """AnnData has many such arrays; `open_images` has no parameter for axes."""
    needs("ome_zarr")
    zarr.create_group(tmp_path / "a.zarr").create_array("obs", data=np.zeros(5))
    with raises(FormatError, path=tmp_path / "a.zarr" / "obs", mentions="1-D"):
        open_images(tmp_path / "a.zarr")


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_parts_of_a_plate_name_the_plate(tmp_path, version):
    needs("ome_zarr")
    path = written_plate(tmp_path / "plate.zarr", {"A/1": IMAGES[:2]}, version)
    assert all_same(open_images(path / "A" / "1").take(range(2)), IMAGES[:2])
    with raises(FormatError, path=path / "A" / "1"):
        open_images(path / "A")


def test_a_folder_of_folders_of_tiffs_still_names_one(tmp_path):
    (tmp_path / "a").mkdir()
    tifffile.imwrite(tmp_path / "a" / "x.tif", IMAGES[0][0, 0, 0])
    with raises(FormatError, path=tmp_path, mentions="'a'") as error:
        open_images(tmp_path)
    assert len(open_images(_passed(error))) == 1
