"""Follow the recipes of CONTRIBUTING word by word, on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What a test of an extension needs of the tree.
COPIED = ("calibrators", "quark_onnx", "tests", "conftest.py", "pyproject.toml")


@dataclass(frozen=True)
class Recipe:
    """A section of CONTRIBUTING.

    Attributes:
        title: the heading.
        files: the code of each new file, by its path.
        changes: a path and the lines of its diff; the lines of a hunk begin with a space where the
            file has them, and with a plus sign where they are added.
        commands: the arguments of pytest, a command each.
    """

    title: str
    files: dict[str, str]
    changes: list[tuple[str, str]]
    commands: list[list[str]]

    @property
    def optional(self) -> bool:
        """Whether the recipe needs an extra."""
        return any("torch" in Path(path).parts for path in self.files)

    def apply(self, tree: Path) -> None:
        """Write the new files, and change the others."""
        for path, code in self.files.items():
            assert not (tree / path).exists(), f"{path} exists already"
            (tree / path).write_text(code, encoding="utf-8")
        for path, diff in self.changes:
            text = (tree / path).read_text(encoding="utf-8")
            for hunk in diff.split("@@\n"):
                lines = hunk.splitlines(keepends=True)
                before = "".join(line[1:] for line in lines if line[0] == " ")
                after = "".join(line[1:] for line in lines)
                assert text.count(before) == 1, f"{path} does not have, once:\n{before}"
                text = text.replace(before, after)
            (tree / path).write_text(text, encoding="utf-8")


def recipes() -> list[Recipe]:
    """Read the recipes of CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Adding something\n")[2].partition("\n## ")[0]
    found = []
    for part in section.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        files = re.findall(r"```python\n# (\S+)\n(.*?)```", body, flags=re.DOTALL)
        changes = re.findall(r"```diff\n# (\S+)\n(.*?)```", body, flags=re.DOTALL)
        commands = re.findall(r"^    pytest (.*)$", body, flags=re.MULTILINE)
        arguments = [command.split() for command in commands]
        found.append(Recipe(title, dict(files), changes, arguments))
    return found


def copy(tree: Path) -> None:
    """Copy the tree, with compiled files, which are read faster."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name)
        else:
            shutil.copy2(ROOT / name, tree / name)


#: Runs commands of pytest one after the other in one process, which imports everything once.
RUN = """
import sys
import pytest
command = sys.argv[1:]
while command:
    end = command.index("--then")
    code = pytest.main(["-q", "-p", "no:cacheprovider", *command[:end]])
    assert code == 0, command[:end]
    command = command[end + 1:]
"""


def run(tree: Path, chosen: list[Recipe]) -> None:
    """Run the commands of recipes in a tree."""
    arguments: list[str] = []
    for recipe in chosen:
        for command in recipe.commands:
            arguments += [*command, "--then"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
