"""`Stored`: the way that a collection is stored, in words that users choose formats by; found without decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

LOOKED_AT = 16  # files of a folder, or fragments: each has to be opened


@dataclass(frozen=True)
class Stored:
    """How a collection is stored and read."""

    encoding: str | None  # of a table ``"bytes"`` or ``"list"``; of a folder of image files None
    # of the pixels: ``"none"``, or what packs them; ``"compressed"`` where their library does not tell
    compression: str
    chunking: str  # what stands, and is decompressed, together
    # whether reading takes the pixels from where they lie, with nothing to decompress and no library between
    in_place: bool
    reading: str  # how an image is read
    # how many files were opened to find this out, where they were not all; None where they were
    looked_at: int | None = None


class Outline(NamedTuple):
    """What a look at a few images of a collection tells of all."""

    stored: Stored  # how they are stored
    metadata: Sequence[Mapping[str, Any]]  # the OME metadata of those that were looked at

    def as_json(self) -> dict[str, Any]:
        """Return what JSON keeps of it: of the metadata channels and sizes of pixels, each kind once."""
        kinds: list[dict[str, Any]] = []
        for each in map(_few, self.metadata):
            kinds += [] if each in kinds else [each]
        return {"stored": asdict(self.stored), "metadata": kinds}

    @classmethod
    def of_json(cls, said: Mapping[str, Any]) -> Self:
        """Return what `as_json` kept; what is no such thing raises `ValueError`, `TypeError` or `KeyError`."""
        return cls(Stored(**said["stored"]), list(map(_few, said["metadata"])))


def _few(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return of an image's metadata the names of its channels and the sizes of its pixels."""
    few: dict[str, Any] = {"channels": [{"name": _or_none(str, each["name"])} for each in metadata["channels"]]}
    for axis in "xyz":
        size, unit = (f"physical_size_{axis}{end}" for end in ("", "_unit"))
        few |= {size: _or_none(float, metadata[size]), unit: _or_none(str, metadata[unit])}
    return few


def _or_none(kind: type, value: Any) -> Any:
    return None if value is None else kind(value)


def groups(starts: Sequence[int], what: str) -> str:
    """Return in words how many groups there are of how many images: ``4 row groups of 232 to 256 images``."""
    sizes = [stop - start for start, stop in pairwise(starts)]
    plural = "es" if what.endswith("ch") else "s"
    number = f"{len(sizes):,} {what}{'' if len(sizes) == 1 else plural}"
    return f"{number} of {images_in(sizes)}" if sizes else number


def images_in(numbers: Sequence[int]) -> str:
    """Return the least and the greatest of some numbers of images: ``232 to 256 images``."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return f"{low:,} image{'' if low == 1 else 's'}"
    return f"{low:,} to {high:,} images"


def joined(names: Iterable[str]) -> str:
    """Return distinct names, the most frequent first; ``unknown`` where there is none."""
    return ", ".join(name for name, _ in Counter(names).most_common()) or "unknown"


def spread(count: int) -> list[int]:
    """Return a few indices that are spread evenly over ``count`` things."""
    if count <= LOOKED_AT:
        return list(range(count))
    return [number * (count - 1) // (LOOKED_AT - 1) for number in range(LOOKED_AT)]
