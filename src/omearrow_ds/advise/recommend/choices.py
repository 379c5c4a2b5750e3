"""`Layout` and `Plan`: combinations of format, encoding, compression and preloading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omearrow_ds.storage.formats import CHUNK_COMPRESSIONS, Format, get_format
from omearrow_ds.storage.formats import formats as all_formats
from omearrow_ds.storage.source import Encoding

_EVERY_DTYPE: Encoding = "bytes"
_SMALL: Encoding = "list"


@dataclass(frozen=True)
class Layout:
    """Format, encoding and compression of stored images; ``as_it_is`` is True for the existing files."""

    format: Format
    encoding: Encoding = _EVERY_DTYPE
    compression: str | None = None
    as_it_is: bool = False

    @property
    def missing(self) -> str | None:
        """Why the format's library cannot be used, or None if the layout can be tried."""
        return self.format.missing_backend

    @property
    def label(self) -> str:
        """Name of the layout in reports."""
        if self.as_it_is:
            return f"{self.format.label}, as it is"
        words = [self.format.label]
        if self.encoding != _EVERY_DTYPE:
            words.append(self.encoding)
        if self.compression is not None:
            words.append("uncompressed" if self.compression == "none" else self.compression)
        return ", ".join(words)

    @property
    def is_default(self) -> bool:
        """Whether ``omearrow-ds convert`` writes this layout if ``--encoding`` and ``--compression`` are not passed."""
        return self.encoding == _EVERY_DTYPE and self.compression in (None, self.format.compressions[0])

    def as_flags(self) -> list[str]:
        """Return the flags of ``omearrow-ds convert`` that select this encoding and compression."""
        if self.is_default:
            return []
        encoding = [] if self.encoding == _EVERY_DTYPE else ["--encoding", self.encoding]
        return [*encoding, "--compression", str(self.compression)]


@dataclass(frozen=True)
class Plan:
    """A layout, and whether pixels are preloaded or read in each epoch."""

    layout: Layout
    preload: bool

    @property
    def label(self) -> str:
        """Name of the plan in reports."""
        return f"{self.layout.label}, {'preloaded' if self.preload else 'on demand'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        layout = self.layout
        return {
            "format": layout.format.name,
            "encoding": layout.encoding if layout.format.kind == "table" and not layout.as_it_is else None,
            "compression": layout.compression,
            "as_it_is": layout.as_it_is,
            "preload": self.preload,
            "label": self.label,
        }


def layouts(names: Sequence[str] | None, stored: Format) -> list[Layout]:
    """Return the layouts to try: the existing files, the default of each format of ``names``, then other layouts."""
    formats = all_formats() if names is None else tuple(get_format(name) for name in dict.fromkeys(names))
    ways = [list(_ways(fmt)) for fmt in formats]
    first = [each[0] for each in ways]
    others = [layout for each in ways for layout in each[1:]]
    others.sort(key=lambda layout: layout.encoding != _EVERY_DTYPE)  # Compressions are chosen more often.
    return [Layout(stored, as_it_is=True), *first, *others]


def _ways(fmt: Format) -> Iterator[Layout]:
    """Yield the layouts of a format, its default first; encoding ``"list"`` only with the default compression."""
    if fmt.missing_backend:
        yield Layout(fmt)
        return
    for compression in fmt.compressions:
        yield Layout(fmt, compression=compression)
    if fmt.kind == "table":
        yield Layout(fmt, compression=CHUNK_COMPRESSIONS[0])
        yield Layout(fmt, _SMALL, fmt.compressions[0])
