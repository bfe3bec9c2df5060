"""Write the stubs for type checkers and editors: of modules without a file, and of lazy names.

    python scripts/stubs.py

A test compares the stubs with the tables, ``quark_onnx.common.aliases`` and ``quark_onnx.torch``.
"""

from __future__ import annotations

from pathlib import Path

from quark_onnx.common.aliases import ALIASES, imports_of
from quark_onnx.torch import AMD_QUARK, NATIVE

ROOT = Path(__file__).parents[1]
MIRROR = "quark_onnx.compat_onnxruntime"
#: onnxruntime has no types: editors find its names, type checkers take Any.
THEIRS = """from typing import Any

from onnxruntime.quantization{module} import *

def __getattr__(name: str) -> Any: ...
"""


def stubs() -> dict[Path, str]:
    """Return the texts of the stubs by their paths."""
    texts = {ROOT / "quark_onnx/torch/__init__.pyi": torch_stub()}
    for module in ALIASES:
        path = ROOT / module.replace(".", "/")
        if any(other.startswith(f"{module}.") for other in ALIASES):
            path /= "__init__"
        text = imports_of(module)
        if module.startswith(MIRROR):
            text = THEIRS.format(module=module.removeprefix(MIRROR)) + text
        texts[path.with_suffix(".pyi")] = text
    return texts


def torch_stub() -> str:
    """Return the stub of ``quark_onnx.torch``."""
    names = NATIVE | AMD_QUARK
    lines = [
        f"from quark_onnx.torch.{module} import {name} as {alias}"
        for alias, (module, name) in names.items()
    ]
    lines += [
        "",
        "NATIVE: dict[str, tuple[str, str]]",
        "AMD_QUARK: dict[str, tuple[str, str]]",
        f"__all__ = {[*names]}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    for path, text in stubs().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
