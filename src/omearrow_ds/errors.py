"""Exceptions of the package: each is the package's base class and a builtin together.

OMEArrowDSError
├── ArgumentError (ValueError)          an option that is not one of those allowed
├── FormatError (ValueError)            unknown, ambiguous or damaged storage
│   └── DecodeError                     one stored image that cannot be decoded
│       └── ChecksumError               one that was decoded, and is not what was written
├── MissingPathError (FileNotFoundError)
├── PathExistsError (FileExistsError)
├── WriteError (OSError)                 the format's library could not write, e.g. the disk is full
├── StorageError (OSError)               a server that does not answer, or refuses
├── BackendError (ImportError)          the library that reads a format is not installed
├── ImageError (ValueError)             an image that cannot be written: rank, dtype, size
├── MetadataError (ValueError)          OME metadata, image ids or columns that do not fit
├── ColumnError (LookupError)           no such column
│   └── ImageColumnError                several columns hold images, and none was chosen
├── AxesError (ValueError)              axes, select or crop that do not fit an image
│   └── SelectError (IndexError)        select asks for an index outside an axis
├── ImageIndexError (IndexError)        no image of that index
└── MemoryLimitError (MemoryError)      the pixels do not fit the memory allowed
"""

from __future__ import annotations

from collections.abc import Sequence


class OMEArrowDSError(Exception):
    """Base of all errors that this package raises on purpose."""


class ArgumentError(OMEArrowDSError, ValueError):
    """An option whose value is not one of those allowed."""


class FormatError(OMEArrowDSError, ValueError):
    """A storage format that is unknown or ambiguous, or a file that is not what its format says."""


class DecodeError(FormatError):
    """A stored image whose pixels and description contradict each other, or are not supported."""


class ChecksumError(DecodeError):
    """A stored image that does not fit the checksum that was stored with it."""


class MissingPathError(OMEArrowDSError, FileNotFoundError):
    """Nothing is stored at the path."""


class PathExistsError(OMEArrowDSError, FileExistsError):
    """The target of a write exists, and overwriting was not asked for."""


class WriteError(OMEArrowDSError, OSError):
    """A collection that could not be written, for example because the disk is full; nothing is left of it."""


class StorageError(OMEArrowDSError, OSError):
    """A server that does not give what it is asked for: it is down, silent, or refuses."""


class BackendError(OMEArrowDSError, ImportError):
    """The optional package that a format needs is not installed."""


class ImageError(OMEArrowDSError, ValueError):
    """An image that cannot be written: its rank, dtype or size does not fit."""


class MetadataError(OMEArrowDSError, ValueError):
    """OME metadata, image ids or columns that do not fit the images."""


class ColumnError(OMEArrowDSError, LookupError):
    """A column that is not there."""


class ImageColumnError(ColumnError):
    """A table with several columns of images, none of which was chosen.

    Attributes
    ----------
    columns
        Their names.
    """

    def __init__(self, message: str, columns: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.columns = tuple(columns)


class AxesError(OMEArrowDSError, ValueError):
    """Axes, a selection or a crop that do not fit an image."""


class SelectError(AxesError, IndexError):
    """A selection that asks for an index outside an axis."""


class ImageIndexError(OMEArrowDSError, IndexError):
    """An index outside the collection."""


class MemoryLimitError(OMEArrowDSError, MemoryError):
    """Decoded pixels that would not fit the memory allowed."""
