"""OME-Arrow microscopy images as PyTorch datasets and loaders, at memory speed, from nine storage formats."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omearrow_ds.advise.profile import Profile, profile_dataset
    from omearrow_ds.advise.recommend import recommend
    from omearrow_ds.dataset.dataset import OMEArrowDataset, OMEArrowDatasetNumpy
    from omearrow_ds.dataset.embeddings import write_embeddings
    from omearrow_ds.dataset.show import show
    from omearrow_ds.dataset.write_crops import write_crops
    from omearrow_ds.errors import (
        ArgumentError,
        AxesError,
        BackendError,
        ChecksumError,
        ColumnError,
        DecodeError,
        FormatError,
        ImageColumnError,
        ImageError,
        ImageIndexError,
        MemoryLimitError,
        MetadataError,
        MissingPathError,
        OMEArrowDSError,
        PathExistsError,
        SelectError,
        StorageError,
        WriteError,
    )
    from omearrow_ds.loader.dataloader import OMEArrowDataLoader
    from omearrow_ds.storage.formats import FORMATS, Format, WriteLimits, formats
    from omearrow_ds.storage.protocol import ImageSource, OpenOptions
    from omearrow_ds.storage.remote import Storage
    from omearrow_ds.storage.source import convert, open_images, publish, write_images
    from omearrow_ds.storage.stats import Stats, stats

__all__ = [
    "FORMATS",
    "ArgumentError",
    "AxesError",
    "BackendError",
    "ChecksumError",
    "ColumnError",
    "DecodeError",
    "Format",
    "FormatError",
    "ImageColumnError",
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
    "OpenOptions",
    "PathExistsError",
    "Profile",
    "SelectError",
    "Stats",
    "Storage",
    "StorageError",
    "WriteError",
    "WriteLimits",
    "convert",
    "formats",
    "open_images",
    "profile_dataset",
    "publish",
    "recommend",
    "show",
    "stats",
    "write_crops",
    "write_embeddings",
    "write_images",
]

# Names are imported lazily. The import of torch takes seconds, and programs that only read or write files do not need
# it. The command line can also handle Ctrl-C from its start.
_MODULES = {
    "advise.profile": ("Profile", "profile_dataset"),
    "advise.recommend": ("recommend",),
    "dataset.show": ("show",),
    "dataset.dataset": ("OMEArrowDataset", "OMEArrowDatasetNumpy"),
    "dataset.embeddings": ("write_embeddings",),
    "dataset.write_crops": ("write_crops",),
    "loader.dataloader": ("OMEArrowDataLoader",),
    "storage.formats": ("FORMATS", "Format", "WriteLimits", "formats"),
    "storage.protocol": ("ImageSource", "OpenOptions"),
    "storage.remote": ("Storage",),
    "storage.source": ("convert", "open_images", "publish", "write_images"),
    "storage.stats": ("Stats", "stats"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("omearrow-ds")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'errors')}"), name)
    globals()[name] = found  # The next access does not call this function.
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
