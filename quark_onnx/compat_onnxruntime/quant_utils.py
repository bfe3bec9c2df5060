"""Number formats, tensor arithmetic and model files: onnxruntime's own."""

from __future__ import annotations

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror

_theirs = Mirror("quant_utils")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]
