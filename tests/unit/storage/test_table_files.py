"""Column types of text tables; the oracles are the rule in Python, value by value, and the csv module."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    FormatError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    convert,
    open_images,
    stats,
    write_crops,
    write_images,
)
from omearrow_ds.cli import main
from omearrow_ds.storage import table_files
from omearrow_ds.storage.table_files import TableFile
from omearrow_ds.text import as_flags
from tests.support.errors import raises

NULLS = {"", "NA", "N/A", "n/a", "NULL", "null", "nan", "NaN", "-nan", "-NaN", "#N/A", "#NA", "#N/A N/A"}
NULLS |= {"1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"}
BLANKS = " \t"
INT64 = range(-(2**63), 2**63)


def is_integer(text):
    digits = text.removeprefix("-")
    is_canonical = digits == "0" or (digits.isascii() and digits.isdigit() and digits[0] != "0")
    return is_canonical and int(text) in INT64


def is_float(text):
    if is_integer(text) or text.removeprefix("-").lower() in ("inf", "infinity", "nan"):
        return True
    mantissa, exponent_sign, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.removeprefix("-").partition(".")
    has_leading_zero = len(whole) > 1 and whole[0] == "0"
    parts = (whole, fraction, exponent.lstrip("+-"))
    if has_leading_zero or not all(part.isascii() and part.isdigit() for part in parts if part):
        return False
    if exponent_sign and not re.fullmatch("[+-]?[0-9]+", exponent):
        return False
    return bool(fraction) or (whole != "" and "." not in mantissa and exponent.startswith("-"))


def typed(cells):
    """Return the type and values of a column by the rule."""
    known = [cell.strip(BLANKS) for cell in cells if cell not in NULLS]
    numbers = [None if cell in NULLS else cell.strip(BLANKS) or None for cell in cells]
    if not any(known):
        return "null", [None] * len(cells)
    if all(is_integer(text) for text in known if text):
        return "int64", [None if text is None else int(text) for text in numbers]
    if all(is_float(text) for text in known if text):
        return "double", [None if text is None else float(text) for text in numbers]
    return "string", [None if cell in NULLS else cell for cell in cells]


def write(path, columns, encoding="utf-8"):
    """Write columns of text with Python's csv module."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter="," if ".csv" in path.name else "\t")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def check(table, columns):
    for name, cells in columns.items():
        kind, values = typed(cells)
        assert str(table[name].type) == kind, (name, cells)
        if kind == "double":
            cells_with_nan = [np.nan if value is None else value for value in table[name].to_pylist()]
            np.testing.assert_array_equal(cells_with_nan, [np.nan if value is None else value for value in values])
            assert table[name].null_count == values.count(None)
        else:
            assert table[name].to_pylist() == values


EDGES = (
    *("0", "-0", "7", "-12", "007", "00", "-01", "+3", "1_000", "0x1F", "٣", "\uff11"),
    *("0.10", ".5", "-.5", "1.", "1.e5", "00.5", "-0.5", "+0.5", "1.00E-05", "1e-04", "1.5e+20", "1.5E5", "12e-1"),
    *("1E5", "1e+20", "1e5", "0e0", "0e-5", "01e-5", "1e-400", "1.5e400", "e5", "1e", "-", ".", "-.", "--1", "1-2"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "1" * 30),
    *("true", "False", "2024-01-31", "12:30", "12:30:01", "2024-01-31 12:30:01", "A01", "1;2", "1 2", 'a"b', "µM"),
    *("inf", "-inf", "Inf", "Infinity", "NAN", "nan(ind)", "None", "", " ", "\t", "NA", "nan", "NaN", "null", "n/a"),
    *(" 7", "7 ", " 0.5", "\t3", " 007", " nan", " NA", "7\u00a0"),
)
CELLS = st.one_of(
    st.sampled_from(EDGES),
    st.integers(-(2**70), 2**70).map(str),
    st.integers(-20, 20).map(str),
    st.floats().map(repr),
    st.floats(allow_nan=False).map("{:.2E}".format),
    st.text("0123456789+-.eE ", max_size=6),
)
ALIKE = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.floats(0.1, 10).map(repr),
    st.integers(0, 99).map("{:02d}".format),
)


@st.composite
def tables(draw):
    num_rows = draw(st.integers(1, 12))
    columns = {"row": [str(row) for row in range(num_rows)]}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)):
        cells = draw(st.lists(draw(st.sampled_from([CELLS, ALIKE])), min_size=num_rows, max_size=num_rows))
        for row in draw(st.lists(st.integers(0, num_rows - 1), max_size=2)):
            cells[row] = draw(st.sampled_from(EDGES))
        columns[name] = cells
    return columns


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@settings(max_examples=400, deadline=None)
@given(tables(), st.sampled_from(["t.csv", "t.tsv", "t.txt", "t.csv.gz"]), st.sampled_from(["utf-8-sig", "utf-16"]))
def test_types_and_values_are_those_of_the_rule(folder, columns, name, encoding):
    file = TableFile(write(folder / name, columns, encoding))
    assert file.names == list(columns)
    check(file.read(), columns)


@pytest.mark.parametrize("cell", EDGES)
@pytest.mark.parametrize("others", [(), ("1",), ("0.5",), ("1", "0.5"), ("x",)])
@pytest.mark.share(5, "cell", "others")
def test_one_cell_decides_the_type_of_its_column(folder, cell, others):
    columns = {"row": [str(row) for row in range(len(others) + 1)], "a": [*others, cell]}
    check(TableFile(write(folder / "one.csv", columns)).read(), columns)


@pytest.mark.parametrize("last", ["007", "1E5", "x", "0.5", "9223372036854775808", "1.", "true", " 7", "NA", "+1"])
def test_a_last_cell_decides_beyond_the_first_block(folder, last, monkeypatch):
    """Blocks are parsed separately, and columns of many rows are typed in threads."""
    monkeypatch.setattr(table_files, "_BLOCK_BYTES", (2**11, 2**12))
    monkeypatch.setattr(table_files, "_MANY_ROWS", 1_000)
    count = table_files._MANY_ROWS + 1
    columns = {
        "integers": [str(row) for row in range(count)],
        "floats": [f"{row}.25" for row in range(count)],
        "texts": [f"{row:02d}" for row in range(count)],
    }
    for cells in columns.values():
        cells[-1] = last
    path = write(folder / "long.csv", columns)
    assert path.stat().st_size > 2 * table_files._BLOCK_BYTES[1]
    check(TableFile(path).read(), columns)


def test_chosen_columns_are_read_alone(folder):
    path = write(folder / "some.csv", {"a": ["1", "2"], "b": ["007", "8"], "c": ["x", "0.5"]})
    assert TableFile(path).read(["c", "a"]).to_pydict() == {"c": ["x", "0.5"], "a": [1, 2]}


@pytest.mark.parametrize("name", ["empty.csv", "names.csv"])
def test_tables_without_rows(folder, name):
    (folder / name).write_text("" if name == "empty.csv" else "a,b\n")
    if name == "names.csv":
        assert TableFile(folder / name).read().to_pydict() == {"a": [], "b": []}
        return
    with raises(FormatError, path=folder / name, remedy=False):
        TableFile(folder / name).read()


ASKED = {
    "integer": (
        ["007", "+3", "1E5", "12.0", " 5 ", "", "NA", "-0", "9223372036854775807"],
        [7, 3, 100_000, 12, 5, None, None, 0, 2**63 - 1],
    ),
    "float": (["007", "+3", "1E5", "1.", ".5", " 5 ", "", "inf"], [7.0, 3.0, 1e5, 1.0, 0.5, 5.0, None, np.inf]),
    "text": (["007", "7", "0.10", "", "NA", " x"], ["007", "7", "0.10", None, None, " x"]),
}


@pytest.mark.parametrize("kind", ASKED)
def test_a_type_that_is_asked_for_holds_however_numbers_are_spelled(folder, kind):
    for cells, values in zip(*ASKED[kind], strict=True):
        path = write(folder / "asked.csv", {"a": [cells, ""], "b": ["1", "2"]})
        table = TableFile(path).read(types={"a": kind})
        assert str(table["a"].type) == {"integer": "int64", "float": "double", "text": "string"}[kind]
        assert table["a"].to_pylist() == [values, None]
        assert table["b"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("kind", "cell"),
    [(kind, cell) for kind in ("integer", "float") for cell in ("x", "1 2", "0x1F", "--1", "++3", "2024-01-31")]
    + [("integer", cell) for cell in ("0.5", "inf", "1e300", "9223372036854775808")],
)
def test_a_value_of_another_type_is_named_with_its_column_and_row(folder, kind, cell):
    path = write(folder / "wrong.csv", {"a": ["1", "2", cell], "b": ["x", "y", "z"]})
    with raises(FormatError, path=path, mentions=("'a'", repr(cell), "row 2")):
        TableFile(path).read(types={"a": kind})


ENCODED = "Metadata_Well,gene µ\nB2,β-actin\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be with mark"])
@pytest.mark.parametrize("name", ["e.csv", "e.csv.gz", "e.txt"])
def test_encodings_with_a_mark_are_read(folder, encoding, name):
    text = ENCODED.replace(",", "\t") if name == "e.txt" else ENCODED
    data = b"\xfe\xff" + text.encode("utf-16-be") if "be" in encoding else text.encode(encoding)
    (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert TableFile(folder / name).read().to_pydict() == {"Metadata_Well": ["B2"], "gene µ": ["β-actin"]}


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (b"a,b\n1,x\n2,\xb5M\n", ("10", "0xb5", "line 3", "UTF-8")),
        (b"a,b\xb5\n1,x\n", ("3", "0xb5", "line 1", "UTF-8")),
        (b"a,b\n" + b"1,x\n" * 700_000 + b"2,\xb5\n", ("2,800,006", "0xb5", "line 700002", "UTF-8")),
        ("a,b\n1,x\n".encode("utf-16-le"), ("NUL", "UTF-16")),
        ("a,b\n1,x\n".encode("utf-16-be"), ("NUL", "UTF-16")),
        ("a,b\n1,x\n".encode("utf-16") + b"\x00\xd8a\x00", ("18", "line 3", "UTF-16")),
        ("a,b\n1,x\n".encode("utf-32"), ("NUL",)),
    ],
    ids=["latin-1", "latin-1 in the header", "latin-1 far below", "utf-16-le", "utf-16-be", "half a letter", "utf-32"],
)
def test_other_encodings_are_named_with_the_place_and_the_remedy(folder, data, facts):
    path = folder / "encoded.csv"
    path.write_bytes(data)
    with raises(FormatError, path=path, mentions=("save", *facts)):
        TableFile(path).read()


# Public functions.

WELLS = ["A01", "A02", "A03"]


@pytest.fixture(scope="module")
def images(folder):
    """Three images with wells, also as TIFF files."""
    pixels = [np.full((8, 9), number, "uint8") for number in range(3)]
    write_images(pixels, folder / "i.parquet", axes="YX", columns={"Metadata_Well": WELLS})
    for number, image in enumerate(pixels):
        tifffile.imwrite(folder / f"{number}.tif", image, photometric="minisblack")
    return folder / "i.parquet"


def load_data(folder, **columns):
    files = {"FileName_D": ["0.tif", "1.tif", "2.tif"], "PathName_D": [str(folder)] * 3, "Metadata_Well": WELLS}
    return write(folder / "load.csv", {**files, **columns})


@settings(max_examples=60, deadline=None)
@given(st.lists(CELLS | ALIKE, min_size=3, max_size=3))
@example(["007", "07", "7"])
@example(["1E5", "100000", "1e5"])
@example(["0.10", "0.1", "0.100"])
def test_targets_of_a_joined_table_and_of_listed_files_are_those_of_the_rule(folder, images, codes):
    kind, values = typed(codes)
    if None in values:
        return
    path = write(folder / "map.csv", {"Metadata_Well": WELLS, "Metadata_code": codes})
    listed = load_data(folder, Metadata_code=codes)
    classes = sorted(set(values)) if kind == "string" else None
    expected = [classes.index(value) for value in values] if kind == "string" else values
    for dataset in (
        OMEArrowDataset(images, columns=path, target="Metadata_code", axes="YX", preload=False),
        OMEArrowDataset(listed, target="Metadata_code", axes="YX", preload=False),
    ):
        np.testing.assert_array_equal([dataset[number][1] for number in range(3)], expected)
        assert dataset.classes == (None if classes is None else tuple(classes))


def test_column_types_override_the_rule_in_all_text_tables(folder, images, tmp_path):
    types = {"code": "text", "Metadata_dose": "float", "Metadata_Plate": "text"}
    path = write(tmp_path / "map.csv", {"Metadata_Well": WELLS, "code": ["1", "2", "10"]})
    listed = load_data(folder, Metadata_dose=["1E3", "2", "+3"], Metadata_Plate=["1", "1", "1"])
    with open_images(listed, columns=path, column_types=types) as source:
        assert source.columns["code"].to_pylist() == ["1", "2", "10"]
        assert source.columns["Metadata_dose"].to_pylist() == [1000.0, 2.0, 3.0]
        assert source.columns["Metadata_Plate"].to_pylist() == ["1"] * 3
        assert pickle.loads(pickle.dumps(source)).columns.equals(source.columns)
        convert(source, tmp_path / "plate.parts", "arrow")
    with open_images(tmp_path / "plate.parts") as copy:
        assert copy.columns["Metadata_dose"].to_pylist() == [1000.0, 2.0, 3.0]
    measured = stats(listed, by="Metadata_Plate", column_types={"Metadata_Plate": "text"})
    assert measured.table["Metadata_Plate"].to_pylist() == ["1"]
    dataset = OMEArrowDataset(listed, columns=path, column_types=types, target="code", axes="YX", preload=False)
    loader = OMEArrowDataLoader(dataset, 2, num_workers=1, timeout=120)
    assert [code for _, codes in loader for code in codes.tolist()] == [0, 2, 1]
    assert dataset.classes == ("1", "10", "2")


def cells(path, **columns):
    centers = {"Nuclei_Location_Center_Y": ["4", "+3", "1E0"], "Nuclei_Location_Center_X": ["004", "4.", "5"]}
    return write(path, {"Metadata_Well": WELLS, **centers, **columns})


@pytest.mark.parametrize("source", ["parquet", "listed"])
def test_objects_have_places_however_numbers_are_spelled(folder, images, tmp_path, source):
    path = cells(tmp_path / "cells.csv", code=["1", "2", "3"])
    options = {"crop_size": (3, 3), "axes": "YX", "preload": False, "target": "code"}
    opened = images if source == "parquet" else load_data(folder, Metadata_dose=["1", "2", "3"])
    dataset = OMEArrowDataset(opened, objects=path, column_types={"code": "text"}, **options)
    assert dataset.objects["Nuclei_Location_Center_Y"].to_pylist() == [4.0, 3.0, 1.0]
    assert dataset.objects["Nuclei_Location_Center_X"].to_pylist() == [4.0, 4.0, 5.0]
    assert dataset.classes == ("1", "2", "3")
    assert [dataset[number][0].max() for number in range(3)] == [0, 1 / 255, 2 / 255]
    boxes = {f"bbox-{number}": ["01", "1", "+1"] if number < 2 else ["4", "4.0", "4"] for number in range(4)}
    boxed = write(tmp_path / "boxes.tsv", {"Metadata_Well": WELLS, **boxes})
    assert OMEArrowDataset(images, objects=boxed, box=True, axes="YX").shape == (3, 3)


def test_objects_with_text_for_a_place_are_named(images, tmp_path):
    path = cells(tmp_path / "cells.csv")
    path.write_text(path.read_text().replace("1E0", "about 3"))
    with raises(FormatError, path=path, mentions=("'Nuclei_Location_Center_Y'", "'about 3'", "row 2")):
        OMEArrowDataset(images, objects=path, crop_size=(3, 3), axes="YX")


def test_written_crops_have_columns_of_the_types_asked_for(images, tmp_path):
    path = cells(tmp_path / "cells.csv", code=["1", "2", "3"])
    options = {"crop_size": (3, 3), "column_types": {"code": "text"}}
    write_crops(images, path, tmp_path / "a.arrow", **options)
    with open_images(images) as source:
        write_crops(source, path, tmp_path / "b.parts", "arrow", **options)
        with raises(ColumnError, "column_types", mentions="'code'"):
            write_crops(source, path, tmp_path / "c.arrow", crop_size=(3, 3), column_types={"cod": "text"})
    words = ["crops", images, path, tmp_path / "d.parquet", "--crop", "3", "--column-types", "code=text"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    for name in ("a.arrow", "b.parts", "d.parquet"):
        with open_images(tmp_path / name) as crops:
            assert crops.columns["code"].to_pylist() == ["1", "2", "3"]


class TestUnknown:
    """Errors for unknown columns and types name the nearest one."""

    def test_a_column_that_no_table_has(self, folder, images, tmp_path):
        path = write(tmp_path / "map.csv", {"Metadata_Well": WELLS, "compound": ["1", "2", "3"]})
        for opened in (images, load_data(folder, Metadata_dose=["1", "2", "3"])):
            with raises(ColumnError, "column_types", mentions=("'compund'", "'compound'")):
                open_images(opened, columns=path, column_types={"compund": "text"})
        with raises(ColumnError, "column_types", mentions="'Metadata_dose'"):
            open_images(load_data(folder, Metadata_dose=["1"] * 3), column_types={"Metadata_Dose": "text"})
        with raises(ColumnError, "column_types", mentions="'phase'"):
            options = {"objects": cells(tmp_path / "cells.csv", phase=["1", "2", "3"]), "crop_size": (3, 3)}
            OMEArrowDataset(images, axes="YX", column_types={"phse": "text"}, **options)

    def test_a_table_with_types_of_its_own(self, images, tmp_path):
        pq.write_table(pa.table({"Metadata_Well": WELLS, "code": [1, 2, 3]}), tmp_path / "map.parquet")
        for columns in (tmp_path / "map.parquet", pd.DataFrame({"Metadata_Well": WELLS, "code": [1, 2, 3]})):
            with raises(ColumnError, "column_types", mentions="'code'"):
                open_images(images, columns=columns, column_types={"code": "text"})
        with raises(ColumnError, "column_types", mentions="leave it out"):
            open_images(images, column_types={"code": "text"})

    @pytest.mark.parametrize("kind", ["int", "string", None, 3])
    def test_a_type(self, images, kind):
        with raises(ArgumentError, "column_types", mentions=(repr(kind), "'integer'", "'float'", "'text'")):
            open_images(images, column_types={"code": kind})

    @pytest.mark.parametrize("given", ["text", ["code"], [("code", "text")], {1: "text"}])
    def test_what_is_no_mapping_of_names(self, images, given):
        with raises(ArgumentError, "column_types"):
            open_images(images, column_types=given)

    def test_a_missing_table_of_objects_is_named_first(self, images):
        with raises(MissingPathError, "objects"):
            options = {"objects": "gone.csv", "crop_size": (3, 3), "axes": "YX"}
            OMEArrowDataset(images, column_types={"code": "text"}, **options)


def test_columns_of_another_name_in_cellprofiler_take_types_by_both(folder):
    for name in ("Image_Metadata_code", "Metadata_code"):
        path = load_data(folder, Image_Metadata_code=["1", "2", "3"])
        with open_images(path, column_types={name: "text"}) as source:
            assert source.columns["Metadata_code"].to_pylist() == ["1", "2", "3"]


@pytest.mark.parametrize("how", ["list", "glob"])
def test_a_column_is_text_in_all_tables_of_a_list_if_it_is_in_one(folder, images, tmp_path, how):
    files = {"FileName_D": ["0.tif"], "PathName_D": [str(folder)]}
    for name, plate, dose in (("a", "007", "1"), ("b", "8", "0.5"), ("c", "9", "3")):
        write(tmp_path / f"{name}.csv", {**files, "Metadata_Plate": [plate], "Metadata_Dose": [dose]})
    listings = [tmp_path / f"{name}.csv" for name in "abc"] if how == "list" else str(tmp_path / "*.csv")
    with open_images(listings) as source:
        assert source.columns["Metadata_Plate"].to_pylist() == ["007", "8", "9"]
        assert source.columns["Metadata_Dose"].to_pylist() == [1.0, 0.5, 3.0]
        assert len(pickle.loads(pickle.dumps(source)).take([2, 0])) == 2
    with raises(FormatError, path="a.csv", remedy=True, mentions=("'Metadata_Plate'", "'x'")):
        write(tmp_path / "a.csv", {**files, "Metadata_Plate": ["x"]})
        open_images(listings, column_types={"Metadata_Plate": "integer"})


def test_plates_wells_and_sites_match_as_before(folder, images, tmp_path):
    listed = load_data(folder, Metadata_Plate=["001", "001", "001"], Metadata_Site=["01", "02", "03"])
    with open_images(listed) as source:
        assert source.columns["Metadata_Site"].to_pylist() == [1, 2, 3]
        assert source.image_ids == ["001_A01_1", "001_A02_2", "001_A03_3"]
    rows = {"Metadata_Well": ["a1", "A2", "A03"], "Metadata_Site": ["1", "2", "3"]}
    path = write(tmp_path / "map.csv", {"Metadata_Plate": ["1", "1", "1"], **rows, "x": ["5", "6", "7"]})
    with open_images(listed, columns=path) as source:
        assert source.columns["x"].to_pylist() == [5, 6, 7]


def test_groups_of_statistics_are_text_in_a_table_of_text(tmp_path):
    pixels = [np.arange(12, dtype=np.uint8).reshape(3, 4) * (number + 1) for number in range(3)]
    write_images(pixels, tmp_path / "i.parquet", axes="YX", columns={"Metadata_Well": WELLS})
    join_options = {"columns": write(tmp_path / "map.csv", {"Metadata_Well": WELLS, "batch": ["001", "01", "1E5"]})}
    stats(tmp_path / "i.parquet", by="batch", **join_options).write(tmp_path / "stats.csv")
    dataset = OMEArrowDataset(tmp_path / "i.parquet", normalize=tmp_path / "stats.csv", axes="YX", **join_options)
    for number, image in enumerate(pixels):
        expected = (image - image.mean()) / image.std()
        np.testing.assert_allclose(dataset[number].numpy(), expected, rtol=1e-5)


class TestCommands:
    """The option of commands."""

    def test_types_are_those_of_the_option(self, images, tmp_path):
        path = write(tmp_path / "map.csv", {"Metadata_Well": WELLS, "code": ["1", "2", "3"], "dose": ["1", "2", "3"]})
        words = ["info", images, "--columns", path, "--column-types", "code=text,dose=float", "--json"]
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        kinds = {column["name"]: column["type"] for column in json.loads(done.stdout)["columns"]}
        assert (kinds["code"], kinds["dose"]) == ("string", "double")
        words = ["convert", images, tmp_path / "out.arrow", "--columns", path, "--column-types", "code=text"]
        assert CliRunner().invoke(main, [str(word) for word in words]).exit_code == 0
        with open_images(tmp_path / "out.arrow") as copy:
            assert copy.columns["code"].to_pylist() == ["1", "2", "3"]

    @pytest.mark.parametrize(("value", "code"), [("code", 2), ("code=int", 1), ("cod=text", 1)])
    def test_a_wrong_option_ends_in_one_line(self, images, tmp_path, value, code):
        path = write(tmp_path / "map.csv", {"Metadata_Well": WELLS, "code": ["1", "2", "3"]})
        words = ["convert", images, tmp_path / "out.arrow", "--columns", path, "--column-types", value]
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == code
        assert "--column-types" in done.stderr
        assert "column_types=" not in done.stderr

    def test_options_are_typed_as_they_are_read(self):
        assert as_flags({"column_types": {"code": "text", "dose": "float"}, "root": None}) == [
            "--column-types",
            "code=text",
            "--column-types",
            "dose=float",
        ]
