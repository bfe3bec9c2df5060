"""Stands in for ``onnxruntime.quantization``: a script changes the package name, and this package
quantizes.

The modules and names are those of onnxruntime.quantization 1.28 to 1.32. What quantizes is ours,
and translates its arguments into a ``QConfig``; what holds data, prepares models or compares them
is handed through from the installed onnxruntime.
"""

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror
from quark_onnx.compat_onnxruntime.quantize import quantize as quantize
from quark_onnx.compat_onnxruntime.quantize import quantize_dynamic as quantize_dynamic
from quark_onnx.compat_onnxruntime.quantize import quantize_static as quantize_static
from quark_onnx.compat_onnxruntime.quantizers import QDQQuantizer as QDQQuantizer

_theirs = Mirror("")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]
