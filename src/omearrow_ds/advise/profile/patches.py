"""`Patches`: attributes replaced for the time of a measurement, and put back whatever happens."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

_ABSENT = object()


class Patches:
    """A context at whose end every attribute is again what it was, the latest change undone first."""

    def __init__(self) -> None:
        self._changed: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module, a class or an instance."""
        self._changed.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put back all that was replaced."""
        while self._changed:
            owner, name, before = self._changed.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()
