"""The notebook of ``docs/tutorials`` runs from top to bottom and gives the committed outputs.

To renew its outputs: ``jupyter execute --inplace docs/tutorials/plate.ipynb``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra 'dev')")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra 'dev')")
pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra 'dev')")

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/tutorials/plate.ipynb"
_LARGEST_BYTES = 300_000


def stable_outputs(notebook):
    """Return the text outputs of cells without parts that vary between runs and machines."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text") or output.data["text/plain"] for output in outputs]
    return [re.sub(r"/\S*/plate\b|preload +fits.*|on disk .*|\d+% of", "...", text) for text in texts]


@pytest.mark.slow  # `test_docs.py` runs the code of the tutorials.
def test_it_runs_and_gives_what_is_committed(tmp_path, monkeypatch):
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    committed = nbformat.read(NOTEBOOK, 4)
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=os.fspath(tmp_path))
    assert stable_outputs(notebook) == stable_outputs(committed)
    pictures = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("image/png" in data for data in pictures) == 1
    assert sum("data:image/png;base64," in data.get("text/html", "") for data in pictures) == 2


def test_what_is_committed_is_small_and_of_no_machine():
    assert NOTEBOOK.stat().st_size < _LARGEST_BYTES
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "stderr" not in text
