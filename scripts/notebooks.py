"""Write the notebooks of examples/tutorials from its scripts: ``python scripts/notebooks.py
[--run NAME ...]``.

A script has cells that begin with ``# %%``; cells with ``# %% [markdown]`` are text. A notebook has
the same cells, and the outputs that ``--run`` has recorded in outputs.json. The documentation
site shows the same as pages. A test compares scripts and notebooks, and runs the scripts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "examples" / "tutorials"
OUTPUTS = TUTORIALS / "outputs.json"
#: In the order of the site.
NAMES = (
    "classifier",
    "detector",
    "bert",
    "torch_module",
    "llm_vllm",
    "llm_llamacpp",
    "ryzen_ai",
)


@dataclass
class Cell:
    """One cell: text without comment signs, or code."""

    kind: str
    source: str


def cells(text: str) -> Iterator[Cell]:
    """Yield the cells of a script."""
    for part in text.split("# %%")[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [
                line.removeprefix("#").removeprefix(" ") for line in body.splitlines()
            ]
            yield Cell("markdown", "\n".join(lines).strip())
        else:
            yield Cell("code", body.strip())


def script(name: str) -> list[Cell]:
    """Return the cells of a tutorial."""
    return list(cells((TUTORIALS / f"{name}.py").read_text(encoding="utf-8")))


def recorded() -> dict[str, list[str]]:
    """Return what each code cell has printed, by tutorial."""
    if not OUTPUTS.exists():
        return {}
    found: dict[str, list[str]] = json.loads(OUTPUTS.read_text(encoding="utf-8"))
    return found


def outputs_of(name: str) -> list[str]:
    """Return what the code cells have printed; empty texts where nothing is recorded."""
    count = sum(cell.kind == "code" for cell in script(name))
    printed = recorded().get(name, [])
    return printed if len(printed) == count else [""] * count


def notebook(name: str) -> str:
    """Return a notebook as JSON."""
    printed = iter(outputs_of(name))
    entries: list[dict[str, Any]] = []
    for index, cell in enumerate(script(name)):
        entry: dict[str, Any] = {
            "cell_type": cell.kind,
            "id": f"cell-{index}",
            "metadata": {},
            "source": cell.source.splitlines(keepends=True),
        }
        if cell.kind == "code":
            text = next(printed)
            entry["execution_count"] = None
            stream = {
                "name": "stdout",
                "output_type": "stream",
                "text": text.splitlines(keepends=True),
            }
            entry["outputs"] = [stream] if text else []
        entries.append(entry)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": entries,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def page(name: str) -> str:
    """Return a tutorial as a Markdown page."""
    printed = iter(outputs_of(name))
    parts = []
    for cell in script(name):
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        text = next(printed)
        if text:
            parts.append(f"```text\n{text.rstrip()}\n```")
    source = f"examples/tutorials/{name}"
    parts.append(f"The script is `{source}.py`, the notebook `{source}.ipynb`.")
    return "\n\n".join(parts) + "\n"


def run(name: str) -> list[str]:
    """Run the code cells of a tutorial in one namespace, and return what each prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in script(name):
        if cell.kind == "code":
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(compile(cell.source, f"{name}.py", "exec"), namespace)
            printed.append(stream.getvalue().replace(f"{ROOT}/", ""))
    return printed


def main() -> int:
    """Write the notebooks, after running those that ``--run`` names."""
    parser = argparse.ArgumentParser(description="Write notebooks from scripts.")
    parser.add_argument("--run", nargs="+", choices=NAMES, default=[])
    options = parser.parse_args()
    sys.path.insert(0, str(TUTORIALS))
    for name in options.run:
        found = recorded() | {name: run(name)}
        text = json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False)
        OUTPUTS.write_text(text + "\n", encoding="utf-8", newline="\n")
    for name in NAMES:
        path = TUTORIALS / f"{name}.ipynb"
        path.write_text(notebook(name), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
