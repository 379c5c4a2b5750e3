"""`StorageLayout` and `LoadingPlan`: combinations of format, encoding, compression and preloading."""

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
class StorageLayout:
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
        if self.is_default:
            return []
        encoding = [] if self.encoding == _EVERY_DTYPE else ["--encoding", self.encoding]
        return [*encoding, "--compression", str(self.compression)]


@dataclass(frozen=True)
class LoadingPlan:
    layout: StorageLayout
    preload: bool

    @property
    def label(self) -> str:
        return f"{self.layout.label}, {'preloaded' if self.preload else 'on demand'}"

    def as_dict(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "format": layout.format.name,
            "encoding": layout.encoding if layout.format.kind == "table" and not layout.as_it_is else None,
            "compression": layout.compression,
            "as_it_is": layout.as_it_is,
            "preload": self.preload,
            "label": self.label,
        }


def layouts(names: Sequence[str] | None, stored: Format) -> list[StorageLayout]:
    """Return the layouts to try: the existing files, the default of each format of ``names``, then other layouts."""
    formats = all_formats() if names is None else tuple(get_format(name) for name in dict.fromkeys(names))
    ways = [list(_ways(fmt)) for fmt in formats]
    first = [layouts_of_format[0] for layouts_of_format in ways]
    others = [layout for layouts_of_format in ways for layout in layouts_of_format[1:]]
    others.sort(key=lambda layout: layout.encoding != _EVERY_DTYPE)  # Compressions are chosen more often.
    return [StorageLayout(stored, as_it_is=True), *first, *others]


def _ways(fmt: Format) -> Iterator[StorageLayout]:
    """Yield the layouts of a format, its default first; encoding ``"list"`` only with the default compression."""
    if fmt.missing_backend:
        yield StorageLayout(fmt)
        return
    for compression in fmt.compressions:
        yield StorageLayout(fmt, compression=compression)
    if fmt.kind == "table":
        yield StorageLayout(fmt, compression=CHUNK_COMPRESSIONS[0])
        yield StorageLayout(fmt, _SMALL, fmt.compressions[0])
