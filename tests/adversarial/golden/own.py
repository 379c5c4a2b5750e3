"""Golden files that this package writes: every format, encoding and compression."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omearrow_ds import FORMATS, convert, write_images
from omearrow_ds.codec import schema
from omearrow_ds.storage.formats import Format
from omearrow_ds.storage.protocol import OpenOptions
from tests.adversarial.golden.content import CROPS, OBJECTS, RAGGED, SMALL, UNIFORM, Content


class Case(Protocol):
    """One golden collection: its name, expected format, content and writer."""

    @property
    def name(self) -> str:
        """Name of the case and of its archive."""

    @property
    def stored(self) -> str:
        """Name of the file or folder to open."""

    @property
    def format(self) -> str:
        """Name of the format that opening must detect."""

    @property
    def content(self) -> Content:
        """Content of the collection."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Modules needed to write it."""

    @property
    def opening(self) -> OpenOptions:
        """Arguments for opening."""

    def write(self, path: Path) -> None:
        """Write it."""


@dataclass(frozen=True)
class Own:
    """A collection written by `write_images`; uniform images are in several row groups if the format has them."""

    format: str
    suffix: str
    encoding: str
    compression: str
    kind: str
    content: Content
    grouped: bool
    opening: OpenOptions = field(default_factory=OpenOptions)

    @property
    def name(self) -> str:
        return f"{self.format}-{self.encoding}-{self.compression}-{self.kind}"

    @property
    def stored(self) -> str:
        return f"images{self.suffix}"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("omearrow_ds",)

    def write(self, path: Path) -> None:
        content = self.content
        layout: dict[str, Any] = {"encoding": self.encoding, "compression": self.compression}
        if self.grouped and self.kind == "uniform":
            layout["rows_per_group"] = 2
        write_images(
            content.written,
            path,
            self.format,
            image_ids=content.ids,
            metadata=content.metadata,
            columns=content.table,
            **layout,
        )


class Parts(Own):
    """Parts of two images each, as `convert` writes them."""

    @property
    def name(self) -> str:
        return f"parts-{self.format}" if self.kind == "uniform" else f"parts-{self.format}-{self.kind}"

    @property
    def stored(self) -> str:
        return "images.parts"

    def write(self, path: Path) -> None:
        image_bytes = self.content.images[0].nbytes
        with tempfile.TemporaryDirectory() as folder:
            one = Path(folder, super().stored)
            super().write(one)
            convert(one, path, self.format, part_bytes=2 * image_bytes, checksum=True)


class Crops(Own):
    """Crops around objects, written by `write_crops`."""

    def write(self, path: Path) -> None:
        from omearrow_ds import write_crops  # It imports torch, which some environments that write do not have.

        with tempfile.TemporaryDirectory() as folder:
            fields = Own("arrow", ".arrow", "bytes", "none", "small", SMALL, grouped=True)
            fields.write(Path(folder, fields.stored))
            source, size = Path(folder, fields.stored), CROPS.size
            write_crops(source, OBJECTS, path, self.format, crop_size=size, center=("y", "x"))


def own_cases() -> Iterator[Case]:
    """Yield the cases of the installed formats."""
    yield Parts("arrow", ".arrow", "bytes", "none", "uniform", UNIFORM, grouped=True)
    yield Crops("parquet", ".parquet", "bytes", "none", "crops", CROPS, grouped=True)
    for fmt in FORMATS:
        if not fmt.missing_backend:
            yield from _cases_of(fmt)
            grouped = fmt.writer.has_row_groups
            layout = (fmt.name, fmt.suffix, "bytes", fmt.compressions_of("bytes")[0], "small", SMALL, grouped)
            yield Own(*layout)
            yield Parts(*layout)


def _cases_of(fmt: Format) -> Iterator[Own]:
    for encoding in schema.ENCODINGS if fmt.kind == "table" else ("bytes",):
        for number, compression in enumerate(fmt.compressions_of(encoding)):
            layout = (fmt.name, fmt.suffix, encoding, compression)
            yield Own(*layout, "uniform", UNIFORM, fmt.writer.has_row_groups)
            if number == 0:
                yield Own(*layout, "ragged", RAGGED[encoding], fmt.writer.has_row_groups)
