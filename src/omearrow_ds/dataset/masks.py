"""`MaskedSamples`: masks of samples, cut like their images, and background removal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from omearrow_ds.axes import SampleAxes
from omearrow_ds.dataset.collection import Allocate, Collection
from omearrow_ds.dataset.crop_boxes import Boxes, CropWindows
from omearrow_ds.dataset.stored_images import PreloadOptions
from omearrow_ds.errors import ArgumentError, BackendError, DecodeError
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.objects import Objects
from omearrow_ds.storage.verified import verified_where_stored

_FIELDS_LOOKED_AT = 16  # To detect binary masks.


@dataclass(frozen=True, eq=False)
class MaskedSamples:
    collection: Collection
    mask_of: Array  # (n,) int64, the index in ``collection`` of each image's mask; -1 for an image without, not read.
    background: _Background | None = None  # If set, pixels outside the object of a crop become 0, also in the mask.

    @classmethod
    def of(cls, images: Collection, source: Images, mask_of: Array, options: PreloadOptions, *, clears: bool) -> Self:
        """Return masks with the axes of an image's sample, without C if masks have one channel."""
        axes = images.sample_axes
        letters = axes.axes if int(source.header.shapes[:, 1].max(initial=1)) > 1 else axes.axes.replace("C", "")
        picks = {axis: pick for axis, pick in (axes.select or {}).items() if axis != "C"}
        if options.verify:
            source = verified_where_stored(source)
        crops = None if images.crops is None else replace(images.crops, rows=None)
        mask_axes, mask_options = SampleAxes(letters, picks, axes.crop_size), options._replace(fingerprint=None)
        masks = Collection(source, mask_axes, mask_options, normalize=False, crops=crops)
        return cls(masks, mask_of, _Background.of(masks, mask_of, images) if clears else None)

    def batch(self, images: Collection, positions: list[int], allocate: Allocate) -> tuple[Any, Any]:
        boxes = None if images.crops is None else images.crops.take(positions)
        samples, masks = images.batch(positions, allocate, boxes), self._masks(positions, boxes, allocate)
        if self.background is not None:
            for position, sample, mask in zip(positions, samples, masks, strict=True):
                self.background.clear(position, images.tczyx(sample), self.collection.tczyx(mask))
        return samples, masks

    def have_objects(self, positions: Array) -> Array:
        """Return one bool per crop around an object: whether its mask contains it. This reads each mask once."""
        assert self.background is not None
        crops = self.background.crops
        fields = crops.corners[0, positions]
        have_objects = np.ones(len(positions), np.bool_)
        order = np.argsort(fields, kind="stable")
        for indices in filter(len, np.split(order, np.flatnonzero(np.diff(fields[order])) + 1)):
            samples = positions[indices].tolist()
            masks = self._masks(samples, crops.take(samples), np.empty)
            for index, position, mask in zip(indices.tolist(), samples, masks, strict=True):
                have_objects[index] = self.background.object_mask(position, self.collection.tczyx(mask)).any()
        return have_objects

    def _masks(self, positions: list[int], boxes: Boxes | None, allocate: Allocate) -> Any:
        """Return the masks of samples: whole masks, or their crops at ``boxes``."""
        if boxes is None:
            return self.collection.batch(self.mask_of[positions].tolist(), allocate)
        return self.collection.batch(positions, allocate, np.concatenate([self.mask_of[boxes[:1]], boxes[1:]]))


class _Background(NamedTuple):
    """Background of crops: pixels without the object's label, or in binary masks not connected to its center."""

    crops: CropWindows
    objects: Objects
    centers: Array  # (n, 2), row and column of the pixel at each object's center.
    column: str  # Name of the column of labels.
    labels: Array | None  # None for binary masks.
    subject: str  # Path of the masks.
    image_ids: Sequence[str]

    @classmethod
    def of(cls, masks: Collection, mask_of: Array, images: Collection) -> Self:
        crops, path = images.crops, str(masks.path)
        objects = None if images.crop_rows is None else images.crop_rows.objects
        error = partial(ArgumentError, option="mask_background", value=True)
        if crops is None or objects is None:
            raise error("needs crops around objects", remedy="pass objects= or leave it out")
        column, labels = objects.labels() or ("", None)
        fields, counts = np.unique(objects.fields, return_counts=True)  # The ones with the most objects are looked at.
        looked_at = fields[np.argsort(-counts, kind="stable")[:_FIELDS_LOOKED_AT]]
        pixels = map(masks.image, mask_of[looked_at].tolist())
        if all(len(np.unique(mask[mask != 0])) <= 1 for mask in pixels):
            labels = None
        elif labels is None:
            problem = f"{path} has label images but {objects.joined.name} has no column of labels"
            raise error(problem, remedy="add one, e.g. Metadata_ObjectNumber or label_value")
        centers = objects.positions
        if objects.are_boxes:
            centers = (centers[:, [0, 2]] + centers[:, [1, 3]] - 1) // 2
        else:
            nearest = np.floor(centers + 0.5).astype(np.int64)
            centers = np.minimum(nearest, images.shapes[objects.fields][:, 3:] - 1)  # Clamped to the last pixel.
        return cls(crops, objects, centers, column, labels, path, images.image_ids)

    def clear(self, position: int, image: Array, mask: Array) -> None:
        keep_mask, labels, problem = self.object_mask(position, mask), self.labels, ""
        center_labels = mask[(..., *self._center_of(position))]
        if not keep_mask.any():
            problem = "the mask is empty at the center of the object"
            if labels is not None:
                problem = f"its label {labels[position]:g} ({self.column}) does not occur in the mask"
        elif labels is not None and center_labels.any() and not (center_labels == labels[position]).any():
            label = f"its label in column {self.column} is {labels[position]:g}"
            problem = f"{label} but the mask has label {center_labels.max()} at the center of the object"
        if problem:
            row, field = int(self.objects.rows[position]), int(self.objects.fields[position])
            raise DecodeError(
                f"{self.subject}: image {self.image_ids[field]!r}, object in row {row} of {self.objects.joined.name}: "
                f"{problem}; pass nulls='skip' to skip such objects, or mask_background=False"
            )
        np.multiply(mask, keep_mask, out=mask)
        image[~np.broadcast_to(keep_mask.any(axis=1, keepdims=True), image.shape)] = 0

    def object_mask(self, position: int, mask: Array) -> Array:
        """Return which pixels (T, C, Z, Y, X) belong to the object; in binary masks, those connected to its center."""
        if self.labels is not None:
            is_object: Array = mask == self.labels[position]
            return is_object
        try:
            from scipy import ndimage  # noqa: PLC0415  # Only for binary masks.
        except ImportError as error:
            problem = "mask_background=True: binary masks need scipy, which is not installed"
            raise BackendError(f"{problem}; run pip install 'omearrow-ds[masks]', or pass label images") from error
        center, keep_mask = self._center_of(position), np.zeros(mask.shape, np.bool_)
        for plane in np.ndindex(mask.shape[:3]):
            if mask[plane][center]:
                regions, _ = ndimage.label(mask[plane])  # 4-connected.
                keep_mask[plane] = regions == regions[center]
        return keep_mask

    def _center_of(self, position: int) -> tuple[int, int]:
        _, top, left, *size = self.crops.take([position])[:, 0].tolist()
        y, x = (self.centers[position] - (top, left)).tolist()
        return (y, x) if self.crops.resize is None else self.crops.resize.moved((y, x), (size[0], size[1]))


def transformed(transform: Callable[..., Any], image: torch.Tensor, mask: torch.Tensor) -> tuple[Any, Any]:
    """Apply a transform, which gets the mask as a ``tv_tensors.Mask`` if torchvision is installed; return tensors."""
    kind = _mask_type()
    result = transform(image, mask if kind is None else kind(mask))
    if not isinstance(result, tuple | list) or len(result) != 2:
        remedy = "return an image and its mask, which masks= requires"
        raise ArgumentError(f"returns {type(result).__name__}", option="transform", value=transform, remedy=remedy)
    image, mask = result
    return image, mask.as_subclass(torch.Tensor) if kind is not None and isinstance(mask, kind) else mask


@functools.cache
def _mask_type() -> Any:
    try:
        from torchvision.tv_tensors import Mask  # noqa: PLC0415  # Optional, and slow to import.
    except ImportError:
        return None
    return Mask
