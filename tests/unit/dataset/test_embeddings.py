"""Embeddings: tables of profiles that are joined completely or rejected."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from omearrow_ds import (
    ArgumentError,
    MetadataError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    PathExistsError,
    WriteError,
    write_embeddings,
    write_images,
)
from omearrow_ds.dataset import embeddings as module
from tests.support.errors import raises
from tests.support.strategies import image_of

IDS = list("abcdefg")
VALUES = np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3)
COLUMNS = {"Metadata_Well": [f"A0{n}" for n in range(7)], "features": [[n] for n in range(7)]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profiles.parquet"


def batches(values, size=3):
    return [values[start : start + size] for start in range(0, len(values), size)]


FORMS = {
    "array": (IDS, VALUES),
    "strided array": (IDS, np.asfortranarray(VALUES)),
    "tensor": (IDS, torch.from_numpy(VALUES)),
    "with a gradient": (IDS, torch.from_numpy(VALUES).requires_grad_()),
    "batches": (batches(IDS), batches(VALUES)),
    "iterators": (iter(batches(IDS, 2)), iter(batches(torch.from_numpy(VALUES)))),
}


def failing():
    raise OSError("the caller's")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_rows", [1, 4, 8192])
def test_what_is_written_is_what_was_given(path, form, group_rows, monkeypatch):
    monkeypatch.setattr(module, "_GROUP_ROWS", group_rows)
    ids, values = FORMS["batches"] if form == "iterators" else FORMS[form]
    if form == "iterators":
        ids, values = iter(ids), iter(values)
    order = [4, 2, 0, 6, 1, 3, 5]  # Rows are matched by id, in any order.
    beside = {"image_id": [IDS[n] for n in order]} | {name: [row[n] for n in order] for name, row in COLUMNS.items()}
    write_embeddings(path, ids, values, columns=beside)
    table = pq.read_table(path)
    assert table.column_names == ["image_id", *COLUMNS, "Embedding_0000", "Embedding_0001", "Embedding_0002"]
    assert table["image_id"].to_pylist() == IDS
    assert table.select(list(COLUMNS)).to_pydict() == COLUMNS
    assert {field.type for field in list(table.schema)[3:]} == {pa.float32()}
    assert np.array_equal(np.stack([column.to_numpy() for column in table.columns[3:]], axis=1), VALUES)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array([[np.nan, np.inf], [-np.inf, 1e300]]), pa.float64()),
        (np.array([[1.5, np.nan], [2, 3]], np.float16), pa.float32()),
        (torch.tensor([[1.5, float("nan")], [2, 3]], dtype=torch.bfloat16), pa.float32()),
        (np.array([[1, 2], [3, 2**53]]), pa.float64()),
        (np.zeros((0, 2), np.float32), pa.float32()),
    ],
    ids=str,
)
def test_values_of_any_kind(path, values, kind):
    write_embeddings(path, ["x", "x"][: len(values)], values, prefix="CNN_")
    table = pq.read_table(path)
    assert table.column_names[1:] == ["CNN_0000", "CNN_0001"]
    assert {table.schema.field(name).type for name in table.column_names[1:]} == {kind}
    expected = values.float().numpy() if isinstance(values, torch.Tensor) else values
    assert table["image_id"].null_count == table["CNN_0001"].null_count == 0
    assert np.array_equal(table["CNN_0001"].to_numpy(), expected[:, 1], equal_nan=True)


def test_many_features(path):
    write_embeddings(path, ["a"], np.zeros((1, 10_001), np.float32))
    assert pq.read_schema(path).names[1::10_000] == ["Embedding_00000", "Embedding_10000"]


@pytest.mark.parametrize(
    ("ids", "values", "options", "error", "option", "facts"),
    [
        (IDS[:6], VALUES, {}, MetadataError, "image_ids", 6),
        ([*IDS, "h"], VALUES, {}, MetadataError, "image_ids", (8, 7)),
        (IDS, batches(VALUES)[:2], {}, MetadataError, "image_ids", (7, 6)),
        ("abcdefg", VALUES, {}, MetadataError, "image_ids", "'abcdefg'"),
        (3, VALUES, {}, MetadataError, "image_ids", 3),
        (range(7), VALUES, {}, MetadataError, "image_ids", 0),
        ([IDS, [None]], VALUES, {}, MetadataError, "image_ids", "None"),
        (IDS, VALUES, {"columns": {"a": range(7)}}, MetadataError, "columns", "'image_id'"),
        (IDS, VALUES, {"columns": {"image_id": IDS[:6], "a": IDS[:6]}}, MetadataError, "columns", "'g'"),
        (IDS, VALUES, {"columns": {"image_id": [*IDS, "a"], "a": [*IDS, "a"]}}, MetadataError, "columns", "'a'"),
        (
            IDS,
            VALUES,
            {"columns": {"image_id": IDS, "Embedding_0001": IDS}},
            MetadataError,
            "columns",
            ("'Embedding_0001'", "prefix="),
        ),
        (IDS, VALUES, {"prefix": None}, ArgumentError, "prefix", "None"),
        (IDS, VALUES[0], {}, ArgumentError, "embeddings", ("(3,)", "batch 0")),
        (IDS, VALUES.astype(complex), {}, ArgumentError, "embeddings", "complex128"),
        (IDS, VALUES[:, :0], {}, ArgumentError, "embeddings", "(7, 0)"),
        (IDS, [VALUES[:3], VALUES[3:, :2]], {}, ArgumentError, None, ("batch 1", 2, "float32", 3)),
        (IDS, [VALUES[:3], VALUES[3:].astype(float)], {}, ArgumentError, None, ("batch 1", 3, "float64")),
        ([], [], {}, ArgumentError, "embeddings", ()),
        (IDS, 3, {}, ArgumentError, "embeddings", "int"),
    ],
    ids=str,
)
def test_what_does_not_fit_leaves_nothing(path, ids, values, options, error, option, facts):
    with raises(error, option=option, mentions=facts, remedy=False):
        write_embeddings(path, ids, values, **options)
    assert list(path.parent.iterdir()) == []


def test_what_is_there_is_replaced_only_if_asked_for(path, tmp_path, monkeypatch):
    write_embeddings(path, IDS, VALUES)
    before = path.read_bytes()
    with raises(PathExistsError, option="overwrite", path=path):
        write_embeddings(path, IDS, VALUES)
    monkeypatch.setattr(module.pq.ParquetWriter, "write_table", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with raises(WriteError, path=path, mentions="full", remedy=False):
        write_embeddings(path, IDS, VALUES, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"^the caller"):
        write_embeddings(path, IDS, iter(failing, None), overwrite=True)
    assert path.read_bytes() == before
    write_embeddings(path, IDS[:1], VALUES[:1], overwrite=True)
    assert pq.read_table(path).num_rows == 1
    with pytest.raises(MissingPathError):
        write_embeddings(tmp_path / "none" / "profiles.parquet", IDS, VALUES)
    write_images([image_of((4, 4), "uint8", 0)], tmp_path / "images.tiffs")
    with raises(PathExistsError, path=tmp_path / "images.tiffs"):
        write_embeddings(tmp_path / "images.tiffs", IDS, VALUES, overwrite=True)


def test_a_loop_writes_back_what_it_made(path, tmp_path):
    images = [image_of((4, 4), "uint8", n) for n in range(7)]
    write_images(images, tmp_path / "images.arrow", image_ids=IDS, columns={"well": [f"A{n}" for n in range(7)]})
    dataset = OMEArrowDataset(tmp_path / "images.arrow", return_ids=True)
    ids, embeddings = [], []
    for batch, batch_ids in OMEArrowDataLoader(dataset, 3, shuffle=True, generator=torch.Generator().manual_seed(1)):
        ids.append(batch_ids)
        embeddings.append(batch.flatten(1))
    write_embeddings(path, ids, embeddings, columns=dataset)
    table = pq.read_table(path)
    order = [IDS.index(image_id) for image_id in table["image_id"].to_pylist()]
    assert sorted(order) == list(range(7)) != order
    assert table["well"].to_pylist() == [f"A{n}" for n in order]
    assert np.array_equal(
        table["Embedding_0005"], [float(np.float32(images[n][1, 1]) / np.float32(255)) for n in order]
    )
    again = OMEArrowDataset(tmp_path / "images.arrow", columns=path, target="Embedding_0005")  # Both have wells.
    assert float(again[4][1]) == float(np.float32(images[4][1, 1]) / np.float32(255))
    with raises(MetadataError, option="columns", path=path):
        write_embeddings(path, ids, embeddings, columns=dataset.split((0.5, 0.5))[0], overwrite=True)
