"""Images that `filter=` chooses, for all formats and kinds of collections; images encode their numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from omearrow_ds import ChecksumError, ColumnError, SelectError, convert, open_images, stats, write_images
from omearrow_ds.storage.describe import describe
from omearrow_ds.storage.verified import decode
from tests.support.errors import raises
from tests.support.numbered import PATTERN, image, number_of, place, write_plate
from tests.support.objects import serving
from tests.support.parts import publish
from tests.support.strategies import NAMES, TABLES, image_of, same

COUNT = 12
IMAGES = [image(number)[None, :, None] for number in range(COUNT)]
COLUMNS = {
    "treatment": [None if number == 3 else ("DMSO", "TAXOL")[number % 2] for number in range(COUNT)],
    "dose µM": [number / 2 for number in range(COUNT)],
}
CONDITION = """treatment == 'DMSO' and "dose µM" >= 1 and "dose µM" != 4"""
CHOSEN = [2, 4, 6, 10]
IDS = [f"id-{number}" for number in range(COUNT)]


def numbers_of(source):
    return [number_of(source.read(index)) for index in range(len(source))]


def check_chosen(source, numbers):
    """Check that a source has the images of ``numbers``, by each way to read."""
    assert len(source) == len(numbers)
    assert list(source.image_ids) == [IDS[number] for number in numbers]
    assert source.rows.tolist() == numbers
    assert source.shapes.tolist() == [list(IMAGES[number].shape) for number in numbers]
    assert source.columns.to_pydict() == {
        name: [column[number] for number in numbers] for name, column in COLUMNS.items()
    }
    assert numbers_of(source) == numbers
    assert list(map(number_of, source.take([-1, 0, -1]))) == [numbers[-1], numbers[0], numbers[-1]]
    region = source.read(1, region=(2, 9, 3, 11), channels=[1])
    assert same(region, IMAGES[numbers[1]][:, 1:, :, 2:9, 3:11])
    in_blocks = [
        (first + offset, number_of(pixels))
        for first, block in source.images.stream()
        for offset, pixels in enumerate(block)
    ]
    assert in_blocks == list(enumerate(numbers))
    decoded = np.empty((len(numbers), *IMAGES[0].shape), np.uint16)
    decode(source.images, decoded)
    assert list(map(number_of, decoded)) == numbers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("condition", [CONDITION, "expression"])
@pytest.mark.share(2, "name", "condition")
def test_each_format_opens_only_the_chosen_images(stored, name, condition):
    path = stored(name, IMAGES, columns=COLUMNS, image_ids=IDS)
    if condition == "expression":
        doses = (pc.field("dose µM") >= 1) & (pc.field("dose µM") != 4)
        condition = (pc.field("treatment") == "DMSO") & doses
    with open_images(path, filter=condition) as source:
        check_chosen(source, CHOSEN)
        check_chosen(pickle.loads(pickle.dumps(source)), CHOSEN)
        names = [source.metadata(index)["name"] for index in range(len(source))]
    with open_images(path) as whole:
        assert names == [whole.metadata(number)["name"] for number in CHOSEN]
    with open_images(path, filter=condition, verify=True) as source:
        assert numbers_of(source) == CHOSEN


@pytest.mark.parametrize("name", TABLES)
def test_images_of_different_shapes_are_chosen(stored, name):
    images = [image_of((1, 1 + number % 3, 1, 4 + number, 5), "uint16", number) for number in range(6)]
    with open_images(stored(name, images, columns={"n": range(6)}), filter="n in (1, 2, 5)") as source:
        assert all(
            same(pixels, images[number]) for pixels, number in zip(source.take([0, 1, 2]), [1, 2, 5], strict=True)
        )
        in_blocks = [pixels for _, block in source.images.stream() for pixels in block]
        assert all(same(pixels, images[number]) for pixels, number in zip(in_blocks, [1, 2, 5], strict=True))


def test_a_filter_that_chooses_all_images_adds_no_wrapper(stored):
    path = stored("arrow", IMAGES, columns=COLUMNS)
    with open_images(path) as whole, open_images(path, filter='"dose µM" >= 0') as source:
        assert type(source.images) is type(whole.images)
        assert numbers_of(source) == list(range(COUNT))


def test_null_images_and_filtered_images_are_left_out_together(tmp_path, stored):
    table = pq.read_table(stored("parquet", IMAGES, columns=COLUMNS, image_ids=IDS))
    column = table["ome_image"].combine_chunks()
    nulls = pa.array([number in (2, 5) for number in range(COUNT)])
    empty = pa.StructArray.from_arrays(column.flatten(), fields=list(column.type), mask=nulls)
    path = tmp_path / "nulls.parquet"
    pq.write_table(table.set_column(table.column_names.index("ome_image"), "ome_image", empty), path)
    with open_images(path, nulls="skip", filter=CONDITION) as source:
        check_chosen(source, [4, 6, 10])
        assert source.images.num_filtered == COUNT - 2 - 3


def test_columns_of_a_joined_table_can_be_used(stored, tmp_path):
    path, platemap = stored("arrow", IMAGES, columns=COLUMNS, image_ids=IDS), tmp_path / "map.csv"
    platemap.write_text("image_id,moa\n" + "".join(f"id-{number},m{number % 5}\n" for number in range(COUNT)))
    with open_images(path, columns=platemap, filter="moa == 'm1' and treatment is not null") as source:
        assert numbers_of(source) == [1, 6, 11]
        assert source.columns["moa"].to_pylist() == ["m1"] * 3
        assert numbers_of(pickle.loads(pickle.dumps(source))) == [1, 6, 11]


def test_fields_of_a_plate_are_chosen_by_well_and_site(tmp_path):
    plate = write_plate(tmp_path / "plate", COUNT)
    wells = [place(number) for number in range(COUNT)]
    expected = [number for number, (well, site) in enumerate(wells) if well != "A02" and site >= 3]
    with open_images(plate, pattern=PATTERN, filter="Metadata_Well != 'A02' and Metadata_Site >= 3") as source:
        assert numbers_of(source) == expected
        assert source.rows.tolist() == expected
        buffer = np.empty(source.shapes[0], np.uint16)
        assert source.images.read([1], out=[buffer])[0] is buffer
        assert number_of(buffer) == expected[1]
    loaddata = tmp_path / "load_data.csv"
    rows = [f"{well},{site},{plate},{well}_{site}_DAPI.tif,{plate},{well}_{site}_GFP.tif\n" for well, site in wells]
    names = "Metadata_Well,Metadata_Site,PathName_DAPI,FileName_DAPI,PathName_GFP,FileName_GFP\n"
    loaddata.write_text(names + "".join(rows))
    with open_images(loaddata, filter="Metadata_Well == 'A03' and not Metadata_Site == 2") as source:
        assert numbers_of(source) == [8, 10, 11]


def test_several_files_and_their_folder_keys_are_one_collection(tmp_path):
    for plate in range(3):
        folder = tmp_path / f"plate={plate}"
        folder.mkdir()
        some = range(4 * plate, 4 * plate + 4)
        columns = {"treatment": [COLUMNS["treatment"][number] for number in some]}
        write_images([IMAGES[number] for number in some], folder / "images.parquet", columns=columns)
    with open_images(tmp_path, filter="plate in (0, 2) and treatment == 'TAXOL'") as source:
        assert numbers_of(source) == [1, 9, 11]
        assert source.rows.tolist() == [1, 9, 11]
    with open_images(tmp_path / "plate=*" / "*.parquet", filter="plate == 1") as source:
        assert numbers_of(source) == [4, 5, 6, 7]
        with raises(SelectError, "filter", tmp_path):
            open_images(tmp_path, filter="plate == 1 and treatment is null")


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_parts_keep_their_borders(tmp_path, suffix):
    path = publish(tmp_path / "plate.parts", IMAGES, [5, 3, 4], suffix)
    with open_images(path, filter="label < 3 or label >= 9") as source:
        assert numbers_of(source) == [0, 1, 2, 9, 10, 11]
        assert source.image_ids == ["id-0", "id-1", "id-2", "id-9", "id-10", "id-11"]
        assert list(source.images.header.part_layout.starts) == [0, 3, 3, 6]
        assert list(map(number_of, (pixels for _, block in source.images.stream() for pixels in block))) == [
            0,
            1,
            2,
            9,
            10,
            11,
        ]
    digests = []
    for condition in ("label < 3", "label < 3 and label >= 0", "label != 3"):
        with open_images(path, filter=condition) as source:
            digests.append(source.images.header.part_layout.digest)
    assert digests[0] == digests[1] != digests[2]


def test_few_images_of_parts_on_a_server_are_fetched_alone(tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    images = [image(number, 200, 200)[None, :, None] for number in range(36)]
    publish(tmp_path / "plate.parts", images, [18, 18])
    with serving(tmp_path) as server:
        with open_images(f"{server.url}/plate.parts", filter="label in (3, 20)") as source:
            assert [number_of(pixels) for _, block in source.images.stream() for pixels in block] == [3, 20]
            assert source.images.header.part_layout.window is None
        sent_bytes = sum(sent for path, sent in server.sent_bytes.items() if "/parts/" in path)
        assert sent_bytes < 8 * images[0].nbytes
        with open_images(f"{server.url}/plate.parts", filter="label != 3", part_cache=tmp_path / "cache") as source:
            assert numbers_of(source) == [number for number in range(36) if number != 3]
            assert source.images.header.part_layout.window is not None
        file = next((tmp_path / "plate.parts" / "parts").iterdir())
        with open_images(f"{server.url}/plate.parts/parts/{file.name}", filter="label in (3, 20)") as source:
            assert numbers_of(source) in ([3], [20])


@pytest.mark.parametrize("name", ["arrow", "parquet", "lance"])
def test_images_that_are_not_chosen_are_neither_read_nor_checked(stored, name):
    path = stored(name, IMAGES, columns=COLUMNS, image_ids=IDS, compression="none")
    plane = IMAGES[7][0, 1].tobytes()
    files = [file for file in [path, *path.rglob("*")] if file.is_file()]
    file = next(file for file in files if plane in file.read_bytes())
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(plane) + 100] ^= 1
    file.write_bytes(damaged)
    with open_images(path, verify=True, filter=CONDITION) as source:
        assert [number_of(pixels) for _, block in source.images.stream() for pixels in block] == CHOSEN
    with open_images(path, verify=True, filter="treatment == 'TAXOL'") as source, pytest.raises(ChecksumError):
        list(source.images.stream())


@pytest.mark.parametrize("suffix", ["parquet", "zarr"])
def test_convert_writes_the_chosen_images(stored, tmp_path, suffix):
    path = stored("arrow", IMAGES, columns=COLUMNS, image_ids=IDS)
    convert(path, tmp_path / f"few.{suffix}", filter=CONDITION)
    with open_images(tmp_path / f"few.{suffix}") as copy:
        assert numbers_of(copy) == CHOSEN
        assert list(copy.image_ids) == [IDS[number] for number in CHOSEN]
    convert(path, tmp_path / "few.parts", "parquet", part_bytes=4_000, filter=CONDITION)
    tables = [pq.read_table(part) for part in sorted((tmp_path / "few.parts" / "parts").iterdir())]
    written = pa.concat_tables(table.select(["treatment", "dose µM"]) for table in tables)
    assert written.to_pydict() == {name: [column[number] for number in CHOSEN] for name, column in COLUMNS.items()}


def test_a_conversion_with_another_filter_does_not_continue_an_interrupted_one(stored, tmp_path):
    path, target = stored("arrow", IMAGES, columns=COLUMNS), tmp_path / "few.parts"
    convert(path, target, part_bytes=4_000, task=(1, 2), filter='"dose µM" < 2')
    with pytest.raises(OSError, match="other"):
        convert(path, target, part_bytes=4_000, task=(2, 2), filter='"dose µM" >= 4')


def test_stats_measure_the_chosen_images(stored):
    path = stored("parquet", IMAGES, columns=COLUMNS)
    measured = stats(path, filter=CONDITION).table.to_pylist()
    for row, pixels in zip(measured, np.moveaxis(np.stack([IMAGES[n] for n in CHOSEN]), 2, 0), strict=True):
        assert row["images"] == len(CHOSEN)
        assert row["mean"] == pytest.approx(pixels.mean())
        assert (row["min"], row["max"]) == (pixels.min(), pixels.max())


def test_describe_counts_the_chosen_images(stored):
    described = describe(stored("lance", IMAGES, columns=COLUMNS), filter=CONDITION)
    assert described.images == len(CHOSEN)
    assert described.sizes.decoded_bytes == len(CHOSEN) * IMAGES[0].nbytes


@pytest.mark.parametrize(
    ("condition", "error", "words"),
    [
        ("dose == 1", ColumnError, ["dose µM"]),
        ("treatment == 1", ColumnError, ["string", "int64"]),
        ("treatment == 'X'", SelectError, []),
    ],
)
def test_errors_name_the_collection(stored, condition, error, words):
    path = stored("duckdb", IMAGES, columns=COLUMNS)
    with raises(error, "filter", path, mentions=words):
        open_images(path, filter=condition)
