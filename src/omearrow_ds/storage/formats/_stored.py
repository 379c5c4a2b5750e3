"""`Stored`: the storage layout of a collection, described for the choice of a format, without decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

from omearrow_ds.text import count

LOOKED_AT = 16  # files of a folder, or fragments: each has to be opened


@dataclass(frozen=True)
class Stored:
    """Description of how a collection is stored and read."""

    encoding: str | None  # ``"bytes"`` or ``"list"`` for a table; None for a folder of image files
    # codec of the pixels: ``"none"``, its name, or ``"compressed"`` if the library does not report it
    compression: str
    chunking: str  # the data that is stored, and decompressed, together
    # whether pixels are read zero-copy from the file, without decompression or a library
    in_place: bool
    reading: str  # how an image is read
    # number of opened files if only some were opened, else None
    looked_at: int | None = None

    def by_ranges(self) -> Stored:
        return replace(self, in_place=False, reading="by byte ranges of an object on a server")


class Outline(NamedTuple):
    """Storage layout of a collection, and metadata of a few of its images."""

    stored: Stored  # how they are stored
    metadata: Sequence[Mapping[str, Any]]  # OME metadata of the images read

    def as_json(self) -> dict[str, Any]:
        """Return JSON values: the storage layout, and each distinct combination of channels and pixel sizes."""
        kinds: list[dict[str, Any]] = []
        for summary in map(_few, self.metadata):
            kinds += [] if summary in kinds else [summary]
        return {"stored": asdict(self.stored), "metadata": kinds}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the outline that `as_json` converted; invalid input raises `ValueError`, `TypeError` or `KeyError`."""
        return cls(Stored(**content["stored"]), list(map(_few, content["metadata"])))


def _few(metadata: Mapping[str, Any]) -> dict[str, Any]:
    few: dict[str, Any] = {"channels": [{"name": _or_none(str, channel["name"])} for channel in metadata["channels"]]}
    for axis in "xyz":
        size, unit = (f"physical_size_{axis}{end}" for end in ("", "_unit"))
        few |= {size: _or_none(float, metadata[size]), unit: _or_none(str, metadata[unit])}
    return few


def _or_none(kind: type, value: Any) -> Any:
    return None if value is None else kind(value)


def groups(starts: Sequence[int], noun: str) -> str:
    """Return a description of the groups and their sizes: ``4 row groups of 232 to 256 images``."""
    sizes = [stop - start for start, stop in pairwise(starts)]
    number = count(len(sizes), noun)
    return f"{number} of {images_in(sizes)}" if sizes else number


def images_in(numbers: Sequence[int]) -> str:
    """Describe the smallest and largest number of images, such as ``232 to 256 images``."""
    low, high = min(numbers), max(numbers)
    return count(low, "image") if low == high else f"{low:,} to {high:,} images"


def join_names(names: Iterable[str]) -> str:
    """Return the distinct names as text, most frequent first; ``unknown`` without names."""
    return ", ".join(name for name, _ in Counter(names).most_common()) or "unknown"


def spread(length: int) -> list[int]:
    """Return a few indices that are spread evenly over ``range(length)``."""
    number = min(length, LOOKED_AT)
    return [index * (length - 1) // max(1, number - 1) for index in range(number)]
