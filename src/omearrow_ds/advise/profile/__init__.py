"""The profiler: `profile_dataset` measures where the time of an epoch goes, `Profile` tells it."""

from omearrow_ds.advise.profile.measure import profile_dataset
from omearrow_ds.advise.profile.result import Profile

__all__ = ["Profile", "profile_dataset"]
