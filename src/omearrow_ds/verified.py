"""`VerifiedSource`: a source whose images are compared with their stored checksums whenever they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from omearrow_ds import schema
from omearrow_ds.checksums import KIND, checksum_of
from omearrow_ds.errors import ArgumentError, ChecksumError, FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from omearrow_ds.formats import Format
    from omearrow_ds.formats._base import SupportsImages
    from omearrow_ds.formats._image_columns import ImagesOf
    from omearrow_ds.formats._stored import Stored
    from omearrow_ds.source import ImageSource

Array = np.ndarray[Any, Any]


class VerifiedSource:
    """A source that gives an image only if it is the one that was written.

    Every image is hashed each time that it is handed out, also where it lies in a mapped file: a page that was read
    from the disk once may be read again. So there are no `stacks` that could be read past the check.

    Parameters
    ----------
    source
        The source to read from; closing the one closes the other.

    Raises
    ------
    ArgumentError
        If no checksums are stored.
    FormatError
        If an image has none, or one of an unknown kind.
    """

    def __init__(self, source: ImageSource) -> None:
        if source.checksums is None and len(source):
            msg = (
                f"{source.path}: stores no checksums to verify; write it with checksum=True, "
                f"convert it with checksum=True, or pass verify=False"
            )
            raise ArgumentError(msg)
        self._source = source
        self.path, self.image_ids, self.columns = source.path, source.image_ids, source.columns
        self.shapes, self.dtypes, self.checksums = source.shapes, source.dtypes, source.checksums
        self.rows, self.image_column = source.rows, source.image_column
        self.other_image_columns = source.other_image_columns
        self._known: list[str] = [] if source.checksums is None else source.checksums.to_pylist()
        for index, known in enumerate(self._known):
            if known is None or not known.startswith(KIND):
                what = "no checksum" if known is None else f"a checksum of an unknown kind, {known[:40]!r}"
                remedy = "restore it, or use a newer version; verify=False reads it as it is"
                raise FormatError(f"{self.path}: image {index} has {what}; {remedy}")

    @property
    def format(self) -> Format:
        """The storage format."""
        return self._source.format

    @property
    def stamp(self) -> tuple[int, ...] | None:
        """What tells the file or folder that was opened from one that was put in its place."""
        return self._source.stamp

    def image_columns(self) -> list[ImagesOf]:
        """Return what each image column of the table holds, without reading pixels; of a folder nothing."""
        return self._source.image_columns()

    def stored_as(self) -> Stored:
        """Return how the images are stored and read, without decoding pixels."""
        return self._source.stored_as()

    def stored_files(self) -> Iterator[Path]:
        """Yield the files that hold the collection."""
        return self._source.stored_files()

    def _check(self, index: int, image: Array, where: str = "") -> Array:
        """Return ``image`` if it is the one that was written as image ``index``.

        Raises
        ------
        ChecksumError
            If it is not.
        """
        if checksum_of(image) != self._known[index]:
            msg = (
                f"{where or self.path}: image {index} ({self.image_ids[index]!r}) is not what was written: its pixels, "
                f"shape or dtype do not fit its checksum in column {schema.CHECKSUM_COLUMN!r}; restore it from a copy"
            )
            raise ChecksumError(msg)
        return image

    def check_all(self, images: SupportsImages, where: str = "") -> None:
        """Raise `ChecksumError` if ``images[index]`` is not the image that was written, for any index."""
        for index in range(len(self)):
            self._check(index, images[index], where)

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image, which no checksum covers."""
        return self._source.metadata(index)

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Array:
        """Return one image (T, C, Z, Y, X) in memory of its own."""
        image = self._source.read(index)
        return self._check(int(index) % len(self), image)

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return the images of ``indices``, in that order, duplicates kept, each in memory of its own."""
        images = self._source.take(indices)
        return [self._check(int(index) % len(self), image) for index, image in zip(indices, images, strict=True)]

    def view(self, index: int) -> Array:
        """Return one image, ``0 <= index < len``; it may be a read-only view of the store's memory."""
        return self._check(index, self._source.view(index))

    def views(self, indices: Array) -> list[Array]:
        """Return the images of sorted, distinct ``indices``; they may be read-only views of the store's memory."""
        images = self._source.views(indices)
        return [self._check(index, image) for index, image in zip(indices.tolist(), images, strict=True)]

    def stacks(self) -> list[Array]:
        """Return []: from a stack, images could be taken without a check."""
        return []

    def guard(self) -> None:
        """Return nothing to call: there are no stacks."""

    def scan(self) -> Iterator[tuple[int, Array | list[Array]]]:
        """Yield all images in order as ``(first index, images)``; an array is a stack (n, T, C, Z, Y, X)."""
        for start, images in self._source.scan():
            for index, image in enumerate(images, start=start):
                self._check(index, image)
            yield start, images

    def decode_into(self, images: SupportsImages) -> None:
        """Decode every image once into ``images[index]``, an array of its shape and dtype; it may be a stack."""
        self._source.decode_into(images)
        self.check_all(images)

    def close(self) -> None:
        """Let go of files and connections; a later read opens them again."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._source,)

    def __repr__(self) -> str:
        return f"<verified {self._source!r}>"
