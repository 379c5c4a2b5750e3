"""Seeded damage to a stored collection, as caused by disks, copies and users.

`Plan` lists all structural damages of one collection: each member missing, a folder in place of each file, and each
file truncated at each boundary of its format. It also makes any number of random damages.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Rng = np.random.Generator
_DISK_PAGE_BYTES = 4096
_DUCKDB_BLOCK_BYTES = 256 * 1024
_KINDS = {
    "bit": 0.3,
    "bits": 0.15,
    "integer": 0.15,
    "zeros": 0.1,
    "noise": 0.1,
    "swap": 0.08,
    "cut": 0.03,
    "shift": 0.04,
    "longer": 0.02,
    "exchange": 0.03,
}
_INTEGERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 2**63 - 1, 2**63, 2**64 - 1)


class Mutation(NamedTuple):
    """Damage to a collection: its kind, its target, and the function that damages the collection at a path."""

    kind: str
    detail: str
    apply: Callable[[Path], object]


class Plan:
    """Damages of one collection.

    Parameters
    ----------
    master
        The undamaged collection; only copies are damaged.
    """

    def __init__(self, master: Path) -> None:
        self._files = sorted(files_of(master))
        self._sizes = [(master / name).stat().st_size for name in self._files]
        self._bounds = [boundaries(master / name) for name in self._files]
        self._folder = master.is_dir()
        self.structural = list(self._structural(master))

    def _structural(self, master: Path) -> Iterator[Mutation]:
        for name in ["", *(self._files if self._folder else [])]:
            yield Mutation("denied", name, partial(_deny, name=name))
            yield Mutation("symlink loop", name, partial(_loop, name=name))
            yield Mutation("symlink to nothing", name, partial(_dangle, name=name))
            if name or not self._folder:
                yield Mutation("folder for a file", name, partial(_folder_for_file, name=name))
        if self._folder:
            entries = sorted(str(path.relative_to(master)) for path in master.rglob("*"))
            for name in entries:
                yield Mutation("missing", name, partial(_remove, name=name))
                if (master / name).is_dir():
                    yield Mutation("file for a folder", name, partial(_file_for_folder, name=name))
                    yield Mutation("denied", name, partial(_deny, name=name))
        for name, size, bounds in zip(self._files, self._sizes, self._bounds, strict=True):
            near = {bound + step for bound in bounds for step in (-1, 0, 1)}
            for length in sorted(length for length in near if 0 <= length < size):
                yield Mutation("cut at a boundary", f"{name} to {length} of {size}", partial(_cut, name, length))

    def random(self, rng: Rng) -> Mutation:
        number = int(rng.choice(len(self._files), p=self._weights()))
        name, size, bounds = self._files[number], self._sizes[number], self._bounds[number]
        offset = self._random_offset(rng, size, bounds)
        kind = str(rng.choice(list(_KINDS), p=list(_KINDS.values())))
        target = f"{name} at {offset} of {size}"
        if kind == "bit":
            return Mutation("bit flip", target, partial(_flip, name, [offset], [int(rng.integers(8))]))
        if kind == "bits":
            count = int(rng.integers(2, 9))
            offsets = [self._random_offset(rng, size, bounds) for _ in range(count)]
            return Mutation("bit flips", target, partial(_flip, name, offsets, rng.integers(8, size=count).tolist()))
        if kind == "integer":
            return Mutation("integer", target, partial(_patch, name, offset, _integer(rng)))
        if kind == "zeros":
            start = offset // _DISK_PAGE_BYTES * _DISK_PAGE_BYTES
            length = int(rng.choice([64, 512, _DISK_PAGE_BYTES, 4 * _DISK_PAGE_BYTES]))
            start = start if length >= _DISK_PAGE_BYTES else offset
            return Mutation("zero-filled page", f"{name} at {start}", partial(_patch, name, start, bytes(length)))
        if kind == "noise":
            return Mutation("overwritten", target, partial(_patch, name, offset, rng.bytes(int(rng.integers(1, 200)))))
        if kind == "swap":
            length = int(rng.choice([8, 64, 512, 1024, _DISK_PAGE_BYTES]))
            other = self._random_offset(rng, size, bounds)
            return Mutation("swapped blocks", f"{target} with {other}", partial(_swap, name, offset, other, length))
        if kind == "cut":
            return Mutation("cut", f"{name} to {offset} of {size}", partial(_cut, name, offset))
        if kind == "shift":
            length = int(rng.integers(1, 64))
            return Mutation("bytes lost within", target, partial(_lose, name, offset, length))
        if kind == "longer":
            return Mutation("bytes at the end", name, partial(_append, name, rng.bytes(int(rng.integers(1, 5000)))))
        other = self._files[int(rng.integers(len(self._files)))]
        return Mutation("exchanged files", f"{name} with {other}", partial(_exchange, name, other))

    def _weights(self) -> np.ndarray:
        """Return a weight per file, which grows with its size; small files are hit too."""
        weights = np.sqrt(np.array(self._sizes, float)) + 1
        return weights / weights.sum()

    def _random_offset(self, rng: Rng, size: int, bounds: list[int]) -> int:
        """Return a random offset in a file, often near a boundary, where lengths and offsets are stored."""
        if rng.random() < 0.5 and bounds:
            offset = bounds[int(rng.integers(len(bounds)))] + int(rng.normal(0, 24))
            return min(max(offset, 0), max(size - 1, 0))
        return int(rng.integers(max(size, 1)))


def files_of(path: Path) -> Iterator[str]:
    """Yield the files of a collection relative to its path; a single file is ``""``."""
    if path.is_file():
        yield ""
    else:
        yield from (str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def boundaries(file: Path) -> list[int]:
    """Return offsets where the parts of a file start and end, for known formats; otherwise its first and last."""
    data = file.read_bytes()
    size = len(data)
    offsets = {0, 4, 8, 12, 16, 64, size // 2, size - 64, size - 40, size - 16, size - 12, size - 8, size - 4, size}
    known = {b"PAR1": _of_parquet, b"ARRO": _of_arrow, b"VTXF": _of_vortex, b"II*\0": _of_tiff}.get(data[:4])
    if data[8:12] == b"DUCK":
        known = _of_duckdb
    elif file.suffix == ".lance":
        known = _of_lance
    elif file.suffix == ".manifest":
        offsets.add(int.from_bytes(data[-16:-8], "little"))
    if known is not None:
        offsets |= set(known(file, data))
    return sorted(bound for bound in offsets if 0 <= bound <= size)


def _of_parquet(file: Path, data: bytes) -> Iterator[int]:
    yield len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    metadata = pq.ParquetFile(file).metadata
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            yield column.data_page_offset
            yield column.data_page_offset + column.total_compressed_size


def _of_arrow(file: Path, data: bytes) -> Iterator[int]:
    yield len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    reader = pa.BufferReader(data)
    reader.seek(8)
    with suppress(EOFError, pa.ArrowException):
        while True:
            yield reader.tell()
            yield reader.tell() + 8 + int.from_bytes(data[reader.tell() + 4 : reader.tell() + 8], "little")
            pa.ipc.read_message(reader)


def _of_vortex(file: Path, data: bytes) -> Iterator[int]:
    postscript = len(data) - 8 - int.from_bytes(data[-6:-4], "little")
    yield postscript
    yield from range(max(0, postscript - 4096), postscript, 512)


def _of_tiff(file: Path, data: bytes) -> Iterator[int]:
    import tifffile

    with tifffile.TiffFile(file) as tif:
        for page in tif.pages:
            yield page.offset
            for tag in page.tags:
                yield tag.offset
                yield tag.valueoffset
            for offset, length in zip(page.dataoffsets, page.databytecounts, strict=True):
                yield from (offset, offset + length)


def _of_duckdb(file: Path, data: bytes) -> Iterator[int]:
    yield from range(0, 4 * _DISK_PAGE_BYTES, _DISK_PAGE_BYTES)
    yield from range(3 * _DISK_PAGE_BYTES, len(data), _DUCKDB_BLOCK_BYTES)


def _of_lance(file: Path, data: bytes) -> Iterator[int]:
    starts = struct.unpack("<QQQII", data[-40:-8])
    yield from starts[:3]
    for table, count in ((starts[1], starts[4]), (starts[2], starts[3])):  # Columns, then buffers.
        for index in range(count):
            position, length = struct.unpack_from("<QQ", data, table + 16 * index)
            yield from (position, position + length)


def _integer(rng: Rng) -> bytes:
    value = _INTEGERS[int(rng.integers(len(_INTEGERS)))]
    width = int(rng.choice([1, 2, 4, 8]))
    return (value % 2 ** (8 * width)).to_bytes(width, "little")


def _path_below(path: Path, name: str) -> Path:
    return path / name if name else path


def _flip(name: str, offsets: list[int], bits: list[int], path: Path) -> None:
    data = bytearray(_path_below(path, name).read_bytes())
    for offset, bit in zip(offsets, bits, strict=True):
        if offset < len(data):
            data[offset] ^= 1 << bit
    _path_below(path, name).write_bytes(data)


def _patch(name: str, offset: int, new: bytes, path: Path) -> None:
    data = bytearray(_path_below(path, name).read_bytes())
    new = new[: max(0, len(data) - offset)]
    data[offset : offset + len(new)] = new
    _path_below(path, name).write_bytes(data)


def _swap(name: str, offset: int, other: int, length: int, path: Path) -> None:
    first, second = sorted((offset, other))
    data = bytearray(_path_below(path, name).read_bytes())
    length = min(length, second - first, len(data) - second)
    data[first : first + length], data[second : second + length] = (
        data[second : second + length],
        data[first : first + length],
    )
    _path_below(path, name).write_bytes(data)


def _cut(name: str, length: int, path: Path) -> None:
    os.truncate(_path_below(path, name), length)


def _lose(name: str, offset: int, length: int, path: Path) -> None:
    data = _path_below(path, name).read_bytes()
    _path_below(path, name).write_bytes(data[:offset] + data[offset + length :])


def _append(name: str, more: bytes, path: Path) -> None:
    with _path_below(path, name).open("ab") as file:
        file.write(more)


def _exchange(name: str, other: str, path: Path) -> None:
    first, second = _path_below(path, name), _path_below(path, other)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _remove(path: Path, name: str) -> None:
    target = _path_below(path, name)
    shutil.rmtree(target) if target.is_dir() else target.unlink()


def _deny(path: Path, name: str) -> None:
    _path_below(path, name).chmod(0)


def _loop(path: Path, name: str) -> None:
    _remove(path, name)
    _path_below(path, name).symlink_to(_path_below(path, name).name)


def _dangle(path: Path, name: str) -> None:
    _remove(path, name)
    _path_below(path, name).symlink_to("nothing-there")


def _folder_for_file(path: Path, name: str) -> None:
    _remove(path, name)
    _path_below(path, name).mkdir()


def _file_for_folder(path: Path, name: str) -> None:
    _remove(path, name)
    _path_below(path, name).write_text(json.dumps({}))
