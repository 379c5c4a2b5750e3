"""Files that a table lists for two channels or fields; the oracles are pandas and tifffile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import ArgumentError, ColumnError, FormatError, OMEArrowDataset, Storage, open_images
from tests.support.errors import raises, warns
from tests.support.objects import serving

WELLS = ("A01", "A02", "A03")


def write_tiff(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    pages = np.arange(3 * 4 * 5, dtype=np.uint16).reshape(3, 4, 5) + 100 * number
    tifffile.imwrite(path, pages if path.stem.startswith("stack") else pages[0], photometric="minisblack")


@pytest.fixture
def plate(tmp_path):
    """A folder with two files per well, and the columns of a table that lists them."""
    columns = {"FileName_DNA": [], "FileName_ER": [], "Metadata_Well": list(WELLS)}
    for number, well in enumerate(WELLS):
        for channel in ("DNA", "ER"):
            write_tiff(tmp_path / "p" / f"{well}_{channel}.tif", 2 * number + (channel == "ER"))
            columns[f"FileName_{channel}"].append(f"{well}_{channel}.tif")
    return tmp_path / "p", columns


def table(folder, columns, name="t.csv"):
    pd.DataFrame(columns).to_csv(folder / name, index=False)
    return folder / name


def check_files(source, rows):
    """Compare fields with tifffile's pixels of their files, one file per channel."""
    assert len(source) == len(rows)
    for index, files in enumerate(rows):
        np.testing.assert_array_equal(source.read(index)[0, :, 0], [tifffile.imread(file) for file in files])


def test_one_file_as_two_channels_is_refused_and_one_channel_opens(plate):
    folder, columns = plate
    path = table(folder, columns | {"FileName_AGP": columns["FileName_ER"]})
    with raises(FormatError, path=path, mentions=["'ER'", "'AGP'", "row 0", "A01_ER.tif", "channels"]):
        open_images(path)
    with open_images(path, channels=["AGP", "DNA"]) as source:
        check_files(source, [[folder / f"{well}_ER.tif", folder / f"{well}_DNA.tif"] for well in WELLS])


def test_one_file_in_two_fields_is_refused(plate):
    folder, columns = plate
    columns["FileName_DNA"][2] = columns["FileName_DNA"][0]
    path = table(folder, columns)
    with raises(FormatError, path=path, mentions=["'DNA'", "row 0", "row 2", "A01_DNA.tif", "channels"]):
        open_images(path)
    with open_images(path, channels=["ER"]) as source:
        check_files(source, [[folder / f"{well}_ER.tif"] for well in WELLS])
    with raises(FormatError, path=path):
        OMEArrowDataset(path, preload=False)


@pytest.mark.parametrize("column", ["Metadata_Well", "Metadata_Plate", "Metadata_Site", "Image_Metadata_Well"])
def test_all_files_in_two_fields_are_refused_by_plate_well_and_site(plate, column):
    folder, columns = plate
    for channel in ("DNA", "ER"):
        columns[f"FileName_{channel}"][2] = columns[f"FileName_{channel}"][1]
    columns[column] = columns.pop("Metadata_Well") if "Well" in column else [1, 2, 3]
    columns.pop("Metadata_Well" if column != "Metadata_Well" else "", None)
    path = table(folder, columns)
    with raises(FormatError, path=path, mentions=["rows 1 and 2", column, "A02_DNA.tif", "channels"]):
        open_images(path)


@pytest.mark.parametrize(
    "other",
    [
        "x/../A01_DNA.tif",
        "./A01_DNA.tif",
        "//A01_DNA.tif",
        "{folder}/A01_DNA.tif",
        "link.tif",
        "x/link of a link.tif",
        "linked/A01_DNA.tif",
        "linked/link.tif",
    ],
)
def test_other_paths_of_one_file_are_one_file(plate, other):
    folder, columns = plate
    (folder / "x").mkdir()
    (folder / "link.tif").symlink_to(folder / "A01_DNA.tif")
    (folder / "x" / "link of a link.tif").symlink_to("../link.tif")
    (folder / "linked").symlink_to(".")
    if other.startswith("//"):
        other = f"{folder.parent}//{folder.name}{other}"
    columns["FileName_DNA"][1] = other.format(folder=folder)
    with raises(FormatError, mentions=["row 0", "row 1", "channels"]):
        open_images(table(folder, columns))


def test_a_url_of_a_local_file_is_that_file(plate):
    folder, columns = plate
    del columns["FileName_ER"]
    columns["URL_ER"] = [f"file://{folder}/{name}" for name in columns["FileName_DNA"]]
    with raises(FormatError, mentions=["'DNA'", "'ER'", "row 0"]):
        open_images(table(folder, columns))


def test_files_of_one_name_in_other_folders_are_other_files(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for number, folder in enumerate(folders):
        write_tiff(folder / "x.tif", number)
    (tmp_path / "c" / "X.tif").write_bytes((tmp_path / "a" / "x.tif").read_bytes())
    columns = {
        "FileName_DNA": ["x.tif"] * 3 + ["X.tif"],
        "PathName_DNA": [str(folder) for folder in folders] + [str(tmp_path / "c")],
    }
    with open_images(table(tmp_path, columns)) as source:
        check_files(source, [[folder / "x.tif"] for folder in folders] + [[tmp_path / "c" / "X.tif"]])


@pytest.mark.parametrize(
    ("frames", "refused"),
    [
        pytest.param(([0, 1], [2, 0]), True, id="a page in two fields"),
        pytest.param(([0, 1], [0, 2]), True, id="a page as two channels"),
        pytest.param(([0], [1]), False, id="two pages"),
    ],
)
def test_pages_of_one_file_may_be_two_channels(tmp_path, frames, refused):
    write_tiff(tmp_path / "stack.tif", 1)
    files = ["stack.tif"] * len(frames[0])
    path = table(tmp_path, {"FileName_A": files, "Frame_A": frames[0], "FileName_B": files, "Frame_B": frames[1]})
    if refused:
        with raises(FormatError, mentions=["stack.tif", "page 0", "channels"]):
            open_images(path)
        return
    with open_images(path) as source:
        np.testing.assert_array_equal(source.read(0)[0, :, 0], tifffile.imread(tmp_path / "stack.tif", key=[0, 1]))


@pytest.mark.parametrize("whole_first", [True, False])
def test_a_whole_file_and_a_page_of_it_are_the_same_pixels(tmp_path, whole_first):
    write_tiff(tmp_path / "stack.tif", 1)
    columns = {"FileName_A": ["stack.tif"], "FileName_B": ["stack.tif"], f"Frame_{'B' if whole_first else 'A'}": [2]}
    with raises(FormatError, mentions=["'A'", "'B'", "page 2"]):
        open_images(table(tmp_path, columns))


def test_series_0_is_the_file_without_a_series(tmp_path):
    write_tiff(tmp_path / "a.tif", 1)
    columns = {"FileName_A": ["a.tif"], "Series_A": [0], "FileName_B": ["a.tif"]}
    with raises(FormatError, mentions=["'A'", "'B'"]):
        open_images(table(tmp_path, columns))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_of_equal_files_stay_one_field(plate, suffix):
    folder, columns = plate
    frame = pd.DataFrame(columns).loc[np.repeat(np.arange(3), [3, 1, 2])]
    frame = frame.assign(ImageNumber=range(6), Metadata_ObjectNumber=range(6), Metadata_Site=1.0)
    frame.iloc[1, frame.columns.get_loc("Metadata_Site")] = np.nan  # Unknown, not another site.
    path = folder / f"t.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    with open_images(path) as source:
        check_files(source, [[folder / f"{well}_DNA.tif", folder / f"{well}_ER.tif"] for well in WELLS])
        assert source.columns["Metadata_Well"].to_pylist() == list(WELLS)
        assert source.rows.tolist() == [0, 3, 4]


def test_a_doubled_file_of_a_field_that_is_left_out_does_not_count(plate):
    folder, columns = plate
    columns["FileName_DNA"][2], columns["FileName_ER"][2] = columns["FileName_DNA"][0], "missing.tif"
    with warns(UserWarning, mentions="1 of 3"):
        source = open_images(table(folder, columns), incomplete="skip")
    check_files(source, [[folder / f"{well}_DNA.tif", folder / f"{well}_ER.tif"] for well in WELLS[:2]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.tuples(st.sampled_from("ab"), st.integers(0, 2))] * 2), min_size=1, max_size=5))
def test_a_table_opens_only_when_pandas_finds_no_page_twice(rows):
    """The space is files x pages x channels x rows, including equal rows."""
    frame = pd.DataFrame([(*dna, *er) for dna, er in rows], columns=["file_A", "page_A", "file_B", "page_B"])
    fields = frame.drop_duplicates()
    pages = pd.concat(
        [
            fields[["file_A", "page_A"]].set_axis(["file", "page"], axis=1),
            fields[["file_B", "page_B"]].set_axis(["file", "page"], axis=1),
        ]
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, file in enumerate("ab"):
            write_tiff(folder / f"stack_{file}.tif", number)
        columns = {}
        for channel in "AB":
            columns[f"FileName_{channel}"] = [f"stack_{file}.tif" for file in frame[f"file_{channel}"]]
            columns[f"Frame_{channel}"] = frame[f"page_{channel}"].tolist()
        path = table(folder, columns)
        if pages.duplicated().any():
            with raises(FormatError, path=path, mentions="channels"):
                open_images(path)
            return
        with open_images(path) as source:
            assert len(source) == len(fields)
            for index, field in enumerate(fields.itertuples()):
                expected = [
                    tifffile.imread(folder / f"stack_{file}.tif", key=page)
                    for file, page in ((field.file_A, field.page_A), (field.file_B, field.page_B))
                ]
                np.testing.assert_array_equal(source.read(index)[0, :, 0], expected)


def test_opening_looks_at_folders_not_at_each_file(tmp_path, monkeypatch):
    names = [f"f{number}.tif" for number in range(200)]
    for number, name in enumerate(names):
        write_tiff(tmp_path / name, number)
    path = table(tmp_path, {"FileName_A": names[:100], "FileName_B": names[100:]})
    looked_at = []
    stat = os.stat

    def counted(file, *args, **kwargs):
        looked_at.append(os.fspath(file) if not isinstance(file, int) else "")
        return stat(file, *args, **kwargs)

    monkeypatch.setattr(os, "stat", counted)
    with open_images(path) as source:
        assert len(source) == 100
    assert len({file for file in looked_at if file.endswith(".tif")}) <= 2


# Illumination functions.


@pytest.mark.parametrize("suffix", ["npy", "mat", "tif", "tiff"])
@pytest.mark.parametrize("prefix", ["", "Image_"])
def test_illumination_functions_are_no_channels_whatever_their_suffix(plate, suffix, prefix):
    folder, columns = plate
    columns = {f"{prefix}{name}": values for name, values in columns.items()}
    for channel in ("DNA", "ER"):
        columns[f"{prefix}FileName_Illum{channel}"] = [f"plate_Illum{channel}.{suffix}"] * 3
        columns[f"{prefix}PathName_Illum{channel}"] = [str(folder)] * 3
        columns[f"{prefix}Frame_Illum{channel}"] = [0, 0, None]
        write_tiff(folder / f"plate_Illum{channel}.{suffix}", 9)
    with open_images(table(folder, columns)) as source:
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["DNA", "ER"]
        check_files(source, [[folder / f"{well}_DNA.tif", folder / f"{well}_ER.tif"] for well in WELLS])
        assert source.columns["FileName_IllumER"].to_pylist() == [str(folder / f"plate_IllumER.{suffix}")] * 3
    with raises(ArgumentError, option="channels", remedy=False):
        open_images(table(folder, columns), channels=["DNA", "IllumDNA"])


def test_illumination_functions_of_several_suffixes_are_listed(plate):
    folder, columns = plate
    columns["FileName_IllumDNA"] = ["a.npy", "b.tif", "c.mat"]
    expected = [str(folder / name) for name in columns["FileName_IllumDNA"]]
    with open_images(table(folder, columns)) as source:
        assert source.columns["FileName_IllumDNA"].to_pylist() == expected


def test_illumination_functions_are_the_only_columns_when_no_metadata_is_listed(plate):
    folder, columns = plate
    columns = {name: values for name, values in columns.items() if not name.startswith("Metadata_")}
    columns["FileName_IllumDNA"] = ["a.npy", "b.npy", "c.npy"]
    with open_images(table(folder, columns)) as source:
        assert source.columns.to_pydict() == {
            "FileName_IllumDNA": [str(folder / name) for name in ("a.npy", "b.npy", "c.npy")]
        }
        check_files(source, [[folder / f"{well}_DNA.tif", folder / f"{well}_ER.tif"] for well in WELLS])


def test_a_table_of_only_illumination_functions_lists_no_images(tmp_path):
    with pytest.raises(ColumnError):
        open_images(table(tmp_path, {"FileName_IllumDNA": ["a.tif"]}))


def test_listed_illumination_functions_divide_pixels(plate):
    folder, columns = plate
    function = np.linspace(1, 2, 20, dtype=np.float32).reshape(4, 5)
    np.save(folder / "illum.npy", function)
    columns |= {"FileName_IllumDNA": ["illum.npy"] * 3, "FileName_IllumER": ["illum.npy"] * 3}
    dataset = OMEArrowDataset(table(folder, columns), illumination=True)
    expected = tifffile.imread(folder / "A02_ER.tif") / function / np.float32(65535)
    np.testing.assert_allclose(dataset[1][1], expected, rtol=1e-6)


def test_doubled_urls_are_refused(tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    write_tiff(tmp_path / "served" / "lab" / "a b.tif", 1)
    write_tiff(tmp_path / "served" / "lab" / "c.tif", 2)
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        for first, second in (
            ("s3://lab/c.tif", "s3://lab/c.tif"),
            ("s3://lab/c.tif", "S3://lab//c.tif"),
            (f"{server.url}/lab/a%20b.tif", f"{server.url}/lab/a b.tif"),
        ):
            path = table(tmp_path, {"URL_A": [first], "URL_B": [second]})
            with raises(FormatError, path=path, mentions=["'A'", "'B'", "row 0", "channels"]):
                open_images(path, storage=storage, root=server.url if first.startswith("http") else None)
        path = table(tmp_path, {"URL_A": ["s3://lab/c.tif"], "URL_B": ["s3://lab/a b.tif"]})
        with open_images(path, storage=storage) as source:
            check_files(source, [[tmp_path / "served" / "lab" / name for name in ("c.tif", "a b.tif")]])


def test_rows_without_files_are_left_out_when_fields_may_be_incomplete(plate):
    folder, columns = plate
    empty = {"FileName_DNA": [None, None], "FileName_ER": [None, None], "Metadata_Well": ["B01", "B02"]}
    path = table(folder, {name: values + empty[name] for name, values in columns.items()})
    with pytest.warns(UserWarning, match="2 of 5"):
        source = open_images(path, incomplete="skip")
    check_files(source, [[folder / f"{well}_DNA.tif", folder / f"{well}_ER.tif"] for well in WELLS])
    assert source.columns["Metadata_Well"].to_pylist() == list(WELLS)
