"""Untrusted files: no code of theirs runs, no file outside them is opened, and no foreign cache file is trusted."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile

from omearrow_ds import (
    FormatError,
    MemoryLimitError,
    OMEArrowDataset,
    OMEArrowDSError,
    WriteError,
    open_images,
    write_images,
)
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.strategies import NAMES, SUFFIX, all_same, image_of, images_of

SMALL = [((1, 1, 1, 4, 5), "uint16")] * 3
OWN_ID = "urn:uuid:11111111-1111-1111-1111-111111111111"
OTHER_ID = "urn:uuid:22222222-2222-2222-2222-222222222222"
XML = (
    '<?xml version="1.0" encoding="UTF-8"?>{doctype}<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
    f'UUID="{OWN_ID}"><Image ID="Image:0" Name="{{name}}"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint16" '
    'SizeX="5" SizeY="4" SizeC="1" SizeZ="{size_z}" SizeT="1"><Channel ID="Channel:0:0" SamplesPerPixel="1"/>'
    "{places}</Pixels></Image></OME>"
)
ONE_PLACE = '<TiffData IFD="0" PlaneCount="1"/>'
linux = pytest.mark.skipif(sys.platform != "linux", reason="the system offers no limits on memory as Linux does")


class Evil:
    """Object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


# ---- no code runs


@pytest.mark.parametrize("codec", ["filter", "compressor"])
@pytest.mark.parametrize("dtype", ["<u2", "|O"])
def test_no_zarr_chunk_is_unpickled(tmp_path, codec, dtype):
    """Zarr 2 has a codec that unpickles; before version 3.1, zarr also reads numbers with it."""
    needs("ome_zarr")
    image = tmp_path / "images.zarr" / "a.zarr"
    image.mkdir(parents=True)
    described = {"zarr_format": 2, "shape": [4, 5], "chunks": [4, 5], "dtype": dtype, "order": "C", "fill_value": 0}
    codecs = {"filters": [{"id": "pickle"}] if codec == "filter" else None, "compressor": None}
    if codec == "compressor":
        codecs["compressor"] = {"id": "pickle"}
    (image / ".zarray").write_text(json.dumps(described | codecs))
    (image / "0.0").write_bytes(pickle.dumps(Evil(tmp_path / "run")))
    with raises(FormatError, path=image, remedy=False):
        open_images(image.parent, "ome_zarr").read(0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_no_arrow_extension_type_is_unpickled(tmp_path, name):
    path = tmp_path / f"images{SUFFIX[name]}"
    write_images(images_of(SMALL), path, columns={"well": list("ABC")})
    source = open_images(path)
    wells = source.columns.column_names
    table = pq.read_table(path) if name == "parquet" else pa.ipc.open_file(path).read_all()
    marked = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Evil(tmp_path / "run")),
    }
    fields = [field.with_metadata(marked) if field.name in wells else field for field in table.schema]
    table = pa.Table.from_arrays(table.columns, schema=pa.schema(fields))
    source.close()
    if name == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert all_same(open_images(path).take([0, 1, 2]), images_of(SMALL))
    assert not (tmp_path / "run").exists()


# ---- DuckDB


ODD_NAMES = [
    "it's",
    'a "b"; drop table images; --',
    "new\nline",
    "細胞 🔬",
    "s*r",
    "a[bc]d",
    "[]",
    "{a,b}",
    "%20",
    "x::y",
    "s3:",
]
MATCHED = {"s*r": "ser", "a[bc]d": "abd", "{a,b}": "b"}  # Another name that each would match as a pattern.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", ODD_NAMES)
@pytest.mark.share(7, "name", "odd")
def test_a_path_is_one_name_whatever_is_in_it(tmp_path, name, odd):
    needs(name)
    path = tmp_path / f"{odd}{SUFFIX[name]}"
    if odd in MATCHED:
        write_images([image_of((4, 5), number=9)], tmp_path / f"{MATCHED[odd]}{SUFFIX[name]}", name)
    if name == "lance" and not odd.isprintable():
        with raises(WriteError, path=path, remedy=False):  # Lance rejects control characters.
            write_images(images_of(SMALL), path, name)
        return
    write_images(images_of(SMALL), path, name)
    for engine in (None, "duckdb") if name == "parquet_duck" else (None,):
        with open_images(path, name, engine=engine) as source:
            assert all_same(source.take([0, 1, 2]), images_of(SMALL))


@pytest.mark.parametrize("engine", ["pages", "pyarrow", "duckdb"])
def test_folders_called_like_columns_are_no_columns(tmp_path, engine):
    needs("parquet_duck")
    folder = tmp_path / "well=9" / "plate=7"
    folder.mkdir(parents=True)
    path = folder / "images.duck.parquet"
    write_images(images_of(SMALL), path, columns={"well": list("ABC")})
    assert open_images(path, engine=engine).columns.to_pydict() == {"well": list("ABC")}


@pytest.mark.parametrize("odd", ["a\\b", "a?b"])
def test_a_path_that_duckdb_would_misread_is_refused(tmp_path, odd):
    needs("duckdb")
    (tmp_path / "a").mkdir()
    write_images(images_of(SMALL), tmp_path / "a" / "b.duckdb")
    shutil.copy(tmp_path / "a" / "b.duckdb", tmp_path / f"{odd}.duckdb")
    for use in (open_images, lambda path: write_images(images_of(SMALL), path, overwrite=True)):
        with raises(FormatError, path=tmp_path / f"{odd}.duckdb"):
            use(tmp_path / f"{odd}.duckdb")


def test_a_table_by_any_name_is_a_name(tmp_path):
    import duckdb

    odd = '"; drop table images; --'
    write_images(images_of(SMALL), tmp_path / "plain.parquet", columns={odd: [1, 2, 3], "a'b": [4, 5, 6]})
    path = tmp_path / "images.duckdb"
    quoted = '"' + odd.replace('"', '""') + '"'
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"CREATE TABLE {quoted} AS FROM read_parquet('{tmp_path}/plain.parquet')")
        connection.execute(f"CREATE VIEW images AS FROM read_text('{__file__}')")  # A view could read any file.
    source = open_images(path)
    assert source.columns.to_pydict() == {odd: [1, 2, 3], "a'b": [4, 5, 6]}
    assert all_same(source.take([0, 1, 2]), images_of(SMALL))


@pytest.mark.parametrize("name", ["duckdb", "parquet_duck"])
def test_duckdb_reads_the_collection_and_nothing_else(stored, tmp_path, name):
    import duckdb

    path = stored(name, images_of(SMALL))
    (tmp_path / "secret.csv").write_text("a\n1\n")
    source = open_images(path, engine="duckdb" if name == "parquet_duck" else None)
    source.read(0)
    connection = source.images.table._connection.get()
    for statement in (
        f"FROM read_csv('{tmp_path}/secret.csv')",
        f"ATTACH '{tmp_path}/other.duckdb'",
        f"COPY (SELECT 1) TO '{tmp_path}/written.csv'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET allowed_paths = ['/']",
        "SET temp_directory = '/tmp'",
        "SET autoinstall_known_extensions = true",
    ):
        with pytest.raises(duckdb.Error, match=r"disabled|[Cc]annot|not found"):
            connection.execute(statement)
    settings = dict(connection.execute("SELECT name, value FROM duckdb_settings()").fetchall())
    off = ("enable_external_access", "autoload_known_extensions", "autoinstall_known_extensions")
    assert {settings[setting] for setting in (*off, "allow_persistent_secrets")} == {"false"}
    assert sorted(statement.name for statement in tmp_path.iterdir()) == sorted(["secret.csv", path.name])


# ---- no file outside is opened


def one_tiff(folder, **fields):
    folder.mkdir(exist_ok=True)
    xml = XML.format(**({"doctype": "", "name": "n", "size_z": 1, "places": ONE_PLACE} | fields))
    tifffile.imwrite(folder / "a.ome.tif", image_of((4, 5)), description=xml.encode(), metadata=None)
    return folder


def tiff_element(file, identifier, z=0):
    uuid = f'<UUID FileName="{file}">{identifier}</UUID>'
    return f'<TiffData FirstZ="{z}" IFD="0" PlaneCount="1">{uuid}</TiffData>'


@pytest.mark.parametrize("other", ["../secret.tif", "{absolute}", "missing.tif", "b.tif"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "second"])
def test_a_tiff_that_names_other_files_is_refused_unopened(tmp_path, monkeypatch, other, alone):
    """tifffile opens them anywhere, replaces missing ones by zeros, and applies their offsets to our file."""
    secret = tmp_path / "secret.tif"
    tifffile.imwrite(secret, image_of((4, 5), number=3))
    elsewhere = tiff_element(other.format(absolute=secret), OTHER_ID, 0 if alone else 1)
    elements = elsewhere if alone else tiff_element("a.ome.tif", OWN_ID) + elsewhere
    folder = one_tiff(tmp_path / "images", places=elements, size_z=1 if alone else 2)
    opened = []
    init = tifffile.TiffFile.__init__
    monkeypatch.setattr(
        tifffile.TiffFile, "__init__", lambda self, file, **kw: (opened.append(str(file)), init(self, file, **kw))[1]
    )
    with raises(FormatError, path=folder / "a.ome.tif"):
        open_images(folder)
    assert set(opened) == {str(folder / "a.ome.tif")}


def test_a_renamed_tiff_is_still_one_file(tmp_path):
    folder = one_tiff(tmp_path / "images", places=tiff_element("as_it_was_called.ome.tif", OWN_ID))
    assert np.array_equal(open_images(folder).read(0)[0, 0, 0], image_of((4, 5)))


LAUGHS = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))


@pytest.mark.parametrize(
    ("doctype", "name"),
    [
        (f'<!DOCTYPE l [<!ENTITY a0 "ha">{LAUGHS}]>', "&a9;"),
        (f'<!DOCTYPE l [<!ENTITY a0 "ha">{LAUGHS}]>', "&a1;"),
        ('<!DOCTYPE l [<!ENTITY x SYSTEM "file:///etc/passwd">]>', "&x;"),
        ('<!DOCTYPE OME SYSTEM "http://127.0.0.1:9/ome.dtd">', "n"),
    ],
    ids=["laughs", "a few laughs", "external entity", "external DTD"],
)
def test_xml_with_a_document_type_is_refused(tmp_path, doctype, name):
    folder = one_tiff(tmp_path / "images", doctype=doctype, name=name)
    with raises(FormatError, path=folder / "a.ome.tif", mentions="DOCTYPE", remedy=False):
        open_images(folder)


def replaced_by_link(path, outside):
    """Move a file or folder outside, and leave a link to it."""
    shutil.move(path, outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("listed", [True, False], ids=["ours", "plain"])
@pytest.mark.parametrize("part", ["", "0", "0/zarr.json", "0/c*", "zarr.json"])
def test_no_link_leads_out_of_a_zarr_folder(stored, tmp_path, part, listed):
    path = stored("ome_zarr", images_of(SMALL))
    if not listed:
        (path / "columns.parquet").unlink()
    member = min(member_path for member_path in path.iterdir() if member_path.name.startswith("00000"))
    replaced_by_link(next(member.glob(part)) if part else member, tmp_path / "outside")
    with raises(FormatError, path=path, mentions="symbolic", remedy=False):
        open_images(path, "ome_zarr").read(0)


@pytest.mark.parametrize("listed", [True, False], ids=["ours", "plain"])
def test_no_link_leads_out_of_a_tiff_folder(stored, tmp_path, listed):
    path = stored("tiff", images_of(SMALL))
    if not listed:
        (path / "columns.parquet").unlink()
    member = min(path.glob("*.tif"))
    source = open_images(path)
    replaced_by_link(member, tmp_path / "outside.tif")
    with raises(FormatError, path=member, mentions=("symbolic link", "cp -rL")):
        open_images(path)
    assert same_or_error(source, images_of(SMALL)[0])
    single = open_images(member)  # A path from the user is opened even if it is a link.
    assert np.array_equal(single.read(0), images_of(SMALL)[0])


def same_or_error(source, expected):
    try:
        return np.array_equal(source.read(0), expected)
    except OMEArrowDSError:
        return True


@pytest.mark.parametrize(
    "level", ["../../outside.zarr", "/../../outside.zarr", "0/../../../outside.zarr", "{absolute}"]
)
@pytest.mark.parametrize("version", [2, 3])
def test_no_level_of_an_ngff_image_leads_out(stored, tmp_path, version, level):
    stored("ome_zarr", images_of(SMALL), stem="outside")
    image = tmp_path / "images.zarr" / "a.zarr"
    image.mkdir(parents=True)
    attributes = {
        "multiscales": [{"axes": ["y", "x"], "datasets": [{"path": level.format(absolute=tmp_path / "outside")}]}]
    }
    if version == 2:
        (image / ".zgroup").write_text('{"zarr_format": 2}')
        (image / ".zattrs").write_text(json.dumps(attributes))
    else:
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": attributes | {"version": "0.5"}}}
        (image / "zarr.json").write_text(json.dumps(group))
    with raises(FormatError, path=image, remedy=False):
        open_images(image.parent, "ome_zarr")


@pytest.mark.parametrize("name", ["tiff", "ome_zarr"])
@pytest.mark.parametrize("file", ["../outside", "{absolute}", "."])
def test_no_member_of_the_sidecar_leads_out(stored, tmp_path, name, file):
    path = stored(name, images_of(SMALL))
    shutil.copytree(path, tmp_path / "outside")
    table = pq.read_table(path / "columns.parquet")
    rows = table["omearrow_ds"].to_pylist()
    rows[1]["file"] = file.format(absolute=tmp_path / "outside" / rows[1]["file"])
    changed = table.set_column(0, "omearrow_ds", pa.array(rows, table["omearrow_ds"].type))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path / "columns.parquet")
    with raises(FormatError, path=path, mentions=(rows[1]["file"], "columns.parquet")):
        open_images(path)


@pytest.mark.parametrize("part", ["0/zarr.json", "0/c*"])
def test_a_pipe_in_place_of_a_file_does_not_hang(stored, part):
    path = stored("ome_zarr", images_of(SMALL))
    file = next(min(member_path for member_path in path.iterdir() if member_path.name.startswith("00000")).glob(part))
    file.unlink()
    os.mkfifo(file)
    with raises(FormatError, path=file.parents[1], remedy=False):
        open_images(path).read(0)


# ---- memory is limited


def test_a_tiff_that_claims_to_be_huge_is_refused(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    tiles = {"tile": (16, 16), "compression": "zlib", "metadata": None}
    tifffile.imwrite(folder / "a.tif", np.zeros((16, 16), np.uint16), **tiles)
    with tifffile.TiffFile(folder / "a.tif", mode="r+") as tif:
        for code in (256, 257):  # Width, then length.
            tif.pages[0].tags[code].overwrite(2**31 - 1)
    with raises(MemoryLimitError, path=folder / "a.tif", mentions=2**31 - 1, remedy=False):
        open_images(folder).read(0)


@pytest.mark.parametrize("codec", ["blosc", "gzip"])
@pytest.mark.parametrize("claim", ["shape", "chunk"])
def test_a_zarr_array_that_claims_to_be_huge_is_refused(tmp_path, codec, claim):
    needs("ome_zarr")
    import zarr
    from zarr.codecs import BloscCodec, GzipCodec

    path = tmp_path / "images.zarr" / "a.zarr"
    array = zarr.create_array(
        path, shape=(16, 16), chunks=(16, 16), dtype="u2", compressors=BloscCodec() if codec == "blosc" else GzipCodec()
    )
    array[...] = 1
    described = json.loads((path / "zarr.json").read_text())
    described["chunk_grid"]["configuration"]["chunk_shape"] = [2**21, 2**21]
    if claim == "shape":
        described["shape"] = [2**21, 2**21]
    (path / "zarr.json").write_text(json.dumps(described))
    with raises(MemoryLimitError, path=path, mentions=2**21, remedy=False):
        open_images(path.parent).read(0)


@linux
def test_chunks_that_hold_more_than_they_say_take_no_memory(programs, tmp_path):
    """300 MB of zeros replace 512 bytes; the reading process may use at most 150 MB more than before."""
    import imagecodecs

    needs("ome_zarr")
    import zarr
    from zarr.codecs import BloscCodec, ZstdCodec

    zeros = bytes(300 * 2**20)
    for codec, packed in (("zlib", zlib.compress(zeros, 1)), ("zstd", imagecodecs.zstd_encode(zeros))):
        (tmp_path / codec).mkdir()
        with tifffile.TiffWriter(tmp_path / codec / "a.tif") as tif:
            tif.write(iter([packed]), shape=(16, 16), dtype="uint16", compression=codec, rowsperstrip=16)
    for name, codec in (("blosc", BloscCodec()), ("zstd3", ZstdCodec()), ("sparse", BloscCodec())):
        path = tmp_path / f"{name}.zarr" / "a"
        zarr.create_array(path, shape=(16, 16), chunks=(16, 16), dtype="u2", compressors=codec)[...] = 1
        if name == "sparse":
            os.truncate(path / "c/0/0", 2**40)
        else:
            (path / "c/0/0").write_bytes(getattr(imagecodecs, f"{name.rstrip('3')}_encode")(zeros))
    code = """
import resource, sys
from omearrow_ds import *
import tifffile, imagecodecs, zarr

held = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (held + 150 * 2**20,) * 2)
for path in sys.argv[1:]:
    try:
        open_images(path).read(0)
    except OMEArrowDSError as error:
        print(type(error).__name__, error)
"""
    paths = sorted(map(str, tmp_path.iterdir()))
    done = programs.run(code, *paths)
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths) == 5, (done.stdout, done.stderr)
    assert all(line.startswith("FormatError") and path in line for line, path in zip(lines, paths, strict=True)), lines


def test_deeply_nested_json_is_an_error(tmp_path):
    needs("ome_zarr")
    image = tmp_path / "images.zarr" / "a.zarr"
    image.mkdir(parents=True)
    (image / "zarr.json").write_text('{"zarr_format": 3, "a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with raises(FormatError, path=image, remedy=False):
        open_images(image.parent)


# ---- the folder of decoded pixels


def pixels_of(folder):
    (file,) = folder.glob("*.pixels")
    return file


def test_what_is_decoded_is_for_its_owner_alone(stored, tmp_path):
    path, folder = stored("arrow", images_of(SMALL)), tmp_path / "held" / "here"
    before = os.umask(0)
    try:
        OMEArrowDataset(path, cache_dir=folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("how", ["others can write", "a link", "of another user", "a pipe"])
def test_decoded_pixels_of_another_hand_are_not_used(stored, tmp_path, how):
    if how == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path, folder = stored("arrow", images_of(SMALL)), tmp_path / "held"
    expected = OMEArrowDataset(path, cache_dir=folder, axes="TCZYX")[0].numpy()
    file = pixels_of(folder)
    forged = bytearray(file.read_bytes())
    forged[:40] = bytes(40)  # The digest at the end is valid, but does not prove its author.
    file.write_bytes(forged)
    if how == "others can write":
        file.chmod(0o620)
    elif how == "a link":
        replaced_by_link(file, tmp_path / "forged")
    elif how == "of another user":
        os.chown(file, 12345, -1)
    else:
        file.unlink()
        os.mkfifo(file, 0o600)
    assert np.array_equal(OMEArrowDataset(path, cache_dir=folder, axes="TCZYX")[0].numpy(), expected)
    assert pixels_of(folder).stat().st_uid == os.geteuid()
    assert not pixels_of(folder).is_symlink()


@pytest.mark.parametrize("planted", ["partial", "lock"])
def test_a_planted_link_is_not_written_through(stored, tmp_path, planted):
    path, folder = stored("arrow", images_of(SMALL)), tmp_path / "held"
    OMEArrowDataset(path, cache_dir=folder)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file = pixels_of(folder)
    file.unlink()
    target = file.with_suffix(".partial") if planted == "partial" else next(folder.glob(".*.lock"))
    target.unlink(missing_ok=True)
    target.symlink_to(victim)
    try:
        OMEArrowDataset(path, cache_dir=folder)
    except OMEArrowDSError as error:
        assert str(folder) in str(error)  # noqa: PT017
    assert victim.read_text() == "mine"


# ---- written files


@pytest.mark.parametrize("name", ["arrow", "tiff"])
@pytest.mark.parametrize("led_to", ["file", "folder", "nothing"])
def test_overwriting_a_link_replaces_the_link(tmp_path, name, led_to):
    """``mv`` does so, too: the target of the link, perhaps another version or somebody else's file, does not change."""
    path, target = (
        tmp_path / f"images{SUFFIX[name]}",
        tmp_path / f"target{SUFFIX['tiff' if led_to == 'folder' else 'arrow']}",
    )
    if led_to != "nothing":
        write_images(images_of(SMALL), target)
    path.symlink_to(target)
    write_images(images_of(SMALL)[::-1], path, name, overwrite=True)
    assert not path.is_symlink()
    assert all_same(open_images(path).take([0, 1, 2]), images_of(SMALL)[::-1])
    if led_to != "nothing":
        assert all_same(open_images(target).take([0, 1, 2]), images_of(SMALL))
    assert {entry.name for entry in tmp_path.iterdir()} <= {path.name, target.name}


def test_what_is_being_written_is_in_a_folder_that_is_ours_alone(tmp_path):
    modes = {}

    def images():
        for folder in tmp_path.glob(".images*"):
            modes[folder.name] = stat.S_IMODE(folder.stat().st_mode)
        yield image_of((4, 5))

    before = os.umask(0)
    try:
        write_images(images(), tmp_path / "images.arrow")
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o700}
    assert stat.S_IMODE((tmp_path / "images.arrow").stat().st_mode) == 0o666
