"""The recommendation of a format and of loader settings for a collection: measured on a sample of it."""

from omearrow_ds.advise.recommend.advice import recommend
from omearrow_ds.advise.recommend.report import Recommendation
from omearrow_ds.advise.recommend.sample import tiles_of

__all__ = ["Recommendation", "recommend", "tiles_of"]
