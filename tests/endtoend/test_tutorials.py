"""The tutorials run, and their notebooks have the cells of the scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.endtoend.tutorials import EXTRAS, FOLDER, LAST_LINES, ROOT, check

sys.path.insert(0, str(ROOT / "scripts"))

import notebooks


@pytest.mark.parametrize("name", [n for n in notebooks.NAMES if n not in EXTRAS])
def test_tutorials_run(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_every_tutorial_is_run() -> None:
    """Each tutorial has an expected last line here, also those that need an extra."""
    assert LAST_LINES.keys() == set(notebooks.NAMES)


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_notebooks_are_in_step_with_their_scripts(name: str) -> None:
    written = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert written == notebooks.notebook(name), "run: python scripts/notebooks.py"
    sources = [cell["source"] for cell in json.loads(written)["cells"]]
    assert ["".join(lines) for lines in sources] == [
        cell.source for cell in notebooks.script(name)
    ]


def test_cells_of_a_script() -> None:
    text = (
        "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nprint(1)\n\n# %%\nprint(2)\n"
    )
    assert [(cell.kind, cell.source) for cell in notebooks.cells(text)] == [
        ("markdown", "# Title\n\nText."),
        ("code", "print(1)"),
        ("code", "print(2)"),
    ]
