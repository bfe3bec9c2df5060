"""Replacement for ``onnxruntime.quantization``, with this package's quantization.

A script changes the package name alone. The modules and names are those of onnxruntime.quantization
1.28 to 1.32. Quantizers are this package's own and translate their arguments into a ``QConfig``.
Modules that hold data, prepare models or compare them come from the installed onnxruntime.
"""

from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror
from quark_onnx.compat_onnxruntime.quantize import quantize as quantize
from quark_onnx.compat_onnxruntime.quantize import quantize_dynamic as quantize_dynamic
from quark_onnx.compat_onnxruntime.quantize import quantize_static as quantize_static
from quark_onnx.compat_onnxruntime.quantizers import QDQQuantizer as QDQQuantizer

# Names that are imported above hide onnxruntime's: __getattr__ is asked for missing names alone
# (PEP 562).
_theirs = Mirror("")


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    # dir() shows both, as a script cannot tell where a name comes from.
    return [*globals(), *_theirs.names()]
