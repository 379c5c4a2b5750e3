"""``omearrow-ds profile``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from omearrow_ds.advise.profile import profile_dataset
from omearrow_ds.advise.profile.training import named
from omearrow_ds.cli import failures
from omearrow_ds.cli.options import OBJECTS, echo_result, flags, json_option, source_options
from omearrow_ds.options import ProfileSettings, SampleSettings

_SAMPLES = (
    *("axes", "select", "crop_size", *OBJECTS),
    *("masks", "mask_background", "normalize", "target", "transform"),
)


@click.command(short_help="Measure the stages of an epoch, and what to try first.")
@source_options
@flags(ProfileSettings, "batch_size", "num_workers", "preload")
@flags(SampleSettings, *_SAMPLES)
@flags(ProfileSettings, "model", "optimizer", "device", "shuffle", "seconds", "epochs", "trials", "work_dir")
@json_option
@failures.traceback_option
def profile(path: Path, *, as_json: bool, show_traceback: bool, **options: Any) -> None:
    """Measure the time of an epoch by stage, and report which setting to try first.

    An epoch of the ordinary loader is measured and split into stages, with the possible gain of each. Then other
    settings are tried in turns with the given ones: preloading, a mapped cache, Arrow IPC, workers, batch size.

    MODULE:NAME is imported from the current folder.

    \b
    Examples:
      omearrow-ds profile plate1.parquet
      omearrow-ds profile plate1/ --batch-size 64 --workers 4 --crop 256
      omearrow-ds profile plate1.parquet --objects cells.csv --crop 64 --batch-size 256
      omearrow-ds profile plate1.parquet --transform augment:flip --model models:make --device cuda
      omearrow-ds profile plate1.parquet --seconds 5 --json > profile.json
    """
    own = " or ".join(f"{name} {options[name]}" for name in ("transform", "model") if options[name] is not None)
    with failures.calling(own, show_traceback=show_traceback) if own else contextlib.nullcontext():
        sys.path.insert(0, str(Path.cwd()))
        if options["transform"] is not None:
            options["transform"] = named(options["transform"], "transform")
        result = profile_dataset(path, **options, progress=sys.stderr.isatty())
    echo_result(result, as_json=as_json)
