"""Tables joined to images by key; the oracle is pandas."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    FormatError,
    MetadataError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.cli import main
from tests.support.errors import raises, warns
from tests.support.strategies import NAMES, image_of, same

IMAGES = [image_of((1, 2, 1, 4, 5), "uint16", number) for number in range(4)]
PLACES = {"Metadata_Well": ["B2", "B02", "B10", "C1"], "Metadata_Site": [1, 2, 1, 1]}


@pytest.fixture
def path(stored):
    return stored("parquet", IMAGES, columns=PLACES, image_ids=list("abcd"))


WELLS = pa.table({"Metadata_Well": ["C01", "B10", "B02"], "dose": [3.0, 2.0, 1.0], "name": ["x", "y", "z"]})


@pytest.mark.parametrize(
    "kind", ["arrow", "pandas", "indexed", "stream", "dict", "csv", "csv.gz", "tsv", "txt", "parquet"]
)
def test_a_platemap_of_any_kind_is_joined_by_well(path, tmp_path, kind):
    class Stream:
        def __arrow_c_stream__(self, requested_schema=None):
            return WELLS.__arrow_c_stream__(requested_schema)

    frame = WELLS.to_pandas()
    file = tmp_path / f"wells.{kind}"
    columns = {
        "arrow": WELLS,
        "pandas": frame,
        "indexed": frame.set_index("Metadata_Well"),
        "stream": Stream(),
        "dict": WELLS.to_pydict(),
    }.get(kind, file)
    if kind == "parquet":
        pq.write_table(WELLS, file)
    elif columns is file:
        frame.to_csv(file, index=False, sep="\t" if kind in ("tsv", "txt") else ",")
    with open_images(path, columns=columns) as source:
        assert source.columns.to_pydict() == {**PLACES, "dose": [1.0, 1.0, 2.0, 3.0], "name": ["z", "z", "y", "x"]}
        assert all(same(source.read(index), image) for index, image in enumerate(IMAGES))
        again = pickle.loads(pickle.dumps(source))
        assert again.columns.equals(source.columns)
        assert same(again.take([2, 1])[0], IMAGES[2])


@pytest.mark.parametrize(
    ("table", "on", "wanted"),
    [
        ({"image_id": ["d", "a", "c", "b"], "x": [3, 0, 2, 1]}, None, [0, 1, 2, 3]),
        ({"id": ["d", "a", "c", "b"], "x": [3, 0, 2, 1]}, {"image_id": "id"}, [0, 1, 2, 3]),
        ({"well_position": ["b2", "B10", "C001"], "x": [0, 1, 2]}, {"Metadata_Well": "well_position"}, [0, 0, 1, 2]),
        (
            {"Metadata_Well": ["B2", "B2", "B10", "C1"], "Metadata_Site": ["1", "02", "1", "1.0"], "x": [0, 1, 2, 3]},
            None,
            [0, 1, 2, 3],
        ),
        ({"Metadata_Site": [1.0, 2.0], "x": [5, 6]}, None, [5, 6, 5, 5]),
        (
            {"Image_Metadata_Well_x": ["B2", "B10", "C1"], "Image_Metadata_Well_y": ["Z1"] * 3, "x": [7, 8, 9]},
            None,
            [7, 7, 8, 9],
        ),
    ],
)
def test_keys_meet_as_people_write_them(path, table, on, wanted):
    with open_images(path, columns=table, on=on) as source:
        assert source.columns["x"].to_pylist() == wanted


def test_positions_in_x_and_y_are_no_pair_of_a_join(path):
    table = {"image_id": list("abcd"), "Metadata_Position_x": [1, 2, 3, 4], "Metadata_Position_y": [5, 6, 7, 8]}
    with open_images(path, columns=table) as source:
        assert source.columns["Metadata_Position_x"].to_pylist() == [1, 2, 3, 4]
        assert source.columns["Metadata_Position_y"].to_pylist() == [5, 6, 7, 8]


@pytest.mark.parametrize("preload", [True, False])
def test_images_whose_target_is_null_are_left_out_if_asked_for(path, preload):
    table = {"image_id": list("abd"), "label": ["x", None, "y"], "n": [1.0, 2.0, None]}
    with warns(UserWarning, option="columns", mentions=("1 of 4", "'c'")):
        dataset = OMEArrowDataset(path, columns=table, target="label", nulls="skip", preload=preload, normalize=False)
    assert (dataset.image_ids, dataset.classes) == (["a", "d"], ("x", "y"))
    assert [dataset[index][1] for index in range(2)] == [0, 1]
    assert same(dataset[1][0].numpy(), IMAGES[3][0, :, 0])
    assert [view.image_ids for view in dataset.split((0.5, 0.5), by="Metadata_Well")] in (
        [["a"], ["d"]],
        [["d"], ["a"]],
    )
    with warns(UserWarning, option="columns", mentions=("1 of 4", "'c'")):
        several = OMEArrowDataset(path, columns=table, target=["label", "n"], nulls="skip", preload=preload)
    assert several.image_ids == ["a"]
    with (
        warns(UserWarning, option="columns", mentions=("1 of 4", "'c'")),
        raises(ColumnError, path=path, mentions=("'label'", "2 of 4", "image 1", "'b'", "nulls='skip'")),
    ):
        OMEArrowDataset(path, columns=table, target="label")


def test_what_matches_nothing_is_said(path):
    table = pa.table({"Metadata_Well": ["B2", "B10", "P24", None], "x": [1, 2, 3, 4]})

    with warns(UserWarning, option="columns", mentions=("1 of 4", "'C01'", "1 of 3", "'P24'")):
        source = open_images(path, columns=table)
    assert source.columns["x"].to_pylist() == [1, 1, 2, None]
    with raises(
        MetadataError, option="columns", path=path, mentions=("'Metadata_Well'", "'B02'", "'P24'"), remedy=False
    ):
        open_images(path, columns={"Metadata_Well": ["P24"], "x": [1]})


@pytest.mark.parametrize(
    ("columns", "on", "error", "facts"),
    [
        (
            {"Metadata_Well": ["B2", "B02"], "x": [1, 2]},
            None,
            MetadataError,
            ("columns=", "rows 0 and 1", "'Metadata_Well'", "'B02'"),
        ),
        (
            {"Metadata_Well": ["B2"], "Metadata_Site": [1]},
            "Metadata_Well",
            MetadataError,
            ("columns=", "'Metadata_Site'"),
        ),
        ({"x": [1]}, None, ColumnError, ("columns=", "'image_id'", "Metadata_", "['x']")),
        ({"x": [1]}, "y", ColumnError, ("'y'", "'image_id', 'Metadata_Well'")),
        ({"x": [1]}, "Metadata_Well", ColumnError, ("columns=", "'Metadata_Well'", "['x']")),
        ({"Metadata_Well": ["B2"], "x": [1]}, 5, ArgumentError, "on=5"),
        ({"Metadata_Well": ["B2"], "x": [1]}, [], ArgumentError, "on="),
        (None, "Metadata_Well", ArgumentError, ("on=", "columns=")),
        ([1, 2], None, ArgumentError, ("columns", "list")),
        ({"Metadata_Well": ["B2", "B3"], "x": [1]}, None, MetadataError, ("columns=", "Arrow")),
        ("/no/such/file.csv", None, MissingPathError, ("columns=", "/no/such/file.csv")),
        (__file__, None, FormatError, (__file__, "Parquet", ".csv", ".csv.gz", ".tsv", ".txt")),
        ({"Metadata_Well": [["B2"]], "x": [1]}, None, ColumnError, ("columns=", "'Metadata_Well'")),
        ({"Metadata_Well": ["B2"], "x": [2**70]}, None, MetadataError, ("columns=", "Arrow")),
        (pd.Series([1], ["B2"]), None, ArgumentError, ("columns", "Series")),
        (
            pd.DataFrame({"Metadata_Well": ["B2"], "x": pd.PeriodIndex(["2020-01"], freq="M")}),
            None,
            MetadataError,
            ("columns=", "'x'", "'pandas.period'"),
        ),
    ],
)
def test_tables_that_cannot_be_joined(path, columns, on, error, facts):
    with raises(error, mentions=facts, remedy=False):
        open_images(path, columns=columns, on=on)


@pytest.mark.parametrize("on", ["Image_Metadata_Well_x", "Metadata_Well", {"Metadata_Well": "Image_Metadata_Well_x"}])
def test_tables_are_joined_by_the_names_that_they_have(path, on):
    table = {"Image_Metadata_Well_x": ["B02", "B10", "C1"], "x": [1, 2, 3]}
    assert open_images(path, columns=table, on=on).columns["x"].to_pylist() == [1, 1, 2, 3]


def test_ids_that_are_one_number_are_not_one_image(stored):
    path = stored("arrow", IMAGES[:2], image_ids=["1", "01"])
    with raises(MetadataError, option="columns", path=path, mentions=(1, "'image_id'")):
        open_images(path, columns={"image_id": [1], "x": [5]})
    assert open_images(path, columns={"image_id": ["01", "1"], "x": [5, 6]}).columns["x"].to_pylist() == [6, 5]


def test_text_that_is_not_utf8_is_refused(path, tmp_path):
    (tmp_path / "map.csv").write_bytes("Metadata_Well,gene\nB02,\xb5\n".encode("latin-1"))
    with raises(FormatError, path=tmp_path / "map.csv", mentions=("line 2", "0xb5", "UTF-8")):
        open_images(path, columns=tmp_path / "map.csv")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.share(2, "name", "preload")
def test_datasets_of_every_format_take_targets_from_a_table_beside(stored, name, preload):
    path = stored(name, IMAGES, columns=PLACES)
    options = {"preload": preload, "normalize": False, "target": "dose", "columns": WELLS}
    dataset = OMEArrowDataset(path, **options)
    plain = OMEArrowDataset(path, preload=preload, normalize=False)
    for workers in (0, 1) if name == "arrow" else (0,):
        samples = [
            sample
            for batch in OMEArrowDataLoader(dataset, batch_size=3, num_workers=workers)
            for sample in zip(*batch, strict=True)
        ]
        assert [float(dose) for _, dose in samples] == [1.0, 1.0, 2.0, 3.0]
        assert all(same(image.numpy(), plain[index].numpy()) for index, (image, _) in enumerate(samples))


def test_a_plain_folder_gets_targets_by_the_names_of_its_files(tmp_path):
    for number, name in enumerate("abc"):
        tifffile.imwrite(tmp_path / f"{name}.tif", IMAGES[number][0, 0, 0])
    labels = pd.DataFrame({"image_id": list("cab"), "label": [2, 0, 1]})
    dataset = OMEArrowDataset(tmp_path, columns=labels, target="label")
    assert [dataset[index][1] for index in range(3)] == [0, 1, 2]
    convert(tmp_path, tmp_path / "all.parquet", columns=labels)
    with open_images(tmp_path / "all.parquet") as copy:
        assert copy.columns.to_pydict() == {"label": [0, 1, 2]}


@pytest.mark.filterwarnings("default")
def test_the_commands_join_tables_and_say_what_does_not_match(path, tmp_path):
    (tmp_path / "map.csv").write_text("well,dose\nb02,1\nB10,2\n")
    words = ["convert", str(path), str(tmp_path / "out.arrow"), "--columns", str(tmp_path / "map.csv"), "--on", "well"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "no column 'well' for --on" in done.stderr
    (tmp_path / "map.csv").write_text("Metadata_Well,dose\nb02,1\nB10,2\n")
    words[-1] = "Metadata_Well"
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert f"warning: {tmp_path}/map.csv, joined by 'Metadata_Well': 1 of 4 images have no row" in done.stderr
    with open_images(tmp_path / "out.arrow") as copy:
        assert copy.columns["dose"].to_pylist() == [1, 1, 2, None]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ABH"), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from("ABH"), st.integers(1, 12), st.integers(1, 3)), unique=True, max_size=12),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore:columns=")
def test_joins_are_those_of_pandas(tmp_path_factory, images, rows, padded):
    path = tmp_path_factory.mktemp("joined") / "images.arrow"
    ours = pd.DataFrame(
        [(f"{row}{column}", site) for row, column, site in images], columns=["Metadata_Well", "Metadata_Site"]
    )
    write_images([IMAGES[0]] * len(images), path, columns=pa.Table.from_pandas(ours, preserve_index=False))
    named = [f"{row}{column:02d}" if padded else f"{row}{column}" for row, column, _ in rows]
    theirs = pd.DataFrame(
        {"Metadata_Well": named, "Metadata_Site": [str(site) for *_, site in rows], "x": range(len(rows))}
    )
    theirs["Metadata_Well"] = theirs["Metadata_Well"].astype(str)
    plain = pd.DataFrame(
        {
            "Metadata_Well": [f"{r}{c}" for r, c, _ in rows],
            "Metadata_Site": [s for *_, s in rows],
            "x": range(len(rows)),
        }
    )
    expected = ours.merge(plain, "left") if rows else ours.assign(x=np.nan)
    if expected["x"].isna().all():
        with pytest.raises((MetadataError, ColumnError)):
            open_images(path, columns=theirs)
        return
    with open_images(path, columns=theirs) as source:
        joined = [np.nan if value is None else float(value) for value in source.columns["x"].to_pylist()]
        np.testing.assert_array_equal(joined, expected["x"].to_numpy(float))
