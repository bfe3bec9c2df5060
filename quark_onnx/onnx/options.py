"""Extra options of AMD Quark for ONNX, with their effects.

An option has one of three verdicts. Obeyed: ``apply`` changes the draft. Not needed: the effect
is automatic or has no counterpart; a warning reports a value that differs from the actual
behaviour. Refused: the result would differ from the request, and the message names an alternative.

The names, defaults and meanings are those of AMD Quark 0.8 to 0.13 (``quark.onnx``, configuration
features).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from calibrators import MinMax, Percentile
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.onnx import option_effects as effects
from quark_onnx.onnx import option_values as values
from quark_onnx.onnx.algorithm import (
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnxruntime_spelling.options import change, everywhere

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes:
        name: name of the option.
        support: obeyed, not needed or refused.
        text: the effect, the reason why it is not needed, or the alternative.
        harmless: values that agree with the actual behaviour.
        apply: function that changes the draft; None without an effect.
        kind: accepted values of an option with an effect, besides None, which means not set.
    """

    name: str
    support: Literal["obeyed", "not needed", "refused"]
    text: str
    harmless: tuple[Any, ...] = ()
    apply: effects.Apply | None = None
    kind: values.Kind | None = None


def apply_options(draft: Draft, options: Mapping[str, Any]) -> None:
    """Change a draft by the options of a script.

    Args:
        draft: the draft.
        options: the extra options.

    Raises:
        ConfigError: an option is refused, or its value is wrong.
    """
    # Kept whole: formats of single tensors read BFPAttributes and MXAttributes much later.
    draft.options = options
    # Parameters change what a choice has added: their order in the dictionary does not count.
    for name, value in sorted(options.items(), key=_is_parameter):
        row = TABLE.get(name)
        if row is None:
            logger.warning(
                "extra option %r is unknown and has no effect%s",
                name,
                nearest(name, TABLE),
            )
        elif row.apply is not None and row.kind is not None:
            _apply(row.apply, row.kind, draft, name, value)
        # Identity first: a comparison of arrays is no boolean.
        elif any(value is usual or value == usual for usual in row.harmless):
            logger.debug("extra option %s asks for what happens anyway", name)
        elif row.support == "refused":
            raise ConfigError(
                f"extra option {name}={value!r} is not supported: {row.text}",
            )
        else:
            logger.warning(
                "extra option %s=%r has no effect here: %s",
                name,
                value,
                row.text,
            )


def _apply(
    apply: effects.Apply,
    kind: values.Kind,
    draft: Draft,
    name: str,
    value: object,
) -> None:
    """Check the value of an option and change the draft.

    Raises:
        ConfigError: the value is wrong; the message names the option.
    """
    # Scripts write None for an option that is not set.
    if value is None:
        return
    kind.check(name, value)
    # Scripts write 0 and 1, too.
    if kind is values.FLAG:
        value = bool(value)
    try:
        apply(draft, value)
    except ConfigError as error:
        # Settings have other names than the options that set them.
        raise ConfigError(f"extra option {name}={short(value)}: {error}") from error


def _is_parameter(option: tuple[str, Any]) -> bool:
    """Return whether an option is a parameter; False for options that select an algorithm."""
    return option[0] not in ("UseMatMulNBits", "UseGPTQ")


def _cle(parameter: str) -> effects.Apply:
    return effects.algorithm_setter(CLEConfig, parameter)


def _obeyed(
    name: str,
    kind: values.Kind,
    apply: effects.Apply,
    text: str,
) -> Option:
    return Option(name, "obeyed", text, apply=apply, kind=kind)


def _not_needed(name: str, harmless: tuple[Any, ...], text: str) -> Option:
    return Option(name, "not needed", text, harmless)


def _refused(name: str, harmless: tuple[Any, ...], text: str) -> Option:
    return Option(name, "refused", text, harmless)


_ANY = (True, False, None)
_SHARED = "which tensors share a scale follows from the operators"
# Shared texts of many rows.
_FUSED = (
    "an activation function behind a layer that does the same as saturation gets no"
    " pair of its own"
)
_POSITIONS = "the target's constraints are met together; see the option `target`"
_APPROXIMATED = (
    "the float function is quantized; `quark-onnx npu simulate` shows what the device"
    " computes"
)
_PREPARED = "the graph is folded and cleaned, and each pass is verified by running it"
_MEMORY = "samples stream through the model and are not kept"
_PAIRS = "a tensor gets the pairs that its readers need"

ROWS: tuple[Option, ...] = (
    # What is quantized
    _obeyed(
        "InputNodes",
        values.NAMES,
        effects.names_setter("input_nodes"),
        "nodes before these stay float",
    ),
    _obeyed(
        "OutputNodes",
        values.NAMES,
        effects.names_setter("output_nodes"),
        "nodes behind these stay float",
    ),
    _obeyed("OpTypesToQuantize", values.NAMES, effects.op_types, "`op_types`"),
    _obeyed("NodesToQuantize", values.NAMES, effects.names_setter("nodes"), "`nodes`"),
    _obeyed(
        "SubgraphsToExclude",
        values.PAIRS,
        effects.subgraphs,
        "`Override(between=..., keep=True)`",
    ),
    _obeyed("WeightsOnly", values.FLAG, effects.weights_only, "`activation=None`"),
    _obeyed(
        "MatMulConstBOnly",
        values.FLAG,
        effects.setter("constant_matmul"),
        "a MatMul of two activations stays float",
    ),
    _not_needed(
        "ExtraOpTypesToQuantize",
        ([], (), None),
        "every operator that has a rule is quantized",
    ),
    _not_needed(
        "QuantizeAllOpTypes",
        _ANY,
        "every operator that has a rule is quantized",
    ),
    _obeyed(
        # Not set, it means True here, and False for AMD Quark.
        "EnableSubgraph",
        values.FLAG,
        change("bodies"),
        "`bodies`; bodies of If, Loop and Scan are quantized by default",
    ),
    _not_needed(
        # AMD Quark lets Transpose, Reshape and the like stay float behind a float input.
        "ForceQuantizeNoInputCheck",
        _ANY,
        "operators that move data take over the scale of their input",
    ),
    _obeyed(
        "OpTypesToExcludeOutputQuantization",
        values.NAMES,
        effects.float_results,
        "`float_results`",
    ),
    _obeyed(
        "NodesToExcludeOutputQuantization",
        values.NAMES,
        effects.names_setter("float_nodes"),
        "`TensorOverride(results, keep=True)`",
    ),
    _obeyed(
        "TensorQuantOverrides",
        values.BY_TENSOR,
        effects.tensor_overrides,
        "a `TensorOverride` for each tensor, two with `convert`",
    ),
    _obeyed(
        "MixedPrecisionTensor",
        values.TENSORS_BY_TYPE,
        effects.mixed_tensors,
        "`TensorOverride(tensors, dtype=...)` for each type",
    ),
    _not_needed(
        "SpecificTensorPrecision",
        _ANY,
        "MixedPrecisionTensor counts wherever it is given",
    ),
    _not_needed(
        "NodesWithMixedPrecision",
        ([], None),
        "a tensor between two formats gets the pairs that it needs",
    ),
    # Formats and scales
    _obeyed(
        "ActivationSymmetric",
        values.FLAG,
        effects.activation_symmetric,
        "`symmetric` of the activations",
    ),
    _obeyed(
        "WeightSymmetric",
        values.FLAG,
        effects.weight_symmetric,
        "`symmetric` of the weights",
    ),
    _obeyed("QuantizeBias", values.FLAG, effects.quantize_bias, "`bias`"),
    _obeyed("Int16Bias", values.FLAG, effects.int16_bias, "`bias='int16'`"),
    _obeyed("EnableNPUCnn", values.FLAG, effects.npu, "`target='npu'`"),
    _obeyed(
        "BFPAttributes",
        values.PARAMETERS,
        effects.block_attributes,
        "the formats bfp16, mx4, mx6 and mx9",
    ),
    _obeyed(
        "MXAttributes",
        values.PARAMETERS,
        effects.block_attributes,
        "the formats mxfp8e4m3, mxfp4e2m1 and their kin",
    ),
    _obeyed(
        "UseMatMulNBits",
        values.FLAG,
        effects.matmul_nbits,
        "the preset INT4, for MatMul",
    ),
    _obeyed(
        "MatMulNBitsParams",
        values.PARAMETERS,
        effects.matmul_nbits_parameters,
        "format, `block_size`, `solver` and `accuracy_level`",
    ),
    # False asks for 8-bit biases, as AMD Quark writes them for the integer engine.
    _not_needed("Int32Bias", _ANY, "biases are int32, which every target takes"),
    _not_needed(
        "AdjustBiasScale",
        (True, None),
        "a bias has the scale of input times weight",
    ),
    _not_needed(
        # Off by default in AMD Quark, where a bias overflows instead.
        "AdjustWeightScaleForInt32Bias",
        _ANY,
        "a bias that would overflow raises the scale of its weight",
    ),
    _refused(
        "Int16Scale",
        (False, None),
        "scales of the form M / 2^N are not written; use power-of-two scales",
    ),
    _not_needed("UsePowerOf2Scale", _ANY, "the specification says it"),
    _not_needed(
        "QuantizeFP16",
        _ANY,
        "a float16 model stays float16 around its integers",
    ),
    _not_needed("UseFP32Scale", _ANY, "scales have the type that the operators take"),
    _not_needed(
        "ActivationScaled",
        (False, None),
        "formats of 16 and 8 bits are cast as they are",
    ),
    _not_needed(
        "WeightScaled",
        (False, None),
        "formats of 16 and 8 bits are cast as they are",
    ),
    _not_needed(
        # The zero point of a range that starts at 0 is the least code.
        "UseUnsignedReLU",
        (False, None),
        "use an asymmetric activation format",
    ),
    _not_needed(
        "AlignEltwiseQuantType",
        _ANY,
        "a constant of Add or Mul is an activation",
    ),
    _not_needed("RefineBlockAxis", (True, None), "blocks lie along the summed axis"),
    _not_needed("BF16QDQToCast", (True, None), "bfloat16 is written as Cast"),
    _not_needed(
        # bfloat16 has the exponent of float32; rounding up the greatest values alone gives
        # infinity.
        "BF16WithClip",
        (False, None),
        "a cast to bfloat16 does not overflow where float32 is in range",
    ),
    _not_needed(
        "EnableVaimlBF16",
        (False, None),
        "bfloat16 is written as Cast; the provider makes its own of float32",
    ),
    # Calibration
    _obeyed(
        "CalibMovingAverage",
        values.FLAG,
        effects.calibrator_setter(MinMax, "moving_average"),
        "`MinMax(moving_average=...)`",
    ),
    _obeyed(
        "CalibMovingAverageConstant",
        values.FRACTION,
        effects.calibrator_setter(MinMax, "constant"),
        "`MinMax(constant=...)`",
    ),
    _obeyed(
        "Percentile",
        values.PERCENT,
        effects.calibrator_setter(Percentile, "percentile"),
        "`Percentile(percentile=...)`",
    ),
    _obeyed(
        "PercentileCandidates",
        values.NUMBERS,
        effects.percentiles,
        "`LayerwisePercentile(least, greatest, count)`",
    ),
    _obeyed(
        "WeightCalibrateMethod",
        values.METHOD,
        effects.weight_method,
        "the calibrator of the weights",
    ),
    _obeyed("CalibDataSize", values.COUNT, effects.samples, "`limit` of the reader"),
    _obeyed("UseRandomData", values.FLAG, effects.setter("random"), "`RandomData`"),
    _obeyed(
        "RandomDataReaderInputShape",
        values.SHAPES,
        effects.setter("random_shapes"),
        "`RandomData(shapes=...)`",
    ),
    _obeyed(
        "RandomDataReaderInputDataRange",
        values.RANGES,
        effects.setter("random_ranges"),
        "`RandomData(ranges=...)`",
    ),
    _obeyed(
        "SaveAndRestore",
        values.PATH,
        effects.resume,
        "`resume`, a folder of that name with the suffix .resume",
    ),
    _not_needed("TensorsRangeFile", (None,), "use SaveAndRestore"),
    _not_needed(
        "CalibTensorRangeSymmetric",
        _ANY,
        "a symmetric format makes its range symmetric",
    ),
    _not_needed(
        "LWPMetric",
        ("mae", "mse", None),
        "the percentile with the least squared error is taken",
    ),
    _not_needed("LWPUseHistogram", _ANY, "histograms are merged, and hold all samples"),
    # The value is that of AMD's power-of-two and percentile methods.
    _not_needed("NumBins", (2048, None), "the number of bins follows from the format"),
    _not_needed(
        # Of the entropy method: onnxruntime's 128 groups; here the levels of the grid.
        "NumQuantizedBins",
        (128, None),
        "the number of bins follows from the format",
    ),
    _not_needed("Scenario", ("same", None), "the Distribution method is not offered"),
    # AMD's other modes choose by the most frequent scale of a sample, or after trimming.
    _not_needed("MinMSEModePof2Scale", ("All", None), "all samples count"),
    _not_needed(
        "MinMSEModeFloatScale",
        ("All", "Percentile", None),
        "all samples count",
    ),
    _not_needed("CalibWorkerNum", (1, None), "use `executor` of quark_onnx.quantize"),
    _not_needed("CalibOptimizeMem", _ANY, _MEMORY),
    _not_needed("CalibOptimizeDisk", _ANY, _MEMORY),
    _not_needed(
        "CalibPassthroughOpTypes",
        ([], None),
        "operators that move data take over the scale of their input",
    ),
    _not_needed("SaveTensorHistFig", (False, None), "use `quark-onnx analyze --html`"),
    _not_needed("QuantizationPreference", (None,), "use `quark-onnx search`"),
    _not_needed(
        "ExecutionProviders",
        (None, [], ["CPUExecutionProvider"]),
        "calibration runs on the CPU",
    ),
    # Algorithms
    _obeyed(
        "SmoothAlpha",
        values.ALPHA,
        effects.algorithm_setter(SmoothQuantConfig, "alpha"),
        "`SmoothQuant(alpha=...)`",
    ),
    _obeyed(
        "BiasCorrection",
        values.FLAG,
        effects.algorithm_adder(BiasCorrectionConfig),
        "`BiasCorrection()`",
    ),
    _obeyed("UseGPTQ", values.FLAG, effects.algorithm_adder(GPTQConfig), "`GPTQ()`"),
    _obeyed(
        "GPTQParams",
        values.PARAMETERS,
        effects.gptq_parameters,
        "`GPTQ(...)`, and the format of the weights",
    ),
    _obeyed(
        "FastFinetune",
        values.PARAMETERS,
        effects.fast_finetune,
        "`AdaRound(...)` or `AdaQuant(...)`",
    ),
    _obeyed(
        "AutoMixprecision",
        values.PARAMETERS,
        effects.auto_mixed,
        "`AutoMixedPrecision(...)`",
    ),
    # Obeyed in name: the value reaches CLEConfig, which warns unless it is AMD's default.
    _obeyed(
        "CLESteps",
        values.INTEGER,
        _cle("cle_steps"),
        "factors of all pairs are chosen together",
    ),
    _obeyed(
        "ReplaceClip6Relu", values.FLAG, _cle("replace_relu6"), "`CLE(relu6='replace')`"
    ),
    _obeyed(
        "CLEBalanceMethod",
        values.TEXT,
        _cle("cle_balance_method"),
        "factors leave the least noise",
    ),
    _obeyed(
        "CLEWeightThreshold",
        values.NUMBER,
        _cle("cle_weight_threshold"),
        "channels of any size are equalized",
    ),
    _obeyed(
        "CLEScaleAppendBias",
        values.FLAG,
        _cle("cle_scale_append_bias"),
        "factors follow from weights and activations",
    ),
    _obeyed(
        "CLEScaleUseThreshold",
        values.FLAG,
        _cle("cle_scale_use_threshold"),
        "channels of any size are equalized",
    ),
    _obeyed(
        "CLETotalLayerDiffThreshold",
        values.NUMBER,
        _cle("cle_total_layer_diff_threshold"),
        "sweeps end by themselves",
    ),
    _obeyed(
        "RMatrixDim",
        values.INTEGER,
        effects.algorithm_setter(QuarotConfig, "r_matrix_dim"),
        "the size follows from the model",
    ),
    _obeyed(
        "UseRandomHad",
        values.FLAG,
        effects.algorithm_setter(QuarotConfig, "use_random_had"),
        "the signs are random",
    ),
    _obeyed(
        "RConfigPath",
        values.PATH,
        effects.algorithm_setter(QuarotConfig, "r_config_path"),
        "layers are found in the graph",
    ),
    # The float graph
    _obeyed(
        "ConvertFP16ToFP32",
        values.FLAG,
        effects.setter("widen"),
        "the conversion `float32`",
    ),
    _obeyed(
        "ConvertOpsetVersion",
        values.COUNT,
        effects.setter("opset"),
        "the conversion `opset`",
    ),
    _obeyed("FixShapes", values.TEXT, effects.shapes, "the conversion `fixed-shapes`"),
    _obeyed(
        "ConvertNCHWToNHWC",
        values.FLAG,
        effects.setter("channels_last"),
        "inputs and outputs of four dimensions get their channels last; data keeps the"
        " float model's layout",
    ),
    _refused(
        "PreprocessYAML",
        (None,),
        "passes are fixed; use `quark-onnx convert` before",
    ),
    _refused(
        "ShapeShifterYaml",
        (None,),
        "passes are fixed; use `quark-onnx convert` before",
    ),
    _not_needed(
        "SkipPreprocess",
        (False, None),
        "use `prepare=False` of quark_onnx.QConfig",
    ),
    # AMD Quark runs onnxslim and onnxruntime's basic optimizations here.
    _not_needed("OptimizeModel", _ANY, _PREPARED),
    _not_needed("SimplifyModel", _ANY, _PREPARED),
    _not_needed("SimplifyModelOptions", ({}, None), _PREPARED),
    *(
        _not_needed(name, _ANY, _PREPARED)
        for name in (
            "ConvertBNToConv",
            "ConvertReduceMeanToGlobalAvgPool",
            "SplitLargeKernelPool",
            "ConvertSplitToSlice",
            "FuseInstanceNorm",
            "FuseL2Norm",
            "FuseGelu",
            "FuseLayerNorm",
            "FoldBatchNorm",
            "RemoveInputInit",
            "CopySharedInit",
            "CopyBiasInit",
            "FillAllValueInfo",
        )
    ),
    _not_needed(
        # AMD Quark drops the upper bound, which changes the float function.
        "ConvertClipToRelu",
        (False, None),
        "a Clip keeps its function; its range says the same to the scale",
    ),
    *(
        _not_needed(name, _ANY, _FUSED)
        for name in (
            "FoldRelu",
            "RemoveQDQConvClip",
            "RemoveQDQConvRelu",
            "RemoveQDQConvLeakyRelu",
            "RemoveQDQConvPRelu",
        )
    ),
    *(
        _not_needed(
            name,
            (False, None, []),
            "use `Override(keep=True)` for the nodes in question",
        )
        for name in (
            "RemoveQDQConvGelu",
            "RemoveQDQMulAdd",
            "RemoveQDQInstanceNorm",
            "RemoveFusedQDQ",
            "RemoveQDQBetweenOps",
        )
    ),
    *(
        _not_needed(name, _ANY, _SHARED)
        for name in (
            "AlignConcat",
            "AlignPool",
            "AlignPad",
            "AlignSlice",
            "AlignTranspose",
            "AlignReshape",
        )
    ),
    *(
        _not_needed(name, _ANY, _PAIRS)
        for name in (
            "DedicateDQNode",
            "EnableDualQuantNodePairs",
            "UseQDQVitisCustomOps",
        )
    ),
    _obeyed(
        "AddQDQPairToWeight",
        values.FLAG,
        effects.pair_for_weights,
        '`TensorOverride("*", stored=False)`, for formats with a scale',
    ),
    _obeyed(
        "DedicatedQDQPair",
        values.FLAG,
        everywhere(dedicated=True),
        '`TensorOverride("*", dedicated=True)`',
    ),
    _obeyed("UseQDQContribOps", values.FLAG, change("contrib"), "`contrib`"),
    _not_needed(
        "QDQOpTypePerChannelSupportToAxis",
        ({}, None),
        "the channel axis follows from the operator",
    ),
    # The NPU
    *(
        _not_needed(name, _ANY, _POSITIONS)
        for name in (
            "NPULimitationCheck",
            "AdjustShiftCut",
            "AdjustShiftBias",
            "AdjustShiftRead",
            "AdjustShiftWrite",
            "AdjustHardSigmoid",
            "AdjustShiftSwish",
        )
    ),
    # AMD Quark repeats its adjustments up to five times.
    _not_needed("MaxLoopNum", (5, None), _POSITIONS),
    *(
        _not_needed(name, _ANY, _APPROXIMATED)
        for name in (
            "SimulateDPU",
            "ConvertLeakyReluToDPUVersion",
            "ConvertSigmoidToHardSigmoid",
            "ConvertHardSigmoidToDPUVersion",
            "ConvertAvgPoolToDPUVersion",
            "ConvertReduceMeanToDPUVersion",
            "ConvertClipToDPUVersion",
            "ConvertSoftmaxToDPUVersion",
            "ConvertInstanceNormToDPUVersion",
        )
    ),
    # Surroundings
    _refused(
        # A refused option would change results silently if it were ignored.
        "UserCustomOpLibPath",
        (None,),
        "calibration runs stock onnxruntime; inline the operators first",
    ),
    _refused(
        "CryptoMode",
        (False, None),
        "pass and take ModelProtos, which are never written anywhere",
    ),
    _not_needed(
        "EncryptionAlgorithm",
        (None,),
        "pass and take ModelProtos, which are never written anywhere",
    ),
    _not_needed(
        "TmpDir",
        (None,),
        "temporary files lie in the system's temporary folder",
    ),
    _not_needed("DebugMode", _ANY, "set the level of the logger quark_onnx"),
    _not_needed("PrintSummary", _ANY, "`quark_onnx.quantize` returns a report"),
    _not_needed("IgnoreWarnings", _ANY, "set the level of the logger quark_onnx"),
    _not_needed("EvalMetrics", (False, None), "use `quark_onnx.compare`"),
    _not_needed("EvalDataReader", (None,), "use `quark_onnx.compare`"),
)

#: The rows by name.
TABLE: dict[str, Option] = {row.name: row for row in ROWS}
