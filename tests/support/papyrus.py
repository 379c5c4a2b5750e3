"""A format of another package: one file, installed as Python installs packages, without changes to this project."""

from __future__ import annotations

from pathlib import Path

PAPYRUS = """
from functools import partial

from omearrow_ds import Format, WriteLimits
from omearrow_ds.storage.formats import arrow
from omearrow_ds.storage.formats._table import TableImages

LZ4 = WriteLimits(compressions=("none", "lz4"))
FORMAT = Format("papyrus", "Papyrus", "table", ".papyrus", "pyarrow", writer=LZ4, implementation=__name__)
ERRORS = arrow.ERRORS
write_collection = arrow.write_collection


class PapyrusTable(arrow.ArrowTable):
    pass


open_collection = partial(TableImages, "papyrus", PapyrusTable, ERRORS)
"""


def install_papyrus(site: Path, module: str = PAPYRUS, leads_to: str = "papyrus:FORMAT") -> None:
    """Install the format, with its entry point, in a folder on the module path."""
    (site / "papyrus.py").write_text(module)
    metadata = site / "papyrus_format-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: papyrus-format\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[omearrow_ds.formats]\npapyrus = {leads_to}\n")
