"""Size of code: tokens, and members of classes with those that they inherit."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

_LAYOUT_TOKENS = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class ClassSize(NamedTuple):
    """A class, and the names of its methods and annotated attributes."""

    file: str
    name: str
    bases: tuple[str, ...]
    own_members: frozenset[str]


def count_tokens(source: str, tree: ast.Module) -> int:
    """Return the number of tokens of a parsed module, without comments, docstrings and line breaks."""
    docstring_lines = set()
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring_lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(
        token.type not in _LAYOUT_TOKENS and not (token.type == tokenize.STRING and token.start[0] in docstring_lines)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def find_classes(trees: Mapping[str, ast.Module]) -> list[ClassSize]:
    """Return all classes of some modules."""
    return [
        ClassSize(name, node.name, tuple(map(_last_name, node.bases)), frozenset(_own_members(node)))
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def all_members(classes: list[ClassSize]) -> dict[ClassSize, frozenset[str]]:
    """Return the members of each class, with those of its bases among ``classes`` whose names are unique."""
    by_name = defaultdict(list)
    for size in classes:
        by_name[size.name].append(size)

    def members(owner: ClassSize, derived: tuple[ClassSize, ...] = ()) -> frozenset[str]:
        inherited = owner.own_members
        for base in owner.bases:
            candidates = [candidate for candidate in by_name[base] if candidate != owner and candidate not in derived]
            if len(candidates) == 1:
                inherited |= members(candidates[0], (*derived, owner))
        return inherited

    return {size: members(size) for size in classes}


def repeated_names(classes: list[ClassSize]) -> list[str]:
    """Return the names of several classes; a leading underscore does not count."""
    counts = Counter(size.name.lstrip("_") for size in classes)
    return sorted(name for name, count in counts.items() if count > 1)


def _own_members(node: ast.ClassDef) -> set[str]:
    methods = {
        statement.name for statement in node.body if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    annotated = (statement.target for statement in node.body if isinstance(statement, ast.AnnAssign))
    return methods | {target.id for target in annotated if isinstance(target, ast.Name)}


def _last_name(node: ast.expr) -> str:
    """Return ``Base`` of ``Base``, ``module.Base`` and ``Base[T]``; other expressions have none."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
