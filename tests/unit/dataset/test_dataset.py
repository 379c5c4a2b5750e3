"""Datasets, preloaded and on demand; the oracle is NumPy on the arrays that ome-arrow decodes."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import tempfile
import threading
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from omearrow_ds import (
    ArgumentError,
    AxesError,
    ColumnError,
    ImageIndexError,
    MemoryLimitError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    OMEArrowDSError,
    SelectError,
    write_images,
)
from omearrow_ds.advise.profile.measure import preloaded
from omearrow_ds.dataset import preload as cache
from omearrow_ds.dataset.batch import collate
from omearrow_ds.dataset.stored_images import ImageCache
from omearrow_ds.kernels.gather import DecodedRows
from omearrow_ds.kernels.stacks import Stacks
from tests.support.errors import raises
from tests.support.strategies import (
    DTYPES,
    ENCODED,
    FEW_FORMATS,
    NAMES_OR_LONG,
    RAGGED,
    all_same,
    dtypes,
    images_of,
    same,
    slow_except,
)
from tests.unit.test_axes import cut_by_numpy, cuts

UNIFORM = [((1, 3, 1, 6, 7), "uint16")] * 5
BOTH = [True, False]
encoded = pytest.mark.parametrize(("name", "encoding"), slow_except(FEW_FORMATS, ENCODED))
preloads = pytest.mark.parametrize("preload", BOTH, ids=["preloaded", "on-demand"])


def normalized(image):
    if image.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return image.astype(np.float32)
    return image.astype(np.float32) / np.float32(np.iinfo(image.dtype).max)


def sample_of(image, axes="CYX", select=None, crop=None, *, normalize=True):
    """Return the expected sample of an image, computed without optimizations."""
    sample = np.ascontiguousarray(cut_by_numpy(image, axes, select, crop))
    return normalized(sample) if normalize else sample


def ways(dataset):
    """Switch the dataset to each way to make samples: default, gathered, row by row, image by image, cached."""
    yield "as it chooses"
    rows = dataset._collection.rows
    stack = None if rows is None else rows.stacks.single_array
    for part in () if stack is None else (np.ascontiguousarray(stack), np.repeat(stack, 2, axis=-1)[..., ::2]):
        vars(dataset._collection)["rows"] = DecodedRows(Stacks([part]), rows._divisors or [rows._divisor], rows._dtype)
        yield "gathered" if part.flags.c_contiguous else "row by row"
    if rows is not None and not dataset.preloaded:
        parts = Stacks([rows.stacks[number][None] for number in range(len(rows.stacks))])
        vars(dataset._collection)["rows"] = DecodedRows(parts, [rows._divisor], rows._dtype)
        yield "of several parts"
    vars(dataset._collection)["rows"] = None
    yield "image by image"
    vars(dataset._collection)["image_cache"] = ImageCache(300)
    yield "cached"


def collated(dataset, order):
    """Return samples as a loader collates them, or as a list if they cannot be stacked."""
    alike = len({(sample.shape, sample.dtype) for sample in dataset}) == 1
    batch = _MapDatasetFetcher(dataset, True, collate if alike else list, False).fetch(order)
    return list(batch.numpy()) if alike else arrays(batch)


def arrays(samples):
    return [sample.numpy() for sample in samples]


@encoded
@pytest.mark.parametrize("kinds", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.share(2, "name", "kinds")
def test_preloaded_equals_on_demand_equals_numpy(stored, name, encoding, kinds):
    images = images_of(kinds)
    path = stored(name, images, encoding=encoding)
    order = [4, 0, -1, 0, 2]
    for (kind, normalize), preload in product(((OMEArrowDataset, True), (OMEArrowDatasetNumpy, False)), BOTH):
        expected = [sample_of(image, "TCZYX", normalize=normalize) for image in images]
        dataset = kind(path, preload=preload, axes="TCZYX", normalize=normalize)
        assert dataset.preloaded is preload
        for index, other in enumerate(expected):
            assert isinstance(dataset[index], torch.Tensor if kind is OMEArrowDataset else np.ndarray)
            assert same(np.asarray(dataset[index]), other)
        assert all_same(list(map(np.asarray, dataset.__getitems__(order))), [expected[index] for index in order])


@st.composite
def sample_arguments(draw):
    """Draw shapes and dtypes of a collection (one shape, one or several dtypes) and arguments that fit it."""
    shape, axes, select, crop = draw(cuts())
    kinds = draw(st.one_of(st.lists(dtypes, min_size=1, max_size=3), dtypes.map(lambda dtype: [dtype] * 3)))
    return [(shape, dtype) for dtype in kinds], axes, select, crop, draw(st.booleans())


@pytest.mark.parametrize("suffix", [".arrow", ".parquet", ".tiffs"])
@settings(max_examples=40, deadline=None)
@given(arguments=sample_arguments())
def test_samples_and_batches_are_what_numpy_makes(suffix, arguments):
    kinds, axes, select, crop, normalize = arguments
    images = images_of(kinds)
    expected = [sample_of(image, axes, select, crop, normalize=normalize) for image in images]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"images{suffix}"
        write_images(images, path)
        for preload in BOTH:
            dataset = OMEArrowDataset(
                path, preload=preload, axes=axes, select=select, crop_size=crop, normalize=normalize
            )
            assert dataset.shape == expected[0].shape
            order = [*range(len(images)), 0]
            for _ in ways(dataset):
                assert all_same(arrays(dataset[index] for index in order), [expected[index] for index in order])
                assert all_same(arrays(dataset.__getitems__(order)), [expected[index] for index in order])
                assert all_same(collated(dataset, order), [expected[index] for index in order])


@preloads
@pytest.mark.parametrize("side", [20, 300])
def test_small_and_large_images_are_scaled_alike(stored, preload, side):
    images = images_of([((1, 2, 1, side, side), "uint16")] * 4)
    dataset = OMEArrowDataset(stored("arrow", images), preload=preload)
    batch = arrays(dataset.__getitems__([3, 1, 1]))
    assert all_same(batch, [normalized(images[index][0, :, 0]) for index in (3, 1, 1)])
    assert all_same(batch, arrays(dataset[index] for index in (3, 1, 1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalizing_divides_by_the_dtypes_maximum(stored, dtype):
    if dtype.kind == "f":
        image = np.array([[0.1, -1, np.nan, np.inf, 1e30, np.finfo(dtype).max]], dtype)
    else:
        info = np.iinfo(dtype)
        image = np.linspace(info.min, info.max, 4099, dtype=np.float64).astype(dtype)[None]
        image[0, :2] = info.min, info.max
    path = stored("arrow", [image, image])
    for preload in BOTH:
        dataset = OMEArrowDataset(path, preload=preload, axes="YX")
        samples = [dataset[1].numpy(), *arrays(dataset.__getitems__([1, 0]))]
        assert all_same(samples, [normalized(image)] * 3)
        if dtype.kind != "f":
            assert float(samples[0].max()) == 1.0


@preloads
def test_what_a_dataset_says_of_itself(stored, preload):
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM), image_ids=list("abcde")), preload=preload)
    assert len(dataset) == 5
    assert dataset.shape == (3, 6, 7)
    assert dataset.nbytes == 5 * 3 * 6 * 7 * 2
    assert list(dataset.image_ids) == list("abcde")
    assert "images.parquet" in repr(dataset)
    assert isinstance(dataset, torch.utils.data.Dataset)
    ragged = OMEArrowDataset(stored("parquet", images_of(RAGGED), "ragged"), preload=preload, axes="TCZYX")
    assert ragged.shape is None
    assert ragged.nbytes == sum(image.nbytes for image in images_of(RAGGED))


@preloads
def test_an_empty_dataset(stored, preload):
    dataset = OMEArrowDataset(stored("parquet", []), preload=preload)
    assert len(dataset) == 0
    assert dataset.shape is None
    assert dataset.nbytes == 0
    assert list(dataset.__getitems__([])) == []
    with pytest.raises(IndexError):
        dataset[0]
    assert list(torch.utils.data.DataLoader(dataset)) == []


@preloads
@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
def test_indices(stored, preload, kind):
    images = images_of(UNIFORM)
    dataset = kind(stored("parquet", images), preload=preload, normalize=False)
    for index in (0, -1, -5, np.int64(3), np.uint8(2), np.array(1), torch.tensor(4)):
        assert same(np.asarray(dataset[index]), images[int(index)][0, :, 0])
    for index in (5, -6, 2**70, np.int64(5), 1.0, "1", None, [0], slice(0, 2), np.array([1, 2])):
        with raises(ImageIndexError, path="images.parquet", remedy=False):
            dataset[index]
        with raises(ImageIndexError, path="images.parquet", remedy=False):
            dataset.__getitems__([0, index])


@pytest.mark.parametrize("name", NAMES_OR_LONG)
@preloads
@pytest.mark.parametrize("normalize", BOTH, ids=["normalized", "stored"])
@pytest.mark.share(2, "name", "preload", "normalize")
def test_a_sample_is_the_callers_own(stored, name, preload, normalize):
    images = images_of(UNIFORM)
    dataset = OMEArrowDataset(stored(name, images), preload=preload, normalize=normalize)
    expected = sample_of(images[1], normalize=normalize)
    first, batch = dataset[1], dataset.__getitems__([1, 1, 2])
    first.fill_(0)
    batch[0].fill_(7)
    assert same(batch[1].numpy(), expected)
    assert same(dataset[1].numpy(), expected)
    assert same(dataset.__getitems__([1])[0].numpy(), expected)


def test_transform_gets_each_samples_tensor(stored):
    images = images_of(UNIFORM)
    path = stored("parquet", images)
    shapes = []

    def flip(sample):
        shapes.append(tuple(sample.shape))
        return sample.flip(-1)

    dataset = OMEArrowDataset(path, transform=flip)
    expected = [np.ascontiguousarray(sample_of(image)[..., ::-1]) for image in images]
    assert same(dataset[2].numpy(), expected[2])
    assert all_same(arrays(dataset.__getitems__([1, 0])), [expected[1], expected[0]])
    assert shapes == [(3, 6, 7)] * 3
    assert OMEArrowDataset(path, transform=lambda sample: int(sample.ndim))[0] == 3
    with raises(ArgumentError, option="transform", path=path, remedy=False):
        OMEArrowDatasetNumpy(path, transform=flip)


@pytest.fixture
def labelled(stored):
    columns = {
        "label": [3, 1, 4, 1, 5],
        "score": [0.5, 1.5, 2.5, 3.5, 4.5],
        "well": ["A1", "A2", "B1", "B2", "C1"],
        "features": [[1.0, 2.0]] * 5,
        "holes": [1, 2, None, 4, 5],
    }
    return stored("parquet", images_of(UNIFORM), columns=columns)


@preloads
@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
def test_targets(labelled, preload, kind):
    for target, expected in [
        ("label", 1),
        ("score", 3.5),
        ("well", 3),
        (lambda row: row["well"] + str(row["label"]), "B21"),
        (lambda row: row["holes"], 4),
    ]:
        dataset = kind(labelled, preload=preload, target=target)
        image, target_value = dataset[3]
        assert same(np.asarray(image), sample_of(images_of(UNIFORM)[3]))
        assert target_value == expected
        assert type(target_value) is type(expected)
        assert [labelled_sample[1] for labelled_sample in dataset.__getitems__([-2, 3])] == [expected, expected]
    assert np.asarray(kind(labelled, preload=preload, target="features")[0][1]).tolist() == [1.0, 2.0]


LISTS = [
    ([[], [3], [4, 5]], pa.list_(pa.int64()), "int64"),
    ([[[1, 2]], [], [[5, 6]]], pa.list_(pa.list_(pa.int16())), "int64"),
    ([[2**63 + 1, 1], [3, 4], [5, 6]], pa.list_(pa.uint64()), "uint64"),
    ([[2**53 + 1, 1], [3, 4], []], pa.list_(pa.uint64()), "int64"),
    ([[], [0.5], [2.0]], pa.list_(pa.float32()), "float64"),
]


@pytest.mark.parametrize(("lists", "kind", "dtype"), LISTS, ids=str)
def test_lists_of_numbers_are_arrays_of_one_dtype(stored, lists, kind, dtype):
    """The dtype follows the column: NumPy made half of these lists floats, and changed their values."""
    path = stored("arrow", images_of(UNIFORM)[:3], columns={"lists": pa.array(lists, kind)})
    targets = [target for _, target in OMEArrowDataset(path, target="lists")]
    assert [target.tolist() for target in targets] == lists
    assert {target.dtype.name for target in targets} == {dtype}


@pytest.mark.parametrize("lists", [[[[1], [2, 3]], [[4]], []], [[None, 1], [2], []], [[[1], None], [[2]], []]], ids=str)
def test_lists_that_are_no_arrays_of_numbers_keep_their_values(stored, lists):
    path = stored("arrow", images_of(UNIFORM)[:3], columns={"lists": lists})
    targets = [target for _, target in OMEArrowDataset(path, target="lists")]
    assert [target if isinstance(target, list) else target.tolist() for target in targets] == lists


@preloads
def test_a_target_that_is_not_there(labelled, preload):
    with raises(ColumnError, option="target", path=labelled, mentions=("'labels'", "'label'"), remedy=False):
        OMEArrowDataset(labelled, preload=preload, target="labels")
    with raises(ColumnError, path=labelled, mentions=("'holes'", "image 2")):
        OMEArrowDataset(labelled, preload=preload, target="holes")
    with pytest.raises(OMEArrowDSError):
        OMEArrowDataset(labelled, preload=preload, target=3)


@preloads
@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
def test_texts_are_codes_of_the_sorted_distinct_ones(stored, preload, kind):
    texts = ["β", "b", "", "b", "B"]
    columns = {"text": texts, "large": pa.array(texts, pa.large_string()), "label": range(5)}
    path = stored("arrow", images_of(UNIFORM), columns=columns)
    for name in ("text", "large"):
        dataset = kind(path, preload=preload, target=name)
        assert dataset.classes == ("", "B", "b", "β")
        assert [target for _, target in dataset] == [3, 2, 0, 2, 1]
        assert type(dataset[0][1]) is int
        assert [dataset.classes[target] for _, target in dataset] == texts
        as_text = kind(path, preload=preload, target=name, encode_targets=False)
        assert as_text.classes is None
        assert [target for _, target in as_text] == texts
    assert kind(path, target="label").classes is None
    assert kind(path).classes is None


@preloads
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, OMEArrowDataLoader])
@pytest.mark.parametrize("transform", [None, torch.neg])
def test_several_targets_and_ids(labelled, preload, loader, transform):
    options = {"preload": preload, "transform": transform}
    dataset = OMEArrowDataset(labelled, target=["well", "score", "features"], return_ids=True, **options)
    assert dataset.classes == {"well": ("A1", "A2", "B1", "B2", "C1")}
    image, target, image_id = dataset[3]
    assert same(image.numpy(), OMEArrowDataset(labelled, **options)[3].numpy())
    assert (target["well"], target["score"], target["features"].tolist()) == (3, 3.5, [1.0, 2.0])
    assert image_id == dataset.image_ids[3]
    target["features"][:] = 0
    assert dataset[3][1]["features"].tolist() == [1.0, 2.0]
    images, targets, ids = list(loader(dataset, 2, num_workers=0))[1]
    assert torch.equal(images, torch.stack([dataset[2][0], dataset[3][0]]))
    assert targets["well"].tolist() == [2, 3]
    assert targets["well"].dtype == torch.int64
    assert targets["features"].shape == (2, 2)
    assert list(ids) == list(dataset.image_ids)[2:4]
    assert isinstance(ids, list) or (transform is not None and loader is torch.utils.data.DataLoader)
    _, ids = next(iter(loader(OMEArrowDataset(labelled, return_ids=True, **options), 2, num_workers=0)))
    assert list(ids) == list(dataset.image_ids)[:2]
    assert OMEArrowDataset(labelled, target=("label",), encode_targets=False)[1][1] == {"label": 1}
    assert OMEArrowDataset(labelled, target=["label", "score"]).classes is None


@pytest.mark.parametrize("target", [[], ["label", "label"], ["label", 3], {"label"}, 3, b"label"], ids=str)
def test_a_target_that_names_no_columns(labelled, target):
    with raises(ArgumentError, option="target", remedy=False):
        OMEArrowDataset(labelled, target=target)
    with raises(ColumnError, path=labelled, mentions="'holes'"):
        OMEArrowDataset(labelled, target=["label", "holes"])


def test_a_callable_target_sees_id_and_index(stored):
    images = images_of(UNIFORM)
    dataset = OMEArrowDataset(stored("arrow", images, image_ids=list("abcde")), target=dict)
    assert [target for _, target in dataset] == [
        {"image_id": image_id, "index": n} for n, image_id in enumerate("abcde")
    ]
    path = stored("arrow", images, "named", image_ids=list("abcde"), columns={"index": [9, 8, 7, 6, 5]})
    assert OMEArrowDataset(path, target=dict)[1][1] == {"image_id": "b", "index": 8}


def test_preloading_keeps_to_max_bytes(stored, monkeypatch):
    path = stored("parquet", images_of(UNIFORM))
    needed = 5 * 3 * 6 * 7 * 2
    assert OMEArrowDataset(path, preload="auto", max_bytes=needed).preloaded
    assert OMEArrowDataset(path, preload="auto").preloaded
    assert not OMEArrowDataset(path, preload="auto", max_bytes=needed - 1).preloaded
    assert OMEArrowDataset(path, max_bytes=needed).preloaded
    monkeypatch.setattr("omearrow_ds.dataset.preload.PixelCache.load", lambda _: pytest.fail("pixels were read"))
    with raises(
        MemoryLimitError, option="max_bytes", path=path, mentions=(f"{needed:,}", f"{needed - 1:,}", "preload=False")
    ) as caught:
        OMEArrowDataset(path, max_bytes=needed - 1)
    assert isinstance(caught.value, MemoryError)
    with raises(OMEArrowDSError, option="preload", mentions="'yes'", remedy=False):
        OMEArrowDataset(path, preload="yes")


@preloads
def test_images_that_do_not_fit_are_refused_when_opened(stored, preload):
    path = stored("parquet", images_of([((1, 1, 1, 9, 9), "uint8"), ((1, 2, 1, 4, 5), "uint8")]))
    with raises(AxesError, option="axes", path=path, mentions=("image 1", "select={'C': 0}")):
        OMEArrowDataset(path, preload=preload, axes="YX")
    with raises(AxesError, option="crop_size", path=path, mentions=("image 1", "4 x 5")):
        OMEArrowDataset(path, preload=preload, crop_size=(6, 5))
    with raises(SelectError, option="select", path=path, mentions=("image 0", "select={'C': 1}"), remedy=False):
        OMEArrowDataset(path, preload=preload, select={"C": 1})


def _answer(connection, pickled):
    dataset = pickle.loads(pickled)
    connection.send(dataset.preloaded)
    connection.recv()
    connection.send(dataset[1].numpy())
    connection.send([sample.numpy() for sample in dataset.__getitems__([2, 0])])


def test_another_process_attaches_to_the_same_pixels(stored):
    images = images_of([((1, 1, 1, 200, 200), "uint8")] * 3)
    dataset = OMEArrowDataset(stored("parquet", images), normalize=False)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 5000
    parent, child = get_context("forkserver").Pipe()
    process = get_context("forkserver").Process(target=_answer, args=(child, pickled))
    process.start()
    assert parent.poll(60)
    assert parent.recv() is True
    dataset._collection.cache.block.bytes[:] = 42
    parent.send("go")
    for _ in range(2):
        assert parent.poll(60)
        assert set(np.unique(parent.recv())) == {42}
    process.join(60)
    assert process.exitcode == 0
    assert set(np.unique(dataset[0].numpy())) == {42}


OWNER = """
import pathlib, pickle, sys
from omearrow_ds import OMEArrowDataset

path, file = sys.argv[1:]
pathlib.Path(file).write_bytes(pickle.dumps(OMEArrowDataset(path, target="label")))
"""


def test_a_pickle_outlives_its_owner(programs, labelled, tmp_path):
    assert programs.run(OWNER, labelled, tmp_path / "pickle").returncode == 0
    dataset = pickle.loads((tmp_path / "pickle").read_bytes())
    assert dataset.preloaded
    image, label = dataset[2]
    assert label == 4
    assert same(image.numpy(), sample_of(images_of(UNIFORM)[2]))
    assert all_same(
        arrays(image for image, _ in dataset.__getitems__([4, 0])), [sample_of(images_of(UNIFORM)[i]) for i in (4, 0)]
    )


@pytest.mark.parametrize("name", NAMES_OR_LONG)
@preloads
@pytest.mark.share(2, "name", "preload")
def test_a_pickle_in_the_same_process(stored, name, preload):
    path = stored(name, images_of(UNIFORM), columns=pa.table({"label": range(5)}))
    dataset = OMEArrowDataset(path, preload=preload, select={"C": [2, 0, 1]}, crop_size=(3, 3), target="label")
    dataset.__getitems__([0])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 5000
    again = pickle.loads(pickle.dumps(pickle.loads(pickled)))
    assert (again.shape, again.nbytes, list(again.image_ids)) == (
        dataset.shape,
        dataset.nbytes,
        list(dataset.image_ids),
    )
    for index in range(5):
        assert same(again[index][0].numpy(), dataset[index][0].numpy())
        assert again[index][1] == dataset[index][1] == index


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
def test_a_bar_is_shown_where_preloading_takes_long(stored, kind, monkeypatch, tmp_path):
    """The threshold is set so that the bar appears with the first images."""
    path = stored("tiff", images_of(UNIFORM))

    def progress_output(stream, **options):
        monkeypatch.setattr(sys, "stderr", stream)
        pickled = pickle.dumps(preloaded(kind(path, preload=False)))
        written = None if stream is None or stream.closed else stream.getvalue()
        assert not written, "unpickling says nothing"
        assert len(kind(path, **options)) == len(pickle.loads(pickled)) == 5
        return None if written is None else stream.getvalue()

    closed, threads = Terminal(), threading.active_count()
    closed.close()
    for expected in (None, True, False):  # Preloading takes less than 2 s.
        assert progress_output(Terminal(), progress=expected) == ""
    monkeypatch.setattr(cache, "_BAR_OPTIONS", {"delay": -1.0, "mininterval": 0.0})
    for options, of_terminal, of_file in (({}, True, False), ({"progress": True}, True, True)):
        actual = [progress_output(stream, **options) for stream in (Terminal(), io.StringIO(), closed, None)]
        assert [bool(item) for item in actual] == [of_terminal, of_file, False, False]
        assert "preloading images.tiffs: 100%" in actual[0]
        assert "5/5" in actual[0]
    assert progress_output(Terminal(), progress=False) == ""
    assert "5/5" in progress_output(Terminal(), cache_dir=tmp_path / "cache")  # Decoded into the cache.
    assert "5/5" in progress_output(
        Terminal(), cache_dir=tmp_path / "cache"
    )  # Compared with the checksums of the cache.
    assert threading.active_count() == threads, "a process that forks later must have no more"


@pytest.mark.parametrize("picks", [[0, 1], np.array([0, 1])], ids=["list", "array"])
def test_a_selection_is_what_it_was_when_the_dataset_was_made(stored, picks):
    images = images_of([((1, 4, 1, 5, 6), "uint16")] * 2)
    path, select = stored("arrow", images), {"C": picks}
    for preload in BOTH:
        dataset = OMEArrowDataset(path, select=select, preload=preload)
        picks[:] = [3, 2]
        for copied in (dataset, copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
            assert same(copied[1].numpy(), normalized(images[1][0, :2, 0]))
        picks[:] = [0, 1]


@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
def test_an_option_that_is_set_later_is_refused(stored, kind):
    """It would have no effect, and running workers have their own copy of the dataset."""
    dataset = kind(stored("arrow", images_of(UNIFORM)))
    part, _ = torch.utils.data.random_split(dataset, [3, 2])
    for name in ("transform", "target", "normalize", "select", "crop_size", "axes", "preload", "verify"):
        with raises(ArgumentError, option=name, remedy=False):
            setattr(part.dataset, name, None)
    dataset.epoch = 3
    assert dataset.epoch == 3


class Augmented(OMEArrowDataset):
    def __getitem__(self, index):
        return self.transform(super().__getitem__(index))


def test_a_subclass_may_have_options_of_its_own(stored):
    dataset = Augmented(stored("arrow", images_of(UNIFORM)))
    dataset.transform = torch.neg
    assert torch.equal(dataset[1], -OMEArrowDataset(dataset.path)[1])
    assert torch.equal(dataset.__getitems__([1])[0], dataset[1])


def row_label(row):
    return row["label"] + 1


def test_a_callable_target_needs_no_file_once_all_is_in_memory(stored):
    path = stored("parquet", images_of(UNIFORM), columns={"label": [1, 2, 3, 4, 5]})
    dataset = OMEArrowDataset(path, target=row_label)
    pickled = pickle.dumps(dataset)
    path.unlink()
    assert [pickle.loads(pickled)[index][1] for index in range(5)] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("preload", [False, np.False_])
def test_any_false_is_no_preload(stored, preload):
    assert not OMEArrowDataset(stored("parquet", images_of(UNIFORM)), preload=preload).preloaded


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"preload": 0}, ArgumentError),
        ({"max_bytes": "1GB"}, ArgumentError),
        ({"transform": 3}, ArgumentError),
        ({"select": [0]}, ArgumentError),
        ({"select": {"C": slice(0, 2, 0)}}, AxesError),
        ({"select": {"C": slice("a")}}, AxesError),
        ({"select": {"C": [[0], [1, 2]]}}, AxesError),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_of_our_errors(stored, options, error):
    with pytest.raises(error):
        OMEArrowDataset(stored("parquet", images_of(UNIFORM)), **options)


class Delegating(torch.utils.data.Dataset):
    """A wrapper that delegates missing attributes, including ``__getitems__``, which bypasses its ``__getitem__``."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return -self.dataset[index]


@pytest.mark.parametrize("kind", [OMEArrowDataset, OMEArrowDatasetNumpy])
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, OMEArrowDataLoader])
def test_samples_are_those_of_a_dataset_around_it(stored, kind, loader):
    dataset = kind(stored("arrow", images_of(UNIFORM)))
    around = Delegating(dataset)
    for wrapped in (around, torch.utils.data.Subset(around, range(len(dataset)))):
        (batch,) = loader(wrapped, len(dataset), num_workers=0)
        assert same(batch.numpy(), np.stack([-np.asarray(dataset[index]) for index in range(len(dataset))]))
