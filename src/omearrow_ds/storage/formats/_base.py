"""What every source shares: indices, batches, one handle a process, and pickling as how to reopen."""

from __future__ import annotations

import ctypes
import inspect
import math
import mmap
import os
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa

from omearrow_ds.codec import schema
from omearrow_ds.errors import (
    FormatError,
    ImageIndexError,
    MemoryLimitError,
    MissingPathError,
    OMEArrowDSError,
    PathExistsError,
)
from omearrow_ds.resources import available_bytes
from omearrow_ds.storage.formats import Format, get_format
from omearrow_ds.storage.formats._columns import plain_columns, refuse_types
from omearrow_ds.storage.formats._detect import refuse_special
from omearrow_ds.storage.formats._image_columns import ImagesOf
from omearrow_ds.storage.formats._stored import Stored

Array = np.ndarray[Any, Any]
_ASKED_BYTES = 2**28
LOOK_NS = 10**6  # between two looks at a file, where they would cost more than reading an image does
_PIECE_BYTES = 2**21  # of pixels that are written and then read again: less than a cache holds that cores share
Handle = TypeVar("Handle")
Stamp = tuple[int, ...]
Done = Callable[[int, int], object]
# What code meets that takes a damaged header at its word; a text that is no text is a ValueError too.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MemoryError, OSError)


class SupportsImages(Protocol):
    """Images in memory, by index: each (T, C, Z, Y, X), writable."""

    def __getitem__(self, index: Any, /) -> Array: ...


_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class ProcessLocal(Generic[Handle]):
    """A handle opened at its first use in each process.

    A forked child opens its own. What it inherited it keeps, unused and unclosed, to its end: Lance and DuckDB crash
    where a child closes its parent's handle.

    An opener that is a method is held weakly: its owner, which holds this, would otherwise be gone only when garbage is
    collected, with files, connections and the threads of these.
    """

    def __init__(self, opener: Callable[[], Handle]) -> None:
        method = weakref.WeakMethod(opener) if inspect.ismethod(opener) else None
        self._opener: Callable[[], Callable[[], Handle] | None] = method or (lambda: opener)
        self._owner: tuple[int, Handle] | None = None

    def get(self) -> Handle:
        """Return this process's handle, opened now if it was not."""
        owner = self._owner  # looked at once: another thread may close it
        if owner is not None and owner[0] == os.getpid():
            return owner[1]
        if owner is not None:
            _keep_for_ever(owner)
        opener = self._opener()
        if opener is None:
            raise ReferenceError("what opens the handle is gone")
        handle = opener()
        self._owner = (os.getpid(), handle)
        return handle

    def close(self) -> None:
        """Let go of this process's handle, if there is one; a later `get` opens another.

        It is closed with its last reference, which a thread that is reading may hold.
        """
        owner = self._owner
        if owner is not None and owner[0] == os.getpid():
            self._owner = None

    def __del__(self, getpid: Callable[[], int] = os.getpid, keep: Callable[[object], object] = _keep_for_ever) -> None:
        # An interpreter that ends may have cleared this module before: what is needed is held here.
        if self._owner is not None and self._owner[0] != getpid():
            keep(self._owner)


class Mapping:
    """A file that is mapped; if it is cut short, what was cut off must not be touched: that ends the process (SIGBUS).

    What is written over it appears in the mapping. A file that was put in its place does not.

    Attributes
    ----------
    file
        The mapping, which Arrow and NumPy take as a buffer.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._path, self._size_bytes = str(path), len(self.file)
        self._file_number, self._modified_ns, self._look_ns = (status.st_dev, status.st_ino), status.st_mtime_ns, 0

    def refuse_cut(self) -> None:
        """Raise `FormatError` if the file is not as long as it was when it was mapped, or was written over.

        The first takes 0.4 us and is looked at each time; the second takes 1.5, and is looked at once a millisecond.
        """
        if monotonic_ns() >= self._look_ns:
            self._look_ns = monotonic_ns() + LOOK_NS
            try:
                status = os.stat(self._path)  # noqa: PTH116  # pathlib would double its cost
            except OSError:  # it is gone, and so is who could write over it
                status = None
            if status is not None and (status.st_dev, status.st_ino) == self._file_number:
                self._size_bytes = self._size_bytes if status.st_mtime_ns == self._modified_ns else -1  # from now on
        if self.file.size() != self._size_bytes:
            raise FormatError(f"{self._path}: was changed since it was opened; open it again")


class refusing:  # noqa: N801  # reads as a phrase: with refusing(path, "a Parquet file", errors):
    """Turns ``errors``, and panics of libraries written in Rust, into a `FormatError` that names ``path``.

    With a source, that tells what the error means: what was replaced since it was opened is not damaged.

    It is entered at every read, where a `contextlib.contextmanager` takes five times as long.
    """

    __slots__ = ("_errors", "_label", "_path", "_source")

    def __init__(
        self, path: Path, label: str, errors: tuple[type[Exception], ...], source: BaseSource | None = None
    ) -> None:
        self._path, self._label, self._errors, self._source = path, label, errors, source

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, OMEArrowDSError):
            return
        if is_stop(error):
            raise KeyboardInterrupt from error
        if isinstance(error, self._errors) or is_panic(error):
            failure = None if self._source is None else self._source.failure(error)
            raise failure or damaged(self._path, self._label, error) from error


class _Opening:
    """Refuses errors, and a file that is another one afterwards than it was at first; see `BaseSource._opening`."""

    __slots__ = ("_first", "_refuse_replaced", "_refusing")

    def __init__(self, refusing_errors: refusing, refuse_replaced: Callable[[], None], *, first: bool) -> None:
        self._refusing, self._refuse_replaced, self._first = refusing_errors, refuse_replaced, first

    def __enter__(self) -> None:
        if self._first:
            self._refuse_replaced()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Exception):  # an error too may come of another file
            self._refuse_replaced()
        self._refusing.__exit__(kind, error, trace)


class BaseSource(ABC):
    """An open collection of images; the formats add how it is opened and read.

    A subclass sets ``name`` and ``errors`` (what the format's library raises), fills ``path``, ``image_ids``,
    ``shapes``, ``dtypes`` and ``columns`` when it is made, and gives `views`, `metadata` and `scan`.
    """

    name: ClassVar[str]
    errors: ClassVar[tuple[type[Exception], ...]]
    unheld_types: ClassVar[Sequence[Callable[[pa.DataType], bool]]] = ()
    path: Path
    image_ids: Sequence[str]
    shapes: Array
    dtypes: list[np.dtype[Any]]
    columns: pa.Table
    checksums: pa.ChunkedArray | None = None
    image_column: tuple[str, ...] = ()
    other_image_columns: tuple[str, ...] = ()
    _how: dict[str, Any]
    _stamp: Stamp | None = None

    @property
    def format(self) -> Format:
        """The storage format."""
        return get_format(self.name)

    @cached_property
    def _label(self) -> str:
        return self.format.label

    @cached_property
    def _looked_at(self) -> str:
        """Path of what is looked at to see whether the collection was replaced."""
        return str(self.path)

    @classmethod
    def refuse_target(cls, path: Path, columns: pa.Schema) -> None:
        """Raise an error if the format cannot stand at this path, or cannot hold these columns, by name or by type.

        Raises
        ------
        FormatError
            For the path.
        PathExistsError
            If there is a file beside it that would be read as part of what is written.
        MetadataError
            For a column.
        """
        for suffix in get_format(cls.name).beside:
            if os.path.lexists(f"{path}{suffix}"):
                msg = (
                    f"{path}{suffix}: would be read as part of what is to be written beside it, and holds changes of "
                    f"what was there before; merge them (with DuckDB: CHECKPOINT), or remove this file"
                )
                raise PathExistsError(msg)
        refuse_types(columns, cls.unheld_types, get_format(cls.name).label, str(path))

    @cached_property
    def rows(self) -> Array:
        """Row number in the table of each image, int64."""
        return np.arange(len(self))

    def image_columns(self) -> list[ImagesOf]:
        """Return what each image column of the table holds, without reading pixels; of a folder nothing."""
        return []

    def _set_columns(self, columns: pa.Table) -> None:
        """Take the columns that are stored; that of the checksums is none of the user's."""
        plain = plain_columns(columns, str(self.path))
        if schema.CHECKSUM_COLUMN in plain.column_names and plain[schema.CHECKSUM_COLUMN].type == pa.string():
            self.checksums = plain[schema.CHECKSUM_COLUMN]
            plain = plain.drop_columns(schema.CHECKSUM_COLUMN)
        self.columns = plain

    @abstractmethod
    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they may be read-only views of the store's memory."""

    def view(self, index: int) -> Array:
        """Return one image, ``0 <= index < len``; it may be a read-only view of the store's memory."""
        return self.views(np.array([index]))[0]

    def stacks(self) -> list[Array]:
        """Return all images as read-only views (n, T, C, Z, Y, X) of memory that holds them decoded, else []."""
        return []

    def guard(self) -> Callable[[], None] | None:
        """Return what must be called before each access to the `stacks`: it raises if their file was cut short."""
        return None

    @abstractmethod
    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image, every field of ome-arrow's present."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""

    def decode_into(self, images: SupportsImages, done: Done | None = None) -> None:
        """Decode every image once into ``images[index]``, an array of its shape and dtype; it may be a stack.

        ``done(first, stop)`` is called when images ``first`` to ``stop - 1`` are there, and in a processor's cache yet.
        """
        step = piece_length(self.shapes, self.dtypes)
        for start, decoded in self.scan():
            for first in range(start, start + len(decoded), step):
                part = decoded[first - start : first - start + step]
                stop = first + len(part)
                if isinstance(images, np.ndarray) and isinstance(part, np.ndarray):
                    images[first:stop] = part
                else:
                    for index, image in enumerate(part, start=first):
                        images[index][...] = image
                if done is not None:
                    done(first, stop)

    @abstractmethod
    def stored_as(self) -> Stored:
        """Return how the images are stored and read, without decoding pixels."""

    def stored_files(self) -> Iterator[Path]:
        """Yield the files that hold the collection."""
        if not self.path.is_dir():
            yield from (self.path, *filter(Path.exists, map(Path, self._told_by)))
            return
        for folder, _, names in os.walk(self.path):
            yield from (Path(folder, name) for name in names)

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections; a later read opens them again."""

    def _reading(self, path: Path | None = None) -> refusing:
        """Turn what the format's library raises into a `FormatError` that names ``path``, by default the source's."""
        return refusing(path or self.path, self._label, self.errors, self)

    def _interpreting(self, path: Path | None = None) -> refusing:
        """Turn also into a `FormatError` what our own code raises on values that no writer would store."""
        return refusing(path or self.path, self._label, (*self.errors, *MALFORMED), self)

    def failure(self, error: BaseException) -> OMEArrowDSError | None:
        """Return the error for what the library raised where nothing is damaged; None where it may be."""
        del error
        try:
            self._refuse_replaced()
        except OMEArrowDSError as replaced:
            return replaced
        return None

    def _opening(self) -> _Opening:
        """As `_reading`, around what opens the file by its path: afterwards it has to be the one of the first time.

        What was opened between two looks at the same file is that file, and the first look stays good: a file that was
        replaced does not come back.
        """
        return _Opening(self._reading(), self._refuse_replaced, first=self._stamp is None)

    def _refuse_replaced(self) -> None:
        """Raise `FormatError` if the file, or what its collection is told by, is not that of the first call."""
        try:
            status = os.stat(self._looked_at)  # noqa: PTH116  # at every read: pathlib would double its cost
        except FileNotFoundError:
            raise MissingPathError(f"{self.path}: was removed since it was opened") from None
        stamp: Stamp = (status.st_dev, status.st_ino)
        if not stat.S_ISDIR(status.st_mode):
            stamp = (*stamp, status.st_size, status.st_mtime_ns)
        for told_by in self._told_by:
            stamp += _state_of(told_by)
        if self._stamp is None:
            for each in (str(self.path), *self._told_by):
                refuse_special(each)
            self._stamp = stamp
        if stamp != self._stamp:
            raise FormatError(f"{self.path}: was replaced or changed since it was opened; open it again")

    @cached_property
    def _told_by(self) -> Sequence[str]:
        """Paths of the files, there or not, that tell what the collection is beside what stands at its path."""
        return [str(file) for file in self.format.files_beside(self.path)]

    @property
    def stamp(self) -> Stamp | None:
        """What tells the file or folder that was opened from one that was put in its place."""
        return self._stamp

    def __len__(self) -> int:
        return len(self.image_ids)

    def read(self, index: int) -> Array:
        """Return one image (T, C, Z, Y, X) in memory of its own.

        Raises
        ------
        ImageIndexError
            If ``index`` is outside ``-len(self)`` to ``len(self) - 1``.
        DecodeError
            If what is stored is no valid image.
        """
        return _owned(self.view(self.index(index)))

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return the images of ``indices``, in that order, duplicates kept, each in memory of its own."""
        positions = self.indices(indices).tolist()
        distinct = sorted(set(positions))
        views = dict(zip(distinct, self.views(np.array(distinct, np.int64)), strict=True))
        owned = {position: _owned(views[position]) for position in distinct}
        return [owned.pop(position) if position in owned else np.array(views[position]) for position in positions]

    def index(self, index: int) -> int:
        """Return ``index`` counted from the front, or raise `ImageIndexError`."""
        try:
            position = index.__index__()
        except (AttributeError, TypeError):
            raise ImageIndexError(f"{self.path}: image index {index!r} is no integer") from None
        if not -len(self) <= position < len(self):
            raise ImageIndexError(f"{self.path}: image index {position} is outside the {len(self)} images")
        return position % len(self)

    def indices(self, indices: Sequence[int] | Array) -> Array:
        """Return ``indices`` counted from the front as int64, or raise `ImageIndexError`."""
        array = np.asarray(indices)
        if array.size == 0:
            return np.zeros(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ImageIndexError(f"{self.path}: image indices must be a sequence of integers, not {indices!r}")
        array = array.astype(np.int64)
        outside = (array < -len(self)) | (array >= len(self))
        if outside.any():
            raise ImageIndexError(f"{self.path}: image index {array[outside][0]} is outside the {len(self)} images")
        return np.where(array < 0, array + len(self), array)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pinned(self) -> dict[str, Any]:
        """Keywords that open this very state, where what stands at a path has several."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Carry how to open it: a subclass keeps the keywords that it was made with as ``_how``."""
        return partial(type(self), **self._how, **self.pinned), (self.path,)

    def __repr__(self) -> str:
        return f"<{self.format.label} source of {len(self)} images at {str(self.path)!r}>"


def _state_of(path: str) -> Stamp:
    """Return what tells a file from one that was put in its place, or written over it; zeros where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116  # as above
    except (FileNotFoundError, NotADirectoryError):
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def piece_length(shapes: Array, dtypes: Sequence[np.dtype[Any]]) -> int:
    """Return how many images stay in a processor's cache from when they are decoded, if all are like the first one."""
    first_bytes = math.prod(shapes[0].tolist()) * dtypes[0].itemsize if len(shapes) else 0
    return max(1, _PIECE_BYTES // max(1, first_bytes))


def _owned(image: Array) -> Array:
    return image if image.flags.owndata and image.flags.writeable else np.array(image, order="C")


def new_image(shape: Sequence[int], dtype: np.dtype[Any], path: Path | str) -> Array:
    """Return uninitialised memory for what a file says that it holds; the file may say more than there is memory.

    Raises
    ------
    MemoryLimitError
        If it is more than the memory available; of less than 256 MiB nobody is asked.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes > _ASKED_BYTES and size_bytes > available_bytes():
        msg = (
            f"{path}: an image of shape {tuple(shape)} {dtype} takes {size_bytes:,} bytes, "
            f"available are {available_bytes():,}; it is damaged, or needs a machine with more memory"
        )
        raise MemoryLimitError(msg)
    return np.empty(shape, dtype)


def is_stop(error: BaseException) -> bool:
    """Whether it is what DuckDB makes of Ctrl-C."""
    return str(error) in ("Query interrupted", "INTERRUPT Error: Interrupted!")


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library written in Rust: no `Exception`, and of each library a class of its own."""
    return type(error).__name__ == "PanicException"


def refuse_odd_name(path: Path) -> None:
    """Raise `FormatError` if a path is no text, which half of the libraries cannot be told."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise damaged(path, "a path", error) from None


def damaged(path: Path, label: str, error: BaseException) -> FormatError:
    """Return the error for a file that its own library refuses to read."""
    if isinstance(error, UnicodeEncodeError):
        return FormatError(f"{str(path)!a}: the name is no valid UTF-8; rename it")
    if isinstance(error, PermissionError):
        return FormatError(f"{path}: may not be read: {error.strerror}; ask its owner for leave ({error.filename})")
    found = "it is damaged, incomplete or of another format"
    return FormatError(f"{path}: cannot be read as {label}; {found}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: some libraries add a native backtrace."""
    return str(error).split("\n", maxsplit=1)[0]
