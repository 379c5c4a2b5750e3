"""Recommendation of a format and loader settings, measured on a sample of a collection."""

from omearrow_ds.advise.recommend.advice import Recommendation, recommend
from omearrow_ds.advise.recommend.sample import tiles_of

__all__ = ["Recommendation", "recommend", "tiles_of"]
