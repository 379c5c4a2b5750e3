"""The command ``omearrow-ds``; each subcommand only calls a function of the library."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

import click

from omearrow_ds.cli import failures

# Module and summary of each command. Commands are imported lazily, as some need torch, whose import takes seconds,
# and ``--help`` does not.
_COMMANDS = {
    "info": ("files", "Describe images, columns and storage of a collection."),
    "convert": ("files", "Copy a collection to another format or layout."),
    "crops": ("samples", "Write the crops around cells as a new collection."),
    "publish": ("parts", "Complete a collection whose parts were written by tasks."),
    "cache": ("parts", "List or evict cached parts of remote collections."),
    "verify": ("files", "Compare every image with its stored checksum."),
    "stats": ("files", "Measure pixel statistics by channel and group."),
    "show": ("files", "Draw a grid of random images."),
    "profile": ("samples", "Measure the stages of an epoch, and what to try first."),
    "recommend": ("samples", "Measure which format and settings suit your images."),
}


class _Commands(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line."""
        _fill_closed_streams()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"omearrow_ds.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # Our errors contain its messages on broken files.
        with failures.in_one_line():
            return super().invoke(ctx)


def _fill_closed_streams() -> None:
    """Replace closed standard streams by the null device, so that no opened file gets the number of a stream."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # The system returns the lowest free number.
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # a number


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
)
@click.version_option(None, "-V", "--version", package_name="omearrow-ds")
def main() -> None:
    """Inspect, convert and measure microscopy images for training.

    PATH is a file, a folder (TIFF, OME-Zarr, Lance, parts), a table of TIFF files, or a URL such as
    s3://bucket/plate1.parts.

    \b
    Examples:
      omearrow-ds info plate1/
      omearrow-ds show plate1/ --out plate1.png
      omearrow-ds recommend plate1/
      omearrow-ds convert plate1/ plate1.parquet
      omearrow-ds profile plate1.parquet --batch-size 64
    """
