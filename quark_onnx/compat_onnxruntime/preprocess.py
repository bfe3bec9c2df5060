"""Preparation of a model for quantization: onnxruntime's own, also as ``python -m``."""

from __future__ import annotations

import runpy
from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror

_theirs = Mirror("preprocess")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]


if __name__ == "__main__":
    # ``python -m`` with the package name changed runs onnxruntime's command line.
    runpy.run_module(_theirs.module, run_name="__main__")
