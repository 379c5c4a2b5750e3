"""Record of wrong calls: error class, and whether the message names the option or path at fault and a remedy."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import omearrow_ds
from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset, open_images
from tests.contract import files
from tests.contract.calls import CALLS, Call
from tests.contract.command_line import run
from tests.support.errors import names_option, names_path, states_remedy

_PLANES = "{well}_{site}_{channel}.tif"


class CommandError(Exception):
    """A command that ended with an exit status above 0."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Outcome:
    """A wrong call with the error that it raised, and the option and path at fault."""

    call: str
    error: BaseException | None
    option: str | None
    path: Path | None

    def as_dict(self) -> dict[str, Any]:
        """Return the facts of the golden file, without the wording of the message."""
        message = str(self.error)
        error = None if self.error is None else type(self.error).__name__
        return {
            "call": self.call,
            "error": f"exit status {self.error.status}" if isinstance(self.error, CommandError) else error,
            "option": self.option,
            "names_option": None if self.option is None else names_option(message, self.option),
            "names_path": None if self.path is None else names_path(message, self.path),
            "remedy": states_remedy(message),
        }


def record(folder: Path) -> list[dict[str, Any]]:
    """Return the outcome of each wrong call."""
    return [outcome.as_dict() for outcome in outcomes(folder, CALLS)]


def outcomes(folder: Path, calls: Iterable[Call]) -> Iterator[Outcome]:
    """Make wrong calls in an empty folder, which gets the files that their expressions name."""
    names = namespace(folder)
    for call, option, *paths in calls:
        error: BaseException | None = None
        with warnings.catch_warnings(action="ignore"):
            try:
                eval(call, dict(names))
            except Exception as raised:  # noqa: BLE001  # The class is recorded.
                error = raised
        names["new"].unlink(missing_ok=True)
        shutil.rmtree(names["new_parts"], ignore_errors=True)
        yield Outcome(call, error, option, names[paths[0]] if paths else None)


def command(*words: object) -> None:
    """Run ``omearrow-ds``, and raise its last line of stderr as an error if it fails."""
    done = run(*words)
    if done.exit_code:
        line = (done.stderr.splitlines() or [""])[-1]
        raise CommandError(line.removeprefix("error: ").removeprefix("Error: "), done.exit_code)


def read(path: Path, **options: Any) -> None:
    """Read pixels and metadata of all images of a collection."""
    with open_images(path, **options) as source:
        source.take(range(len(source)))
        for index in range(len(source)):
            source.metadata(index)


def namespace(folder: Path) -> dict[str, Any]:
    """Return functions, pixels and paths for the expressions of wrong calls."""
    names: dict[str, Any] = {name: getattr(omearrow_ds, name) for name in omearrow_ds.__all__}
    names |= {"command": command, "read": read, "folder": folder, "PLANES": _PLANES, "pixels": files.pixels()}
    names["CUT"] = {"crop_size": (4, 4), "center": ("y", "x")}
    names["BRIEF"] = {"seconds": 0.1, "formats": ["parquet"]}
    names |= {"complex_pixels": np.zeros((4, 5), complex), "float_pixels": np.ones((16, 20))}
    names |= {"vectors": np.zeros((4, 2), np.float32), "new_parts": folder / "new.parts"}
    names["glob"] = folder / "missing-*.parquet"
    names |= {name: folder / f"{name}.parquet" for name in ("new", "missing")}
    for name, suffix in {
        "images": "parquet",
        "arrow": "arrow",
        "zarr": "zarr",
        "tiffs": "tiffs",
        "duckdb": "duckdb",
    }.items():
        names[name] = files.write(folder / f"images.{suffix}")
    images = names["images"]
    names["planes"] = files.write_planes(folder / "planes", ["A01_1_DNA.tif", "A01_1_ER.tif", "A02_1_DNA.tif"])
    names["damaged"] = files.write_damaged(images, folder / "damaged.parquet")
    names |= files.write_tables(folder) | files.write_odd_tables(images) | files.write_parts(images)
    names |= files.write_broken(folder)
    names["dataset"] = OMEArrowDataset(images)
    names["loader"] = OMEArrowDataLoader(names["dataset"], batch_size=1, num_workers=0)
    return names
