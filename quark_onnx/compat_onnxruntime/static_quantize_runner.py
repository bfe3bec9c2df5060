"""onnxruntime's command line for static quantization, with this package's quantizer."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror
from quark_onnx.compat_onnxruntime.quantize import quantize

_theirs = Mirror("static_quantize_runner")


def main() -> None:
    """Parse the command line as onnxruntime does, and quantize."""
    theirs = _theirs.load()
    # run onnxruntime's main with ``quantize`` bound to this package's function
    FunctionType(theirs.main.__code__, {**vars(theirs), "quantize": quantize})()


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]


if __name__ == "__main__":
    main()
