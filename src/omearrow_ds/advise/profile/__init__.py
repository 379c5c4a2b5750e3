"""The profiler: `profile_dataset` measures the time of an epoch by stage, `Profile` reports it."""

from omearrow_ds.advise.profile.measure import profile_dataset
from omearrow_ds.advise.profile.result import Profile

__all__ = ["Profile", "profile_dataset"]
