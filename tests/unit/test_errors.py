"""Bad input raises one error of this package that names the path or image and the remedy."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import ome_arrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omearrow_ds import (
    ArgumentError,
    ColumnError,
    FormatError,
    ImageError,
    MetadataError,
    MissingPathError,
    OMEArrowDataset,
    OMEArrowDSError,
    WriteError,
    convert,
    errors,
    open_images,
    profile_dataset,
    stats,
    write_crops,
    write_images,
)
from omearrow_ds.storage.formats import FORMATS, get_format
from omearrow_ds.storage.formats._error_translation import translate_errors
from omearrow_ds.storage.stats import check_output
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.raw_tables import store_table
from tests.support.strategies import (
    FEW_FORMATS,
    NAMES,
    NAMES_OR_LONG,
    SUFFIX,
    TABLES,
    image_of,
    images_of,
    record_of,
    slow_except,
    whole_chunks,
)

formats = pytest.mark.parametrize("name", NAMES)
few_tables = pytest.mark.parametrize("name", slow_except(FEW_FORMATS, TABLES))
SMALL = [((1, 1, 1, 30, 40), "uint16")] * 5
TREE = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, OMEArrowDSError)]


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_every_error_is_ours_and_a_builtin(error):
    assert error is OMEArrowDSError or any(
        base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in error.__mro__
    )
    assert f" {error.__name__} " in errors.__doc__ or error is OMEArrowDSError


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_fields_make_the_message_and_survive_pickling(error):
    fields = {"option": "level", "value": -1, "allowed": "a whole number from 0", "remedy": "pass 0"}
    raised = error("is negative", path="a/b.zarr", image=3, column="well", **fields)
    assert str(raised) == "a/b.zarr: level=-1: is negative, expected a whole number from 0; pass 0"
    rebuilt = pickle.loads(pickle.dumps(raised))
    assert (type(rebuilt), str(rebuilt)) == (error, str(raised))
    fields_after = {name: getattr(rebuilt, name) for name in ("path", "image", "column", "option", "allowed", "remedy")}
    assert fields_after == {name: getattr(raised, name) for name in fields_after}
    assert (fields_after["path"], fields_after["image"], fields_after["column"], fields_after["option"]) == (
        "a/b.zarr",
        3,
        "well",
        "level",
    )
    assert rebuilt.value is ...


def test_message_has_only_the_fields_that_are_set():
    assert str(FormatError("is damaged")) == "is damaged"
    assert str(FormatError("is damaged", path=Path("a"))) == "a: is damaged"
    assert str(ArgumentError(option="format", allowed="a name")) == "format=: expected a name"
    assert str(ArgumentError("no", option="out", value=Path("a.png"))) == "out='a.png': no"
    assert len(str(ArgumentError("no", option="classes", value=list(range(10_000))))) < 500


def test_path_is_set_when_an_error_passes_a_reader(tmp_path):
    path = tmp_path / "images.arrow"
    write_images([np.zeros((4, 5), np.uint8)], path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FormatError) as caught:
        open_images(path)
    assert caught.value.path == str(path)
    assert str(caught.value).count(str(path)) == 1


WRONG_CALLS = {
    "path": lambda path, new: open_images(5),
    "src": lambda path, new: convert(5, new),
    "fields": lambda path, new: write_crops(5, pa.table({"y": [1], "x": [1]}), new / "crops.arrow", crop_size=(2, 2)),
    "data": lambda path, new: profile_dataset(5),
    "verify": lambda path, new: open_images(path, verify=True),
    "image_column": lambda path, new: open_images(path, image_column=["a", "a"]),
    "level": lambda path, new: convert(open_images(path), new, level=0),
    "format": lambda path, new: convert(path, "s3://bucket/new.parts", "ome_zarr"),
    "part_cache": lambda path, new: open_images("http://localhost/plate.parts", part_cache=new / "cache"),
    "target": lambda path, new: OMEArrowDataset(path, target=["well", "well"]),
}


@pytest.mark.parametrize("option", WRONG_CALLS)
def test_option_is_set_when_an_argument_is_invalid(tmp_path, option):
    path, new = tmp_path / "images.parquet", tmp_path / "new"
    write_images([np.zeros((4, 5), np.uint8)], path, checksum=False)
    new.mkdir()
    (new / "parts.json").touch()
    with raises(ArgumentError, option=option, remedy=False) as caught:
        WRONG_CALLS[option](path, new)
    assert caught.value.option == option


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: write_images([np.zeros((4, 5), np.uint8)], folder / "new.parts"),
        lambda folder: stats(5),
        lambda folder: check_output(folder / "stats.txt", overwrite=False),
    ],
    ids=["parts of write_images", "number for stats", "suffix of statistics"],
)
def test_option_is_path_when_the_first_argument_is_invalid(tmp_path, call):
    with raises(ArgumentError, option="path") as caught:
        call(tmp_path)
    assert caught.value.option == "path"


def test_column_is_set_when_a_column_does_not_exist(tmp_path):
    path = tmp_path / "images.arrow"
    write_images([np.zeros((4, 5), np.uint8)], path, columns={"well": ["B2"]})
    with pytest.raises(ColumnError) as caught:
        OMEArrowDataset(path, target="plate")
    assert caught.value.column == "plate"


def test_all_errors_are_exported():
    import omearrow_ds

    assert {error.__name__ for error in TREE} <= set(omearrow_ds.__all__)


@formats
def test_a_missing_path(tmp_path, name):
    path = tmp_path / f"images{SUFFIX[name]}"
    for format_name in (None, name):
        with raises(MissingPathError, path=path, remedy=False):
            open_images(path, format_name)
        with raises(FileNotFoundError, path=path, remedy=False):
            OMEArrowDataset(path, format_name)


@pytest.mark.parametrize(
    ("entries", "candidates"),
    [
        (["a.tif", "_versions/"], "lance and tiff"),
        (["a.tif", "b.zarr/.zarray"], "tiff and ome_zarr"),
    ],
)
def test_a_folder_of_no_certain_format(tmp_path, entries, candidates):
    for entry in entries:
        target = tmp_path / entry
        (target if entry.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
        if not entry.endswith("/"):
            target.touch()
    with raises(FormatError, option="format", path=tmp_path, mentions=(candidates, ", ".join(NAMES))):
        open_images(tmp_path)


def test_a_folder_that_holds_no_images_itself(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    with raises(FormatError, path=tmp_path / "notes"):
        open_images(tmp_path / "notes")
    shutil.rmtree(tmp_path / "notes")
    with raises(FormatError, path=tmp_path, mentions="folder is empty"):
        open_images(tmp_path)
    inner = tmp_path / "site 1"
    inner.mkdir()
    (inner / "a.tif").touch()
    with raises(FormatError, path=tmp_path, mentions=("'site 1'", f"'{inner}'", "pattern=")):
        open_images(tmp_path)


def test_a_file_of_no_certain_format(tmp_path):
    for number, content in enumerate([b"", b"PAR", b"text that is no image"]):
        (tmp_path / str(number)).write_bytes(content)
        with raises(FormatError, option="format", path=tmp_path / str(number), mentions=", ".join(NAMES)):
            open_images(tmp_path / str(number))
    with raises(FormatError, option="format", mentions=("'hdf5'", "parquet", "ome_zarr"), remedy=False):
        open_images(tmp_path / "0", "hdf5")


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_another_format_than_the_one_named(stored, name):
    path = stored(
        "tiff" if name in ("lance", "ome_zarr") else "arrow" if name != "arrow" else "parquet", images_of(SMALL)
    )
    with raises(FormatError, path=path, remedy=False):
        open_images(path, name)


@formats
def test_a_folder_for_a_file_and_a_file_for_a_folder(tmp_path, name):
    needs(name)
    path = tmp_path / f"images{SUFFIX[name]}"
    path.mkdir()
    with raises(FormatError, path=path, remedy=False):
        open_images(path, name)
    path.rmdir()
    path.write_bytes(b"not an image")
    with raises(FormatError, path=path, remedy=False):
        open_images(path, name)


@few_tables
@pytest.mark.parametrize(
    ("column", "facts"),
    [
        (None, ["well"]),
        (pa.array([{"a": 1}]), ["ome_image: struct<a: int64>"]),
        (pa.array([1]), ["ome_image: int64"]),
        (pa.array([{"pixels_meta": {"size_x": 1}}]), []),
    ],
    ids=["no struct", "another struct", "numbers", "no pixels"],
)
def test_a_table_without_images(tmp_path, name, column, facts):
    table = pa.table({"well": ["A"]} | ({} if column is None else {"ome_image": column}))
    path = store_table(name, table, tmp_path / f"images{SUFFIX[name]}")
    if name == "duckdb":
        facts = []
    with raises(ColumnError, path=path, mentions=("OME-Arrow struct", *facts), remedy=False):
        open_images(path)


PIXELS_META = {"type": "uint16", "size_x": 3, "size_y": 2, "size_z": 1, "size_c": 1, "size_t": 1}


@few_tables
@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"type": "int64"}, ["'int64'", "uint8"]),
        ({"type": "pixels"}, ["'pixels'", "uint8"]),
        ({"type": None}, ["dtype", "pixels_meta.type"]),
        ({"size_x": None}, ["shape"]),
        ({"size_t": 0}, ["shape", "[0, 1, 1, 2, 3]"]),
        ({"size_y": -2}, ["shape", "[1, 1, 1, -2, 3]"]),
    ],
    ids=str,
)
def test_an_impossible_image(tmp_path, name, changed, facts):
    image = image_of((1, 1, 1, 2, 3))
    good = record_of(image, whole_chunks(image, "bytes"), [])
    column = pa.array([good, good | {"pixels_meta": PIXELS_META | changed}], ome_arrow.meta.OME_ARROW_BYTE_STRUCT)
    path = store_table(name, pa.table({"ome_image": column}), tmp_path / f"images{SUFFIX[name]}")
    with raises(FormatError, path=path, mentions=("image 1", *facts), remedy=False):
        open_images(path)


def test_sizes_beyond_memory_are_no_crash(tmp_path):
    image = image_of((1, 1, 1, 2, 3))
    huge = PIXELS_META | {"size_x": 2**20, "size_y": 2**20, "size_t": 2**10}
    column = pa.array(
        [record_of(image, whole_chunks(image, "bytes"), []) | {"pixels_meta": huge}],
        ome_arrow.meta.OME_ARROW_BYTE_STRUCT,
    )
    path = store_table("parquet", pa.table({"ome_image": column}), tmp_path / "images.parquet")
    with raises(OMEArrowDSError, path=path, remedy=False):
        open_images(path).read(0)
    with raises(MemoryError, path=path, mentions="max_bytes"):
        OMEArrowDataset(path, axes="TCZYX")


def read_all(path, name):
    source = open_images(path, name)
    for index in range(len(source)):
        source.metadata(index)
    return source.take(range(len(source))), [list(images) for _, images in source.images.stream()]


def largest_file(path):
    return max(
        (file for file in [path, *path.rglob("*")] if file.is_file()), key=lambda file: (file.stat().st_size, str(file))
    )


@formats
@pytest.mark.parametrize("length", slow_except([0.5, -8], [0, 0.1, 0.5, 0.9, -1, -8]), ids=str)
def test_a_truncated_file(stored, name, length):
    path = stored(name, images_of(SMALL), columns={"well": list("ABCDE")})
    file = largest_file(path)
    content = file.read_bytes()
    file.write_bytes(content[:length] if length < 0 else content[: int(len(content) * length)])
    try:
        read_all(path, name)
    except FormatError as error:
        assert path.name in str(error)  # noqa: PT017
    else:
        pytest.fail("a truncated file was read without a word")


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_a_file_of_other_bytes(stored, name):
    path = stored(name, images_of(SMALL))
    for file in [path, *path.rglob("*")]:
        is_unread = file.suffix == ".txn" or "hint" in file.name  # Lance reads without these,
        is_unread |= file.name == "index.parquet"  # ome-arrow datasets without this.
        if file.is_file() and not is_unread:
            content = file.read_bytes()
            file.write_bytes(b"\x5a" * len(content))
            with raises(FormatError, path=path, remedy=False):
                read_all(path, name)
            file.write_bytes(content)


@pytest.mark.parametrize("name", ["tiff", "ome_zarr"])
def test_a_folder_that_lacks_or_gained_an_image(stored, name):
    path = stored(name, images_of(SMALL))
    members = sorted(member for member in path.iterdir() if member.name.startswith("00000"))
    extra = path / members[0].name.replace("000000", "000009")
    (shutil.copytree if members[0].is_dir() else shutil.copy)(members[0], extra)
    with raises(FormatError, path=path, mentions=(extra.name, "columns.parquet")):
        open_images(path)
    remove = shutil.rmtree if extra.is_dir() else os.unlink
    remove(extra)
    remove(members[1])
    with raises(FormatError, path=path, mentions=(members[1].name, "columns.parquet")):
        open_images(path)


def test_a_missing_zarr_chunk_is_no_black_image(stored):
    path = stored("ome_zarr", images_of(SMALL))
    chunks = [file for file in sorted(path.glob("*/0/**/*")) if file.is_file() and file.suffix != ".json"]
    chunks[0].unlink()
    with raises(FormatError, path=path, remedy=False):
        read_all(path, "ome_zarr")


@pytest.mark.parametrize("name", NAMES_OR_LONG)
def test_a_collection_that_changed_after_opening(stored, name):
    path = stored(name, images_of(SMALL))
    source = open_images(path)
    dataset = OMEArrowDataset(path, preload=False)
    write_images(images_of([((1, 1, 1, 7, 8), "uint16")] * 2), path, name, overwrite=True)
    for read in (lambda: source.take([4, 0]), lambda: dataset[0], lambda: dataset.__getitems__([3, 4])):
        try:
            samples = read()
        except FormatError as error:
            assert path.name in str(error)  # noqa: PT017
        else:  # A file that is still mapped or open keeps its old content.
            assert np.asarray(samples[0]).size == 30 * 40


FULL = """
import resource, signal, sys
import numpy as np
from omearrow_ds import WriteError, write_images

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
noise = [np.random.default_rng(i).integers(0, 65535, (600, 600), dtype=np.uint16) for i in range(4)]
folder, *names = sys.argv[1:]
for name in names:
    write_images(noise[:1], f"{folder}/first {name}", name)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        write_images(noise, f"{folder}/images {name}", name)
    except WriteError as error:
        assert f"images {name}" in str(error), error
    else:
        sys.exit(f"{name} was written")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize(
    "names", [["arrow", "tiff", "ome_zarr"], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_full_disk_leaves_nothing(programs, tmp_path, names):
    """A limit on the file size simulates a full disk without a mount, and fails in the same system call."""
    names = [name for name in names if get_format(name).missing_backend is None]
    done = programs.run(FULL, tmp_path, *names)
    assert done.returncode == 0, done.stderr
    assert {entry.name for entry in tmp_path.iterdir()} == {f"first {name}" for name in names}


def test_a_panic_while_writing_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    class PanicException(BaseException):  # Libraries written in Rust have such a class.
        pass

    def panicking(tables, *rest):
        next(iter(tables))
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr("omearrow_ds.storage.formats.parquet.write_collection", panicking)
    with raises(WriteError, path=tmp_path / "images.parquet", remedy=False):
        write_images([np.ones((4, 5), np.uint8)] * 3, tmp_path / "images.parquet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changed",
    [
        {"id": None},
        {"file": None},
        {"shape": None},
        {"dtype": None},
        {"dtype": "object"},
        {"shape": [1, 1, None, 4, 5]},
    ],
    ids=str,
)
def test_a_sidecar_that_lists_an_image_without_what_it_is_is_refused(tmp_path, changed):
    path = tmp_path / "images.tiffs"
    write_images([np.ones((4, 5), np.uint8)] * 3, path)
    table = pq.read_table(path / "columns.parquet")
    name = next(name for name in table.column_names if pa.types.is_struct(table[name].type))
    rows = table[name].to_pylist()
    rows[1] |= changed
    changed_column = pa.array(rows, table[name].type)
    pq.write_table(
        table.set_column(table.schema.get_field_index(name), pa.field(name, changed_column.type), changed_column),
        path / "columns.parquet",
    )
    with raises(OMEArrowDSError, path=path / "columns.parquet", remedy=False):
        open_images(path, "tiff")


@pytest.mark.parametrize("error", [RuntimeError("Query interrupted"), OSError("INTERRUPT Error: Interrupted!")])
def test_ctrl_c_stays_one_where_duckdb_makes_an_error_of_it(tmp_path, monkeypatch, error):
    needs("duckdb")

    def interrupted(*_):
        raise error

    with pytest.raises(KeyboardInterrupt), translate_errors(tmp_path, "DuckDB file", (OSError,)):
        raise error
    monkeypatch.setattr(get_format("duckdb").module(), "write_collection", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_images(images_of([((1, 1, 1, 2, 3), "uint8")]), tmp_path / "x.duckdb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_is_no_text_is_refused(tmp_path, name):
    needs(name)
    path = tmp_path / os.fsdecode(b"odd\xff" + SUFFIX[name].encode())
    with raises(FormatError, mentions=(repr(str(path)), "UTF-8")) as raised:
        write_images(images_of([((1, 1, 1, 2, 3), "uint8")]), path, name)
    str(raised.value).encode()
    with raises(FormatError, mentions=(repr(str(path)), "UTF-8")):
        open_images(path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_refused_image_names_target_and_image(tmp_path, fmt):
    needs(fmt.name)
    target = tmp_path / f"images{fmt.suffix}"
    for images, options in [([np.zeros((2, 3, 4), np.uint8)], {}), ([np.zeros((2, 3), np.complex64)], {})]:
        with raises(ImageError, path=target, mentions="image 0"):
            write_images(images, target, **options)
    for image_ids in ("a", ["a", "b"]):
        with raises(MetadataError, option="image_ids", path=target, remedy=False):
            write_images([np.zeros((2, 3), np.uint8)], target, image_ids=image_ids)
    with raises(MetadataError, option="metadata", path=target, remedy=False):
        write_images([np.zeros((2, 3), np.uint8)], target, metadata={"name": "a"})


@pytest.mark.parametrize("name", ["parquet", "lance", "vortex", "duckdb", "arrow"])
def test_a_removed_file_is_missing_not_damaged(stored, name):
    path = stored(name, images_of(SMALL))
    source = open_images(path, name)
    source.close()
    path.rename(path.with_name("elsewhere"))
    with raises(MissingPathError, path=path, remedy=False):
        source.read(0)


def test_a_damaged_sidecar_is_named(stored):
    path = stored("tiff", images_of(SMALL))
    (path / "columns.parquet").write_bytes(b"junk")
    with raises(FormatError, path=path / "columns.parquet", remedy=False):
        open_images(path)
