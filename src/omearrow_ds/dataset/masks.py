"""`MaskedSamples`: masks of samples, cut like their images, and background removal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from omearrow_ds.axes import SampleAxes
from omearrow_ds.dataset.cache_dir import collection_fingerprint
from omearrow_ds.dataset.collection import Allocate, Array, Collection, Preload, PreloadOptions
from omearrow_ds.dataset.copies import copy_with
from omearrow_ds.dataset.crops import CropCollection
from omearrow_ds.dataset.places import Windows
from omearrow_ds.errors import ArgumentError, BackendError, DecodeError
from omearrow_ds.storage.formats._base import BaseSource
from omearrow_ds.storage.verified import verified_where_stored

_FIELDS_LOOKED_AT = 16  # To detect binary masks.


class MaskedSamples:
    """Masks of a collection's samples.

    ``mask_of`` is (n,) int64, the index in ``source`` of each image's mask; -1 for an image without a mask, which is
    not read. A mask has the ``axes`` of an image's sample, without C if masks have one channel. With ``background``,
    pixels outside the object of a crop become 0, in the image and in the mask. Raises `ArgumentError` if samples then
    are not crops around objects.
    """

    def __init__(
        self,
        images: Collection,
        source: BaseSource,
        mask_of: Array,
        axes: SampleAxes,
        options: PreloadOptions,
        *,
        background: bool,
    ) -> None:
        self._images, self._mask_of = images, mask_of
        channels = int(source.shapes[:, 1].max(initial=1))
        mask_axes = axes.axes if channels > 1 else axes.axes.replace("C", "")
        picks = {axis: pick for axis, pick in (axes.select or {}).items() if axis != "C"}
        crop_size = axes.crop_size
        if options.verify:
            source = verified_where_stored(source)
        if options.cache_dir is not None:  # Also detects a file that was replaced after opening.
            options = options._replace(fingerprint=collection_fingerprint(source.path))
        self.collection = Collection(source, SampleAxes(mask_axes, picks, crop_size), options, normalize=False)
        if isinstance(images, CropCollection):
            self.collection = CropCollection.of(self.collection, images.places, fit=images.fit)
        self._background = _Background(images, self) if background else None

    @property
    def clears(self) -> bool:
        """Whether pixels of a crop that are outside its object are set to 0."""
        return self._background is not None

    def preload(self, preload: Preload, max_bytes: int | None) -> None:
        self.collection.preload(preload, max_bytes)

    def batch(self, positions: list[int], allocate: Allocate) -> tuple[Array | list[Array], Array | list[Array]]:
        """Return the images and masks of samples, each stacked in one array if all have one shape."""
        locations = self._images.windows(positions)
        images, masks = self._images.at(locations, allocate), self.at(locations, allocate)
        if self._background is not None:
            for position, image, mask in zip(positions, images, masks, strict=True):
                self._background.clear(position, image, mask)
        return images, masks

    def with_object(self, positions: Array) -> Array:
        """Return one bool per sample: whether its mask contains its object. This reads each mask once."""
        fields = self._images.fields_of(positions)
        has_object = np.ones(len(positions), np.bool_)
        if self._background is not None:
            for field in np.unique(fields).tolist():
                indices = np.flatnonzero(fields == field)
                masks = self.at(self._images.windows(positions[indices].tolist()), np.empty)
                for index, mask in zip(indices.tolist(), masks, strict=True):
                    has_object[index] = self._background.kept(int(positions[index]), mask).any()
        return has_object

    def at(self, locations: Any, allocate: Allocate) -> Array | list[Array]:
        """Return the masks of samples at locations that ``windows`` of the image collection returned."""
        if isinstance(locations, Windows):
            return self.collection.at(locations._replace(fields=self._mask_of[locations.fields]), allocate)
        return self.collection.at(self._mask_of[locations].tolist(), allocate)

    def with_reader(self, images: Collection, masks: Collection | None = None) -> MaskedSamples:
        """Return a copy that reads the same images from ``images``, and the same masks from ``masks`` if passed."""
        masks, background = masks or self.collection, self._background
        if background is not None:
            background = copy_with(background, _crops=images, _masks=masks)
        return copy_with(self, _images=images, collection=masks, _background=background)

    def whole(self, field: int) -> Array:
        """Return the whole mask of an image (T, C, Z, Y, X), read-only."""
        return self.collection.image(int(self._mask_of[field]))


class _Background:
    """Background of crops: pixels without the object's label, or in binary masks not connected to its center."""

    def __init__(self, images: Collection, masks: MaskedSamples) -> None:
        error = partial(ArgumentError, option="mask_background", value=True)
        if not isinstance(images, CropCollection) or images.crop_rows is None or images.crop_rows.objects is None:
            raise error("needs crops around objects", remedy="pass objects= or leave it out")
        objects = images.crop_rows.objects
        assert isinstance(masks.collection, CropCollection)
        self._crops, self._masks, self._objects = images, masks.collection, objects
        self._binary = _are_binary(masks, objects.fields)
        known = objects.labels()
        if not self._binary and known is None:
            problem = f"{self._masks.path} has label images but {objects.where} has no column of labels"
            raise error(problem, remedy="add one, e.g. Metadata_ObjectNumber or label_value")
        self._labels: Array
        self._column, self._labels = known or ("", np.zeros(len(objects.rows), np.float64))
        if objects.centers is not None:
            nearest = np.floor(objects.centers + 0.5).astype(np.int64)
            self._centers = np.minimum(nearest, images.shapes[objects.fields][:, 3:] - 1)  # Clamped to the last pixel.
        else:
            assert objects.boxes is not None
            self._centers = (objects.boxes[:, [0, 2]] + objects.boxes[:, [1, 3]] - 1) // 2

    def clear(self, position: int, image: Array, mask: Array) -> None:
        keep_mask = self.kept(position, mask)
        if not keep_mask.any():
            label = f"its label {self._labels[position]:g} ({self._column}) is not in its mask"
            raise self._failure(position, "its mask is empty at the center of the object" if self._binary else label)
        planes = self._masks.tczyx(mask)
        center_labels = planes[(..., *self._center_in(position))]
        if not self._binary and center_labels.any() and not (center_labels == self._labels[position]).any():
            label = f"its label in column {self._column} is {self._labels[position]:g}"
            raise self._failure(position, f"{label} but its mask has {center_labels.max()} at its center")
        np.multiply(planes, keep_mask, out=planes)
        pixels = self._crops.tczyx(image)
        pixels[~np.broadcast_to(keep_mask.any(axis=1, keepdims=True), pixels.shape)] = 0

    def kept(self, position: int, mask: Array) -> Array:
        """Return one bool per pixel (T, C, Z, Y, X) of a sample's mask: whether the pixel belongs to the object."""
        planes = self._masks.tczyx(mask)
        return self._connected(position, planes) if self._binary else planes == self._labels[position]

    def _center_in(self, position: int) -> tuple[int, int]:
        """Return the row and column of the object's center in a sample."""
        window = self._crops.places.windows([position])
        y, x = (int(center - first[0]) for center, first in zip(self._centers[position], window[1:3], strict=True))
        if self._crops.fit is None:
            return y, x
        return self._crops.fit.moved((y, x), (int(window.heights[0]), int(window.widths[0])))

    def _connected(self, position: int, planes: Array) -> Array:
        """Return the pixels of the crop that are 4-connected to the pixel at the object's center."""
        try:
            from scipy import ndimage  # noqa: PLC0415  # Only for binary masks.
        except ImportError as error:
            raise BackendError(
                "mask_background=True: binary masks need scipy, which is not installed; "
                "run pip install 'omearrow-ds[masks]', or pass label images"
            ) from error
        y, x = self._center_in(position)
        keep_mask = np.zeros(planes.shape, np.bool_)
        for plane in np.ndindex(planes.shape[:3]):
            if planes[plane][y, x]:
                regions, _ = ndimage.label(planes[plane])
                keep_mask[plane] = regions == regions[y, x]
        return keep_mask

    def _failure(self, position: int, problem: str) -> DecodeError:
        row, field = int(self._objects.rows[position]), int(self._objects.fields[position])
        return DecodeError(
            f"{self._masks.path}: image {self._crops.image_ids[field]!r}, object in row {row} of "
            f"{self._objects.where}: {problem}; pass nulls='skip' to skip such objects, or mask_background=False"
        )


def _are_binary(masks: MaskedSamples, fields: Array) -> bool:
    """Whether masks have at most one nonzero value; checks the fields with the most objects."""
    counts = np.bincount(fields) if len(fields) else np.zeros(0, np.int64)
    for field in np.argsort(-counts, kind="stable")[: min(_FIELDS_LOOKED_AT, np.count_nonzero(counts))].tolist():
        mask = masks.whole(field)
        if len(np.unique(mask[mask != 0])) > 1:
            return False
    return True


def transformed(transform: Callable[..., Any], image: torch.Tensor, mask: torch.Tensor) -> tuple[Any, Any]:
    """Apply a transform to an image and its mask, which is passed as a ``tv_tensors.Mask`` if torchvision is installed.

    Raises `ArgumentError` if the transform does not return two values.
    """
    kind = _mask_type()
    result = transform(image, mask if kind is None else kind(mask))
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ArgumentError(
            f"returns {type(result).__name__}",
            option="transform",
            value=transform,
            remedy="return the image and its mask, as masks= needs both",
        )
    image, mask = result
    return image, mask.as_subclass(torch.Tensor) if kind is not None and isinstance(mask, kind) else mask


@functools.cache
def _mask_type() -> Any:
    try:
        from torchvision.tv_tensors import Mask  # noqa: PLC0415  # Optional, and slow to import.
    except ImportError:
        return None
    return Mask
