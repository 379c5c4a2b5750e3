"""Known file types that are not supported, and a remedy for each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from omearrow_ds.errors import FormatError

_CONVERT = "save as TIFF, or write the pixels with omearrow_ds.write_images, and pass the path of the result"
_EXPORT = "convert to OME-TIFF (bfconvert) or OME-Zarr (bioformats2raw), and pass the path of the result"
_TABLE = "pass the path of the images, and the table as a CSV or Parquet file in columns="
_LISTING = "add columns FileName_<channel> with TIFF files, or pass the path of the images, and this table in columns="
_REWRITE = (
    "convert it to an Arrow IPC file, e.g. with pyarrow.feather.write_feather(pyarrow.ipc.open_stream(open(PATH, 'rb'))"
    ".read_all(), COPY, 'uncompressed'), and pass the path of the result"
)
_UNPACK = "unpack it, and pass the path of its contents"


class Other(NamedTuple):
    """An unsupported file type: its name, the suffixes and first bytes that identify it, and the remedy."""

    article: str
    noun: str
    suffixes: tuple[str, ...]
    magic: bytes | None
    remedy: str
    is_image: bool = False


_OTHERS = (
    Other("a", "PNG image", (".png",), b"\x89PNG\r\n", _CONVERT, is_image=True),
    Other("a", "JPEG image", (".jpg", ".jpeg"), b"\xff\xd8\xff", _CONVERT, is_image=True),
    Other("a", "BMP image", (".bmp",), None, _CONVERT, is_image=True),
    Other("a", "Zeiss CZI image", (".czi",), b"ZISRAWFILE", _EXPORT, is_image=True),
    Other("a", "Leica LIF image", (".lif",), None, _EXPORT, is_image=True),
    Other("a", "Nikon ND2 image", (".nd2",), None, _EXPORT, is_image=True),
    Other("an", "HDF5 file", (".h5", ".hdf5"), b"\x89HDF\r\n", _CONVERT),
    Other("a", "NumPy file", (".npy", ".npz"), b"\x93NUMPY", _CONVERT),
    Other("an", "Excel file", (".xlsx", ".xls"), None, _TABLE),
    Other("a", "CSV file", (".csv", ".tsv"), None, _LISTING),
    Other("an", "SQLite file", (".sqlite", ".sqlite3"), b"SQLite format 3\0", _TABLE),
    Other("an", "Arrow IPC stream", (".arrows",), b"\xff\xff\xff\xff", _REWRITE),
    Other("a", "ZIP archive", (".zip",), b"PK\x03\x04", _UNPACK),
    Other("a", "TAR archive", (".tar",), None, _UNPACK),
    Other("a", "gzip file", (".gz", ".tgz"), b"\x1f\x8b", _UNPACK),
)


def other_of(name: str, head: bytes) -> Other | None:
    """Return which unsupported file type the name or the first bytes indicate, or None."""
    ending = os.path.splitext(name)[1].lower()  # noqa: PTH122  # as below
    named = (other for other in _OTHERS if ending in other.suffixes)
    return next(named, None) or next((other for other in _OTHERS if other.magic and head.startswith(other.magic)), None)


def refuse_other(path: Path, head: bytes, name: str = "") -> None:
    """Raise `FormatError` for a file of a known unsupported type, from its first bytes or its name."""
    other = other_of(name, head)
    if other is not None:
        raise FormatError(f"{path}: is {other.article} {other.noun}, which is not supported; {other.remedy}")


def endings_of(names: Iterable[str]) -> Counter[str]:
    """Return each distinct suffix of the names in lower case, with the number of names that have it."""
    return Counter(os.path.splitext(name)[1].lower() for name in names)  # noqa: PTH122  # there may be 100,000


def others_in(endings: Mapping[str, int]) -> dict[Other, int]:
    """Return the unsupported types with these suffixes, images first, with the number of files of each."""
    numbers = {other: sum(endings.get(suffix, 0) for suffix in other.suffixes) for other in _OTHERS}
    return {other: number for other, number in numbers.items() if number}
