"""Writing, opening and converting: detection, atomicity, streaming, and conflicting arguments."""

from __future__ import annotations

import os
import pickle
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from omearrow_ds import (
    BackendError,
    FormatError,
    ImageError,
    MetadataError,
    MissingPathError,
    OMEArrowDSError,
    PathExistsError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.storage.formats import FORMATS, get_format
from omearrow_ds.storage.formats._detect import found_at
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import NAMES, NAMES_OR_LONG, RAGGED, SUFFIX, all_same, image_of, images_of, same

formats = pytest.mark.parametrize("name", NAMES)
SMALL = [((1, 1, 1, 3, 4), "uint16")] * 3


def test_the_formats_and_their_order():
    assert NAMES == ["parquet", "parquet_duck", "lance", "vortex", "duckdb", "arrow", "tiff", "ome_zarr", "ome_arrow"]
    assert {fmt.kind for fmt in FORMATS} == {"table", "directory"}
    with pytest.raises(AttributeError):
        FORMATS[0].name = "other"


@formats
@pytest.mark.parametrize("hint", ["suffix", "content"])
@pytest.mark.share(2, "name", "hint")
def test_a_format_is_known_by_suffix_and_by_content(stored, name, hint):
    path = stored(name, images_of(SMALL))
    if hint == "content" and name != "parquet_duck":
        path = path.rename(path.with_name("renamed"))
    assert found_at(path).name == name
    assert open_images(str(path)).format.name == name


def test_upper_case_suffixes(tmp_path):
    write_images(images_of(SMALL), tmp_path / "A.PARQUET")
    assert open_images(tmp_path / "A.PARQUET").format.name == "parquet"


@formats
@pytest.mark.share(3, "name")
def test_paths_with_odd_characters(tmp_path, name):
    needs(name)
    folder = tmp_path / 'it\'s "a" µ 細胞; -- %20 #1'
    folder.mkdir()
    path = folder / f'im\'ages; "µ" %s{SUFFIX[name]}'
    images = images_of(SMALL)
    write_images(images, path)
    source = open_images(path)
    assert all_same(source.take([2, 0]), [images[2], images[0]])
    assert source.metadata(0)["name"] is None


@formats
@pytest.mark.parametrize("stem", ["what?b=c", "a*[b]", "~{x}", "s3:a"])
@pytest.mark.share(4, "name", "stem")
def test_wildcards_and_url_signs_are_just_characters(tmp_path, name, stem):
    needs(name)
    images = images_of(SMALL)
    (tmp_path / stem).mkdir()
    for path in (tmp_path / f"{stem}{SUFFIX[name]}", tmp_path / stem / f"images{SUFFIX[name]}"):
        try:
            write_images(images, path)
        except OMEArrowDSError as error:
            assert str(path) in str(error)  # noqa: PT017
            continue
        assert all_same(open_images(path).take([2, 0]), [images[2], images[0]])


@formats
@pytest.mark.share(3, "name")
def test_a_relative_path_outlives_a_change_of_folder(tmp_path, monkeypatch, name):
    needs(name)
    monkeypatch.chdir(tmp_path)
    images = images_of(SMALL)
    write_images(images, f"images{SUFFIX[name]}")
    source = open_images(f"images{SUFFIX[name]}")
    monkeypatch.chdir("/")
    assert all_same(source.take(range(3)), images)


def test_suffixes_that_name_no_format(tmp_path):
    with raises(FormatError, option="format", path=tmp_path / "images.npy", mentions=".parquet (parquet)"):
        write_images(images_of(SMALL), tmp_path / "images.npy")
    write_images(images_of(SMALL), tmp_path / "images.npy", "arrow")
    assert open_images(tmp_path / "images.npy").format.name == "arrow"


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("YX", (3, 4)),
        ("CYX", (2, 3, 4)),
        ("YXC", (3, 4, 2)),
        ("ZCTXY", (2, 3, 1, 4, 5)),
        (None, (3, 4)),
        (None, (2, 1, 3, 4, 5)),
    ],
)
def test_input_axes(tmp_path, axes, shape):
    from omearrow_ds.axes import to_tczyx

    image = image_of(shape)
    write_images([image], tmp_path / "images.arrow", axes=axes)
    assert same(open_images(tmp_path / "images.arrow").read(0), np.ascontiguousarray(to_tczyx(image, axes, "")))


@formats
@pytest.mark.share(3, "name")
def test_any_memory_layout_is_written(stored, name):
    image = image_of((1, 2, 1, 6, 8))
    layouts = [
        image[..., ::-1],
        image[..., ::2, 1:],
        np.asfortranarray(image),
        image.astype(">u2"),
        image.transpose(0, 2, 1, 3, 4),
    ]
    read_only = image.copy()
    read_only.flags.writeable = False
    source = open_images(stored(name, [*layouts, read_only]))
    expected = [np.ascontiguousarray(layout).astype("uint16") for layout in [*layouts, read_only]]
    assert all_same(source.take(range(len(expected))), expected)


class BoomError(Exception):
    pass


def failing(count, error=BoomError):
    for number in range(count):
        yield image_of((1, 1, 1, 3, 4), "uint16", number)
    raise error("the user's own")


@formats
@pytest.mark.parametrize("count", [0, 40])
@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt], ids=lambda error: error.__name__)
@pytest.mark.share(2, "name", "count", "error")
def test_a_failing_iterator_leaves_nothing(tmp_path, name, count, error):
    needs(name)
    path = tmp_path / f"images{SUFFIX[name]}"
    with pytest.raises(error, match="the user's own"):
        write_images(failing(count, error), path, name)
    assert list(tmp_path.iterdir()) == []


@formats
@pytest.mark.share(3, "name")
def test_a_failing_iterator_leaves_the_old_content(stored, tmp_path, name):
    images = images_of(SMALL)
    path = stored(name, images, columns={"well": ["A", "B", "C"]})
    with pytest.raises(BoomError):
        write_images(failing(20), path, name, overwrite=True)
    assert list(tmp_path.iterdir()) == [path]
    source = open_images(path)
    assert all_same(source.take(range(3)), images)
    assert source.columns["well"].to_pylist() == ["A", "B", "C"]


@formats
@pytest.mark.share(3, "name")
def test_a_bad_image_in_the_middle_is_one_clear_error(tmp_path, name):
    needs(name)
    path = tmp_path / f"images{SUFFIX[name]}"
    for bad, facts in [
        (np.zeros((2, 3, 4)), ["3-D", "axes="]),
        (np.zeros((2, 2), "complex64"), ["complex64", "uint8"]),
        (np.zeros((2, 2), "M8[s]"), ["datetime64[s]", "uint8"]),
        (np.zeros((2, 2), "int64"), ["int64", "uint8"]),
        (np.zeros((2, 2), bool), ["bool", "uint8"]),
        (np.zeros((0, 2)), ["(0, 2)"]),
        ([[1, 2]], ["list", "numpy"]),
    ]:
        with raises(ImageError, path=path, mentions=("image 5", *facts), remedy=False):
            write_images([*images_of(SMALL), *images_of(SMALL)[:2], bad], path, name)
        assert list(tmp_path.iterdir()) == []


@formats
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.share(2, "name", "overwrite")
def test_a_target_that_exists_or_has_no_folder(tmp_path, name, overwrite):
    needs(name)
    with raises(MissingPathError, path=tmp_path / "nowhere"):
        write_images(images_of(SMALL), tmp_path / "nowhere" / f"images{SUFFIX[name]}", overwrite=overwrite)
    path = tmp_path / f"images{SUFFIX[name]}"
    path.write_text("somebody's file")
    if overwrite:
        write_images(images_of(SMALL), path, overwrite=True)
        assert all_same(open_images(path).take(range(3)), images_of(SMALL))
    else:
        with raises(PathExistsError, option="overwrite", path=path):
            write_images(failing(0), path)
        assert path.read_text() == "somebody's file"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_a_generator_is_streamed(tmp_path, name):
    needs(name)
    alive = most = 0

    def gone():
        nonlocal alive
        alive -= 1

    def images():
        nonlocal alive, most
        for _ in range(45):
            image = np.full((1024, 1024), alive, np.uint16)
            weakref.finalize(image, gone)
            alive += 1
            most = max(most, alive)
            yield image

    write_images(images(), tmp_path / f"images{SUFFIX[name]}", name)
    assert most < 40
    assert len(open_images(tmp_path / f"images{SUFFIX[name]}")) == 45


@pytest.mark.parametrize("name", ["parquet", "duckdb", "lance", "vortex", "tiff"])
@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"image_ids": ["a", "b"]}, "2 entries"),
        ({"image_ids": list("abcd")}, "4 entries"),
        ({"image_ids": ["a", "a", "b"]}, ("image 1", "'a'")),
        ({"image_ids": ["a", "", "b"]}, ("image 1", "''")),
        ({"image_ids": ["a", 1, "b"]}, ("image 1", "has 1")),
        ({"image_ids": ["a", "\ud800", "b"]}, ()),
        ({"metadata": [{}, {}]}, "2 entries"),
        ({"metadata": [{}] * 4}, ()),
        ({"metadata": [{}, {"pixel_size": 1}, {}]}, ("image 1", "'pixel_size'", "'physical_size_x'")),
        ({"metadata": [{}, {"physical_size_x": "wide"}, {}]}, ("image 1", "'physical_size_x'")),
        ({"metadata": [{}, {"channels": [{}, {}]}, {}]}, ("image 1", "2 channels", "has 1")),
        ({"metadata": [{}, {"channels": [{"colour": 1}]}, {}]}, ("image 1", "'colour'", "'color_rgba'")),
        ({"metadata": [{}, {"channels": "DNA"}, {}]}, "image 1"),
        ({"metadata": [{}, "name", {}]}, ("image 1", "str")),
        ({"metadata": [{}, {"name": "\ud800"}, {}]}, "image 1"),
        ({"columns": {"well": ["A", "B"]}}, "2 rows"),
        ({"columns": {"well": list("ABCD")}}, ("4 rows", 3)),
        ({"columns": {"well": list("ABC"), "row": [1]}}, ()),
        ({"columns": {"ome_image": [1, 2, 3]}}, "['ome_image']"),
        ({"columns": {"mixed": [1, "a", None]}}, ()),
        ({"columns": 5}, ()),
        ({"columns": pa.table([[1, 2, 3], [1, 2, 3]], ["a", "a"])}, "['a', 'a']"),
    ],
    ids=str,
)
@pytest.mark.share(5, "name", "arguments")
def test_arguments_that_do_not_go_together(tmp_path, name, arguments, facts):
    needs(name)
    with raises(
        MetadataError, option=next(iter(arguments)), path=f"images{SUFFIX[name]}", mentions=facts, remedy=False
    ):
        write_images(iter(images_of(SMALL)), tmp_path / f"images{SUFFIX[name]}", name, **arguments)
    assert list(tmp_path.iterdir()) == []


@formats
def test_an_unknown_name_and_a_missing_backend(tmp_path, monkeypatch, name):
    with raises(FormatError, mentions=("'hdf5'", name), remedy=False):
        write_images([], tmp_path / "images", "hdf5")
    with raises(OMEArrowDSError, mentions=("'png'", "bytes", "list"), remedy=False):
        write_images([], tmp_path / f"images{SUFFIX[name]}", encoding="png")
    fmt = get_format(name)
    if fmt.extra is None:
        return
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    path = tmp_path / f"images{SUFFIX[name]}"
    facts = (f"'{name}'", f"'{fmt.backend}'", f"'omearrow-ds[{fmt.extra}]'")
    with raises(BackendError, mentions=facts, remedy=False) as caught:
        write_images(images_of(SMALL), path)
    assert isinstance(caught.value, ImportError)
    (path.mkdir if fmt.is_folder else path.touch)()
    with raises(BackendError, mentions=facts, remedy=False):
        open_images(path, name)


def test_convert_takes_an_open_source(stored, tmp_path):
    images = images_of(SMALL)
    with open_images(stored("parquet", images)) as source:
        convert(
            source, tmp_path / "copy.lance" if get_format("lance").missing_backend is None else tmp_path / "copy.arrow"
        )
        assert same(source.read(1), images[1])


@formats
@pytest.mark.share(3, "name")
def test_convert_onto_itself_is_refused(stored, name):
    images = images_of(SMALL)
    path = stored(name, images)
    with raises(PathExistsError, path=path):
        convert(path, path, name, overwrite=True)
    assert all_same(open_images(path).take(range(3)), images)


def test_convert_follows_the_rules_of_writing(stored, tmp_path):
    path = stored("parquet", images_of(SMALL))
    (tmp_path / "taken.arrow").touch()
    with raises(PathExistsError, option="overwrite", path=tmp_path / "taken.arrow"):
        convert(path, tmp_path / "taken.arrow")
    convert(path, tmp_path / "taken.arrow", overwrite=True)
    with raises(MissingPathError, path=tmp_path / "missing.parquet", remedy=False):
        convert(tmp_path / "missing.parquet", tmp_path / "new.arrow")
    assert not (tmp_path / "new.arrow").exists()


def test_progress_shows_on_stderr_only_when_asked(stored, capsys):
    stored("arrow", images_of(SMALL))
    assert capsys.readouterr() == ("", "")
    stored("arrow", images_of(SMALL), "again", progress=True)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_a_result_has_the_users_permissions(stored, name):
    old = os.umask(0o022)
    try:
        path = stored(name, images_of(SMALL))
    finally:
        os.umask(old)
    for entry in [path, *Path(path).rglob("*")]:
        assert entry.stat().st_mode & 0o777 == (0o755 if entry.is_dir() else 0o644)


@pytest.mark.parametrize("name", ["tiff", "ome_zarr"])
def test_a_pickled_folder_is_not_looked_into_again(stored, name, monkeypatch):
    path = stored(name, images_of(RAGGED), columns={"n": [*range(len(RAGGED))]})
    (path / "columns.parquet").unlink()  # As third-party folders.
    with open_images(path) as source:
        expected = source.take(range(len(source)))
        pickled = pickle.dumps(source)
        kind = type(source.images._reader)
    monkeypatch.setattr(kind, "describe", lambda self, file: pytest.fail(f"looked into {file}"))
    with pickle.loads(pickled) as again:
        assert all_same(again.take(range(len(again))), expected)
        assert again.image_ids == source.image_ids
        assert all_same([again.read(1)], expected[1:2])
    path.rename(path.with_name("moved"))
    with raises(MissingPathError, path=path, remedy=False):
        pickle.loads(pickled)


@pytest.mark.parametrize("name", ["parquet", "parquet_duck", "arrow", "tiff", "ome_zarr", "vortex"])
def test_the_same_images_make_the_same_bytes(stored, name):
    """Except Lance and DuckDB, which put new ids into files and blocks."""

    def content(path):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        return [file.read_bytes() for file in files if file.is_file()]

    once, again = (content(stored(name, images_of(RAGGED), stem=stem)) for stem in ("once", "again"))
    assert once == again


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
        yield np.zeros((512, 512), np.uint16)

folder, *names = sys.argv[1:]
for name in names:
    try:
        write_images(images(), f"{folder}/images of {name}", name)
    except KeyboardInterrupt:
        print(name)
"""


def test_an_interrupt_arrives_as_itself_and_leaves_nothing(programs, tmp_path):
    names = [fmt.name for fmt in FORMATS if fmt.missing_backend is None]
    done = programs.run(INTERRUPTED, tmp_path, *names)
    assert (done.returncode, done.stdout.split()) == (0, names), done.stderr
    assert not list(tmp_path.iterdir())


def test_overwriting_spares_folders_of_other_things(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    with raises(PathExistsError, path=tmp_path / "precious"):
        write_images([np.zeros((2, 2), np.uint8)], tmp_path / "precious", "arrow", overwrite=True)
    write_images([np.zeros((2, 2), np.uint8)], tmp_path / "precious" / "cells.parquet")
    with pytest.raises(PathExistsError):
        convert(tmp_path / "precious" / "cells.parquet", tmp_path / "precious", "tiff", overwrite=True)
    assert sorted(entry.name for entry in (tmp_path / "precious").iterdir()) == ["cells.parquet", "thesis.txt"]
