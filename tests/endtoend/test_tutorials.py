"""The tutorials run, and their notebooks have the cells of the scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "examples" / "tutorials"
sys.path.insert(0, str(ROOT / "scripts"))

import notebooks

#: What a tutorial needs besides the package.
EXTRAS = {
    "torch_module": ("torch", "onnxscript"),
    "llm_vllm": ("torch", "transformers", "safetensors"),
    "llm_llamacpp": ("torch", "transformers", "gguf"),
}
#: A word of the last line that each tutorial prints.
LAST_LINES = {
    "classifier": "A8W4, optimized",
    "detector": "mixed to 35 dB",
    "bert": "SmoothQuant",
    "torch_module": "of the classes agree",
    "llm_vllm": "loads",
    "llm_llamacpp": "Q4_1",
    "ryzen_ai": "bundle 0.98",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in EXTRAS else [])
        for name in notebooks.NAMES
    ],
)
def test_tutorials_run(name: str, tmp_path: Path) -> None:
    for module in EXTRAS.get(name, ()):
        pytest.importorskip(module)
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    done = subprocess.run(
        [sys.executable, TUTORIALS / f"{name}.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert LAST_LINES[name] in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_notebooks_are_in_step_with_their_scripts(name: str) -> None:
    written = (TUTORIALS / f"{name}.ipynb").read_text(encoding="utf-8")
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
