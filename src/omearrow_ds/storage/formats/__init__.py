"""Storage formats: the built-in table, formats that other packages register, and lookup by name and suffix."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from omearrow_ds.errors import BackendError, FormatError

ENTRY_POINTS = "omearrow_ds.formats"
CHUNK_PREFIX = "chunk-"
CHUNK_COMPRESSIONS = (f"{CHUNK_PREFIX}zstd", f"{CHUNK_PREFIX}lz4")  # Per chunk, as in ome-arrow.
_PARQUET_COMPRESSIONS = ("none", "lz4", "zstd", "snappy")
_MEBIBYTES = 2**20
PART_BYTES = 64 * _MEBIBYTES
_WORKER_BYTES = 200 * 10**6  # Memory of a worker in addition to a part.
_BESIDE_BYTES = 10**8  # Memory of the worker and of any writer without images.
_UNLOADABLE = (ImportError, SyntaxError, AttributeError, LookupError, TypeError, ValueError, OSError, RuntimeError)


@dataclass(frozen=True)
class WriteLimits:
    """Options and limits of the writer of a format.

    Attributes
    ----------
    compressions : tuple of str
        Compressions, the default first.
    has_row_groups : bool
        Whether ``rows_per_group=`` applies.
    chunk_multiple : int or None
        Divisor of height and width of ``chunk_shape=``. None if an image is one chunk.
    max_rows, max_bytes : int
        Tables only: default maximum of images, and of bytes of their pixels, per write.
    is_incremental : bool
        Tables only: whether each batch is written before the next is requested.
    memory_factor : float
        Memory of the writer as a multiple of the decoded images of one file, in addition to 60 MB. It limits the
        default size of parts to a worker memory of one part plus 200 MB.
    rows_per_block : tuple of (str, int)
        Per compression: number of rows that reading one row decodes, if more than one.

    Examples
    --------
    >>> from omearrow_ds import FORMATS
    >>> FORMATS[0].writer.compressions
    ('none', 'lz4', 'zstd', 'snappy')
    """

    compressions: tuple[str, ...] = ("none",)
    has_row_groups: bool = False
    chunk_multiple: int | None = None
    max_rows: int = 256
    max_bytes: int = 16 * _MEBIBYTES
    is_incremental: bool = False
    memory_factor: float = 0.0
    rows_per_block: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Format:
    """Properties of a storage format, available without importing its library.

    Attributes
    ----------
    name, label : str
        Name in code and name in texts.
    kind : str
        ``"table"`` (a column of OME-Arrow structs) or ``"directory"`` (a folder of image files).
    suffix : str
        Suffix of its paths. If several formats match, the longest suffix is used.
    backend, extra : str, str or None
        Module that reads it, and the extra that installs it. None means that it is always installed.
    is_folder : bool
        Whether a collection is a folder.
    other_suffixes : tuple of str
        Suffixes of other programs for this format.
    sidecar_suffixes : tuple of str
        Suffixes of additional files that belong to a collection in a file.
    magic : tuple of bytes and int, or None
        Bytes that identify a file with any name, and their offset.
    writer : WriteLimits
        Options and limits of its writer.
    remote_access : tuple of str
        ``"ranges"`` if files at URLs are read by range requests, for which ``open_collection`` takes ``objects``.
        ``"whole"`` if a file at a URL may be fetched completely into the cache.
    engines : tuple of str
        Values of ``engine=``, the default first; empty if there is only one reader.
    open_options : tuple of str
        Options that ``open_collection`` takes: ``"level"``, ``"table"``, ``"skip_errors"``, ``"look"``.
    url_options : tuple of str
        Options of `open_images` that apply to a URL, in addition to ``nulls``.
    implementation : str or None
        Module with ``open_collection`` and ``write_collection`` (`omearrow_ds.storage.protocol.FormatModule`). None for
        built-in formats.

    Examples
    --------
    >>> from omearrow_ds import FORMATS
    >>> [format.name for format in FORMATS if format.kind == "directory"]
    ['tiff', 'ome_zarr', 'ome_arrow']
    """

    name: str
    label: str
    kind: Literal["table", "directory"]
    suffix: str
    backend: str
    extra: str | None = None
    is_folder: bool = False
    other_suffixes: tuple[str, ...] = ()
    sidecar_suffixes: tuple[str, ...] = ()
    magic: tuple[bytes, int] | None = None
    writer: WriteLimits = WriteLimits()
    remote_access: tuple[Literal["ranges", "whole"], ...] = ()
    engines: tuple[str, ...] = ()
    open_options: tuple[str, ...] = ()
    url_options: tuple[str, ...] = ()
    implementation: str | None = None

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Path suffixes of the format, the default suffix first."""
        return (self.suffix, *self.other_suffixes)

    @property
    def missing_backend(self) -> str | None:
        """Message that explains how to install a missing library, or None if it is installed."""
        if importlib.util.find_spec(self.backend) is not None:
            return None
        package = f"'omearrow-ds[{self.extra}]'" if self.implementation is None else self.backend
        return f"format {self.name!r}: module {self.backend!r} is not installed; run pip install {package}"

    def compressions_of(self, encoding: str) -> tuple[str, ...]:
        """Return the compressions that the format supports for a pixel encoding."""
        in_chunks = self.kind == "table" and encoding == "bytes"
        compressions = self.writer.compressions
        return (*compressions, *CHUNK_COMPRESSIONS) if in_chunks else compressions

    def module(self) -> ModuleType:
        """Return the module that writes and reads the format.

        Raises
        ------
        BackendError
            If the backend is not installed.
        """
        if self.missing_backend:
            raise BackendError(self.missing_backend)
        return importlib.import_module(self.implementation or f"{__name__}.{self.name}")


# `docs/explanation/layouts.md` has the measurements behind default compressions and group sizes.
FORMATS = (
    Format(
        "parquet",
        "Parquet",
        "table",
        ".parquet",
        "pyarrow",
        magic=(b"PAR1", 0),
        engines=("pages", "pyarrow"),
        open_options=("look",),
        url_options=("engine", "image_column"),
        writer=WriteLimits(compressions=_PARQUET_COMPRESSIONS, has_row_groups=True, is_incremental=True),
        remote_access=("ranges",),
    ),
    Format(
        "parquet_duck",
        "Parquet (DuckDB)",
        "table",
        ".duck.parquet",
        "duckdb",
        "duckdb",
        engines=("pages", "pyarrow", "duckdb"),
        open_options=("look",),
        url_options=("engine", "image_column"),
        writer=WriteLimits(compressions=_PARQUET_COMPRESSIONS, has_row_groups=True),
    ),
    Format(
        "lance",
        "Lance",
        "table",
        ".lance",
        "lance",
        "lance",
        is_folder=True,
        engines=("pages", "lance"),
        url_options=("image_column",),
        writer=WriteLimits(compressions=("none", "zstd"), max_rows=1024, memory_factor=1.5),
        remote_access=("ranges",),
    ),
    Format(
        "vortex",
        "Vortex",
        "table",
        ".vortex",
        "vortex",
        "vortex",
        magic=(b"VTXF", 0),
        open_options=("look",),
        url_options=("image_column",),
        writer=WriteLimits(compressions=("default", "zstd"), max_rows=1024, memory_factor=2.3),
        remote_access=("whole",),
    ),
    Format(
        "duckdb",
        "DuckDB",
        "table",
        ".duckdb",
        "duckdb",
        "duckdb",
        sidecar_suffixes=(".wal", ".wal.checkpoint"),
        magic=(b"DUCK", 8),
        open_options=("table",),
        # Groups cannot be chosen: they have at least 2,048 images.
        writer=WriteLimits(compressions=("none", "zstd"), memory_factor=2.0, rows_per_block=(("zstd", 2048),)),
    ),
    Format(
        "arrow",
        "Arrow IPC",
        "table",
        ".arrow",
        "pyarrow",
        magic=(b"ARROW1", 0),
        other_suffixes=(".feather", ".ipc"),  # Written by pandas, pyarrow and polars.
        open_options=("look",),
        url_options=("image_column",),
        writer=WriteLimits(
            compressions=("none", "lz4", "zstd"), has_row_groups=True, max_rows=1024, is_incremental=True
        ),
        remote_access=("ranges", "whole"),
    ),
    Format(
        "tiff",
        "OME-TIFF",
        "directory",
        ".tiffs",
        "tifffile",
        is_folder=True,
        open_options=("skip_errors",),
        writer=WriteLimits(compressions=("none", "zlib", "zstd", "lzw"), chunk_multiple=16),
        remote_access=("ranges",),
    ),
    Format(
        "ome_zarr",
        "OME-Zarr",
        "directory",
        ".zarr",
        "zarr",
        "zarr",
        is_folder=True,
        open_options=("level", "skip_errors"),
        url_options=("level",),
        writer=WriteLimits(compressions=("zstd", "lz4", "none"), chunk_multiple=1),
        remote_access=("ranges",),
    ),
    Format(
        "ome_arrow",
        "ome-arrow",
        "directory",
        ".ome_arrow",
        "pyarrow",
        is_folder=True,
        writer=WriteLimits(compressions=_PARQUET_COMPRESSIONS, chunk_multiple=1),
    ),
)
FILE_FORMAT_NAMES = ", ".join(fmt.name for fmt in FORMATS if not fmt.is_folder)  # Formats of a single file, for errors.
_BY_NAME = {fmt.name: fmt for fmt in FORMATS}
_BY_SUFFIX = sorted([(suffix, fmt) for fmt in FORMATS for suffix in fmt.suffixes], key=lambda pair: -len(pair[0]))


def default_part_bytes(fmt: Format) -> int:
    size = PART_BYTES
    while (fmt.writer.memory_factor - 1) * size > _WORKER_BYTES - _BESIDE_BYTES:
        size //= 2
    return size


def accompanying_files(fmt: Format, path: Path) -> list[Path]:
    """Return the paths of files that may accompany a stored file, such as a write-ahead log."""
    resolved = path.resolve()  # DuckDB looks next to the target of a symbolic link
    return [Path(f"{resolved}{suffix}") for suffix in fmt.sidecar_suffixes]


@functools.cache
def formats() -> tuple[Format, ...]:
    """Return all available formats: `FORMATS` and those that other packages register.

    A package registers a `Format` with an entry point of the group ``omearrow_ds.formats``. An entry point that cannot
    be loaded, is not a `Format`, or repeats a name or suffix is ignored with a warning.

    Returns
    -------
    tuple of Format
        Built-in formats first.

    Examples
    --------
    >>> from omearrow_ds import formats
    >>> formats()[0].name, formats()[0].suffix
    ('parquet', '.parquet')
    """
    known = list(FORMATS)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        problem = None
        try:
            registered = entry.load()
        except _UNLOADABLE as error:  # the other formats must still work
            problem = f"{type(error).__name__}: {error}"
        else:
            if not isinstance(registered, Format) or registered.implementation is None:
                problem = f"{registered!r} is not a Format with an implementation"
            elif any(registered.name == fmt.name or _alike(registered, fmt) for fmt in known):
                problem = f"another format has the name {registered.name!r}, or the suffix {registered.suffix!r}"
            else:
                known.append(registered)
        if problem is not None:
            package = entry.dist.name if entry.dist is not None else entry.value
            warnings.warn(f"format {entry.name!r} of package {package!r} is ignored: {problem}", stacklevel=2)
    return tuple(known)


def get_format(name: str) -> Format:
    fmt = _BY_NAME.get(name) or next((fmt for fmt in formats() if fmt.name == name), None)
    if fmt is None:
        raise FormatError(f"format {name!r} is unknown; pass one of {format_names()}")
    return fmt


def format_names() -> str:
    return ", ".join(fmt.name for fmt in formats())


def fitting(test: Callable[[Format], bool]) -> list[Format]:
    """Return the built-in formats that pass ``test``, or those of other packages if none does."""
    return [fmt for fmt in FORMATS if test(fmt)] or [fmt for fmt in formats() if test(fmt)]


def of_suffix(name: str, *, files: bool = False) -> Format | None:
    """Return the format whose suffix ``name`` has, or None; ``files`` excludes formats that are stored as folders."""
    low = name.lower()
    for suffix, fmt in _BY_SUFFIX:
        if low.endswith(suffix) and not (files and fmt.is_folder):
            return fmt
    return next(iter(fitting(lambda fmt: low.endswith(fmt.suffixes) and not (files and fmt.is_folder))), None)


def format_of_target(path: Path) -> Format:
    """Return the format for the suffix of an output path; raise `FormatError` for an unknown suffix."""
    known = of_suffix(path.name)
    if known is None:
        suffixes = ", ".join(f"{fmt.suffix} ({fmt.name})" for fmt in formats())
        raise FormatError(f"{path}: the suffix is unknown, expected one of {suffixes}; correct it, or pass format=")
    return known


def _alike(fmt: Format, other: Format) -> bool:
    return any(one.endswith(two) or two.endswith(one) for one in fmt.suffixes for two in other.suffixes)
