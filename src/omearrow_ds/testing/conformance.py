"""`FormatConformance`: pytest tests of the requirements of a storage format.

In a test module of the package that registers the format::

    from omearrow_ds.testing.conformance import FormatConformance


    class TestPapyrus(FormatConformance):
        format_name = "papyrus"

With ``pytest.register_assert_rewrite("omearrow_ds.testing.conformance")`` in ``conftest.py``, failures show values.
"""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import pytest

from omearrow_ds.axes import Array
from omearrow_ds.codec import schema
from omearrow_ds.dataset.dataset import OMEArrowDatasetNumpy
from omearrow_ds.errors import AxesError, ImageError, ImageIndexError, PathExistsError
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.protocol import ImageSource
from omearrow_ds.storage.source import Encoding, convert, open_images, write_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

Store: TypeAlias = "Callable[..., Path]"
Stored: TypeAlias = tuple[str, Encoding]  # Format and encoding.

# Shapes and dtypes of one collection, all distinct, some with several C, Z or T.
RAGGED = [
    ((1, 1, 1, 5, 7), "uint8"),
    ((1, 3, 1, 4, 6), "uint16"),
    ((2, 2, 3, 5, 4), "uint8"),
    ((1, 1, 4, 1, 1), "uint16"),
    ((3, 1, 1, 2, 9), "uint16"),
]
LARGE = [(1, 1, 1, 1100, 1300)]  # Larger than a chunk of a folder format, and than a page or block of a table format.
SHORT_AXES = [(1, 1, 1, 5, 3), (1, 1, 1, 5, 4), (1, 3, 1, 5, 4), (1, 3, 3, 3, 3), (3, 4, 1, 1, 3), (1, 1, 3, 4, 1)]
METADATA = {
    "name": "nuclei <&\"'> µm 細胞 🔬 a;b\\c {x}",
    "image_type": "label <&>",
    "acquisition_datetime": datetime(2024, 2, 29, 23, 59, 58, 123456),  # noqa: DTZ001  # OME-Arrow dates have no zone
    "physical_size_x": 0.5,
    "physical_size_y": 0.25,
    "physical_size_z": 1.5,
    "physical_size_x_unit": "µm",
    "physical_size_y_unit": "µm",
    "physical_size_z_unit": "nm",
    "channels": [
        dict(zip(("id", "name", "emission_um", "excitation_um", "illumination", "color_rgba"), values, strict=True))
        for values in (
            ("ch-0", "DNA & <ER>", 0.461, 0.358, "Epifluorescence", 0x0000FFFF),
            ("ch-1", "Mito", None, 0.6, "free text", 0xFF00FF80),
        )
    ],
}


def table_columns() -> pa.Table:
    """Return columns of several types for four images; as a constant, they would import pandas."""
    return pa.table(
        {
            "count": pa.array([1, None, -3, 2**40], pa.int64()),
            "area": pa.array([0.1, 2.5, None, -1e300], pa.float64()),
            "well": pa.array(["A1", None, "µ 細胞 '\"; --", ""]),
            "control": pa.array([True, None, False, True]),
            "when": pa.array(
                np.array(["2024-01-02T03:04:05.678901", "NaT", "1969-01-01", "2100-01-01"], "datetime64[us]")
            ),
            "features": pa.array([[1.5, 2.5], None, [], [None, 3.0]], pa.list_(pa.float32())),
        }
    )


def image_of(shape: Sequence[int], dtype: Any = "uint16", number: int = 0) -> Array:
    """Return an image of a dtype and its byte order, whose pixel values depend on position and image number."""
    values = (np.arange(math.prod(shape), dtype=np.uint64) * 40503 + 7919 * number + 1) % 2**31
    pixels = values.astype(dtype).reshape(shape)
    if pixels.dtype.kind == "f":
        pixels /= pixels.dtype.type(3)  # Division into a new array would give native byte order.
    return pixels


def images_of(kinds: Sequence[tuple[Sequence[int], Any]]) -> list[Array]:
    return [image_of(shape, dtype, number) for number, (shape, dtype) in enumerate(kinds)]


def copies(number: int, shape: Sequence[int]) -> list[Array]:
    return images_of([(shape, "uint16")] * number)


def stored_at(path: Path) -> list[Array]:
    """Return all images of a collection."""
    source = open_images(path)
    return source.take(range(len(source)))


def same(actual: Array, expected: Array) -> bool:
    """Whether two arrays are equal in shape, dtype and every bit, including NaN payloads."""
    return actual.shape == expected.shape and actual.dtype == expected.dtype and actual.tobytes() == expected.tobytes()


def all_same(actual: Sequence[Array], expected: Sequence[Array]) -> bool:
    """Whether two sequences of arrays have equal length and are pairwise `same`."""
    return len(actual) == len(expected) and all(map(same, actual, expected))


class FormatConformance:
    """Requirements of `omearrow_ds` for a storage format; its tests write synthetic images and read them.

    Attributes
    ----------
    format_name
        Name of a format of `omearrow_ds.formats`.
    encoding
        ``"bytes"`` or ``"list"``, for table formats.
    """

    format_name: ClassVar[str]
    encoding: ClassVar[Encoding] = "bytes"

    @pytest.fixture
    def storage_info(self) -> Stored:
        """Return format and encoding; override the fixture with parameters to test several."""
        return self.format_name, self.encoding

    @pytest.fixture
    def store(self, storage_info: Stored, tmp_path: Path) -> Store:
        """Return a function that writes images with keywords of `write_images` and returns the path."""
        name, encoding = storage_info
        fmt = get_format(name)

        def write(images: Iterable[Array], stem: str = "images", **keywords: Any) -> Path:
            path = tmp_path / f"{stem}{fmt.suffix}"
            write_images(images, path, name, encoding=encoding, **keywords)
            return path

        return write

    def test_ragged_images_come_back_bit_for_bit(self, store: Store, storage_info: Stored) -> None:
        images = images_of(RAGGED)
        source = open_images(store(images))
        assert isinstance(source, ImageSource)
        assert source.format.name == storage_info[0]
        assert len(source) == len(images)
        assert source.shapes.dtype == np.int64
        assert source.shapes.tolist() == [list(shape) for shape, _ in RAGGED]
        assert list(source.dtypes) == [np.dtype(dtype) for _, dtype in RAGGED]
        assert list(source.image_ids) == [f"image-{number:05d}" for number in range(len(images))]
        assert all_same([source.read(index) for index in range(len(images))], images)
        assert all_same(source.take(range(len(images))), images)

    @pytest.mark.parametrize("uniform", [True, False])
    def test_every_dtype_comes_back_or_is_refused(self, store: Store, storage_info: Stored, uniform: bool) -> None:
        images = images_of([((1, 2, 1, 3, 5), dtype) for dtype in schema.DTYPES])
        for image in images:
            extreme: Any = np.finfo(image.dtype) if image.dtype.kind == "f" else np.iinfo(image.dtype)
            image.flat[:2] = extreme.min, extreme.max
            if image.dtype.kind == "f":
                image.flat[2:6] = np.nan, -np.inf, -0.0, extreme.smallest_subnormal
        if storage_info[1] == "list":
            for image in images[2:]:  # The first two are uint8 and uint16.
                with pytest.raises(ImageError, match=rf"image 1 .*{image.dtype}.*uint8, uint16.*encoding='bytes'"):
                    store([images[0], image])
            images = images[:2]
        if uniform:
            for image in images:
                assert all_same(stored_at(store([image, image], image.dtype.name)), [image, image])
        else:
            assert all_same(stored_at(store(images)), images)

    def test_take_keeps_order_and_duplicates(self, store: Store) -> None:
        images = copies(40, (1, 1, 1, 3, 4))
        source = open_images(store(images))
        several: list[Any] = [[], [39, 0, 39, 20, -1, -40], np.array([7, 7, -33], np.int8), range(30, 0, -7)]
        for indices in [*several, (np.uint64(5),)]:
            assert all_same(source.take(indices), [images[index] for index in indices])
        int_like: Any = np.int32(3)
        assert same(source.read(-1), images[-1])
        assert same(source.read(int_like), images[3])

    def test_results_are_the_callers_own_memory(self, store: Store) -> None:
        images = copies(3, (1, 2, 1, 3, 4))
        source = open_images(store(images))
        results = [source.read(1), *source.take([1, 1, 2])]
        for number, result in enumerate(results):
            assert result.flags.carray  # Contiguous and writable.
            result[...] = number
        assert [int(result.max()) for result in results] == [0, 1, 2, 3]
        assert all_same(source.take([1, 1, 2]), [images[1], images[1], images[2]])

    def test_read_returns_the_slice_of_a_region(self, store: Store) -> None:
        large = (2, 3, 2, 30, 41), "uint16"
        images = images_of([large, ((1, 1, 1, 7, 5), "uint8"), large])
        path = store(images, metadata=[{"channels": [{"name": name} for name in ("DNA", "ER", "Mito")]}, None, None])
        for verify in (None, True):
            source = open_images(path, verify=verify)
            assert same(source.read(1, (6, 7, 0, 5)), images[1][..., 6:7, :].copy())
            assert same(source.read(0, (3, 19, 40, 41)), images[0][..., 3:19, 40:41].copy())
            assert same(source.read(0, channels="ER", z=1), images[0][:, 1:2, 1:2].copy())
            part = source.read(-1, (0, 12, 9, 30), [2, 0], z=slice(None, None, -1), t=[1])
            assert same(part, np.ascontiguousarray(images[2][1:2, [2, 0], ::-1, :12, 9:30]))
            part[...] = 0
            assert same(source.read(2), images[2])

    def test_read_raises_axes_error_when_a_region_or_channel_is_outside(self, store: Store) -> None:
        source = open_images(store(images_of([((1, 2, 1, 8, 9), "uint16")])))
        for region in ((0, 9, 0, 9), (-1, 3, 0, 9), (4, 4, 0, 9), (0, 8, 9, 2)):
            with pytest.raises(AxesError, match=r"images.*image 0 .*8 x 9 pixels: region="):
                source.read(0, region)
        absent: list[Any] = [2, -3, "DNA", [], [0, 5]]
        for channels in absent:
            with pytest.raises(AxesError, match=r"images.*image 0 "):
                source.read(0, channels=channels)

    def test_empty_collection_keeps_types_of_shapes_and_columns(self, store: Store) -> None:
        source = open_images(store(iter([]), columns={"well": pa.array([], pa.string())}))
        assert (source.shapes.shape, source.shapes.dtype) == ((0, 5), np.int64)
        assert len(source) == len(source.dtypes) == len(source.image_ids) == len(source.take([])) == 0
        assert source.columns.schema == pa.schema({"well": pa.string()})
        with pytest.raises(ImageIndexError, match="for 0 images"):
            source.read(0)

    def test_read_raises_image_index_error_when_an_index_is_invalid(self, store: Store) -> None:
        path = store(images_of([((1, 1, 1, 2, 2), "uint8")] * 3))
        source = open_images(path)
        reads: list[Callable[[Any], Any]] = [source.read, source.metadata, lambda index: source.take([0, index])]
        for read in reads:
            for index in (3, -4, 2**40):
                with pytest.raises(ImageIndexError, match=f"{path.name}: image index {index}"):
                    read(index)
        wrong: list[Any] = [1.0, "1", None, [1], np.array([0, 1]), np.array(1.5)]
        several: list[Any] = [[[0, 1]], [0.0], ["1"], [True, False, True], 2]
        for read, indices in ((source.read, wrong), (source.take, several)):
            for index in indices:
                with pytest.raises(ImageIndexError, match=path.name):
                    read(index)

    def test_pickled_source_reopens_without_pickled_pixels(self, store: Store) -> None:
        images = copies(3, (1, 1, 1, 100, 100))
        source = open_images(store(images, checksum=False))
        source.read(0)
        pickled = pickle.dumps(source)
        assert len(pickled) < images[0].nbytes / 4
        assert all_same(pickle.loads(pickled).take([2, 0]), [images[2], images[0]])

    def test_closed_source_reopens_when_it_is_read(self, store: Store) -> None:
        images = images_of(RAGGED)
        path = store(images)
        with open_images(path) as source:
            image = source.read(0)
        source.close()
        assert same(image, images[0])
        assert same(source.read(1), images[1])
        assert all_same(stored_at(path), images)
        assert source.metadata(0) == schema.normalize_metadata(None, 0, "")

    def test_columns_and_metadata_come_back(self, store: Store) -> None:
        images = copies(4, (1, 2, 1, 3, 4))
        records = [METADATA, None, {"name": "second"}, METADATA | {"channels": [], "physical_size_z": None}]
        ids = ["plain", "µ/..\\ 細胞 <&>'\";", " spaces ", "x" * 300]
        plain = table_columns()
        words = plain["well"]
        columns = plain.append_column("treatment", words.dictionary_encode())
        source = open_images(store(images, columns=columns, metadata=records, image_ids=ids))
        assert list(source.image_ids) == ids
        assert source.columns.equals(plain.append_column("treatment", words))
        for index, record in enumerate(records):
            assert source.metadata(index) == schema.normalize_metadata(record, 2, "")
        assert source.metadata(-1) == source.metadata(3)

    def test_overwriting_replaces_the_whole_collection(self, store: Store, tmp_path: Path) -> None:
        old, new = images_of([((1, 1, 1, 2, 2), "uint8")] * 5), copies(2, (1, 1, 1, 3, 3))
        path = store(old)
        with pytest.raises(PathExistsError, match=r"images.*overwrite=True"):
            store(new)
        assert all_same(stored_at(path), old)
        assert all_same(stored_at(store(new, overwrite=True)), new)
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

    def test_convert_keeps_everything(self, store: Store, storage_info: Stored, tmp_path: Path) -> None:
        images, ids, columns = images_of(RAGGED[:2]), ["b", "a"], table_columns().slice(0, 2)
        path = store(images, columns=columns, metadata=[METADATA | {"channels": []}, None], image_ids=ids)
        convert(path, tmp_path / "between.parquet")
        back = path.with_stem("back")
        convert(tmp_path / "between.parquet", back, storage_info[0], encoding=storage_info[1])
        before = open_images(path)
        for after in (open_images(tmp_path / "between.parquet"), open_images(back, storage_info[0])):
            assert all_same(after.take([0, 1]), images)
            assert list(after.image_ids) == ids
            assert after.columns.equals(columns)
            assert [after.metadata(index) for index in (0, 1)] == [before.metadata(index) for index in (0, 1)]

    @pytest.mark.parametrize("shapes", [LARGE, SHORT_AXES], ids=["large image", "axes as short as those of colors"])
    def test_unusual_shapes_come_back(self, store: Store, shapes: Sequence[Sequence[int]]) -> None:
        images = images_of([(shape, "uint8" if shapes is SHORT_AXES else "uint16") for shape in shapes])
        assert all_same(stored_at(store(images)), images)

    def test_preloaded_samples_equal_those_on_demand(self, store: Store, storage_info: Stored) -> None:
        images = copies(20, (1, 2, 1, 9, 8))
        path = store(images, columns={"row": list(range(20))})
        order = [19, 0, 7, 7, -3, 12]
        for chosen in ({"select": {"C": [1]}, "crop_size": (4, 5)}, {"normalize": False}):
            samples = []
            for preload in (True, False):
                dataset = OMEArrowDatasetNumpy(path, storage_info[0], preload=preload, target="row", **chosen)
                samples += [[dataset[index] for index in order], dataset.__getitems__(order)]
            for pairs in samples:
                assert [target for _, target in pairs] == [range(20)[index] for index in order]
                assert all_same([image for image, _ in pairs], [image for image, _ in samples[0]])
        assert all_same([image for image, _ in samples[0]], [images[index][0, :, 0] for index in order])

    def test_source_returns_equal_images_when_threads_share_it(self, store: Store) -> None:
        images = copies(4, (1, 1, 1, 4, 5))
        with open_images(store(images)) as source, ThreadPoolExecutor(4) as threads:
            assert all_same(list(threads.map(source.read, [*range(4)] * 20)), images * 20)
