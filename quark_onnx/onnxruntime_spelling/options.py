"""Supported extra options, and their changes to a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from onnx import TensorProto

from calibrators import CalibrationError, Calibrator, Entropy, MinMax, Percentile
from calibrators.base import is_number, is_whole
from quark_onnx.config import TensorOverride
from quark_onnx.config.checks import require, require_known
from quark_onnx.dtypes import INT8
from quark_onnx.onnxruntime_spelling.overrides import tensor_overrides
from quark_onnx.onnxruntime_spelling.request import (
    CallError,
    Request,
    Wanted,
    flag,
    logger,
    name_of,
)
from quark_onnx.optimizers import SmoothQuant
from quark_onnx.rules.base import WEIGHTED

#: Function that applies an option to a request.
Handler = Callable[[Request, Any], None]

#: Calibrator of a calibration method, and options for its settings.
_CALIBRATORS: dict[str, tuple[type[Calibrator], dict[str, str]]] = {
    "MinMax": (
        MinMax,
        {
            "CalibMovingAverage": "moving_average",
            "CalibMovingAverageConstant": "constant",
        },
    ),
    "Entropy": (Entropy, {}),
    "Percentile": (Percentile, {"CalibPercentile": "percentile"}),
    # For float8, whose scale onnxruntime derives from a distribution; the format here has its own.
    "Distribution": (MinMax, {}),
}
_OF_CALIBRATION = (
    "CalibMovingAverage",
    "CalibMovingAverageConstant",
    "CalibPercentile",
)


def calibrator_for(method: object, options: Mapping[str, Any]) -> Calibrator:
    """Return the calibrator of a method, with settings from the extra options.

    Args:
        method: the calibration method, as in onnxruntime.
        options: the extra options.

    Raises:
        CallError: the method is unknown, or a setting is wrong.
    """
    name = name_of(method)
    require_known(name, _CALIBRATORS, "unknown calibrate_method", CallError)
    calibrator, of_method = _CALIBRATORS[name]
    # onnxruntime ignores options of other methods silently.
    for option in _OF_CALIBRATION:
        if options.get(option) and option not in of_method:
            logger.warning(
                "extra option %s has no effect with calibrate_method %s",
                option,
                name,
            )
    # None stands for onnxruntime's default, which is that of the calibrator.
    given = {
        setting: option
        for option, setting in of_method.items()
        if options.get(option) is not None
    }
    try:
        return calibrator(
            **{setting: options[option] for setting, option in given.items()},
        )
    except CalibrationError as error:
        raise CallError(
            f"extra options {', '.join(given.values())}: {error}",
        ) from error


def nothing(request: Request, value: object) -> None:
    """Accept an option that is read elsewhere or always true."""


def change(setting: str) -> Callable[[Wanted, Any], None]:
    """Return a handler that sets a setting of the configuration."""
    return lambda request, value: request.changes.update({setting: value})


def everywhere(**settings: Any) -> Callable[[Wanted, Any], None]:
    """Return a handler that adds an override of all tensors, if the option is on."""

    def handle(request: Wanted, wanted: bool) -> None:
        if wanted:
            request.tensors.append(TensorOverride("*", **settings))

    return handle


def activation_symmetric(request: Request, symmetric: bool) -> None:
    """Set symmetric codes for activations."""
    # DynamicQuantizeLinear of ONNX knows uint8 with a zero point alone.
    if not request.dynamic:
        request.activation = request.activation.with_(symmetric=symmetric)
    elif symmetric:
        logger.warning(
            "extra option ActivationSymmetric has no effect: DynamicQuantizeLinear"
            " computes zero points",
        )


def calibration_symmetric(request: Request, symmetric: bool) -> None:
    """Set symmetric codes for activations, which imply a symmetric range."""
    if symmetric:
        request.activation = request.activation.with_(symmetric=True)


def weight_symmetric(request: Request, symmetric: bool) -> None:
    """Set symmetric codes for weights; 8 and 16 bits omit the least code."""
    # As ONNX_INT_TYPE_SYMMETRIC_RANGE: 4-bit codes keep the least one.
    narrow = symmetric and request.weight.dtype.bits >= INT8.bits
    request.weight = request.weight.with_(symmetric=symmetric, narrow=narrow)


def restricted(request: Request, wanted: bool) -> None:
    """Restrict zero points of uint8 activations to the least or the middle code."""
    if wanted:
        # The least code for ranges without negative values, the middle one for all others.
        if request.activation.dtype.name == "uint8" and not request.dynamic:
            request.tensors.append(TensorOverride("*", snapped=True))
        else:
            logger.warning(
                "extra option ActivationRestrictedAsymmetric has no effect: it is for"
                " static uint8 activations",
            )


def const_b_only(request: Request, only: bool) -> None:
    """Keep products of two activations in float."""
    if request.dynamic:
        if not only:
            logger.warning(
                "extra option MatMulConstBOnly is False; products of two activations"
                " stay float all the same",
            )
        return
    if only:
        # A factor that is computed has no stored codes.
        request.exclude += [
            node.name
            for node in request.nodes_of("MatMul")
            if not request.graph.is_constant(node.input(1))
        ]


def float_results(request: Request, value: Iterable[str] | None) -> None:
    """Keep results of some operators in float unless a consumer quantizes them."""
    request.changes["float_results"] = tuple(value or ())


def keep_clipping(request: Request, keep: bool) -> None:
    """Keep Relu and Clip."""
    request.changes["clipping"] = not keep


def least_range(request: Request, value: float) -> None:
    """Set a minimum width of ranges."""
    require(
        is_number(value) and value >= 0,
        "extra option MinimumRealRange",
        value,
        "a number, 0 or more",
        CallError,
    )
    request.tensors.append(TensorOverride("*", min_range=float(value)))


def move_floats(request: Request, forced: bool) -> None:
    """Quantize Where and operators that only move values, even between float operators."""
    request.changes["movers"] = forced
    if forced:
        # Where is quantized even if no input is; Clip and Relu keep following theirs.
        following = request.changes.get("follow_inputs", ())
        request.changes["follow_inputs"] = tuple(
            kind for kind in following if kind != "Where"
        )


def blocks(request: Request, value: int) -> None:
    """Quantize weights in blocks."""
    request.weight = request.weight.with_(
        # Blocks take the place of channels, and use all codes, as 4-bit formats do.
        block_size=value,
        narrow=False,
        per_channel=False,
    )


def default_type(request: Request, value: object) -> None:
    """Check the type for tensors of unknown type; only float is supported."""
    if value not in (None, TensorProto.FLOAT):
        raise CallError(
            f"extra option DefaultTensorType is {value!r}; tensors of unknown type are"
            " taken for float, and no other type is quantized: convert the model to"
            " float32 (quark_onnx.convert)",
        )


def override_tensors(request: Request, value: object) -> None:
    """Add overrides for tensors."""
    request.tensors += tensor_overrides(request.graph, value)


def strides(request: Request, value: int) -> None:
    """Read the data in ranges of a given number of samples."""
    reader = request.data
    require(
        is_whole(value, 1),
        "extra option CalibStridedMinMax",
        value,
        "a number of samples",
        CallError,
    )
    # Both belong to the contract of onnxruntime's strided calibration.
    if not hasattr(reader, "set_range") or not hasattr(reader, "__len__"):
        raise CallError(
            "extra option CalibStridedMinMax needs a reader with __len__ and set_range",
        )
    # onnxruntime raises, too: the last range would be shorter.
    if len(reader) % value:
        raise CallError(
            f"extra option CalibStridedMinMax is {value}, of which {len(reader)}"
            " samples are no multiple",
        )
    request.data = _Strided(reader, value)


class _Strided:
    """Reader of data in ranges of samples."""

    def __init__(self, reader: Any, stride: int) -> None:
        self._reader = reader
        self._stride = stride

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self._reader), self._stride):
            self._reader.set_range(start_index=start, end_index=start + self._stride)
            while (sample := self._reader.get_next()) is not None:
                yield sample


def smooth(request: Request, wanted: bool) -> None:
    """Add SmoothQuant with its alpha; factors are folded, or also inserted."""
    if not wanted:
        return
    # Factors come from activations, which a cache of ranges does not hold.
    if request.data is None:
        raise CallError("extra option SmoothQuant needs a calibration_data_reader")
    alpha = request.options.get("SmoothQuantAlpha", 0.5)
    folding = flag(
        request.options.get("SmoothQuantFolding", True),
        "extra option SmoothQuantFolding",
    )
    if not folding:
        logger.warning(
            "extra option SmoothQuantFolding is False; factors are folded all the same"
            " where they can be",
        )
    request.changes["optimizers"] = (SmoothQuant(alpha=alpha, insert=True),)


def fixed_sigmoid(request: Request, wanted: bool) -> None:
    """Set scale 1/256 and zero point 0 for results of Sigmoid, as in NNAPI."""
    if wanted:
        # The range of a sigmoid, 0 to 1, in steps of 1/256: NNAPI fixes both numbers.
        results = [node.outputs[0] for node in request.nodes_of("Sigmoid")]
        if results:
            request.tensors.append(
                TensorOverride(results, dtype="uint8", scale=1 / 256, zero_point=0),
            )


def channel_axes(request: Request, value: Mapping[str, int]) -> None:
    """Set the channel axis of weights by operator."""
    where = "extra option QDQOpTypePerChannelSupportToAxis"
    require(isinstance(value, Mapping), where, value, "a dictionary", CallError)
    # An axis has no meaning for one scale.
    if not request.weight.per_channel:
        return
    for op_type, axis in value.items():
        for node in request.nodes_of(op_type):
            weight = node.input(1)
            # The axis is that of a stored weight; a computed one is an activation.
            if node.kind in WEIGHTED and request.graph.is_constant(weight):
                request.tensors.append(TensorOverride(weight, axis=axis))
