"""Regions of TIFF files for any combination of tags; the oracle is tifffile."""

from __future__ import annotations

from itertools import product

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds import FormatError, OMEArrowDatasetNumpy, Storage, open_images
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.strategies import DTYPES
from tests.support.tiff_files import ENCODERS, planes_of, write_raw

NUMBERS = [(1, 1), (4, 1), (8, 1), (8, 2), (12, 1), (16, 1), (16, 2), (16, 3), (24, 3), (32, 1), (32, 2), (32, 3)]
NUMBERS += [(64, 1), (64, 3)]  # Bits per sample and sample format (unsigned, signed, floating).
PARTS = [{}, {"rows_per_strip": 8}, {"rows_per_strip": 8, "gap_bytes": 6}, {"tile": (16, 16)}, {"tile": (32, 48)}]


def layout_of(pages):
    """Return tifffile's pixels as (T, C, Z, Y, X); samples are channels."""
    with tifffile.TiffFile(pages) as tif:
        (page,), image = tif.pages, tif.series[0].asarray()
        is_last = page.samplesperpixel > 1 and page.planarconfig == 1
        return np.ascontiguousarray(np.moveaxis(image, -1, 0) if is_last else image).reshape(
            1, page.samplesperpixel, 1, page.imagelength, page.imagewidth
        )


def is_equal(image, expected):
    """Whether two arrays are equal bit for bit, as pixels may be NaN."""
    return image.dtype == expected.dtype and image.shape == expected.shape and image.tobytes() == expected.tobytes()


def check_readings(folder, box):
    """Compare each way to read the only file of a folder with tifffile, or expect an error from each."""
    y0, y1, x0, x1 = box
    try:
        expected = layout_of(folder / "a.tif")
    except Exception:  # noqa: BLE001  # Any error of the oracle: the file cannot be decoded.
        expected = None
    if expected is None or expected.dtype not in DTYPES:
        for region in (box, None):
            with raises(FormatError, remedy=False, mentions=folder):
                open_images(folder).read(0, region=region)
        return
    crop = np.ascontiguousarray(expected[..., y0:y1, x0:x1])
    with open_images(folder) as source:
        assert is_equal(source.read(0, region=box), crop)
        assert is_equal(source.read(0), expected)
        assert is_equal(source.read(0, region=box), crop)
    options = {"axes": "CYX", "normalize": False, "crop": "grid", "crop_size": (y1 - y0, x1 - x0)}
    samples = [OMEArrowDatasetNumpy(folder, preload=preload, **options)[0] for preload in (True, False)]
    assert is_equal(*samples)
    assert is_equal(samples[0], np.ascontiguousarray(expected[0, :, 0, : y1 - y0, : x1 - x0]))


@st.composite
def raw_files(draw):
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    bits, sample_format = draw(st.sampled_from(NUMBERS))
    samples, planar = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (3, 2)]))
    y0, x0 = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    box = y0, draw(st.integers(y0 + 1, height)), x0, draw(st.integers(x0 + 1, width))
    options = {
        "byteorder": draw(st.sampled_from("<>")),
        "bits": bits,
        "sample_format": sample_format,
        "samples": samples,
        "planar": planar,
        "compression": draw(st.sampled_from(sorted(ENCODERS))),
        "predictor": draw(st.sampled_from([1, 2, 3])),
        "fill_order": draw(st.sampled_from([1, 2])),
        "seed": draw(st.integers(0, 9)),
        **draw(st.sampled_from(PARTS)),
    }
    return (height, width), options, box


@settings(deadline=None, max_examples=150)
@given(raw_files())
def test_a_region_is_a_part_of_the_image_that_tifffile_reads(tmp_path_factory, drawn):
    side, options, box = drawn
    folder = tmp_path_factory.mktemp("raw")
    write_raw(folder / "a.tif", side, **options)
    check_readings(folder, box)


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize(("byteorder", "predictor"), [*product("<>", (2, 3))])
@pytest.mark.parametrize("numbers", [(8, 1), (16, 1), (32, 2), (32, 3), (64, 3)], ids=str)
@pytest.mark.share(6, "parts", "byteorder", "numbers")
def test_a_region_is_a_part_of_the_image_when_a_predictor_has_no_compression(
    tmp_path, parts, byteorder, predictor, numbers
):
    bits, sample_format = numbers
    options = {"byteorder": byteorder, "predictor": predictor, "bits": bits, "sample_format": sample_format}
    write_raw(tmp_path / "a.tif", (21, 34), **options, **parts)
    check_readings(tmp_path, (3, 19, 5, 33))


@pytest.mark.parametrize("compression", ["jpeg", "jpeg2000", "jpegxl", "png", "webp", "lerc", "jpegxr"])
@pytest.mark.parametrize("options", [{}, {"tile": (16, 32)}, {"rowsperstrip": 16}], ids=str)
@pytest.mark.share(3, "compression", "options")
def test_a_region_is_a_part_of_the_image_when_the_codec_is_one_of_images(tmp_path, compression, options):
    image = planes_of(1, (48, 64))[0].astype(np.uint8)
    if compression == "webp":
        image = np.stack([image] * 3, -1)
    try:
        tifffile.imwrite(tmp_path / "a.tif", image, compression=compression, metadata=None, **options)
    except (imagecodecs.DelayedImportError, ValueError, RuntimeError) as error:
        pytest.skip(f"imagecodecs has no {compression} here: {error}")
    check_readings(tmp_path, (3, 40, 17, 61))


RARE_TAGS = {
    "white is zero": {262: (0,)},
    "palette": {262: (3,), 320: [*range(3 * 256)]},
    "rotated": {274: (6,)},
    "no data": {42113: b"7\0"},
    "sub-sampled luminance": {262: (6,), 530: (2, 2)},
    "volume": {32997: (1,)},
    "Molecular Dynamics, square root": {33445: (2,), 33446: (1, 1)},
}


@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("more_tags", RARE_TAGS.values(), ids=RARE_TAGS)
def test_a_region_is_a_part_of_the_image_when_it_has_rare_tags(tmp_path, compression, more_tags):
    write_raw(tmp_path / "a.tif", (21, 34), bits=8, compression=compression, rows_per_strip=8, more_tags=more_tags)
    check_readings(tmp_path, (3, 19, 5, 33))


@pytest.mark.parametrize(("predictor", "fill_order"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize(("compression", "parts"), [*product([1, 8], PARTS)], ids=str)
@pytest.mark.share(4, "predictor", "fill_order", "compression", "parts")
def test_a_region_of_a_url_is_a_part_of_the_image(tmp_path, predictor, fill_order, compression, parts):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    (tmp_path / "lab").mkdir()
    options = {"bits": 32, "sample_format": 3, "predictor": predictor, "fill_order": fill_order}
    write_raw(tmp_path / "lab/a.tif", (21, 34), compression=compression, **options, **parts)
    expected = layout_of(tmp_path / "lab/a.tif")
    with serving(tmp_path) as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with open_images("s3://lab/a.tif", storage=storage) as source:
            region = source.read(0, region=(3, 19, 5, 33))
            assert is_equal(region, np.ascontiguousarray(expected[..., 3:19, 5:33]))
            assert is_equal(source.read(0), expected)
