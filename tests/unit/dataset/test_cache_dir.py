"""`cache_dir=`: decoded pixels in a file that is built once, reused, and rebuilt when the data change."""

from __future__ import annotations

import os
import pickle
import sys
import textwrap

import numpy as np
import pytest

from omearrow_ds import (
    ArgumentError,
    FormatError,
    OMEArrowDataLoader,
    OMEArrowDataset,
    WriteError,
    write_images,
)
from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.storage.source import open_source
from tests.support.errors import raises
from tests.support.strategies import NAMES_OR_LONG, RAGGED, image_of, images_of, same

UNIFORM = [((1, 2, 1, 6, 7), "uint16")] * 7


@pytest.fixture
def decodings(monkeypatch):
    """Count decodings."""
    calls = []
    decode = PixelCache.decode

    def counted(self, source, *arguments):
        calls.append(source.header.path)
        decode(self, source, *arguments)

    monkeypatch.setattr(PixelCache, "decode", counted)
    return calls


def cached_files(folder):
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("kinds", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.parametrize("name", NAMES_OR_LONG)
@pytest.mark.share(2, "kinds", "name")
def test_it_is_built_once_and_found_again(stored, tmp_path, decodings, name, kinds):
    path, folder = stored(name, images_of(kinds)), tmp_path / "held" / "here"
    plain = OMEArrowDataset(path, axes="TCZYX")
    datasets = [OMEArrowDataset(path, axes="TCZYX", cache_dir=folder) for _ in range(3)]
    assert len(decodings) == 2  # One for `plain`, and one for the three with a cache.
    (file,) = cached_files(folder)
    assert file.stat().st_size >= plain.nbytes
    for dataset in datasets:
        assert dataset.preloaded
        assert all(same(dataset[i].numpy(), plain[i].numpy()) for i in range(len(plain)))
    sample = datasets[0][0]
    sample.zero_()
    assert same(datasets[0][0].numpy(), plain[0].numpy())
    again = pickle.loads(pickle.dumps(datasets[0]))
    assert same(again[1].numpy(), plain[1].numpy())
    assert len(decodings) == 2


def test_workers_map_it(stored, tmp_path):
    dataset = OMEArrowDataset(stored("parquet", images_of(UNIFORM)), cache_dir=tmp_path / "held")
    plain = [dataset[index].numpy() for index in range(7)]
    (batch,) = OMEArrowDataLoader(dataset, 7, num_workers=1, timeout=60)
    assert same(batch.numpy(), np.stack(plain))


@pytest.mark.parametrize("name", ["arrow", "tiff"])
def test_other_data_at_the_same_path_is_decoded_anew(tmp_path, name):
    path, folder = tmp_path / f"images.{name}s", tmp_path / "held"
    images = [image_of((6, 7), "uint16", number) for number in range(3)]
    write_images(images, path, name)
    assert same(OMEArrowDataset(path, cache_dir=folder, normalize=False)[1].numpy()[0], images[1])
    times = [(file, file.stat()) for file in ([path] if path.is_file() else list(path.iterdir()))]
    write_images(images[::-1], path, name, overwrite=True)
    for file, status in times:  # The new files have the size and age of the old ones.
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    dataset = OMEArrowDataset(path, cache_dir=folder, normalize=False)
    assert same(dataset[0].numpy()[0], images[2])
    assert len(cached_files(folder)) == 1  # The file that no longer matches is removed.


@pytest.mark.parametrize("harm", ["cut", "empty", "changed", "left over"])
def test_what_is_not_whole_is_built_anew(stored, tmp_path, harm):
    path, folder = stored("arrow", images_of(UNIFORM)), tmp_path / "held"
    expected = OMEArrowDataset(path, cache_dir=folder)[3].numpy()
    (file,) = cached_files(folder)
    data = file.read_bytes()
    if harm == "left over":
        file.rename(file.with_suffix(".partial"))
    else:
        file.write_bytes({"cut": data[:-1], "empty": b"", "changed": data[:-1] + b"!"}[harm])
    assert same(OMEArrowDataset(path, cache_dir=folder)[3].numpy(), expected)
    assert [cached_file.suffix for cached_file in cached_files(folder)] == [".pixels"]


def test_a_failed_build_leaves_nothing(stored, tmp_path, monkeypatch):
    path, folder = stored("arrow", images_of(UNIFORM)), tmp_path / "held"

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PixelCache, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            OMEArrowDataset(path, cache_dir=folder)
    assert cached_files(folder) == []
    assert len(OMEArrowDataset(path, cache_dir=folder)) == 7


OTHERS = [image + 1 for image in images_of(UNIFORM)]


@pytest.mark.parametrize("when", ["before it is opened", "after it is opened", "while it is decoded"])
@pytest.mark.parametrize("name", NAMES_OR_LONG)
@pytest.mark.share(2, "when", "name")
def test_a_collection_that_is_replaced_meanwhile(stored, tmp_path, monkeypatch, name, when):
    """Regression: pixels of the old collection were cached for the new one, which had the same shapes."""
    path, folder = stored(name, images_of(UNIFORM)), tmp_path / "held"

    def replace():
        write_images(OTHERS, path, name, overwrite=True)

    opened, decode = open_source, PixelCache.decode

    def opening(*arguments, **options):
        if when == "before it is opened":
            replace()
        source = opened(*arguments, **options)
        if when == "after it is opened":
            replace()
        return source

    def decoding(self, *arguments):
        decode(self, *arguments)
        if when == "while it is decoded":
            replace()

    with monkeypatch.context() as patched:
        patched.setattr("omearrow_ds.dataset.samples.open_source", opening)
        patched.setattr(PixelCache, "decode", decoding)
        with raises(FormatError, path=path):
            OMEArrowDataset(path, name, cache_dir=folder)
    assert cached_files(folder) == []
    rebuilt = OMEArrowDataset(path, name, cache_dir=folder, normalize=False, axes="TCZYX")
    assert all(same(rebuilt[index].numpy(), image) for index, image in enumerate(OTHERS))


def test_what_is_kept_is_not_taken_for_what_is_put_in_its_place_meanwhile(stored, tmp_path, monkeypatch):
    path, folder = stored("arrow", images_of(UNIFORM)), tmp_path / "held"
    dataset = OMEArrowDataset(path, cache_dir=folder)
    state = pickle.dumps(dataset)
    opened = open_source

    def opening(*arguments, **options):
        write_images(OTHERS, path, overwrite=True)
        return opened(*arguments, **options)

    monkeypatch.setattr("omearrow_ds.dataset.samples.open_source", opening)
    with raises(FormatError, path=path):
        OMEArrowDataset(path, cache_dir=folder)
    assert same(dataset[2].numpy(), pickle.loads(state)[2].numpy())


def test_a_folder_that_cannot_be_used_is_named(stored, tmp_path):
    path = stored("arrow", images_of(UNIFORM))
    (tmp_path / "file").write_text("")
    with raises(WriteError, path=tmp_path / "file", mentions="cache_dir", remedy=False):
        OMEArrowDataset(path, cache_dir=tmp_path / "file")
    with raises(ArgumentError, option="cache_dir", remedy=False):
        OMEArrowDataset(path, cache_dir=tmp_path, preload=False)
    with raises(ArgumentError, option="cache_dir", remedy=False):
        OMEArrowDataset(path, cache_dir=3)


@pytest.mark.skipif(sys.platform != "linux", reason="the size of files is limited by RLIMIT_FSIZE")
def test_a_full_disk_is_an_error_and_no_crash(stored, tmp_path):
    import resource

    path, folder = stored("parquet", images_of([((1, 1, 1, 200, 200), "uint16")] * 10)), tmp_path / "held"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # Python ignores SIGXFSZ.
    try:
        with raises(WriteError, path=folder, mentions=("800,032", "cache_dir")):
            OMEArrowDataset(path, cache_dir=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert cached_files(folder) == []


def test_processes_that_start_at_once_build_it_once(programs, stored, tmp_path):
    path, folder = stored("parquet", images_of(UNIFORM)), tmp_path / "held"
    code = f"""
    import sys
    from omearrow_ds import OMEArrowDataset
    from omearrow_ds.dataset.preload import PixelCache
    decode = PixelCache.decode
    PixelCache.decode = lambda self, *given: (print("decoded"), __import__("time").sleep(1), decode(self, *given))
    print(float(OMEArrowDataset({str(path)!r}, cache_dir={str(folder)!r})[6].sum()))
    """
    both = [programs.start(textwrap.dedent(code)) for _ in range(2)]
    outputs = [program.wait().stdout.split() for program in both]
    assert sorted(map(len, outputs)) == [1, 2]
    assert len({words[-1] for words in outputs}) == 1
