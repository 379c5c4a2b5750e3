"""`OMEArrowDataset` and `OMEArrowDatasetNumpy`: stored images as map-style torch datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, Unpack

import numpy as np
import torch

from omearrow_ds.dataset.collection import Preload, Select
from omearrow_ds.dataset.crop_boxes import DatasetOptions
from omearrow_ds.dataset.normalization import Illum, Normalize
from omearrow_ds.dataset.samples import StoredSamples
from omearrow_ds.dataset.stored_images import copy_with
from omearrow_ds.dataset.targets import ChosenClasses, Target
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.masks import Masks
from omearrow_ds.storage.protocol import Paths, StrPath

_NOT_PASSED = {"self", "transform", "options", "__class__"}  # Arguments of `OMEArrowDataset`.


class OMEArrowDataset(StoredSamples):
    """Map-style PyTorch dataset of the images of a collection, or of crops of them.

    Options by topic:

    - pixels: ``preload``, ``max_bytes``, ``cache_bytes``, ``cache_dir``, ``progress``;
    - samples: ``axes``, ``select``, ``normalize``, ``illumination``, ``transform``;
    - targets: ``target``, ``encode_targets``, ``classes``, ``return_ids``;
    - crops: ``crop_size``, ``crop``, ``overlap``, ``objects``, ``center``, ``box``, ``resize``, ``pad_to``, ``pad``;
    - masks: ``masks``, ``mask_background``;
    - files, tables, plates, URLs: all options of `open_images`.

    Parameters
    ----------
    path, format
        See `open_images`.
    preload
        ``True`` decodes all images into shared memory, ``False`` reads each sample from storage, and ``"auto"``
        preloads if the images fit ``max_bytes``. ``"cuda"`` or ``"cuda:1"`` keeps images of one shape and dtype on that
        device; workers and ``masks`` are not possible then.
    axes
        Axes of a sample in order. An omitted axis must have length 1 after ``select``.
    select
        ``None`` is the whole image. Otherwise indices per axis, such as ``{"C": [0, 2], "Z": slice(10, 20), "T": 0}``.
    crop_size
        ``None`` is the whole image. Otherwise ``(height, width)`` of a crop in pixels.
    normalize
        ``True`` gives float32 and divides integers by the maximum of their dtype; ``False`` keeps the stored dtype.
        Otherwise a range that maps to 0 and 1 (``{"low": ..., "high": ...}``, clipped), a standardization
        (``{"mean": ..., "std": ...}``), both with numbers or one per stored channel, a `Stats` or its file, or its
        percentiles (``{"stats": file, "low": "p1", "high": "p99"}``); see `docs/how-to/normalization.md`.
    illumination
        ``None``, or illumination functions to divide by before normalization: a mapping from channel names to ``.npy``
        files or positive (Y, X) arrays, or ``True`` for those of a LoadData table.
    transform
        ``None``, or a function of the sample's tensor. With ``masks`` it gets image and mask, a ``tv_tensors.Mask`` if
        torchvision is installed, and returns both; the mask of the sample is a plain tensor.
    masks
        ``None``, or masks to add to each sample in their dtype: path of a collection or an open one, a mapping of
        ``path`` and options of `open_images`, an image column, ``"labels/..."`` of OME-Zarr images, or a file pattern
        such as ``"masks/{field}_MaskNuclei.tiff"`` (`docs/how-to/crops-and-masks.md`). With ``nulls="skip"``, images
        without a mask are left out.
    mask_background
        ``False``, or ``True`` to set pixels outside the object of a crop to 0, by the label column of ``objects``
        (label images) or the region that is connected to the center (binary masks). An object outside of its mask is an
        error, or left out with ``nulls="skip"``.
    target
        ``None``, a column, several columns (the target is a dict), or a function of the row as a dict, which also has
        ``image_id`` and ``index``. With ``nulls="skip"``, images with a null target are left out.
    encode_targets
        ``True`` replaces text by int64 codes: the index in `classes`. ``False`` keeps text.
    classes
        ``None`` sorts the distinct texts of the column. Otherwise texts in the order of their codes, such as
        ``train.classes``, or a mapping from columns to texts; other texts are errors.
    return_ids
        ``False``, or ``True`` to add the image id as last item of a sample. Ids of a batch are a list.
    max_bytes
        Limit for preloading, in bytes of whole decoded images. ``None`` is half of the available memory.
    cache_bytes
        0, or the size of a cache of recently used images per process, in bytes. For formats with slow random access;
        `cache_info` has the hit rate.
    cache_dir
        ``None``, or a folder for decoded pixels that ranks and later runs of a host map instead of decoding again.
    progress
        ``None`` shows a progress bar in a terminal if preloading takes longer than 2 s; ``True`` also elsewhere.
    objects
        ``None``, or a table with one row per cell or nucleus, each of which is a sample: a frame, or a local CSV or
        Parquet file. Objects are assigned to images by ``on``, ``image_id`` or the ``Metadata_*`` columns, and left out
        with a warning if they have no image; ids are ``"IMAGE:ROW"``, such as ``"B7_3:12"``.
    center, box
        ``None`` finds the center under the names of CellProfiler, CytoTable, scikit-image and ome-arrow; otherwise
        ``center=(y, x)`` columns, or ``box=(y0, y1, x0, x1)`` columns with exclusive ends, or ``box=True`` for known
        names. Pixels count from 0 at the center of the first pixel, Y downwards; without ``crop_size``, a crop is the
        box.
    resize
        ``None``, or ``(height, width)`` to scale boxes to: bilinear with antialiasing, masks by nearest pixel.
    pad_to
        ``None``, or ``(height, width)`` of zeros around centered boxes. A larger box is an error.
    crop
        Without ``objects``: ``"center"``, ``"random"`` (a new position in every epoch), or ``"grid"`` (tiles that cover
        the image, with columns ``crop_y`` and ``crop_x``).
    overlap
        0, or the overlap of tiles in pixels: one number or ``(down, right)``.
    pad
        Pixels beyond the edge: ``"constant"`` (0), ``"edge"`` or ``"reflect"``; with ``objects`` also ``"shift"`` (the
        crop is moved inside) or ``"drop"`` (the object is left out). ``None`` is ``"constant"`` with ``objects``;
        without, an image smaller than the crop is an error, and the last tiles move inside.
    **options
        See `open_images`. With ``verify=None``, images that have a checksum are verified when they are preloaded; with
        ``True`` also at each access on demand; with ``False`` never.

    Raises
    ------
    MemoryLimitError
        If ``preload=True`` and the decoded pixels exceed ``max_bytes``.
    AxesError
        If axes, selection or crop do not fit an image.
    ColumnError
        If the column of ``target`` does not exist or contains nulls.
    ArgumentError
        If an option is invalid, or a target is not in ``classes``.
    ChecksumError
        If a verified image differs from the written one.
    OMEArrowDSError
        Errors of `open_images`.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDataset
    >>> plate = OMEArrowDataset("plate.arrow", target="treatment")
    >>> image, code = plate[0]
    >>> image.shape, image.dtype, plate.classes[code]
    (torch.Size([2, 160, 160]), torch.float32, 'B')
    >>> cells = OMEArrowDataset("plate.arrow", objects="cells.parquet", crop_size=(32, 32))
    >>> len(cells), cells[0].shape
    (20, torch.Size([2, 32, 32]))
    """

    def __init__(
        self,
        path: Paths,
        format: str | None = None,  # noqa: A002  # Public name.
        *,
        preload: Preload = True,
        axes: str = "CYX",
        select: Select | None = None,
        crop_size: tuple[int, int] | None = None,
        normalize: Normalize = True,
        illumination: Illum | None = None,
        transform: Callable[[torch.Tensor], Any] | None = None,
        masks: Masks | None = None,
        mask_background: bool = False,
        target: Target | None = None,
        encode_targets: bool = True,
        classes: ChosenClasses | None = None,
        return_ids: bool = False,
        max_bytes: int | None = None,
        cache_bytes: int = 0,
        cache_dir: StrPath | None = None,
        progress: bool | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        super().__init__(**{name: value for name, value in locals().items() if name not in _NOT_PASSED}, **options)
        self._transform = _checked(transform)

    def with_transform(self, transform: Callable[[torch.Tensor], Any] | None) -> Self:
        """Return a view of this dataset with a different transform.

        The view shares pixels, source and targets with this dataset. ``None`` removes the transform.

        Raises
        ------
        ArgumentError
            If ``transform`` is not callable.
        """
        return copy_with(self, _transform=_checked(transform))


def _checked(transform: Callable[[torch.Tensor], Any] | None) -> Callable[[torch.Tensor], Any] | None:
    if transform is not None and not callable(transform):
        raise ArgumentError(option="transform", value=transform, allowed="a callable that takes the tensor of a sample")
    return transform


class OMEArrowDatasetNumpy(StoredSamples):
    """Map-style dataset that returns NumPy arrays instead of tensors.

    Options are those of `OMEArrowDataset`, without ``transform``.

    Examples
    --------
    >>> from omearrow_ds import OMEArrowDatasetNumpy
    >>> image = OMEArrowDatasetNumpy("plate.arrow", normalize=False)[0]
    >>> image.shape, image.dtype
    ((2, 160, 160), dtype('uint16'))
    """

    _of_arrays = True
    _convert = staticmethod(np.asarray)
