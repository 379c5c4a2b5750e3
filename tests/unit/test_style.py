"""The style check of `make lint`."""

from __future__ import annotations

import json

import pytest

from tests.support import style

FAULTY = '''"""Whatever is known."""


class Images:
    """Images of a file."""

    def read(self, found):
        """Read images."""
        raise ValueError("it is told")  # What is left.


def write():
    """Write images."""
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a project with one module, which has the sections of `FAULTY`, and no exceptions."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "images.py").write_text(FAULTY)
    (tmp_path / "exceptions.txt").write_text("")
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "EXCEPTIONS", tmp_path / "exceptions.txt")
    return tmp_path


def allow_all(project):
    digests = [section.digest() for section in style.find_sections(project / "src" / "images.py") if section.faults()]
    (project / "exceptions.txt").write_text(f"src/images.py {' '.join(digests)}\n")
    return digests


def test_faults_name_file_line_section_and_phrase(project, capsys):
    assert style.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "src/images.py:7: Images.read: 'What is': use a noun instead of a what-clause",
        "src/images.py:7: Images.read: 'told': use 'report' or 'state' instead of 'tell'",
        "src/images.py:7: Images.read: name 'found': say which value it is",
        "src/images.py:1: module: 'Whatever': use a noun instead of whatever, whoever or whichever",
    ]


def test_sections_in_the_list_are_not_checked_until_they_are_edited(project, capsys):
    allow_all(project)
    assert style.main([]) == 0
    file = project / "src" / "images.py"
    file.write_text(FAULTY.replace("Read images.", "Read all images."))
    assert style.main([]) == 1
    assert "Images.read: name 'found'" in capsys.readouterr().out


def test_edits_of_other_sections_change_nothing(project):
    allow_all(project)
    (project / "src" / "images.py").write_text(FAULTY.replace("Write images.", "Write all images.\n\n    Twice."))
    assert style.main([]) == 0


def test_prune_removes_sections_that_were_corrected(project, capsys):
    first, _ = allow_all(project)
    (project / "src" / "images.py").write_text(FAULTY.replace("Whatever is known.", "Images."))
    assert style.main([]) == 1
    assert "1 sections no longer exist or were edited" in capsys.readouterr().out
    assert style.main(["--prune"]) == 0
    assert (project / "exceptions.txt").read_text() == f"src/images.py {first}\n"


def test_renamed_keeps_sections_in_which_only_this_name_changed(project):
    allow_all(project)
    file = project / "src" / "images.py"
    file.write_text(FAULTY.replace("found", "where"))
    assert style.main(["--renamed", "found", "where"]) == 0
    assert style.main([]) == 0
    file.write_text(FAULTY.replace("found", "where").replace("Read images.", "Read all images."))
    assert style.main(["--renamed", "found", "where"]) == 1


@pytest.mark.parametrize(
    ("text", "is_faulty"),
    [
        ("Of a table: its columns.", True),
        ("Columns of a table.", False),
        ("one row an image", True),
        ("one row per image", False),
        ("It is no path.", True),
        ("It is no longer open.", False),
        ("Pass `what is` as code.", False),
        ("```\nwhat is\n```", False),
    ],
)
def test_documents_are_checked_outside_of_code(tmp_path, text, is_faulty):
    (tmp_path / "page.md").write_text(f"# Page\n\nIntroduction.\n\n## Section\n\n{text}\n")
    faults = {section.name: bool(section.faults()) for section in style.find_sections(tmp_path / "page.md")}
    assert faults == {"": False, "Page": False, "Section": is_faulty}


def test_markdown_of_notebooks_is_checked(tmp_path):
    cells = [("markdown", ["# Page\n", "\n", "It is no path."]), ("code", ["found = 'It is told.'"])]
    notebook = {"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}
    (tmp_path / "page.ipynb").write_text(json.dumps(notebook))
    faults = {section.name: len(section.faults()) for section in style.find_sections(tmp_path / "page.ipynb")}
    assert faults == {"": 0, "Page": 1}
