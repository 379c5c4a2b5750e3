"""Check of one golden collection by every reader of its format."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

from omearrow_ds import ArgumentError, ImageSource, OMEArrowDatasetNumpy, open_images
from tests.adversarial.golden.content import Array, Content
from tests.adversarial.golden.own import Case


def check(case: Case, folder: Path) -> list[str]:
    """Return the engines that read the collection in ``folder``; each must return the written content.

    Raises
    ------
    AssertionError
        If one returns other content.
    """
    path, content = folder / case.stored, case.content
    with open_images(path, **case.opening) as source:
        assert source.format.name == case.format
        _check_described(source, content, every_column=not case.opening)
        _check_pixels(source, content.images)
        engines = source.format.engines
    fitting = []
    for engine in engines:
        with (
            suppress(ArgumentError),
            open_images(path, case.format, engine=engine, **case.opening) as source,
        ):  # The collection is not laid out for this engine.
            _check_pixels(source, content.images)
            fitting.append(engine)
    for preload in (True, False):
        dataset = OMEArrowDatasetNumpy(path, preload=preload, normalize=False, axes="TCZYX", **case.opening)
        for index, image in enumerate(content.images):
            _check_same(dataset[index], image)
    return fitting


def _check_described(source: ImageSource, content: Content, *, every_column: bool) -> None:
    images = content.images
    assert len(source) == len(images)
    assert list(source.image_ids) == list(content.ids)
    assert [tuple(shape) for shape in source.shapes.tolist()] == [image.shape for image in images]
    assert list(source.dtypes) == [image.dtype for image in images]
    columns = source.columns if every_column else source.columns.select(list(content.columns))
    assert columns.schema.types == content.table.schema.types
    assert columns.to_pydict() == content.table.to_pydict()
    for index, expected in enumerate(content.metadata):
        metadata = source.metadata(index)
        assert _picked(metadata, expected) == expected


def _picked(metadata: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in expected}


def _check_pixels(source: ImageSource, images: list[Array]) -> None:
    for index, image in enumerate(images):
        _check_same(source.read(index), image)
    drawn = random.Random(0).choices(range(-len(images), len(images)), k=2 * len(images))
    for results, index in zip(source.take(drawn), drawn, strict=True):
        _check_same(results, images[index])
    for index, image in enumerate(images):
        height, width = image.shape[3:]
        y, x = drawn[0] % height, drawn[-1] % width
        part = source.read(index, (y, min(y + 9, height), x, min(x + 20, width)), channels=-1)
        _check_same(part, image[:, -1:, :, y : y + 9, x : x + 20])
    scanned = [image for _, part in source.images.stream() for image in part]
    for results, image in zip(scanned, images, strict=True):
        _check_same(results, image)


def _check_same(actual: Array, expected: Array) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()
