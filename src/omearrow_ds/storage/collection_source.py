"""`CollectionSource`: the public view of an open collection; reading is done by its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from omearrow_ds.errors import ImageIndexError
from omearrow_ds.resources import image_bytes
from omearrow_ds.storage.formats._base import Array, Images, forwarded
from omearrow_ds.storage.formats._pictures import Pictures, as_html, kinds, shapes
from omearrow_ds.storage.formats._regions import Pick, pick_region
from omearrow_ds.text import count


class CollectionSource:
    """An open collection as users see it; see `omearrow_ds.ImageSource` for its members.

    ``images`` is the internal interface, with which datasets read.
    """

    format = forwarded("images.header.format")
    rows = forwarded("images.header.rows")
    columns = forwarded("images.header.columns.table")
    column_names = forwarded("images.header.columns.names")
    column = forwarded("images.header.columns.column")
    column_table = forwarded("images.header.columns.select")
    close = forwarded("images.close")

    def __init__(self, images: Images) -> None:
        header = images.header
        self.images = images
        self.path, self.image_ids = header.path, header.image_ids
        self.shapes, self.dtypes = header.shapes, header.dtypes

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the OME metadata of one image, with every field of ome-arrow."""
        return self.images.metadata(self._position(index))

    def __len__(self) -> int:
        return len(self.image_ids)

    def read(
        self,
        index: int,
        region: Sequence[int] | None = None,
        channels: Pick | None = None,
        *,
        z: Pick | None = None,
        t: Pick | None = None,
    ) -> Array:
        """Return one image, or a region of it, as a new writable array; see `omearrow_ds.ImageSource`."""
        position = self._position(index)
        if region is None and channels is None and z is None and t is None:
            return _owned(self.images.read([position])[0])
        picked = pick_region(
            self.shapes[position].tolist(),
            region,
            {"T": t, "C": channels, "Z": z},
            lambda: [channel["name"] for channel in self.images.metadata(position)["channels"]],
            f"{self.path}: image {position} ({self.image_ids[position]!r})",
        )
        return _owned(picked.join(self.images.read([position] * len(picked.regions), picked.regions)))

    def take(self, indices: Sequence[int] | Array) -> list[Array]:
        """Return several images as new writable arrays, in the order of ``indices``, including duplicates."""
        positions = self._positions(indices)
        distinct = sorted(set(positions))
        images = dict(zip(distinct, self.images.read(distinct), strict=True))
        owned = {position: _owned(image) for position, image in images.items()}
        return [owned.pop(position) if position in owned else np.array(images[position]) for position in positions]

    def _position(self, index: int) -> int:
        """Return an index as a non-negative number; raise `ImageIndexError` if it is invalid."""
        try:
            position = index.__index__()
        except (AttributeError, TypeError):
            raise ImageIndexError(f"{self.path}: image index {index!r} is not an integer; pass an integer") from None
        if not -len(self) <= position < len(self):
            raise self._out_of_range(position)
        return position % len(self)

    def _positions(self, indices: Sequence[int] | Array) -> list[int]:
        """Return indices as non-negative numbers; raise `ImageIndexError` if one is invalid."""
        array = np.asarray(indices)
        if array.size == 0:
            return []
        if array.ndim != 1 or array.dtype.kind not in "iu":
            problem = f"image indices {indices!r}: expected a sequence of integers"
            raise ImageIndexError(f"{self.path}: {problem}; pass a list or an array")
        array = array.astype(np.int64)
        is_outside = (array < -len(self)) | (array >= len(self))
        if is_outside.any():
            raise self._out_of_range(array[is_outside][0])
        positions: list[int] = np.where(array < 0, array + len(self), array).tolist()
        return positions

    def _out_of_range(self, index: int) -> ImageIndexError:
        limits = f"{-len(self)} to {len(self) - 1}"
        problem = f"image index {index} is out of range for {count(len(self), 'image')}"
        return ImageIndexError(f"{self.path}: {problem}; pass {limits if len(self) else 'another collection'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return CollectionSource, (self.images,)

    def __repr__(self) -> str:
        return repr(self.images)

    def _preview(self) -> Pictures:
        return Pictures(
            str(self.path),
            self.image_ids,
            self.images.header.columns.schema,
            self.column,
            image_bytes(self.shapes, self.dtypes),
            lambda index: self.images.read([index])[0],
            lambda index: [channel["name"] for channel in self.images.metadata(index)["channels"]],
        )

    def _repr_html_(self) -> str:
        dtypes = kinds(dtype.name for dtype in self.dtypes)
        facts = [("path", str(self.path)), ("shape", shapes(self.shapes)), ("dtype", dtypes)]
        return as_html(f"{self.format.label} source of {count(len(self), 'image')}", facts, self._preview())


def _owned(image: Array) -> Array:
    is_own = image.flags.owndata and image.flags.writeable and image.flags.c_contiguous
    return image if is_own else np.array(image, order="C")
