"""Check of raised errors: class, option or path, stated facts and remedy, but not the wording."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# An argument with its value, ``level=1``, or a flag of a command, ``--level 1``.
_OPTION = re.compile(r"(?<![\w/.'\"])([a-z][a-z_0-9]*)=(?!=)|(?<![\w/.-])(--[a-z][a-z-]*[a-z])(?![\w-])")
_VERBS = (
    "add aggregate ask bring call cast check choose close combine convert copy correct create crop cut decode "
    "delete divide download drop end export fetch fill free give install join keep leave let list look lower make "
    "measure merge mount move name open order overwrite pad pass pick pin pip put raise read remove rename repair "
    "repeat replace resize restore rewrite run save see select send set shorten sort split start state stop store "
    "take try tune turn unpack update upgrade use wait write"
)
_SUBJECT = re.compile(r"^[^;]*?: ")
# An instruction follows punctuation. Not one: `TypeError: list indices`, `, name of`, `bytes, list`.
_REMEDY = re.compile(rf"(?:; |(?<!rror): |[,.(] )(?:(?:or|then|either) )?(?:{'|'.join(_VERBS.split())})(?= (?!of\b)\S)")


@contextmanager
def raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    option: str | None = None,
    path: str | os.PathLike[str] | None = None,
    remedy: bool = True,
    *,
    mentions: object | Iterable[object] = (),
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of a class that names an option or a path, and a remedy.

    Parameters
    ----------
    error
        Expected class, or several.
    option
        Argument or flag at fault, as users write it: ``level``, ``--level``. The message names it before any other one.
    path
        File or collection at fault: a whole path, or its last components. Part of a name does not match.
    remedy
        Whether the message must state an action that the user can take. False leaves this unchecked.
    mentions
        Names, numbers or values that the message must contain as whole words.

    Yields
    ------
    pytest.ExceptionInfo
        The error, for further checks.
    """
    with pytest.raises(error) as caught:
        yield caught
    name, message = type(caught.value).__name__, str(caught.value)
    del caught  # The traceback holds this frame: the cycle would keep open files and workers until a collection.
    problems = find_problems(message, option, path, remedy, mentions=mentions)
    if problems:
        pytest.fail(f"{name} {'; '.join(problems)}\nmessage: {message}")


@contextmanager
def warns(
    category: type[Warning],
    option: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    mentions: object | Iterable[object] = (),
) -> Iterator[pytest.WarningsRecorder]:
    """Expect a warning of a category that names an option or a path, and facts.

    The parameters are those of `raises`. Other warnings of this category are issued again, as `pytest.warns` does.

    Yields
    ------
    pytest.WarningsRecorder
        All warnings, for further checks.
    """
    with pytest.warns(category) as caught:
        yield caught
    problems = {
        warning: find_problems(str(warning.message), option, path, remedy=False, mentions=mentions)
        for warning in caught
        if issubclass(warning.category, category)
    }
    if all(problems.values()):
        listed = "".join(f"\n{'; '.join(lacks)}\nmessage: {warning.message}" for warning, lacks in problems.items())
        pytest.fail(f"{category.__name__}{listed}")
    for warning, lacks in problems.items():
        if lacks:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def find_problems(
    message: str,
    option: str | None = None,
    path: str | os.PathLike[str] | None = None,
    remedy: bool = True,
    *,
    mentions: object | Iterable[object] = (),
) -> list[str]:
    """Return the defects of a message, in words; the parameters are those of `raises`."""
    problems = []
    if option is not None and not names_option(message, option):
        problems.append(f"does not name the option {option!r} first")
    if path is not None and not names_path(message, path):
        problems.append(f"does not name the path {os.fspath(path)!r}")
    if remedy and not states_remedy(message):
        problems.append("states no remedy")
    facts = (mentions,) if isinstance(mentions, str | os.PathLike) or not isinstance(mentions, Iterable) else mentions
    problems += [f"does not mention {str(fact)!r}" for fact in facts if not _contains(message, str(fact))]
    return problems


def names_option(message: str, option: str) -> bool:
    """Return whether a message names this option before any other one."""
    first = _OPTION.search(message)
    if offending_option(message) == option:
        return True
    beginning = message if first is None else message[: first.start()]
    return re.search(rf"(?<![\w/.-]){re.escape(option)}(?![\w/.-])", beginning.partition(";")[0]) is not None


def names_path(message: str, path: str | os.PathLike[str]) -> bool:
    """Return whether a message contains this path, a path that ends with it, or a file in this collection.

    A folder without a suffix does not match the paths of files in it, so the folder of a test matches no message about
    one of its files.
    """
    inside = "" if Path(path).suffix else "|/"
    return re.search(rf"(?<![\w.-]){re.escape(os.fspath(path))}(?![\w-]|\.\w{inside})", message) is not None


def states_remedy(message: str) -> bool:
    """Return whether a message contains an instruction to the user."""
    return _REMEDY.search(_SUBJECT.sub("", message, count=1)) is not None


def offending_option(message: str) -> str | None:
    """Return the option that a message names first, or None."""
    first = _OPTION.search(message)
    return None if first is None else first[1] or first[2]


def _contains(message: str, fact: str) -> bool:
    start, end = (r"(?<!\w)" if fact[:1].isalnum() else ""), (r"(?!\w)" if fact[-1:].isalnum() else "")
    return re.search(start + re.escape(fact) + end, message) is not None
