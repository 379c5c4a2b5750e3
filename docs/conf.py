"""Configuration of the Sphinx site, built by ``make docs`` into ``build/docs``.

Warnings are errors.

The source directory is the repository, so that relative links work on the site and on GitHub.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omearrow_ds.cli import main
from omearrow_ds.options import (
    OpenSettings,
    OptionRecord,
    ProfileSettings,
    RecommendSettings,
    SampleSettings,
    WriteSettings,
    flag_of,
    options_of,
    rule_of,
)

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "results" / "report.html"  # Written by the last `make bench` in this checkout.
COMMAND_LINE = ROOT / "docs" / "reference" / "command-line.md"  # Generated, not committed.
OPTIONS = COMMAND_LINE.with_name("options.md")  # Generated, not committed.
_CODE_WORD = re.compile(
    r"--[a-z][a-z-]+|\S*[{_]\S*\b|~/\S+\b"
)  # Flags, names and patterns in help texts.

project = "omearrow-ds"
author = "omearrow-ds developers"
release = metadata.version(project)
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"),
    "docs/**",
]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "results",
    "src",
    "tests/data",
    "tests/adversarial/golden",
]

autodoc_typehints = "none"  # Docstrings state types with units and shapes.
napoleon_use_ivar = True
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"  # Full names do not fit next to the page.
default_role = "code"
suppress_warnings = ["ref.python"]  # A type such as "path" can be the name of several attributes.
myst_heading_anchors = 4
nb_execution_mode = "off"  # A test executes the notebook and compares its outputs.

html_theme = "pydata_sphinx_theme"
html_title = project
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_sidebars = {"**": ["globaltoc"]}
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
    "footer_end": [],
}
html_extra_path = [str(REPORT)] if REPORT.is_file() else []


def setup(app: Sphinx) -> None:
    """Write the generated page, and redirect the site's root to the first page."""
    if REPORT.is_file():
        app.tags.add("report")
    COMMAND_LINE.write_text(command_line_page(), encoding="utf-8")
    OPTIONS.write_text(options_page(), encoding="utf-8")
    app.connect("build-finished", _redirect_root)


def command_line_page() -> str:
    """Return a Markdown page with the help text of each command."""
    lines = [
        "# Command line",
        "",
        "Help of each command, as `omearrow-ds COMMAND --help` prints it.",
        "",
    ]
    context = click.Context(main, info_name=project, terminal_width=88)
    lines += ["```text", main.get_help(context), "```"]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        nested = click.Context(command, info_name=name, parent=context, terminal_width=88)
        lines += ["", f"## {name}", "", "```text", command.get_help(nested), "```"]
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """Return a Markdown page with a table of each record of options."""
    tables = {"Opening": OpenSettings, "Samples": SampleSettings, "Writing": WriteSettings}
    tables |= {"Profiling": ProfileSettings, "Recommendation": RecommendSettings}
    sections = [f"## {title}\n\n{describe_options(record)}" for title, record in tables.items()]
    intro = "Options that functions, datasets and commands share, with the flag of commands."
    return "\n\n".join(["# Options", intro, *sections]) + "\n"


def describe_options(record: type[OptionRecord]) -> str:
    """Return a Markdown table of options for the reference page."""
    lines = ["| option, flag | default | allowed | meaning |", "|---|---|---|---|"]
    for declared in options_of(record):
        rule, flag = rule_of(declared), flag_of(declared)
        bound = "above" if rule.kind == "number" else "from"
        least = "" if rule.minimum is None else f"{bound} {rule.minimum}"
        allowed = ", ".join(f"`{choice!r}`" for choice in rule.choices) or least
        meaning = _CODE_WORD.sub(r"`\g<0>`", rule.help.replace("|", "\\|"))
        cells = [
            f"`{declared.name}=`" + (f"<br>`{flag}`" if flag else ""),
            f"`{declared.default!r}`",
            allowed,
            meaning,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _redirect_root(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        redirect = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        page = f"<!DOCTYPE html><title>{project}</title>{redirect}"
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")
