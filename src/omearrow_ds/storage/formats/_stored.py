"""`Stored`: the way that a collection is stored, in words that users choose formats by; found without decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LOOKED_AT = 16  # files of a folder, or fragments: each has to be opened


@dataclass(frozen=True)
class Stored:
    """How a collection is stored and read.

    Attributes
    ----------
    encoding
        Of a table ``"bytes"`` or ``"list"``; of a folder of image files None.
    compression
        Of the pixels: ``"none"``, or what packs them; ``"compressed"`` where their library does not tell.
    chunking
        What stands, and is decompressed, together.
    in_place
        Whether reading takes the pixels from where they lie, with nothing to decompress and no library between.
    reading
        How an image is read.
    looked_at
        How many files were opened to find this out, where they were not all; None where they were.
    """

    encoding: str | None
    compression: str
    chunking: str
    in_place: bool
    reading: str
    looked_at: int | None = None


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
