"""Collections in parts, read as one by their manifest and index."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import (
    FormatError,
    MissingPathError,
    OMEArrowDataset,
    OMEArrowDSError,
    open_images,
)
from omearrow_ds.codec import schema
from omearrow_ds.storage.manifest import INDEX, MANIFEST, PARTS
from omearrow_ds.storage.verified import decode
from tests.support.errors import raises
from tests.support.parts import publish
from tests.support.sources import check


@pytest.fixture
def images() -> list[np.ndarray]:
    return list(np.arange(17 * 240, dtype=np.uint16).reshape(17, 1, 2, 1, 12, 10))


@pytest.mark.parametrize("suffix", ["arrow", "parquet", "lance", "vortex", "duckdb", "zarr", "tiffs"])
@pytest.mark.share(2, "suffix")
def test_parts_are_read_as_one(tmp_path: Path, images: list[np.ndarray], suffix: str) -> None:
    path = publish(tmp_path / "plate.parts", images, [5, 1, 11], suffix)
    with open_images(path) as source:
        assert len(source) == 17
        assert list(source.image_ids) == [f"id-{i}" for i in range(17)]
        assert source.columns["label"].to_pylist() == list(range(17))
        check(source, images, [16, 3, 3, -12, 5, 0])
        assert source.metadata(7)["name"] == open_images(next((path / PARTS).glob("00002*"))).metadata(1)["name"]
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.read(6), images[6])
    with open_images(path, verify=True) as verified:
        stack = np.empty((17, *images[0].shape), np.uint16)
        decode(verified.images, stack)
        np.testing.assert_array_equal(stack, images)


def test_columns_are_read_when_they_are_asked_for_and_no_others(
    tmp_path: Path, images: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(tmp_path / "plate.parts", images, [9, 8])
    column_names: list[str] = []
    read = pq.ParquetFile.read

    def noted(file: pq.ParquetFile, columns: list[str]) -> pa.Table:
        column_names.extend(name for name in columns if not name.startswith(f"{schema.SIDECAR_COLUMN}."))
        return read(file, columns)

    monkeypatch.setattr(pq.ParquetFile, "read", noted)
    dataset = OMEArrowDataset(path, target="label", preload=False, axes="TCZYX")
    assert column_names == ["label"]
    assert [label for _, label in dataset] == list(range(17))
    views = dataset.split((0.5, 0.5), by="well", seed=0)
    views[0].split((0.5, 0.5), by="well", seed=1)
    views[1].balanced_sampler("well")
    assert set(column_names) == {"label", "well"}
    assert column_names.count("label") == 1
    for source in (open_images(path), open_images(path, verify=True)):
        column_names.clear()
        assert source.columns.equals(pq.read_table(path / INDEX).drop_columns(schema.SIDECAR_COLUMN))
        assert source.columns is source.columns
        assert column_names == ["label", "well"]


def test_columns_of_an_index_that_was_replaced_are_refused(tmp_path: Path, images: list[np.ndarray]) -> None:
    path = publish(tmp_path / "plate.parts", images, [9, 8])
    opened, other = open_images(path), open_images(path)
    pq.write_table(pq.read_table(path / INDEX).slice(1), path / INDEX)
    with raises(FormatError, path=path / INDEX):
        opened.columns  # noqa: B018
    publish(tmp_path / "other" / "plate.parts", images[::-1], [9, 8])
    path.rename(tmp_path / "old.parts")
    (tmp_path / "other" / "plate.parts").rename(path)
    for read in (lambda: other.columns, lambda: other.images.header.columns.checksums, lambda: other.column("label")):
        with raises(FormatError, path=path):
            read()


def test_without_its_manifest_it_is_no_collection(tmp_path: Path, images: list[np.ndarray]) -> None:
    path = publish(tmp_path / "plate.parts", images, [9, 8])
    (path / MANIFEST).unlink()
    with pytest.raises(OMEArrowDSError):
        open_images(path)


def _edited(path: Path, **changed: object) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changed))


def test_what_contradicts_the_manifest_is_refused(tmp_path: Path, images: list[np.ndarray]) -> None:
    path = publish(tmp_path / "plate.parts", images, [9, 8])
    manifest = json.loads((path / MANIFEST).read_text())
    outside = [{**manifest["parts"][0], "name": "../../other.arrow"}, manifest["parts"][1]]
    for changed, file, fact in (
        ({"parts": outside}, MANIFEST, "'../../other.arrow'"),
        ({"version": 3}, MANIFEST, "version 3"),
        ({"index": "0" * 32}, INDEX, MANIFEST),
        ({"parts": manifest["parts"][:1]}, INDEX, MANIFEST),
    ):
        _edited(path, **changed)
        with raises(FormatError, path=path / file, mentions=fact, remedy=False):
            open_images(path)
        _edited(path, **manifest)
    (path / INDEX).unlink()
    with raises(MissingPathError, path=path / INDEX):
        open_images(path)


def test_a_part_that_is_another_one_is_refused_when_it_is_read(tmp_path: Path, images: list[np.ndarray]) -> None:
    path = publish(tmp_path / "plate.parts", images, [9, 8])
    first, second = sorted((path / PARTS).iterdir())
    with open_images(path) as source:
        first.unlink()
        np.testing.assert_array_equal(source.read(9), images[9])
        with raises(MissingPathError, path=first, remedy=False):
            source.read(0)
        second.rename(first)
        with raises(FormatError, path=first):
            source.read(0)


def test_parts_that_were_exchanged_are_refused_though_their_images_are_alike(tmp_path: Path, images: list[np.ndarray]):
    path = publish(tmp_path / "plate.parts", images[:16], [8, 8])
    first, second = sorted((path / PARTS).iterdir())
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)
    with open_images(path) as source:
        for index, part in ((0, first), (15, second)):
            with raises(FormatError, path=part, mentions=INDEX):
                source.read(index)


def test_names_in_the_index_are_ours() -> None:
    assert schema.SIDECAR_COLUMN == "omearrow_ds"  # The name is stored in files.
