"""Table of extra options, with defaults and effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark_onnx.common.errors import nearest
from quark_onnx.onnxruntime_spelling import options as obeyed
from quark_onnx.onnxruntime_spelling.options import Handler
from quark_onnx.onnxruntime_spelling.request import Request, flag, logger


@dataclass(frozen=True)
class Option:
    """An extra option of onnxruntime.

    Attributes:
        defaults: values without an effect.
        effect: the effect in this package, in words.
        handle: function that changes a request.
        is_flag: whether the value is True or False.
    """

    defaults: tuple[Any, ...]
    effect: str
    handle: Handler = obeyed.nothing
    is_flag: bool = False


def _flag(effect: str, handle: Handler) -> Option:
    return Option((), effect, handle, is_flag=True)


OPTIONS: dict[str, Option] = {
    "extra.Sigmoid.nnapi": _flag(
        "`TensorOverride(results, scale=1/256, zero_point=0)`", obeyed.fixed_sigmoid
    ),
    # Empty defaults: every given value reaches the handler.
    "ActivationSymmetric": _flag("`activation.symmetric`", obeyed.activation_symmetric),
    "ActivationRestrictedAsymmetric": _flag(
        '`TensorOverride("*", snapped=True)`', obeyed.restricted
    ),
    "WeightSymmetric": Option(
        (None,), "`weight.symmetric`", obeyed.weight_symmetric, is_flag=True
    ),
    "EnableSubgraph": _flag("`bodies`", obeyed.change("bodies")),
    "ForceQuantizeNoInputCheck": _flag(
        "`movers`, and `follow_inputs` without Where", obeyed.move_floats
    ),
    "MatMulConstBOnly": _flag(
        "`exclude` of products of two activations", obeyed.const_b_only
    ),
    "AddQDQPairToWeight": _flag(
        '`TensorOverride("*", stored=False)`', obeyed.everywhere(stored=False)
    ),
    "OpTypesToExcludeOutputQuantization": Option(
        (None, []),
        "`float_results`",
        obeyed.float_results,
    ),
    "DedicatedQDQPair": _flag(
        '`TensorOverride("*", dedicated=True)`', obeyed.everywhere(dedicated=True)
    ),
    "QDQOpTypePerChannelSupportToAxis": Option(
        (None, {}),
        "`TensorOverride(weights, axis=...)`",
        obeyed.channel_axes,
    ),
    "QuantizeBias": _flag("`bias`", obeyed.change("bias")),
    "UseQDQContribOps": _flag("`contrib`", obeyed.change("contrib")),
    "QDQKeepRemovableActivations": _flag("`clipping=False`", obeyed.keep_clipping),
    "QDQDisableWeightAdjustForInt32Bias": _flag(
        '`TensorOverride("*", raised=False)`; a bias that then exceeds int32 stays'
        " float instead of overflowing",
        obeyed.everywhere(raised=False),
    ),
    "BlockSize": Option((0, None), "`weight.block_size`", obeyed.blocks),
    "MinimumRealRange": Option(
        (None,),
        '`TensorOverride("*", min_range=...)`',
        obeyed.least_range,
    ),
    "TensorQuantOverrides": Option(
        (None, {}),
        "a `TensorOverride` for each tensor, two with `convert`",
        obeyed.override_tensors,
    ),
    "DefaultTensorType": Option(
        (None,),
        "float, as always; another type is refused",
        obeyed.default_type,
    ),
    "CalibTensorRangeSymmetric": _flag(
        "`activation.symmetric`", obeyed.calibration_symmetric
    ),
    # Read by ``calibrator_for``, before the table is applied.
    "CalibMovingAverage": Option((), "`MinMax(moving_average=...)`"),
    "CalibMovingAverageConstant": Option((), "`MinMax(constant=...)`"),
    "CalibPercentile": Option((), "`Percentile(percentile=...)`"),
    "CalibMaxIntermediateOutputs": Option(
        (), "always so: one sample is alive at a time"
    ),
    "CalibStridedMinMax": Option(
        (None, 0),
        "the reader is asked for ranges of so many samples",
        obeyed.strides,
    ),
    "SmoothQuant": _flag("`optimizers=(SmoothQuant(...),)`", obeyed.smooth),
    # Read by the handler of SmoothQuant.
    "SmoothQuantAlpha": Option((), "`SmoothQuant(alpha=...)`"),
    "SmoothQuantFolding": Option(
        (), "factors are folded where they can be, and inserted elsewhere"
    ),
    "DisableShapeInference": Option((), "shape inference is never fatal"),
}


def apply(request: Request) -> None:
    """Apply the extra options to a request.

    Values at their defaults are accepted. Unknown options cause a warning.

    Args:
        request: the request.

    Raises:
        CallError: an option is refused, or its value is wrong.
    """
    for name, value in request.options.items():
        if name not in OPTIONS:
            logger.warning(
                "unknown extra option %r has no effect, as in onnxruntime%s",
                name,
                nearest(str(name), OPTIONS),
            )
            continue
        option = OPTIONS[name]
        if not any(
            # Types count: 0 equals False, and would pass for it.
            value is default or (type(value) is type(default) and value == default)
            for default in option.defaults
        ):
            if option.is_flag:
                value = flag(value, f"extra option {name}")
            option.handle(request, value)


def option_table() -> str:
    """Return the table in Markdown, for the documentation."""
    rows = ["| extra option | here |", "| --- | --- |"]
    return "\n".join(
        [*rows, *(f"| {name} | {option.effect} |" for name, option in OPTIONS.items())],
    )
