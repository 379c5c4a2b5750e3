"""What is stored at a path: the format of a file or folder from its content or suffix, and what is none of them."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds.errors import FormatError, MissingPathError
from omearrow_ds.storage.formats import FORMATS, Format, fitting, format_names, formats, get_format, of_suffix
from omearrow_ds.storage.formats._others import endings_of, other_of, others_in
from omearrow_ds.text import count

SIDECAR = "columns.parquet"
SIDECAR_FORMAT_KEY = b"omearrow_ds.format"
OME_ARROW_MANIFEST = "_ome_arrow_dataset.json"
OME_ARROW_TABLES = ("images.parquet", "chunks.parquet", "index.parquet")
_LOOKED_INTO = 20  # folders, of a folder of no format
TIFF_SUFFIXES = (".tif", ".tiff")
ZARR_FILES = ("zarr.json", ".zgroup", ".zarray", ".zattrs")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?=[^/])")  # pathlib leaves one slash of two
_COPIERS = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp -r", "http": "curl -O", "https": "curl -O"}
_SPECIAL = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def detect(path: Path) -> Format:
    """Return the format of what is stored at ``path``, from its content or its suffix.

    Raises
    ------
    MissingPathError
        If there is nothing at ``path``.
    FormatError
        If the content fits no format, or more than one; or if it is known to be something else.
    """
    if not path.exists():
        raise missing(path)
    refuse_special(path)
    if path.name in OME_ARROW_TABLES and (path.parent / OME_ARROW_MANIFEST).exists():
        raise FormatError(f"{path}: is a table of ome-arrow's dataset; pass its folder, {str(path.parent)!r}")
    names = _folder_formats(path) if path.is_dir() else _file_formats(path)
    if len(names) == 1:
        return get_format(names[0])
    if not names:
        refuse_folder_of_others(path)
        _refuse_other_file(path)
    found = f"looks like {' and '.join(names)}" if names else "has no known suffix or content"
    raise FormatError(f"{path}: the format is not certain, it {found}; pass format= with one of {format_names()}")


def missing(path: str | os.PathLike[str], what: str = "no such file or folder") -> MissingPathError:
    """Return the error for a path at which nothing is; of a URL it says that it is one."""
    text = os.fspath(path)
    scheme = _URL.match(text)
    if scheme is None:
        return MissingPathError(f"{Path(text).absolute()}: {what}")
    url = f"{scheme[1]}://{text[scheme.end() :]}"
    copy = _COPIERS.get(scheme[1].lower())
    how = "" if copy is None else f" ({copy} {url} ...)"
    return MissingPathError(
        f"{url}: is a URL, and only files and folders of this machine are read and written; copy it{how}, "
        f"and pass the path of the copy"
    )


def special_kind(path: str | os.PathLike[str]) -> str | None:
    """Return what ``path`` is if it is there, and neither file nor folder: a pipe, a socket, a device; else None."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  # of many paths: pathlib would double its cost
    except OSError:  # who opens it tells
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return next((name for test, name in _SPECIAL if test(mode)), "something special")


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise `FormatError` if ``path`` is neither file nor folder: to open a pipe or a device may take for ever."""
    kind = special_kind(path)
    if kind is not None:
        raise FormatError(f"{os.fspath(path)}: is {kind}; a file or a folder is needed: copy what it gives to one")


def entries_below(path: str | os.PathLike[str], *, linked: bool = False) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder and in folders of it, but not these; links to folders are followed if asked to."""
    folders = [os.fspath(path)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=linked):
                    folders.append(entry.path)
                else:
                    yield entry


def refuse_folder_of_others(path: Path) -> None:
    """Raise `FormatError` for a folder of which no ``format=`` would make images, saying what it is and what to do."""
    entries = sorted(path.iterdir()) if path.is_dir() else []
    if path.is_dir() and not entries:
        raise FormatError(f"{path}: it is an empty folder; there are no images to read")
    if OME_ARROW_MANIFEST in (entry.name for entry in entries):
        raise FormatError(f"{path}: is a dataset folder of ome-arrow; pass format='ome_arrow', or leave it out")
    tables = [entry for entry in entries if entry.name.lower().endswith(".lance") and entry.is_dir()]
    if tables:
        raise FormatError(
            f"{path}: is a folder of {len(tables)} Lance datasets, as LanceDB keeps its tables; pass one of them, "
            f"e.g. {str(tables[0])!r}"
        )
    _refuse_parts(path, entries)
    names = [entry.name for entry in entries]
    for folder in (entry for entry in entries[:_LOOKED_INTO] if entry.is_dir()):
        inside = sorted(folder.iterdir())
        if any(entry.name == OME_ARROW_MANIFEST for entry in inside):
            raise FormatError(
                f"{path}: holds no images itself, but its folder {folder.name!r} is ome-arrow's dataset; folders are "
                f"read one by one: pass {str(folder)!r}"
            )
        if any(entry.name.lower().endswith(TIFF_SUFFIXES) for entry in inside):
            raise FormatError(
                f"{path}: it holds no images itself, but its folder {folder.name!r} does; folders are read one by one: "
                f"pass {str(folder)!r}, or pattern= with a / to make images of the files in all of them"
            )
        _refuse_parts(path, inside)
        names += [entry.name for entry in inside]
    others = list(others_in(endings_of(names)))
    if others:
        held = " and ".join(f"{other.noun}s" for other in others)
        raise FormatError(f"{path}: holds {held}, and nothing that is read; {others[0].remedy}")


def _refuse_other_file(path: Path) -> None:
    """Raise `FormatError` for a file of a kind that is known, and not read."""
    other = other_of(path.name, _head(path)) if path.is_file() else None
    if other is not None:
        raise FormatError(f"{path}: is {other.article} {other.noun}, which is not read; {other.remedy}")


def _refuse_mixed(path: Path, fmt: Format, names: Collection[str]) -> None:
    """Raise `FormatError` for a folder of images of one format beside tables, or images that are not read.

    They would be left out in silence.
    """
    names = list(names)
    endings = endings_of(names)
    tables = Counter[str]()
    for ending in endings:
        table = of_suffix(f"x{ending}")
        if table is not None and table.kind == "table":
            of_images = (name for name in names if name.lower().endswith(ending) and not _is_plain(path / name))
            tables[f"{table.label} table"] += sum(1 for _ in of_images)
    others = {other.noun: number for other, number in others_in(endings).items() if other.is_image}
    beside = [count(number, noun) for noun, number in (*tables.items(), *others.items()) if number]
    if beside:
        raise FormatError(
            f"{path}: holds mixed files, {fmt.label} images beside {' and '.join(beside)}; pass format={fmt.name!r} to "
            f"read the former alone, or the path of another file"
        )


def _is_plain(path: Path) -> bool:
    """Whether a file is a Parquet table without images: of features, which labs keep beside the images."""
    try:
        return path.is_file() and not any(pa.types.is_struct(field.type) for field in pq.read_schema(path))
    except (pa.ArrowException, OSError):
        return False


def _refuse_parts(path: Path, entries: Sequence[Path]) -> None:
    """Refuse a folder of files each of which is a table."""
    kinds = {entry: of_suffix(entry.name, files=True) for entry in entries if entry.is_file()}
    kind = next(filter(None, kinds.values()), None)
    if kind is None:
        return
    parts = [entry for entry, fmt in kinds.items() if fmt is kind]
    joined = (
        f"; to read them as one, join them: pyarrow.parquet.write_table(pyarrow.dataset.dataset({str(path)!r})"
        f".to_table(), 'one.parquet')"
        if kind.suffix.endswith(".parquet") and len(parts) > 1
        else ""
    )
    count = "a file" if len(parts) == 1 else f"{len(parts)} files"
    raise FormatError(
        f"{path}: is a folder that holds {count} of {kind.label}; files are read one by one: pass e.g. "
        f"{str(parts[0])!r}{joined}"
    )


def _file_formats(path: Path) -> list[str]:
    name = path.name.lower()
    if name.endswith(TIFF_SUFFIXES):
        return ["tiff"]
    told = of_suffix(name, files=True)
    if told is not None:
        return [told.name]
    head = _head(path)
    return [fmt.name for fmt in fitting(lambda fmt: fmt.magic is not None and head.startswith(*fmt.magic))]


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(16)


def _folder_formats(path: Path) -> list[str]:
    if os.path.lexists(path / SIDECAR):  # before the folder is listed: there may be 100,000 images
        refuse_special(path / SIDECAR)
        try:
            metadata = pq.read_schema(path / SIDECAR).metadata or {}
        except (pa.ArrowException, OSError, ValueError) as error:
            raise FormatError(f"{path / SIDECAR}: is damaged, so the folder's format is not known: {error}") from error
        if SIDECAR_FORMAT_KEY in metadata:
            return [metadata[SIDECAR_FORMAT_KEY].decode()]
    entries = set(os.listdir(path))  # noqa: PTH208  # only the names
    if OME_ARROW_MANIFEST in entries:
        return ["ome_arrow"]
    names = ["lance"] if "_versions" in entries or path.name.lower().endswith(".lance") else []
    if any(name.lower().endswith(TIFF_SUFFIXES) for name in entries):
        names.append("tiff")
    if is_zarr_node(str(path)) or any(is_zarr_node(f"{path}/{name}") for name in entries):
        names.append("ome_zarr")
    if names in (["tiff"], ["ome_zarr"]) and not is_zarr_node(str(path)):
        _refuse_mixed(path, get_format(names[0]), entries - {SIDECAR})
    others = formats()[len(FORMATS) :] if not names else ()
    return names or [fmt.name for fmt in others if fmt.in_folder and path.name.lower().endswith(fmt.suffix)]


def is_zarr_node(path: str) -> bool:
    """Whether a folder is a Zarr array or group, of Zarr version 2 or 3."""
    return any(os.path.isfile(f"{path}/{name}") for name in ZARR_FILES)  # noqa: PTH113  # of thousands of folders
