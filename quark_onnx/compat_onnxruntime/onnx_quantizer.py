"""ONNXQuantizer: own quantizer with the interface of onnxruntime's class."""

from __future__ import annotations

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror
from quark_onnx.compat_onnxruntime.quantizers import ONNXQuantizer as ONNXQuantizer

# ONNXQuantizer above hides onnxruntime's class; other names are looked up there.
_theirs = Mirror("onnx_quantizer")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]
