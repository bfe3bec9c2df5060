"""Run the tutorials as a reader does: each is a script in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tutorials"

#: A word of the last line that each tutorial prints.
LAST_LINES = {
    "classifier": "A8W4, optimized",
    "detector": "mixed to 35 dB",
    "bert": "SmoothQuant",
    "torch_module": "of the classes agree",
    "llm_vllm": "passes all rules of vLLM",
    "llm_llamacpp": "Q4_1",
    "ryzen_ai": "bundle 0.98",
}
#: What a tutorial needs besides the package.
EXTRAS = {
    "torch_module": ("torch", "onnxscript"),
    "llm_vllm": ("torch", "transformers", "safetensors"),
    "llm_llamacpp": ("torch", "transformers", "gguf"),
}


def check(name: str, folder: Path) -> None:
    """Run a tutorial in a folder, and check its last line."""
    (folder / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert LAST_LINES[name] in done.stdout.splitlines()[-1]
