"""Style check of prose and names: ``python -m tests.support.style``, which `make lint` runs.

A section is a function, the rest of a class or module, or a part of a document below one heading. Each must be free of
the phrases and names below. Sections that are older than this rule are listed in ``tests/style_exceptions.txt`` by a
hash of their text, so a section is checked as soon as it is edited. The list only shrinks:

- ``--prune`` removes sections that no longer exist or were edited;
- ``--renamed OLD NEW`` keeps sections in which only this name changed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EXCEPTIONS = ROOT / "tests" / "style_exceptions.txt"
CHECKED = ("src", "benchmarks", "tests", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
GENERATED = ("docs/reference/command-line.md", "docs/reference/options.md")  # By `make docs`.
PHRASES = {
    "a noun instead of a what-clause": r"what (?:is|are|it|they|was|were|has|have|makes|gives|says|tells|stands|lies"
    r"|one|a|an|the|goes|comes|came)",
    "a noun instead of whatever, whoever or whichever": r"wh(?:at|o|ich)ever",
    "no sentence that starts with Of": r"(?<![^.;:\s])(?-i:Of) (?:a|an|the|what|those|these|such|its|their|several|each"
    r"|one|two|parts|files|tables|images|others|it)",
    "'is not a'": r"(?:is|are|was|were) no(?:ne)?(?! longer)",
    "'from' or 'of' instead of 'as of'": r"as of",
    "'next to' or 'in addition to' instead of 'beside'": r"beside",
    "'report' or 'state' instead of 'tell'": r"(?:told|tells?|telling)",
    "a verb of fact instead of 'stand' or 'lie'": r"(?:stands?|stood|lies|lay)",
    "a current word instead of 'anew', 'lest', 'mend'": r"(?:anew|lest|mend(?:s|ed|ing)?|hereafter|thereof)",
    "'release' or 'close' instead of 'let go'": r"let(?:s|ting)? go",
    "'pass' or 'return' instead of 'hand' or 'lend'": r"(?:handed|hands? (?:over|out|on)|handing|lent|lends?)",
    "'per'": r"(?:one|two|images|files|row|rows|samples|bytes|times|file|part|image) an? (?:image|images|second|file"
    r"|part|row|rank|host|worker|channel|pixel|object|batch|format|track|core)",
    "'only' instead of 'alone'": r"alone",
    "a number instead of 'so many' or 'as many'": r"(?:so|as) many",
    "'package' or 'layer' instead of parts of a house": r"(?:houses?|wings?|rooms?|doors?|arrows between)",
    "a direct verb instead of having it done": r"(?:have|had|let) (?:a|an|the|each|all|it|its|them|one|both|no|what)\b"
    r"[^.]{0,40}\b(?:be|come|go|take|tell|say|know)",
}
NAMES = frozenset(
    [
        *(
            "found",
            "said",
            "told",
            "given",
            "held",
            "kept",
            "seen",
            "shown",
            "made",
            "there",
            "here",
            "where",
            "of",
            "at",
        ),
        *("what", "wanted", "place", "places", "each", "came", "asked", "met", "meant", "lent"),
    ]
)
_PHRASES = {advice: re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE) for advice, phrase in PHRASES.items()}
_CODE = re.compile(r"```.*?```|^\s*>>>.*$|^\s*\.\.\. .*$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_STRING_OR_COMMENT = re.compile(  # In a fifth of the time of tokenize.
    r"""(?P<quote>\"{3}|'{3})(?:\\.|.)*?(?P=quote)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?P<comment>#[^\n]*)""",
    re.DOTALL,
)
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_MESSAGE_NAMES = {"msg", "message", "text", "hint", "reason", "remedy"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NOT_PROSE = ("#!", "# noqa", "# type:")


class Section(NamedTuple):
    """A function, a class, a module or a section of a document."""

    name: str
    line: int
    source: str
    prose: str
    bound_names: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """Return the rejected phrases and names, each with advice."""
        prose = _CODE.sub(" ", self.prose)
        phrases = [
            f"{match[0]!r}: use {advice}" for advice, phrase in _PHRASES.items() for match in phrase.finditer(prose)
        ]
        names = sorted({name for name in self.bound_names if name.lstrip("_") in NAMES})
        return phrases + [f"name {name!r}: say which value it is" for name in names]

    def digest(self, renamed: tuple[str, str] | None = None) -> str:
        """Return a hash of the text; ``renamed`` are an old name, and the new one which it is to replace."""
        text = f"{self.name}\n{self.source}"
        text = text if renamed is None else text.replace(renamed[1], renamed[0])
        return blake2b(text.encode(), digest_size=4).hexdigest()


def find_sections(path: Path) -> Iterator[Section]:
    """Yield the sections of a Python file, of a Markdown document, or of the Markdown cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return _of_python(text) if path.suffix == ".py" else _of_document(text)


def _of_document(text: str) -> Iterator[Section]:
    headings = [(0, ""), *((match.start(), match[1]) for match in _HEADING.finditer(text))]
    stops = [start for start, _ in headings[1:]] + [len(text)]
    for (start, heading), stop in zip(headings, stops, strict=True):
        section = text[start:stop]
        yield Section(heading, text.count("\n", 0, start) + 1, section, section)


def _of_python(text: str) -> Iterator[Section]:
    lines = text.splitlines(keepends=True)
    comments = {
        text.count("\n", 0, match.start()) + 1: match["comment"].lstrip("# ")
        for match in _STRING_OR_COMMENT.finditer(text)
        if match["comment"] and not match["comment"].startswith(_NOT_PROSE)
    }
    tree = ast.parse(text)
    yield from _of_node(tree, "", range(1, len(lines) + 1), lines, comments)


def _of_node(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    span: range,
    lines: list[str],
    comments: Mapping[int, str],
) -> Iterator[Section]:
    inner = (
        []
        if isinstance(node, _FUNCTIONS)
        else [statement for statement in node.body if isinstance(statement, (*_FUNCTIONS, ast.ClassDef))]
    )
    own_lines = set(span)
    for child in inner:
        first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
        child_span = range(first, (child.end_lineno or first) + 1)
        own_lines -= set(child_span)
        yield from _of_node(child, f"{name}.{child.name}".lstrip("."), child_span, lines, comments)
    own_nodes = _walk_without(node, set(inner))
    documented = (child for child in own_nodes if isinstance(child, (ast.Module, ast.ClassDef, *_FUNCTIONS)))
    docstrings = [ast.get_docstring(child) or "" for child in documented]
    own_comments = [comments[line] for line in sorted(own_lines & set(comments))]
    prose = "\n\n".join([*docstrings, *own_comments, *_messages(own_nodes)])
    source = "".join(lines[line - 1] for line in sorted(own_lines)).strip()
    yield Section(name or "module", span.start, source, prose, tuple(_bound_names(own_nodes)))


def _walk_without(node: ast.AST, left_out: Collection[ast.AST]) -> list[ast.AST]:
    nodes = [node]
    for parent in nodes:
        nodes += [child for child in ast.iter_child_nodes(parent) if child not in left_out]
    return nodes


def _messages(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield texts that users read: of errors, warnings and help."""
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _texts(node.exc)
        elif isinstance(node, ast.Assign):
            names = {target.id.lstrip("_") for target in node.targets if isinstance(target, ast.Name)}
            yield from _texts(node.value) if names & _MESSAGE_NAMES else ()
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            helps = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
            for argument in [*helps, *(node.args[:1] if called == "warn" else [])]:
                yield from _texts(argument)


def _texts(node: ast.AST) -> Iterator[str]:
    constants = (child.value for child in ast.walk(node) if isinstance(child, ast.Constant))
    return (value for value in constants if isinstance(value, str))


def _bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arguments):
            yield from (argument.arg for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs))


def checked_files() -> list[Path]:
    """Return the files that are checked."""
    roots = [ROOT / name for name in CHECKED]
    files = [file for path in roots for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    return [
        file
        for file in files
        if file.suffix in {".py", ".md", ".ipynb"}
        and file.relative_to(ROOT).as_posix() not in GENERATED
        and not any(folder.startswith("_") for folder in file.relative_to(ROOT).parts[:-1])
    ]


def read_exceptions() -> dict[str, set[str]]:
    """Return the hashes of sections that are not checked, by file."""
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    return {path: set(digests) for path, *digests in map(str.split, lines)}


def write_exceptions(exceptions: Mapping[str, Iterable[str]]) -> None:
    """Write the hashes of sections that are not checked, a line per file."""
    lines = [" ".join([path, *sorted(digests)]) for path, digests in sorted(exceptions.items()) if digests]
    EXCEPTIONS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Print the faults of checked sections; return 1 if there are any, or if the exceptions are to be pruned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--prune", action="store_true", help="remove exceptions for sections that are gone or were edited"
    )
    parser.add_argument("--renamed", nargs=2, metavar=("OLD", "NEW"), help="keep exceptions after a rename")
    options = parser.parse_args(arguments)
    exceptions, used, num_faults = read_exceptions(), {}, 0
    for file in checked_files():
        path = file.relative_to(ROOT).as_posix()
        allowed = exceptions.get(path, set())
        used[path] = set[str]()
        for section in find_sections(file):
            if section.digest() in allowed or (options.renamed and section.digest(tuple(options.renamed)) in allowed):
                used[path].add(section.digest())
                continue
            for fault in section.faults():
                num_faults += 1
                print(f"{path}:{section.line}: {section.name}: {fault}")
    num_stale = sum(len(digests - used.get(path, set())) for path, digests in exceptions.items())
    if options.prune or options.renamed:
        write_exceptions(used)
        return int(num_faults > 0)
    if num_stale:
        remedy = "run python -m tests.support.style --prune"
        print(f"{EXCEPTIONS.name}: {num_stale} sections no longer exist or were edited; {remedy}")
    return int(num_faults + num_stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
