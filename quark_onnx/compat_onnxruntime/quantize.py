"""quantize_static, quantize_dynamic, and quantize with a configuration of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    DynamicQuantConfig,
    QuantFormat,
    QuantType,
    StaticQuantConfig,
)

from quark_onnx.api import quantize_dynamic as _dynamic
from quark_onnx.api import quantize_static as _static
from quark_onnx.compat_onnxruntime.mirror import mirror
from quark_onnx.compat_onnxruntime.weights import MatMulNBitsQuantizer

__getattr__, __dir__ = mirror("quantize", globals())


def quantize_static(  # noqa: PLR0913  onnxruntime's parameters
    model_input: str | Path | ModelProto,
    model_output: str | Path,
    calibration_data_reader: CalibrationDataReader | None = None,
    quant_format: QuantFormat = QuantFormat.QDQ,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: QuantType = QuantType.QInt8,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibration_providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
    calibration_cache_path: str | Path | None = None,
) -> None:
    """Quantize a model with ranges that are measured on calibration data.

    Args:
        model_input: path of the float model, or a ModelProto.
        model_output: path of the quantized model.
        calibration_data_reader: the calibration data; None if the cache has ranges.
        quant_format: Q/DQ pairs, or operators on codes.
        op_types_to_quantize: operator types to quantize; None for onnxruntime's list.
        per_channel: one scale for each output channel of a weight.
        reduce_range: weights of 7 bits.
        activation_type: number format of activations.
        weight_type: number format of weights.
        nodes_to_quantize: names of nodes to quantize; None for all.
        nodes_to_exclude: names of nodes that stay float.
        use_external_data_format: store weights in a file next to the model.
        calibrate_method: method that determines ranges.
        calibration_providers: ignored with a warning; calibration runs on the CPU.
        extra_options: further options by name; docs/from_onnxruntime.md lists them.
        calibration_cache_path: file of ranges, which is read if it exists, and written otherwise.
    """
    _static(
        model_input=model_input,
        model_output=model_output,
        calibration_data_reader=calibration_data_reader,
        quant_format=quant_format,
        op_types_to_quantize=op_types_to_quantize,
        per_channel=per_channel,
        reduce_range=reduce_range,
        activation_type=activation_type,
        weight_type=weight_type,
        nodes_to_quantize=nodes_to_quantize,
        nodes_to_exclude=nodes_to_exclude,
        use_external_data_format=use_external_data_format,
        calibrate_method=calibrate_method,
        calibration_providers=calibration_providers,
        extra_options=extra_options,
        calibration_cache_path=calibration_cache_path,
    )


def quantize_dynamic(  # noqa: PLR0913  onnxruntime's parameters
    model_input: str | Path | ModelProto,
    model_output: str | Path,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    extra_options: Mapping[str, Any] | None = None,
) -> None:
    """Quantize the weights of a model, and activations at runtime.

    Args:
        model_input: path of the float model, or a ModelProto.
        model_output: path of the quantized model.
        op_types_to_quantize: as for ``quantize_static``, as are the other arguments.
        per_channel: one scale for each output channel of a weight.
        reduce_range: weights of 7 bits.
        weight_type: number format of weights.
        nodes_to_quantize: names of nodes to quantize; None for all.
        nodes_to_exclude: names of nodes that stay float.
        use_external_data_format: store weights in a file next to the model.
        extra_options: further options by name.
    """
    _dynamic(
        model_input=model_input,
        model_output=model_output,
        op_types_to_quantize=op_types_to_quantize,
        per_channel=per_channel,
        reduce_range=reduce_range,
        weight_type=weight_type,
        nodes_to_quantize=nodes_to_quantize,
        nodes_to_exclude=nodes_to_exclude,
        use_external_data_format=use_external_data_format,
        extra_options=extra_options,
    )


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
