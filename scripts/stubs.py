"""Write the stubs of modules without a file, which are for type checkers and editors.

    python scripts/stubs.py

A test compares the stubs with the table, ``quark_onnx.common.aliases``.
"""

from __future__ import annotations

from pathlib import Path

from quark_onnx.common.aliases import ALIASES, imports_of

ROOT = Path(__file__).parents[1]
MIRROR = "quark_onnx.compat_onnxruntime"
#: onnxruntime has no types: editors find its names, type checkers take Any.
THEIRS = """from typing import Any

from onnxruntime.quantization{module} import *

def __getattr__(name: str) -> Any: ...
"""


def stubs() -> dict[Path, str]:
    """Return the texts of the stubs by their paths."""
    texts = {}
    for module in ALIASES:
        path = ROOT / module.replace(".", "/")
        if any(other.startswith(f"{module}.") for other in ALIASES):
            path /= "__init__"
        text = imports_of(module)
        if module.startswith(MIRROR):
            text = THEIRS.format(module=module.removeprefix(MIRROR)) + text
        texts[path.with_suffix(".pyi")] = text
    return texts


if __name__ == "__main__":
    for path, text in stubs().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
