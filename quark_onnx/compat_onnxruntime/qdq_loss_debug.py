"""Comparison of float and quantized tensors: onnxruntime's own.

The functions find this package's tensors by name.
"""

from __future__ import annotations

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror

_theirs = Mirror("qdq_loss_debug")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]
