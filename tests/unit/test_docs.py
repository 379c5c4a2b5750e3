"""Every code block of README and docs runs on small data or states why not; the site has all pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import groupby

import duckdb
import numpy as np
import ome_arrow
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import vortex.io

import omearrow_ds
from tests.support import pages
from tests.support.pages import NO_CODE, PAGES, ROOT, blocks, long_lines, prose
from tests.support.plates import written_plate

# Tests elsewhere run these, as they need several processes.
ELSEWHERE = {"docs/how-to/several-hosts.md": "tests/unit/loader/test_training.py"}
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?<![\w/.])(?:(?:tests|benchmarks|docs|src/omearrow_ds)/[\w./-]+|\.ci/[\w-]+)")
SCRIPTS = np.random.default_rng(13).integers(0, 256, (6, 1, 1, 1, 20, 24), np.uint8)


def name_of(page):
    return str(page.relative_to(ROOT))


def find_modules(*folders):
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def missing_names(text):
    """Return names in inline code of files, modules and make targets that this repository lacks."""
    code = "\n".join(_CODE.findall(text))
    files = _FILE.findall(code)
    missing = [name for name in files if not (ROOT / name).exists()]
    test_files = {file.name for file in find_modules("tests", "benchmarks")}
    missing += [name for name in re.findall(r"(?<![\w/.])test_\w+\.py\b", code) if name not in test_files]
    for module in re.findall(r"python -m ((?:benchmarks|tests)(?:\.\w+)*)", code):
        path = ROOT / module.replace(".", "/")
        missing += [] if path.with_suffix(".py").exists() or (path / "__main__.py").exists() else [module]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return missing + [f"make {name}" for name in re.findall(r"\bmake ([a-z-]+)", code) if name not in targets]


def exported():
    return {name: getattr(omearrow_ds, name) for name in omearrow_ds.__all__}


def readme_plate(folder):
    pages.plate_of_files(folder / "plate", folder / "plate/masks")
    pages.cells(folder / "cells.parquet")


def a_model(folder):
    (folder / "models.py").write_text(
        "import torch\ndef make(shape):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(2))\n"
    )


def three_commands(folder):
    pages.plate_of_files(folder / "plate")
    a_model(folder)


def single_cells(folder):
    pages.plate_of_files(folder / "plate", folder / "plate/masks")
    pages.cells(folder / "cells.parquet")


def tables_of_fields(folder):
    """Write a plate, and its tables from CellProfiler and CytoTable."""
    pages.plate_of_files(folder / "plate")
    pages.cells(folder / "cells.parquet")
    cells = pq.read_table(folder / "cells.parquet").to_pandas()
    wells, sites = zip(*pages.wells_and_sites(), strict=True)
    fields = pd.DataFrame({"ImageNumber": range(1, len(wells) + 1), "Metadata_Well": wells, "Metadata_Site": sites})
    fields["Metadata_treatment"] = fields.Metadata_Well.str[0]
    for number, name in enumerate(("DAPI", "GFP"), 1):
        fields[f"FileName_{name}"] = [
            f"{well}_01_{number}_{site}_{name}_001.tif" for well, site in zip(wells, sites, strict=True)
        ]
    fields.to_csv(folder / "fields.csv", index=False)
    for name in ("DAPI", "GFP"):
        fields[f"PathName_{name}"] = str(folder / "plate")
    fields.to_csv(folder / "Image.csv", index=False)
    whole = cells.merge(fields, on=["Metadata_Well", "Metadata_Site"])
    whole[["ImageNumber", "ObjectNumber", "Location_Center_X", "Location_Center_Y"]].to_csv(
        folder / "Nuclei.csv", index=False
    )
    ours = ("Metadata", "FileName", "PathName")
    names = {name: f"Image_{name}" if name.startswith(ours) else f"Nuclei_{name}" for name in whole}
    whole.rename(columns=names).to_parquet(folder / "profiles.parquet")


def splits(folder):
    pages.plate_of_images(folder / "many.arrow")
    dataset = omearrow_ds.OMEArrowDataset(folder / "many.arrow", target="label")
    return exported() | {"dataset": dataset, "augment": lambda image: image.flip(-1)}


def values_of_pixels(folder):
    (folder / "plates").mkdir()
    pages.plate_of_files(folder / "plates/P1")
    for file in (folder / "plates/P1").iterdir():
        well, _, _, site, channel, _ = file.stem.split("_")
        file.rename(file.with_name(f"{well}_{site}_{channel}.tif"))
    pages.plate_of_images(folder / "plates.arrow", metadata=[{"channels": [{"name": "DAPI"}, {"name": "GFP"}]}] * 10)
    return exported()


def a_plate(folder):
    pages.plate_of_images(folder / "plate.arrow")


def plate_and_profiles(folder):
    pages.plate_of_images(folder / "plate.parquet")
    wells, sites = zip(*pages.wells_and_sites(), strict=True)
    features = {f"Cells_Feature_{number}": [0.5] * len(wells) for number in range(80)}
    features |= {"Cells_Area": range(4, 4 + len(wells)), "Cells_Eccentricity": [0.25] * len(wells)}
    pq.write_table(pa.table({"Metadata_Well": wells, "Metadata_Site": sites, **features}), folder / "profiles.parquet")


def a_plate_and_cells(folder):
    a_plate(folder)
    pages.cells(folder / "cells.parquet")


def a_plate_and_a_model(folder):
    a_plate(folder)
    a_model(folder)


def a_plate_of_files(folder):
    a_plate(folder)
    omearrow_ds.convert(folder / "plate.arrow", folder / "plate.zarr")


def table_of_files(folder):
    """Write a plate and its LoadData table."""
    tables_of_fields(folder)
    (folder / "Image.csv").rename(folder / "load_data.csv")


def open_images_of_tables(folder):
    table_of_files(folder)
    return exported()


def plate_and_platemap(folder):
    """Write a plate without treatments, and a platemap that has them."""
    pages.plate_of_files(folder / "files")
    omearrow_ds.convert(folder / "files", folder / "plate.arrow", pattern="{well}_01_{_}_{site}_{channel}_001.tif")


def of_scripts(folder):
    (folder / "data").mkdir()
    as_parquet(folder / "data/pytorch_bench.parquet")


def plate_converted_before(folder):
    """Write an OME-Zarr plate, and the collection that earlier versions made from it."""
    images = [np.full((1, 1, 1, 8, 8), number, np.uint8) for number in range(2)]
    written_plate(folder / "plate.zarr", {"A/1": images}, name="P1")
    columns = {"Metadata_Plate": ["P1", "P1"], "Metadata_Well": ["A01", "A01"], "Metadata_Site": [0, 1]}
    omearrow_ds.write_images(images, folder / "plate.arrow", axes="TCZYX", columns=columns)


def table_of_scripts():
    """Return a table like the scripts of ome-arrow-benchmarks: pixels in lists, inferred types."""
    images = [ome_arrow.OMEArrow(data=image).data.as_py() for image in SCRIPTS]
    column = pa.array([{name: value for name, value in image.items() if name != "masks"} for image in images])
    return pa.table({"row_id": np.arange(len(SCRIPTS)), "ome_image": column})


def as_parquet(path):
    pq.write_table(table_of_scripts(), path, compression="zstd")


def as_parquet_duck(path):
    with duckdb.connect() as connection:
        connection.register("tmp_tbl", table_of_scripts())
        connection.execute(f"COPY (SELECT * FROM tmp_tbl) TO '{path}' WITH (FORMAT 'PARQUET', COMPRESSION 'ZSTD')")


def as_duckdb(path):
    with duckdb.connect(str(path)) as connection:
        connection.register("tmp_tbl", table_of_scripts())
        connection.execute("CREATE TABLE bench AS SELECT * FROM tmp_tbl")


def as_lancedb(path):
    import lancedb  # Takes 2 s, in each process that collects the tests.

    lancedb.connect(path).create_table("bench", table_of_scripts())


def as_vortex(path):
    vortex.io.write(table_of_scripts(), str(path))


def as_tiff(path):
    path.mkdir()
    for number, image in enumerate(SCRIPTS):
        tifffile.imwrite(path / f"img_{number:05d}.tiff", image)


WRITTEN = {
    "ome_only.parquet": (as_parquet, {}),
    "ome_only_duck.parquet": (as_parquet_duck, {}),
    "ome_only_lance": (as_lancedb, {"table": "bench"}),
    "ome_only.vortex": (as_vortex, {}),
    "ome_only.duckdb": (as_duckdb, {"table": "bench"}),
    "tiff_runs": (as_tiff, {}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_scripts_wrote_opens_as_the_page_says(name, tmp_path):
    write, options = WRITTEN[name]
    write(tmp_path / name)
    assert name in (ROOT / "docs/how-to/migrate-benchmarks.md").read_text()
    with omearrow_ds.open_images(tmp_path / name, **options) as source:
        np.testing.assert_array_equal(source.take(range(len(SCRIPTS))), SCRIPTS)
        if write is not as_tiff:
            assert source.columns["row_id"].to_pylist() == list(range(len(SCRIPTS)))


# Functions that prepare the folder for the blocks of a page or section, and return names that the blocks use.
PREPARED = {
    "README.md": readme_plate,
    "README.md: Use the command line": three_commands,
    "docs/how-to/crops-and-masks.md: Cut crops, add masks": single_cells,
    "docs/how-to/crops-and-masks.md: Write crops to a file": single_cells,
    "docs/how-to/filter-images.md: Filter a collection": a_plate,
    "docs/how-to/filter-images.md: Filter an open dataset": a_plate,
    "docs/how-to/filter-images.md: Filter cells": a_plate_and_cells,
    "docs/how-to/filter-images.md: Write conditions": a_plate,
    "docs/how-to/migrate-benchmarks.md: Files": of_scripts,
    "docs/how-to/migration.md: From CellProfiler tables": tables_of_fields,
    "docs/how-to/migration.md: From your own Dataset over tifffile and pandas": tables_of_fields,
    "docs/how-to/normalization.md: Correct 12-bit images": values_of_pixels,
    "docs/how-to/normalization.md: Measure statistics per plate": values_of_pixels,
    "docs/how-to/parts.md: Convert to parts on several machines": table_of_files,
    "docs/how-to/parts.md: Use several processes": table_of_files,
    "docs/how-to/plate-folders.md: CellProfiler tables": open_images_of_tables,
    "docs/how-to/plate-folders.md: Folders with a file name pattern": single_cells,
    "docs/how-to/platemaps.md: Choose targets": plate_and_platemap,
    "docs/how-to/platemaps.md: Join a table": plate_and_platemap,
    "docs/how-to/platemaps.md: Keep ids with predictions": plate_and_platemap,
    "docs/how-to/previews.md: As a grid": a_plate,
    "docs/how-to/splits.md: Split and balance datasets": splits,
    "docs/how-to/troubleshooting.md: Collections converted from OME-Zarr plates": plate_converted_before,
    "docs/how-to/troubleshooting.md: It uses too much memory": a_plate,
    "docs/how-to/troubleshooting.md: The GPU waits": a_plate_and_a_model,
    "docs/how-to/troubleshooting.md: The disk is slow": a_plate_of_files,
    "docs/how-to/wide-tables.md: Join features to images": plate_and_profiles,
    "docs/how-to/wide-tables.md: Read some columns": plate_and_profiles,
    "docs/tutorials/convert-and-train.md": readme_plate,
    "docs/tutorials/first-batches.md": readme_plate,
    "docs/tutorials/single-cells.md": readme_plate,
}
# Sections about a bucket run with a new bucket on a real server, which has the files of the plate below raw/.
ON_A_SERVER = {"docs/how-to/buckets.md: Train on a plate in a bucket"}
LONG = {  # `recommend` measures 21 ways to store images, which takes a minute; `profile` takes 15 s.
    "README.md: Use the command line",
    "docs/how-to/troubleshooting.md: The GPU waits",
}


def group_name(page, section):
    """Return the page if its sections continue each other, otherwise page and section."""
    is_continuous = name_of(page) == "README.md" or page.parent.name == "tutorials"
    name = f"{name_of(page)}: {section}"
    return name_of(page) if is_continuous and name not in LONG else name


SECTIONS = {
    name: (page, list(group))
    for page in PAGES
    if name_of(page) not in ELSEWHERE
    for name, group in groupby(
        (b for b in blocks(page) if b.language not in NO_CODE and not b.why),
        lambda b, page=page: group_name(page, b.section),
    )
}


_COMMAND = "import os, sys; os.chdir(sys.argv.pop(1)); from omearrow_ds.cli import main; main()"


def plain_calls(code):
    """Return the words of each call of ``omearrow-ds`` in a block of bash, or None if it has anything else."""
    lines = [line for line in code.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    if re.search(r"[|&;<>$`*~]", code) or not all(line.startswith("omearrow-ds ") for line in lines):
        return None
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture
def shell(tmp_path, programs):
    """Return a function that runs a block of bash with this checkout's ``omearrow-ds``.

    Plain calls of it are forked, because importing the package takes a second per process.
    """
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/omearrow-ds"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m omearrow_ds "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"

    def run(code, folder):
        calls = plain_calls(code)
        for words in calls or ():
            done = programs.start(
                _COMMAND, folder, *words, env=os.environ, has_workers=words[0] in ("profile", "recommend")
            ).wait()
            assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        if calls is not None:
            return
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"

    return run


def on_a_server(folder, request):
    """Put the files of a plate into a new bucket; return replacements for names on the page."""
    weed, bucket = request.getfixturevalue("weed"), request.getfixturevalue("bucket")
    pages.plate_of_files(folder / "raw")
    weed.put_folder(bucket, folder / "raw")
    return {"s3://bucket": f"s3://{bucket}", "http://minio:9000": weed.url, "/scratch/cache": str(folder / "cache")}


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(900)] if name in LONG else [])
        for name in SECTIONS
    ],
)
def test_the_code_runs(section, tmp_path, monkeypatch, shell, request):
    page, code_blocks = SECTIONS[section]
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = {"__name__": "__main__"} | (PREPARED.get(section, lambda _: None)(folder) or {})
    addresses = on_a_server(folder, request) if section in ON_A_SERVER else {}
    for block in code_blocks:
        code = block.code
        for written, address in addresses.items():
            code = code.replace(written, address)
        if block.language == "bash":
            shell(code, folder)
        else:
            assert block.language == "python", f"{section}: nothing runs {block.language!r}; say why not"
            exec(compile("\n" * (block.line - 1) + code, page, "exec"), names)


def test_what_is_prepared_is_used():
    assert set(PREPARED) <= set(SECTIONS)


def test_a_block_is_told_from_what_is_around_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\n# B\n1\n```\n\n## C\n\n```bash not run: why\nfalse\n```\n```text\nx\n```\n")
    assert [tuple(block) for block in blocks(page)] == [
        ("A", "python", "# B\n1\n", 4, None),
        ("C", "bash", "false\n", 11, "why"),
        ("C", "text", "x\n", 14, None),
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_of_prose_have_at_most_100_characters(page):
    assert long_lines(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_is_a_comment_of_the_site(page):
    assert [line for _, line in prose(page) if line.lstrip().startswith("%")] == []  # MyST omits such lines.


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_modules_and_targets_in_code_exist(page):
    assert missing_names(page.read_text(encoding="utf-8")) == []


def test_missing_names_are_files_modules_and_targets_of_this_repository():
    text = "`tests/unit/test_docs.py` `make test` `python -m tests.contract` `src/other/project.py` `make(shape)`"
    assert missing_names(text) == []
    text = "`see tests/unit/test_gone.py` `test_lost.py` `python -m benchmarks.gone` `make gone`"
    assert missing_names(text) == ["tests/unit/test_gone.py", "test_lost.py", "benchmarks.gone", "make gone"]


def test_classes_for_contributors_exist():
    """Classes of other libraries look like missing ones, so other pages are not checked."""
    text = "".join(_CODE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    classes = {name for name in re.findall(r"\b(?:[A-Z][a-z0-9]+){2,}\b", text) if not name.startswith("Your")}
    code = "".join(file.read_text(encoding="utf-8") for file in find_modules("src", "tests"))
    assert classes == {name for name in classes if re.search(rf"^ *class {name}\b", code, re.MULTILINE)}


def test_messages_in_the_table_of_troubleshooting_exist():
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    first_column = re.findall(r"^\| ([^|]+) \|", page.partition("| message or symptom |")[2], re.MULTILINE)
    messages = [text for cell in first_column for text in _CODE.findall(cell) if " " in text]
    code = "".join(file.read_text(encoding="utf-8") for file in find_modules("src"))
    assert len(messages) > 8
    assert [text for text in messages if text not in code] == []


def test_pages_that_code_names_exist():
    code = "".join(file.read_text(encoding="utf-8") for file in find_modules("src", "benchmarks"))
    names = set(re.findall(r"docs/[\w/-]+\.md", code))
    assert names == {name for name in names if (ROOT / name).exists()}


@pytest.mark.parametrize("page", [page for page in PAGES if ROOT / "docs" in page.parents], ids=name_of)
def test_pages_have_at_most_1500_words_of_prose(page):
    assert sum(len(line.split()) for _, line in prose(page)) <= 1_500


def test_long_lines_exclude_tables_code_comments_and_links(tmp_path):
    page = tmp_path / "page.md"
    long = "word " * 21
    code, table, comment, link = f"```python\n{long}\n```", f"| {long} |", f"<!-- {long} -->", f"- {'link' * 30}"
    page.write_text("\n".join([long, code, table, comment, link, f"  {long}", long[:100]]))
    assert [line.split(":")[0] for line in long_lines(page)] == ["1", "8"]


def test_what_is_run_elsewhere_is(monkeypatch):
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text()


def test_the_reference_has_all_that_is_public():
    text = "".join((ROOT / f"docs/reference/{page}.md").read_text() for page in ("api", "errors"))
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(omearrow_ds.__all__)


def test_the_site_has_all_pages_in_its_navigation():
    text = (ROOT / "docs/index.md").read_text()
    listed = re.findall(
        r"^(?:.*<)?([\w./-]+)>?$",
        "".join(b.code for b in blocks(ROOT / "docs/index.md") if b.language == "{toctree}"),
        re.MULTILINE,
    )
    linked = {os.path.normpath(f"docs/{name}") for name in listed}
    uncounted = {"docs/tutorials/plate", "docs/reference/command-line", "docs/reference/options"}  # Not pages on disk.
    pages_there = {name_of(page).removesuffix(".md") for page in PAGES}
    assert linked == (pages_there | uncounted) - {"docs/index"}, text
