"""onnxruntime's calibration cache: tensor ranges in a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from calibrators.json_file import read_json
from calibrators.shown import clipped, short
from quark_onnx.config import TensorOverride
from quark_onnx.onnxruntime_spelling.request import CallError, Request, logger, name_of

# Suffix of a float graph output, whose name its DequantizeLinear takes over.
_INPUT = "_QuantizeLinear_Input"


def read_cache(request: Request) -> bool:
    """Read ranges from the cache of a call, and return True if a cache exists.

    Args:
        request: the call; receives the ranges.

    Raises:
        CallError: the cache is not a file.
    """
    path = request.arguments["calibration_cache_path"]
    if path is None or not Path(path).exists():
        return False
    if not Path(path).is_file():
        raise CallError(f"calibration_cache_path is not a file: {path}")
    smooth, method, ranges = _load(path)
    # SmoothQuant divides activations by factors: ranges of one model do not fit the other.
    if smooth != bool(request.options.get("SmoothQuant")):
        logger.warning(
            "%s was written with smooth_quant=%s (SmoothQuant); it is written anew",
            path,
            smooth,
        )
        return False
    if name_of(method) != name_of(request.arguments["calibrate_method"]):
        raise CallError(
            f"calibration_cache_path {path} was written by {clipped(str(method), 200)},"
            f" and calibrate_method is {request.arguments['calibrate_method']}; remove"
            " the file, or ask for the same",
        )
    for tensor, (low, high) in ranges.items():
        override = TensorOverride(tensor, keep=True)
        # An infinite value, such as a mask's, has no code: the tensor stays float.
        if np.all(np.abs((low, high)) <= np.finfo(np.float32).max):
            override = TensorOverride(tensor, low=low, high=high)
        request.tensors.append(override)
    return True


def _load(path: str | Path) -> tuple[bool, object, dict[str, tuple[float, float]]]:
    """Read a cache: whether SmoothQuant was applied, the method, and the range of each tensor.

    Raises:
        CallError: the file is no cache.
    """
    # onnxruntime's own functions read and write the file, so that both packages agree on it.
    from onnxruntime.quantization.calibrate import load_tensors_data

    remedy = "remove the file to write it anew"
    document = read_json(path, "calibration_cache_path", CallError, remedy)
    smooth = document.get("smooth_quant")
    try:
        # Values beyond float32 become infinite, which is seen where they are used.
        with np.errstate(over="ignore"):
            data = load_tensors_data(path)
        ranges = {}
        for tensor, tensor_data in data.items():
            # Scalars, or an array per channel: the override is per tensor.
            low, high = tensor_data.range_value
            ranges[str(tensor)] = (float(np.min(low)), float(np.max(high)))
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        AssertionError,
        OverflowError,
    ) as error:
        # onnxruntime has no error of its own for another structure.
        raise CallError(
            f"calibration_cache_path {path} is no calibration cache of onnxruntime, or is"
            f" damaged ({short(str(error))}); {remedy}",
        ) from error
    for tensor, (low, high) in ranges.items():
        if low > high:
            raise CallError(
                f"calibration_cache_path {path}: the range of {short(tensor)} is from {low}"
                f" to {high}; {remedy}",
            )
    return smooth is not None and smooth.boolean(), data.calibration_method, ranges


def _zero_point(
    node: NodeProto,
    constants: Mapping[str, TensorProto],
) -> NDArray[Any] | None:
    """Return the zero point of a QuantizeLinear; None if it is computed.

    An omitted one is 0 of uint8, as ONNX defines: a model may have pairs before it is quantized.
    """
    name = node.input[2] if len(node.input) > 2 else ""
    if not name:
        return np.zeros((), np.uint8)
    if name not in constants:
        return None
    return numpy_helper.to_array(constants[name])


def write_cache(
    path: str | Path,
    model: ModelProto,
    method: object,
    *,
    smooth: bool,
) -> None:
    """Write the ranges of a quantized model's activations by float tensor name.

    Args:
        path: path of the cache.
        model: the quantized model.
        method: the calibration method, as in onnxruntime.
        smooth: True if SmoothQuant was applied.
    """
    from onnxruntime.quantization.calibrate import (
        CalibrationMethod,
        TensorData,
        TensorsData,
        save_tensors_data,
    )

    # Scales and zero points are initializers; dynamic ones have no range to store.
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    ranges: dict[str, TensorData] = {}
    for node in model.graph.node:
        if (
            node.op_type != "QuantizeLinear"
            # A constant input is a weight with a Q/DQ pair.
            or node.input[0] in constants
            or node.input[1] not in constants
        ):
            continue
        # float64, so that the ends are rounded to float32 once.
        scale = numpy_helper.to_array(constants[node.input[1]]).astype(np.float64)
        zero = _zero_point(node, constants)
        # float8 has no integer codes, and per-channel scales are those of weights.
        if scale.size == 1 and zero is not None and zero.dtype.kind in "iu":
            codes = np.iinfo(zero.dtype)
            ends = np.array([codes.min, codes.max], np.float64)
            # The cache of onnxruntime holds ranges: the values of the least and of the greatest
            # code.
            values = (ends - zero.astype(np.float64).item()) * scale.item()
            low, high = values.astype(np.float32)
            name = node.input[0].removesuffix(_INPUT)
            ranges[name] = TensorData(lowest=low, highest=high)
    save_tensors_data(
        TensorsData(CalibrationMethod[name_of(method)], ranges),
        path,
        smooth_quant=smooth,
    )
