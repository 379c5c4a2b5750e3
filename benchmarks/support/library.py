"""Names of the package that are not public and that benchmarks use: here alone.

The gate runs these files on an older package too: where that one keeps something elsewhere, it is taken from there.
"""

from contextlib import suppress
from importlib.util import find_spec

from omearrow_ds.dataset.preload import PixelCache, decoded_bytes
from omearrow_ds.resources import available_cores
from omearrow_ds.storage.formats import formats, get_format
from omearrow_ds.testing import synthetic_images

with suppress(ImportError):
    from omearrow_ds.kernels.compiled import WORTH_BYTES, worth
with suppress(ImportError):  # of an older package: what the gate measures needs none of these
    from omearrow_ds.advise.profile.breakdown import break_down
    from omearrow_ds.advise.profile.loop import Duration, Loop, Recording
    from omearrow_ds.advise.profile.recorder import ClockCost
    from omearrow_ds.advise.profile.training import Counting
    from omearrow_ds.advise.profile.trials import break_even_epochs
    from omearrow_ds.advise.profile.variants import preloaded
    from omearrow_ds.advise.recommend import Recommendation, recommend, tiles_of
    from omearrow_ds.advise.recommend.choices import Layout, Plan, layouts
    from omearrow_ds.advise.turns import Turns, gains
    from omearrow_ds.resources import read_ahead_bytes, space_on_disk

HAS_OBJECTS = find_spec("omearrow_ds.dataset.crops") is not None  # whether datasets take `objects=`
HAS_PARTS = find_spec("omearrow_ds.storage.jobs") is not None  # whether `convert` makes collections in parts

__all__ = ["HAS_OBJECTS", "HAS_PARTS"]
__all__ += ["PixelCache", "available_cores", "decoded_bytes", "formats", "get_format", "synthetic_images"]
__all__ += ["as_after_some_epochs", "read_ahead_bytes", "space_on_disk"]
__all__ += ["ClockCost", "Counting", "Duration", "Loop", "Recording", "break_down", "break_even_epochs", "preloaded"]
__all__ += ["Layout", "Plan", "Recommendation", "Turns", "gains", "layouts", "recommend", "tiles_of"]


def as_after_some_epochs() -> None:
    """Let this process make samples as one does that has made enough of them to have its loops compiled."""
    with suppress(NameError):  # an older package has none
        worth(WORTH_BYTES)
