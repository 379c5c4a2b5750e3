"""Images whose pixels encode their positions, hypothesis strategies over them, and OME-Arrow records built by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from omearrow_ds import FORMATS
from omearrow_ds.codec import schema
from omearrow_ds.testing.conformance import METADATA, RAGGED, all_same, image_of, images_of, same

__all__ = ["METADATA", "RAGGED", "all_same", "image_of", "images_of", "same"]  # All names below, too.

Array = np.ndarray[Any, Any]
Record = dict[str, Any]

NF1 = Path(__file__).resolve().parents[3] / "shared/data/nf1"
DTYPES = schema.DTYPES
NAMES = [fmt.name for fmt in FORMATS]
TABLES = [fmt.name for fmt in FORMATS if fmt.kind == "table"]
FOLDERS = [fmt.name for fmt in FORMATS if fmt.kind == "directory"]
ENCODED = [
    *((name, encoding) for name in TABLES for encoding in schema.ENCODINGS),
    *((name, "bytes") for name in FOLDERS),
]
# Datasets read lists of all formats. If the encoding matters little, two formats are enough.
ENCODED_OR_LONG = [
    pytest.param(*pair, marks=() if pair[1] == "bytes" or pair[0] in ("parquet", "arrow") else pytest.mark.slow)
    for pair in ENCODED
]
# A format per way to read: memory-mapped, decoded, and a file per image. Others are slow where formats share the code.
FEW_FORMATS = ("arrow", "parquet", "tiff")
SUFFIX = {fmt.name: fmt.suffix for fmt in FORMATS}

MIXED = [((1, 1 + number % 3, 1, 4 + number, 5), ("uint8", "int32", "float64")[number % 3]) for number in range(12)]
NO_METADATA = schema.normalize_metadata(None, 0, "")


def slow_except(few: Collection[object], cases: Iterable[object]) -> list[object]:
    """Return cases as parameters; those that are not among ``few``, as a whole or by their first value, are slow."""
    return [
        pytest.param(*values, marks=() if case in few or values[0] in few else pytest.mark.slow)
        for case in cases
        for values in [case if isinstance(case, tuple) else (case,)]
    ]


NAMES_OR_LONG = slow_except(FEW_FORMATS, NAMES)


def shapes(longest: int = 8) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(1, 3)] * 3, *[st.integers(1, longest)] * 2)


dtypes = st.sampled_from(DTYPES)
kinds = st.tuples(shapes(), dtypes)


def collections(longest: int = 4) -> st.SearchStrategy[list[Array]]:
    """Images of one kind, or each of its own."""
    uniform = st.builds(lambda kind, count: [kind] * count, kinds, st.integers(1, longest))
    return st.one_of(uniform, st.lists(kinds, min_size=1, max_size=longest)).map(images_of)


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> list[tuple[int, int, tuple[slice, ...]]]:
    """Chunks of an image: a grid of random cuts in Z, Y and X, then perhaps shuffled, thinned out or overlapping."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape[2:]]
    spans = [[slice(*span) for span in pairwise(cut)] for cut in cuts]
    chunks = [(t, c, slices) for t, c, slices in product(range(shape[0]), range(shape[1]), list(product(*spans)))]
    change = draw(st.sampled_from(["none", "none", "shuffle", "gap", "overlap"]))
    if change == "shuffle":
        chunks = draw(st.permutations(chunks))
    if change == "gap" and len(chunks) > 1:
        chunks.pop(draw(st.integers(0, len(chunks) - 1)))
    if change == "overlap":
        chunks.append((0, 0, tuple(slice(0, draw(st.integers(1, size))) for size in shape[2:])))
    return chunks


def record_of(image: Array, chunks: list[Record] | None, planes: list[Record] | None, **fields: Any) -> Record:
    """Return the OME-Arrow record of an image (T, C, Z, Y, X) stored as ``chunks`` and ``planes``."""
    sizes = dict(zip(("size_t", "size_c", "size_z", "size_y", "size_x"), image.shape, strict=True))
    record = {
        "type": "ome.arrow",
        "version": "0.1.0",
        "id": "an image",
        "pixels_meta": {"type": image.dtype.name, "dimension_order": "XYZCT", "channels": [], **sizes},
        "chunks": chunks,
        "planes": planes,
    }
    return record | fields


def list_chunk(image: Array, t: int, c: int, slices: tuple[slice, ...], number: int = 0) -> Record:
    """Return one chunk as numbers; ``number`` is added, so that overlapping chunks differ."""
    del number
    pixels = image[t, c][slices]
    return _chunk_box(t, c, slices) | {"pixels": pixels.ravel()}


def byte_chunk(
    image: Array, t: int, c: int, slices: tuple[slice, ...], dtype: str | None = None, compression: str | None = None
) -> Record:
    """Return one chunk as bytes, of another dtype if asked."""
    pixels = image[t, c][slices] if dtype is None else image[t, c][slices].astype(dtype)
    data = pixels.tobytes()
    if compression not in (None, "", "none", "None", " NONE "):
        data = pa.Codec(compression).compress(data, asbytes=True)
    return _chunk_box(t, c, slices) | {"dtype": dtype, "compression": compression, "pixel_bytes": data}


def _chunk_box(t: int, c: int, slices: tuple[slice, ...]) -> Record:
    starts = {axis: part.start for axis, part in zip("zyx", slices, strict=True)}
    lengths = {f"shape_{axis}": part.stop - part.start for axis, part in zip("zyx", slices, strict=True)}
    return {"t": t, "c": c, **starts, **lengths}


def planes_of(image: Array) -> list[Record]:
    """Return one plane for each (t, c, z)."""
    return [
        {"t": t, "c": c, "z": z, "pixels": image[t, c, z].ravel()}
        for t, c, z in product(*(range(size) for size in image.shape[:3]))
    ]


def whole_chunks(image: Array, encoding: str) -> list[Record]:
    """Return one chunk for each (t, c), whole in Z, Y and X."""
    slices = tuple(slice(0, size) for size in image.shape[2:])
    make = byte_chunk if encoding == "bytes" else list_chunk
    return [make(image, t, c, slices) for t, c in product(*(range(size) for size in image.shape[:2]))]


def retyped(kind: pa.DataType, names: dict[str, Any]) -> pa.DataType:
    """Return ``kind`` with the types of the fields in ``names`` replaced by the results of those functions."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(names.get(field.name, _same)(retyped(field.type, names))) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(retyped(kind.value_type, names))
    return kind


def _same(kind: pa.DataType) -> pa.DataType:
    return kind
