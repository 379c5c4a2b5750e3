"""Runs the programs of a case in turns, and compares every sample with the oracle."""

from __future__ import annotations

import io
import pickle
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader

from omearrow_ds import (
    OMEArrowDataLoader,
    OMEArrowDataset,
    OMEArrowDatasetNumpy,
    OMEArrowDSError,
    convert,
    open_images,
    write_images,
)
from omearrow_ds.dataset import shared_memory
from tests.adversarial.soak.holds import Holds, parts_of
from tests.adversarial.soak.oracle import (
    Key,
    changed,
    check_foreign,
    columns_of,
    images_of,
    key_of,
    keys_of,
    metadata_of,
)
from tests.adversarial.soak.plan import Case, Collection, Program
from tests.support.strategies import SUFFIX, same

_WORKER_TIMEOUT_S = 60
_LARGE_BYTES = 32 * 2**20


@contextmanager
def _small_too():
    """Reuse the memory of batches of any size."""
    with (
        mock.patch.object(shared_memory, "_POOLED_BYTES", 0),
        mock.patch.object(shared_memory, "_BY_VALUE_BYTES", 0),
    ):
        yield


class Scaled:
    """A transform with a state."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(image.numpy().astype(np.float64) * self.factor)


def flip(image: torch.Tensor) -> torch.Tensor:
    """Mirror the last axis."""
    return torch.from_numpy(changed(image.numpy(), "flip"))


def noisy(image: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the image and random numbers of each generator that a seed fixes."""
    return {"image": image, "noise": torch.tensor([float(torch.rand(())), random.random(), np.random.rand()])}


def drawn(batch: Any) -> list[float]:
    """Return the random numbers in a batch."""
    if isinstance(batch, dict):
        return list(batch["noise"].flatten().tolist())
    return [number for part in batch for number in drawn(part)] if isinstance(batch, list | tuple) else []


def row_target(row: dict[str, Any]) -> int:
    """Return a number computed from a row."""
    assert row["well"] == f"µ'{row['label'] % 7}"
    return int(row["label"]) * 10 + 3


def run(case: Case, folder: Path, counts: Counter[str]) -> None:
    """Run a case; ``counts`` counts checked samples per format, and acts."""
    torch.manual_seed(case.number)
    rng = random.Random(f"turns {case.seed} {case.number}")
    holds = Holds(random.Random(f"holds {case.seed} {case.number}"), counts)
    running: list[Iterator[None]] = []
    for number, program in enumerate(case.programs):
        own = folder / str(number)
        own.mkdir()
        running.append(_Running(program, own, counts, holds).steps())
    with _small_too() if case.small_too else nullcontext():
        while running:
            turn = rng.choice(running)
            if next(turn, StopIteration) is StopIteration:
                running.remove(turn)
    holds.compare_last()


class _Running:
    def __init__(self, program: Program, folder: Path, counts: Counter[str], holds: Holds) -> None:
        self.program, self.counts, self.holds = program, counts, holds
        self.store, self.view, self.loading = program.store, program.view, program.loading
        self.rng = random.Random(program.seed)
        self.path = folder / f"images{SUFFIX[self.store.format]}"
        self.cache_dir = folder / "cache"
        self.content = self.store.images
        self.keys = keys_of(self.content, self.view)
        self.left_epochs: list[Any] = []  # Abandoned epochs that stay alive to the end.

    def steps(self) -> Iterator[None]:
        """Run all acts of the program, yielding where another program may run."""
        self._write(self.content, overwrite=False)
        yield
        self._check_source()
        if self.program.foreign:
            self._count("read by another reader", check_foreign(self.program, self.path, images_of(self.content)))
        dataset = self._dataset()
        for act in self.program.acts:
            yield
            self.counts[f"act: {act}"] += 1
            if act == "replace":
                pickled = pickle.dumps(dataset)
                if self.store.format == "lance" and self.rng.random() < 0.5:
                    self._add_version(self._replacement())
                else:
                    self._write(self._replacement(), overwrite=True)
                self._unpickled_late(pickled)
                yield from self._after_replacement(dataset)
                dataset = self._dataset()
            elif act == "replace during":
                yield from self._replaced_during(dataset)
                dataset = self._dataset()
            else:
                yield from self._acts(act, dataset)

    def _acts(self, act: str, dataset: Any) -> Iterator[None]:
        simple = {"index": self._index, "take": self._check_source, "scan": self._scan}
        if act in simple:
            simple[act](*([dataset] if act == "index" else []))
            return
        steps = {"epoch": self._epoch, "leave": self._leave, "resume": self._resume, "two epochs": self._two_epochs}
        yield from self._pickled(dataset) if act == "pickle" else steps[act](dataset)

    def _write(self, content: Collection, *, overwrite: bool) -> None:
        layout: dict[str, Any] = {"encoding": self.store.encoding, "compression": self.store.compression}
        contents: dict[str, Any] = {"columns": columns_of(content), "metadata": metadata_of(content)}
        path, name = self.path, self.store.format
        if self.store.through is None:
            layout["rows_per_group"] = self.store.rows_per_group
            write_images(images_of(content), path, name, overwrite=overwrite, **layout, **contents)
            return
        between = path.with_name(f"between{SUFFIX[self.store.through]}")
        write_images(images_of(content), between, self.store.through, overwrite=overwrite, **contents)
        convert(between, path, name, overwrite=overwrite, **layout)

    def _add_version(self, content: Collection) -> None:
        """Overwrite a Lance dataset with another collection in place, as Lance does."""
        import lance

        other = self.path.with_name("version.lance")
        layout: dict[str, Any] = {"encoding": self.store.encoding, "compression": self.store.compression}
        contents: dict[str, Any] = {"columns": columns_of(content), "metadata": metadata_of(content)}
        write_images(images_of(content), other, "lance", overwrite=True, **layout, **contents)
        lance.write_dataset(lance.dataset(str(other)).to_table(), str(self.path), mode="overwrite")
        self.counts["versions added in place"] += 1

    def _replacement(self) -> Collection:
        return self.store.images if self.content == self.store.replacement else self.store.replacement

    def _dataset(self) -> Any:
        view = self.view
        options: dict[str, Any] = {
            "preload": view.preload,
            "axes": view.axes,
            "select": view.select or None,
            "crop_size": view.crop_size,
            "normalize": view.normalize,
            "target": row_target if view.target == "row" else view.target,
            "cache_bytes": view.cache_bytes,
            "cache_dir": self.cache_dir if view.cache_dir else None,
        }
        if view.as_numpy:
            return OMEArrowDatasetNumpy(self.path, self.store.format, **options)
        transform = {None: None, "flip": flip, "scaled": Scaled(0.5), "noisy": noisy}[view.transform]
        return OMEArrowDataset(self.path, self.store.format, transform=transform, **options)

    def _loader(self, dataset: Any, turn: int = 0) -> Any:
        loading = self.loading
        generator = torch.Generator().manual_seed(loading.seed) if loading.shuffle else None
        options: dict[str, Any] = {"shuffle": loading.shuffle, "generator": generator}
        if loading.batch_size is not None:
            options["drop_last"] = loading.drop_last
        if loading.listed and loading.batch_size is not None:
            options["collate_fn"] = list
        workers = loading.workers[turn]
        if workers not in (0, "auto"):
            options["timeout"] = _WORKER_TIMEOUT_S
        make = DataLoader if loading.torchs_own else OMEArrowDataLoader
        return make(dataset, loading.batch_size, num_workers=workers, **options)

    # Acts.

    def _epoch(self, dataset: Any) -> Iterator[None]:
        loader = self._loader(dataset, self.rng.randrange(2))
        for _ in range(self.rng.choice((1, 1, 2))):
            keys: list[Key] = []
            for batch in loader:
                keys += self._keys_in(batch)
                yield
            self._check_epoch(keys)

    def _leave(self, dataset: Any) -> Iterator[None]:
        loader = self._loader(dataset)
        batches = iter(loader)
        keys: list[Key] = []
        for _ in range(self.rng.randint(0, len(loader))):
            keys += self._keys_in(next(batches))
            yield
        self._check_among(keys)
        if self.rng.random() < 0.5:
            self.left_epochs.append(batches)

    def _two_epochs(self, dataset: Any) -> Iterator[None]:
        """Interleave two iterators over one loader."""
        loader = self._loader(dataset)
        keys_of_epochs: tuple[list[Key], list[Key]] = ([], [])
        both = [(iter(loader), keys_of_epochs[0]), (iter(loader), keys_of_epochs[1])]
        while both:
            batches, keys = turn = self.rng.choice(both)
            batch = next(batches, None)
            if batch is None:
                both.remove(turn)
            else:
                keys += self._keys_in(batch)
            yield
        for keys in keys_of_epochs:
            self._check_epoch(keys)

    def _resume(self, dataset: Any) -> Iterator[None]:
        if self.loading.torchs_own:
            return
        loader = self._loader(dataset)
        batches = iter(loader)
        keys_before: list[Key] = []
        for _ in range(self.rng.randint(0, max(0, len(loader) - 1))):
            keys_before += self._keys_in(next(batches))
            yield
        saved = io.BytesIO()
        torch.save(loader.state_dict(), saved)
        saved.seek(0)
        again = self._loader(dataset, 1)
        again.load_state_dict(torch.load(saved, weights_only=True))
        resumed, noise, noise_left = [], [], []
        for batch in again:
            noise += drawn(batch)
            resumed += self._keys_in(batch)
            yield
        left = []
        for batch in batches:
            noise_left += drawn(batch)
            left += self._keys_in(batch)
        assert noise == noise_left, "a resumed epoch draws other numbers"
        assert resumed == left, "a resumed epoch has other samples than were left, or in another order"
        self._check_epoch(keys_before + left)

    def _index(self, dataset: Any) -> None:
        count = len(self.keys)
        assert len(dataset) == count
        indices = [self.rng.randrange(-count, count) for _ in range(12)]
        keys = [self._use(dataset[index]) for index in indices]
        samples = dataset.__getitems__(indices)
        keys += [self._key_of(sample) for sample in samples]
        self.holds.use(samples, f"a list of {self.program.name}")
        assert keys == [self.keys[index] for index in indices] * 2, "samples by index differ"
        self._checked(len(keys))

    def _pickled(self, dataset: Any) -> Iterator[None]:
        copy = pickle.loads(pickle.dumps(dataset))
        yield
        self._index(copy)

    def _check_source(self) -> None:
        images = images_of(self.content)
        with open_images(self.path, self.store.format) as source:
            assert len(source) == len(images)
            assert [tuple(shape) for shape in source.shapes.tolist()] == [image.shape for image in images]
            indices = [self.rng.randrange(len(images)) for _ in range(10)]
            taken, read = source.take(indices), source.read(indices[0])
            for index, pixels in zip(indices, taken, strict=True):
                assert same(pixels, images[index]), f"image {index} of a take differs"
            assert same(read, images[indices[0]])
            self.holds.use([*taken, read], f"images of {self.program.name}")
            self._check_described(source, indices[0])
        self._checked(len(indices) + 1)

    def _check_described(self, source: Any, index: int) -> None:
        columns = columns_of(self.content)
        assert source.columns.equals(columns) if columns is not None else source.columns.num_columns == 0
        for name, value in (metadata_of(self.content)[index] or {}).items():
            assert source.metadata(index)[name] == value, f"metadata {name} of image {index} differs"

    def _scan(self) -> None:
        images = images_of(self.content)
        with open_images(self.path, self.store.format) as source:
            results = [image for _, part in source.images.stream() for image in part]
            assert len(results) == len(images)
            assert all(map(same, results, images)), "an image of a scan differs"
            self.holds.use(results, f"a scan of {self.program.name}")
        self._checked(len(images))

    # Replaced by a writer. Open sources return the old images, or raise an error of the package.

    def _unpickled_late(self, pickled: bytes) -> None:
        try:
            late = pickle.loads(pickled)
            keys = [self._use(late[index]) for index in range(len(late))]
        except OMEArrowDSError:
            self.counts["refused after a replacement"] += 1
        else:
            assert keys == self.keys, "what was unpickled late is not the collection that was opened"
            self._checked(len(keys))

    def _after_replacement(self, dataset: Any) -> Iterator[None]:
        before = Counter(self.keys)
        try:
            for batch in self._loader(dataset):
                counted = Counter(self._keys_in(batch))
                assert not counted - before, "a sample is not of the collection that was opened"
                self._checked(counted.total())
                yield
        except OMEArrowDSError:
            assert not dataset.preloaded, "what is preloaded needs no file"
            self.counts["refused after a replacement"] += 1
        self._now(self._replacement())

    def _replaced_during(self, dataset: Any) -> Iterator[None]:
        """Open repeatedly while another thread writes: the result must be the old or the new collection, complete."""
        new = self._replacement()
        either = {tuple(self.keys), tuple(keys_of(new, self.view))}
        failures: list[BaseException] = []

        def write() -> None:
            try:
                self._write(new, overwrite=True)
            except BaseException as error:  # noqa: BLE001  # told by the thread that checks
                failures.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            while writer.is_alive():
                try:
                    opened = self._dataset()
                    keys = [self._use(opened[index]) for index in range(len(opened))]
                    assert tuple(keys) in either, "neither the old nor the new collection"
                    self._checked(len(keys))
                except OMEArrowDSError:
                    self.counts["refused during a replacement"] += 1
                yield
        finally:
            writer.join()
        if failures:
            raise failures[0]
        self._now(new)
        del dataset

    def _now(self, content: Collection) -> None:
        self.content = content
        self.keys = keys_of(content, self.view)
        self._check_source()

    # Samples.

    def _check_epoch(self, keys: list[Key]) -> None:
        size, count = self.loading.batch_size, len(self.keys)
        short = size is not None and self.loading.drop_last
        assert len(keys) == (count // (size or 1) * (size or 1) if short else count), "an epoch of another length"
        self._check_among(keys)

    def _check_among(self, keys: list[Key]) -> None:
        if self.loading.shuffle:
            assert not Counter(keys) - Counter(self.keys), "a sample is wrong, or came twice"
        else:
            assert keys == self.keys[: len(keys)], "a sample is wrong, or at another place"
        self._checked(len(keys))

    def _keys_in(self, batch: Any) -> list[Key]:
        """Return the keys of a batch, and keep some of it."""
        keys = self._keys_of(batch)
        sizes = [part.nbytes for part in parts_of(batch)]
        self.counts["batches over 32 MiB"] += max(sizes, default=0) > _LARGE_BYTES
        self.holds.use(batch, f"a batch of {self.program.name}")
        return keys

    def _use(self, sample: Any) -> Key:
        """Return the key of a sample, and keep some of it."""
        key = self._key_of(sample)
        self.holds.use(sample, f"a sample of {self.program.name}")
        return key

    def _keys_of(self, batch: Any) -> list[Key]:
        if self.loading.batch_size is None:
            return [self._key_of(batch)]
        if self.loading.listed:
            return [self._key_of(sample) for sample in batch]
        images, targets = batch if self.view.target else (batch, None)
        if isinstance(images, dict):
            images = images["image"]
        known = [None] * len(images) if targets is None else list(targets)
        return [self._key(image, target) for image, target in zip(images, known, strict=True)]

    def _key_of(self, sample: Any) -> Key:
        image, target = sample if self.view.target else (sample, None)
        return self._key(image["image"] if isinstance(image, dict) else image, target)

    def _key(self, image: Any, target: Any) -> Key:
        pixels = image.numpy() if isinstance(image, torch.Tensor) else image
        if self.view.target == "features":
            target = tuple(float(value) for value in target)
        elif target is not None:
            target = int(target)
        return key_of(pixels, target)

    def _checked(self, count: int) -> None:
        self.counts[f"samples: {self.program.name}"] += count

    def _count(self, name: str, count: int) -> None:
        self.counts[name] += count
        self._checked(count)
