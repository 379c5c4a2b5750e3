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
    """An invalid argument, or a combination of arguments that contradict each other.

    Examples
    --------
    >>> from omearrow_ds import open_images
    >>> open_images("plate.arrow", nulls="drop")
    Traceback (most recent call last):
    omearrow_ds.errors.ArgumentError: ...
    """


class FormatError(OMEArrowDSError, ValueError):
    """Storage with an unknown or ambiguous format, or a damaged file.

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
    """A stored image that cannot be decoded.

    Examples
    --------
    >>> from omearrow_ds import DecodeError, FormatError
    >>> issubclass(DecodeError, FormatError)
    True
    """


class ChecksumError(DecodeError):
    """A stored image whose pixels differ from those that were written.

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
    """A path at which nothing is stored.

    Examples
    --------
    >>> from omearrow_ds import open_images
    >>> open_images("missing.arrow")
    Traceback (most recent call last):
    omearrow_ds.errors.MissingPathError: ...
    """


class PathExistsError(OMEArrowDSError, FileExistsError):
    """An existing target, without ``overwrite=True``.

    Examples
    --------
    >>> import numpy as np
    >>> from omearrow_ds import write_images
    >>> write_images([np.zeros((8, 8), np.uint8)], "plate.arrow")
    Traceback (most recent call last):
    omearrow_ds.errors.PathExistsError: ...
    """


class WriteError(OMEArrowDSError, OSError):
    """A collection or cache that cannot be written, for example because the disk is full.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", cache_dir="cells.parquet")
    Traceback (most recent call last):
    omearrow_ds.errors.WriteError: ...
    """


class StorageError(OMEArrowDSError, OSError):
    """A server that does not answer, or refuses.

    Examples
    --------
    >>> from omearrow_ds import StorageError
    >>> issubclass(StorageError, OSError)
    True
    """


class BackendError(OMEArrowDSError, ImportError):
    """A format whose library is not installed.

    Examples
    --------
    >>> from omearrow_ds import BackendError
    >>> issubclass(BackendError, ImportError)
    True
    """


class ImageError(OMEArrowDSError, ValueError):
    """An image that cannot be written, because of its rank, dtype or size.

    Examples
    --------
    >>> import numpy as np
    >>> from omearrow_ds import write_images
    >>> write_images([np.zeros((8, 8), np.uint8)], "new.arrow", axes="CYX")
    Traceback (most recent call last):
    omearrow_ds.errors.ImageError: ...
    """


class MetadataError(OMEArrowDSError, ValueError):
    """OME metadata, image ids or columns that do not fit the images.

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
    """A column that does not exist or has unsuitable values.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", target="dose")
    Traceback (most recent call last):
    omearrow_ds.errors.ColumnError: ...
    """


class ImageColumnError(ColumnError):
    """A table with several image columns, none of which was chosen.

    Attributes
    ----------
    columns
        Their names.

    Examples
    --------
    >>> from omearrow_ds import ColumnError, ImageColumnError
    >>> issubclass(ImageColumnError, ColumnError)
    True
    """

    def __init__(self, message: str, columns: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.columns = tuple(columns)


class AxesError(OMEArrowDSError, ValueError):
    """Axes, a selection or a crop that do not fit an image.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", axes="YX")  # each image has two channels
    Traceback (most recent call last):
    omearrow_ds.errors.AxesError: ...
    """


class SelectError(AxesError, IndexError):
    """A selected index outside its axis.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", select={"C": [5]})
    Traceback (most recent call last):
    omearrow_ds.errors.SelectError: ...
    """


class ImageIndexError(OMEArrowDSError, IndexError):
    """An image or sample index that is out of range.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow")[99]
    Traceback (most recent call last):
    omearrow_ds.errors.ImageIndexError: ...
    """


class MemoryLimitError(OMEArrowDSError, MemoryError):
    """Decoded pixels that exceed the allowed memory.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> OMEArrowDataset("plate.arrow", max_bytes=1_000)
    Traceback (most recent call last):
    omearrow_ds.errors.MemoryLimitError: ...
    """
