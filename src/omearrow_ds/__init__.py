"""OME-Arrow microscopy images as PyTorch datasets and loaders, at memory speed, from eight storage formats."""

from omearrow_ds.dataloader import OMEArrowDataLoader
from omearrow_ds.dataset import OMEArrowDataset, OMEArrowDatasetNumpy
from omearrow_ds.errors import (
    ArgumentError,
    AxesError,
    BackendError,
    ColumnError,
    DecodeError,
    FormatError,
    ImageError,
    ImageIndexError,
    MemoryLimitError,
    MetadataError,
    MissingPathError,
    OMEArrowDSError,
    PathExistsError,
    SelectError,
    WriteError,
)
from omearrow_ds.formats import FORMATS, Format
from omearrow_ds.source import ImageSource, convert, open_images, write_images

__all__ = [
    "FORMATS",
    "ArgumentError",
    "AxesError",
    "BackendError",
    "ColumnError",
    "DecodeError",
    "Format",
    "FormatError",
    "ImageError",
    "ImageIndexError",
    "ImageSource",
    "MemoryLimitError",
    "MetadataError",
    "MissingPathError",
    "OMEArrowDSError",
    "OMEArrowDataLoader",
    "OMEArrowDataset",
    "OMEArrowDatasetNumpy",
    "PathExistsError",
    "SelectError",
    "WriteError",
    "convert",
    "open_images",
    "write_images",
]
