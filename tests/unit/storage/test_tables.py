"""Third-party tables: several image columns, nulls, other struct layouts; the oracle is ome-arrow."""

from __future__ import annotations

import inspect
import json
import pickle
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import ome_arrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    DecodeError,
    FormatError,
    ImageColumnError,
    MetadataError,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    convert,
    open_images,
    profile_dataset,
    show,
    stats,
    write_crops,
    write_images,
)
from omearrow_ds.advise.recommend import recommend
from omearrow_ds.advise.recommend.choices import StorageLayout, conversion
from omearrow_ds.advise.recommend.sample import Limits, SampleFields, take_sample
from omearrow_ds.cli import main
from omearrow_ds.dataset.crop_boxes import DatasetOptions
from omearrow_ds.storage.compositions import SelectedRows
from omearrow_ds.storage.describe import describe
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.protocol import OpenOptions
from omearrow_ds.storage.verified import decode
from tests.conftest import needs
from tests.support.errors import raises, warns
from tests.support.raw_tables import raw_table, store_table, struct_of
from tests.support.strategies import ENCODED_OR_LONG, NAMES, SUFFIX, TABLES, all_same, image_of, images_of, same

tables = pytest.mark.parametrize("name", TABLES)
encoded = pytest.mark.parametrize(
    ("name", "encoding"), [param for param in ENCODED_OR_LONG if param.values[0] in TABLES]
)
REAL = Path(__file__).resolve().parents[4] / "shared/data/ome_arrow/BR00117006.ome.parquet"
ROWS = 8
UNMASKED = (0, 3, 4, 7)  # Rows without a mask.
SHAPE = (1, 1, 1, 5, 4)


def stripped(column):
    """Return an image column as CytoTable writes it: without all-null fields, and in another order."""

    def changed(kind):
        if pa.types.is_list(kind):
            return pa.list_(changed(kind.value_type))
        if not pa.types.is_struct(kind):
            return kind
        gone = ("masks", "planes", "acquisition_datetime", "image_type", "chunk_grid", "compression", "channels")
        return pa.struct([field.with_type(changed(field.type)) for field in reversed(kind) if field.name not in gone])

    return pa.array(column.to_pylist(), changed(column.type))


def cyto_table(encoding="bytes", shape=SHAPE, unmasked=UNMASKED, rows=ROWS):
    """Return a table as CytoTable and CytoDataFrame export them: fields, masks, and two channels."""
    numbers = count()

    def images(shape, nulls=()):
        return [None if row in nulls else [image_of(shape, "uint16", next(numbers))] for row in range(rows)]

    return pa.table(
        {
            "field": pa.array(range(100, 100 + rows)),
            "dna": stripped(struct_of(images(shape), encoding, id="dna")),
            "mask": stripped(struct_of(images(shape, unmasked), encoding, id="mask")),
            "nothing": pa.nulls(rows),
            "rna": struct_of(images((shape[0], 2, *shape[2:])), encoding, id=None),
            "well": [f"A{row}" for row in range(rows)],
        }
    )


def decoded_by_ome_arrow(table, *names):
    """Return the images as ome-arrow decodes them, channels concatenated, for each row without nulls."""
    decoded = []
    for records in zip(*(table[name].to_pylist() for name in names), strict=True):
        if None not in records:
            images = [ome_arrow.to_numpy(record, dtype=record["pixels_meta"]["type"]) for record in records]
            decoded.append(np.concatenate(images, axis=1))
    return decoded


def check(opened, images, rows):
    """Check every way to read images."""
    assert len(opened) == len(images)
    assert opened.rows.tolist() == list(rows)
    assert opened.shapes.tolist() == [list(image.shape) for image in images]
    assert list(opened.dtypes) == [image.dtype for image in images]
    assert all_same([opened.read(index) for index in range(len(images))], images)
    order = [*range(len(images))[::-1], 0, 0] if images else []
    assert all_same(opened.take(order), [images[index] for index in order])
    assert all_same(opened.images.read(range(len(images))), images)
    assert all_same([np.array(opened.images.read([index])[0]) for index in range(len(images))], images)
    scanned = [(start + number, image) for start, part in opened.images.stream() for number, image in enumerate(part)]
    assert [index for index, _ in scanned] == list(range(len(images)))
    assert all_same([image for _, image in scanned], images)
    decoded = [np.zeros_like(image) for image in images]
    decode(opened.images, decoded)
    assert all_same(decoded, images)
    if images and len({image.shape for image in images}) == 1:
        stack = np.zeros((len(images), *images[0].shape), images[0].dtype)
        decode(opened.images, stack)
        assert all_same(list(stack), images)
    stacks = opened.images.mapped_stacks()
    assert stacks is None or all_same([stacks[index] for index in range(len(stacks))], images)
    assert [opened.columns["field"][index].as_py() - 100 for index in range(len(images))] == list(rows)


@pytest.fixture(scope="module")
def cyto(tmp_path_factory):
    """Return a function that stores `cyto_table` once; it returns the path and the table of the format's library."""
    folder, paths = tmp_path_factory.mktemp("cyto"), {}

    def path_of(name, encoding="bytes"):
        if (name, encoding) not in paths:
            path = store_table(name, cyto_table(encoding), folder / f"{encoding}{SUFFIX[name]}")
            paths[name, encoding] = path, raw_table(name, path)
        return paths[name, encoding]

    return path_of


MASKED = [row for row in range(ROWS) if row not in UNMASKED]
CHOICES = [
    ("rna", ["rna"], range(ROWS)),
    (("mask",), ["mask"], MASKED),
    (["dna", "mask", "rna"], ["dna", "mask", "rna"], MASKED),
]


@encoded
@pytest.mark.share(2, "name", "encoding")
def test_images_are_those_of_the_columns_and_rows_asked_for(cyto, name, encoding):
    path, raw = cyto(name, encoding)
    for image_column, names, rows in CHOICES if encoding == "bytes" else CHOICES[2:]:
        with open_images(path, image_column=image_column, nulls="skip") as opened:
            check(opened, decoded_by_ome_arrow(raw, *names), rows)
            assert opened.images.header.image_column == tuple(names)
            assert set(opened.images.header.other_image_columns) == {"dna", "mask", "rna"} - set(names)
            assert opened.columns.column_names == ["field", "nothing", "well"]
            assert opened.columns["well"].to_pylist() == [f"A{row}" for row in rows]
            assert opened.columns["nothing"].to_pylist() == [None] * len(rows)
            assert list(opened.image_ids) == [names[0] if names[0] != "rna" else str(row) for row in rows]
            again = pickle.loads(pickle.dumps(opened))
            assert all_same(again.take([0, 1]), opened.take([0, 1]))
            assert len(pickle.dumps(opened)) < 1000


@pytest.mark.parametrize("engine", ["parquet pyarrow", "parquet_duck duckdb", "lance lance"])
def test_engines(cyto, engine):
    name, engine = engine.split()
    path, raw = cyto(name)
    for image_column, names, rows in CHOICES[1:]:
        opened = open_images(path, name, engine=engine, image_column=image_column, nulls="skip")
        check(opened, decoded_by_ome_arrow(raw, *names), rows)


@tables
@settings(max_examples=3, deadline=None)
@given(data=st.data())
@pytest.mark.share(2, "name")
def test_any_pattern_of_nulls(name, data):
    needs(name)
    rows = data.draw(st.integers(1, 9))
    nulls = data.draw(st.sets(st.integers(0, rows - 1)))
    encoding = data.draw(st.sampled_from(["bytes", "list"]))
    shape = data.draw(st.sampled_from([SHAPE, (2, 1, 3, 1, 1), (1, 1, 1, 1, 1)]))
    with tempfile.TemporaryDirectory() as folder:
        path = store_table(name, cyto_table(encoding, shape, nulls, rows), Path(folder) / f"images{SUFFIX[name]}")
        raw = raw_table(name, path)
        rows_with_masks = [row for row in range(rows) if row not in nulls]
        for names in (["mask"], ["rna", "mask"]):
            check(
                open_images(path, image_column=names, nulls="skip"), decoded_by_ome_arrow(raw, *names), rows_with_masks
            )
        if nulls:
            with raises(FormatError, path=path, mentions=(len(nulls), rows, "'mask'", f"image {min(nulls)}")):
                open_images(path, image_column="mask")


@pytest.mark.parametrize("encoding", ["bytes", "list"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize(
    "options", [{"data_page_version": "2.0", "write_batch_size": 1}, {"row_group_size": 50}], ids=str
)
def test_images_between_nulls_are_cut_out_of_parquets_pages(tmp_path, encoding, compression, options):
    nulls = {1, 2, 3, 4, 11, 29}
    table = cyto_table(encoding, SHAPE, nulls, 30)
    laid_out = {"use_dictionary": False, "data_page_size": 200, "row_group_size": 10} | options
    pq.write_table(table, tmp_path / "images.parquet", compression=compression, **laid_out)
    opened = open_images(tmp_path / "images.parquet", image_column="mask", nulls="skip")
    opened.images.source._read_group = None  # Reads by pyarrow would call it.
    check(opened, decoded_by_ome_arrow(table, "mask"), [row for row in range(30) if row not in nulls])


@tables
def test_what_lies_below_a_null_is_no_image(tmp_path, name):
    column = struct_of([[image_of(SHAPE, "uint16", number)] for number in range(4)])
    null = pa.array([False, True, False, True])
    masked = pa.StructArray.from_arrays(column.flatten(), fields=list(column.type), mask=null)
    assert not masked.field("pixels_meta").null_count
    path = store_table(name, pa.table({"field": range(100, 104), "image": masked}), tmp_path / f"images{SUFFIX[name]}")
    check(open_images(path, nulls="skip"), [image_of(SHAPE, "uint16", number) for number in (0, 2)], [0, 2])


@tables
def test_large_images_between_nulls(tmp_path, name):
    """Lance stores large values in another layout."""
    path = store_table(name, cyto_table("bytes", (1, 1, 1, 20, 20), {0, 3}, 6), tmp_path / f"images{SUFFIX[name]}")
    check(
        open_images(path, image_column="mask", nulls="skip"),
        decoded_by_ome_arrow(raw_table(name, path), "mask"),
        [1, 2, 4, 5],
    )


@tables
def test_without_nulls_nothing_is_put_in_between(cyto, name):
    plain, skipping = (open_images(cyto(name)[0], image_column="dna", nulls=nulls) for nulls in ("error", "skip"))
    assert type(plain) is type(skipping)
    assert not isinstance(skipping, SelectedRows)


@tables
@pytest.mark.share(3, "name")
def test_which_column_it_is_has_to_be_said(cyto, name):
    path, _ = cyto(name)
    with raises(ImageColumnError, option="image_column", path=path, mentions="3 columns") as caught:
        open_images(path)
    assert pickle.loads(pickle.dumps(caught.value)).columns == ("dna", "mask", "rna")
    assert "'dna' (8 images, 1 x 1 x 1 x 5 x 4, uint16, 0 nulls)" in str(caught.value)
    assert "'mask' (4 images, 1 x 1 x 1 x 5 x 4, uint16, 4 nulls)" in str(caught.value)
    assert isinstance(caught.value, ColumnError)
    for column, missing in (("well", "'well'"), ("er", "'er'"), (["dna", "er"], "'er'")):
        with raises(ColumnError, option="image_column", mentions=(missing, "'dna' (8 images"), remedy=False):
            open_images(path, image_column=column)
    for column in ([], ["dna", "dna"], ["dna", 1], 3, b"dna"):
        with raises(ArgumentError, option="image_column", remedy=False):
            open_images(path, image_column=column)
    with raises(ArgumentError, option="nulls", mentions=("'drop'", "'error'", "'skip'"), remedy=False):
        open_images(path, nulls="drop")
    with raises(FormatError, path=path, mentions=(4, 8, "'mask'", "image 0")):
        open_images(path, image_column=("mask", "dna"))


@tables
@pytest.mark.share(3, "name")
def test_the_column_called_as_ours_is_taken(tmp_path, name):
    table = cyto_table().rename_columns(["field", "dna", "mask", "nothing", "ome_image", "well"])
    path = store_table(name, table, tmp_path / f"images{SUFFIX[name]}")
    check(open_images(path), decoded_by_ome_arrow(raw_table(name, path), "ome_image"), range(ROWS))


@pytest.mark.parametrize("name", ["parquet", "arrow"])  # The other formats cannot hold such a table.
@pytest.mark.parametrize("names", [["well", "dna", "mask", "nothing", "rna", "well"], ["a", "a", "b", "c", "d", "e"]])
def test_columns_of_one_name_are_not_told_apart(tmp_path, name, names):
    path = store_table(name, cyto_table().rename_columns(names), tmp_path / f"images{SUFFIX[name]}")
    with raises(ColumnError, path=path, mentions=f"'{names[0]}'"):
        open_images(path, image_column=names[4])


@tables
@pytest.mark.share(3, "name")
def test_images_that_differ_are_not_joined(tmp_path, name):
    rows = [[image_of((1, 1, 1, 2, 3))]] * 3
    kinds = [((1, 1, 1, 3, 2), "uint16"), ((1, 1, 1, 2, 3), "uint8"), ((2, 1, 1, 2, 3), "uint16")]
    for number, other in enumerate(images_of(kinds)):
        table = pa.table({"a": struct_of(rows), "b": struct_of([*rows[:2], [other]])})
        path = store_table(name, table, tmp_path / f"{number}{SUFFIX[name]}")
        with raises(ColumnError, path=path, mentions=("image 2", f"{other.shape} {other.dtype}", "'b'", "'a'")):
            open_images(path, image_column=["a", "b"])


def test_images_of_a_table_may_differ_from_row_to_row(tmp_path):
    shapes = [(1, 1, 1, 2, 3), (1, 3, 2, 4, 1), (2, 1, 1, 1, 1)]
    column = struct_of([[image_of(shape, "uint16", number)] for number, shape in enumerate(shapes)])
    other = struct_of([[image_of((shape[0], 2, *shape[2:]))] for shape in shapes])
    table = pa.table({"field": [100, 101, 102], "a": column, "b": other})
    path = store_table("arrow", table, tmp_path / "images.arrow")
    check(open_images(path, image_column=["a", "b"]), decoded_by_ome_arrow(table, "a", "b"), range(3))
    preloaded = OMEArrowDatasetNumpy(path, axes="TCZYX", normalize=False, image_column=["a", "b"])
    assert all_same([preloaded[index] for index in range(3)], decoded_by_ome_arrow(table, "a", "b"))


def test_channels_may_be_shared_out_differently_from_row_to_row(tmp_path):
    """The concatenated images agree in shape, although their parts do not."""

    def images(sizes, first):
        return struct_of([[image_of((1, size, 1, 2, 3), "uint16", number)] for number, size in enumerate(sizes, first)])

    table = pa.table({"field": [100, 101, 102], "a": images([2, 1, 3], 0), "b": images([2, 3, 1], 3)})
    path = store_table("arrow", table, tmp_path / "images.arrow")
    check(open_images(path, image_column=["a", "b"]), decoded_by_ome_arrow(table, "a", "b"), range(3))
    check(open_images(path, image_column=["b", "a"]), decoded_by_ome_arrow(table, "b", "a"), range(3))


@tables
@pytest.mark.share(2, "name")
def test_preloaded_equals_on_demand(cyto, tmp_path, name):
    path, raw = cyto(name)
    for number, (image_column, names, rows) in enumerate(CHOICES[1:] if name == "parquet" else CHOICES[2:]):
        images = [image[0, :, 0] for image in decoded_by_ome_arrow(raw, *names)]
        opening = {"image_column": image_column, "nulls": "skip", "normalize": False}
        opening |= {"target": "well", "encode_targets": False}
        open_dataset = partial(OMEArrowDataset, path, **opening)
        opened = [open_dataset(cache_dir=tmp_path), open_dataset(preload=False)]
        for dataset in (*opened, *map(pickle.loads, map(pickle.dumps, opened))):
            assert [target for _, target in map(dataset.__getitem__, range(len(rows)))] == [f"A{row}" for row in rows]
            samples = dataset.__getitems__([len(rows) - 1, *range(len(rows))])
            assert all_same([image.numpy() for image, _ in samples], [images[-1], *images])
        assert len(list(tmp_path.glob("*.pixels"))) == number + 1  # Columns do not evict each other's cached pixels.


@pytest.mark.parametrize(
    ("name", "target"),
    [*((table_format, "arrow") for table_format in TABLES), *(("arrow", table_format) for table_format in NAMES)],
)
@pytest.mark.share(2, "name", "target")
def test_convert_keeps_what_is_not_an_image(cyto, tmp_path, name, target):
    needs(target)
    path, raw = cyto(name)
    copy = tmp_path / f"copy{SUFFIX[target]}"
    convert(path, copy, target, image_column=["mask", "dna"], nulls="skip", checksum=True)
    converted = open_images(copy, verify=True)
    assert all_same(converted.take(range(len(MASKED))), decoded_by_ome_arrow(raw, "mask", "dna"))
    assert converted.columns.column_names == ["field", "nothing", "well"]
    assert converted.columns["nothing"].to_pylist() == [None] * len(MASKED)
    assert converted.columns["well"].to_pylist() == [f"A{row}" for row in MASKED]
    assert [channel["name"] for channel in converted.metadata(0)["channels"]] == ["mask", "dna"]


@tables
def test_metadata_is_read_at_its_first_use_and_refused_if_the_file_changed(name, tmp_path):
    needs(name)
    path, images = tmp_path / f"images{SUFFIX[name]}", [np.full((2, 8, 8), row, np.uint16) for row in range(3)]
    described = [{"channels": [{"name": f"DNA {row}"}, {"name": "ER"}]} for row in range(3)]
    write_images(images, path, name, axes="CYX", metadata=described)
    with open_images(path) as used, open_images(path) as unused:
        assert used.metadata(1)["channels"][0]["name"] == "DNA 1"
        write_images(images[:2], path, name, axes="CYX", metadata=described[1:], overwrite=True)
        assert used.metadata(2)["channels"][0]["name"] == "DNA 2"
        with raises(FormatError, path=path):
            unused.metadata(1)


def test_opening_parquet_reads_no_metadata(tmp_path, monkeypatch):
    path, requested = tmp_path / "images.parquet", []
    write_images([np.zeros((2, 8, 8), np.uint16)], path, axes="CYX", columns={"well": ["A1"]})
    read = pq.ParquetFile.read
    monkeypatch.setattr(
        pq.ParquetFile,
        "read",
        lambda file, columns, **options: requested.append(columns) or read(file, columns, **options),
    )
    with open_images(path) as source:
        assert [name for name in requested.pop() if "channels" in name or "physical" in name] == []
        assert source.metadata(0)["physical_size_x"] is None
    assert "ome_image.pixels_meta" in requested.pop()
    assert requested == []


@pytest.mark.parametrize("taken", ["ome_image", "omearrow_ds", ""])
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.share(3, "target", "taken")
def test_convert_refuses_names_that_would_hide_the_images(cyto, tmp_path, target, taken):
    needs(target)
    table = cyto("arrow")[1].rename_columns([taken, "dna", "mask", "nothing", "rna", "well"])
    path = store_table("arrow", table, tmp_path / "images.arrow")
    with raises(
        MetadataError, path=tmp_path / f"copy{SUFFIX[target]}", mentions=(f"'{taken}'", "'ome_image'"), remedy=False
    ):
        convert(path, tmp_path / f"copy{SUFFIX[target]}", target, image_column="dna")
    assert list(tmp_path.iterdir()) == [path]


def test_columns_of_lance_are_of_the_version_that_was_opened(tmp_path):
    needs("lance")
    import lance

    path = store_table("lance", cyto_table(), tmp_path / "images.lance")
    opened = open_images(path, image_column=["dna", "mask"], nulls="skip")
    images, pickled = opened.take(range(len(MASKED))), pickle.dumps(opened)
    lance.write_dataset(cyto_table().take(list(range(1, ROWS))), str(path), mode="overwrite")
    again = pickle.loads(pickled)
    assert all_same(again.take(range(len(MASKED))), images)
    assert again.rows.tolist() == MASKED
    assert open_images(path, image_column=["dna", "mask"], nulls="skip").rows.tolist() == [row - 1 for row in MASKED]


def test_convert_says_what_it_leaves_out(cyto, tmp_path):
    table = cyto("parquet")[1].rename_columns(["field", "ome_image", "mask", "nothing", "rna", "well"])
    pq.write_table(table, tmp_path / "images.parquet")
    with warns(
        UserWarning,
        option="image_column",
        path=tmp_path / "images.parquet",
        mentions=("'ome_image'", "'mask'", "'rna'"),
    ):
        convert(tmp_path / "images.parquet", tmp_path / "copy.arrow")
    convert(tmp_path / "images.parquet", tmp_path / "again.arrow", image_column="ome_image")
    with open_images(tmp_path / "again.arrow") as opened, raises(ArgumentError, option="image_column"):
        convert(opened, tmp_path / "more.arrow", image_column="ome_image")


def test_checksums_are_of_our_column_alone(tmp_path):
    images = [image_of(SHAPE, "uint16", number) for number in range(3)]
    write_images(images, tmp_path / "ours.parquet", columns={"field": [100, 101, 102]}, checksum=True)
    table = pq.read_table(tmp_path / "ours.parquet").append_column("other", struct_of([[image] for image in images]))
    pq.write_table(table, tmp_path / "more.parquet")
    check(open_images(tmp_path / "more.parquet", verify=True), images, range(3))
    for image_column in ("other", ["ome_image", "other"]):
        opened = open_images(tmp_path / "more.parquet", image_column=image_column)
        assert opened.images.header.columns.checksums is None
        assert opened.columns.column_names == ["field"]
        with raises(ArgumentError, option="verify", path=tmp_path / "more.parquet", mentions="verify=False"):
            open_images(tmp_path / "more.parquet", image_column=image_column, verify=True)
    record = table["ome_image"][1].as_py()
    nulled = pa.array([table["ome_image"][0].as_py(), None, record], table["ome_image"].type)
    pq.write_table(table.set_column(0, "ome_image", nulled), tmp_path / "nulled.parquet")
    opened = open_images(tmp_path / "nulled.parquet", image_column="ome_image", nulls="skip", verify=True)
    assert same(opened.read(0), images[0])
    with raises(
        DecodeError, path=tmp_path / "nulled.parquet", mentions=("image 1", "'omearrow_ds_checksum'")
    ):  # The second image is in the third row.
        opened.read(1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TABLES])
def test_folders_have_no_columns_of_images(stored, name):
    path = stored(name, [image_of(SHAPE)])
    with raises(ArgumentError, option="image_column", mentions="'a'"):
        open_images(path, image_column="a")
    with open_images(path, nulls="skip") as opened:
        assert opened.rows.tolist() == [0]
        assert opened.images.header.image_column == opened.images.header.other_image_columns == ()
        assert opened.images.details.image_columns() == []


def test_all_that_takes_a_path_takes_what_opening_takes():
    listed = inspect.signature(open_images).parameters.values()
    keywords = {
        parameter.name: parameter.annotation for parameter in listed if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords == {name: annotation.__forward_arg__ for name, annotation in OpenOptions.__annotations__.items()}
    assert OpenOptions.__annotations__.items() <= DatasetOptions.__annotations__.items()
    datasets = (OMEArrowDataset, OMEArrowDatasetNumpy)
    for function in (*datasets, convert, describe, profile_dataset, recommend, show, stats, write_crops):
        (last,) = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is parameter.VAR_KEYWORD
        ]
        assert last.annotation in ("Unpack[OpenOptions]", "Unpack[DatasetOptions]")


def test_profile_and_recommend_pass_options_of_opening_on(cyto, monkeypatch):
    monkeypatch.setattr("omearrow_ds.advise.profile.measure._TURN_S", (0.01, 0.01))
    path, _ = cyto("parquet")
    actual = profile_dataset(path, image_column="mask", nulls="skip", num_workers=0, epochs=1, trials=False)
    assert actual.images == len(MASKED)
    dataset = OMEArrowDataset(path, image_column="mask", nulls="skip")
    with raises(ArgumentError, option="image_column"):
        profile_dataset(dataset, image_column="mask")
    opening = {"image_column": ("a b", "c"), "nulls": "skip"}
    layout, paths = StorageLayout(get_format("arrow"), "bytes", "none"), (Path("x.parquet"), Path("y.arrow"))
    words = "omearrow-ds convert x.parquet y.arrow --image-column 'a b' --image-column c --nulls skip"
    assert conversion(*paths, layout, opening) == words
    tiles = conversion(*paths, layout, opening, tile=8)
    sample = take_sample(SampleFields(open_images(path, image_column="dna").images), Limits(), lambda: 0.0)
    assert len(sample.images) == ROWS
    assert "with open_images('x.parquet', image_column=('a b', 'c'), nulls='skip') as source:" in tiles


def run(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="omearrow-ds")
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_the_commands(cyto, tmp_path):
    path, raw = cyto("parquet")
    description = run("info", path).stdout
    assert "dna, as an example; name one by --image-column" in description
    assert "mask: 4 images, 1 x 1 x 1 x 5 x 4, uint16, 4 nulls" in description
    record = json.loads(run("info", path, "--json").stdout)
    assert record["image_column"] is None
    assert [(entry["name"], entry["images"], entry["nulls"]) for entry in record["image_columns"]] == [
        ("dna", 8, 0),
        ("mask", 4, 4),
        ("rna", 8, 0),
    ]
    joined = json.loads(run("info", path, "--json", "--image-column", "rna", "--image-column", "mask").stdout)
    assert (joined["image_column"], joined["images"]) == (["rna", "mask"], 4)
    assert joined["shapes"] == [{"shape": [1, 3, 1, 5, 4], "images": 4}]
    error = run("convert", path, tmp_path / "copy.arrow", "--image-column", "mask", code=1).stderr
    assert "pass --nulls 'skip' to skip these rows" in error
    assert "pass --image-column with" in run("convert", path, tmp_path / "copy.arrow", code=1).stderr
    options = ("--image-column", "mask", "--nulls", "skip", "--checksum")
    output = run("convert", path, tmp_path / "copy.arrow", *options).stdout
    assert "skipped: 4 rows without an image" in output
    assert "skipped: images in dna, rna;" in output
    output = json.loads(run("convert", path, tmp_path / "copy.tiffs", *options, "--json").stdout)
    assert output["left_out"] == {"rows": 4, "image_columns": ["dna", "rna"]}
    assert all_same(open_images(tmp_path / "copy.arrow").take(range(4)), decoded_by_ome_arrow(raw, "mask"))
    assert "4 images as written" in run("verify", tmp_path / "copy.arrow", "--image-column", "ome_image").stdout


@pytest.mark.skipif(not REAL.is_file(), reason=f"no table of CytoDataFrame's at {REAL}")
@pytest.mark.parametrize("name", ["parquet", "parquet_duck"])
def test_the_table_that_cytodataframe_exported(tmp_path, name):
    table = pq.read_table(REAL)
    with raises(ImageColumnError, option="image_column", path=REAL, mentions="8 columns") as caught:
        open_images(REAL, name)
    for column in caught.value.columns:
        opened = open_images(REAL, name, image_column=column)
        for index, record in enumerate(table[column].to_pylist()):
            try:
                image = ome_arrow.to_numpy(record, dtype=np.uint16)
            except ValueError:  # Composites hold three values per pixel, but declare one.
                with raises(DecodeError, path=REAL, mentions=(f"'{column}'", f"image {index}"), remedy=False):
                    opened.read(index)
            else:
                assert same(opened.read(index), image)
    names = [f"Image_FileName_Orig{stain}_OMEArrow_ORIG" for stain in ("DNA", "RNA", "AGP")]
    assert all_same(open_images(REAL, name, image_column=names).take(range(3)), decoded_by_ome_arrow(table, *names))
    convert(REAL, tmp_path / "copy.arrow", image_column=names)
    copy = open_images(tmp_path / "copy.arrow")
    assert all_same(copy.take(range(3)), decoded_by_ome_arrow(table, *names))
    other_columns = [column_name for column_name in table.column_names if column_name not in caught.value.columns]
    assert copy.columns.column_names == other_columns
    assert copy.columns.to_pydict() == table.select(other_columns).to_pydict()
    assert copy.columns.schema.field("Image_FileName_OrigAGP_OMEArrow_LABL").type == pa.null()


def test_description_of_joined_columns_names_the_channels_of_each(tmp_path):
    images = [image_of((1, 2, 1, 4, 5), "uint16", number) for number in range(3)]
    columns = {name: struct_of([[image] for image in images], "bytes") for name in ("a", "b")}
    store_table("parquet", pa.table(columns), tmp_path / "two.parquet")
    described = describe(tmp_path / "two.parquet", image_column=["b", "a"])
    assert described.channels == ["b 0", "b 1", "a 0", "a 1"]
    assert described.stored.reading.endswith("2 columns joined along C")
