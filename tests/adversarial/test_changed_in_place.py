"""A collection that is changed in place while datasets have it open: a new version, a log, other bytes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from omearrow_ds import (
    FormatError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDSError,
    open_images,
    write_images,
)
from omearrow_ds.advise.profile.measure import preloaded
from omearrow_ds.errors import MemoryLimitError, PathExistsError
from omearrow_ds.storage import byte_source
from tests.support.errors import find_problems, raises
from tests.support.strategies import FOLDERS, NAMES, NAMES_OR_LONG, SUFFIX, all_same, image_of

formats = pytest.mark.parametrize("name", NAMES)
COUNT = 12
IMAGES = [np.full((1, 1, 1, 40, 50), number, np.uint16) for number in range(COUNT)]
OTHERS = [100 + image for image in IMAGES]


def on_demand(path, **options):
    return OMEArrowDataset(path, preload=False, normalize=False, axes="TCZYX", target="number", **options)


def pairs(dataset):
    """Return the number of each image with its target."""
    return [(int(image.flatten()[0]), int(number)) for image, number in dataset]


RIGHT = [(number, number) for number in range(COUNT)]


@pytest.fixture
def numbered(stored):
    return lambda name, images=IMAGES, **options: stored(
        name, images, columns={"number": [int(image.flat[0]) for image in images]}, **options
    )


def lance_overwrite(path):
    import lance

    table = lance.dataset(path).to_table()
    lance.write_dataset(table.take(pa.array(range(COUNT))[::-1]), path, mode="overwrite")


def lance_delete_and_append(path):
    import lance

    dataset = lance.dataset(path)
    rows = dataset.to_table(filter="number = 3")
    dataset.delete("number = 3")
    lance.write_dataset(rows, path, mode="append")


def lance_merge(path):
    import lance

    dataset = lance.dataset(path)
    rows = dataset.to_table(filter="number < 2")
    images = rows["ome_image"].take([1, 0])
    dataset.merge_insert("number").when_matched_update_all().execute(rows.set_column(0, "ome_image", images))


def lance_compact(path):
    import lance

    lance_delete_and_append(path)
    lance.dataset(path).optimize.compact_files()


CHANGES = [lance_overwrite, lance_delete_and_append, lance_merge, lance_compact]


@pytest.mark.parametrize("change", CHANGES)
def test_a_further_version_of_lance_is_not_read_with_the_targets_of_its_own(numbered, change):
    path = str(numbered("lance"))
    dataset = on_demand(path)
    before = pickle.dumps(dataset)
    change(path)
    assert pairs(on_demand(path)) != RIGHT or change is lance_merge
    late = pickle.loads(before)
    for variant in (dataset, late, pickle.loads(pickle.dumps(late)), preloaded(late)):
        assert pairs(variant) == RIGHT
    assert late.source.images.table.engine == "pages"


def test_joined_columns_are_of_the_version_that_was_opened(numbered):
    import lance

    path = str(numbered("lance"))
    table = lance.dataset(path).to_table()
    lance.write_dataset(table.append_column("again", table["ome_image"]), path, mode="overwrite")
    dataset = on_demand(path, image_column=["again", "ome_image"])
    pickled = pickle.dumps(dataset)
    lance_overwrite(path)
    late = pickle.loads(pickled)
    assert pairs(late) == pairs(pickle.loads(pickle.dumps(late))) == RIGHT
    assert late.shape == (1, 2, 1, 40, 50)


def test_workers_of_a_later_epoch_read_the_version_of_the_first(numbered):
    path = str(numbered("lance"))
    loader = OMEArrowDataLoader(on_demand(path), 4, num_workers=1, persistent_workers=False, timeout=60)
    for change in (lance_overwrite, lance_delete_and_append):
        samples = [pair for images, numbers in loader for pair in pairs(zip(images, numbers, strict=True))]
        assert samples == RIGHT
        change(path)


def test_a_version_of_lance_that_is_gone_is_refused(numbered):
    import lance

    path = numbered("lance")
    pickled = pickle.dumps(on_demand(path))
    lance_overwrite(str(path))
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0))
    with raises(FormatError, path=path):
        pickle.loads(pickled)[0]


def test_the_same_version_of_another_lance_dataset_is_refused(numbered):
    path = numbered("lance")
    dataset = on_demand(path)
    pickled, source = pickle.dumps(dataset), pickle.dumps(dataset.source)
    dataset.source.close()
    shutil.copytree(path, path.with_name("kept"))
    numbered("lance", OTHERS, overwrite=True)
    path.rename(path.with_name("other"))
    path.with_name("kept").rename(path)  # The folder gets another inode, too.
    with raises(FormatError, path=path):
        pickle.loads(pickled)[0]
    path_of_old = numbered("lance", IMAGES, overwrite=True)
    dataset = on_demand(path_of_old)
    pickled = pickle.dumps(dataset)
    for child in (path_of_old / "_versions", path_of_old / "data"):
        shutil.rmtree(child)
    shutil.copytree(path.with_name("other"), path_of_old, dirs_exist_ok=True)  # The same folder has version 1 again.
    for late in (lambda: pickle.loads(pickled)[0], lambda: pickle.loads(source).read(0)):
        with raises(FormatError, path=path_of_old):
            late()


def test_pixels_kept_of_an_older_version_are_not_those_of_the_newer(numbered, tmp_path):
    path = str(numbered("lance"))
    cache = tmp_path / "kept"
    dataset = on_demand(path)
    lance_overwrite(path)
    assert pairs(preloaded(dataset, cache)) == RIGHT  # The dataset shows the old version next to the new one.
    fresh = OMEArrowDataset(path, normalize=False, target="number", cache_dir=cache)
    assert pairs(fresh) == RIGHT[::-1]


def test_lance_says_replaced_where_it_was_replaced_while_it_was_opened(numbered, monkeypatch):
    from omearrow_ds.storage.formats import lance as module

    path, read_fields = numbered("lance"), module.LanceTable.read_fields

    def replace_and_read(*args, **options):
        numbered("lance", OTHERS, overwrite=True)
        return read_fields(*args, **options)

    monkeypatch.setattr(module.LanceTable, "read_fields", replace_and_read)
    with raises(FormatError, path=path):
        open_images(path).read(0)
    monkeypatch.setattr(module.LanceTable, "read_fields", read_fields)
    monkeypatch.setattr(module._DatasetVersion, "_find_latest", lambda _: 7)  # a version seen earlier
    with raises(FormatError, path=path, mentions=7):
        open_images(path)


# ---- DuckDB


def curate(path, *statements, merge=False):
    """Run statements on the table of a database as another program, which leaves its log unless it merges it."""
    import duckdb

    with duckdb.connect(str(path)) as connection:
        connection.execute("SET wal_autocheckpoint = '1TB'")
        if not merge:
            connection.execute("PRAGMA disable_checkpoint_on_shutdown")
        for statement in statements:
            connection.execute(statement)
    assert log_of(path).exists() != merge


def log_of(path):
    return path.with_name(f"{path.name}.wal")


TABLE = "omearrow_ds_images"
MOVED = (
    f"CREATE TEMP TABLE moved AS FROM {TABLE} WHERE number = 2",
    f"DELETE FROM {TABLE} WHERE number = 2",
    f"INSERT INTO {TABLE} FROM moved",
)


def test_the_log_of_a_database_is_part_of_what_it_is(numbered, tmp_path):
    path = numbered("duckdb")
    stages = [
        lambda: None,
        lambda: curate(path, *MOVED),
        lambda: curate(path, *MOVED, f"UPDATE {TABLE} SET number = number WHERE number = 5"),
        lambda: curate(path, "CHECKPOINT", merge=True),
    ]
    fingerprints, pickled, files = [], [], []
    for stage in stages:
        stage()
        dataset = on_demand(path)
        assert all(image == number for image, number in pairs(dataset))
        cached = OMEArrowDataset(path, normalize=False, target="number", cache_dir=tmp_path / "kept")
        assert pairs(cached) == pairs(dataset)
        for late in pickled[-1:]:
            with raises(FormatError, path=path):
                pickle.loads(late)[0]
        fingerprints.append(dataset.source.images.header.guard.fingerprint)
        files.append(len(list(dataset.source.images.details.files())))
        pickled.append(pickle.dumps(dataset))
        dataset.source.close()
    assert len(set(fingerprints)) == len(stages)
    assert files == [1, 2, 2, 1]


def test_the_log_of_a_database_is_found_through_a_link(numbered, tmp_path):
    path, link = numbered("duckdb"), tmp_path / "link.duckdb"
    link.symlink_to(path)
    pickled = pickle.dumps(on_demand(link))
    curate(path, *MOVED)
    with raises(FormatError, path=link):
        pickle.loads(pickled)[0]


def test_a_log_that_lies_beside_is_not_written_under(numbered, tmp_path):
    path = numbered("duckdb")
    curate(path, f"DELETE FROM {TABLE} WHERE number = 2")
    before = path.read_bytes()
    with raises(PathExistsError, path=log_of(path)):
        numbered("duckdb", OTHERS, overwrite=True)
    assert (path.read_bytes(), len(open_images(path))) == (before, COUNT - 1)
    other = tmp_path / "other.duckdb"
    shutil.copy(log_of(path), log_of(other))
    with raises(PathExistsError, path=log_of(other)):
        write_images(OTHERS, other)
    assert not other.exists()

    def images():  # The log comes while images are written.
        log_of(other).unlink(missing_ok=True)
        yield from OTHERS
        shutil.copy(log_of(path), log_of(other))

    log_of(other).unlink()
    with raises(PathExistsError, path=log_of(other)):
        write_images(images(), other)
    assert {entry.name for entry in tmp_path.iterdir()} == {"images.duckdb", "images.duckdb.wal", "other.duckdb.wal"}
    curate(path, "CHECKPOINT", merge=True)
    numbered("duckdb", OTHERS, overwrite=True)
    assert [int(image.flat[0]) for image in open_images(path).take(range(COUNT))] == list(range(100, 100 + COUNT))
    shutil.copy(log_of(other), log_of(path))
    with raises(FormatError, path=path, mentions=log_of(path).name):
        open_images(path)


def test_a_database_in_use_is_not_called_damaged(numbered):
    import duckdb

    path = numbered("duckdb")
    with duckdb.connect(str(path)):
        with raises(FormatError, path=path, mentions="process") as caught:
            open_images(path)
        with raises(PathExistsError, path=path, mentions="process"):
            numbered("duckdb", OTHERS, overwrite=True)
    code = "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-S", "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with raises(FormatError, path=path, mentions="process") as caught_too:
            open_images(path)
        other.communicate(b"\n")
    assert "damaged" not in f"{caught.value}{caught_too.value}"
    assert len(open_images(path)) == COUNT


def test_only_memory_that_is_short_lifts_the_limit_on_memory(numbered, monkeypatch):
    from omearrow_ds.storage.formats import duckdb as module

    path = numbered("duckdb")
    monkeypatch.setattr(module.DuckDBTable, "_working_bytes", lambda _: 2**18)
    source = open_images(path)
    assert all_same(source.take(range(COUNT)), IMAGES)
    assert not source.images.table._frugal
    again = open_images(path)
    assert all_same([image for _, part in again.images.stream() for image in part], IMAGES)
    calls = []

    def failing(query):
        calls.append(query)
        raise error

    frugal = open_images(path)
    frugal.images.table._frugal = True
    cursor = SimpleNamespace(sql=failing, execute=lambda _: None)
    frugal.images.table._connection = SimpleNamespace(get=lambda: SimpleNamespace(cursor=lambda: cursor))
    for error, times in ((FormatError("damaged"), 1), (MemoryLimitError("too little"), 2)):
        frugal.images.table._frugal = True
        with pytest.raises(type(error)):
            frugal.read(0)
        assert len(calls) == times
        calls.clear()


def test_a_batch_of_a_scanned_table_is_fetched_in_pieces(stored, monkeypatch):
    from omearrow_ds.storage.formats import duckdb as module

    images = [image_of((1, 2, 1, 5, 6), "uint16", number) for number in range(COUNT)]
    source = open_images(stored("duckdb", images, compression="zstd"))
    monkeypatch.setattr(module, "_SCANNED_PIECE_BYTES", 4 * images[0].nbytes)
    table = source.images.table._query("SELECT ome_image.chunks AS pixels", "LIMIT 1")
    queries, query = [], module.DuckDBTable._query
    monkeypatch.setattr(module.DuckDBTable, "_query", lambda *args: queries.append(1) or query(*args))
    assert all_same(source.take([9, 3, 3, *range(COUNT)]), [images[index] for index in (9, 3, 3, *range(COUNT))])
    assert len(queries) == 3
    pixels = table["pixels"].type.value_type.field("pixel_bytes").type
    assert pixels == pa.large_binary()  # Its offsets support 2 GiB and more.


# ---- all formats


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_a_scan_goes_on_where_its_source_is_closed(numbered, name):
    source = open_images(numbered(name), name)
    scan = source.images.stream()
    _, first = next(scan)
    source.close()
    assert all_same([*first, *(image for _, part in scan for image in part)], IMAGES)


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_threads_read_on_where_another_closes(numbered, name):
    source = open_images(numbered(name), name)
    failures, done = [], threading.Event()

    def read():
        try:
            while not done.is_set():
                failures.extend(() if all_same(source.take([3, 1]), [IMAGES[3], IMAGES[1]]) else ["other pixels"])
        except Exception as error:  # noqa: BLE001  # a thread's would be lost
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        source.take([2])
        source.close()
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []


@formats
@pytest.mark.share(3, "name")
def test_what_was_written_over_is_not_read_with_the_targets_of_before(numbered, tmp_path, monkeypatch, name):
    """Existing files are overwritten, as by ``cp`` and ``rsync --inplace``. Lance's names differ per dataset."""
    monkeypatch.setattr(byte_source, "STATUS_NS", 0)
    path = numbered(name)
    other = numbered(name, OTHERS, stem="other")
    dataset, idle = on_demand(path, format=name), on_demand(path, format=name)
    pickled = pickle.dumps(dataset)
    assert pairs(dataset) == RIGHT
    size = path.stat().st_size
    if path.is_dir():
        shutil.copytree(other, path, dirs_exist_ok=True)
        for file in path.rglob("columns.parquet"):
            os.utime(file, (0, 0))
        for file in (path / "_versions").glob("*"):
            os.utime(file, (0, 0))
    else:
        with path.open("r+b") as file:
            file.write(other.read_bytes())
            file.truncate(size)
        os.utime(path, (0, 0))
    for late in (dataset, idle, pickle.loads(pickled)):
        for _ in range(2):
            try:
                assert pairs(late) == RIGHT  # Lance has mapped its files.
            except OMEArrowDSError as error:  # The length of a file differs.
                assert not find_problems(str(error), path=path, remedy=path.is_dir())  # noqa: PT017
            else:
                assert name == "lance"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_looked_at_when_it_is_preloaded_later(numbered, name):
    path = numbered(name)
    dataset = on_demand(path)
    os.utime(path / "columns.parquet", (0, 0))
    with raises(FormatError, path=path):
        preloaded(dataset)
    assert path.name.endswith(SUFFIX[name])
