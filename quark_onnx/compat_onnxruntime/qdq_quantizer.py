"""QDQQuantizer: own quantizer with the interface of onnxruntime's class."""

from __future__ import annotations

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror
from quark_onnx.compat_onnxruntime.quantizers import QDQQuantizer as QDQQuantizer

# QDQQuantizer above hides onnxruntime's class; other names are looked up there.
_theirs = Mirror("qdq_quantizer")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]
