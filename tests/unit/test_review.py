"""What users met: each test is one thing that once went wrong in a trial by hand."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
from datetime import UTC, date, datetime, time
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
import tifffile
from torch.utils.data import ConcatDataset, Subset

from omearrow_ds import (
    ArgumentError,
    AxesError,
    FormatError,
    ImageError,
    MetadataError,
    MissingPathError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    PathExistsError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.storage.formats import FORMATS
from tests.conftest import needs
from tests.support.strategies import NAMES, SUFFIX, image_of, images_of

formats = pytest.mark.parametrize("name", NAMES)
SMALL = [((1, 1, 1, 4, 5), "uint16")] * 4


@formats
def test_an_overwritten_collection_never_mixes_old_and_new(stored, name):
    path = stored(name, [np.zeros((4, 4), np.uint8)] * 3, columns={"label": [0, 0, 0]})
    dataset = OMEArrowDataset(path, name, preload=False, normalize=False, target="label")
    assert dataset[1][0].max() == 0
    write_images([np.ones((4, 4), np.uint8)] * 3, path, name, columns={"label": [1, 1, 1]}, overwrite=True)
    with contextlib.suppress(FormatError):  # "was replaced", where the old pixels are gone
        image, label = dataset[0]
        assert image.max() == label == 0


@formats
def test_a_relative_path_outlives_a_change_of_folder(stored, name, monkeypatch, tmp_path):
    images = images_of(SMALL)
    path = stored(name, images)
    monkeypatch.chdir(path.parent)
    source = open_images(path.name, name)
    monkeypatch.chdir("/")
    assert np.array_equal(source.read(2), images[2])


@formats
def test_threads_share_a_source(stored, name):
    images = images_of(SMALL)
    source = open_images(stored(name, images), name)
    wrong = []

    def read():
        for _ in range(5):
            wrong.extend(index for index in range(4) if not np.array_equal(source.read(index), images[index]))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


INTERRUPTED = """
import signal, sys, time
import numpy as np
from omearrow_ds import write_images

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background

def images():
    for number in range(60):
        if number == 20:
            signal.raise_signal(signal.SIGINT)
        if number > 20:
            time.sleep(0.02)  # in a writer's own thread: until the main one has noticed
        yield np.zeros((1024, 1024), np.uint16)

folder, *names = sys.argv[1:]
for name in names:
    try:
        write_images(images(), f"{folder}/images of {name}", name)
    except KeyboardInterrupt:
        print(name)
"""


def test_an_interrupt_arrives_as_itself_and_leaves_nothing(tmp_path):
    names = [fmt.name for fmt in FORMATS if fmt.missing_backend is None]
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, names), done.stderr
    assert not list(tmp_path.iterdir())


@formats
def test_times_come_back_as_the_same_type_from_every_format(stored, name):
    berlin = datetime(2024, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    columns = pa.table(
        {
            "zone": pa.array([berlin] * 4, pa.timestamp("us", "Europe/Berlin")),
            "seconds": pa.array([datetime.fromisoformat("2024-07-01")] * 4, pa.timestamp("s")),
            "day": pa.array([date(2024, 7, 1)] * 4, pa.date64()),
            "time": pa.array([time(12, 30)] * 4, pa.time32("s")),
        }
    )
    found = open_images(stored(name, images_of(SMALL), columns=columns), name).columns
    assert found.schema.types == [pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.date32(), pa.time64("us")]
    assert found["zone"][0].as_py() == berlin.astimezone(UTC)
    assert [found[each][3].as_py() for each in ("seconds", "day", "time")] == [
        datetime.fromisoformat("2024-07-01"),
        date(2024, 7, 1),
        time(12, 30),
    ]


@formats
def test_a_nameless_column_is_refused(tmp_path, name):
    needs(name)
    with pytest.raises(MetadataError, match="none is empty"):
        write_images([np.zeros((2, 2), np.uint8)], tmp_path / "images", name, columns={"": [1]})
    assert not list(tmp_path.iterdir())


@formats
def test_an_rgb_tiff_converts(tmp_path, name):
    needs(name)
    (tmp_path / "rgb").mkdir()
    image = image_of((4, 5, 3), "uint8")
    metadata = {"axes": "YXS", "Channel": {"Name": "RGB"}}
    tifffile.imwrite(tmp_path / "rgb" / "a.ome.tif", image, photometric="rgb", metadata=metadata)
    convert(tmp_path / "rgb", tmp_path / f"out{SUFFIX[name]}", name)
    source = open_images(tmp_path / f"out{SUFFIX[name]}", name)
    assert np.array_equal(source.read(0)[0, :, 0], image.transpose(2, 0, 1))
    assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["RGB"] * 3


def test_parts_of_a_preloaded_dataset_get_no_workers(stored):
    path = stored("parquet", images_of(SMALL))
    held, read = OMEArrowDataset(path), OMEArrowDataset(path, preload=False)
    assert OMEArrowDataLoader(Subset(held, [0, 1])).num_workers == 0
    assert OMEArrowDataLoader(ConcatDataset([held, Subset(held, [0])])).num_workers == 0
    assert "a batch of" in OMEArrowDataLoader(ConcatDataset([held, read])).settings["num_workers"].why


def row_label(row):
    return row["label"] + 1


def test_a_callable_target_needs_no_file_once_all_is_in_memory(stored):
    path = stored("parquet", images_of(SMALL), columns={"label": [1, 2, 3, 4]})
    dataset = OMEArrowDataset(path, target=row_label)
    pickled = pickle.dumps(dataset)
    path.unlink()
    assert [pickle.loads(pickled)[index][1] for index in range(4)] == [2, 3, 4, 5]


@pytest.mark.parametrize("preload", [False, np.False_])
def test_any_false_is_no_preload(stored, preload):
    assert not OMEArrowDataset(stored("parquet", images_of(SMALL)), preload=preload).preloaded


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
        OMEArrowDataset(stored("parquet", images_of(SMALL)), **options)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_refused_image_names_target_and_image(tmp_path, fmt):
    needs(fmt.name)
    target = tmp_path / f"images{fmt.suffix}"
    for images, options in [([np.zeros((2, 3, 4), np.uint8)], {}), ([np.zeros((2, 3), np.complex64)], {})]:
        with pytest.raises(ImageError, match=r"images.*image 0"):
            write_images(images, target, **options)
    for image_ids in ("a", ["a", "b"]):
        with pytest.raises(MetadataError, match=r"images.*image_ids"):
            write_images([np.zeros((2, 3), np.uint8)], target, image_ids=image_ids)
    with pytest.raises(MetadataError, match=r"images.*one dict"):
        write_images([np.zeros((2, 3), np.uint8)], target, metadata={"name": "a"})


@pytest.mark.parametrize("name", ["parquet", "lance", "vortex", "duckdb", "arrow"])
def test_a_removed_file_is_missing_not_damaged(stored, name):
    path = stored(name, images_of(SMALL))
    source = open_images(path, name)
    source.close()
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(MissingPathError, match="removed"):
        source.read(0)


def test_a_damaged_sidecar_is_named(stored):
    path = stored("tiff", images_of(SMALL))
    (path / "columns.parquet").write_bytes(b"junk")
    with pytest.raises(FormatError, match=r"columns\.parquet.*damaged"):
        open_images(path)


def test_overwriting_spares_folders_of_other_things(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    with pytest.raises(PathExistsError, match="other things"):
        write_images([np.zeros((2, 2), np.uint8)], tmp_path / "precious", "arrow", overwrite=True)
    write_images([np.zeros((2, 2), np.uint8)], tmp_path / "precious" / "cells.parquet")
    with pytest.raises(PathExistsError):
        convert(tmp_path / "precious" / "cells.parquet", tmp_path / "precious", "tiff", overwrite=True)
    assert sorted(each.name for each in (tmp_path / "precious").iterdir()) == ["cells.parquet", "thesis.txt"]
