"""Replacement for ``onnxruntime.quantization``, with this package's quantization.

A script changes the package name alone. The modules and names are those of onnxruntime.quantization
1.28 to 1.32. Quantizers are this package's own and translate their arguments into a ``QConfig``.
Modules that hold data, prepare models or compare them come from the installed onnxruntime: they
have no file here (``quark_onnx.common.aliases``).
"""

from quark_onnx.common.aliases import install
from quark_onnx.compat_onnxruntime.mirror import mirror, mirror_sources
from quark_onnx.compat_onnxruntime.quantize import quantize as quantize
from quark_onnx.compat_onnxruntime.quantize import quantize_dynamic as quantize_dynamic
from quark_onnx.compat_onnxruntime.quantize import quantize_static as quantize_static
from quark_onnx.compat_onnxruntime.quantizers import QDQQuantizer as QDQQuantizer

install(mirror_sources())
__getattr__, __dir__ = mirror("", globals())
