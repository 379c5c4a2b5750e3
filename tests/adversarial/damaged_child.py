"""Child process of `damage`: damages copies of collections, reads each in every way, and reports the results."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omearrow_ds import OMEArrowDataset, OMEArrowDSError, open_images, write_images
from omearrow_ds.storage.formats import get_format
from tests.adversarial.damage import DATA_LIMIT_BYTES, RSS_LIMIT_BYTES
from tests.adversarial.mutations import Mutation, Plan
from tests.support.strategies import METADATA, SUFFIX

_NOBODY = 65534
_COUNT = 6
_FEW = 40  # damages


class Variant(NamedTuple):
    """A collection to damage; ``alike``: all images have one shape and dtype."""

    encoding: str
    compression: str
    alike: bool
    engine: str | None = None

    def __str__(self) -> str:
        return f"{self.encoding} {self.compression} {'alike' if self.alike else 'mixed'} {self.engine or ''}".strip()


class Truth(NamedTuple):
    """Content of an undamaged collection."""

    pixels: list[np.ndarray]
    ids: list[str]
    columns: dict[str, list[Any]]
    metadata: list[dict[str, Any]]


def variants_of(name: str) -> list[Variant]:
    """Return the variants of a format, which are damaged in turns."""
    fmt = get_format(name)
    encodings = ("bytes", "list") if fmt.kind == "table" else ("bytes",)
    compressions, engines = fmt.writer.compressions[:3], fmt.engines[1:]
    return [
        *(Variant(encoding, compression, alike=True) for encoding in encodings for compression in compressions),
        Variant("bytes", compressions[0], alike=False),
        *(Variant("bytes", compressions[0], alike=True, engine=engine) for engine in engines),
    ]


def _image(number: int, variant: Variant) -> np.ndarray:
    """Return an image whose pixels encode its number and position, with noise in the low bits."""
    shape = (1, 2, 1, 48, 40) if variant.alike else [(1, 2, 1, 48, 40), (1, 1, 2, 9, 31), (2, 1, 1, 32, 16)][number % 3]
    dtype = "uint16" if variant.alike else ["uint16", "uint8", "float32"][number % 3]
    noise = np.random.default_rng(number).integers(0, 16, shape)
    values = np.arange(np.prod(shape)).reshape(shape) * 16 + number * 1000 + noise
    return (values % 200 if dtype == "uint8" else values % 60000).astype(dtype)


def write_master(path: Path, name: str, variant: Variant) -> Truth:
    """Write the undamaged collection."""
    images = [_image(number, variant) for number in range(_COUNT)]
    columns = {"well": [f"A{number:02d}" for number in range(_COUNT)], "label": list(range(_COUNT))}
    kwargs: dict[str, Any] = {"rows_per_group": 4} if get_format(name).writer.has_row_groups else {}
    described = {**METADATA, "name": "cells", "channels": []}
    write_images(
        images,
        path,
        name,
        axes="TCZYX",
        encoding=variant.encoding,
        compression=variant.compression,
        columns=columns,
        metadata=[described] * _COUNT,
        **kwargs,
    )
    with open_images(path, name, engine=variant.engine) as source:
        metadata = [source.metadata(index) for index in range(_COUNT)]
        return Truth(images, list(source.image_ids), columns, metadata)


class Examination:
    """Reads a collection in every way, and records the results.

    Attributes
    ----------
    changed
        Names of data that differed from the written data without an error.
    faults
        Broken guarantees; ``why`` has the reasons.
    """

    def __init__(self, path: Path, name: str, variant: Variant, truth: Truth) -> None:
        self._path, self._name, self._variant, self._truth = path, name, variant, truth
        self.changed: set[str] = set()
        self.verified_changed: set[str] = set()
        self.faults: set[str] = set()
        self.errors: list[str] = []
        self.why: list[str] = []

    def all(self) -> None:
        self._try(lambda: self._source(self.changed), "source")
        self._try(lambda: self._dataset(self.changed, preload=True, verify=False), "preload")
        if self._variant.engine is None:
            self._try(lambda: self._dataset(self.changed, preload=False), "on demand")
        unverified, self.errors = self.errors, []
        self._try(lambda: self._source(self.verified_changed, verify=True), "verified source")
        self._try(lambda: self._dataset(self.verified_changed, preload=True), "verified preload")  # default
        self._try(lambda: self._dataset(self.verified_changed, preload=False, verify=True), "verified on demand")
        self.verify_errors, self.errors = self.errors, unverified
        if self.verified_changed & {"pixels", "shapes"}:
            self.faults.add("unverified")
            self.why.append(f"verified, and yet changed: {sorted(self.verified_changed)}")

    def _source(self, changed: set[str], **verify: bool) -> None:
        with open_images(self._path, self._name, engine=self._variant.engine, **verify) as source:
            count = len(source)
            self._same(changed, "ids", list(source.image_ids), self._truth.ids)
            self._same(changed, "columns", source.columns.to_pydict(), self._truth.columns)
            for index in range(min(count, 2 * _COUNT)):
                self._try(lambda index=index: self._image(changed, index, source.read(index)), "read")
                self._try(lambda index=index: self._metadata(changed, index, source.metadata(index)), "metadata")
            self._try(lambda: self._images(changed, source.take(list(range(count))[::-1])[::-1]), "take")
            self._try(lambda: self._images(changed, _scanned(source.images.stream())), "scan")

    def _dataset(self, changed: set[str], *, preload: bool, **verify: bool) -> None:
        dataset = OMEArrowDataset(
            self._path, self._name, preload=preload, axes="TCZYX", normalize=False, max_bytes=64 << 20, **verify
        )
        self._images(changed, [sample.numpy() for sample in dataset.__getitems__(range(len(dataset)))])
        if not preload:
            for index in range(len(dataset)):
                self._try(lambda index=index: self._image(changed, index, dataset[index].numpy()), "sample")

    def _metadata(self, changed: set[str], index: int, metadata: dict[str, Any]) -> None:
        if index < _COUNT:
            self._same(changed, "metadata", metadata, self._truth.metadata[index])

    def _images(self, changed: set[str], images: list[np.ndarray]) -> None:
        for index, image in enumerate(images):
            self._image(changed, index, image)

    def _image(self, changed: set[str], index: int, pixels: np.ndarray) -> None:
        expected = self._truth.pixels[index] if index < _COUNT else None
        if expected is None or pixels.shape != expected.shape or pixels.dtype != expected.dtype:
            changed.add("ids" if expected is None else "shapes")
        elif pixels.tobytes() != expected.tobytes():
            changed.add("pixels")

    def _same(self, changed: set[str], aspect: str, value: Any, expected: Any) -> None:
        if value != expected:
            changed.add(aspect)

    def _try(self, operation: Callable[[], object], aspect: str) -> None:
        try:
            operation()
        except OMEArrowDSError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            if str(self._path) not in str(error):
                self.faults.add("unnamed")
                self.why.append(f"{aspect}: {type(error).__name__}: {error}")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # that it is none of ours is what is looked for
            self.faults.add("foreign")
            last = [
                f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
            ]
            self.why.append(f"{aspect}: {type(error).__name__}: {str(error)[:300]} {last[-6:]}")


def _scanned(parts: Iterator[tuple[int, Any]]) -> list[np.ndarray]:
    return [image for _, images in parts for image in images]


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


class Reporter:
    """Writes one JSON object per line to the parent process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **report: Any) -> None:
        os.write(self._descriptor, json.dumps(report).encode() + b"\n")


def examine(folder: Path, number: int, master: Path, name: str, variant: Variant, truth: Truth, mutation: Mutation):
    """Return the examination of one damaged copy, its seconds and its peak bytes."""
    own_folder = folder / f"{number:06d}"
    own_folder.mkdir()
    copy = own_folder / master.name
    shutil.copytree(master, copy) if master.is_dir() else shutil.copy(master, copy)
    mutation.apply(copy)
    denied = mutation.kind == "denied"
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before_bytes, begun = _status_bytes("VmRSS"), time.monotonic()
    examination = Examination(copy, name, variant, truth)
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status_bytes("VmData") + DATA_LIMIT_BYTES, unlimited[1]))
    try:
        if denied and os.geteuid() == 0:
            os.seteuid(_NOBODY)
        examination.all()
    finally:
        if denied and os.getuid() == 0:
            os.seteuid(0)
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)
    seconds, peak_bytes = time.monotonic() - begun, _status_bytes("VmHWM") - before_bytes
    if peak_bytes > RSS_LIMIT_BYTES:
        examination.faults.add("memory")
        examination.why.append(f"{peak_bytes >> 20} MiB more than before")
    if denied:
        for path in (copy, *copy.rglob("*")) if copy.is_dir() else (copy,):
            path.chmod(0o700)
    shutil.rmtree(own_folder)
    gc.collect()  # Until this collection, sources that failed to open keep threads and files.
    return examination, seconds, peak_bytes


def main(folder: Path, name: str, start: int, stop: int, seed: int, pipe: Connection) -> None:
    """Run mutations ``start`` to ``stop``."""
    reporter = Reporter(pipe.fileno())
    variants = variants_of(name)
    masters: dict[Variant, tuple[Path, Truth, Plan]] = {}
    work = folder / f"work-{os.getpid()}"
    work.mkdir()
    for variant in dict.fromkeys(variants[number % len(variants)] for number in range(start, stop)):
        master = work / "masters" / str(variant).replace(" ", "-") / f"images{SUFFIX[name]}"
        master.parent.mkdir(parents=True)
        masters[variant] = (master, write_master(master, name, variant), Plan(master))
        if stop - start < _FEW and len(masters) > 1:
            continue  # A short pass examines one undamaged variant, a whole pass all.
        examined, _, _ = examine(
            work, 0, master, name, variant, masters[variant][1], Mutation("none", "", lambda _: None)
        )
        if examined.faults or examined.errors or examined.changed or examined.verify_errors:
            raise RuntimeError(f"undamaged {variant}: {vars(examined)}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # Later collections skip the imported modules.
    reporter.say()
    for number in range(start, stop):
        variant = variants[number % len(variants)]
        master, truth, plan = masters[variant]
        mutation = chosen(plan, number, number // len(variants), seed)
        description = {"number": number, "variant": str(variant), "kind": mutation.kind, "detail": mutation.detail}
        reporter.say(**description)
        examination, seconds, peak_bytes = examine(work, number, master, name, variant, truth, mutation)
        outcome = (
            "changed" if examination.changed else "error" if examination.errors or examination.faults else "identical"
        )
        caught = bool(examination.changed & {"pixels", "shapes"}) and bool(examination.verify_errors)
        reporter.say(
            **description,
            outcome=outcome,
            changed=sorted(examination.changed),
            caught=caught,
            faults=sorted(examination.faults),
            why=examination.why[:4],
            seconds=seconds,
            peak_bytes=peak_bytes,
        )
    shutil.rmtree(work)


def chosen(plan: Plan, number: int, turn: int, seed: int) -> Mutation:
    """Return mutation ``number``, the ``turn``-th of its variant; half are structural until all were used."""
    order = np.random.default_rng(seed).permutation(len(plan.structural))
    if turn % 2 == 0 and turn // 2 < len(order):
        return plan.structural[order[turn // 2]]
    return plan.random(np.random.default_rng([seed, number]))


def read_what_may_not_be_read(path: str, name: str) -> None:
    """Remove read permission from a collection, open it (as another user if this is root), and check the error."""
    open_images(path, name).close()
    os.chmod(path, 0)  # noqa: PTH101
    if os.geteuid() == 0:
        os.seteuid(_NOBODY)
    for format_name in (name, None):
        try:
            open_images(path, format_name)
        except OMEArrowDSError as error:
            assert path in str(error), error  # noqa: PT017
            assert "ermission denied" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("was read")


def read_what_is_cut_short(path: str, name: str, engine: str | None, images: list[np.ndarray], remaining: int) -> None:
    """Truncate the files of an open collection of ``images`` to ``kept`` percent, then read it in every way."""
    source = open_images(path, name, engine=engine)
    options: dict[str, Any] = {"preload": False, "normalize": False, "axes": "YX"}
    datasets = [OMEArrowDataset(path, name, **options) for _ in range(2)] if engine is None else []
    assert np.array_equal(source.read(0), images[0])
    for dataset in datasets:
        assert np.array_equal(dataset[0].numpy(), images[0][0, 0, 0])
    for file in [item for item in Path(path).rglob("*") if item.is_file()] or [path]:
        os.truncate(file, os.stat(file).st_size * remaining // 100)  # noqa: PTH116
    ways = [lambda: source.read(29), lambda: source.take([1, 28]), lambda: list(source.images.stream())]
    ways += [lambda: source.metadata(3)]
    ways += [lambda: datasets[0][28], lambda: datasets[1].__getitems__([3, 29])] if datasets else []
    for way in ways:
        try:
            way()
        except OMEArrowDSError as error:
            assert path in str(error), error  # noqa: PT017
    print("done")
