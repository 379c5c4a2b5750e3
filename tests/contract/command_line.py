"""Records of the command ``omearrow-ds``: help pages and exit statuses."""

from __future__ import annotations

import contextlib
import sys
import unittest.mock
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from omearrow_ds.cli import main
from tests.contract import files

_WIDTH = 100


def run(*words: object, **settings: Any) -> Result:
    """Run ``omearrow-ds`` in this process, which keeps its module path."""
    with unittest.mock.patch.object(sys, "path", list(sys.path)):
        return CliRunner().invoke(main, [str(word) for word in words], prog_name="omearrow-ds", **settings)


def record_help(folder: Path) -> str:
    """Return the help pages of the command and of all its subcommands."""
    pages = []
    for words in _commands(main, ()):
        page = run(*words, "--help", terminal_width=_WIDTH)
        pages.append(f"$ {' '.join(('omearrow-ds', *words, '--help'))}\n{page.output}")
    return "\n".join(pages)


def _commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from _commands(subcommand, (*words, name))


def record_exits(folder: Path) -> dict[str, Any]:
    """Return the exit status and the kind of output of typical commands."""
    images, target = folder / "images.parquet", folder / "copy.arrow"
    files.write(images)
    damaged = files.write_damaged(images, folder / "damaged.parquet")
    (folder / "interrupting.py").write_text("raise KeyboardInterrupt")
    calls: list[tuple[str, Sequence[object]]] = [
        ("no command", []),
        ("version", ["--version"]),
        ("unknown command", ["inform", images]),
        ("info", ["info", images]),
        ("info as JSON", ["info", images, "--json"]),
        ("unknown option", ["info", images, "--jsom"]),
        ("missing file", ["info", folder / "missing.parquet"]),
        ("convert", ["convert", images, target]),
        ("existing target", ["convert", images, target]),
        ("replaced target", ["convert", images, target, "--overwrite"]),
        ("unsupported layout", ["convert", images, folder / "copy.vortex", "--rows-per-group", 8]),
        ("verify", ["verify", images]),
        ("verify a damaged collection", ["verify", damaged]),
        ("Ctrl-C", ["profile", images, "--transform", "interrupting:flip"]),
    ]
    with contextlib.chdir(folder):
        return {name: _exit(words, folder) for name, words in calls}


def _exit(words: Sequence[object], folder: Path) -> dict[str, Any]:
    done = run(*words)
    command = " ".join(["omearrow-ds", *(str(word).replace(f"{folder}/", "") for word in words)])
    stdout = "JSON" if done.stdout.startswith("{") else "text" if done.stdout else None
    usage = "usage" if done.stderr.startswith("Usage: ") else f"{done.stderr.count(chr(10))} lines"
    return {"command": command, "status": done.exit_code, "stdout": stdout, "stderr": usage}
