"""Damage to stored lengths and offsets of uncompressed collections, each of which one check notices."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tests.support.raw_tables import raw_table
from tests.support.strategies import SUFFIX, image_of

NUM_IMAGES, IMAGES_PER_PART = 6, 2
DAMAGED = 3  # Index of the damaged image. It is not the first one of a file, part or batch.
IMAGES = [image_of((1, 2, 1, 48, 50), "uint16", number) for number in range(NUM_IMAGES)]
IMAGE_BYTES, CHUNK_BYTES, CHUNK_PIXELS = IMAGES[0].nbytes, IMAGES[0][0, 0].nbytes, IMAGES[0][0, 0].size
PIXEL_BYTES = IMAGES[0].itemsize
_PREFIX_BYTES = 4  # Parquet stores the length of a value in these bytes before it.
_LANCE_LENGTH_BYTES = 8
_LANCE_HEADER_BYTES = 1 + _LANCE_LENGTH_BYTES  # Lance stores a control byte and a length before each chunk.

Damage = Callable[[Path], Path]  # Damages the collection at a path and returns the path that an error must name.


class _File(NamedTuple):
    """A file, its bytes, and where the pixels that were searched for begin."""

    path: Path
    data: bytearray
    start: int

    def save(self) -> Path:
        """Write the bytes and return the path that an error must name."""
        self.path.write_bytes(self.data)
        return _path_in_errors(self.path)

    def add(self, start: int, number_format: str, summand: int) -> None:
        """Add to a number that is stored at ``start``."""
        (value,) = struct.unpack_from(number_format, self.data, start)
        struct.pack_into(number_format, self.data, start, value + summand)


def _path_in_errors(file: Path) -> Path:
    """Return the path of a Lance or ome-arrow collection, else that of the file, which may be a part or one image."""
    folders = [parent for parent in file.parents if parent.suffix in (SUFFIX["lance"], SUFFIX["ome_arrow"])]
    return folders[0] if folders else file


def _find_chunk(path: Path, channel: int) -> _File:
    """Return the file with a chunk of the damaged image, and where the chunk begins."""
    pixels = IMAGES[DAMAGED][0, channel].tobytes()
    files = [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
    for file in files:
        data = bytearray(file.read_bytes())
        start = data.find(pixels)
        if start >= 0:
            return _File(file, data, start)
    raise AssertionError(f"{path} does not store these pixels as they are in memory")


# ---- Parquet: a length precedes each value; for lists, levels mark where each begins


def lengthen_prefix(path: Path) -> Path:
    """Add one pixel to the length that is stored before the first chunk."""
    file = _find_chunk(path, 0)
    file.add(file.start - _PREFIX_BYTES, "<I", PIXEL_BYTES)
    return file.save()


def shift_chunk(path: Path) -> Path:
    """Let the second chunk begin one pixel later. The page stays as long as it was."""
    return _shift_value(_find_chunk(path, 1), CHUNK_BYTES)


def shift_image(path: Path) -> Path:
    """Let an image that is one chunk begin one pixel later."""
    return _shift_value(_find_chunk(path, 0), IMAGE_BYTES)


def _shift_value(file: _File, value_bytes: int) -> Path:
    """Let a value begin one pixel later, and the value before it end there. Both lengths say so."""
    pixel = file.data[file.start : file.start + PIXEL_BYTES]
    file.add(file.start - 2 * _PREFIX_BYTES - value_bytes, "<I", PIXEL_BYTES)
    length = struct.pack("<I", value_bytes - PIXEL_BYTES)
    file.data[file.start - _PREFIX_BYTES : file.start + PIXEL_BYTES] = pixel + length
    return file.save()


def lengthen_list(path: Path) -> Path:
    """Let the second list of the image end after one pixel, and a third one follow: levels 1 1 2 2."""
    return _set_levels(path, 0xA5)


def shift_list(path: Path) -> Path:
    """Let the second list of the image begin one pixel later: levels 2 1 2 2."""
    return _set_levels(path, 0xA6)


def _set_levels(path: Path, levels: int) -> Path:
    """Set the first repetition levels of the second chunk. pyarrow packs four levels into a byte."""
    data = bytearray(path.read_bytes())
    one_group, starts_chunk, continues = 0x03, 0xA9, 0xAA  # The bytes are the levels 1 2 2 2, and 2 2 2 2.
    chunks = [match.start() for match in re.finditer(bytes([one_group, starts_chunk, continues]), data)]
    assert len(chunks) == NUM_IMAGES
    data[chunks[DAMAGED] + 1] = levels
    path.write_bytes(data)
    return path


# ---- Arrow IPC and Vortex: a buffer of offsets


def shift_offset(path: Path, dtype: str = "<i8", unit: int = CHUNK_BYTES, summand: int = PIXEL_BYTES) -> Path:
    """Let the second chunk of the damaged image begin one pixel later."""
    file, offsets = _find_offsets(path, dtype, unit)
    number = DAMAGED if path.is_file() else DAMAGED % IMAGES_PER_PART
    offsets[2 * number + 1] += summand
    return file.save()


def shift_all_offsets(path: Path, dtype: str = "<i8", unit: int = CHUNK_BYTES, summand: int = PIXEL_BYTES) -> Path:
    """Let every chunk begin, and so the last one end, one pixel later. No length changes."""
    file, offsets = _find_offsets(path, dtype, unit)
    offsets += summand
    return file.save()


def _find_offsets(path: Path, dtype: str, unit: int) -> tuple[_File, np.ndarray[Any, Any]]:
    """Return the file with the damaged image, and a writable view of the offsets of its chunks."""
    file = _find_chunk(path, 1)
    num_chunks = 2 * (NUM_IMAGES if path.is_file() else IMAGES_PER_PART)
    expected = (np.arange(num_chunks + 1) * unit).astype(dtype)
    return file, np.frombuffer(file.data, dtype, len(expected), file.data.index(expected.tobytes()))


_OF_LISTS = {"dtype": "<i4", "unit": CHUNK_PIXELS, "summand": 1}
shift_list_offset = partial(shift_offset, **_OF_LISTS)
shift_all_list_offsets = partial(shift_all_offsets, **_OF_LISTS)


def shorten_vortex(path: Path) -> Path:
    """Shorten all chunks by one pixel. Vortex stores offsets in equal steps as first value and step."""
    return _set_vortex_step(path, CHUNK_BYTES, CHUNK_BYTES - PIXEL_BYTES)


def shorten_vortex_lists(path: Path) -> Path:
    """Shorten all lists by one pixel."""
    return _set_vortex_step(path, CHUNK_PIXELS, CHUNK_PIXELS - 1)


def _set_vortex_step(path: Path, step: int, changed: int) -> Path:
    # Field 2 of a message of Protocol Buffers, of 3 bytes, whose field 3 is a zigzag number of two bytes.
    old, new = (bytes([0x12, 3, 0x18, (2 * number & 0x7F) | 0x80, 2 * number >> 7]) for number in (step, changed))
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def shift_in_vortex(path: Path) -> Path:
    """Let Vortex write a table in which the second chunk of the damaged image begins one pixel later."""
    import vortex.io

    table = raw_table("vortex", path)
    position = table.schema.get_field_index("ome_image")
    images = table.column(position).combine_chunks()
    chunks = images.field("chunks")
    leaf = chunks.values.type[-1].name
    unit, pixel = (CHUNK_BYTES, PIXEL_BYTES) if leaf == "pixel_bytes" else (CHUNK_PIXELS, 1)
    offsets = np.arange(2 * NUM_IMAGES + 1) * unit
    offsets[2 * DAMAGED + 1] += pixel
    flat = np.concatenate([image.ravel() for image in IMAGES])
    if leaf == "pixel_bytes":
        buffers = [None, pa.py_buffer(offsets.astype("<i8")), pa.py_buffer(flat)]
        pixels = pa.Array.from_buffers(pa.large_binary(), 2 * NUM_IMAGES, buffers)
    else:
        pixels = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))
    shifted = pa.ListArray.from_arrays(chunks.offsets, _with_field(chunks.values, leaf, pixels))
    vortex.io.write(table.set_column(position, "ome_image", _with_field(images, "chunks", shifted)), str(path))
    return path


def _with_field(structs: pa.StructArray, name: str, values: pa.Array) -> pa.StructArray:
    arrays = [values if field.name == name else structs.field(field.name) for field in structs.type]
    return pa.StructArray.from_arrays(arrays, names=[field.name for field in structs.type])


# ---- Lance: a header before each chunk, and the offset of each row


def lengthen_lance_chunk(path: Path) -> Path:
    """Add one pixel to the length in the header of the second chunk."""
    file = _find_chunk(path, 1)
    file.add(file.start - _LANCE_LENGTH_BYTES, "<Q", PIXEL_BYTES)
    return file.save()


def shift_lance_row(path: Path) -> Path:
    """Let the row of the damaged image begin where the next row does, whose headers are right."""
    file = _find_chunk(path, 0)
    row_bytes = IMAGE_BYTES + 2 * _LANCE_HEADER_BYTES
    expected = (np.arange(NUM_IMAGES + 1) * row_bytes).astype("<u2")
    offsets = np.frombuffer(file.data, "<u2", len(expected), file.data.index(expected.tobytes()))
    offsets[DAMAGED] = offsets[DAMAGED + 1]
    return file.save()


# ---- TIFF and OME-Zarr: the length of the file


def remove_pixel(path: Path) -> Path:
    """Remove the second pixel of the first chunk, so that the pixels after it come too early."""
    file = _find_chunk(path, 0)
    del file.data[file.start + PIXEL_BYTES : file.start + 2 * PIXEL_BYTES]
    return file.save()


def insert_pixel(path: Path) -> Path:
    """Insert a pixel before the first chunk, so that all pixels come too late."""
    file = _find_chunk(path, 0)
    file.data[file.start : file.start] = bytes(PIXEL_BYTES)
    return file.save()


# ---- Parts: the index and the manifest


def replace_part(path: Path) -> Path:
    """Replace the part with the damaged image by the part before it, whose images are alike but for their ids."""
    first, second, *_ = sorted((path / "parts").iterdir())
    second.write_bytes(first.read_bytes())
    return second


def miscount_parts(path: Path) -> Path:
    """Let the manifest count the first image of the second part to the first part."""
    manifest = path / "parts.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["parts"][0]["images"] += 1
    content["parts"][1]["images"] -= 1
    manifest.write_text(json.dumps(content), encoding="utf-8")
    return path / "index.parquet"


# ---- All: truncated files


def truncate(path: Path) -> Path:
    """Cut the file within the second chunk of the damaged image."""
    file = _find_chunk(path, 1)
    del file.data[file.start + CHUNK_BYTES // 2 :]
    return file.save()


def truncate_lists(path: Path) -> Path:
    """Cut a file in the middle whose pixels are not stored as they are in memory."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def cut_end(path: Path, num_bytes: int = 8) -> Path:
    """Cut a few bytes at the end, in place. The pages of a mapping with the pixels stay accessible."""
    file = path if path.is_file() else _find_chunk(path, 1).path
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - num_bytes)
    return _path_in_errors(file)
