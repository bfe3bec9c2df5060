"""onnxruntime's command line for static quantization, with this package's quantizer."""

from __future__ import annotations

from types import FunctionType

from onnxruntime.quantization import static_quantize_runner as _theirs

from quark_onnx.compat_onnxruntime.mirror import mirror
from quark_onnx.compat_onnxruntime.quantize import quantize

__getattr__, __dir__ = mirror("static_quantize_runner", globals())


def main() -> None:
    """Parse the command line as onnxruntime does, and quantize."""
    # run onnxruntime's main with ``quantize`` bound to this package's function
    FunctionType(_theirs.main.__code__, {**vars(_theirs), "quantize": quantize})()


if __name__ == "__main__":
    main()
