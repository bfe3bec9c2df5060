"""Commands, code and links of README and docs/ are right: commands parse, names can be imported,
files exist.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import calibrators.errors
import quark_onnx.common.errors
from quark_onnx.cli.dispatch import parse
from quark_onnx.common.registry import OPTIMIZERS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import causes
import reference

from tests.cases import loop_over

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]
#: Words that stand for any command, model or option in a usage line.
PLACEHOLDERS = re.compile(r"\b(COMMAND|KIND|WHAT|MODEL|OUT|NAME)\b|\.\.\.")


def commands(path: Path) -> Iterator[str]:
    """Yield each command of quark-onnx that stands in a line of its own, continued lines joined."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        found = re.match(r"\s*(?:- run: |\$ )?(quark-onnx .*)", line)
        if found and not PLACEHOLDERS.search(found[1]):
            yield found[1]


COMMANDS = [
    pytest.param(command, id=f"{name}: {command[:70]}")
    for path, name in zip(PAGES, IDS, strict=True)
    for command in commands(path)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_options_that_exist(command: str) -> None:
    _, *arguments = shlex.split(command, comments=True)
    assert parse(arguments).run is not None


def python_blocks(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@loop_over("path", dict(zip(IDS, PAGES, strict=True)))
def test_python_code_imports_names_that_exist(path: Path) -> None:
    for block in python_blocks(path):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                check_import(node.module, [alias.name for alias in node.names])


def check_import(module: str, names: list[str]) -> None:
    """Import names of this project; those of the PyTorch side where torch is installed."""
    if module.partition(".")[0] not in ("quark_onnx", "calibrators"):
        return
    if module.startswith("quark_onnx.torch"):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    imported = importlib.import_module(module)
    missing = [name for name in names if not hasattr(imported, name)]
    assert missing == [], f"{module} has no {', '.join(missing)}"


def prose(path: Path) -> str:
    """Return the text of a page without its blocks of code."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and mkdocs make them."""
    text = prose(path)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.lower())
        found.add(re.sub(r"\s+", "-", plain.strip()))
    return found


@loop_over("path", dict(zip(IDS, PAGES, strict=True)))
def test_links_lead_somewhere(path: Path) -> None:
    text = prose(path)
    broken = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        file = path.parent / target if target else path
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def subclasses(cls: type[Exception]) -> set[str]:
    """Return the names of a class of errors and of all its subclasses."""
    names = {cls.__name__}
    for child in cls.__subclasses__():
        names |= subclasses(child)
    return names


def test_every_kind_of_error_has_cause_and_cure() -> None:
    kinds = subclasses(quark_onnx.common.errors.QuarkError)
    kinds |= subclasses(calibrators.errors.CalibrationError)
    kinds -= {"QuarkError"}  # only ever a subclass of it is raised
    own = {kind for kind in kinds if not kind.startswith("_")}
    assert own - set(causes.CLASSES) == set()


def test_every_rule_for_messages_applies_to_one() -> None:
    texts = {
        text
        for name, messages in reference.error_messages().items()
        if name in reference.GENERAL
        for text, _ in messages
    }
    idle = [
        rule.pattern
        for rule in causes.RULES
        if not any(re.search(rule.pattern, text) for text in texts)
    ]
    assert idle == []


def test_the_page_of_errors_has_every_message() -> None:
    page = reference.errors()
    missing = [
        text
        for name, messages in reference.error_messages().items()
        for text, _ in messages
        if name in causes.CLASSES and reference.code(text) not in page
    ]
    assert missing == []


@pytest.mark.parametrize(
    "name", sorted(set(reference.PARTS) - {"schemes", "algorithms", "errors"})
)
def test_reference_parts_stand_in_a_page(name: str) -> None:
    assert any(
        f"<!-- reference: {name} -->" in path.read_text(encoding="utf-8")
        for path in PAGES
    )
    assert len(reference.PARTS[name]().splitlines()) >= 3


#: Public names that the reference describes elsewhere: onnxruntime's, and the base of all errors.
ELSEWHERE = {
    "CalibrationDataReader",
    "CalibrationMethod",
    "QuantFormat",
    "QuantType",
    "QuarkError",
}


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / "docs" / "reference" / "python").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    optimizers = {OPTIMIZERS[name].__name__ for name in OPTIMIZERS}
    missing = [
        name
        for name in quark_onnx.__all__
        if name not in optimizers | ELSEWHERE and f"::: quark_onnx.{name}\n" not in text
    ]
    assert missing == []
