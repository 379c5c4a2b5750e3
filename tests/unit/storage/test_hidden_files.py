"""Names that begin with a dot, which searches ignore; the oracles are tifffile and zarr."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import FormatError, OMEArrowDataset, Storage, convert, open_images, write_images
from omearrow_ds.storage.hashes import hash_of
from omearrow_ds.storage.part_files import has_hidden
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.plates import written_plate
from tests.support.strategies import SUFFIX

APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(50)


def pixels(number):
    return (np.arange(30, dtype=np.uint16) + 100 * number).reshape(1, 1, 1, 5, 6)


def write_tiff(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, pixels(number)[0, 0, 0], photometric="minisblack")


def hide(path):
    """Put an AppleDouble file, a hidden image of another shape and a hidden folder next to a file."""
    (path.parent / f"._{path.name}").write_bytes(APPLE_DOUBLE)
    tifffile.imwrite(path.parent / f".thumb_{path.name}", np.zeros((2, 2), np.uint8), photometric="minisblack")
    write_tiff(path.parent / ".snapshot" / path.name, 99)


def check_files(source, files):
    assert len(source) == len(files)
    for index, file in enumerate(files):
        np.testing.assert_array_equal(source.read(index)[0, 0, 0], tifffile.imread(file))


@pytest.mark.parametrize("given_format", [None, "tiff"])
def test_tiff_folder_has_only_visible_images(tmp_path, given_format):
    files = [tmp_path / f"{name}.tif" for name in "ab"]
    for number, file in enumerate(files):
        write_tiff(file, number)
        hide(file)
    with open_images(tmp_path, given_format) as source:
        check_files(source, files)
    for index, image in enumerate(OMEArrowDataset(tmp_path, normalize=False)):
        np.testing.assert_array_equal(image[0], tifffile.imread(files[index]))


@pytest.mark.parametrize("name", ["tiff", "ome_zarr"])
def test_written_folder_opens_when_macos_copied_it(stored, name):
    path = stored(name, [pixels(0), pixels(1)])
    for entry in list(path.iterdir()):
        (path / f"._{entry.name}").write_bytes(APPLE_DOUBLE)
    with open_images(path) as source:
        np.testing.assert_array_equal(source.take([0, 1]), [pixels(0), pixels(1)])


def test_hidden_tables_do_not_make_a_tiff_folder_mixed(tmp_path):
    write_tiff(tmp_path / "a.tif", 1)
    write_images([pixels(0)], tmp_path / ".a.parquet", "parquet", axes="TCZYX")
    with open_images(tmp_path) as source:
        check_files(source, [tmp_path / "a.tif"])


def test_folder_of_only_hidden_files_is_refused_and_their_names_open(tmp_path):
    folder = tmp_path / "p"
    write_tiff(folder / ".a.tif", 3)
    (folder / "._a.tif").write_bytes(APPLE_DOUBLE)
    with raises(FormatError, path=folder, mentions="dot"):
        open_images(folder)
    with raises(FormatError, path=folder):
        open_images(folder, pattern="{well}.tif")
    with open_images(folder / ".a.tif") as source:
        check_files(source, [folder / ".a.tif"])
    with open_images([folder / ".a.tif"]) as source:
        check_files(source, [folder / ".a.tif"])


def test_hidden_folder_and_table_open_when_they_are_named(tmp_path):
    folder = tmp_path / ".plate"
    write_tiff(folder / "a.tif", 3)
    hide(folder / "a.tif")
    pd.DataFrame({"FileName_DNA": ["a.tif"]}).to_csv(folder / ".load_data.csv", index=False)
    for source in (open_images(folder), open_images(folder / ".load_data.csv"), open_images(f"{folder}/*.tif")):
        with source:
            check_files(source, [folder / "a.tif"])


@pytest.mark.parametrize(
    ("pattern", "expected", "others"),
    [
        pytest.param("{well}.tif", ["A1.tif", "B2.tif"], [".H1.tif", ".raw/D4.tif", "deep/C3.tif"], id="braces"),
        pytest.param(r"(?P<well>.+)\.tif", ["A1.tif", "B2.tif"], [".H1.tif", ".raw/D4.tif"], id="expression"),
        pytest.param(
            r"(?:.*/)?(?P<well>[^/]+)\.tif", ["A1.tif", "deep/C3.tif"], [".H1.tif", ".raw/D4.tif"], id="any folder"
        ),
        pytest.param("{_}/{well}.tif", ["deep/C3.tif"], [".raw/D4.tif", ".H1.tif"], id="one folder"),
        pytest.param(".{well}-1.tif", [".H1-1.tif"], [".thumb.tif"], id="braces with a dot"),
        pytest.param(r"\.(?P<well>[A-H]\d)\.tif", [".H1.tif"], [".thumb.tif"], id="expression with a dot"),
        pytest.param(".raw/{well}.tif", [".raw/D4.tif"], [".other/E5.tif", ".H1.tif"], id="folder with a dot"),
        pytest.param(r"\.raw/(?P<well>.+)\.tif", [".raw/D4.tif"], [".H1.tif"], id="expression for a folder with a dot"),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.share(2, "pattern", "remote")
def test_pattern_matches_hidden_names_only_when_it_begins_with_a_dot(tmp_path, pattern, expected, others, remote):
    folder = tmp_path / "served" / "lab" / "p"
    for number, name in enumerate((*expected, *others)):
        write_tiff(folder / name, number)
        if not name.startswith(".H1-"):
            (folder / name).with_name(f"._{(folder / name).name}").write_bytes(APPLE_DOUBLE)
    if not remote:
        with open_images(folder, pattern=pattern) as source:
            check_files(source, [folder / name for name in expected])
        return
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with open_images("s3://lab/p", pattern=pattern, storage=storage) as source:
            check_files(source, [folder / name for name in expected])


@pytest.mark.parametrize("name", ["parquet", "arrow", "vortex"])
def test_folder_and_globs_of_tables_have_only_visible_parts(tmp_path, name):
    suffix = SUFFIX[name]
    for number, part in enumerate(("a", "b", ".c", "d/e", "d/.f", ".g/h")):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        write_images([pixels(number)], tmp_path / f"{part}{suffix}", name, axes="TCZYX", image_ids=[part])
    (tmp_path / f"._a{suffix}").write_bytes(APPLE_DOUBLE)
    expected = {
        "": ["a", "b", "d/e"],
        f"*{suffix}": ["a", "b"],
        f"**/*{suffix}": ["a", "b", "d/e"],
        f".c*{suffix}": [".c"],
        f".?{suffix}": [".c"],
        f".g/*{suffix}": [".g/h"],
        f"d/.*{suffix}": ["d/.f"],
    }
    for glob, parts in expected.items():
        with open_images(f"{tmp_path}/{glob}".rstrip("/")) as source:
            assert list(source.image_ids) == parts
    with open_images([tmp_path / f".c{suffix}", tmp_path / f"a{suffix}"]) as source:
        assert list(source.image_ids) == [".c", "a"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", ".a", "_a", ".b", "b"]), min_size=1, max_size=3), st.data())
def test_glob_has_hidden_names_only_when_a_step_begins_alike(names, data):
    """A step matches hidden names only if it starts with the same character; wildcards never do."""
    steps = [data.draw(st.sampled_from([name, f"{name[0]}*", "*", "?a"])) for name in names]
    is_matched = all(name[0] not in "._" or step[0] == name[0] for name, step in zip(names, steps, strict=True))
    if is_matched:
        assert not has_hidden(names, steps)
    elif not any(step[0] in "._" for step in steps):
        assert has_hidden(names, steps)


def test_ome_zarr_folder_and_plate_have_only_visible_images(tmp_path):
    zarr = pytest.importorskip("zarr")
    folder = tmp_path / "images"
    folder.mkdir()
    for number, name in enumerate(("a.zarr", "b.zarr", ".c.zarr")):
        zarr.create_array(folder / name, data=pixels(number)[0, 0, 0])
    (folder / "._a.zarr").write_bytes(APPLE_DOUBLE)
    with open_images(folder) as source:
        assert list(source.image_ids) == ["a", "b"]
        np.testing.assert_array_equal(source.read(1)[0, 0, 0], zarr.open_array(folder / "b.zarr", mode="r")[...])
    with open_images(folder / ".c.zarr") as source:
        np.testing.assert_array_equal(source.read(0), pixels(2))
    path = written_plate(tmp_path / "plate.zarr", {"A/1": [pixels(0), pixels(1)]}, "0.4")
    for entry in [entry for entry in path.rglob("*") if entry.is_file()]:
        entry.with_name(f"._{entry.name}").write_bytes(APPLE_DOUBLE)
    with open_images(path) as source:
        np.testing.assert_array_equal(source.take([0, 1]), [pixels(0), pixels(1)])


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_group_keeps_images_whose_names_begin_with_a_dot(tmp_path, version):
    """All contents of a Zarr group belong to it: `.zgroup`, `.zattrs` and nodes of any name."""
    zarr = pytest.importorskip("zarr")
    group = zarr.create_group(tmp_path / "g.zarr", zarr_format=version)
    for number, name in enumerate((".hidden", "shown")):
        group.create_array(name, data=pixels(number)[0, 0, 0])
    with open_images(tmp_path / "g.zarr") as source:
        assert list(source.image_ids) == [".hidden", "shown"]
        np.testing.assert_array_equal(source.read(0)[0, 0, 0], group[".hidden"][...])


def test_masks_are_visible_files_unless_the_name_begins_with_a_dot(tmp_path):
    write_tiff(tmp_path / "p" / "A1.tif", 1)
    write_tiff(tmp_path / "masks" / "A1_x_mask.tif", 2)
    (tmp_path / "masks" / "._A1_x_mask.tif").write_bytes(APPLE_DOUBLE)
    write_tiff(tmp_path / "masks" / ".A1_hidden.tif", 3)
    for name, number in (("{_}_mask.tif", 2), ("{field}_{_}.tif", 2), (".{field}_{_}.tif", 3), (".A1_{_}.tif", 3)):
        dataset = OMEArrowDataset(tmp_path / "p", masks=str(tmp_path / "masks" / name), normalize=False)
        np.testing.assert_array_equal(dataset[0][1].squeeze(), pixels(number)[0, 0, 0])


def test_lancedb_folder_has_hidden_tables_only_by_name(tmp_path):
    pytest.importorskip("lance")
    for number, name in enumerate(("a", ".b")):
        write_images([pixels(number)], tmp_path / "db.lance", "lance", axes="TCZYX")
        (tmp_path / "db").mkdir(exist_ok=True)
        shutil.move(tmp_path / "db.lance", tmp_path / "db" / f"{name}.lance")
    with open_images(tmp_path / "db") as source:
        np.testing.assert_array_equal(source.read(0), pixels(0))
    with open_images(tmp_path / "db", table=".b") as source:
        np.testing.assert_array_equal(source.read(0), pixels(1))


def test_folder_with_hidden_iceberg_metadata_is_a_folder_of_tables(tmp_path):
    write_images([pixels(0)], tmp_path / "a.parquet", "parquet", axes="TCZYX")
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "._1.metadata.json").write_bytes(APPLE_DOUBLE)
    with open_images(tmp_path) as source:
        np.testing.assert_array_equal(source.read(0), pixels(0))


def test_urls_have_only_visible_images(tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    folder = tmp_path / "served" / "lab" / "p"
    files = [folder / f"{name}.tif" for name in "ab"]
    for number, file in enumerate(files):
        write_tiff(file, number)
        hide(file)
    write_tiff(tmp_path / "served" / "lab" / "hidden" / ".a.tif", 0)
    write_images([pixels(5)], folder / ".x.parquet", "parquet", axes="TCZYX")
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        for url in ("s3://lab/p", "s3://lab/p/*.tif", "s3://lab/**/*.tif"):
            with open_images(url, storage=storage) as source:
                check_files(source, files)
        for url in ("s3://lab/p/.thumb_a.tif", "s3://lab/p/.thumb_a*"):
            with open_images(url, storage=storage) as source:
                check_files(source, [folder / ".thumb_a.tif"])
        with raises(FormatError, path="s3://lab/hidden"):
            open_images("s3://lab/hidden", storage=storage)


def test_hashes_of_folders_include_hidden_files(tmp_path):
    """Zarr describes arrays in `.zarray`, so a fingerprint without it would miss a change."""
    folder = tmp_path / "a"
    for name, text in ((".zarray", b"x"), ("0/.zattrs", b"yy"), ("0/0", b"zzz")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    expected = hashlib.sha256()
    for name in sorted((".zarray", "0/.zattrs", "0/0"), key=lambda name: (folder / name).parts):
        expected.update(f"{name} {(folder / name).stat().st_size}\n".encode() + (folder / name).read_bytes())
    assert hash_of(folder) == expected.hexdigest()


def test_parts_with_hidden_files_stay_whole(tmp_path):
    convert_from = tmp_path / "a.parquet"
    write_images([pixels(number) for number in range(4)], convert_from, axes="TCZYX")
    convert(convert_from, tmp_path / "a.parts", format="lance", part_bytes=200)
    for entry in [entry for entry in (tmp_path / "a.parts").iterdir() if entry.is_file()]:
        entry.with_name(f"._{entry.name}").write_bytes(APPLE_DOUBLE)
    with open_images(tmp_path / "a.parts") as source:
        np.testing.assert_array_equal(source.take(range(4)), [pixels(number) for number in range(4)])
    assert pq.read_schema(convert_from).names  # The source of the parts is still a Parquet file.
