"""`Url`: a path that is a URL, and the one function that decides what is one."""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath
from typing import Self
from urllib.parse import quote

from omearrow_ds.errors import ArgumentError

SCHEMES = ("s3", "gs", "az", "abfs", "http", "https")
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(.*)", re.IGNORECASE | re.DOTALL)  # pathlib leaves one slash


class Url(PosixPath):
    """A URL, where a path is expected: it reads as the URL that it is, and nothing is at it on this machine."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme.lower()}://{rest}"

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> Self:
        """Return the URL."""
        return self

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002  # as pathlib has it
        """Return the URL."""
        return self

    @property
    def scheme(self) -> str:
        """What is before the colon."""
        return str(self).partition(":")[0]


def as_parsed(path: Path) -> str:
    """Return what a library is given that parses URLs: in a bucket names are as they are, and ``%41`` is no ``A``."""
    in_bucket = isinstance(path, Url) and path.scheme not in ("http", "https")
    return quote(str(path), safe=":/@") if in_bucket else str(path)


def url_of(path: str | os.PathLike[str]) -> Url | None:
    """Return a path as a URL, or None if it is a path: a URL has one of a few schemes, all else is a name.

    Raises `ArgumentError` if a URL has a password, a query, or steps that lead upwards.
    """
    text = os.fspath(path)
    found = _URL.fullmatch(text) if isinstance(text, str) and ":" in text else None  # of 1,000 paths it takes 0.1 s
    if found is None:
        return None
    scheme, rest = found[1].lower(), found[2]
    host = rest.partition("/")[0]
    upwards = {".", ".."} & set(rest.split("/"))
    if not host or ("@" in host and scheme != "abfs") or set("?#\n\r") & set(rest) or upwards:
        raise ArgumentError(
            f"{scheme}://{host.rpartition('@')[2]}/...: a URL here is SCHEME://HOST/NAMES alone, without a password, "
            f"a query or steps upwards; credentials are found as the AWS tools find them, see Storage"
        )
    return Url(f"{scheme}:/{rest}")
