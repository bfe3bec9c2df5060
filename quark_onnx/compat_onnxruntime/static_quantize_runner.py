"""onnxruntime's command line for static quantization, which calls our quantizer."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from quark_onnx.compat_onnxruntime.mirror import Mirror
from quark_onnx.compat_onnxruntime.quantize import quantize

_theirs = Mirror("static_quantize_runner")


def main() -> None:
    """Read the command line as onnxruntime does, and quantize."""
    theirs = _theirs.load()
    # the same function, for which the name ``quantize`` stands for ours
    FunctionType(theirs.main.__code__, {**vars(theirs), "quantize": quantize})()


def __getattr__(name: str) -> Any:
    return _theirs(name)


def __dir__() -> list[str]:
    return [*globals(), *_theirs.names()]


if __name__ == "__main__":
    main()
