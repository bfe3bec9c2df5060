"""quantize_static, quantize_dynamic, and quantize with a configuration of either."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from onnx import ModelProto
from onnxruntime.quantization import DynamicQuantConfig, StaticQuantConfig
from onnxruntime.quantization.quantize import quantize_dynamic as _their_dynamic
from onnxruntime.quantization.quantize import quantize_static as _their_static

from quark_onnx.api import quantize_dynamic as _dynamic
from quark_onnx.api import quantize_static as _static
from quark_onnx.compat_onnxruntime.mirror import mirror
from quark_onnx.compat_onnxruntime.weights import MatMulNBitsQuantizer

__getattr__, __dir__ = mirror("quantize", globals())


def _like(
    function: Callable[..., Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function with the signature of the installed onnxruntime."""

    def decorate(replacement: Callable[..., None]) -> Callable[..., None]:
        # help() and inspect then show the parameters of the installed version.
        replacement.__signature__ = signature(function)  # type: ignore[attr-defined]
        return replacement

    return decorate


@_like(_their_static)
def quantize_static(*arguments: Any, **keywords: Any) -> None:
    """Quantize a model with ranges that are measured on calibration data.

    Args:
        arguments: positional arguments of onnxruntime's function.
        keywords: keyword arguments of onnxruntime's function.
    """
    _static(**_by_name(_their_static, arguments, keywords))


@_like(_their_dynamic)
def quantize_dynamic(*arguments: Any, **keywords: Any) -> None:
    """Quantize the weights of a model, and activations at runtime.

    Args:
        arguments: positional arguments of onnxruntime's function.
        keywords: keyword arguments of onnxruntime's function.
    """
    _dynamic(**_by_name(_their_dynamic, arguments, keywords))


def quantize(
    model_input: str | Path | ModelProto, model_output: str | Path, quant_config: object
) -> None:
    """Quantize a model by a configuration.

    Args:
        model_input: path of the float model, or a ModelProto.
        model_output: path of the quantized model.
        quant_config: a StaticQuantConfig, a DynamicQuantConfig, or a configuration for weights
            alone.

    Raises:
        TypeError: the configuration has another type.
    """
    # An object without attributes has no settings, and ends in the TypeError below.
    if hasattr(quant_config, "__dict__"):
        settings = dict(vars(quant_config))
    else:
        settings = {}
    if isinstance(quant_config, StaticQuantConfig):
        quantize_static(model_input, model_output, **settings)
    # Configurations inherit activation_type, which quantize_dynamic does not take.
    elif isinstance(quant_config, DynamicQuantConfig):
        settings.pop("activation_type")
        quantize_dynamic(model_input, model_output, **settings)
    # The configurations of weights have a common attribute, not a common public class.
    elif hasattr(quant_config, "algorithm"):
        if hasattr(model_input, "__fspath__"):
            model_input = str(model_input)
        quantizer = MatMulNBitsQuantizer(model_input, algo_config=quant_config)
        quantizer.process()
        # True for external data, as in onnxruntime's function.
        quantizer.model.save_model_to_file(model_output, True)
    else:
        raise TypeError(
            f"quant_config is a {type(quant_config).__name__}; it must be a"
            " StaticQuantConfig, a DynamicQuantConfig or a configuration of"
            " matmul_nbits_quantizer",
        )


def _by_name(
    function: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a call as keywords.

    The translation then checks the names.
    """
    # Positional arguments have the names of the installed version, in its order.
    names = list(signature(function).parameters)
    if len(arguments) > len(names):
        raise TypeError(
            f"{function.__name__} takes {len(names)} positional arguments, and"
            f" {len(arguments)} were given",
        )
    positional = dict(zip(names, arguments, strict=False))
    # As in a Python call, a parameter is given once.
    if twice := positional.keys() & keywords.keys():
        raise TypeError(
            f"{function.__name__} got multiple values for argument"
            f" {sorted(twice)[0]!r}",
        )
    return positional | keywords
