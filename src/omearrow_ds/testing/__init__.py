"""Synthetic images; `omearrow_ds.testing.conformance`, which needs pytest, has the tests of a storage format."""

from omearrow_ds.testing.synthetic import synthetic_image, synthetic_images

__all__ = ["synthetic_image", "synthetic_images"]
