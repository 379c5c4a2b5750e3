"""Unreadable or deviating images, skipped and listed by ``on_error="skip"``; the oracle is tifffile."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import tifffile
import zarr
from click.testing import CliRunner

from omearrow_ds import FormatError, Storage, convert, open_images, write_crops, write_images
from omearrow_ds.cli import main
from tests.support.errors import raises, warns
from tests.support.objects import serving

WELLS = [f"A{number:02d}" for number in range(1, 7)]


def plane(number, shape=(8, 9), dtype="uint16"):
    return (np.arange(np.prod(shape)).reshape(shape) + 100 * number).astype(dtype)


def other_dtype(file):
    tifffile.imwrite(file, plane(0, dtype="uint8"))


def other_shape(file):
    tifffile.imwrite(file, plane(0, (8, 7)))


def wide(file):
    tifffile.imwrite(file, plane(0, dtype="int64"))


def no_image(file):
    file.write_bytes(b"II*\0" + bytes(300))


BAD = {
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(300)),
    "no image": no_image,
    "other dtype": other_dtype,
    "other shape": other_shape,
    "int64": wide,
}
PATTERN = "{well}_{channel}.tif"
HOW = {
    "folder": lambda folder: (folder, {}),
    "pattern": lambda folder: (folder, {"pattern": PATTERN}),
    "table": lambda folder: (listing(folder), {}),
}


def write(folder, *channels):
    folder.mkdir()
    for number, well in enumerate(WELLS):
        for c, channel in enumerate(channels or ("DAPI",)):
            tifffile.imwrite(folder / f"{well}_{channel}.tif", plane(10 * c + number))
    return folder


def listing(folder):
    path = folder.with_suffix(".csv")
    rows = [f"{well}_DAPI.tif,{folder},{well}" for well in WELLS]
    path.write_text("\n".join(["FileName_DAPI,PathName_DAPI,Metadata_Well", *rows]) + "\n")
    return path


def left_out(path, target, **options):
    """Convert, and return ids and reasons of skipped images; all others equal tifffile's."""
    with warns(UserWarning, path=target, mentions=target / "failed.csv"):
        convert(path, target, on_error="skip", **options)
    listed = pa.csv.read_csv(target / "failed.csv").to_pylist()
    assert json.loads((target / "parts.json").read_text())["failed"] == listed
    return {failure["id"]: failure["error"] for failure in listed}


@pytest.mark.parametrize("position", [0, 3, 5])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.share(5, "how", "bad", "position")
def test_one_bad_image_is_left_out_and_listed(tmp_path, how, bad, position):
    folder = write(tmp_path / "src")
    bad(folder / f"{WELLS[position]}_DAPI.tif")
    path, options = how(folder)
    errors = left_out(path, tmp_path / "x.parts", **options)
    ((image_id, error),) = errors.items()
    assert WELLS[position] in image_id
    assert f"{WELLS[position]}_DAPI.tif" in error
    with open_images(tmp_path / "x.parts") as source:
        wells = [image_id[:3] for image_id in source.image_ids]
        assert wells == [well for well in WELLS if well != WELLS[position]]
        for index, well in enumerate(wells):
            assert np.array_equal(source.read(index)[0, 0, 0], tifffile.imread(folder / f"{well}_DAPI.tif"))


@pytest.mark.parametrize("bad", ["other dtype", "other shape", "zeros"])
def test_one_bad_channel_leaves_out_its_field(tmp_path, bad):
    folder = write(tmp_path / "src", "DAPI", "GFP")
    BAD[bad](folder / "A01_GFP.tif")
    assert list(left_out(folder, tmp_path / "x.parts", pattern=PATTERN)) == ["A01"]
    with open_images(tmp_path / "x.parts") as source:
        assert list(source.image_ids) == WELLS[1:]
        for index, well in enumerate(WELLS[1:]):
            planes = [tifffile.imread(folder / f"{well}_{channel}.tif") for channel in ("DAPI", "GFP")]
            assert np.array_equal(source.read(index)[0, :, 0], planes)


def test_a_channel_that_differs_in_all_fields_is_an_error(tmp_path):
    folder = write(tmp_path / "src", "DAPI", "GFP")
    for well in WELLS:
        other_shape(folder / f"{well}_GFP.tif")
    with raises(FormatError, path=folder, mentions=("(1, 1, 1, 8, 9)", "(1, 1, 1, 8, 7)", "channels")):
        convert(folder, tmp_path / "x.parts", on_error="skip", pattern=PATTERN)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_tie_is_an_error_that_shows_both_shapes(tmp_path, how):
    folder = write(tmp_path / "src")
    for well in WELLS[::2]:
        other_shape(folder / f"{well}_DAPI.tif")
    path, options = how(folder)
    with raises(FormatError, path=path, mentions=("(1, 1, 1, 8, 9)", "(1, 1, 1, 8, 7)")) as caught:
        convert(path, tmp_path / "x.parts", on_error="skip", **options)
    assert {"A01", "A02"} <= set(re.findall("A0[0-9]", str(caught.value)))
    BAD["empty"](folder / "A01_DAPI.tif")
    assert len(left_out(path, tmp_path / "x.parts", **options)) == 3


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_images_of_which_none_can_be_read_are_an_error(tmp_path, how):
    folder = write(tmp_path / "src")
    for file in folder.iterdir():
        file.write_bytes(b"")
    path, options = how(folder)
    with raises(FormatError, path=folder / "A01_DAPI.tif", remedy=False):
        convert(path, tmp_path / "x.parts", on_error="skip", **options)


def test_opening_without_on_error_reads_one_file(tmp_path, monkeypatch):
    folder = write(tmp_path / "src")
    opened = []
    monkeypatch.setattr(
        tifffile.TiffFile,
        "__init__",
        lambda self, file, *more, init=tifffile.TiffFile.__init__, **how: (
            opened.append(file),
            init(self, file, **how),
        )[1],
    )
    open_images(folder, pattern=PATTERN).close()
    assert opened == [folder / "A01_DAPI.tif"]


def test_images_of_declared_shapes_are_not_compared(tmp_path):
    images = [plane(0), plane(1, (3, 4)), plane(2, (5, 2), "uint8"), plane(3)]
    for name in ("x.parquet", "x.tiffs"):
        write_images(images, tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name}.parts", on_error="skip")
        with open_images(tmp_path / f"{name}.parts") as source:
            assert [tuple(shape[3:]) for shape in source.shapes.tolist()] == [image.shape for image in images]


@pytest.mark.parametrize("version", [2, 3])
def test_a_bad_ome_zarr_image_is_left_out(tmp_path, version):
    (tmp_path / "src").mkdir()
    for number, well in enumerate(WELLS):
        pixels = plane(number, (8, 7) if number == 5 else (8, 9))
        zarr.create_array(tmp_path / "src" / f"{well}.zarr", data=pixels, chunks=(4, 4), zarr_format=version)
    for file in (tmp_path / "src" / "A01.zarr").iterdir():
        if file.name in ("zarr.json", ".zarray"):
            file.write_text("{")
    assert list(left_out(tmp_path / "src", tmp_path / "x.parts")) == ["A01", "A06"]
    with open_images(tmp_path / "x.parts") as source:
        assert list(source.image_ids) == WELLS[1:5]
        assert np.array_equal(source.read(3)[0, 0, 0], plane(4))


@pytest.mark.parametrize("how", [{}, {"pattern": PATTERN}], ids=["folder", "pattern"])
def test_bad_images_in_a_bucket_are_left_out(tmp_path, how):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    (tmp_path / "served" / "lab").mkdir(parents=True)
    folder = write(tmp_path / "served" / "lab" / "src")
    BAD["zeros"](folder / "A01_DAPI.tif")
    other_dtype(folder / "A04_DAPI.tif")
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        errors = left_out("s3://lab/src", tmp_path / "x.parts", storage=storage, **how)
    assert [image_id[:3] for image_id in errors] == ["A01", "A04"]
    with open_images(tmp_path / "x.parts") as source:
        assert np.array_equal(source.read(2)[0, 0, 0], tifffile.imread(folder / "A05_DAPI.tif"))


def test_crops_of_bad_fields_are_left_out(tmp_path):
    folder = write(tmp_path / "src")
    BAD["empty"](folder / "A01_DAPI.tif")
    other_shape(folder / "A03_DAPI.tif")
    cells = pa.table({"image_id": [f"{well}_DAPI" for well in WELLS], "y": [4] * 6, "x": [4] * 6})
    with warns(UserWarning, path=tmp_path / "x.parts", mentions="2 images"):
        write_crops(folder, cells, tmp_path / "x.parts", center=("y", "x"), crop_size=(3, 3), on_error="skip")
    with open_images(tmp_path / "x.parts") as source:
        field_ids = source.columns["Metadata_image_id"].to_pylist()
        assert field_ids == [f"{WELLS[number]}_DAPI" for number in (1, 3, 4, 5)]
        for index, image_id in enumerate(field_ids):
            assert np.array_equal(source.read(index)[0, 0, 0], tifffile.imread(folder / f"{image_id}.tif")[3:6, 3:6])


@pytest.mark.parametrize("how", [{}, {"pattern": PATTERN}], ids=["folder", "pattern"])
def test_other_processes_leave_out_the_same_images(tmp_path, how):
    folder = write(tmp_path / "src")
    BAD["zeros"](folder / "A01_DAPI.tif")
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        errors = left_out(folder, tmp_path / "x.parts", executor=pool, part_bytes=300, **how)
    assert [image_id[:3] for image_id in errors] == ["A01"]
    assert left_out(shutil.copytree(folder, tmp_path / "again"), tmp_path / "y.parts", **how).keys() == errors.keys()


@pytest.mark.filterwarnings("default:.*unreadable")
def test_the_command_leaves_out_the_first_file(tmp_path):
    folder = write(tmp_path / "src")
    BAD["empty"](folder / "A01_DAPI.tif")
    done = CliRunner().invoke(main, ["convert", str(folder), str(tmp_path / "x.parts"), "--on-error", "skip"])
    assert done.exit_code == 0, done.output
    assert "1 image is unreadable" in done.output
    assert len(open_images(tmp_path / "x.parts")) == 5


def test_listed_pages_of_a_bad_file_are_left_out(tmp_path):
    (tmp_path / "src").mkdir()
    for number, well in enumerate(WELLS):
        tifffile.imwrite(tmp_path / "src" / f"{well}.tif", np.stack([plane(number), plane(10 + number)]), metadata=None)
    BAD["zeros"](tmp_path / "src" / "A01.tif")
    rows = [f"{well}.tif,{tmp_path / 'src'},{frame},{well},{frame}" for well in WELLS for frame in (0, 1)]
    header = "FileName_DAPI,PathName_DAPI,Frame_DAPI,Metadata_Well,Metadata_Site"
    (tmp_path / "list.csv").write_text("\n".join([header, *rows]) + "\n")
    assert list(left_out(tmp_path / "list.csv", tmp_path / "x.parts")) == ["A01_0", "A01_1"]
    with open_images(tmp_path / "x.parts") as source:
        assert list(source.image_ids) == [f"{well}_{frame}" for well in WELLS[1:] for frame in (0, 1)]
        assert np.array_equal(source.read(3)[0, 0, 0], tifffile.imread(tmp_path / "src" / "A03.tif", key=1))
