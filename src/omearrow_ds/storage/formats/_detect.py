"""The format of a file or folder, from its content or suffix, and the errors for unknown ones."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.errors import ArgumentError, FormatError, MissingPathError
from omearrow_ds.storage.formats import FORMATS, Format, fitting, format_names, formats, get_format, of_suffix
from omearrow_ds.storage.formats._error_translation import damaged
from omearrow_ds.text import count

StrPath = str | os.PathLike[str]
Paths = StrPath | Sequence[StrPath]  # several paths, or a glob that is not a path itself, are one collection
SIDECAR = "columns.parquet"
SIDECAR_FORMAT_KEY = b"omearrow_ds.format"
OME_ARROW_MANIFEST = "_ome_arrow_dataset.json"
OME_ARROW_TABLES = ("images.parquet", "chunks.parquet", "index.parquet")
_IPC, _FEATHER_1 = b"ARROW1", b"FEA1"  # the latter was another format, without nested columns
_LOOKED_INTO = 20  # limit of subfolders examined in a folder of unknown format
TIFF_SUFFIXES = (".tif", ".tiff")
ZARR_FILES = ("zarr.json", ".zgroup", ".zarray", ".zattrs")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?=[^/])")  # pathlib leaves one slash of two
_COPIERS = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp -r", "http": "curl -O", "https": "curl -O"}
_SPECIAL = {"p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}  # By the letters of `ls`.

_CONVERT = "save as TIFF, or write the pixels with omearrow_ds.write_images, and pass the path of the result"
_EXPORT = "convert to OME-TIFF (bfconvert) or OME-Zarr (bioformats2raw), and pass the path of the result"
_TABLE = "pass the path of the images, and the table as a CSV or Parquet file in columns="
_LISTING = "add columns FileName_<channel> with TIFF files, or pass the path of the images, and this table in columns="
_REWRITE = (
    "convert it to an Arrow IPC file, e.g. with pyarrow.feather.write_feather(pyarrow.ipc.open_stream(open(PATH, 'rb'))"
    ".read_all(), COPY, 'uncompressed'), and pass the path of the result"
)
_UNPACK = "unpack it, and pass the path of its contents"
_LANCE_SUFFIX = ".lance"


class Other(NamedTuple):
    """An unsupported file type, the suffixes and first bytes that identify it, and the remedy."""

    noun: str
    suffixes: tuple[str, ...]
    magic: bytes | None
    remedy: str
    is_image: bool = False


_OTHERS = (
    Other("PNG image", (".png",), b"\x89PNG\r\n", _CONVERT, is_image=True),
    Other("JPEG image", (".jpg", ".jpeg"), b"\xff\xd8\xff", _CONVERT, is_image=True),
    Other("BMP image", (".bmp",), None, _CONVERT, is_image=True),
    Other("Zeiss CZI image", (".czi",), b"ZISRAWFILE", _EXPORT, is_image=True),
    Other("Leica LIF image", (".lif",), None, _EXPORT, is_image=True),
    Other("Nikon ND2 image", (".nd2",), None, _EXPORT, is_image=True),
    Other("HDF5 file", (".h5", ".hdf5"), b"\x89HDF\r\n", _CONVERT),
    Other("NumPy file", (".npy", ".npz"), b"\x93NUMPY", _CONVERT),
    Other("Excel file", (".xlsx", ".xls"), None, _TABLE),
    Other("CSV file", (".csv", ".tsv"), None, _LISTING),
    Other("SQLite file", (".sqlite", ".sqlite3"), b"SQLite format 3\0", _TABLE),
    Other("Arrow IPC stream", (".arrows",), b"\xff\xff\xff\xff", _REWRITE),
    Other("ZIP archive", (".zip",), b"PK\x03\x04", _UNPACK),
    Other("TAR archive", (".tar",), None, _UNPACK),
    Other("gzip file", (".gz", ".tgz"), b"\x1f\x8b", _UNPACK),
)


def refuse_other(path: Path, head: bytes, name: str = "") -> None:
    """Raise `FormatError` for a file of a known unsupported type, from its name or its first bytes."""
    ending = os.path.splitext(name)[1].lower()  # noqa: PTH122  # as below
    named = (other for other in _OTHERS if ending in other.suffixes)
    marked = (other for other in _OTHERS if other.magic and head.startswith(other.magic))
    for other in chain(named, marked):
        raise FormatError(f"{path}: the type {other.noun!r} is not supported; {other.remedy}")


def _endings_of(names: Iterable[str]) -> Counter[str]:
    return Counter(os.path.splitext(name)[1].lower() for name in names)  # noqa: PTH122  # there may be 100,000


def others_in(names: Iterable[str]) -> dict[Other, int]:
    """Return the number of files per unsupported type, by the suffixes of names; image types come first."""
    endings = _endings_of(names)
    numbers = {other: sum(endings[suffix] for suffix in other.suffixes) for other in _OTHERS}
    return {other: number for other, number in numbers.items() if number}


def found_at(path: Path) -> Format | None:
    """Return the format of the collection at ``path``, from its content or suffix; None for a folder without any."""
    # Raises `MissingPathError` if ``path`` does not exist; `FormatError` if the content fits no format, several
    # formats, or a known unsupported one.
    if not path.exists():
        raise missing(path)
    if path.name in OME_ARROW_TABLES and (path.parent / OME_ARROW_MANIFEST).exists():
        raise FormatError(f"{path}: is one table of an ome-arrow dataset; pass its folder {str(path.parent)!r}")
    if path.is_dir():
        return found_in_folder(path)
    if not path.is_file():
        refuse_special(path)
    candidates = _file_formats(path)
    if not candidates:
        refuse_other(path, _head(path), path.name)
    if len(candidates) != 1:
        raise _uncertain(path, [fmt.name for fmt in candidates])
    return candidates[0]


def found_in_folder(path: Path) -> Format | None:
    names = _folder_formats(path)
    if len(names) > 1:
        raise _uncertain(path, names)
    return get_format(names[0]) if names else None


def found_in_file(path: Path) -> Format | None:
    """Return the format of a file, or None if unknown; the file is read only if its name has no suffix."""
    fmt = of_suffix(path.name, files=True)
    if fmt is not None or path.suffix or not path.is_file():
        return fmt
    candidates = _file_formats(path)
    return candidates[0] if len(candidates) == 1 else None


def _uncertain(path: Path, names: Sequence[str]) -> FormatError:
    problem = f"the content matches formats {' and '.join(names)}" if names else "the suffix and content are unknown"
    return FormatError(f"{path}: {problem}; pass format= with one of {format_names()}")


def missing(path: StrPath, problem: str = "no such file or folder; check the path") -> MissingPathError:
    """Return the error for a missing path; for a URL, the message explains how to copy the object."""
    text = os.fspath(path)
    scheme = _URL.match(text)
    if scheme is None:
        return MissingPathError(f"{Path(text).absolute()}: {problem}")
    url = f"{scheme[1]}://{text[scheme.end() :]}"
    copy = _COPIERS.get(scheme[1].lower())
    if copy is not None and text.lower().endswith((".csv", ".csv.gz", ".parquet", ".tif", ".tiff", ".arrow", ".npy")):
        copy = copy.removesuffix(" --recursive").removesuffix(" -r")  # copies a single object
    how = "" if copy is None else f" ({copy} {url} ...)"
    return MissingPathError(f"{url}: expected a local path, not a URL; copy the object{how}, and pass the copy's path")


def special_kind(path: StrPath) -> str | None:
    """Return the type of ``path`` if it is neither file nor folder (a pipe, a socket, a device), else None."""
    try:
        kind = stat.filemode(os.stat(path).st_mode)[0]  # noqa: PTH116  # Many paths: pathlib would double its cost.
    except OSError:  # Opening it raises the error.
        return None
    return None if kind in "-d" else _SPECIAL.get(kind, "a special file")


def refuse_special(path: StrPath) -> None:
    """Raise `FormatError` if ``path`` is neither file nor folder: opening a pipe or a device may block forever."""
    kind = special_kind(path)
    if kind is not None:
        raise FormatError(f"{os.fspath(path)}: is {kind}, expected a file or a folder; copy its contents to a file")


def is_hidden(name: str) -> bool:
    """Return whether a search for images and tables skips a file or folder, such as macOS's ``._a.tif``."""
    # Paths that a user names are read all the same. The rule is not for the contents of Zarr, Lance and parts folders,
    # nor for fingerprints.
    return name.startswith(".")


def entries_below(path: StrPath, *, linked: bool = False) -> Iterator[os.DirEntry[str]]:
    """Yield all files at any depth below a folder; links to folders are followed if ``linked`` is true."""
    folders = [os.fspath(path)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=linked):
                    folders.append(entry.path)
                else:
                    yield entry


def refuse_folder_of_others(path: Path) -> None:
    """Raise `FormatError` for a folder without images of any format, and name its contents and the remedy."""
    entries = _entries_of(path) if path.is_dir() else []
    names = [entry.name for entry in entries]
    if path.is_dir() and not entries:
        hidden = " except for names that begin with a dot" if any(path.iterdir()) else ""
        raise FormatError(f"{path}: the folder is empty{hidden}; pass the path of a folder or file with images")
    if OME_ARROW_MANIFEST in names:
        raise FormatError(f"{path}: is the folder of an ome-arrow dataset; pass format='ome_arrow', or omit format=")
    for folder in (entry for entry in entries[:_LOOKED_INTO] if entry.is_dir()):
        inside = [entry.name for entry in _entries_of(folder)]
        problem = f"{path}: contains no images, but its subfolder {folder.name!r}"
        if OME_ARROW_MANIFEST in inside:
            raise FormatError(f"{problem} is an ome-arrow dataset; pass {str(folder)!r}")
        if any(name.lower().endswith(TIFF_SUFFIXES) for name in inside):
            remedy = f"pass {str(folder)!r}, or a pattern= with a / that matches the files of all subfolders"
            raise FormatError(f"{problem} does; {remedy}")
        names += inside
    others = list(others_in(names))
    if others:
        nouns = " and ".join(f"{other.noun}s" for other in others)
        raise FormatError(f"{path}: contains only {nouns}, which are not supported; {others[0].remedy}")


def _entries_of(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not is_hidden(entry.name))


def _refuse_mixed(path: Path, fmt: Format, names: Collection[str]) -> None:
    """Raise `FormatError` for a folder that mixes images of one format with tables or unsupported images."""
    # Otherwise, they would be skipped silently.
    numbers = Counter[str]()
    for ending in _endings_of(names):
        table = of_suffix(f"x{ending}")
        if table is not None and table.kind == "table":
            of_table = (path / name for name in names if name.lower().endswith(ending))
            numbers[f"{table.label} table"] += sum(not is_plain(file) for file in of_table)
    numbers.update({other.noun: number for other, number in others_in(names).items() if other.is_image})
    others = [count(number, noun) for noun, number in numbers.items() if number]
    if others:
        problem = f"contains mixed files, {fmt.label} images and {' and '.join(others)}"
        remedy = f"pass format={fmt.name!r} to read only the {fmt.label} images, or the path of another file"
        raise FormatError(f"{path}: {problem}; {remedy}")


def is_plain(path: Path) -> bool:
    """Whether a file is a Parquet or Arrow IPC table without images, such as a table of measured features."""
    try:
        if not path.is_file():
            return False
        head = _head(path)
        if head.startswith(_FEATHER_1):
            return True
        if head.startswith(_IPC):
            with pa.memory_map(str(path)) as file:
                schema = pa.ipc.open_file(file).schema
        else:
            schema = pq.read_schema(path)
        return not any(pa.types.is_struct(field.type) for field in schema)
    except (pa.ArrowException, OSError):
        return False


def _file_formats(path: Path) -> list[Format]:
    is_tiff = path.name.lower().endswith(TIFF_SUFFIXES)
    of_name = get_format("tiff") if is_tiff else of_suffix(path.name, files=True)
    if of_name is not None:
        return [of_name]
    head = _head(path)
    return fitting(lambda fmt: fmt.magic is not None and head.startswith(*fmt.magic))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(16)


def _folder_formats(path: Path) -> list[str]:
    if os.path.lexists(path / SIDECAR):  # before the folder is listed: there may be 100,000 images
        refuse_special(path / SIDECAR)
        try:
            metadata = pq.read_schema(path / SIDECAR).metadata or {}
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(path / SIDECAR, "the Parquet file with the folder's format", error) from error
        if SIDECAR_FORMAT_KEY in metadata:
            return [metadata[SIDECAR_FORMAT_KEY].decode()]
    entries = {name for name in os.listdir(path) if not is_hidden(name)}  # noqa: PTH208  # Only names are needed.
    if OME_ARROW_MANIFEST in entries:
        return ["ome_arrow"]
    names = ["lance"] if "_versions" in entries or path.name.lower().endswith(_LANCE_SUFFIX) else []
    if any(name.lower().endswith(TIFF_SUFFIXES) for name in entries):
        names.append("tiff")
    if is_zarr_node(str(path)) or any(is_zarr_node(f"{path}/{name}") for name in entries):
        names.append("ome_zarr")
    if names in (["tiff"], ["ome_zarr"]) and not is_zarr_node(str(path)):
        _refuse_mixed(path, get_format(names[0]), entries - {SIDECAR})
    others = formats()[len(FORMATS) :] if not names else ()
    return names or [fmt.name for fmt in others if fmt.is_folder and path.name.lower().endswith(fmt.suffix)]


def is_zarr_node(path: str) -> bool:
    """Whether a folder is a Zarr array or group, of Zarr version 2 or 3."""
    return any(os.path.isfile(f"{path}/{name}") for name in ZARR_FILES)  # noqa: PTH113  # of thousands of folders


def table_path(folder: Path, table: str | None) -> Path | None:
    """Return the path of the table called ``table``, or of the only table, in a LanceDB folder; None without tables."""
    # Raises `ArgumentError` if the table does not exist; `FormatError` if none is requested and there are several.
    entries = (entry for entry in folder.iterdir() if entry.name.endswith(_LANCE_SUFFIX) and entry.is_dir())
    names = sorted(entry.name.removesuffix(_LANCE_SUFFIX) for entry in entries)
    names = [name for name in names if name == table or not is_hidden(name)]
    if not names:
        return None
    listed = ", ".join(map(repr, names))
    if table is not None and table not in names:
        problem, remedy = "no such table in the folder", f"pass one of {listed}"
        raise ArgumentError(problem, path=folder, option="table", value=table, remedy=remedy)
    if table is None and len(names) > 1:
        remedy = f"pass table= with the name of one, or {str(folder / f'*{_LANCE_SUFFIX}')!r} to open all as one"
        raise FormatError(f"{folder}: contains {len(names)} Lance tables: {listed}; {remedy}")
    return folder / f"{table or names[0]}{_LANCE_SUFFIX}"


def refuse_open_table(value: object) -> None:
    """Raise `ArgumentError` for a LanceDB object, which cannot be opened; the message has the path of a table."""
    if not type(value).__module__.startswith("lancedb."):
        return
    uri = getattr(value, "uri", None) if type(value).__name__ == "LanceTable" else None
    if uri is None or uri.startswith("memory:"):
        copied = "copy it from memory or LanceDB Cloud: lancedb.connect(FOLDER).create_table(NAME, table.to_arrow())"
        remedy = f"pass the folder or URL of a table, or first {copied}"
        raise ArgumentError(f"{value!r}: expected a path, not a LanceDB object; {remedy}")
    raise ArgumentError(f"{value!r}: expected a path, not a LanceDB table; pass {uri!r} to read its newest version")
