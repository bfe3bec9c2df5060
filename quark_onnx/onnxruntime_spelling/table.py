"""Table of extra options, with defaults and effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark_onnx.common.errors import nearest
from quark_onnx.onnxruntime_spelling import options as obeyed
from quark_onnx.onnxruntime_spelling.options import Handler
from quark_onnx.onnxruntime_spelling.request import Request, logger


@dataclass(frozen=True)
class Option:
    """An extra option of onnxruntime.

    Attributes:
        defaults: values without an effect.
        effect: the effect in this package, in words.
        handle: function that changes a request.
    """

    defaults: tuple[Any, ...]
    effect: str
    handle: Handler = obeyed.nothing


OPTIONS: dict[str, Option] = {
    "extra.Sigmoid.nnapi": Option(
        (False,),
        "`TensorOverride(results, scale=1/256, zero_point=0)`",
        obeyed.fixed_sigmoid,
    ),
    # Empty defaults: every given value reaches the handler.
    "ActivationSymmetric": Option(
        (),
        "`activation.symmetric`",
        obeyed.activation_symmetric,
    ),
    "ActivationRestrictedAsymmetric": Option(
        (False,),
        '`TensorOverride("*", snapped=True)`',
        obeyed.restricted,
    ),
    "WeightSymmetric": Option((None,), "`weight.symmetric`", obeyed.weight_symmetric),
    "EnableSubgraph": Option((), "`bodies`", obeyed.change("EnableSubgraph", "bodies")),
    "ForceQuantizeNoInputCheck": Option(
        (),
        "`movers`, and `follow_inputs` without Where",
        obeyed.move_floats,
    ),
    "MatMulConstBOnly": Option(
        (),
        "`exclude` of products of two activations",
        obeyed.const_b_only,
    ),
    "AddQDQPairToWeight": Option(
        (False,),
        '`TensorOverride("*", stored=False)`',
        obeyed.override_all("AddQDQPairToWeight", stored=False),
    ),
    "OpTypesToExcludeOutputQuantization": Option(
        (None, []),
        "`float_results`",
        obeyed.float_results,
    ),
    "DedicatedQDQPair": Option(
        (False,),
        '`TensorOverride("*", dedicated=True)`',
        obeyed.override_all("DedicatedQDQPair", dedicated=True),
    ),
    "QDQOpTypePerChannelSupportToAxis": Option(
        (None, {}),
        "`TensorOverride(weights, axis=...)`",
        obeyed.channel_axes,
    ),
    "QuantizeBias": Option((), "`bias`", obeyed.change("QuantizeBias", "bias")),
    "UseQDQContribOps": Option(
        (), "`contrib`", obeyed.change("UseQDQContribOps", "contrib")
    ),
    "QDQKeepRemovableActivations": Option((), "`clipping=False`", obeyed.keep_clipping),
    "QDQDisableWeightAdjustForInt32Bias": Option(
        (False,),
        '`TensorOverride("*", raised=False)`; a bias that then exceeds int32 stays'
        " float instead of overflowing",
        obeyed.override_all("QDQDisableWeightAdjustForInt32Bias", raised=False),
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
    "CalibTensorRangeSymmetric": Option(
        (None,),
        "`activation.symmetric`",
        obeyed.calibration_symmetric,
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
    "SmoothQuant": Option((False,), "`optimizers=(SmoothQuant(...),)`", obeyed.smooth),
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
            option.handle(request, value)


def option_table() -> str:
    """Return the table in Markdown, for the documentation."""
    rows = ["| extra option | here |", "| --- | --- |"]
    return "\n".join(
        [*rows, *(f"| {name} | {option.effect} |" for name, option in OPTIONS.items())],
    )
