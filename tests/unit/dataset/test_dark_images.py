"""12-bit pixels in uint16 images: the warning of preloading, and the report of `info`, `show` and `recommend`."""

from __future__ import annotations

import json
import multiprocessing
import warnings

import numpy as np
import pytest
import tifffile
import torch
from click.testing import CliRunner

from omearrow_ds import OMEArrowDataset, OMEArrowDatasetNumpy, recommend, show, write_images
from omearrow_ds.cli import main
from omearrow_ds.dataset.normalization import HAS_WARNED
from omearrow_ds.storage.formats._pictures import PixelRange
from tests.support.errors import warns

SUGGESTED = {"low": 0, "high": 4095}
REMEDY = 'normalize={"low": 0, "high": 4095}'


@pytest.fixture(autouse=True)
def _first_time(monkeypatch):
    """Reset the once-per-process warning; without a launcher this process is rank 0."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    HAS_WARNED.clear()
    yield
    HAS_WARNED.set()


def written(folder, largest, dtype="uint16", name="images.arrow"):
    """Write three images with the maximum in the last pixel of the last image, and return the path."""
    images = [np.full((6, 8), largest // 2, dtype) for _ in range(3)]
    images[-1][-1, -1] = largest
    write_images(images, folder / name)
    return folder / name


def tiff_folder(folder, largest):
    folder.mkdir()
    for number in range(3):
        pixels = np.full((6, 8), 1, np.uint16)
        pixels[5, 7] = largest - number
        tifffile.imwrite(folder / f"{number}.tif", pixels)
    return folder


def run(*words):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def preload(path):
    """Preload in another process with warnings as errors."""
    warnings.simplefilter("error")
    return len(OMEArrowDataset(path, axes="YX"))


class PreloadingDataset(torch.utils.data.Dataset):
    """A user's dataset that preloads images."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return preload(self.path)


class TestPreloading:
    @pytest.mark.parametrize("options", [{}, {"preload": "auto"}, {"crop": "grid", "crop_size": (3, 4)}], ids=str)
    @pytest.mark.parametrize("largest", [1, 255, 4095])
    def test_preloading_warns_when_pixels_have_12_bits(self, tmp_path, largest, options):
        path = written(tmp_path, largest)
        with warns(UserWarning, path=path, mentions=(f"{largest:,}", "3 uint16 images", REMEDY)) as caught:
            OMEArrowDataset(path, axes="YX", **options)
        assert len(caught) == 1

    @pytest.mark.parametrize(
        ("largest", "dtype", "options"),
        [
            pytest.param(4096, "uint16", {}, id="13 bits"),
            pytest.param(0, "uint16", {}, id="black"),
            pytest.param(255, "uint8", {}, id="uint8"),
            pytest.param(4000, "int16", {}, id="int16"),
            pytest.param(4000, "uint32", {}, id="uint32"),
            pytest.param(4000, "float32", {}, id="float32"),
            pytest.param(4000, "uint16", {"preload": False}, id="on demand"),
            pytest.param(4000, "uint16", {"preload": "auto", "max_bytes": 10}, id="too large to preload"),
            pytest.param(4000, "uint16", {"normalize": False}, id="not scaled"),
            pytest.param(4000, "uint16", {"normalize": SUGGESTED}, id="as suggested"),
            pytest.param(4000, "uint16", {"normalize": {"mean": 10, "std": 3}}, id="mean and std"),
        ],
    )
    def test_dataset_does_not_warn_when_pixels_are_not_dark(self, tmp_path, largest, dtype, options):
        assert len(OMEArrowDataset(written(tmp_path, largest, dtype), axes="YX", **options)) == 3
        assert not HAS_WARNED.is_set()

    def test_masks_do_not_warn(self, tmp_path):
        images, masks = written(tmp_path, 60_000), written(tmp_path, 7, name="masks.arrow")
        OMEArrowDatasetNumpy(images, masks=masks, axes="YX")
        assert not HAS_WARNED.is_set()

    def test_first_64_images_decide(self, tmp_path):
        images = [np.full((4, 4), 4000, np.uint16) for _ in range(66)]
        images[63][2, 3] = 5000
        write_images(images, tmp_path / "bright.arrow")
        OMEArrowDataset(tmp_path / "bright.arrow", axes="YX")
        images[63], images[64] = images[64], images[63]
        write_images(images, tmp_path / "dark.arrow")
        with warns(UserWarning, path=tmp_path / "dark.arrow", mentions="64 uint16 images"):
            OMEArrowDataset(tmp_path / "dark.arrow", axes="YX")

    def test_images_of_other_dtypes_are_not_counted(self, tmp_path):
        for dtype, name in (("uint8", "a.tif"), ("uint16", "b.tif"), ("float32", "c.tif")):
            tifffile.imwrite(tmp_path / name, np.full((4, 4), 200, dtype))
        with warns(UserWarning, path=tmp_path, mentions=("200", "1 uint16 image")):
            OMEArrowDataset(tmp_path, axes="YX")

    def test_suggested_scaling_uses_the_whole_range(self, tmp_path):
        pixels = np.arange(4096, dtype=np.uint16).reshape(64, 64)
        write_images([pixels], tmp_path / "images.arrow")
        sample = OMEArrowDatasetNumpy(tmp_path / "images.arrow", axes="YX", normalize=SUGGESTED)[0]
        np.testing.assert_array_equal(sample, pixels.astype(np.float32) / np.float32(4095))


class TestProcesses:
    def test_process_warns_once(self, tmp_path):
        paths = [written(tmp_path, 4000, name=name) for name in ("a.arrow", "b.arrow")]
        with warns(UserWarning, path=paths[0]) as caught:
            for path in (*paths, *paths):
                OMEArrowDataset(path, axes="YX")
        assert len(caught) == 1

    @pytest.mark.parametrize("environment", [{"RANK": "0", "LOCAL_RANK": "0"}, {"SLURM_PROCID": "0"}, {"RANK": ""}])
    def test_rank_0_warns(self, tmp_path, monkeypatch, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with warns(UserWarning, mentions=REMEDY):
            OMEArrowDataset(written(tmp_path, 4000), axes="YX")

    @pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
    def test_other_ranks_do_not_warn(self, tmp_path, monkeypatch, name):
        monkeypatch.setenv(name, "3")
        OMEArrowDataset(written(tmp_path, 4000), axes="YX")
        assert not HAS_WARNED.is_set()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_rank_of_the_process_group_decides_when_initialized(self, tmp_path, monkeypatch, rank):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        path = written(tmp_path, 4000)
        with warnings.catch_warnings(record=True, action="always") as caught:
            OMEArrowDataset(path, axes="YX")
        assert len(caught) == 1 - rank

    def test_workers_do_not_warn(self, tmp_path):
        dataset = PreloadingDataset(written(tmp_path, 4000))
        loader = torch.utils.data.DataLoader(dataset, num_workers=1, multiprocessing_context="forkserver")
        assert [batch.item() for batch in loader] == [3]

    def test_pool_does_not_warn(self, tmp_path):
        with multiprocessing.get_context("forkserver").Pool(1) as pool:
            assert pool.map(preload, [written(tmp_path, 4000)]) == [3]


class TestReports:
    @pytest.mark.parametrize(("largest", "normalize"), [(4095, SUGGESTED), (4096, None), (70, SUGGESTED)])
    def test_info_reports_the_largest_value(self, tmp_path, largest, normalize):
        path = tiff_folder(tmp_path / "plate", largest)
        expected = {"largest": largest, "images": 3, "normalize": normalize}
        assert json.loads(run("info", path, "--json"))["pixel_range"] == expected
        line = next(line for line in run("info", path).splitlines() if line.startswith("pixels"))
        assert f"largest value {largest:,} in 3 uint16 images" in line
        assert (REMEDY in line) == (normalize is not None)

    def test_info_reads_64_images_spread_over_the_collection(self, tmp_path):
        write_images([np.full((4, 4), 9 + number, np.uint16) for number in range(200)], tmp_path / "images.arrow")
        expected = {"largest": 208, "images": 64, "normalize": SUGGESTED}
        assert json.loads(run("info", tmp_path / "images.arrow", "--json"))["pixel_range"] == expected

    @pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
    def test_info_has_no_pixel_range_when_images_are_not_uint16(self, tmp_path, dtype):
        assert json.loads(run("info", written(tmp_path, 9, dtype), "--json"))["pixel_range"] is None

    def test_info_describes_a_folder_when_an_image_cannot_be_decoded(self, tmp_path):
        path = tiff_folder(tmp_path / "plate", 4000)
        tifffile.imwrite(path / "1.tif", np.zeros((6, 8), np.uint16), compression="zlib")
        stored = (path / "1.tif").read_bytes()
        (path / "1.tif").write_bytes(stored[:-4] + b"\xff" * 4)
        description = json.loads(run("info", path, "--json"))
        assert (description["images"], description["pixel_range"]) == (3, None)

    @pytest.mark.parametrize(("largest", "normalize"), [(4000, SUGGESTED), (5000, None)])
    def test_show_reports_the_largest_value(self, tmp_path, largest, normalize):
        pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'omearrow-ds[show]'")
        path = tiff_folder(tmp_path / "plate", largest)
        assert show(path).pixel_range == PixelRange(largest, 3)
        report = json.loads(run("show", path, "--out", tmp_path / "a.png", "--json"))
        assert report["pixel_range"] == {"largest": largest, "images": 3, "normalize": normalize}
        assert (REMEDY in run("show", path, "--out", tmp_path / "b.png")) == (normalize is not None)

    @pytest.mark.parametrize(("largest", "normalize"), [(4000, SUGGESTED), (5000, None)])
    def test_recommend_reports_the_largest_value(self, tmp_path, largest, normalize):
        advice = recommend(tiff_folder(tmp_path / "plate", largest), seconds=0.5, formats=["arrow"])
        assert advice.as_dict()["pixel_range"] == {"largest": largest, "images": 3, "normalize": normalize}
        assert any(f"largest value {largest:,} in 3 uint16 images" in note for note in advice.notes)
        assert (f"normalize={SUGGESTED!r}" in advice.python) == (normalize is not None)
