"""Plans of cases: stores, datasets, loaders and acts, drawn from the seed of the run and the number of the case."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from omearrow_ds import FORMATS
from omearrow_ds.axes import AXES
from omearrow_ds.codec import schema
from omearrow_ds.storage.formats import get_format

Kind = tuple[tuple[int, ...], str]
# Acts of a program on its dataset and loader, in sequence.
ACTS = (
    "epoch",
    "epoch",
    "leave",
    "resume",
    "index",
    "pickle",
    "take",
    "scan",
    "two epochs",
    "replace",
    "replace during",
)
_HUGE_SHARE = 0.015  # Share of programs with batches over 32 MiB, whose memory is reused.
TRANSFORMS = (None, None, "flip", "scaled", "noisy")
TARGETS = (None, "label", "features", "row")


@dataclass(frozen=True)
class Collection:
    """Images to store: shape and dtype of each, their first number, and whether there are columns."""

    kinds: tuple[Kind, ...]
    first_number: int
    described: bool


@dataclass(frozen=True)
class Store:
    """How a collection is stored; ``through`` is the format that it is converted from, or None."""

    format: str
    encoding: str
    compression: str
    rows_per_group: int | None
    through: str | None
    images: Collection
    replacement: Collection


@dataclass(frozen=True)
class View:
    """Arguments of the dataset."""

    axes: str
    select: dict[str, Any]
    crop_size: tuple[int, int] | None
    normalize: bool
    transform: str | None
    target: str | None
    preload: bool | str
    cache_bytes: int
    cache_dir: bool
    as_numpy: bool


@dataclass(frozen=True)
class Loading:
    """Arguments of the loaders."""

    batch_size: int | None
    workers: tuple[int | str, ...]
    shuffle: bool
    drop_last: bool
    seed: int
    torchs_own: bool
    listed: bool


@dataclass(frozen=True)
class Program:
    """One store, the dataset and loader on it, and the acts."""

    store: Store
    view: View
    loading: Loading
    acts: tuple[str, ...]
    foreign: bool
    seed: int

    @property
    def name(self) -> str:
        """Format and encoding."""
        return self.store.format if self.store.encoding == "bytes" else f"{self.store.format} ({self.store.encoding})"


@dataclass(frozen=True)
class Case:
    """Programs that take turns; ``small_too``: memory of batches of any size is reused, not only of large ones."""

    seed: int
    number: int
    programs: tuple[Program, ...]
    small_too: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the case as plain values, with each run of equal images written once."""
        values = asdict(self)
        for program in values["programs"]:
            for images in (program["store"]["images"], program["store"]["replacement"]):
                images["kinds"] = _kinds_in_short(images["kinds"])
        return values


def draw(seed: int, number: int, *, formats: tuple[str, ...] = ()) -> Case:
    """Return case ``number`` of a run, which depends only on it and the seed."""
    rng = random.Random(f"omearrow-ds soak {seed} {number}")
    names = formats or tuple(fmt.name for fmt in FORMATS if not fmt.missing_backend)
    count = rng.choice((1, 1, 2, 3))
    programs = tuple(_program(rng, names) for _ in range(count))
    return Case(seed, number, programs, rng.random() < 0.6)


def _program(rng: random.Random, names: tuple[str, ...]) -> Program:
    store = _store(rng, names)
    huge = rng.random() < _HUGE_SHARE
    if huge:
        store = _of_huge_batches(rng, store)
    view = _view(rng, store)
    loading = _loading(rng, store, view)
    if huge or rng.random() < 0.35:  # Such programs get the reused memory directly.
        view = replace(view, transform=None, as_numpy=False)
        loading = replace(loading, batch_size=rng.choice((3, 4, 8)), workers=(0, loading.workers[1]))
    if huge:
        view = replace(view, axes="CYX", select={"T": 0, "Z": 0}, crop_size=None, normalize=True)
        loading = replace(loading, batch_size=rng.choice((11, 16)))
    acts = tuple(rng.choice(ACTS) for _ in range(rng.randint(1, 4)))
    return Program(store, view, loading, acts, rng.random() < 0.2, rng.randrange(2**31))


def _store(rng: random.Random, names: tuple[str, ...]) -> Store:
    fmt = get_format(rng.choice(names))
    encoding = rng.choice(schema.ENCODINGS) if fmt.kind == "table" else "bytes"
    compression = rng.choice((fmt.writer.compressions[0], rng.choice(fmt.writer.compressions)))
    rows_per_group = rng.choice((None, 1, 3, 16)) if fmt.writer.has_row_groups else None
    through = rng.choice(names) if rng.random() < 0.2 else None
    images = _collection(rng, encoding)
    other = rng.random() < 0.5
    replacement = _collection(rng, encoding) if other else Collection(images.kinds, 10_007, images.described)
    return Store(fmt.name, encoding, compression, rows_per_group, through, images, replacement)


def _collection(rng: random.Random, encoding: str) -> Collection:
    dtypes = [dtype.name for dtype in (schema.LIST_DTYPES if encoding == "list" else schema.DTYPES)]
    large = rng.random() < 0.06

    def kind() -> Kind:
        longest = 520 if large else rng.choice((6, 24, 48))
        sides = (rng.randint(longest // 2, longest), rng.randint(longest // 2, longest))
        shape = (rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 4)), *sides)
        return shape, rng.choice(dtypes)

    count = rng.choice((1, 2, 9, 12) if large else (1, 2, 5, 17, 33, 70))
    alike = rng.random() < 0.65
    kinds = (kind(),) * count if alike else tuple(kind() for _ in range(count))
    return Collection(kinds, rng.randrange(1000), rng.random() < 0.7)


def _of_huge_batches(rng: random.Random, store: Store) -> Store:
    """Return the store with images of which 11 fill more than 32 MiB as float32."""
    shape = (1, 3, 1, rng.randint(516, 530), rng.randint(516, 530))
    kinds = ((shape, rng.choice(("uint16", "uint8"))),) * 36
    images = Collection(kinds, rng.randrange(1000), store.images.described)
    return replace(store, images=images, replacement=replace(images, first_number=10_007))


def _view(rng: random.Random, store: Store) -> View:
    least = [min(shape[axis_index] for shape, _ in _all_kinds(store)) for axis_index in range(len(AXES))]
    sizes = dict(zip(AXES, least, strict=True))
    axes = rng.choice(("TCZYX", "CYX", "CYX", "CZYX", "YX", "YXC", "TYX"))
    select = {axis: rng.randrange(sizes[axis]) for axis in AXES if axis not in axes}
    for axis in axes:
        if rng.random() < 0.2:
            select[axis] = _pick(rng, sizes[axis])
    crop_size = None
    if rng.random() < 0.4:
        left = {axis: _left(select.get(axis, slice(None)), sizes[axis]) for axis in "YX"}
        crop_size = (rng.randint(1, left["Y"]), rng.randint(1, left["X"]))
    described = store.images.described and store.replacement.described
    preload = rng.choice((True, True, False, False, "auto"))
    return View(
        axes=axes,
        select=select,
        crop_size=crop_size,
        normalize=rng.random() < 0.6,
        transform=rng.choice(TRANSFORMS),
        target=rng.choice(TARGETS) if described else None,
        preload=preload,
        cache_bytes=rng.choice((0, 10_000, 10**7)) if preload is False else 0,
        cache_dir=preload is True and rng.random() < 0.3,
        as_numpy=rng.random() < 0.2,
    )


def _pick(rng: random.Random, size: int) -> Any:
    """Return a selection that is valid, and equally long, for axes of ``size`` or more."""
    if rng.random() < 0.5:
        start = rng.randrange(size)
        return slice(start, rng.randint(start + 1, size), rng.choice((1, 1, 2)))
    return [rng.randrange(size) for _ in range(rng.randint(1, 3))]


def _left(pick: Any, size: int) -> int:
    if isinstance(pick, slice):
        return len(range(size)[pick])
    return len(pick) if isinstance(pick, list) else 1 if isinstance(pick, int) else size


def _sample_kind(kind: Kind, view: View) -> tuple[Any, ...]:
    """Return the dtype and sizes that samples must share to be stacked."""
    shape, dtype = kind
    sizes = {axis: _left(view.select.get(axis, slice(None)), size) for axis, size in zip(AXES, shape, strict=True)}
    if view.crop_size is not None:
        sizes |= dict(zip("YX", view.crop_size, strict=True))
    return "float32" if view.normalize else dtype, *(sizes[axis] for axis in view.axes)


def _loading(rng: random.Random, store: Store, view: View) -> Loading:
    own = rng.random() < 0.15
    some = (0,) if own else (0, 0, 0, 1, 2, "auto")
    listed = len({_sample_kind(kind, view) for kind in _all_kinds(store)}) > 1 or rng.random() < 0.1
    return Loading(
        batch_size=rng.choice((1, 3, 4, 8, 16, 16, 31, None)),
        workers=(rng.choice(some), rng.choice(some)),
        shuffle=rng.random() < 0.6,
        drop_last=rng.random() < 0.2,
        seed=rng.randrange(2**31),
        torchs_own=own,
        listed=listed,
    )


def _all_kinds(store: Store) -> tuple[Kind, ...]:
    return store.images.kinds + store.replacement.kinds


def _kinds_in_short(kinds: tuple[Kind, ...]) -> list[str]:
    runs: list[tuple[Kind, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return [f"{count} x {'x'.join(map(str, shape))} {dtype}" for (shape, dtype), count in runs]
