"""Weights of 2, 4 and 8 bits in blocks: onnxruntime's configurations, own quantizer."""

from __future__ import annotations

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror
from quark_onnx.compat_onnxruntime.weights import (
    MatMulNBitsQuantizer as MatMulNBitsQuantizer,
)

# Configurations of the algorithms stay onnxruntime's classes; only the quantizer is replaced.
_theirs = Mirror("matmul_nbits_quantizer")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]
