"""Note which of onnxruntime's tests call a quantizer of this package.

``install`` wraps every quantizer. A process whose environment has ORT_REACHED writes the name of
the running test to that file at each call; pytest hands the name on in PYTEST_CURRENT_TEST, to
processes that a test starts, too.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OURS = "quark_onnx.compat_onnxruntime"
THEIRS = "onnxruntime.quantization"
#: What quantizes: module below onnxruntime.quantization, and names.
QUANTIZERS = {
    "quantize": ("quantize", "quantize_static", "quantize_dynamic"),
    "qdq_quantizer": ("QDQQuantizer",),
    "onnx_quantizer": ("ONNXQuantizer",),
    "matmul_nbits_quantizer": ("MatMulNBitsQuantizer",),
}


def handed_through() -> list[str]:
    """Return the quantizers that are onnxruntime's own under this package's name."""
    return [
        f"{holder.__name__}.{name}"
        for holder, name in _places()
        if not getattr(holder, name).__module__.startswith("quark_onnx.")
    ]


def install() -> None:
    """Wrap the quantizers, wherever this package has them."""
    for holder, name in _places():
        quantizer = getattr(holder, name)
        if isinstance(quantizer, type):
            quantizer.__init__ = _noting(quantizer.__init__)  # type: ignore[misc]
        else:
            setattr(holder, name, _noting(quantizer))


def _places() -> Iterator[tuple[Any, str]]:
    """Yield the modules that have a quantizer, and its name there."""
    package = importlib.import_module(OURS)
    for module_name, names in QUANTIZERS.items():
        # ``from package import module`` asks the package first, as scripts do.
        module = getattr(package, module_name)
        if callable(module):  # ``quantize`` is the function there
            module = importlib.import_module(f"{OURS}.{module_name}")
        for name in names:
            yield module, name
            if name in vars(package):
                yield package, name


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        with Path(os.environ["ORT_REACHED"]).open("a", encoding="utf-8") as notes:
            notes.write(f"{test}\n")
        return function(*arguments, **keywords)

    return call


def names() -> Iterator[tuple[str, int, int, list[str]]]:
    """Yield each module of onnxruntime.quantization with its number of public names.

    Yields:
        The module, the number of public names, how many of them this package defines itself, and
        the names that are missing.
    """
    mirror = importlib.import_module(f"{OURS}.mirror")
    for module_name in ["", *mirror.their_modules()]:
        suffix = f".{module_name}" if module_name else ""
        try:
            theirs = importlib.import_module(f"{THEIRS}{suffix}")
        except ImportError:  # a module that needs what is not installed
            continue
        ours = importlib.import_module(f"{OURS}{suffix}")
        public = [name for name in vars(theirs) if not name.startswith("_")]
        missing = [name for name in public if not hasattr(ours, name)]
        own = [
            name
            for name in public
            if str(getattr(getattr(ours, name, None), "__module__", "")).startswith(
                "quark_onnx."
            )
        ]
        yield module_name, len(public), len(own), missing
