"""Code blocks of the project's Markdown, and the small data that they use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {ROOT / f"docs/reference/{name}.md" for name in ("command-line", "options")}
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted(set((ROOT / "docs").rglob("*.md")) - GENERATED)
PAGES += [ROOT / "benchmarks/README.md"]
NO_CODE = {"text", "bibtex", "{toctree}", "{eval-rst}", "{only}"}
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(?P<language>\S*)(?: not run: (?P<why>.+)| .*)?\n(?P<code>(?s:.*?))^```$", re.MULTILINE)
_ONE_WORD = re.compile(r"\s*(?:[-*] |\d+\. )?\S+")  # A line with a long link, for example.
WELLS, SITES = ("B02", "B03", "C02", "C03", "D02"), (1, 2)


class Block(NamedTuple):
    """A fenced block; ``why`` is the reason for not running it, or None; ``line`` is its first line of code."""

    section: str
    language: str
    code: str
    line: int
    why: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    code_blocks = []
    for match in _BLOCK.finditer(text):
        fences = {offset for block in _BLOCK.finditer(text) for offset in range(block.start("code"), block.end("code"))}
        above = [h[1] for h in _HEADING.finditer(text, 0, match.start("language")) if h.start() not in fences]
        line = text.count("\n", 0, match.start("code")) + 1
        code_blocks.append(Block(above[-1] if above else "", match["language"], match["code"], line, match["why"]))
    return code_blocks


def prose(page: Path) -> list[tuple[int, str]]:
    """Return number and text of each line outside code blocks, tables and comments."""
    blank = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
    return [(n, line) for n, line in enumerate(blank.split("\n"), 1) if not line.lstrip().startswith(("|", "<!--"))]


def long_lines(page: Path, max_length: int = 100) -> list[str]:
    """Return ``number: text`` of prose lines that are too long and can be divided at a space."""
    return [f"{n}: {line}" for n, line in prose(page) if len(line) > max_length and not _ONE_WORD.fullmatch(line)]


def field(number: int, size: int = 160) -> np.ndarray[Any, Any]:
    """Return field ``number``, (C, Y, X) uint16, in which every pixel encodes its position."""
    return (np.arange(2 * size * size, dtype=np.uint32) % 60_000 + number).astype(np.uint16).reshape(2, size, size)


def wells_and_sites() -> list[tuple[str, int]]:
    return [(well, site) for well in WELLS for site in SITES]


def plate_of_files(folder: Path, masks: Path | None = None) -> None:
    """Write a plate like a Phenix microscope, with a platemap; with ``masks``, each field gets a label image."""
    import tifffile

    folder.mkdir(parents=True)
    for number, (well, site) in enumerate(wells_and_sites()):
        for channel, (name, pixels) in enumerate(zip(("DAPI", "GFP"), field(number), strict=True), 1):
            tifffile.imwrite(folder / f"{well}_01_{channel}_{site}_{name}_001.tif", pixels)
    (folder.parent / "platemap.csv").write_text(
        "Metadata_Well,treatment\n" + "".join(f"{well},{well[0]}\n" for well in WELLS), encoding="utf-8"
    )
    if masks is not None:
        write_masks(masks, [f"{well}_01_1_{site}_DAPI_001" for well, site in wells_and_sites()])


def write_masks(folder: Path, stems: list[str]) -> None:
    import tifffile

    folder.mkdir(parents=True)
    label = np.zeros((160, 160), np.uint16)
    label[50:70, 60:90], label[95:110, 85:100] = 1, 2
    for stem in stems:
        tifffile.imwrite(folder / f"{stem}_MaskNuclei.tiff", label)


def plate_of_images(path: Path, **more: Any) -> None:
    """Write the same plate as a collection, with wells, sites, treatments and labels."""
    from omearrow_ds import write_images

    wells, sites = zip(*wells_and_sites(), strict=True)
    columns = {"Metadata_Plate": ["P1"] * len(wells), "Metadata_Well": wells, "Metadata_Site": sites}
    columns |= {"treatment": [well[0] for well in wells], "label": [number % 2 for number in range(len(wells))]}
    images = [field(number) for number in range(len(wells))]
    write_images(
        images, path, axes="CYX", image_ids=[f"{w}_{s}" for w, s in wells_and_sites()], columns=columns, **more
    )


def cells(path: Path) -> None:
    """Write a table of two cells per field, with CellProfiler's names."""
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    rows = [
        (well, site, x, y, n)
        for well, site in wells_and_sites()
        for n, (x, y) in enumerate(((75.0, 60.0), (92.0, 102.0)), 1)
    ]
    names = ("Metadata_Well", "Metadata_Site", "Location_Center_X", "Location_Center_Y", "ObjectNumber")
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    pc.write_csv(table, path) if path.suffix == ".csv" else pq.write_table(table, path)
