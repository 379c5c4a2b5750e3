"""Exceptions of the package, each derived from the base class and a builtin exception.

OMEArrowDSError
├── ArgumentError (ValueError)          invalid or contradictory arguments
├── FormatError (ValueError)            unknown, ambiguous or damaged storage
│   └── DecodeError                     stored image that cannot be decoded
│       └── ChecksumError               decoded image that differs from the written one
├── MissingPathError (FileNotFoundError)
├── PathExistsError (FileExistsError)
├── WriteError (OSError)                failed write, e.g. because the disk is full
├── StorageError (OSError)              server that does not answer, or refuses
├── BackendError (ImportError)          library of a format that is not installed
├── ImageError (ValueError)             image that cannot be written: rank, dtype, size
├── MetadataError (ValueError)          OME metadata, image ids or columns that do not match
├── ColumnError (LookupError)           missing or unsuitable column
│   └── ImageColumnError                several image columns, none of which was chosen
├── AxesError (ValueError)              axes, selection or crop that do not match an image
│   └── SelectError (IndexError)        selected index outside its axis, or a filter that no row fulfills
├── ImageIndexError (IndexError)        image index out of range
└── MemoryLimitError (MemoryError)      pixels that exceed the allowed memory
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

_MOST_SHOWN = 400  # Characters of a value in a message.


class OMEArrowDSError(Exception):
    """Base class of the errors of this package.

    The message is made from the fields: ``{path}: {option}={value}: {problem}, expected {allowed}; {remedy}``.

    Attributes
    ----------
    path : str or None
        File, folder or URL at fault. Readers add it if it is missing.
    image : int or None
        Index of the image at fault.
    column : str or None
        Name of the column at fault.
    option : str or None
        Name of the argument or environment variable at fault.
    value : Any
        Value of the argument; ``...`` if it is missing, or if the error comes from another process.
    problem, allowed, remedy : str
        Cause, allowed values, and recommended action; empty if not stated.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDSError, open_images
    >>> try:
    ...     open_images("plate.arrow", level=-1)
    ... except OMEArrowDSError as error:
    ...     print(type(error).__name__, error.option, error.value)
    ArgumentError level -1
    """

    def __init__(
        self,
        problem: str = "",
        *,
        path: str | os.PathLike[str] | None = None,
        image: int | None = None,
        column: str | None = None,
        option: str | None = None,
        value: Any = ...,
        allowed: str = "",
        remedy: str = "",
    ) -> None:
        self.path = shown = None if path is None else os.fspath(path)
        self.image, self.column = image, column
        self.option, self.value = option, value
        self.problem, self.allowed, self.remedy = problem, allowed, remedy
        super().__init__(self.describe(show_keyword))
        self.path = shown  # `ImportError` has an attribute of this name, which it resets.

    def describe(self, show_option: Callable[[str, Any], str], show_text: Callable[[str], str] = str) -> str:
        """Return the message with options written as in Python or as on a command line.

        ``show_option`` formats an option and its value, and ``show_text`` the other texts.
        """
        path = None if self.path is not None and self.problem.startswith(self.path) else self.path
        option = None if self.option is None else show_option(self.option, self.value)
        allowed = self.allowed and f"expected {show_text(self.allowed)}"
        problem = ", ".join(filter(None, (show_text(self.problem), allowed)))
        message = ": ".join(filter(None, (path, option, problem)))
        return f"{message}; {show_text(self.remedy)}" if self.remedy else message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),), {**vars(self), "path": self.path, "value": ...}


def show_keyword(option: str, value: Any) -> str:
    """Return an option as Python code: ``level=-1``."""
    if value is ...:
        return f"{option}="
    shown = repr(os.fspath(value)) if isinstance(value, os.PathLike) else repr(value)
    return f"{option}={shown}" if len(shown) <= _MOST_SHOWN else f"{option}={shown[:_MOST_SHOWN]}..."


class ArgumentError(OMEArrowDSError, ValueError):
    """Error raised if an argument is invalid or contradicts another argument.

    Examples
    --------
    >>> from omearrow_ds import open_images
    >>> open_images("plate.arrow", nulls="drop")
    Traceback (most recent call last):
    omearrow_ds.errors.ArgumentError: ...
    """


class FormatError(OMEArrowDSError, ValueError):
    """Error raised if a format is unknown or ambiguous, or if a file is damaged.

    Examples
    --------
    >>> from pathlib import Path
    >>> from omearrow_ds import open_images
    >>> size = Path("notes.arrow").write_text("This is not an Arrow file.")
    >>> open_images("notes.arrow")
    Traceback (most recent call last):
    omearrow_ds.errors.FormatError: ...
    """


class DecodeError(FormatError):
    """Error raised if a stored image cannot be decoded.

    Examples
    --------
    >>> from omearrow_ds import DecodeError, FormatError
    >>> issubclass(DecodeError, FormatError)
    True
    """


class ChecksumError(DecodeError):
    """Error raised if the pixels of a stored image do not match its checksum.

    Examples
    --------
    >>> from pathlib import Path
    >>> from omearrow_ds import OMEArrowDataset
    >>> data = bytearray(Path("plate.arrow").read_bytes())
    >>> data[len(data) // 2] ^= 1  # one bit of one pixel
    >>> size = Path("damaged.arrow").write_bytes(data)
    >>> OMEArrowDataset("damaged.arrow")
    Traceback (most recent call last):
    omearrow_ds.errors.ChecksumError: ...
    """


class MissingPathError(OMEArrowDSError, FileNotFoundError):
    """Error raised if nothing exists at a path or URL.

    Examples
    --------
    >>> from omearrow_ds import open_images
    >>> open_images("missing.arrow")
    Traceback (most recent call last):
    omearrow_ds.errors.MissingPathError: ...
    """


class PathExistsError(OMEArrowDSError, FileExistsError):
    """Error raised if a target exists and ``overwrite=True`` was not passed.

    Examples
    --------
    >>> import numpy as np
    >>> from omearrow_ds import write_images
    >>> write_images([np.zeros((8, 8), np.uint8)], "plate.arrow")
    Traceback (most recent call last):
    omearrow_ds.errors.PathExistsError: ...
    """


class WriteError(OMEArrowDSError, OSError):
    """Error raised if a file cannot be written, for example because the disk is full.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", cache_dir="cells.parquet")
    Traceback (most recent call last):
    omearrow_ds.errors.WriteError: ...
    """


class StorageError(OMEArrowDSError, OSError):
    """Error raised if a server does not answer or refuses a request.

    Examples
    --------
    >>> from omearrow_ds import StorageError
    >>> issubclass(StorageError, OSError)
    True
    """


class BackendError(OMEArrowDSError, ImportError):
    """Error raised if a required library is not installed.

    Examples
    --------
    >>> from omearrow_ds import BackendError
    >>> issubclass(BackendError, ImportError)
    True
    """


class ImageError(OMEArrowDSError, ValueError):
    """Error raised if the shape or dtype of an image cannot be written.

    Examples
    --------
    >>> import numpy as np
    >>> from omearrow_ds import write_images
    >>> write_images([np.zeros((8, 8), np.uint8)], "new.arrow", axes="CYX")
    Traceback (most recent call last):
    omearrow_ds.errors.ImageError: ...
    """


class MetadataError(OMEArrowDSError, ValueError):
    """Error raised if metadata, image ids or columns do not match the images.

    Examples
    --------
    >>> import numpy as np
    >>> from omearrow_ds import write_images
    >>> images = [np.zeros((8, 8), np.uint8)] * 2
    >>> write_images(images, "new.arrow", image_ids=["A01", "A01"])
    Traceback (most recent call last):
    omearrow_ds.errors.MetadataError: ...
    """


class ColumnError(OMEArrowDSError, LookupError):
    """Error raised if a column does not exist or has unsuitable values.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", target="dose")
    Traceback (most recent call last):
    omearrow_ds.errors.ColumnError: ...
    """


class ImageColumnError(ColumnError):
    """Error raised if a table has several image columns and ``image_column`` was not passed.

    Attributes
    ----------
    columns : tuple of str
        Names of the image columns.

    Examples
    --------
    >>> from omearrow_ds import ColumnError, ImageColumnError
    >>> issubclass(ImageColumnError, ColumnError)
    True
    """

    def __init__(self, problem: str = "", columns: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(problem, **fields)
        self.columns = tuple(columns)


class AxesError(OMEArrowDSError, ValueError):
    """Error raised if axes, a selection or a crop do not match an image.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", axes="YX")  # each image has two channels
    Traceback (most recent call last):
    omearrow_ds.errors.AxesError: ...
    """


class SelectError(AxesError, IndexError):
    """Error raised if a selected index is out of range, or if no row matches a filter.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", select={"C": [5]})
    Traceback (most recent call last):
    omearrow_ds.errors.SelectError: ...
    """


class ImageIndexError(OMEArrowDSError, IndexError):
    """Error raised if the index of an image or sample is out of range.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow")[99]
    Traceback (most recent call last):
    omearrow_ds.errors.ImageIndexError: ...
    """


class MemoryLimitError(OMEArrowDSError, MemoryError):
    """Error raised if decoded pixels exceed the allowed memory.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", max_bytes=1_000)
    Traceback (most recent call last):
    omearrow_ds.errors.MemoryLimitError: ...
    """
