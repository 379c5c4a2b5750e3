"""Classes of text targets: codes follow `sorted` or the list that was passed."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from omearrow_ds import (
    ArgumentError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    convert,
    write_images,
)
from tests.support.errors import raises, warns
from tests.support.strategies import image_of

TREATMENTS = {"north": ["dmso", "taxol", "dmso", "taxol"], "south": ["taxol", "zinc", "taxol", "zinc"]}
CLASSES = ("dmso", "zinc", "unused", "taxol")
LONG = [f"compound-{number:03d}" for number in range(60)]


@pytest.fixture
def plates(tmp_path):
    paths = {}
    for name, treatments in TREATMENTS.items():
        paths[name] = tmp_path / f"{name}.parquet"
        images = [image_of((1, 1, 1, 6, 7), "uint8", number) for number in range(4)]
        columns = {"t": treatments, "dose": [1.0, 2.0, 3.0, 4.0], "gene": ["x", "y", "x", "y"]}
        write_images(images, paths[name], columns=columns, image_ids=[f"{name}-{number}" for number in range(4)])
    return paths


def labels(dataset):
    return [dataset[index][1] for index in range(len(dataset))]


@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize("given", [list, tuple, np.array, iter])
def test_codes_are_places_in_classes(plates, kind, preload, given):
    for name, treatments in TREATMENTS.items():
        dataset = kind(plates[name], preload=preload, target="t", classes=given(CLASSES))
        assert labels(dataset) == [CLASSES.index(text) for text in treatments]
        assert dataset.classes == CLASSES
        assert all(type(text) is str for text in dataset.classes)


def test_classes_of_one_dataset_are_codes_of_another(plates):
    train = OMEArrowDataset(plates["south"], target="t")
    assert train.classes == ("taxol", "zinc")
    test = OMEArrowDataset(plates["south"], target="t", classes=train.classes)
    assert labels(test) == labels(train)
    assert OMEArrowDataset(plates["south"], target="t", classes=None).classes == train.classes


def test_classes_are_kept_by_views_pickles_copies_and_workers(plates, tmp_path):
    options = {"target": "t", "classes": CLASSES, "cache_dir": tmp_path / "cache"}
    codes_of_south = [CLASSES.index(text) for text in TREATMENTS["south"]]
    dataset = OMEArrowDataset(plates["south"], **options)
    views = [*dataset.split((0.5, 0.5)), dataset.with_transform(torch.neg), pickle.loads(pickle.dumps(dataset))]
    for view in views:
        assert view.classes == CLASSES
        assert labels(view) == [codes_of_south[number] for number in view.fields.tolist()]
    again = OMEArrowDataset(plates["south"], **options)
    for workers in (0, 2):
        loader = OMEArrowDataLoader(again, batch_size=3, num_workers=workers, timeout=120 if workers else 0)
        assert torch.cat([codes for _, codes in loader]).tolist() == codes_of_south
    convert(plates["south"], tmp_path / "south.parts", "arrow")
    assert labels(OMEArrowDataset(tmp_path / "south.parts", target="t", classes=CLASSES)) == codes_of_south


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_classes_of_any_text_type(plates, tmp_path, kind):
    table = pq.read_table(plates["north"])
    number = table.column_names.index("t")
    pq.write_table(table.set_column(number, "t", table["t"].cast(kind)), tmp_path / "typed.parquet")
    dataset = OMEArrowDataset(tmp_path / "typed.parquet", target="t", classes=CLASSES)
    assert labels(dataset) == [0, 3, 0, 3]


def test_classes_of_objects_with_masks(plates, tmp_path):
    masks = tmp_path / "masks.parquet"
    write_images([np.ones((6, 7), "uint8")] * 4, masks, axes="YX", image_ids=[f"north-{number}" for number in range(4)])
    ids = ["north-1", "north-0", "north-1"]
    cells = {"image_id": ids, "centroid_y": [2, 3, 3], "centroid_x": [2, 3, 4], "phase": ["S", "G1", "M"]}
    options = {"objects": pa.table(cells), "crop_size": (3, 3), "masks": masks, "axes": "CYX"}
    phases = OMEArrowDataset(plates["north"], target="phase", classes=["G1", "S", "G2", "M"], **options)
    assert [sample[2] for sample in phases] == [1, 0, 3]
    fields = OMEArrowDataset(plates["north"], target="t", classes=CLASSES, **options)
    assert [sample[2] for sample in fields] == [CLASSES.index(text) for text in ("taxol", "dmso", "taxol")]


def test_several_targets_take_a_mapping_of_some_of_them(plates):
    several = OMEArrowDataset(plates["north"], target=["t", "gene", "dose"], classes={"t": CLASSES})
    assert several.classes == {"t": CLASSES, "gene": ("x", "y")}
    assert labels(several)[1] == {"t": 3, "gene": 1, "dose": 2.0}
    whole = OMEArrowDataset(plates["north"], target=["t", "gene", "dose"], classes=several.classes)
    assert labels(whole) == labels(several)
    assert OMEArrowDataset(plates["north"], target="t", classes={"t": CLASSES}).classes == CLASSES


def test_nulls_are_left_out_with_classes(plates):
    table = {"image_id": ["north-0", "north-2", "north-3"], "late": ["b", None, "a"]}
    with warns(UserWarning, mentions=("1 of 4", "images")):
        dataset = OMEArrowDataset(plates["north"], columns=table, target="late", nulls="skip", classes=["c", "b", "a"])
    assert (labels(dataset), dataset.classes) == ([1, 2], ("c", "b", "a"))
    none = pa.table({"image_id": [f"north-{number}" for number in range(4)], "late": pa.nulls(4)})
    empty = OMEArrowDataset(plates["north"], columns=none, target="late", nulls="skip", classes=["a"])
    assert (len(empty), empty.classes) == (0, ("a",))


WRONG = {
    "no target": ({"target": None}, "target"),
    "texts": ({"encode_targets": False}, "encode_targets"),
    "a function": ({"target": lambda row: row["t"]}, "target"),
    "a text": ({"classes": "dmso"}, "list"),
    "a number": ({"classes": 3}, "list"),
    "numbers": ({"classes": [0, 1]}, "list"),
    "a null": ({"classes": [*CLASSES, None]}, "list"),
    "twice": ({"classes": [*CLASSES, "zinc"]}, "'zinc'"),
    "another column": ({"classes": {"dose": ["a"]}}, "'dose'"),
    "no mapping": ({"target": ["t", "gene"]}, "mapping"),
    "a numeric column": ({"target": "dose"}, "double"),
}


@pytest.mark.parametrize(("options", "fact"), WRONG.values(), ids=list(WRONG))
def test_classes_are_refused_where_they_mean_nothing(plates, options, fact):
    with raises(ArgumentError, "classes", mentions=fact):
        OMEArrowDataset(plates["north"], **{"target": "t", "classes": CLASSES, **options})


@pytest.mark.parametrize(
    ("classes", "facts"),
    [
        (["taxol", "Zinc", "zinc sulfate"], ("'zinc'", "'Zinc'", 3)),
        (["zinc", "Taxol", "taxotere"], ("'taxol'", "'Taxol'", "'taxotere'")),
        (["dmso"], ("'taxol'", "'dmso'")),
        ([], ("'taxol'", 0)),
    ],
)
@pytest.mark.parametrize("preload", [True, False])
def test_an_unknown_text_is_an_error_with_the_nearest_classes(plates, classes, facts, preload):
    with raises(ArgumentError, "classes", plates["south"], mentions=("'t'", *facts)):
        OMEArrowDataset(plates["south"], preload=preload, target="t", classes=classes)


class TestConcatenated:
    """Datasets with different classes cannot be concatenated."""

    def pair(self, plates, **options):
        return [OMEArrowDataset(path, target="t", **options) for path in plates.values()]

    def test_a_sum_is_refused_when_classes_differ(self, plates):
        north, south = self.pair(plates)
        for left, right in ((north, south), (south, north), (north, Subset(south, [1]))):
            with raises(ArgumentError, "classes", mentions=("'dmso'", "'zinc'", *plates.values())):
                left + right
        with raises(ArgumentError, "classes"):
            north + north + south

    def test_a_loader_is_refused_when_classes_differ_anywhere_below(self, plates):
        north, south = self.pair(plates)
        for mixed in (
            ConcatDataset([north, south]),
            ConcatDataset([Subset(north, [0, 1]), ConcatDataset([Subset(south, [0])])]),
            Subset(ConcatDataset([south, north.split((0.5, 0.5))[0]]), [1, 2]),
            ConcatDataset([north, south.with_transform(torch.neg)]),
        ):
            with raises(ArgumentError, "classes", mentions=("'dmso'", "'zinc'", *plates.values())):
                OMEArrowDataLoader(mixed, 2)

    def test_codes_mean_the_same_when_classes_are_the_same(self, plates):
        north, south = self.pair(plates, classes=CLASSES)
        all_codes = [CLASSES.index(text) for treatments in TREATMENTS.values() for text in treatments]
        for joined in (north + south, ConcatDataset([north, south]), ConcatDataset([ConcatDataset([north]), south])):
            loader = OMEArrowDataLoader(joined, 3, num_workers=0)
            assert torch.cat([codes for _, codes in loader]).tolist() == all_codes

    def test_the_order_of_classes_counts(self, plates):
        north, _ = self.pair(plates, classes=CLASSES)
        reversed_ = OMEArrowDataset(plates["north"], target="t", classes=CLASSES[::-1])
        with raises(ArgumentError, "classes", mentions=(0, "'dmso'", "'taxol'")):
            north + reversed_

    def test_long_lists_are_shortened_to_the_first_difference(self, plates, tmp_path):
        table = pa.table({"image_id": [f"north-{number}" for number in range(4)], "code": LONG[:4]})
        other = [*LONG[:-1], "compound-999"]
        pair = [
            OMEArrowDataset(plates["north"], columns=table, target="code", classes=class_list)
            for class_list in (LONG, other)
        ]
        with raises(ArgumentError, "classes", mentions=(59, "'compound-999'", f"'{LONG[-1]}'")) as caught:
            pair[0] + pair[1]
        assert len(str(caught.value)) < 600

    def test_codes_and_numbers_are_not_mixed(self, plates):
        coded, numbers = (OMEArrowDataset(plates["north"], target=name) for name in ("t", "dose"))
        with raises(ArgumentError, "classes"):
            coded + numbers

    def test_other_targets_are_joined_as_before(self, plates):
        texts = self.pair(plates, encode_targets=False)
        assert [(texts[0] + texts[1])[index][1] for index in (0, 5)] == ["dmso", "zinc"]
        numbers = [OMEArrowDataset(path, target="dose") for path in plates.values()]
        assert len(OMEArrowDataLoader(numbers[0] + numbers[1], 8)) == 1
        functions = [OMEArrowDataset(path, target=lambda row: len(row["t"])) for path in plates.values()]
        assert (functions[0] + functions[1])[5][1] == 4
        plain = [OMEArrowDataset(path) for path in plates.values()]
        assert len(plain[0] + plain[1]) == 8

    def test_several_targets_are_compared_by_name(self, plates):
        options = {"target": ["t", "gene"]}
        mixed = [OMEArrowDataset(path, **options) for path in plates.values()]
        with raises(ArgumentError, "classes", mentions=("'dmso'", "'zinc'")):
            mixed[0] + mixed[1]
        alike = [OMEArrowDataset(path, classes={"t": CLASSES}, **options) for path in plates.values()]
        batch = next(iter(OMEArrowDataLoader(alike[0] + alike[1], 8, num_workers=0)))
        assert batch[1]["t"].tolist() == [0, 3, 0, 3, 3, 1, 3, 1]

    def test_a_dataset_that_makes_its_own_samples_is_not_compared(self, plates):
        class Renamed(OMEArrowDataset):
            def __getitem__(self, index):
                image, code = super().__getitem__(index)
                return image, CLASSES.index(self.classes[code])

        north, south = (Renamed(path, target="t") for path in plates.values())
        codes = torch.cat([codes for _, codes in OMEArrowDataLoader(north + south, 4, num_workers=0)])
        assert codes.tolist() == [0, 3, 0, 3, 3, 1, 3, 1]
