"""What the benchmarks use of the package beside its public names.

The gate runs these files on an older package too: what that one keeps elsewhere is taken from there.
"""

from functools import partial

try:
    from omearrow_ds.dataset.preload import PixelCache, decoded_bytes
    from omearrow_ds.resources import available_cores
    from omearrow_ds.storage.formats import formats, get_format
    from omearrow_ds.testing import synthetic_images
except ImportError:
    from omearrow_ds.cache import PixelCache, decoded_bytes  # type: ignore[import-not-found,no-redef]
    from omearrow_ds.cores import available_cores  # type: ignore[import-not-found,no-redef]
    from omearrow_ds.formats import FORMATS, get_format  # type: ignore[import-not-found,no-redef]
    from omearrow_ds.synthetic import synthetic_images  # type: ignore[import-not-found,no-redef]

    formats = partial(tuple, FORMATS)  # type: ignore[assignment]

__all__ = ["PixelCache", "available_cores", "decoded_bytes", "formats", "get_format", "synthetic_images"]
