"""How a collection is stored, in the words that its users choose formats by; found without decoding pixels."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

LOOKED_AT = 16  # files of a folder, or fragments: each has to be opened
_LANCE_SCHEMES = (
    (r"CompressionAlgorithm(\w+)", None),
    (r"Bitpack", "bitpacked"),
    (r"Fsst", "fsst"),
    (r"\bRle\b", "rle"),
)
_VORTEX_PLAIN = {"list", "listview", "struct", "cast", "primitive", "varbin", "varbinview", "chunked", "masked"}
_ARROW_CODECS = ("lz4", "zstd")
_ARROW_START = 8  # the magic number, padded


@dataclass(frozen=True)
class Stored:
    """How a collection is stored and read.

    Attributes
    ----------
    encoding
        Of a table ``"bytes"`` or ``"list"``; of a folder of image files None.
    compression
        Of the pixels: ``"none"``, or what packs them.
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


def lance_compression(page_encoding: str) -> str:
    """Return what compresses a page of a Lance file, of the description of its encoding."""
    values = page_encoding.partition("value_compression")[2]
    if not values:
        return "unknown"
    for pattern, name in _LANCE_SCHEMES:
        found = re.search(pattern, values)
        if found is not None:
            return name or found[1].lower()
    return "none"


def vortex_compression(tree: str, leaf: str) -> str:
    """Return the encodings that a leaf's values stand in, of the tree that Vortex displays of an array."""
    below = tree.partition(f"{leaf}: ")[2].partition("buffer:")[0]
    names = re.findall(r"^(?:.*: )?(?:vortex|fastlanes)\.(\w+)", below, re.MULTILINE)
    return " of ".join(name for name in names if name not in _VORTEX_PLAIN) or "none"


def arrow_compression(file: pa.Buffer) -> str:
    """Return what compresses the first record batch of an Arrow IPC file; pyarrow tells nobody.

    The message before it is a flat buffer: ``Message.header`` is a ``RecordBatch``, whose ``compression`` names the
    codec (https://arrow.apache.org/docs/format/Columnar.html).
    """
    reader = pa.ipc.MessageReader.open_stream(file.slice(_ARROW_START))
    for message in reader:
        if message.type == "record batch":
            data = bytes(message.metadata)
            header = _flat_field(data, _flat_offset(data, 0), 2)
            compression = None if header is None else _flat_field(data, _flat_offset(data, header), 3)
            if compression is None:
                return "none"
            codec = _flat_field(data, _flat_offset(data, compression), 0)
            return _ARROW_CODECS[0 if codec is None else data[codec]]
    return "none"


def _flat_offset(data: bytes, at: int) -> int:
    """Return where the offset at a place of a flat buffer leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _flat_field(data: bytes, table: int, number: int) -> int | None:
    """Return where a field of a flat buffer's table stands, or None if the table does not have it."""
    entries = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, entries)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, entries + entry)[0])
    return table + offset if offset else None
