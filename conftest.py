"""Options and session fixtures that tests/ and benchmarks/ share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the workload's options."""
    group = parser.getgroup("omearrow-ds workload", "omearrow-ds workload (pytest benchmarks/)")
    group.addoption(
        "--num-images",
        type=_positive,
        metavar="N",
        help="number of images; default: the workload's, with --images all",
    )
    group.addoption(
        "--image-shape",
        type=_shape,
        metavar="SHAPE",
        help="shape of a synthetic image: YxX, CxYxX or TxCxZxYxX; default: the workload's",
    )
    group.addoption(
        "--workload",
        default="cells-8bit",
        metavar="NAME",
        help="synthetic images: cells-8bit, -12bit, -16bit or -uint8 (1000 of 100 x 100), fields (8 of 5 x 1080 x "
        "1080), stack (40 of 2 x 16 x 256 x 256) or masks (200 label images of 512 x 512); default: %(default)s",
    )
    group.addoption(
        "--seed", type=_seed, default=42, metavar="N", help="seed of images and orders; default: %(default)s"
    )
    group.addoption(
        "--profile",
        choices=("quick", "full"),
        default="quick",
        help="quick: within 3 minutes on 2 cores, DataLoader workers 0 and 2, workers with batch 16 alone; "
        "full: the whole grid, more rounds, within 20 minutes; default: %(default)s",
    )
    group.addoption(
        "--formats",
        type=_names,
        metavar="NAME,...",
        help="storage formats to measure; default: all",
    )
    group.addoption(
        "--images",
        type=Path,
        metavar="DIR",
        help="measure on the TIFF files of this folder instead of synthetic images",
    )
    group.addoption(
        "--tile",
        type=_positive,
        metavar="N",
        help="cut the --images into single-channel tiles of N x N pixels; default: whole images",
    )
    group.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the model runs; cuda also measures copies to the device; default: %(default)s",
    )
    group.addoption(
        "--model",
        metavar="MODULE:NAME",
        help="model of track 3: a callable that takes the shape of a sample and returns a torch.nn.Module",
    )
    group.addoption(
        "--transform",
        metavar="MODULE:NAME",
        help="transform of track 1's augmented samples: a callable on the image; default: a flip and quarter turns",
    )
    group.addoption(
        "--batch-sizes",
        type=_several(1),
        metavar="N,...",
        help="batch sizes of track 2; default: 1,4,16, of which the quick profile gives workers the last alone",
    )
    group.addoption(
        "--workers",
        type=_several(0),
        metavar="N,...",
        help="workers of track 2; default: 0,2,4, in the quick profile 0,2",
    )
    group.addoption(
        "--steps", type=_positive, default=50, metavar="N", help="steps of track 3's loop; default: %(default)s"
    )
    group.addoption(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder for tables, summary and figures; default: %(default)s",
    )
    group.addoption(
        "--data",
        type=Path,
        default=ROOT / ".cache" / "benchmarks",
        metavar="DIR",
        help="folder where generated data is kept for the next run; default: .cache/benchmarks",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that cannot be met, before anything is collected."""
    folder, tile = config.getoption("images"), config.getoption("tile")
    if tile is not None and folder is None:
        raise pytest.UsageError("--tile cuts the TIFF files of --images DIR; pass both, or neither")
    if folder is not None and config.getoption("workload") != "cells-8bit":
        raise pytest.UsageError("--workload names synthetic images, --images gives your own; pass one of them")
    if folder is not None and not any(path.suffix.lower() in (".tif", ".tiff") for path in _entries(folder)):
        raise pytest.UsageError(f"--images {folder}: no TIFF file (.tif, .tiff) in this folder")
    _check_formats(config.getoption("formats"))
    _refuse_comparison_of_nothing(config)
    if config.getoption("device") == "cuda":
        import torch  # noqa: PLC0415  # takes seconds, so only where it is asked for

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch finds no CUDA device here; pass --device cpu")


@pytest.fixture(scope="session")
def nf1_folder() -> Path:
    """Folder of the 15 NF1 fields; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared" / "data" / "nf1"
    if not folder.is_dir():
        pytest.skip(f"the NF1 fields are not at {folder}")
    return folder


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise pytest.UsageError(f"--images {folder}: no such folder")
    return list(folder.iterdir())


def _check_formats(wanted: list[str] | None) -> None:
    if wanted is None:
        return
    from benchmarks.support.library import formats  # noqa: PLC0415  # imports torch, so only where it is needed

    known = [fmt.name for fmt in formats()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise pytest.UsageError(f"--formats: unknown {', '.join(unknown) or 'and empty'}; known are {', '.join(known)}")


def _refuse_comparison_of_nothing(config: pytest.Config) -> None:
    # Here, as benchmarks/conftest.py is not asked where benchmarks/ is no argument: it has been taken for an option's
    # value, or was forgotten, and pytest-benchmark would pass.
    if config.pluginmanager.has_plugin("omearrow-ds-comparison") or hasattr(config, "workerinput"):
        return
    names = ("compare_fail", "compare", "save", "autosave")
    values = {name: config.getoption(f"benchmark_{name}", None) for name in names}
    given = [name for name, value in values.items() if value not in (None, [])]
    if given:
        option, taken = f"--benchmark-{given[0].replace('_', '-')}", values["compare"]
        swallowed = f"; as written, {taken!r} is taken for the stored run" if isinstance(taken, str) else ""
        raise pytest.UsageError(
            f"{option} is for what benchmarks/ measures, and this run does not: write the folder before the options, "
            f"`pytest benchmarks/ {option}`, and a stored run as --benchmark-compare=NUM{swallowed}"
        )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1")
    return int(text)


def _several(least: int) -> Callable[[str], list[int]]:
    def numbers(text: str) -> list[int]:
        found = _names(text)
        if not found or not all(name.isdecimal() and int(name) >= least for name in found):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of integers from {least}: write 1,4,16")
        return list(dict.fromkeys(map(int, found)))

    return numbers


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 0")
    return int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _shape(text: str) -> tuple[int, ...]:
    """Return the shape (T, C, Z, Y, X) that ``YxX``, ``CxYxX`` or ``TxCxZxYxX`` names."""
    sizes = tuple(_positive(size) for size in text.lower().split("x"))
    axes = {2: "YX", 3: "CYX", 5: "TCZYX"}.get(len(sizes))
    if axes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none of YxX, CxYxX, TxCxZxYxX")
    return tuple(sizes[axes.index(axis)] if axis in axes else 1 for axis in "TCZYX")
