"""Private names of the package that benchmarks use, imported only here.

The gate also runs these files on an older package, so names are imported from their older modules if necessary.
"""

from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np

from omearrow_ds.dataset.preload import PixelCache
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.formats import formats, get_format
from omearrow_ds.testing import synthetic_images

with suppress(ImportError):
    from omearrow_ds.kernels.compiled import WORTH_BYTES, worth
with suppress(ImportError):
    from omearrow_ds.resources import read_ahead_bytes, space_on_disk
with suppress(ImportError):  # An older package lacks them, but the gate does not need them.
    from omearrow_ds.advise.profile.loop import Loop
    from omearrow_ds.advise.profile.measure import preloaded
    from omearrow_ds.advise.profile.recorder import Breakdown
    from omearrow_ds.advise.profile.result import break_even_epochs
    from omearrow_ds.advise.recommend import Recommendation, recommend, tiles_of
    from omearrow_ds.advise.recommend.choices import LoadingPlan, StorageLayout, layouts
    from omearrow_ds.advise.turns import InterleavedRounds, gains
    from omearrow_ds.storage.formats import default_part_bytes

HAS_OBJECTS = find_spec("omearrow_ds.dataset.crop_boxes") is not None  # Whether datasets accept `objects=`.
HAS_PARTS = find_spec("omearrow_ds.storage.jobs") is not None  # Whether `convert` writes collections in parts.

__all__ = ["HAS_OBJECTS", "HAS_PARTS"]
__all__ += ["PixelCache", "available_cores", "decoded_bytes", "formats", "get_format", "synthetic_images"]
__all__ += ["as_after_some_epochs", "images_of", "read_ahead_bytes", "space_on_disk"]
__all__ += ["Breakdown", "Loop", "break_even_epochs", "preloaded"]
__all__ += [
    "InterleavedRounds",
    "LoadingPlan",
    "Recommendation",
    "StorageLayout",
    "default_part_bytes",
    "gains",
    "layouts",
    "recommend",
    "tiles_of",
]


def images_of(source: Any) -> Any:
    """Return the images of an open source; in an older package, a source reads them itself."""
    return getattr(source, "images", source)


def decoded_bytes(shapes: Any, dtypes: Any) -> int:
    return int(sum(np.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)))


def as_after_some_epochs() -> None:
    """Compile the loops of this process, as happens after some epochs."""
    with suppress(NameError):  # An older package lacks it.
        worth(WORTH_BYTES)
