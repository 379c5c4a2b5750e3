"""``omearrow-ds recommend``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from omearrow_ds.advise.recommend import recommend as measure
from omearrow_ds.cli.options import OBJECTS, echo_result, flags, json_option, source_options, warn_of_layout
from omearrow_ds.options import RecommendSettings, SampleSettings

_START_METHODS = ("forkserver", "spawn")


@click.command(short_help="Measure which format and settings suit your images.")
@source_options
@flags(RecommendSettings, "epochs", "access", "budget_bytes", "memory_bytes", "batch_size", "seconds", "tile")
@flags(SampleSettings, "crop_size", *OBJECTS)
@flags(RecommendSettings, "formats", "bandwidth", "latency", "work_dir")
@json_option
def recommend(*, path: Path, as_json: bool, **options: Any) -> None:
    """Measure how to store and load the images at PATH.

    A sample is written in every format, encoding and compression to a private folder, read like a training from a warm
    page cache (with --objects as crops), and removed. The output ranks the total cost of all epochs, including the
    conversion, and recommends one choice with its commands. PATH is only read.

    With --bandwidth, the output also estimates an epoch from parts in a bucket per format: the longer of transfer and
    decoding.

    \b
    Examples:
      omearrow-ds recommend plate1/
      omearrow-ds recommend plate1/ --epochs 100 --budget-bytes 20GB
      omearrow-ds recommend plate1/ --objects cells.csv --crop 64
      omearrow-ds recommend plate1/ --tile 100 --access sequential
      omearrow-ds recommend plate1/ --bandwidth 1Gb --latency 20ms
      omearrow-ds recommend cells.parquet --formats arrow,lance --seconds 30 --json
    """
    warn_of_layout(path, options)
    echo_result(measure(path, progress=True, start_methods=_START_METHODS, **options), as_json=as_json)
