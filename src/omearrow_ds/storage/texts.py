"""Lazy sequence of the strings in an Arrow array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import pyarrow as pa

_AT_ONCE = 2**16  # Strings converted together when all are iterated.


class Texts(Sequence[str]):
    """Sequence of the strings in an Arrow array without nulls, equal to any sequence of the same strings."""

    def __init__(self, array: pa.StringArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Texts: ...
    def __getitem__(self, index: int | slice) -> str | Texts:
        if isinstance(index, slice):
            return Texts(self._array[index])
        text: str = self._array[index].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _AT_ONCE):
            yield from self._array.slice(first, _AT_ONCE).to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Texts):
            return bool(self._array.equals(other._array))
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # Not hashable, like a list.

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:  # noqa: A002  # Arrow's name
        """Return the strings as an Arrow array."""
        return self._array if type in (None, self._array.type) else self._array.cast(type)

    def __repr__(self) -> str:
        shown: list[Any] = self._array[:3].to_pylist()
        return f"<{len(self):,} texts: {', '.join(map(repr, shown))}{', ...' if len(self) > len(shown) else ''}>"
