"""The commands and the code of docs/goals run, one after the other, on a tiny model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch_models import llama, made, saved, with_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "goals").glob("*.md"))
#: The Python of an environment with onnxruntime-genai.
GENAI = os.environ.get("QUARK_ONNX_OGA_PYTHON", "")


def steps(page: Path) -> list[str]:
    """Commands of quark-onnx and blocks of Python, in the order of the page."""
    text = page.read_text(encoding="utf-8")
    pattern = r"^    (quark-onnx .*)$|^```python\n(.*?)```"
    found = re.findall(pattern, text, flags=re.DOTALL | re.MULTILINE)
    return [command.split("\n")[0] or code for command, code in found]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_goal(page: Path, tmp_path: Path) -> None:
    python = sys.executable
    if page.stem == "ryzen_ai" and find_spec("onnxruntime_genai") is None:
        if not GENAI:
            pytest.skip("onnxruntime-genai is not installed")
        python = GENAI
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    config = llama(**sizes, max_position_embeddings=512)
    with_tokenizer(saved(made(config), tmp_path / "llama"))
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog;", ""]
    text = " ".join(words[place * place % len(words)] for place in range(900))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert steps(page)
    for step in steps(page):
        arguments = ["-c", step]
        if step.startswith("quark-onnx"):
            arguments = ["-m", *shlex.split(step.replace("-", "_", 1))]
        run = subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"{step}\n{run.stdout}\n{run.stderr}"
