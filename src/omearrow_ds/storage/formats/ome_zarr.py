"""Folder of OME-Zarr images: writes version 0.5; reads 0.4, 0.5, plates, and bare arrays of Zarr 2 and 3.

Chunks and shards are read by `ExtentReader`. zarr reads arrays that are big-endian or in another order, in 1.5 to
2.3 ms per image (``docs/explanation/layouts.md``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import zarr
from zarr.errors import BaseZarrError

from omearrow_ds.axes import AXES, to_tczyx
from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import new_image
from omearrow_ds.codec.encode import Image
from omearrow_ds.errors import ArgumentError, AxesError, FormatError, ImageError, MissingPathError, StorageError
from omearrow_ds.storage.extents import ChunkFiles, Region, Shape, size_of
from omearrow_ds.storage.formats import _ngff
from omearrow_ds.storage.formats._base import Array, Images
from omearrow_ds.storage.formats._detect import SIDECAR, ZARR_FILES, entries_below, is_zarr_node, refuse_special
from omearrow_ds.storage.formats._error_translation import MALFORMED
from omearrow_ds.storage.formats._file_set import ObjectFileSet
from omearrow_ds.storage.formats._folder import (
    NOT_LISTED,
    FileReader,
    Folder,
    ListedFile,
    Member,
    describe_members,
    image_id_of,
    link_refused,
    natural_key,
    open_files,
    open_folder,
    write_members,
)
from omearrow_ds.storage.formats._regions import slices_of
from omearrow_ds.storage.formats._stored import Stored, join_names, spread
from omearrow_ds.storage.formats._zarr_chunks import CHUNK_SHAPE, Reader, ZarrObjects, array_writer, chunk_files

_SUFFIX = ".ome.zarr"
_NODE_FILES = (*ZARR_FILES, ".zmetadata")
_NUM_BUCKET_PARTS = 2  # Parts of a URL without an object name.
_NAMED = 5  # Members listed for a group without images.
ERRORS = (BaseZarrError, RuntimeError, AssertionError, *MALFORMED)


def write_collection(
    images: Iterable[Image], columns: pa.Table, path: Path, compression: str, chunk_shape: tuple[int, int] = CHUNK_SHAPE
) -> None:
    """Write images as OME-Zarr 0.5 groups into the new Zarr group ``path``, and the columns as a sidecar file."""
    zarr.create_group(path, zarr_format=3)
    write_array = array_writer(compression, chunk_shape)
    described, description = None, ""  # Metadata and dtype of the last image, which the next one often shares.

    def write_one(file: Path, image: Image) -> None:
        nonlocal described, description
        metadata, dtype = image.metadata, image.pixels.dtype
        if described != (metadata, dtype):
            maximum = float(np.iinfo(dtype).max) if dtype.kind in "iu" else 1.0
            attributes = _ngff.attributes(metadata, maximum)
            description = json.dumps({"attributes": attributes, "zarr_format": 3, "node_type": "group"}, indent=2)
            described = metadata, dtype
        file.mkdir()
        (file / "zarr.json").write_text(description, encoding="utf-8")
        write_array(file / "0", image.pixels)

    write_members(images, columns, path, "ome_zarr", _SUFFIX, write_one)


class ZarrReader(FileReader):
    """Reader of OME-Zarr groups, in sidecar order or, without a sidecar, in natural order of group names.

    The image of a group is its ``level``, by default the first. Each field of view of a plate is an image; columns name
    plate, well, field (its path in the well) and, if all paths are whole numbers, site. A bare array is read if the
    names of its dimensions state its axes or, if they name no axis, its rank does (2-D: YX, 5-D: TCZYX). Raises
    `FormatError` if a member is not an image, its axes are unknown, its pixels are of an unsupported dtype, or a plate
    lists a well or a field that is missing; `ArgumentError` if an image lacks the level.
    """

    errors = ERRORS

    def __init__(self, folder: Folder, level: int = 0) -> None:
        super().__init__(folder)
        self._level = level
        self._arrays = Reader(level, folder.files)
        self._chunk_names: dict[Shape, Sequence[str]] = {}  # Names of chunk files, by the shapes read so far.
        if level and not folder.variant:
            folder.variant = (f"level {level}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return ZarrReader, (self.folder, self._level)

    def list_members(self, *, skip_errors: bool) -> None:
        folder = self.folder
        if folder.is_remote:
            folder.read_sidecar()  # One request lists all images.
            if not folder.is_listed:
                describe_members(self, self.list_names(), skip_errors=skip_errors)
            folder.set_fingerprint({})
        else:
            super().list_members(skip_errors=skip_errors)
        if folder.is_listed:
            _refuse_level(self._level, "collections written by omearrow-ds have only level 0", folder.path)

    def is_member(self, path: Path | os.DirEntry[str]) -> bool:
        if not path.is_dir() or not is_zarr_node(os.fspath(path)):
            return False
        if isinstance(path, os.DirEntry):
            return not (path.name == "OME" and not Path(path, "0").exists())
        return _is_image(self._open_node(path))

    def list_names(self) -> list[str]:
        folder = self.folder
        node = self._open_root()
        if folder.is_remote and _is_image(node):
            folder.root = folder.path.parent
            return [folder.path.name]
        with folder.guard.reading():
            attributes = dict(node.attrs) if isinstance(node, zarr.Group) else {}
            plate = _ngff.plate_of(attributes, str(folder.path))
        if plate is not None:
            name, wells = plate
            fields = sorted((field for well in wells for field in self._fields_of(well)), key=natural_key)
            if not fields:
                raise FormatError(f"{folder.path}: the OME-Zarr plate has no fields; pass a plate with images")
            plate_name = name or image_id_of(folder.path.name, self.suffixes)
            folder.set_columns(pa.table(_ngff.plate_columns(plate_name, wells, fields)))
            return fields
        if isinstance(folder.files, ObjectFileSet):
            parts = (name.partition("/") for name in folder.files.objects.inside(str(folder.path)))
            names = list({first for first, _, rest in parts if rest in _NODE_FILES and first != "OME"})
            if not names:
                problem = "the Zarr group contains no images; pass the URL of an image or a plate"
                raise FormatError(f"{folder.path}: {problem}")
            return sorted(names, key=natural_key)
        names = super().list_names()
        for name in names:
            for part in ("zarr.json", "0"):
                if os.path.islink(f"{folder.path}/{name}/{part}"):  # noqa: PTH114  # at every image: pathlib is slow
                    raise link_refused(folder.path / name / part)
        if not names and is_zarr_node(str(folder.path)) and not (folder.path / SIDECAR).exists():
            raise self._without_images(folder.path, dict(self._open_node(folder.path).attrs))
        return names

    def describe(self, file: str, listed: ListedFile = NOT_LISTED) -> Member:
        del listed  # Only TIFF files have pages.
        path, image_id = self.folder.root / file, image_id_of(file, self.suffixes)
        if not self.folder.is_remote:  # Servers have no links.
            _refuse_links(path)
        located = self._arrays.find_image(str(path))
        if located is not None:
            return Member(file, image_id, located[1].shape, located[1].layout.pixel_dtype)
        like = _like(*self._open_array(path), path)
        return Member(file, image_id, like.shape, like.dtype.newbyteorder("="))

    def describe_storage(self) -> Stored:
        folder = self.folder
        looked_at = spread(len(folder.members))
        codecs, layouts, versions, direct = [], [], [], 0
        for index in looked_at:
            path = _array_folder(folder, index)
            array, _ = self._open_array(path)
            with folder.guard.reading(path):
                codecs.append("compressed" if array.compressors else "none")
                chunk = " x ".join(map(str, array.chunks))
                layouts.append(chunk if array.shards is None else f"{chunk} in shards")
            versions.append(str(array.metadata.zarr_format))
            direct += self._arrays.find_image(str(path)) is not None
        reading = "chunk files read and decoded one by one" if direct == len(looked_at) else "by zarr"
        chunking = f"one folder per image, chunks of {join_names(layouts)}, Zarr {join_names(versions)}"
        known = len(looked_at) if len(looked_at) < len(folder.members) else None
        return Stored(None, join_names(codecs), chunking, in_place=False, reading=reading, looked_at=known)

    def locate(self, row: int) -> ChunkFiles | None:
        """Return the chunks of an image; metadata is read each time, as another tool may have overwritten the array."""
        folder = f"{self.folder.root}/{self.folder.members[row].file}"
        if self.folder.is_listed:
            folder += "/0"
            array = self._arrays.find_array(folder)
            if array is None or "/" in array.names[0]:  # Another writer replaced it.
                return None
            if not self.folder.is_remote:
                self._chunk_names.setdefault(array.shape, array.names)
        else:
            located = self._arrays.find_image(folder)
            if located is None:
                return None
            folder, array = located
        self.folder.refuse_other(row, array.shape, array.layout.pixel_dtype)
        return chunk_files(array, folder, self.folder.files, can_miss_chunks=not self.folder.is_listed)

    def files_of(self, row: int) -> Sequence[str]:
        member = self.folder.members[row]
        folder, names = f"{self.folder.root}/{member.file}/0", self._chunk_names.get(member.shape, ())
        return [f"{folder}/{name}" for name in ("zarr.json", *names)] if names else ()

    def read_by_library(self, row: int, regions: Sequence[Region]) -> list[Array]:
        """Return regions of an image that zarr reads, if they and its largest chunk fit the memory."""
        folder = self.folder
        path, image = _array_folder(folder, row), folder.root / folder.members[row].file
        array, axes = self._open_array(path)
        if folder.is_listed and not folder.is_remote:  # The store of a server raises an error otherwise.
            missing = array.nchunks - array.nchunks_initialized
            if missing:  # zarr would return its fill value.
                raise FormatError(f"{path}: {missing} of {array.nchunks} chunks do not exist; restore the folder")
        dtype = np.dtype(array.dtype)
        folder.refuse_other(row, _like(array, axes, image).shape, dtype.newbyteorder("="))
        columns = [AXES.index(axis) for axis in axes or {2: "YX"}.get(array.ndim, AXES)]
        arrays = []
        with folder.guard.reading(path):
            new_image(array.shards or array.chunks, dtype, path)
            for region in regions:
                part = [region[column + stop] for stop in (0, len(AXES)) for column in columns]
                new_image(size_of(part), dtype, path)
                pixels = _laid_out(np.asarray(array[slices_of(part)]), axes, image)
                arrays.append(np.ascontiguousarray(pixels, dtype.newbyteorder("=")))
        return arrays

    def metadata(self, row: int) -> dict[str, Any]:
        path = self.folder.root / self.folder.members[row].file
        with self.folder.guard.reading(path):
            attributes = dict(self._open_node(path).attrs)
            return _ngff.parse(attributes, str(path), self._level, partial(self._read_vector, path))

    def _open_node(self, path: Path) -> zarr.Array[Any] | zarr.Group:
        folder = self.folder
        with folder.guard.reading(path):
            if isinstance(folder.files, ObjectFileSet):
                store = ZarrObjects(folder.files, str(folder.root), complete=folder.is_listed)
                return store.node(str(path))
            for name in _NODE_FILES:
                refuse_special(f"{path}/{name}")
            return zarr.open(path, mode="r")

    def _open_array(self, path: Path) -> tuple[zarr.Array[Any], str | None]:
        """Return the array of an image at the selected level, and its axes if known."""
        if not self.folder.is_remote:
            _refuse_links(path)
        node = self._open_node(path)
        if isinstance(node, zarr.Array):
            _refuse_level(self._level, "a Zarr array has no levels", path)
            with self.folder.guard.reading(path):  # Version 3 stores names of dimensions; so does xarray in version 2.
                names: Any = node.metadata.to_dict().get("dimension_names") or node.attrs.get("_ARRAY_DIMENSIONS")
                return _safe(node, path), _ngff.axes_named(names)
        multiscale = _ngff.multiscales_of(dict(node.attrs))
        if multiscale is None:
            raise self._without_images(path, dict(node.attrs))
        with self.folder.guard.reading(path):
            array = node[_ngff.level_path(multiscale, str(path), self._level, partial(self._read_vector, path))]
        if not isinstance(array, zarr.Array):
            raise FormatError(f"{path}: level {self._level} is not a Zarr array; restore it")
        return _safe(array, path), _ngff.axes_of(multiscale)

    def _read_vector(self, group: Path, name: str) -> bytes | list[float]:
        """Return the numbers of an array in a group, or the bytes of a file."""
        path, guard = group / name, self.folder.guard
        with guard.reading(path), suppress(FileNotFoundError, IsADirectoryError):
            return bytes(self.folder.files.read(f"{group}/{name}"))
        array = self._open_node(path)
        if not isinstance(array, zarr.Array):
            raise FormatError(f"{path}: is a Zarr group, expected an array; correct the path")
        with guard.reading(path):
            for shape in (array.shape, array.shards or array.chunks):
                new_image(shape, np.dtype(_safe(array, path).dtype), path)  # Raises an error if it exceeds the memory.
            values: list[float] = np.asarray(array[...], np.float64).reshape(-1).tolist()
        return values

    def _without_images(self, path: Path, attributes: Mapping[str, Any]) -> FormatError:
        """Return the error for a Zarr group that is not an image, and contains none at the searched places."""
        if not {"plate", "well"}.isdisjoint(attributes.get("ome", attributes)):
            return FormatError(f"{path}: is a part of an OME-Zarr plate; pass the path of the plate")
        inside = sorted(group for group in path.iterdir() if group.is_dir() and is_zarr_node(str(group)))[:_NAMED]
        if path != self.folder.path and any(_is_image(self._open_node(group)) for group in inside):
            return FormatError(f"{path}: is a subfolder with OME-Zarr images; pass {str(path)!r} to read them")
        groups = f" (it contains {', '.join(repr(group.name) for group in inside)})" if inside else ""
        remedy = "pass the path of an OME-Zarr image, of a folder with images, or of a plate"
        return FormatError(f"{path}: is a Zarr group without multiscales or plate in its attributes{groups}; {remedy}")

    def _open_root(self) -> zarr.Array[Any] | zarr.Group | None:
        """Return the node of the folder; None if it is on this machine and is not a plate."""
        # Raises `FormatError` for another URL, with the names below it if the server can list.
        folder = self.folder
        if not isinstance(folder.files, ObjectFileSet):
            for file in map(folder.path.joinpath, _NODE_FILES):
                with folder.guard.reading(file):  # Asking zarr takes a third of the opening time.
                    if file.is_file() and b'"plate"' in file.read_bytes():
                        return self._open_node(folder.path)
            return None
        try:
            node = self._open_node(folder.path)
        except FormatError:
            with suppress(StorageError, MissingPathError):
                inside = folder.files.objects.inside(str(folder.path))
                names = sorted({name.partition("/")[0] for name in inside})
                if not set(names) & set(ZARR_FILES):
                    problem = f"is not an OME-Zarr image, but contains {', '.join(map(repr, names[:5]))}"
                    raise FormatError(f"{folder.path}: {problem}; pass the URL of one of them") from None
            raise
        if _is_image(node) and len(folder.path.parts) <= _NUM_BUCKET_PARTS:
            problem = f"{folder.path}: the bucket itself is an image, which is not supported"
            raise FormatError(f"{problem}; copy it to a folder of the bucket, and pass the URL of that folder")
        return node

    def _fields_of(self, well: str) -> list[str]:
        """Return the fields of a plate's well, as paths below the plate."""
        folder, path = self.folder, self.folder.path
        remedy = "restore the well, or remove it from the list"
        if not folder.is_remote:
            for part in (PurePosixPath(well), *PurePosixPath(well).parents[:-1]):
                if (path / part).is_symlink():
                    raise link_refused(path / part)
            if not is_zarr_node(f"{path}/{well}"):
                raise FormatError(f"{path}: lists the well {well!r}, which does not exist; {remedy}")
        node = self._open_node(path / well)
        with folder.guard.reading(path / well):
            listed = _ngff.fields_of(dict(node.attrs), f"{path}/{well}")
        if listed is None:
            raise FormatError(f"{path}: well {well!r} does not list its fields; {remedy}")
        fields = [f"{well}/{field}" for field in listed]
        for field in fields:
            if not (folder.is_remote or is_zarr_node(f"{path}/{field}")):
                raise FormatError(f"{path}: well {well!r} lists the field {field!r}, which does not exist; {remedy}")
        return fields

    def label_images(self) -> list[str]:
        folder = self.folder
        names: dict[str, None] = {}
        for index in spread(len(folder.members)):
            labels = folder.root / folder.members[index].file / "labels"
            if is_zarr_node(str(labels)):
                with folder.guard.reading(labels):
                    attributes: dict[str, Any] = dict(self._open_node(labels).attrs)
                    names |= dict.fromkeys(map(str, attributes.get("ome", attributes).get("labels", [])))
        return list(names)

    def open_labels(self, name: str) -> tuple[Images, Array]:
        folder = self.folder
        error = partial(ArgumentError, path=folder.path, option="masks", value=f"labels/{name}")
        if folder.is_remote:
            raise error("label images on a server are not supported", remedy="copy the collection to this machine")
        if not name or ".." in PurePosixPath(name).parts:
            raise error("is not a valid name of label images", remedy="pass a name below labels/")
        files = [f"{member.file}/labels/{name}" for member in folder.members]
        indices = [index for index, file in enumerate(files) if is_zarr_node(f"{folder.root}/{file}")]
        if not indices:
            names = self.label_images()
            listed = ", ".join(repr(f"labels/{other}") for other in names)
            remedy = f"pass one of {listed}" if names else "pass masks as another collection"
            raise error("no image has these label images", remedy=remedy)
        ids = [folder.members[index].image_id for index in indices]
        labels = Folder(folder.path, folder.format_name, self.errors, None)
        labels.root, labels.variant = folder.root, (*folder.variant, f"labels/{name}")
        paths = [ListedFile(files[index]) for index in indices]
        images = open_files(ZarrReader(labels, self._level), paths, ids, range(len(ids)))
        label_of = np.full(len(files), -1)
        label_of[indices] = np.arange(len(indices))
        return images, label_of

    def object_sizes(self, files: ObjectFileSet) -> tuple[int, int]:
        """Return number and size of all objects; the size is 0 on a web server, which cannot list."""
        try:
            sizes = [size_bytes for size_bytes, _ in files.objects.inside(str(self.folder.path)).values()]
        except StorageError:
            return len(self.folder.members), 0
        return len(sizes), sum(sizes)


open_collection = partial(open_folder, "ome_zarr", ZarrReader)


def _refuse_links(path: Path) -> None:
    """Raise `FormatError` if there is a symbolic link, a pipe or another special file below ``path``."""
    for entry in entries_below(path):
        if entry.is_symlink():
            raise link_refused(Path(entry.path))
        if not entry.is_file():
            raise FormatError(f"{entry.path}: is neither a file nor a folder; remove it from the image")


def _refuse_level(level: int, problem: str, path: Path) -> None:
    if level:
        raise ArgumentError(problem, path=path, option="level", value=level, remedy="pass level=0")


def _like(array: zarr.Array[Any], axes: str | None, path: Path) -> Array:
    """Return an image with the shape and dtype of an array, without its pixels."""
    return _laid_out(np.broadcast_to(np.zeros((), array.dtype), array.shape), axes, path)


def _laid_out(pixels: Array, axes: str | None, path: Path) -> Array:
    try:
        return to_tczyx(pixels, axes, str(path))
    except AxesError as error:
        raise FormatError(f"{path}: {error}; rename its dimensions") from error
    except ImageError as error:
        if axes is not None or 0 in pixels.shape:
            raise FormatError(str(error)) from error
        problem = f"the axes of a {pixels.ndim}-D array are unknown"
        remedy = "name its dimensions (t, c, z, y, x), or store it as OME-Zarr"
        raise FormatError(f"{path}: {problem}; {remedy}") from error


def _is_image(node: zarr.Array[Any] | zarr.Group | None) -> bool:
    return isinstance(node, zarr.Array) or (node is not None and _ngff.multiscales_of(dict(node.attrs)) is not None)


def _array_folder(folder: Folder, row: int) -> Path:
    """Return the folder of an image, or of its only array in a collection that was written here."""
    path = folder.root / folder.members[row].file
    return path / "0" if folder.is_listed else path


def _safe(array: zarr.Array[Any], path: Path) -> zarr.Array[Any]:
    """Return an array whose chunks hold pixels; decoding pickled objects, as Zarr 2 may hold, would run their code."""
    schema.pixel_dtype(str(array.dtype), str(path))
    described = array.metadata.to_dict()
    if "pickle" in repr([described.get(name) for name in ("filters", "compressor", "codecs")]).lower():
        raise FormatError(f"{path}: chunks are pickled objects, which could run code; convert them to numbers")
    return array
