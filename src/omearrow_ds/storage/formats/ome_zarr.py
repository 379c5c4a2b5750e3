"""Folder of OME-Zarr images: version 0.5 as written here; 0.4, 0.5, plates, bare arrays of Zarr 2 and 3 when read.

zarr reads arrays that are sharded, big-endian or in another order, in 1.5 to 2.3 ms per image.
Measurements are in ``docs/explanation/layouts.md``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import zarr
from zarr.errors import BaseZarrError

from omearrow_ds.axes import to_tczyx
from omearrow_ds.codec import schema
from omearrow_ds.codec.decode import new_image
from omearrow_ds.codec.encode import Image
from omearrow_ds.errors import ArgumentError, AxesError, FormatError, ImageError, MissingPathError, StorageError
from omearrow_ds.storage.extents import Region
from omearrow_ds.storage.formats import _ngff, _zarr_chunks, _zarr_windows
from omearrow_ds.storage.formats._base import Array, BaseSource, Reader
from omearrow_ds.storage.formats._detect import SIDECAR, ZARR_FILES, is_zarr_node, refuse_special
from omearrow_ds.storage.formats._failures import MALFORMED, refusing
from omearrow_ds.storage.formats._folder import (
    FolderSource,
    ListedPage,
    Member,
    link_refused,
    natural_key,
    refuse_links,
    write_members,
)
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._ranged import Objects
from omearrow_ds.storage.formats._regions import rows_to_positions
from omearrow_ds.storage.formats._stored import Stored, joined, spread
from omearrow_ds.storage.formats._zarr_objects import ZarrObjects

_SUFFIX = ".ome.zarr"
_NODE_FILES = (*ZARR_FILES, ".zmetadata")
_NAMED = 5  # Members listed for a group without images.
_ERRORS = (BaseZarrError, RuntimeError, AssertionError, *MALFORMED)


def write(
    images: Iterable[Image],
    columns: pa.Table,
    path: Path,
    compression: str,
    chunk_shape: tuple[int, int] = _zarr_chunks.CHUNK_SHAPE,
) -> None:
    """Write images as OME-Zarr 0.5 groups into the new Zarr group ``path``, and the columns as a sidecar file."""
    zarr.create_group(path, zarr_format=3)
    arrays = _zarr_chunks.Writer(compression, chunk_shape)

    def write_one(file: Path, image: Image) -> None:
        pixels = image.pixels
        maximum = float(np.iinfo(pixels.dtype).max) if pixels.dtype.kind in "iu" else 1.0
        attributes = _ngff.attributes(image.metadata, maximum)
        file.mkdir()
        group = {"attributes": attributes, "zarr_format": 3, "node_type": "group"}
        (file / "zarr.json").write_text(json.dumps(group, indent=2), encoding="utf-8")
        arrays.write(file / "0", pixels)

    write_members(images, columns, path, "ome_zarr", _SUFFIX, write_one)


class Source(FolderSource):
    """Images of a folder of OME-Zarr groups, in sidecar order or, without a sidecar, in natural order of group names.

    The image of a group is its ``level``, by default the first. Each field of view of a plate is an image; columns name
    plate, well, field (its path in the well) and, if all paths are whole numbers, site. A bare array is read if the
    names of its dimensions state its axes or, if they name no axis, its rank does (2-D: YX, 5-D: TCZYX). Raises
    `FormatError` if a member is not an image, its axes are unknown, its pixels are of an unsupported dtype, or a plate
    lists a well or a field that is missing; `ArgumentError` if an image lacks the level.
    """

    name = "ome_zarr"
    errors = _ERRORS
    has_levels = True
    can_skip = True

    def __init__(self, path: Path, known: Mapping[str, Any] | None = None, *, level: int = 0, **how: Any) -> None:
        self._level, self._arrays = level, _zarr_chunks.Reader(level)
        self.variant = (f"level {level}",) if level else ()
        super().__init__(path, known, **how)

    def __reduce__(self) -> tuple[Any, ...]:
        kind, given = super().__reduce__()
        return partial(kind, level=self._level), given

    def _look(self) -> None:
        self._plate: tuple[str | None, list[str]] | None = None
        super()._look()
        if self._listed and self._level:
            raise ArgumentError(
                "written collections have only level 0",
                path=self.path,
                option="level",
                value=self._level,
                remedy="pass level=0",
            )
        if self._plate is not None and not self._listed:
            self._take_plate(*self._plate)

    def _take_plate(self, name: str | None, listed: Sequence[str]) -> None:
        """Set the columns plate, well, site (if fields are numbered) and field of the fields of a plate."""
        if not self._members:
            return
        known = frozenset(listed)
        wells, paths = zip(*(_ngff.split_field(member.file, known) for member in self._members), strict=True)
        plate = name or _without_suffix(self.path.name)
        columns: dict[str, list[Any]] = {
            "Metadata_Plate": [plate] * len(wells),
            "Metadata_Well": [_ngff.well_name(well) for well in wells],
        }
        sites = _ngff.site_numbers(wells, paths)
        if sites is not None:
            columns["Metadata_Site"] = sites
        columns["Metadata_Field"] = list(paths)
        self._set_columns(pa.table(columns))

    def _is_member(self, path: Path | os.DirEntry[str]) -> bool:
        if not path.is_dir() or not is_zarr_node(os.fspath(path)):
            return False
        if isinstance(path, os.DirEntry):
            return not (path.name == "OME" and not Path(path, "0").exists())
        node = self._node(path)
        return isinstance(node, zarr.Array) or _ngff.multiscales_of(dict(node.attrs)) is not None

    def stored_as(self) -> Stored:
        looked_at = spread(len(self))
        codecs, layouts, versions, direct = [], [], [], 0
        for index in looked_at:
            path = self._root / self._members[index].file
            array, _ = self._array(path)
            with self._reading(path):
                codecs.append("compressed" if array.compressors else "none")
                chunk = " x ".join(map(str, array.chunks))
                layouts.append(chunk if array.shards is None else f"{chunk} in shards")
            versions.append(str(array.metadata.zarr_format))
            direct += self._plain(self._members[index].file) is not None
        reading = "chunk files read and decoded one by one" if direct == len(looked_at) else "by zarr"
        chunking = f"one folder an image, chunks of {joined(layouts)}, Zarr {joined(versions)}"
        known = len(looked_at) if len(looked_at) < len(self) else None
        return Stored(None, joined(codecs), chunking, in_place=False, reading=reading, looked_at=known)

    def _node(self, path: Path) -> zarr.Array[Any] | zarr.Group:
        for name in _NODE_FILES:
            refuse_special(f"{path}/{name}")
        with self._reading(path):
            return zarr.open(path, mode="r")

    def _array(self, path: Path) -> tuple[zarr.Array[Any], str | None]:
        """Return the array of an image at the selected level, and its axes if known."""
        self._refuse_links(path)
        node = self._node(path)
        if isinstance(node, zarr.Array):
            if self._level:
                raise ArgumentError(
                    "a Zarr array has no levels",
                    path=path,
                    option="level",
                    value=self._level,
                    remedy="pass level=0",
                )
            with self._reading(path):
                return _safe(node, path), _ngff.axes_named(_dimensions(node))
        multiscale = _ngff.multiscales_of(dict(node.attrs))
        if multiscale is None:
            raise self._without_images(path, dict(node.attrs))
        with self._reading(path):
            array = node[_ngff.level_path(multiscale, str(path), self._level, partial(self._vector, path))]
        if not isinstance(array, zarr.Array):
            raise FormatError(f"{path}: level {self._level} is not a Zarr array; restore it")
        return _safe(array, path), _ngff.axes_of(multiscale)

    def _vector(self, group: Path, name: str) -> bytes | list[float]:
        """Return the numbers of an array in a group, or the bytes of a file."""
        if is_zarr_node(f"{group}/{name}"):
            return self._numbers(group / name)
        with self._reading(group / name):
            return _zarr_chunks.contents(f"{group}/{name}")

    def _numbers(self, path: Path) -> list[float]:
        array = self._node(path)
        if not isinstance(array, zarr.Array):
            raise FormatError(f"{path}: is a Zarr group, expected an array; correct the path")
        with self._reading(path):
            values: list[float] = _whole(_safe(array, path), path).astype(np.float64).reshape(-1).tolist()
        return values

    def _no_images(self) -> FormatError:
        if not is_zarr_node(str(self.path)):
            return super()._no_images()
        return self._without_images(self.path, dict(self._node(self.path).attrs))

    def _without_images(self, path: Path, attributes: Mapping[str, Any]) -> FormatError:
        """Return the error for a Zarr group that is not an image, and contains none at the searched places."""
        if _ngff.is_of_plate(attributes):
            return FormatError(f"{path}: is a part of an OME-Zarr plate; pass the path of the plate")
        inside = sorted(group for group in path.iterdir() if group.is_dir() and is_zarr_node(str(group)))[:_NAMED]
        if path != self.path and any(self._is_member(group) for group in inside):
            return FormatError(f"{path}: is a subfolder with OME-Zarr images; pass {str(path)!r} to read them")
        groups = f" (it contains {', '.join(repr(group.name) for group in inside)})" if inside else ""
        remedy = "pass the path of an OME-Zarr image, of a folder with images, or of a plate"
        return FormatError(f"{path}: is a Zarr group without multiscales or plate in its attributes{groups}; {remedy}")

    def _present(self) -> list[str]:
        node = self._node(self.path) if self._may_be_plate() else None
        with self._reading():
            self._plate = _ngff.plate_of(dict(node.attrs), str(self.path)) if isinstance(node, zarr.Group) else None
        if self._plate is not None:
            fields = [field for well in self._plate[1] for field in self._fields(well)]
            if not fields:
                raise FormatError(f"{self.path}: the OME-Zarr plate has no fields; pass a plate with images")
            return fields
        names = super()._present()
        for name in names:
            for part in ("zarr.json", "0"):
                if os.path.islink(f"{self.path}/{name}/{part}"):  # noqa: PTH114  # at every image: pathlib is slow
                    raise link_refused(self.path / name / part)
        return names

    def _may_be_plate(self) -> bool:
        """Whether the group's attributes may describe a plate; asking zarr takes a third of the opening time."""
        for file in (self.path / name for name in _NODE_FILES):
            with self._reading(file):
                if file.is_file() and b'"plate"' in file.read_bytes():
                    return True
        return False

    def _fields(self, well: str) -> list[str]:
        """Return the fields of a plate's well, as paths below the plate."""
        for folder in (PurePosixPath(well), *PurePosixPath(well).parents[:-1]):
            if (self.path / folder).is_symlink():
                raise link_refused(self.path / folder)
        remedy = "restore it, or remove it from the list"
        if not is_zarr_node(f"{self.path}/{well}"):
            raise FormatError(f"{self.path}: lists the well {well!r}, which does not exist; {remedy}")
        node = self._node(self.path / well)
        with self._reading(self.path / well):
            listed = _ngff.fields_of(dict(node.attrs), f"{self.path}/{well}")
        if listed is None:
            raise FormatError(f"{self.path}: well {well!r} does not list its fields; {remedy}")
        fields = [f"{well}/{field}" for field in listed]
        for field in fields:
            if not is_zarr_node(f"{self.path}/{field}"):
                raise FormatError(
                    f"{self.path}: well {well!r} lists the field {field!r}, which does not exist; {remedy}"
                )
        return fields

    def _plain(self, file: str) -> _zarr_chunks.Found | None:
        """Return the array of an image whose chunk files are read directly; None if zarr must open and read it."""
        return self._arrays.find(f"{self._root}/{file}")

    def _refuse_links(self, path: Path) -> None:
        refuse_links(path)

    def _describe(self, file: str, listed: ListedPage | None = None) -> Member:
        del listed  # Only TIFF files have pages.
        self._refuse_links(self._root / file)
        plain = self._plain(file)
        if plain is not None:
            shape, dtype, axes = plain.layout.shape, plain.layout.dtype, plain.axes
        else:
            array, axes = self._array(self._root / file)
            shape, dtype = array.shape, np.dtype(array.dtype)
        laid_out = self._laid_out(np.broadcast_to(np.zeros((), np.uint8), shape), axes, file)
        return Member(file, self._image_id(file), laid_out.shape, dtype.newbyteorder("="))

    def _image_id(self, file: str) -> str:
        return _without_suffix(file)

    def _laid_out(self, pixels: Array, axes: str | None, file: str) -> Array:
        try:
            return to_tczyx(pixels, axes, str(self._root / file))
        except AxesError as error:
            raise FormatError(f"{self._root / file}: axes are not those of an image: {error}") from error
        except ImageError as error:
            if axes is not None or 0 in pixels.shape:
                raise FormatError(str(error)) from error
            problem = f"the axes of a {pixels.ndim}-D array are unknown"
            remedy = "name its dimensions (t, c, z, y, x), or store it as OME-Zarr"
            raise FormatError(f"{self._root / file}: {problem}; {remedy}") from error

    def _read(self, index: int) -> Array:
        if not self._listed:
            return self._checked(index, self._read_foreign(self._members[index].file))
        member = self._members[index]
        image = new_image(member.shape, member.dtype, f"{self._root}/{member.file}")
        self._read_into(index, image)
        return image

    def _read_into(self, index: int, image: Array) -> None:
        if not self._listed:
            super()._read_into(index, image)
            return
        folder = f"{self._root}/{self._members[index].file}/0"
        with refusing(Path(folder), "OME-Zarr", _ERRORS):
            layout = self._layout(index, folder)
            if layout is None:
                image[...] = self._checked(index, _whole(self._complete(folder), Path(folder)))
            else:
                _zarr_chunks.read_into(folder, layout, image)

    def files_of(self, index: int) -> Sequence[str]:
        member = self._members[index]
        folder, names = f"{self._root}/{member.file}/0", self._chunk_names.get(member.shape, ())
        return [f"{folder}/{name}" for name in ("zarr.json", *names)] if names else ()

    @cached_property
    def _chunk_names(self) -> dict[tuple[int, ...], Sequence[str]]:
        """Names of the chunk files, by the shapes read so far."""
        return {}

    def reader(self) -> Reader | None:
        return self._read_through if self._listed else None

    def _read_through(self, index: int, block: Array) -> Array:
        with self._opening():
            self._read_into(index, block)
        return block

    def _layout(self, index: int, folder: str) -> _zarr_chunks.Layout | None:
        """Return the layout of an array that this package wrote; None if another writer replaced it."""
        layout = self._arrays.layout(folder)
        if layout is None or "/" in layout.places[0][0]:
            return None
        member = self._members[index]
        if layout.shape != member.shape or layout.dtype != member.dtype:
            self._checked(index, np.broadcast_to(np.zeros((), layout.dtype), layout.shape))
        if layout.shape not in self._chunk_names:
            self._chunk_names[layout.shape] = [name for name, _ in layout.places]
        return layout

    def _complete(self, folder: str) -> zarr.Array[Any]:
        """Return the array of an image listed in the sidecar, or raise `FormatError` if chunks are missing."""
        array, _ = self._array(Path(folder))
        if array.nchunks_initialized != array.nchunks:  # zarr would return its fill value
            missing = array.nchunks - array.nchunks_initialized
            raise FormatError(f"{folder}: {missing} of {array.nchunks} chunks do not exist; restore the folder")
        return array

    def _read_located(self, rows: Sequence[int], regions: Sequence[Region]) -> list[Any]:
        arrays: list[Any] = [None] * len(rows)
        for row, positions in rows_to_positions(rows).items():
            in_image = [regions[position] for position in positions]
            folder = f"{self._root}/{self._members[row].file}/0"
            if self.fetches or not self._listed:
                parts = self._read_foreign_regions(row, in_image)
            else:
                with refusing(Path(folder), "OME-Zarr", _ERRORS):
                    layout = self._layout(row, folder)
                    if layout is not None:
                        parts = _zarr_windows.read(folder, layout, in_image)
                    else:
                        array = self._complete(folder)
                        self._checked(row, np.broadcast_to(np.zeros((), array.dtype), array.shape))
                        parts = _zarr_windows.read_by_zarr(array, in_image, Path(folder))
            for position, pixels in zip(positions, parts, strict=True):
                arrays[position] = pixels
        return arrays

    def _read_foreign_regions(self, row: int, regions: Sequence[Region]) -> list[Array]:
        file = self._members[row].file
        path = self._root / file
        plain = self._plain(file)
        arrays = axes = None
        if plain is not None:
            axes = plain.axes
            self._refuse_other(row, plain.layout.shape, plain.layout.dtype, axes)
            of_array = _zarr_windows.regions_of_array(regions, axes, len(plain.layout.shape))
            with self._reading(path), suppress(FileNotFoundError):  # Only zarr knows the pixels of missing chunks.
                arrays = _zarr_windows.read(plain.folder, plain.layout, of_array)
        if arrays is None:
            array, axes = self._array(path)
            self._refuse_other(row, array.shape, np.dtype(array.dtype), axes)
            with self._reading(path):
                of_array = _zarr_windows.regions_of_array(regions, axes, array.ndim)
                arrays = _zarr_windows.read_by_zarr(array, of_array, path)
        laid_out = [self._laid_out(pixels, axes, file) for pixels in arrays]
        return [pixels.astype(pixels.dtype.newbyteorder("="), copy=False) for pixels in laid_out]

    def _refuse_other(self, index: int, shape: tuple[int, ...], dtype: np.dtype[Any], axes: str | None) -> None:
        """Raise `FormatError` if an array of this shape, dtype and axes differs from the listed one."""
        like = np.broadcast_to(np.zeros((), dtype.newbyteorder("=")), shape)
        self._checked(index, self._laid_out(like, axes, self._members[index].file))

    def _read_foreign(self, file: str) -> Array:
        plain = self._plain(file)
        with self._reading(self._root / file):
            image = None if plain is None else _zarr_chunks.read(plain)
        if plain is not None and image is not None:
            axes = plain.axes
        else:
            array, axes = self._array(self._root / file)
            with self._reading(self._root / file):
                image = _whole(array, self._root / file)
        laid_out = self._laid_out(image, axes, file)
        return np.ascontiguousarray(laid_out, laid_out.dtype.newbyteorder("="))

    def metadata(self, index: int) -> dict[str, Any]:
        path = self._root / self._members[self.index(index)].file
        with self._reading(path):
            attributes = dict(self._node(path).attrs)
            return _ngff.parse(attributes, str(path), self._level, partial(self._vector, path))

    def label_images(self) -> list[str]:
        found: dict[str, None] = {}
        for index in spread(len(self)):
            labels = self._root / self._members[index].file / "labels"
            if is_zarr_node(str(labels)):
                with self._reading(labels):
                    found |= dict.fromkeys(_ngff.labels_of(dict(self._node(labels).attrs)))
        return list(found)

    def labels(self, name: str) -> tuple[BaseSource, Array]:
        if not name or ".." in PurePosixPath(name).parts:
            raise ArgumentError(
                f"{name!r} is not a valid name of label images", path=self.path, remedy="pass a name below labels/"
            )
        files = [f"{member.file}/labels/{name}" for member in self._members]
        indices = [index for index, file in enumerate(files) if is_zarr_node(f"{self._root}/{file}")]
        if not indices:
            names = self.label_images()
            remedy = f"pass one of {', '.join(map(repr, names))}" if names else "pass masks as another collection"
            raise ArgumentError(f"no image has label images {name!r}", path=self.path, remedy=remedy)
        ids = [self.image_ids[index] for index in indices]
        paths = [files[index] for index in indices]
        label_source = Source.of_files(self.path, self._root, paths, ids, range(len(indices)), level=self._level)
        label_source.variant = (*self.variant, f"labels/{name}")
        label_of = np.full(len(files), -1)
        label_of[indices] = np.arange(len(indices))
        return label_source, label_of


_OF_BUCKET = 2  # Parts of a URL without an object name.


class RemoteSource(Source):
    """Images of OME-Zarr on a server, read by zarr, which fetches the chunks or shards of an image or a region.

    A folder of images is listed by its sidecar or by the server; a plate, and one image, by their attributes.
    """

    fetches = True
    takes = ("level",)

    def __init__(self, path: Path, known: Mapping[str, Any] | None = None, *, objects: Objects, **how: Any) -> None:
        self._objects = objects
        self._nodes: ProcessLocal[ZarrObjects] = ProcessLocal(self._open_store)
        super().__init__(path, known, **how)

    def __reduce__(self) -> tuple[Any, ...]:
        kind, given = super().__reduce__()
        return partial(kind, objects=self._objects), given

    def _top(self) -> zarr.Array[Any] | zarr.Group:
        """Return the node at the URL, or raise `FormatError` with the names below it if the server can list."""
        try:
            return self._node(self.path)
        except FormatError:
            with suppress(StorageError, MissingPathError):
                names = sorted({name.partition("/")[0] for name in self._objects.inside(str(self.path))})
                if not set(names) & set(ZARR_FILES):
                    problem = f"is not an OME-Zarr image, but contains {', '.join(map(repr, names[:5]))}"
                    raise FormatError(f"{self.path}: {problem}; pass the URL of one of them") from None
            raise

    def _open_store(self) -> ZarrObjects:
        return ZarrObjects(self._objects, str(self._root), complete=self._listed)

    def _refuse_replaced(self) -> None:
        """Do nothing: a change cannot be detected from one object."""

    def _refuse_links(self, path: Path) -> None:
        """Do nothing: servers have no links."""
        del path

    def _plain(self, file: str) -> None:
        """Return None: zarr opens and reads all arrays."""
        del file

    def _vector(self, group: Path, name: str) -> bytes | list[float]:
        try:
            return bytes(self._objects.read(f"{group}/{name}"))
        except MissingPathError:
            return self._numbers(group / name)

    def _look(self) -> None:
        self.columns, self._root, self._listed = pa.table({}), self.path, False
        try:
            sidecar = self._objects.read(f"{self.path}/{SIDECAR}")
        except MissingPathError:
            node = self._top()
            of_image = isinstance(node, zarr.Array) or _ngff.multiscales_of(dict(node.attrs)) is not None
            with self._reading():
                plate = None if of_image else _ngff.plate_of(dict(node.attrs), str(self.path))
            if of_image and len(self.path.parts) <= _OF_BUCKET:
                raise FormatError(
                    f"{self.path}: the bucket itself is an image, which is not supported; copy it to a folder of "
                    f"the bucket, and pass the URL of that folder"
                ) from None
            if of_image:
                self._root = self.path.parent
                self._nodes.close()
            names = [self.path.name] if of_image else self._below() if plate is None else self._fields_of(plate[1])
            self._take_files(names)
            if plate is not None:
                self._take_plate(*plate)
        else:
            self._listed = self._take_sidecar(self.path / SIDECAR, pa.py_buffer(sidecar))
            self._nodes.close()
            if self._level:
                raise ArgumentError(
                    "written collections have only level 0",
                    path=self.path,
                    option="level",
                    value=self._level,
                    remedy="pass level=0",
                )
        members = repr([(member.file, member.shape, member.dtype.str) for member in self._members])
        self.stamp = (int.from_bytes(hashlib.blake2b(members.encode(), digest_size=16).digest()),)

    def _below(self) -> list[str]:
        """Return the names of the images directly below the group, which is listed."""
        parts = (name.partition("/") for name in self._objects.inside(str(self.path)))
        names = {first for first, _, rest in parts if rest in _NODE_FILES and first != "OME"}
        if not names:
            raise FormatError(f"{self.path}: the Zarr group contains no images; pass the URL of an image or a plate")
        return sorted(names, key=natural_key)

    def _fields_of(self, wells: Sequence[str]) -> list[str]:
        fields = []
        for well in wells:
            with self._reading(self.path / well):
                listed = _ngff.fields_of(dict(self._node(self.path / well).attrs), f"{self.path}/{well}")
            fields += [f"{well}/{field}" for field in listed or []]
        if not fields:
            raise FormatError(f"{self.path}: the OME-Zarr plate has no fields; pass a plate with images")
        return fields

    def _node(self, path: Path) -> zarr.Array[Any] | zarr.Group:
        store = self._nodes.get()
        node: zarr.Array[Any] | zarr.Group = store.kept(str(path), lambda: store.node(str(path), self._reading(path)))
        return node

    def _array(self, path: Path) -> tuple[zarr.Array[Any], str | None]:
        path = path / "0" if self._listed else path  # written here: the group need not be read to find its array
        found = super()._array
        array: tuple[zarr.Array[Any], str | None] = self._nodes.get().kept(f"{path} array", lambda: found(path))
        return array

    def _read(self, index: int) -> Array:
        return self._checked(index, self._read_foreign(self._members[index].file))

    def reader(self) -> Reader | None:
        return None

    def files_of(self, index: int) -> Sequence[str]:  # noqa: ARG002  # as that of local files
        return ()

    def _read_into(self, index: int, image: Array) -> None:
        image[...] = self._read(index)

    def label_images(self) -> list[str]:
        return []

    def labels(self, name: str) -> tuple[BaseSource, Array]:
        raise ArgumentError(
            f"label images {name!r} on a server are not supported",
            path=self.path,
            remedy="copy the collection to this machine",
        )

    def stored_files(self) -> Iterator[Path]:
        yield from ()

    def stored_size(self) -> tuple[int, int, int]:
        """Return the number, size and allocated bytes of objects; sizes are 0 on a web server, which cannot list."""
        try:
            sizes = [size_bytes for size_bytes, _ in self._objects.inside(str(self.path)).values()]
        except StorageError:
            return len(self), 0, 0
        return len(sizes), sum(sizes), sum(sizes)

    def close(self) -> None:
        self._nodes.close()
        self._objects.forget()


def _without_suffix(name: str) -> str:
    """Return the name of an image or a plate from the name of its folder."""
    return name.removesuffix(".zarr").removesuffix(".ome")


def _dimensions(array: zarr.Array[Any]) -> Any:
    """Return the names of an array's dimensions, as stored by version 3, or by xarray in version 2, or None."""
    described = array.metadata.to_dict()
    return described.get("dimension_names") or array.attrs.get("_ARRAY_DIMENSIONS")


def _safe(array: zarr.Array[Any], path: Path) -> zarr.Array[Any]:
    """Return an array whose chunks hold pixels; decoding pickled objects, as Zarr 2 may hold, would run their code."""
    schema.pixel_dtype(str(array.dtype), str(path))
    described = array.metadata.to_dict()
    if "pickle" in repr([described.get(name) for name in ("filters", "compressor", "codecs")]).lower():
        raise FormatError(f"{path}: chunks are pickled objects, which could run code; convert them to numbers")
    return array


def _whole(array: zarr.Array[Any], path: Path) -> Array:
    """Return the pixels of an array read by zarr, if they and its largest chunk fit in memory."""
    for shape in (array.shape, array.shards or array.chunks):
        new_image(shape, np.dtype(array.dtype), path)
    return np.asarray(array[...])
