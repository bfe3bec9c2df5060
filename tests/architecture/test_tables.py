"""Tables and pictures of README and docs/ equal those that follow from code and results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.cases import loop_over

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "<!-- table:" in path.read_text(encoding="utf-8")
]


def script(name: str) -> ModuleType:
    """Import a script by its path."""
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == script("tables").updated(text), "run: python scripts/tables.py"


def test_every_table_stands_in_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert all(f"<!-- table: {name} -->" in text for name in script("tables").TABLES)


def test_pictures_are_up_to_date() -> None:
    diagrams = script("diagrams")
    differ = [
        name
        for name, draw in diagrams.PICTURES.items()
        if (diagrams.ASSETS / name).read_text(encoding="utf-8") != draw()
    ]
    assert differ == [], "run: python scripts/diagrams.py"


#: A figure with the unit of a measurement.
FIGURE = re.compile(r"\d+\.\d+\s*(?:%|dB|mAP|points|MB|GB|MB/s|s|ms|x)(?!\w)")
#: Constants of the code, which no benchmark measures.
CONSTANTS = {"0.1 %", "0.1 dB", "0.5 %", "0.5 dB"}


@loop_over("path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_figures_are_in_generated_tables_only(path: Path) -> None:
    """A measured figure that is typed by hand would not follow the results."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert set(FIGURE.findall(text)) - CONSTANTS == set()
