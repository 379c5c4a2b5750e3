"""What lies at a path that is no collection: never opened where that may hang, and told what it is and what to do."""

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
from tests.support.plates import written_plate
from tests.support.strategies import FOLDERS, NAMES, SUFFIX, all_same, image_of, images_of

IMAGES = images_of([((1, 1, 1, 4, 5), "uint16")] * 3)
FILES = [name for name in NAMES if name not in (*FOLDERS, "lance")]


# ---- pipes, devices, sockets: what opens one may wait for ever


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("known", [True, False])
def test_only_files_are_opened_as_files(tmp_path, monkeypatch, name, known):
    needs(name)
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    for target, what in (("pipe", "a pipe"), ("socket", "a socket"), ("/dev/zero", "a device")):
        path = Path(f"images{SUFFIX[name]}")
        path.symlink_to(target)
        with pytest.raises(FormatError, match=rf"images{SUFFIX[name]}: is {what}; a file or a folder is needed"):
            open_images(path, name if known else None)
        path.unlink()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_devices_have_no_format(path):
    with pytest.raises(FormatError, match=f"{path}: is a device"):
        open_images(path)


def _members(path):
    """Return a file of each kind in the folder of a collection."""
    files = sorted(each.relative_to(path) for each in path.rglob("*") if each.is_file())
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
        if str(member) != "zarr.json":  # of the folder as a whole, which is not needed
            with pytest.raises(FormatError, match=re.escape(str(copy))):
                _read_all(open_images(copy, name if known else None))
        else:
            assert all_same(_read_all(open_images(copy, name if known else None)), IMAGES)
        shutil.rmtree(copy)


def test_a_pipe_in_place_of_attributes_or_a_log_does_not_hang(stored, tmp_path):
    group = tmp_path / "group.zarr"
    group.mkdir()
    (group / ".zgroup").write_text('{"zarr_format": 2}')
    os.mkfifo(group / ".zattrs")
    with pytest.raises(FormatError, match=r"group\.zarr.*\.zattrs: is a pipe"):
        open_images(group, "ome_zarr")
    path = stored("duckdb", IMAGES)
    os.mkfifo(f"{path}.wal")
    with pytest.raises(FormatError, match=r"\.wal: is a pipe"):
        open_images(path)


@pytest.mark.parametrize("overwrite", [True, False])
def test_no_pipe_or_device_is_replaced(tmp_path, overwrite):
    """Renamed over, ``/dev/null`` would be gone for everybody."""
    os.mkfifo(tmp_path / "pipe.arrow")
    (tmp_path / "null.arrow").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with pytest.raises(PathExistsError, match=rf"{name}\.arrow"):
            write_images(IMAGES, tmp_path / f"{name}.arrow", overwrite=overwrite)
    assert (tmp_path / "pipe.arrow").is_fifo()
    assert Path("/dev/null").is_char_device()


# ---- what somebody may well pass


URLS = ("s3://bucket/plate.parquet", "gs://bucket/plate.zarr", "https://host/a/b.arrow", "abfs://x/y.parquet")


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", [str, Path])
def test_urls_are_called_urls(tmp_path, url, kind):
    """A `Path` has one slash left of two."""
    write_images(IMAGES, tmp_path / "a.arrow")
    for attempt in (
        lambda path: convert(tmp_path / "a.arrow", path),
        lambda path: write_images(IMAGES, path),
    ):
        with pytest.raises(ArgumentError, match=rf"^{re.escape(url)}: one file is not written to a server; .*\.parts"):
            attempt(kind(url))


def test_a_url_is_no_folder_that_looks_like_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    with pytest.raises(ArgumentError, match=r"^s3://bucket/a\.arrow: one file is not written to a server"):
        write_images(IMAGES, "s3://bucket/a.arrow")
    assert not list(Path("s3:/bucket").iterdir())
    write_images(IMAGES, "./s3:/bucket/a.arrow")
    assert all_same(open_images("./s3:/bucket/a.arrow").take(range(3)), IMAGES)
    with pytest.raises(MissingPathError, match=r"c:/nothing\.arrow: no such file"):
        open_images("c:/nothing.arrow")


def test_ome_arrows_export_is_read_as_its_example_writes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = image_of((1, 2, 1, 6, 7), "uint16")
    ome_arrow.OMEArrow(image, dim_order="TCZYX").export(how="ome-parquet", out="field.ome.parquet")
    assert all_same(open_images("field.ome.parquet").take([0]), [image])
    with pytest.raises(FormatError, match=r"field\.ome\.parquet: is a dataset folder of ome-arrow; pass format='ome_a"):
        open_images("field.ome.parquet", "parquet")


def test_parts_and_folders_of_ome_arrows_datasets_name_one(tmp_path):
    path = tmp_path / "field.ome.parquet"
    ome_arrow.OMEArrow(IMAGES[0], dim_order="TCZYX").export(how="ome-parquet", out=str(path))
    for name in ("images", "chunks", "index"):
        assert said_of(path / f"{name}.parquet") == f"is a table of ome-arrow's dataset; pass its folder, {str(path)!r}"
    said = (
        "holds no images itself, but its folder 'field.ome.parquet' is ome-arrow's dataset; folders are read one by one"
    )
    assert said_of(tmp_path) == f"{said}: pass {str(path)!r}"


def test_a_lancedb_folder_names_its_tables(tmp_path):
    needs("lance")
    for name in ("cells", "fields"):
        write_images(IMAGES, tmp_path / f"{name}.lance")
    said = "is a folder of 2 Lance datasets, as LanceDB keeps its tables: 'cells', 'fields'; pass table= with the name"
    with pytest.raises(FormatError, match=said):
        open_images(tmp_path)
    with pytest.raises(ArgumentError, match=r"table='wells': .* has no such table; there are 'cells', 'fields'"):
        open_images(tmp_path, table="wells")
    assert all_same(open_images(tmp_path, table="cells").take(range(3)), IMAGES)
    assert all_same(open_images(tmp_path / "*.lance").take(range(6)), [*IMAGES, *IMAGES])


def _passed(error):
    """Return the path that an error says to pass."""
    return re.search(r"(?:pass|e\.g\.) '(.*?)'", str(error.value))[1]


def test_a_folder_with_a_plate_in_it_names_the_plate(tmp_path):
    needs("ome_zarr")
    written_plate(tmp_path / "plate.zarr", {"A/1": IMAGES[:2]})
    with pytest.raises(FormatError, match=r"plate\.zarr: is of an OME-Zarr plate; pass the path of the plate itself"):
        open_images(tmp_path)


def said_of(path):
    """Return what is said of a path, by Python and, in its own words for arguments, by each command."""
    with pytest.raises(FormatError) as error:
        open_images(path)
    with pytest.raises(FormatError, match=re.escape(str(error.value))):
        OMEArrowDataset(path)
    as_options = re.sub(r"\bformat=", "--format ", str(error.value)).replace("columns=", "--columns")
    for command in ("info", "verify", "profile", "recommend"):
        done = CliRunner().invoke(main, [command, str(path)])
        assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"error: {as_options}\n")
    return str(error.value).removeprefix(f"{path}: ")


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
KINDS = {
    "scan.png": (PNG, "is a PNG image, which is not read; save as TIFF, or write the pixels by"),
    "png of no suffix": (PNG, "is a PNG image, which is not read; save as TIFF"),
    "scan.JPG": (b"\xff\xd8\xff\xe0", "is a JPEG image, which is not read; save as TIFF"),
    "stack.h5": (b"\x89HDF\r\n\x1a\n", "is an HDF5 file, which is not read; save as TIFF"),
    "stack.npy": (b"\x93NUMPY\x01\0", "is a NumPy file, which is not read; save as TIFF"),
    "field.czi": (
        b"ZISRAWFILE",
        "is a Zeiss CZI image, which is not read; convert to OME-TIFF (bfconvert) or OME-Zarr",
    ),
    "field.lif": (b"p\0\0\0", "is a Leica LIF image, which is not read; convert to OME-TIFF (bfconvert) or"),
    "layout.xlsx": (
        b"PK\x03\x04",
        "is an Excel file, which is not read; pass the path of the images, and a CSV or Parquet file of",
    ),
    "profiles.csv": (b"Metadata_Well,area\nA01,3\n", "is a CSV file, which is not read; it lists no TIFF files in"),
    "profiles.sqlite": (b"SQLite format 3\0", "is an SQLite file, which is not read; pass the path of the images"),
    "profiles.csv.gz": (
        b"\x1f\x8b",
        "is a gzip file, which is not read; unpack it, and pass the path of what was in it",
    ),
    "plate.zip": (b"PK\x03\x04", "is a ZIP archive, which is not read; unpack it, and pass the path of what was in it"),
}


@pytest.mark.parametrize("name", KINDS)
def test_files_of_other_kinds_are_called_what_they_are(tmp_path, name):
    content, said = KINDS[name]
    (tmp_path / name).write_bytes(content)
    assert said_of(tmp_path / name).startswith(said)


def test_content_goes_before_the_suffix_of_another_kind(stored, tmp_path):
    path = stored("arrow", IMAGES).rename(tmp_path / "images.png")
    assert all_same(open_images(path).take(range(3)), IMAGES)


def test_folders_of_other_kinds(tmp_path):
    for name in ("a.csv", "b.CSV", "c.xlsx"):
        (tmp_path / name).touch()
    told = "holds Excel files and CSV files, and nothing that is read; pass the path of the images, and a CSV"
    assert said_of(tmp_path).startswith(told)
    (tmp_path / "A01").mkdir()
    (tmp_path / "A01" / "d.png").write_bytes(PNG)
    told = "holds PNG images and Excel files and CSV files, and nothing that is read; save as TIFF, or write the pixels"
    assert said_of(tmp_path).startswith(told)


def test_a_pipe_says_what_to_do(tmp_path):
    os.mkfifo(tmp_path / "images")
    assert said_of(tmp_path / "images") == "is a pipe; a file or a folder is needed: copy what it gives to one"


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
    told = said_of(tmp_path)
    label = {"tiff": "OME-TIFF", "ome_zarr": "OME-Zarr"}[kind]
    assert told.startswith(
        f"holds mixed files, {label} images beside 1 Parquet table and 1 PNG image; pass format='{kind}'"
    )
    assert all_same(open_images(tmp_path, kind).take(range(3)), IMAGES)


def test_a_folder_of_several_kinds_of_tables_names_one(tmp_path):
    write_images(IMAGES, tmp_path / "a.arrow")
    for name in ("b.parquet", "c.parquet", "d.csv"):
        write_images(IMAGES[:1], tmp_path / name, "parquet")
    told = said_of(tmp_path)
    assert told.startswith("holds mixed files, ")
    assert re.search(r"2 Parquet tables, e\.g\. [bc]\.parquet", told)
    assert "1 Arrow IPC table, e.g. a.arrow" in told
    assert all_same(open_images(tmp_path, "arrow").take(range(3)), IMAGES)
    assert len(open_images(tmp_path, "parquet")) == 2


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_zarr_group_without_images(tmp_path, zarr_format):
    needs("ome_zarr")
    path = tmp_path / "store.zarr"
    root = zarr.create_group(path, zarr_format=zarr_format)
    what = "is a Zarr group without images: no multiscales, and no plate, are in its attributes; "
    assert said_of(path) == f"{what}pass the path of an OME-Zarr image, of a folder of such, or of a plate"
    root.require_group("experiment").create_group("field").create_array("0", data=IMAGES[0])
    with pytest.raises(FormatError, match=rf"experiment: {what}look into what it holds \('field'\), and pass the path"):
        open_images(path)
    said_of(path)


def test_a_folder_of_folders_of_zarr_images_names_one(tmp_path):
    needs("ome_zarr")
    write_images(IMAGES, tmp_path / "a.zarr")
    what = "a.zarr: is a folder of OME-Zarr images; folders are read one by one: pass "
    with pytest.raises(FormatError, match=re.escape(what)) as error:
        open_images(tmp_path)
    assert len(open_images(_passed(error))) == 3


def test_an_array_of_unknown_axes_says_what_to_do(tmp_path):
    """As of AnnData, which has many; `open_images` takes no axes."""
    needs("ome_zarr")
    zarr.create_group(tmp_path / "a.zarr").create_array("obs", data=np.zeros(5))
    with pytest.raises(FormatError, match=r"obs: the axes of a 1-D array are not known; name its dimensions .*, or s"):
        open_images(tmp_path / "a.zarr")


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_parts_of_a_plate_name_the_plate(tmp_path, version):
    needs("ome_zarr")
    path = written_plate(tmp_path / "plate.zarr", {"A/1": IMAGES[:2]}, version)
    assert all_same(open_images(path / "A" / "1").take(range(2)), IMAGES[:2])
    with pytest.raises(FormatError, match=r"A/1: is of an OME-Zarr plate; pass the path of the plate itself"):
        open_images(path / "A")


def test_a_folder_of_folders_of_tiffs_still_names_one(tmp_path):
    (tmp_path / "a").mkdir()
    tifffile.imwrite(tmp_path / "a" / "x.tif", IMAGES[0][0, 0, 0])
    with pytest.raises(FormatError, match=r"its folder 'a' does") as error:
        open_images(tmp_path)
    assert len(open_images(_passed(error))) == 1
