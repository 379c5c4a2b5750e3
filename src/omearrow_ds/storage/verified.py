"""`VerifiedSource`: a source whose images are compared with their stored checksums whenever they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.errors import ArgumentError, ChecksumError, FormatError
from omearrow_ds.storage.checksums import KIND, Hasher
from omearrow_ds.storage.formats._base import BaseSource, Block, Done, Over, SupportsImages, piece_length

Array = np.ndarray[Any, Any]
_LOCKED_BYTES = 2**16  # xxhash 4 holds the interpreter's lock for as many, and lets go of it for more


class VerifiedSource(Over):
    """A source that gives an image only if it is the one that was written.

    Every image is hashed each time that it is handed out, also where it lies in a mapped file: a page that was read
    from the disk once may be read again. So it has no ``mapping``, whose images could be read past the check. Raises
    `ArgumentError` if no checksums are stored; `FormatError` if an image has none, or one of an unknown kind. With
    ``gaps`` images without a checksum are given as they are, as rows have none that another program appended.
    """

    def __init__(self, source: BaseSource, *, gaps: bool = False) -> None:
        if source.checksums is None and len(source):
            msg = (
                f"{source.path}: stores no checksums to verify; write it with checksum=True, "
                f"convert it with checksum=True, or pass verify=False"
            )
            raise ArgumentError(msg)
        super().__init__(source)
        self._gaps, self._hasher = gaps, Hasher()
        self._known: list[str | None] = [] if source.checksums is None else self._compared(source.checksums)

    def _compared(self, checksums: pa.ChunkedArray) -> list[str | None]:
        """Return the checksums, None of an image without, if there may be such.

        Raises `FormatError` if there may not, or a checksum is of an unknown kind.
        """
        known: list[str | None] = checksums.to_pylist()
        odd = pc.fill_null(pc.invert(pc.starts_with(checksums, KIND)), not self._gaps)
        if pc.any(odd).as_py():
            index = pc.index(odd, True).as_py()
            found = known[index]
            what = "no checksum" if found is None else f"a checksum of an unknown kind, {found[:40]!r}"
            remedy = "restore it, or use a newer version; verify=False reads it as it is"
            raise FormatError(f"{self.path}: image {index} has {what}; {remedy}", image=index)
        return known

    def _check(self, indices: Iterable[int], images: Array | Sequence[Array], where: str = "") -> None:
        """Do nothing if ``images`` are the ones that were written as images ``indices``.

        Raises `ChecksumError` if one is not.
        """
        for index, image in zip(indices, images, strict=True):
            known = self._known[index]
            if known is not None and self._hasher.checksum(image) != known:
                msg = (
                    f"{where or self.path}: image {index} ({self.image_ids[index]!r}) is not what was written: its "
                    f"pixels, shape or dtype do not fit its checksum in column {schema.CHECKSUM_COLUMN!r}; "
                    f"restore it from a copy"
                )
                raise ChecksumError(msg)

    def check_all(self, images: SupportsImages, where: str = "", done: Done | None = None) -> None:
        """Raise `ChecksumError` if ``images[index]`` is not the image that was written, for any index."""
        step = piece_length(self.shapes, self.dtypes)
        for first in range(0, len(self), step):
            part = range(first, min(first + step, len(self)))
            self._check(part, [images[index] for index in part], where)
            if done is not None:
                done(part.start, part.stop)

    def views(self, indices: Sequence[int]) -> list[Array]:
        # Hashing would copy what is not contiguous, and `read` copy it again.
        images = list(map(np.ascontiguousarray, self._source.views(indices)))
        self._check(indices, images)
        return images

    def blocks(self) -> Iterator[Block]:
        for start, images in self._source.blocks():
            self._check(range(start, start + len(images)), images)
            yield start, images

    def decode_into(self, images: SupportsImages, done: Done | None = None) -> None:
        """Decode every image once into ``images[index]``, where it is checked while a processor's cache holds it.

        Large images are checked in a thread beside the decoding; of small ones the hash holds the interpreter's lock.
        """
        beside = len(self) > 0 and images[0].nbytes > _LOCKED_BYTES
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1, "omearrow_ds-checksums") if beside else nullcontext() as threads:

            def check(first: int, stop: int) -> None:
                part = range(first, stop)
                views = [images[index] for index in part]
                if threads is None:
                    self._check(part, views)
                else:
                    pending.append(threads.submit(self._check, part, views))
                    while pending[0].done() and len(pending) > 1:
                        pending.popleft().result()
                if done is not None:
                    done(first, stop)

            self._source.decode_into(images, check)
            for each in pending:
                each.result()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), gaps=self._gaps), (self._source,)

    def __repr__(self) -> str:
        return f"<verified {self._source!r}>"


def verified_where_stored(source: BaseSource) -> BaseSource:
    """Return a source that compares the checksums that are stored, or ``source`` itself if there are none."""
    if source.checksums is None or isinstance(source, VerifiedSource):
        return source
    return VerifiedSource(source, gaps=True)
