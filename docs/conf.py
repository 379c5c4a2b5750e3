"""The site: the repository's Markdown where it lies, so that links hold there and here, and the docstrings.

``make docs`` builds it into ``build/docs``, with warnings as errors.
"""

from __future__ import annotations

from importlib.metadata import version as installed
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "results" / "report.html"  # of the last `make bench` here

project = "omearrow-ds"
author = "omearrow-ds developers"
release = installed(project)
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "tests/adversarial/kills.md"),
    "docs/*",
]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "results",
    "src",
    "tests/data",
    "tests/adversarial/golden",
]  # not walked through

autodoc_typehints = "none"  # the docstrings have the types, with units and shapes
napoleon_use_ivar = True  # an attribute is told of once, in its class
autodoc_member_order = "bysource"
default_role = "code"
suppress_warnings = ["ref.python"]  # a word of a type, such as path, may be the name of several attributes
myst_heading_anchors = 4
nb_execution_mode = "off"  # a test runs the notebook, and compares what is committed with what it gives

html_theme = "pydata_sphinx_theme"
html_title = project
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_sidebars = {"**": ["globaltoc"]}
html_context = {"default_mode": "auto"}  # light or dark, as the browser is
html_theme_options = {
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
    "footer_end": [],
}
html_extra_path = [str(REPORT)] if REPORT.is_file() else []


def setup(app: Sphinx) -> None:
    """Let the site begin where a browser begins."""
    if REPORT.is_file():
        app.tags.add("report")
    app.connect("build-finished", _lead_to_the_first_page)


def _lead_to_the_first_page(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        lead = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        Path(app.outdir, "index.html").write_text(f"<!DOCTYPE html><title>{project}</title>{lead}", encoding="utf-8")
