"""A format of another package: a folder of NumPy files, without code for servers."""

from __future__ import annotations

import io
import math
from functools import partial

import numpy as np

from omearrow_ds import Format
from omearrow_ds.codec import schema
from omearrow_ds.errors import FormatError
from omearrow_ds.storage.formats._folder import (
    FileReader,
    Member,
    describe_files,
    image_id_of,
    open_folder,
    write_members,
)

FORMAT = Format(
    "npy", "NumPy", "directory", ".npys", "numpy", is_folder=True, remote_access=("ranges",), implementation=__name__
)
ERRORS = (ValueError, OSError, EOFError)
MAX_HEADER_BYTES = 512


def write_collection(images, columns, path, compression):
    """Write each image as a file, and the columns as a sidecar."""
    assert compression == "none"
    write_members(images, columns, path, "npy", ".npy", write_one)


def write_one(file, image):
    """Write an image, and return the offset of its pixels."""
    np.save(file, image.pixels)
    return file.stat().st_size - image.pixels.nbytes


class NumPyReader(FileReader):
    """Reader of images of up to five dimensions in NumPy files; missing axes are the first ones of TCZYX."""

    errors = ERRORS
    suffixes = (".npy",)

    def describe(self, file, listed=None):
        path = self.folder.path_of(file)
        with self.folder.guard.reading(path):
            opened = self.folder.files.open(path)
            header = io.BytesIO(opened.read_ranges([(0, min(opened.size_bytes, MAX_HEADER_BYTES))])[0])
            version = np.lib.format.read_magic(header)
            if version != (1, 0):
                raise FormatError(f"{path}: has version {version} of NumPy files, expected (1, 0); save it again")
            shape, is_fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
        if not 2 <= len(shape) <= 5:
            raise FormatError(f"{path}: has {len(shape)} axes, expected 2 to 5; save one image per file")
        pixel_dtype = schema.pixel_dtype(dtype.newbyteorder("=").name, str(path))
        is_plain = not is_fortran_order and dtype == dtype.newbyteorder("<")
        if opened.size_bytes < header.tell() + math.prod(shape) * dtype.itemsize:
            raise FormatError(f"{path}: ends before its last pixel; restore it")
        offset = header.tell() if is_plain else None
        image_shape = (1,) * (5 - len(shape)) + shape
        image_id = image_id_of(file, self.suffixes)
        return Member(file, image_id, image_shape, pixel_dtype, opened.size_bytes, offset, opened.modified_ns)

    def decode(self, row, file):
        pixels = np.load(file)
        image = pixels.reshape((1,) * (5 - pixels.ndim) + pixels.shape)
        return np.ascontiguousarray(image, image.dtype.newbyteorder("="))

    def metadata(self, row):
        del row  # NumPy files have no metadata.
        return schema.normalize_metadata(None, 0, "")

    def describe_storage(self):
        return describe_files(self.folder, ["none"], ["whole arrays"])


open_collection = partial(open_folder, "npy", NumPyReader)
