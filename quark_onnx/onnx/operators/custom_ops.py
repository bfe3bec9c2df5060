"""get_library_path: library of operators for inference scripts that register one."""

from __future__ import annotations

from calibrators.onnx_runtime.extensions import library
from quark_onnx.onnx.quant_utils import COP_DOMAIN as _COP_DOMAIN
from quark_onnx.onnx.quant_utils import COP_VERSION as _COP_VERSION

__all__ = ["_COP_DOMAIN", "_COP_VERSION", "get_library_path"]


def get_library_path(device: str = "CPU") -> str:
    """Return a library for ``SessionOptions.register_custom_ops_library``.

    Models of this package need no library: AMD's operators have bodies of standard operators. The
    library of onnxruntime-extensions lets scripts run that register a library.

    Args:
        device: "CPU", "ROCM" or "CUDA"; the library is the same.
    """
    # Registering a library without a matching operator in the model is harmless.
    return library()
