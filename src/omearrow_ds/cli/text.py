"""What commands write: facts in two columns, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def echo_json(found: Any) -> None:
    """Write one JSON document to stdout, in ASCII, as any terminal and any path takes it."""
    click.echo(json.dumps(found, indent=2, allow_nan=False))
