"""`VerifiedSource`: a source whose images are compared with their stored checksums on each read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc

from omearrow_ds.codec import schema
from omearrow_ds.errors import ArgumentError, ChecksumError, FormatError
from omearrow_ds.storage.extents import Regions, Targets
from omearrow_ds.storage.formats._base import (
    Array,
    Block,
    Done,
    ImageBuffer,
    Images,
    ImagesWrapper,
    crop_images,
    decode_into,
    images_per_cache_block,
)
from omearrow_ds.storage.hashes import KIND, checksum_of

_LOCKED_BYTES = 2**16  # Up to this size, xxhash 4 holds the GIL; for larger data it releases it.


class VerifiedSource(ImagesWrapper):
    """A source that raises `ChecksumError` for images that do not match their checksums.

    Mapped images are hashed each time too, because a page may be read from disk again. With ``gaps``, images without a
    checksum, such as rows appended by other programs, are returned unchecked.
    """

    def __init__(self, source: Images, *, gaps: bool = False) -> None:
        header = source.header
        checksums = header.columns.checksums
        if checksums is None and len(source):
            problem = "the collection has no checksums"
            remedy = "write or convert it with checksum=True, or pass verify=False"
            raise ArgumentError(problem, path=header.path, option="verify", value=True, remedy=remedy)
        super().__init__(source)
        self._gaps = gaps
        self._known: list[str | None] = [] if checksums is None else checksums.to_pylist()
        # `fill_null` and `index` would import pandas if it is installed, which takes 0.15 s.
        if checksums is not None and not pc.all(pc.starts_with(checksums, KIND), skip_nulls=gaps, min_count=0).as_py():
            index = [gaps if text is None else text.startswith(KIND) for text in self._known].index(False)
            checksum = self._known[index]
            problem = "no checksum" if checksum is None else f"a checksum of an unknown kind, {checksum[:40]!r}"
            remedy = "restore it, update omearrow-ds, or pass verify=False to read it unverified"
            raise FormatError(f"image {index} has {problem}", path=header.path, image=index, remedy=remedy)

    def check(self, indices: Iterable[int], images: Array | Sequence[Array], subject: str = "") -> None:
        for index, image in zip(indices, images, strict=True):
            known = self._known[index]
            if known is not None and checksum_of(image) != known:
                problem = (
                    f"image {index} ({self.header.image_ids[index]!r}) differs from the original: pixels, shape or "
                    f"dtype do not match its checksum in column {schema.CHECKSUM_COLUMN!r}"
                )
                path, remedy = subject or self.header.path, "restore it from a copy"
                raise ChecksumError(problem, path=path, image=index, remedy=remedy)

    def check_all(self, images: ImageBuffer, subject: str, done: Done | None) -> None:
        """Raise `ChecksumError` if any ``images[index]`` does not match the checksum of image ``index``."""
        step = images_per_cache_block(self.header.shapes, self.header.dtypes)
        for first in range(0, len(self), step):
            part = range(first, min(first + step, len(self)))
            self.check(part, [images[index] for index in part], subject)
            if done is not None:
                done(part.start, part.stop)

    def read(self, rows: Sequence[int], regions: Regions = None, out: Targets = None) -> list[Array]:
        if regions is not None:
            return crop_images(self, rows, regions)
        # Hashing would copy arrays that are not contiguous, and `read` would copy them again.
        images = list(map(np.ascontiguousarray, self.source.read(rows, out=out)))
        self.check(rows, images)
        return images

    def stream(self) -> Iterator[Block]:
        for start, images in self.source.stream():
            self.check(range(start, start + len(images)), images)
            yield start, images

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), gaps=self._gaps), (self.source,)

    def __repr__(self) -> str:
        return f"<verified {self.source!r}>"


def decode(images: Images, out: ImageBuffer, done: Done | None = None) -> None:
    """Decode each image once, like `decode_into`; images of a `VerifiedSource` are verified while in the CPU cache.

    Large images are checked in a thread during decoding; for small ones, hashing would hold the GIL.
    """
    if not isinstance(images, VerifiedSource):
        decode_into(images, out, done)
        return
    use_thread = len(images) > 0 and out[0].nbytes > _LOCKED_BYTES
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "omearrow_ds-checksums") if use_thread else nullcontext() as threads:

        def check(first: int, stop: int) -> None:
            part = range(first, stop)
            decoded = [out[index] for index in part]
            if threads is None:
                images.check(part, decoded)
            else:
                pending.append(threads.submit(images.check, part, decoded))
                while pending[0].done() and len(pending) > 1:
                    pending.popleft().result()
            if done is not None:
                done(first, stop)

        decode_into(images.source, out, check)
        for check_result in pending:
            check_result.result()


def verified_where_stored(source: Images) -> Images:
    """Return a source that verifies images that have checksums, or ``source`` itself if no checksums are stored."""
    if source.header.columns.checksums is None or isinstance(source, VerifiedSource):
        return source
    return VerifiedSource(source, gaps=True)
