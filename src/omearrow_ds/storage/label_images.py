"""`LabelSource`: label images of wide dtypes, read as int32 or uint8."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from omearrow_ds.codec.schema import DTYPES, LABEL_DTYPES
from omearrow_ds.errors import DecodeError
from omearrow_ds.resources import one_of
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats._base import Array, Images, ImagesWrapper


class LabelSource(ImagesWrapper):
    """Label images that are read as uint8 if stored as bool, and as int32 if stored as int64 or uint64.

    Reading raises `DecodeError` for a label that does not fit in int32.
    """

    def __init__(self, source: Images) -> None:
        super().__init__(source)
        self.dtypes = [LABEL_DTYPES.get(dtype, dtype) for dtype in source.dtypes]

    def read_arrays(
        self, rows: Sequence[int], regions: Sequence[Region] | None = None, out: Sequence[Array] | None = None
    ) -> list[Array]:
        del out
        return list(map(self._narrow, rows, self._source.read_arrays(rows, regions)))

    @property
    def fills_out(self) -> bool:
        return False

    def read_groups(self) -> Iterable[slice]:
        return self._source.read_groups()

    def _narrow(self, index: int, pixels: Array) -> Array:
        dtype = self.dtypes[index]
        if pixels.dtype.itemsize > dtype.itemsize:
            limits = np.iinfo(dtype)
            beyond = [label for label in (pixels.min(), pixels.max()) if not limits.min <= label <= limits.max]
            if beyond:
                label = f"the label {beyond[0]}, which exceeds {dtype}"
                raise DecodeError(
                    f"{self.path}: mask {index} ({self.image_ids[index]!r}) has {label}; use consecutive labels, "
                    f"e.g. with skimage.segmentation.relabel_sequential"
                )
        return pixels.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return LabelSource, (self._source,)


def with_label_dtypes(source: Images) -> Images:
    """Return a source of label images with dtypes that torch supports; ``source`` itself if it needs no conversion."""
    return source if _find_wide(source) is None else LabelSource(source)


def refuse_label_dtypes(source: Images) -> None:
    """Raise `DecodeError` if an image has a dtype that is supported only for label images."""
    index = _find_wide(source)
    if index is not None:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise DecodeError(
            f"{source.path}: image {index} ({source.image_ids[index]!r}) has the dtype {source.dtypes[index].name!r}, "
            f"expected one of {names}; convert the image, or pass label images as masks=",
            image=index,
        )


def _find_wide(source: Images) -> int | None:
    dtypes = source.dtypes[:1] if one_of(source.dtypes) else source.dtypes
    return next((index for index, dtype in enumerate(dtypes) if dtype in LABEL_DTYPES), None)
