"""Scales of OME-Zarr images, as lists and as paths to arrays or files; zarr writes the images."""

from __future__ import annotations

import numpy as np
import pytest

from omearrow_ds import FormatError, OMEArrowDataset, Storage, convert, open_images
from tests.conftest import needs
from tests.support.errors import raises
from tests.support.objects import serving

needs("ome_zarr")

import zarr  # noqa: E402

PIXELS = np.arange(2 * 12, dtype=np.uint16).reshape(2, 3, 4)
AXES = [
    {"name": "c", "type": "channel"},
    *({"name": name, "type": "space", "unit": "micrometer"} for name in "yx"),
]
SCALE = [1.0, 0.5, 0.25]
KEY = "coordinateTransformations"


@pytest.fixture(params=["0.4", "0.5"])
def version(request):
    return request.param


def write(path, version, transforms, *, of_all=None, levels=1):
    """Write an image whose levels have these transforms, and return its group."""
    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
    datasets = []
    for level in range(levels):
        pixels = PIXELS[:, :: 2**level, :: 2**level]
        group.create_array(str(level), shape=pixels.shape, chunks=pixels.shape, dtype=pixels.dtype)[...] = pixels
        datasets.append({"path": str(level), KEY: transforms[level] if levels > 1 else transforms})
    multiscale = {"axes": AXES, "datasets": datasets} | ({} if of_all is None else {KEY: of_all})
    if version == "0.4":
        group.attrs["multiscales"] = [{"version": "0.4", **multiscale}]
    else:
        group.attrs["ome"] = {"version": "0.5", "multiscales": [multiscale]}
    return group


def sizes(source, index=0):
    metadata = source.metadata(index)
    return [metadata[f"physical_size_{axis}"] for axis in "yx"]


def store(group, path, kind, values=SCALE):
    """Store a scale below a group, as a zarr array or as the bytes of a file."""
    if kind == "array":
        group.create_array(path, shape=(len(values),), dtype="f8")[...] = values
    else:
        file = group.store.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(np.array(values, kind).tobytes())


@pytest.mark.parametrize("kind", ["array", "<f8", "<f4"])
@pytest.mark.parametrize("path", ["scale", "transforms/s0"])
@pytest.mark.share(2, "kind", "path")
def test_a_scale_given_by_a_path_is_read(tmp_path, version, kind, path):
    store(write(tmp_path / "a.zarr", version, [{"type": "scale", "path": path}]), path, kind)
    with open_images(tmp_path / "a.zarr") as source:
        assert sizes(source) == SCALE[1:]
        assert np.array_equal(source.read(0)[0, :, 0], PIXELS)
    convert(tmp_path / "a.zarr", tmp_path / "a.parquet")
    with open_images(tmp_path / "a.parquet") as source:
        assert sizes(source) == SCALE[1:]


def test_scales_of_levels_given_by_paths_are_compared_and_chosen(tmp_path, version):
    transforms = [[{"type": "scale", "path": f"s{level}"}] for level in range(2)]
    group = write(tmp_path / "a.zarr", version, transforms, levels=2)
    store(group, "s0", "array")
    store(group, "s1", "<f4", [1.0, 1.0, 0.5])
    with open_images(tmp_path / "a.zarr", level=1) as source:
        assert sizes(source) == [1.0, 0.5]
        assert np.array_equal(source.read(0)[0, :, 0], PIXELS[:, ::2, ::2])
    store(group, "s1", "<f4", [1.0, 0.1, 0.1])
    with raises(FormatError, path="a.zarr", mentions="finer"):
        open_images(tmp_path / "a.zarr")


@pytest.mark.parametrize("of_all", [{"scale": [1.0, 2.0, 3.0]}, {"path": "all"}], ids=["list", "path"])
def test_a_scale_of_all_levels_multiplies_that_of_a_level(tmp_path, version, of_all):
    transforms = [{"type": "scale", "scale": SCALE}, {"type": "translation", "path": "unused"}]
    group = write(tmp_path / "a.zarr", version, transforms, of_all=[{"type": "scale", **of_all}])
    store(group, "all", "array", [1.0, 2.0, 3.0])
    with open_images(tmp_path / "a.zarr") as source:
        assert sizes(source) == [1.0, 0.75]


def test_label_images_with_scales_given_by_paths_are_masks(tmp_path, version):
    group = write(tmp_path / "a.zarr", version, [{"type": "scale", "path": "scale"}])
    store(group, "scale", "<f8")
    nuclei = write(tmp_path / "a.zarr" / "labels" / "nuclei", version, [{"type": "scale", "path": "scale"}])
    store(nuclei, "scale", "<f8")
    dataset = OMEArrowDataset(tmp_path / "a.zarr", masks="labels/nuclei", axes="CYX", preload=False)
    assert np.array_equal(dataset[0][1].numpy(), PIXELS)


@pytest.mark.parametrize("kind", ["array", "<f4"])
def test_a_scale_given_by_a_path_is_read_from_a_bucket(tmp_path, version, kind):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
    (tmp_path / "served" / "lab").mkdir(parents=True)
    path = tmp_path / "served" / "lab" / "a.zarr"
    store(write(path, version, [{"type": "scale", "path": "scale"}]), "scale", kind)
    with serving(tmp_path / "served") as server:
        storage = Storage(anonymous=True, endpoint=server.url, region="us-east-1")
        with open_images("s3://lab/a.zarr", storage=storage) as source:
            assert sizes(source) == SCALE[1:]
            assert np.array_equal(source.read(0)[0, :, 0], PIXELS)


PLACE = f"multiscales[0].datasets[0].{KEY}"
MALFORMED = {
    "no list": ({"type": "scale", "scale": SCALE}, PLACE),
    "texts": (["scale"], PLACE),
    "neither": ([{"type": "scale"}], f"{PLACE}[0].scale"),
    "too short": ([{"type": "scale", "scale": [1.0, 2.0]}], f"{PLACE}[0].scale"),
    "text": ([{"type": "identity"}, {"type": "scale", "scale": ["1", "2", "3"]}], f"{PLACE}[1].scale"),
    "number": ([{"type": "scale", "scale": 0.5}], f"{PLACE}[0].scale"),
    "missing file": ([{"type": "scale", "path": "gone"}], f"{PLACE}[0].path"),
    "outside": ([{"type": "scale", "path": "../other"}], f"{PLACE}[0].path"),
    "absolute": ([{"type": "scale", "path": "/etc/hostname"}], f"{PLACE}[0].path"),
    "odd path": ([{"type": "scale", "path": 3}], f"{PLACE}[0].path"),
    "odd bytes": ([{"type": "scale", "path": "odd"}], f"{PLACE}[0].path"),
    "image": ([{"type": "scale", "path": "0"}], f"{PLACE}[0].path"),
    "group": ([{"type": "scale", "path": "group"}], f"{PLACE}[0].path"),
}


@pytest.mark.parametrize(("transforms", "key"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_transform_is_an_error_that_names_its_key(tmp_path, version, transforms, key):
    group = write(tmp_path / "a.zarr", version, transforms)
    group.create_group("group")
    (tmp_path / "a.zarr" / "odd").write_bytes(b"0.5")
    with raises(FormatError, path="a.zarr", mentions=key), open_images(tmp_path / "a.zarr") as source:
        source.metadata(0)


def test_a_scale_behind_a_symbolic_link_is_an_error(tmp_path, version):
    write(tmp_path / "a.zarr", version, [{"type": "scale", "path": "scale"}])
    (tmp_path / "secret").write_bytes(np.array(SCALE).tobytes())
    (tmp_path / "a.zarr" / "scale").symlink_to(tmp_path / "secret")
    with raises(FormatError, path="a.zarr/scale"):
        open_images(tmp_path / "a.zarr")
