"""get_library_path: a library of operators for inference scripts that register one."""

from __future__ import annotations

from calibrators.onnx_runtime.extensions import library
from quark_onnx.onnx.quant_utils import COP_DOMAIN as _COP_DOMAIN
from quark_onnx.onnx.quant_utils import COP_VERSION as _COP_VERSION

__all__ = ["_COP_DOMAIN", "_COP_VERSION", "get_library_path"]


def get_library_path(device: str = "CPU") -> str:
    """Return a library that ``SessionOptions.register_custom_ops_library`` takes.

    Models that this package writes need none: the operators of AMD's domain carry bodies of
    standard operators. The library is that of onnxruntime-extensions, so that scripts which
    register one go on.

    Args:
        device: "CPU", "ROCM" or "CUDA"; the library is the same.
    """
    return library()
