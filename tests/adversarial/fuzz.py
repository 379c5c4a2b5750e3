"""Fuzzing of the decoder: bytes choose a row or file and its damage, which this package and a foreign reader decode.

The result must equal that of the foreign reader bit for bit, or be an error of this package: no crash, no hang.

    python -m tests.adversarial.fuzz --seconds 600     coverage-guided where atheris is installed, else random mutations
    python -m tests.adversarial.fuzz --replay FILE...  one input per file
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omearrow_ds import OMEArrowDSError, open_images, write_images
from omearrow_ds.codec import schema
from tests.adversarial.malformed import ORACLE_ERRORS, oracle, records_of
from tests.support.strategies import (
    DTYPES,
    SUFFIX,
    Array,
    Record,
    image_of,
    images_of,
    planes_of,
    record_of,
    same,
    whole_chunks,
)

CORPUS = Path(__file__).parents[1] / "data/fuzz"
INPUT_LIMIT_BYTES = 256
HANG_S = 60
MEMORY_LIMIT_BYTES = 12 * 2**30
STRICTER = re.compile(
    "neither chunks nor planes|decompress to fewer|pixel is null|pixels are null|is not supported, expected"
    "|type is null, expected"
)
FOREIGN_ERRORS = (*ORACLE_ERRORS, ArithmeticError, pa.ArrowException, EOFError, LookupError)
_INTEGERS = (None, 0, 1, 2, 3, 4, 9, -1, -2, 255, 2**15 - 1, 2**31 - 1, -(2**31))
_COMPRESSIONS = ("zstd", "lz4", "gzip", "snappy", "brotli", "lz4_raw")
_NAMES = (
    *(
        None,
        "",
        "none",
        "None",
        "uint16",
        ">u2",
        "<u2",
        "uint8",
        "float32",
        "int64",
        "pixels",
        " zstd",
        "ZYX",
        "XYZ",
        "zyx",
    ),
    *("u2,u2", "a4", "\0"),
    *_COMPRESSIONS,
)
_CHUNK_FIELDS = (*schema.CHUNK_PLACE, "dtype", "compression", "pixel_bytes", "pixels", "drop", "twice", "null")
_META_FIELDS = ("size_t", "size_c", "size_z", "size_y", "size_x", "type")


class Choices:
    """Choices made by bytes. When the bytes are used up, every choice is the first option."""

    def __init__(self, data: bytes) -> None:
        self._data, self._offset = data, 0

    def number(self, stop: int) -> int:
        """Return a number from 0 to ``stop - 1``."""
        length = max(1, (stop - 1).bit_length() + 7) // 8
        taken = self._data[self._offset : self._offset + length]
        self._offset += length
        return int.from_bytes(taken, "little") % stop

    def one(self, options: Sequence[Any]) -> Any:
        return options[self.number(len(options))]


def fuzz_rows(choices: Choices, folder: Path) -> None:
    """Decode and compare one to three rows of one encoding, some of them mutated, as an Arrow IPC file."""
    encoding = choices.one(schema.ENCODINGS)
    records = [_record(choices, encoding, number) for number in range(1 + choices.number(3))]
    for _ in range(choices.number(5)):
        _mutate(choices, choices.one(records))
    try:
        rows = pa.array(records, schema.image_struct(encoding))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return
    path = folder / "images.arrow"
    rows = rows.slice(choices.number(2))
    with pa.ipc.new_file(path, pa.schema({"ome_image": rows.type})) as writer:
        writer.write_batch(pa.record_batch({"ome_image": rows}))
    expected = [oracle(record) for record in records_of(rows)]
    if any(isinstance(image, MemoryError) for image in expected):
        return  # Gaps are read as gigabytes of zeros, which is right but too slow to compare.
    _compare(path, "arrow", expected)


def _record(choices: Choices, encoding: str, number: int) -> Record:
    shape = [1 + choices.number(stop) for stop in (2, 2, 3, 3, 4)]
    dtype = choices.one(DTYPES if encoding == "bytes" else DTYPES[:2])
    image = image_of(shape, dtype, number)
    chunks, planes = whole_chunks(image, encoding), []
    if choices.number(4) == 3:
        chunks, planes = choices.one((None, [])), planes_of(image.astype(np.uint16))
    for chunk in chunks or []:
        if encoding == "bytes" and choices.number(4) == 3:
            chunk["compression"] = codec = choices.one(_COMPRESSIONS)
            chunk["pixel_bytes"] = pa.Codec(codec).compress(chunk["pixel_bytes"], asbytes=True)
    return record_of(image, chunks, planes, chunk_grid={"chunk_order": "ZYX"})


def _mutate(choices: Choices, record: Record) -> None:
    kind = choices.number(8)
    pieces = record["chunks"] or record["planes"]
    if kind == 0:
        field = choices.one(_META_FIELDS)
        value = choices.one(_NAMES if field == "type" else _INTEGERS)
        record["pixels_meta"] = {**(record["pixels_meta"] or {}), field: value}
    elif kind == 1:
        record["chunk_grid"] = choices.one((None, {"chunk_order": choices.one(_NAMES)}))
    elif kind == 2:
        record[choices.one(("chunks", "planes", "pixels_meta"))] = choices.one((None, None))
    elif pieces:
        _mutate_piece(choices, pieces, choices.number(len(pieces)))


def _mutate_piece(choices: Choices, pieces: list[Any], index: int) -> None:
    field = choices.one(_CHUNK_FIELDS)
    piece = pieces[index]
    if field == "drop":
        del pieces[index]
    elif field == "twice":
        pieces.append(piece)
    elif field == "null" or piece is None:
        pieces[index] = None
    elif field in ("dtype", "compression"):
        pieces[index] = piece | {field: choices.one(_NAMES)}
    elif field == "pixel_bytes":
        data = piece.get(field) or b""
        cut = choices.number(len(data) + 1)
        pieces[index] = piece | {field: choices.one((None, data[:cut], data + data[:cut], data[cut:] + b"\xff", b""))}
    elif field == "pixels":
        values = [] if piece.get(field) is None else list(piece[field])
        cut = choices.number(len(values) + 1)
        pieces[index] = piece | {
            field: choices.one((None, values[:cut], [*values[:cut], None], values + values[:cut], []))
        }
    else:
        pieces[index] = piece | {field: choices.one(_INTEGERS)}


@cache
def _master(name: str, encoding: str, compression: str) -> tuple[Path, list[Array]]:
    images = images_of([((1, 2, 1, 9, 11), "uint16")] * 3 + [((1, 1, 2, 9, 11), "uint16")])
    path = Path(tempfile.mkdtemp(prefix="omearrow-fuzz-")) / f"images{SUFFIX[name]}"
    write_images(images, path, name, encoding=encoding, compression=compression)
    return path, images


_FILES = (
    *(("arrow", encoding, codec) for encoding in schema.ENCODINGS for codec in ("none", "lz4")),
    *(("parquet", encoding, codec) for encoding in schema.ENCODINGS for codec in ("none", "zstd", "snappy")),
)


def fuzz_files(choices: Choices, folder: Path) -> None:
    """Decode and compare a file of a kind that this package parses itself, with some bytes changed."""
    name, encoding, compression = choices.one(_FILES)
    master, images = _master(name, encoding, compression)
    file = folder / f"damaged{SUFFIX[name]}"
    data = bytearray(master.read_bytes())
    for _ in range(1 + choices.number(3)):
        _edit(choices, data)
    file.write_bytes(data)
    try:
        expected = _FOREIGN[name](file)
    except FOREIGN_ERRORS as error:
        expected = [error] * len(images)
    _compare(file, name, expected, images)


def _edit(choices: Choices, data: bytearray) -> None:
    offset, kind = choices.number(max(1, min(len(data), 2**16))), choices.number(6)
    if kind == 0:
        data[offset : offset + 1] = bytes([choices.number(256)])
    elif kind == 1:
        data[offset : offset + 1] = bytes(value ^ 1 << choices.number(8) for value in data[offset : offset + 1])
    elif kind == 2:
        data[offset : offset + 4] = (choices.one(_INTEGERS) or 2**31 - 2).to_bytes(4, "little", signed=True)
    elif kind == 3:
        data[offset : offset + 16] = bytes(len(data[offset : offset + 16]))
    elif kind == 4:
        del data[offset + 1 :]
    else:
        data[offset : offset + choices.number(8)] = b""


def _foreign_rows(table: pa.Table) -> list[Any]:
    table.validate(full=True)
    return [oracle(record) for record in records_of(table["ome_image"])]


_PARQUET_COLUMNS = [
    f"ome_image.{name}" for name in ("pixels_meta", "chunk_grid", "chunks")
]  # Damage elsewhere does not matter.
_FOREIGN: dict[str, Callable[[Path], list[Any]]] = {
    "arrow": lambda path: _foreign_rows(pa.ipc.open_file(path).read_all()),
    "parquet": lambda path: _foreign_rows(pq.ParquetFile(path).read(columns=_PARQUET_COLUMNS)),
}


def _compare(path: Path, name: str, expected: Sequence[Any], undamaged: Sequence[Array] | None = None) -> None:
    """Read in two ways, and compare the results."""
    try:
        source = open_images(path, name)
    except OMEArrowDSError as error:
        assert path.name in str(error), error  # noqa: PT017
        return
    with source:
        results: list[Any] = []
        for row in range(len(source)):
            try:
                results.append(source.read(row))
            except OMEArrowDSError as error:
                assert path.name in str(error), error  # noqa: PT017
                results.append(error)
            _judge(results[row], expected[row], None if undamaged is None else undamaged[row])
        scanned = []
        with suppress(OMEArrowDSError):
            scanned = [image for _, images in source.images.stream() for image in images]
        for image, read in zip(scanned, results, strict=False):
            assert not isinstance(read, Exception), f"scan gives what read refuses: {read}"
            assert same(image, read), "scan and read differ"


def _judge(image: Any, right: Any, stored: Array | None) -> None:
    if isinstance(image, Exception):
        strict = isinstance(right, Exception) or stored is not None or STRICTER.search(str(image))
        assert strict, f"we alone refuse it: {image}"
    elif isinstance(right, Exception):  # With several defects we may read less than the foreign reader.
        assert stored is not None, f"pixels, where the oracle raises {right!r}"
    else:
        right = right.astype(right.dtype.newbyteorder("="))
        assert (image.dtype, image.size) == (right.dtype, right.size), (
            "another dtype or shape than the foreign reader's"
        )
        assert image.tobytes() == right.tobytes(), "other pixels than the foreign reader's"


TARGETS = (fuzz_rows, fuzz_files)


def one_input(data: bytes) -> None:
    """Run one input; raise if it reveals a defect."""
    choices = Choices(data)
    target = choices.one(TARGETS)
    with tempfile.TemporaryDirectory(prefix="omearrow-fuzz-") as folder:
        target(choices, Path(folder))


def mutated(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Return random bytes, or a mutated input of the corpus."""
    data = bytearray(rng.choice(corpus) if corpus and rng.random() < 0.5 else rng.randbytes(rng.randrange(4, 64)))
    for _ in range(rng.randrange(3)):
        offset = rng.randrange(len(data) + 1)
        data[offset : offset + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
    return bytes(data[:INPUT_LIMIT_BYTES])


def random_pass(seconds: float, seed: int, most: int | None = None) -> int:
    """Run mutated inputs until the time or the count is reached; return the count. A failure names the input."""
    rng, corpus = random.Random(seed), [file.read_bytes() for file in sorted(CORPUS.iterdir())]
    deadline = time.monotonic() + seconds
    done = 0
    while time.monotonic() < deadline and done != most:
        data = mutated(rng, corpus)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            one_input(data)
        except BaseException:
            print(f"seed {seed}, input {done}: python -m tests.adversarial.fuzz --hex {data.hex()}", file=sys.stderr)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        done += 1
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fuzz the decoder.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--random", action="store_true", help="random mutations, though atheris is installed")
    parser.add_argument("--hex", help="run this one input")
    parser.add_argument("--replay", nargs="*", type=Path, help="run the inputs in these files")
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    faulthandler.enable()
    inputs = [bytes.fromhex(options.hex)] if options.hex else [file.read_bytes() for file in options.replay or ()]
    if inputs:
        for data in inputs:
            one_input(data)
        return
    try:
        import atheris
    except ImportError:
        options.random = True
    if options.random:
        print(f"seed {options.seed}: {random_pass(options.seconds, options.seed)} inputs, none failed")
        return
    for name in [name for name in sys.modules if name.startswith(("omearrow_ds", "tests."))]:
        del sys.modules[name]  # The next import instruments it for coverage.
    with atheris.instrument_imports(include=["omearrow_ds"]):
        again = importlib.import_module("tests.adversarial.fuzz")
        for name in ("arrow", "parquet"):
            importlib.import_module(f"omearrow_ds.storage.formats.{name}")
    folder = Path("results/fuzz")
    folder.mkdir(parents=True, exist_ok=True)
    limits = [
        f"-max_total_time={int(options.seconds)}",
        f"-max_len={INPUT_LIMIT_BYTES}",
        f"-timeout={HANG_S}",
        "-rss_limit_mb=0",
    ]
    folders = [f"-artifact_prefix={folder}/", str(folder), str(CORPUS)]
    atheris.Setup([sys.argv[0], *limits, f"-seed={options.seed % 2**31}", *folders], again.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
