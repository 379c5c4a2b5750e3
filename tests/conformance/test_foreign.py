"""Files written by other software: ome-arrow's exporters, bioio, tifffile, ImageJ, zarr and plain Arrow tools."""

from __future__ import annotations

import warnings

import imagecodecs
import numpy as np
import ome_arrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from ome_arrow.export import to_ome_parquet, to_ome_tiff, to_ome_vortex, to_ome_zarr
from ome_arrow.ingest import from_numpy
from pyarrow import feather

from omearrow_ds import DecodeError, FormatError, OMEArrowDataset, convert, open_images
from tests.conftest import needs
from tests.support.errors import raises, warns
from tests.support.sources import windows_are_cut
from tests.support.strategies import (
    DTYPES,
    NAMES,
    NF1,
    SUFFIX,
    all_same,
    image_of,
    images_of,
    record_of,
    same,
    whole_chunks,
)

BYTES = ome_arrow.meta.OME_ARROW_BYTE_STRUCT
SHAPE = (2, 2, 3, 20, 30)


def scalar_of(image, **kwargs):
    return from_numpy(image, clamp_to_uint16=False, image_id="an id", name="a name", physical_size_x=0.5, **kwargs)


def oracle(scalar):
    return ome_arrow.to_numpy(scalar, dtype=np.dtype(scalar.as_py()["pixels_meta"]["type"]))


@pytest.mark.parametrize(
    ("build", "export"),
    [
        ({}, {}),
        ({"chunk_shape": (2, 7, 11)}, {}),
        ({"build_chunks": False}, {}),
        ({"chunk_encoding": "bytes"}, {}),
        ({"chunk_encoding": "bytes", "chunk_shape": (1, 20, 30), "chunk_compression": "zstd"}, {"compression": None}),
        ({"chunk_encoding": "bytes", "chunk_shape": (3, 6, 9), "chunk_compression": "lz4"}, {"row_group_size": 1}),
        ({}, {"inline_chunk_encoding": "bytes"}),
        ({}, {"inline_chunk_encoding": "bytes", "inline_chunk_compression": "zstd"}),
        ({}, {"inline_chunk_encoding": "list", "column_name": 'odd "name"; µ'}),
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", ["parquet", "parquet_duck"])
def test_ome_arrows_parquet(tmp_path, build, export, reader):
    needs(reader)
    scalar = scalar_of(image_of(SHAPE), **build)
    to_ome_parquet(scalar, str(tmp_path / "image.parquet"), **export)
    source = open_images(tmp_path / "image.parquet", reader)
    assert same(source.read(0), oracle(scalar))
    assert same(source.read(0), image_of(SHAPE))
    assert list(source.image_ids) == ["an id"]
    metadata = source.metadata(0)
    assert metadata["name"] == "a name"
    assert metadata["physical_size_x"] == 0.5
    assert [channel["name"] for channel in metadata["channels"]] == ["C0", "C1"]


@pytest.mark.parametrize("build", [{}, {"chunk_shape": (2, 7, 11)}, {"build_chunks": False}], ids=str)
def test_ome_arrows_vortex(tmp_path, build):
    needs("vortex")
    scalar = scalar_of(image_of(SHAPE, "uint8"), **build)
    to_ome_vortex(scalar, str(tmp_path / "image.vortex"))
    source = open_images(tmp_path / "image.vortex")
    assert same(source.read(0), oracle(scalar))
    assert source.metadata(0)["name"] == "a name"


def test_ome_arrows_vortex_export_of_bytes_has_no_pixels(tmp_path):
    needs("vortex")
    scalar = scalar_of(image_of(SHAPE), chunk_encoding="bytes")
    to_ome_vortex(scalar, str(tmp_path / "image.vortex"))  # ome-arrow 0.1.0 casts to lists, and the bytes are lost.
    with raises(DecodeError, path=tmp_path / "image.vortex", mentions=("image 0", "null"), remedy=False):
        open_images(tmp_path / "image.vortex").read(0)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(2, "dtype", "zarr_format", "levels")
def test_ome_arrows_zarr(tmp_path, dtype, zarr_format, levels):
    needs("ome_zarr")
    images = images_of([(SHAPE, dtype)] * 2)
    for number, image in enumerate(images):
        path = str(tmp_path / f"{number}.ome.zarr")
        to_ome_zarr(scalar_of(image), path, dtype=np.dtype(dtype), zarr_format=zarr_format, multiscale_levels=levels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = open_images(tmp_path)
        assert source.format.name == "ome_zarr"
        assert all_same(source.take([1, 0]), images[::-1])
        assert source.metadata(0)["name"] == "a name"
        assert same(open_images(tmp_path / "1.ome.zarr").read(0), images[1])


@pytest.mark.parametrize("compression", ["zlib", None])
@pytest.mark.filterwarnings("ignore")
def test_ome_arrows_tiff(tmp_path, compression):
    image = image_of(SHAPE)
    to_ome_tiff(scalar_of(image), str(tmp_path / "image.ome.tiff"), compression=compression)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = open_images(tmp_path)
        assert same(source.read(0), image)
        assert source.metadata(0)["physical_size_x"] == 0.5
        assert [channel["name"] for channel in source.metadata(0)["channels"]] == ["C0", "C1"]


TIFF_OPTIONS = [
    {},
    {"compression": "zlib"},
    {"compression": "lzw"},
    {"compression": "zstd"},
    {"compression": "packbits"},
    {"compression": "lzma"},
    {"compression": "zlib", "predictor": True},
    {"compression": "lzw", "predictor": True, "tile": (16, 16)},
    {"tile": (32, 16)},
    {"rowsperstrip": 7},
    {"byteorder": ">"},
    {"byteorder": ">", "compression": "zlib", "predictor": True},
    {"bigtiff": True},
    {"photometric": "miniswhite"},
    {"metadata": None},
    {"compression": "jpeg2000", "compressionargs": {"reversible": True, "level": 0}},
]


@pytest.mark.parametrize("options", TIFF_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.share(3, "options", "dtype")
def test_every_kind_of_tiff_that_tifffile_reads(tmp_path, options, dtype):
    if options.get("compression") == "jpeg2000" and (dtype == "float32" or not imagecodecs.JPEG2K.available):
        pytest.skip("JPEG 2000 holds integers, and needs its codec")
    if options.get("compression") == "packbits" and dtype != "uint8":
        pytest.skip("tifffile writes PackBits of bytes alone")
    image = image_of((40, 50), dtype)
    file = tmp_path / "image.tif"
    tifffile.imwrite(file, image, **options)
    source = open_images(tmp_path)
    assert source.format.name == "tiff"
    assert source.shapes.tolist() == [[1, 1, 1, 40, 50]]
    assert same(source.read(0), tifffile.imread(file).astype(dtype)[None, None, None])
    assert same(source.read(0)[0, 0, 0], image)
    assert windows_are_cut(source, [source.read(0)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_plain_tiffs(tmp_path, dtype):
    image = image_of((4, 5), dtype)
    tifffile.imwrite(tmp_path / "image.tif", image)
    assert same(open_images(tmp_path).read(0)[0, 0, 0], image)


@pytest.mark.parametrize(
    ("shape", "options", "laid_out"),
    [
        ((6, 4, 5), {}, lambda image: image[None, None]),
        ((2, 6, 4, 5), {}, lambda image: image[:, None]),
        ((1, 6, 4, 5), {}, lambda image: image[:, None]),
        ((6, 1, 4, 5), {"compression": "zlib"}, lambda image: image[None, None, :, 0]),
        ((6, 4, 5), {"photometric": "minisblack", "metadata": {"axes": "ZYX"}}, lambda image: image[None, None]),
        ((6, 4, 5), {"photometric": "minisblack", "metadata": {"axes": "CYX"}}, lambda image: image[None, :, None]),
        ((6, 4, 5), {"photometric": "minisblack", "metadata": {"axes": "TYX"}}, lambda image: image[:, None, None]),
        ((4, 5, 3), {"photometric": "rgb"}, lambda image: image.transpose(2, 0, 1)[None, :, None]),
        ((4, 5, 4), {"photometric": "rgb"}, lambda image: image.transpose(2, 0, 1)[None, :, None]),
        ((3, 4, 5), {"photometric": "rgb", "planarconfig": "separate"}, lambda image: image[None, :, None]),
        (
            (2, 3, 2, 4, 5),
            {"imagej": True, "metadata": {"axes": "TZCYX"}},
            lambda image: image.transpose(0, 2, 1, 3, 4),
        ),
        ((3, 4, 5), {"imagej": True, "metadata": {"axes": "ZYX"}}, lambda image: image[None, None]),
        (
            (3, 2, 4, 5),
            {"ome": True, "photometric": "minisblack", "metadata": {"axes": "ZCYX"}},
            lambda image: image.transpose(1, 0, 2, 3)[None],
        ),
    ],
    ids=lambda value: "laid-out" if callable(value) else str(value),
)
def test_axes_of_other_tiffs(tmp_path, shape, options, laid_out):
    image = image_of(shape, "uint8")
    tifffile.imwrite(tmp_path / "image.tif", image, **options)
    source = open_images(tmp_path)
    assert same(source.read(0), np.ascontiguousarray(laid_out(image)))
    assert windows_are_cut(source, [source.read(0)])
    assert source.shapes.tolist() == [list(laid_out(image).shape)]


def test_pages_written_one_by_one(tmp_path):
    image = image_of((3, 4, 5))
    with tifffile.TiffWriter(tmp_path / "image.tif") as writer:
        for page in image:
            writer.write(page, contiguous=True)
    assert same(open_images(tmp_path).read(0)[0, 0], image)


def test_a_file_of_several_images_is_refused(tmp_path):
    with tifffile.TiffWriter(tmp_path / "images.tif") as writer:
        writer.write(image_of((4, 5)))
        writer.write(image_of((6, 7)))
    with raises(FormatError, path=tmp_path / "images.tif", mentions="2 images"):
        open_images(tmp_path)


def test_a_palette_and_booleans_are_no_surprise(tmp_path):
    tifffile.imwrite(tmp_path / "image.tif", np.zeros((4, 5), bool))
    with raises(FormatError, path=tmp_path, mentions=("'image'", "'bool'", "uint8")):
        open_images(tmp_path)


def test_plain_tiffs_come_in_natural_order(tmp_path):
    names = ["a10.TIF", "a2.tif", "a1.tiff", "B3.tif", "a02b.tif", "µ.tif"]
    for number, name in enumerate(names):
        tifffile.imwrite(tmp_path / name, np.full((2, 2), number, "uint8"))
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "folder.tif").mkdir()
    source = open_images(tmp_path)
    ids = list(source.image_ids)
    assert sorted(ids) == sorted(name.rsplit(".", 1)[0] for name in names)
    assert ids.index("a1") < ids.index("a2") < ids.index("a10")
    assert [int(image.max()) for image in source.take(range(6))] == [
        [name.rsplit(".", 1)[0] for name in names].index(image_id) for image_id in ids
    ]
    assert source.columns.num_columns == 0
    assert open_images(tmp_path / "a2.tif").read(0).max() == 1


@pytest.mark.skipif(not NF1.is_dir(), reason=f"no NF1 images at {NF1}")
def test_the_real_nf1_fields():
    files = sorted(NF1.glob("*.tif"))
    source = open_images(NF1, "tiff")
    assert set(source.image_ids) == {file.stem for file in files}
    for index, image_id in enumerate(source.image_ids):
        assert np.array_equal(source.read(index)[0, 0, 0], tifffile.imread(NF1 / f"{image_id}.tif"))
    with warns(UserWarning, path=NF1, mentions="pattern="):  # The file names contain channels.
        dataset = OMEArrowDataset(NF1, preload=False, axes="YX")
    expected = tifffile.imread(NF1 / f"{dataset.image_ids[0]}.tif")
    assert same(dataset[0].numpy(), expected.astype(np.float32) / np.float32(np.iinfo(expected.dtype).max))


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("shape", [(4, 5), (2, 2, 3, 4, 5)])
def test_plain_zarr_arrays(tmp_path, zarr_format, shape):
    needs("ome_zarr")
    import zarr

    images = [image_of(shape, dtype) for dtype in ("uint16", ">u2", "float64")]
    for number, image in enumerate(images):
        array = zarr.create_array(
            tmp_path / f"{number}", shape=shape, dtype=image.dtype, chunks=(2,) * len(shape), zarr_format=zarr_format
        )
        array[...] = image
    source = open_images(tmp_path)
    expected = [
        image.astype(image.dtype.newbyteorder("=")).reshape((1,) * (5 - len(shape)) + shape) for image in images
    ]
    assert all_same(source.take(range(3)), expected)
    assert same(open_images(tmp_path / "1").read(0), expected[1])
    assert windows_are_cut(source, expected)


@pytest.mark.parametrize(("version", "zarr_format"), [("0.4", 2), ("0.5", 3)])
@pytest.mark.parametrize(
    ("axes", "shape"),
    [("yx", (4, 5)), ("cyx", (2, 4, 5)), ("zyx", (3, 4, 5)), ("czyx", (2, 3, 4, 5)), ("tczyx", (2, 2, 3, 4, 5))],
)
def test_ngff_groups_of_others(tmp_path, version, zarr_format, axes, shape):
    needs("ome_zarr")
    import zarr

    from omearrow_ds.axes import to_tczyx

    image = image_of(shape)
    kinds = {"t": "time", "c": "channel"}
    multiscale = {
        "version": version,
        "name": "an image",
        "axes": [
            {"name": axis, "type": kinds.get(axis, "space")} | ({} if axis in kinds else {"unit": "micrometer"})
            for axis in axes
        ],
        "datasets": [
            {"path": "full", "coordinateTransformations": [{"type": "scale", "scale": [0.25] * len(axes)}]},
            {"path": "half", "coordinateTransformations": [{"type": "scale", "scale": [0.5] * len(axes)}]},
        ],
    }
    attributes = (
        {"multiscales": [multiscale]} if version == "0.4" else {"ome": {"version": "0.5", "multiscales": [multiscale]}}
    )
    group = zarr.create_group(tmp_path / "image.zarr", zarr_format=zarr_format, attributes=attributes)
    group.create_array("full", data=image)
    group.create_array("half", data=image[..., ::2, ::2])
    for path in (tmp_path, tmp_path / "image.zarr"):
        source = open_images(path)
        assert source.format.name == "ome_zarr"
        assert same(source.read(0), np.ascontiguousarray(to_tczyx(image, axes.upper(), "")))
        assert windows_are_cut(source, [source.read(0)])
        assert source.metadata(0)["physical_size_x"] == 0.25
        assert source.metadata(0)["name"] == "an image"


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("names", ["tczyx", "ctzyx", "xyzct", "YXC", "zyx", "xy", ("time", "channel", "y", "x")])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.share(4, "zarr_format", "names", "plain")
def test_dimensions_of_plain_zarr_arrays_are_taken_by_their_names(tmp_path, zarr_format, names, plain):
    needs("ome_zarr")
    import zarr

    from omearrow_ds.axes import to_tczyx

    image = image_of((2, 3, 4, 5, 6)[: len(names)])
    named = {"dimension_names": names} if zarr_format == 3 else {"attributes": {"_ARRAY_DIMENSIONS": list(names)}}
    stored = image if plain else image.astype(">u2")
    zarr.create_array(tmp_path / "image.zarr", data=stored, zarr_format=zarr_format, **named)
    expected = to_tczyx(image, "".join(name[0].upper() for name in names), "")
    source = open_images(tmp_path / "image.zarr")
    assert all_same(source.take([0, 0]), [expected, expected])
    assert windows_are_cut(source, [expected])


@pytest.mark.parametrize("names", [("t", "c", "angle", "y", "x"), "tcyyx", (None, "c", "z", "y", "x")], ids=str)
def test_a_zarr_array_whose_dimensions_have_other_names_is_refused(tmp_path, names):
    needs("ome_zarr")
    import zarr

    zarr.create_array(tmp_path / "image.zarr", data=image_of((2, 3, 4, 5, 6)), dimension_names=names)
    with raises(FormatError, option="axes", path=tmp_path / "image.zarr", remedy=False):
        open_images(tmp_path / "image.zarr")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("version", "zarr_format"), [("0.4", 2), ("0.5", 3)])
def test_ngff_levels_are_listed_from_the_finest_on(tmp_path, version, zarr_format, fast):
    needs("ome_zarr")
    import zarr

    def write(name, *levels):
        listed = [
            {"path": path} | ({"coordinateTransformations": [{"type": "scale", "scale": scale}]} if scale else {})
            for path, scale in levels
        ]
        multiscales = {"multiscales": [{"axes": [{"name": "y"}, {"name": "x"}], "datasets": listed}]}
        attributes = multiscales if version == "0.4" else {"ome": {"version": version, **multiscales}}
        group = zarr.create_group(tmp_path / name / "image.zarr", zarr_format=zarr_format, attributes=attributes)
        group.create_array("full", data=image)
        group.create_array("half", data=image[::2, ::2])
        if not fast:
            zarr.consolidate_metadata(tmp_path / name / "image.zarr", zarr_format=zarr_format)
        return tmp_path / name

    image = image_of((4, 6))
    for wrong in ([0.5, 0.5], [0.25, 0.5], [1, 0.2]):
        path = write(f"wrong{wrong}", ("half", wrong), ("full", [0.25, 0.25]))
        with raises(FormatError, path=path / "image.zarr", mentions=("'half'", "'full'", "finer")):
            open_images(path)
    for levels in ([("full", [1, 1]), ("half", [1, 1])], [("full", None), ("half", [0.5, 0.5])]):  # no usable scales
        assert same(open_images(write(f"{levels}", *levels)).read(0)[0, 0, 0], image)


def test_a_zarr_array_of_unknown_axes_is_refused(tmp_path):
    needs("ome_zarr")
    import zarr

    zarr.create_array(tmp_path / "image.zarr", data=image_of((2, 4, 5)))
    with raises(FormatError, path=tmp_path / "image.zarr", mentions="3-D"):
        open_images(tmp_path / "image.zarr")


def table_of(images, name="picture", encoding="bytes"):
    records = [
        record_of(image, whole_chunks(image, encoding), [], id=f"id {number}") for number, image in enumerate(images)
    ]
    struct = BYTES if encoding == "bytes" else ome_arrow.meta.OME_ARROW_STRUCT
    count = len(images)
    return pa.table(
        {
            "before": range(count),
            name: pa.array(records, struct),
            "nested": [{"a": number} for number in range(count)],
            "after": ["x"] * count,
        }
    )


def check(source, images):
    assert list(source.image_ids) == [f"id {number}" for number in range(len(images))]
    assert source.columns.column_names == ["before", "nested", "after"]
    assert source.columns["nested"].to_pylist() == [{"a": number} for number in range(len(images))]
    order = [len(images) - 1, 0, 3, 3, -2]
    assert all_same(source.take(order), [images[index] for index in order])
    assert all_same([image for _, part in source.images.stream() for image in part], images)


@pytest.mark.parametrize("encoding", ["bytes", "list"])
@pytest.mark.parametrize("reader", ["parquet", "parquet_duck"])
@pytest.mark.parametrize(
    "options",
    [
        {"row_group_size": 3},
        {"row_group_size": 1, "compression": "zstd"},
        {"data_page_size": 64, "use_dictionary": True},
        {"version": "1.0", "store_schema": False},
    ],
    ids=str,
)
def test_parquet_of_others(tmp_path, encoding, reader, options):
    needs(reader)
    images = images_of([((1, 2, 1, 3, 4), "uint16")] * 8)
    pq.write_table(table_of(images, encoding=encoding), tmp_path / "it's.parquet", **options)
    check(open_images(tmp_path / "it's.parquet", reader), images)


@pytest.mark.parametrize("encoding", ["bytes", "list"])
@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
def test_arrow_files_of_others(tmp_path, encoding, compression):
    images = images_of([((1, 2, 1, 3, 4), "uint16")] * 8)
    table = table_of(images, 'a "name"; µ.x', encoding)
    feather.write_feather(table, tmp_path / "images.feather", compression=compression or "uncompressed", chunksize=3)
    check(open_images(tmp_path / "images.feather"), images)


def test_a_stream_is_no_file(tmp_path):
    table = table_of(images_of([((1, 1, 1, 2, 2), "uint8")] * 4))
    with pa.ipc.new_stream(tmp_path / "images.arrow", table.schema) as writer:
        writer.write_table(table)
    with raises(FormatError, path=tmp_path / "images.arrow", remedy=False):
        open_images(tmp_path / "images.arrow")


def test_lance_of_others_after_a_deletion_and_an_append(tmp_path):
    needs("lance")
    import lance

    images = images_of([((1, 2, 1, 3, 4), "uint16")] * 8)
    table = table_of(images)
    lance.write_dataset(table.take([0, 1, 2, 3, 4]), str(tmp_path / "data"))
    dataset = lance.write_dataset(table.take([0, 5, 6, 7]), str(tmp_path / "data"), mode="append")
    check_rows = dataset.to_table(columns=["before"])["before"].to_pylist()
    assert check_rows == [0, 1, 2, 3, 4, 0, 5, 6, 7]
    dataset.delete("before = 0")
    source = open_images(tmp_path / "data")
    assert source.columns["before"].to_pylist() == list(range(1, 8))
    assert all_same(source.take([0, 6, 4]), [images[1], images[7], images[5]])
    assert all_same([image for _, part in source.images.stream() for image in part], images[1:])


def test_vortex_of_others(tmp_path):
    needs("vortex")
    import vortex.io

    images = images_of([((1, 2, 1, 3, 4), "uint16")] * 8)
    vortex.io.write(table_of(images, 'a "name"; µ'), str(tmp_path / "images.vortex"))
    check(open_images(tmp_path / "images.vortex"), images)


@pytest.mark.parametrize("relation", ["pictures", '"odd ""name""; DROP TABLE x; -- µ"', '"my schema"."select"'])
def test_duckdb_of_others(tmp_path, relation):
    needs("duckdb")
    import duckdb

    images = images_of([((1, 2, 1, 3, 4), "uint16")] * 8)
    with duckdb.connect(tmp_path / "it's a µ.db") as connection:
        incoming = table_of([images[0], *images], 'a "name"; µ')
        connection.register("incoming", incoming)
        connection.execute('CREATE SCHEMA "my schema"')
        connection.execute(f"CREATE TABLE {relation} AS FROM incoming")
        connection.execute(f"DELETE FROM {relation} WHERE before = 0")
        connection.execute("CREATE TABLE notes AS SELECT 1 AS number")
        connection.execute("CREATE VIEW nothing AS SELECT 1 AS number")
    source = open_images(tmp_path / "it's a µ.db", "duckdb")
    assert source.columns["before"].to_pylist() == list(range(1, 9))
    assert all_same(source.take([7, 0, 0]), [images[7], images[0], images[0]])
    assert all_same([image for _, part in source.images.stream() for image in part], images)


@pytest.mark.parametrize("page", range(3))
def test_an_ome_tiff_that_lost_planes_is_refused(tmp_path, page):
    """tifffile returns zeros for planes that the chain of pages does not reach."""
    path = tmp_path / "image.ome.tif"
    pixels = np.arange(1, 4 * 8 * 9 + 1, dtype=np.uint16).reshape(4, 8, 9)
    tifffile.imwrite(path, pixels, ome=True, metadata={"axes": "CYX"}, photometric="minisblack")
    assert np.array_equal(open_images(tmp_path).read(0)[0, :, 0], pixels)
    with tifffile.TiffFile(path) as tif:
        start, entry = tif.pages[page].offset, tif.pages[page + 1].offset
    data = path.read_bytes()
    link = data.index(entry.to_bytes(4, "little"), start)
    path.write_bytes(data[:link] + bytes(4) + data[link + 4 :])
    with raises(FormatError, path="image.ome.tif", mentions=[(1, 4, 1, 8, 9), f"{page + 1} page{'s' * (page > 0)}"]):
        open_images(tmp_path).read(0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(3, "name")
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


OME_XML = (
    '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0" '
    'DimensionOrder="XYCZT" Type="uint16" SizeX="8" SizeY="8" SizeZ="3" SizeC="4" SizeT="1">{}</Pixels></Image></OME>'
)


def write_planes(path, planes, odd, options, xml):
    """Write planes one by one; plane ``odd`` gets other options."""
    with tifffile.TiffWriter(path, ome=False) as writer:
        for number, plane in enumerate(planes):
            description = xml if number == 0 else None
            others = options if number == odd else {}
            writer.write(
                plane, photometric="minisblack", metadata=None, contiguous=False, description=description, **others
            )


@pytest.mark.parametrize("options", [{"compression": "lzw"}, {"tile": (16, 16)}], ids=str)
@pytest.mark.parametrize("odd", range(1, 12))
@pytest.mark.parametrize("xml", [None, OME_XML.format("<TiffData/>")], ids=["plain", "ome"])
@pytest.mark.share(4, "options", "odd", "xml")
def test_planes_that_are_stored_in_several_ways_are_no_image(tmp_path, options, odd, xml):
    """tifffile reads all of them like the first one, so compressed bytes would be returned as pixels."""
    planes = image_of((12, 8, 8))
    write_planes(tmp_path / "a.tif", planes, odd, options, xml)
    with raises(FormatError, path=tmp_path / "a.tif"):
        open_images(tmp_path)
    write_planes(tmp_path / "a.tif", planes, odd, {}, xml)
    expected = planes.reshape(1, 1, 12, 8, 8) if xml is None else planes.reshape(1, 3, 4, 8, 8).swapaxes(1, 2)
    assert same(open_images(tmp_path).read(0), expected)


@pytest.mark.parametrize("planes", ["", "<MetadataOnly/>"])
def test_an_ome_tiff_without_tiff_data_is_refused(tmp_path, planes):
    write_planes(tmp_path / "a.tif", image_of((12, 8, 8)), None, {}, OME_XML.format(planes))
    with raises(FormatError, path="a.tif", mentions=[(1, 4, 3, 8, 8), "12 pages"]):
        open_images(tmp_path)
