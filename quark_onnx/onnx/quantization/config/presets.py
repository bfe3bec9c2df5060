"""Presets of AMD Quark for ONNX that are a QuantizationConfig, with AMD's names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from quark_onnx.config.checks import require_known
from quark_onnx.onnx.legacy import QuantizationConfig
from quark_onnx.onnx.spec import (
    BFP16Spec,
    Int8Spec,
    MXInt8Spec,
    QLayerConfig,
    QTensorConfig,
)

# Public names of AMD Quark, which scripts copy and change.
DEFAULT_ADAROUND_PARAMS: dict[str, Any] = {
    "DataSize": 1000,
    "FixedSeed": 1705472343,
    "BatchSize": 2,
    "NumIterations": 1000,
    "LearningRate": 0.1,
    "OptimAlgorithm": "adaround",
    "OptimDevice": "cpu",
    "InferDevice": "cpu",
    "EarlyStop": True,
}
DEFAULT_ADAQUANT_PARAMS: dict[str, Any] = {
    **DEFAULT_ADAROUND_PARAMS,
    "OptimAlgorithm": "adaquant",
    "LearningRate": 0.00001,
}
DEFAULT_BFP_PARAMS: dict[str, Any] = {
    "bfp_method": "to_bfp",
    "axis": 1,
    # 8 bits of the shared exponent and 8 bits of a value.
    "bit_width": 16,
    "block_size": 8,
    # 2 is half to even, 0 half away from zero, 1 half up.
    "rounding_mode": 2,
}
DEFAULT_MICROEXPONENTS_PARAMS: dict[str, Any] = {
    "bfp_method": "to_bfp_prime",
    "axis": 1,
    "bit_width": 16,
    # 16 values share an exponent of 8 bits; each pair may shift it by one bit.
    "block_size": 16,
    "sub_block_size": 2,
    "sub_block_shift_bits": 1,
    "rounding_mode": 2,
}
DEFAULT_MICROSCALING_PARAMS: dict[str, Any] = {
    "element_dtype": "int8",
    "axis": 1,
    # The block of OCP Microscaling Formats 1.0.
    "block_size": 32,
    "rounding_mode": 2,
}

# The option has no effect here; presets keep it, as ``to_dict`` shows them to scripts.
CHECKED: dict[str, Any] = {"ForceQuantizeNoInputCheck": True}
# One value in a million, where AMD's default is one in 100,000.
_RARE: dict[str, Any] = {"Percentile": 99.9999}
# No optimization of the graph, and a Q/DQ pair for each reader of a tensor.
VINT8: dict[str, Any] = {
    "OptimizeModel": False,
    "UseRandomData": True,
    "ConvertBNToConv": True,
    "ConvertSigmoidToHardSigmoid": False,
    "ConvertClipToRelu": True,
    "ConvertSplitToSlice": True,
    "SplitLargeKernelPool": False,
    "ReplaceClip6Relu": True,
    "ConvertReduceMeanToGlobalAvgPool": False,
    "RemoveQDQConvClip": False,
    "RemoveQDQConvPRelu": False,
    "RemoveQDQConvRelu": False,
    "RemoveQDQConvLeakyRelu": False,
    "Int32Bias": False,
    "DedicatedQDQPair": True,
    "QuantizeAllOpTypes": True,
}
ALIGNED: dict[str, Any] = {
    **CHECKED,
    "AlignSlice": False,
    "FoldRelu": True,
    "AlignConcat": True,
}


def _legacy(
    activation: str = "QInt8",
    weight: str = "QInt8",
    method: str = "MinMax",
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> QuantizationConfig:
    """Return a row of the table of older presets."""
    return QuantizationConfig(
        calibrate_method=method,
        activation_type=activation,
        weight_type=weight,
        extra_options=dict(options or {}),
        **settings,
    )


def _blocks(kind: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {**CHECKED, kind: dict(attributes)}


def _mx(element: str) -> dict[str, Any]:
    return _blocks(
        "MXAttributes",
        {**DEFAULT_MICROSCALING_PARAMS, "element_dtype": element},
    )


def _microexponents(bits: int) -> dict[str, Any]:
    return _blocks(
        "BFPAttributes",
        {**DEFAULT_MICROEXPONENTS_PARAMS, "bit_width": bits},
    )


def _mixed(target: QTensorConfig, **options: Any) -> dict[str, Any]:
    """Return options of a preset that lowers nodes from a wide to a narrow format."""
    # The narrow format of all tensors of a lowered node.
    layer = QLayerConfig(input_tensors=target, weight=target, bias=target)
    return {**CHECKED, "AutoMixprecision": {"TargetLayerConfig": layer}, **options}


_BFP = _blocks("BFPAttributes", DEFAULT_BFP_PARAMS)
_SYMMETRIC: dict[str, Any] = {**CHECKED, "ActivationSymmetric": True}
_MIXED_16: dict[str, Any] = {
    "Int32Bias": False,
    "WeightSymmetric": True,
    "ActivationSymmetric": False,
    **_RARE,
}
_MIXED_BF16: dict[str, Any] = {
    "QuantizeBias": False,
    "DedicateDQNode": True,
    "CalibDataSize": 1,
}

#: Presets without fine-tuning.
_PLAIN: dict[str, QuantizationConfig] = {
    "UINT8_DYNAMIC_QUANT": _legacy(weight="QUInt8", use_dynamic_quant=True),
    # uint8 with the zero point 128, where XINT8_QCONFIG has int8: the same values, shifted.
    "XINT8": _legacy("QUInt8", "QInt8", "MinMSE", _SYMMETRIC, enable_npu_cnn=True),
    "VINT8": _legacy(
        "QInt8",
        "QInt8",
        "MinMSE",
        {**VINT8, "ActivationSymmetric": True},
        optimize_model=False,
    ),
    # In the names: signed or unsigned, bits, then asymmetric or symmetric for activations and
    # weights.
    "S8S8_AAWS": _legacy("QInt8", "QInt8", "Percentile", {**CHECKED, **_RARE}),
    "U8S8_AAWS": _legacy("QUInt8", "QInt8", "Percentile", CHECKED),
    # Weights get a zero point, too: for processors that saturate sums of u8 times s8.
    "U8U8_AAWA": _legacy(
        "QUInt8",
        "QUInt8",
        "Percentile",
        {**CHECKED, "WeightSymmetric": False},
    ),
    "S16S8_ASWS": _legacy("QInt16", "QInt8", "Percentile", _SYMMETRIC),
    "U16S8_AAWS": _legacy("QUInt16", "QInt8", "Percentile", CHECKED),
    # Min-max, where A8W8_QCONFIG has the percentile 99.999.
    "A8W8": _legacy(
        "QInt8",
        "QInt8",
        "MinMax",
        {**ALIGNED, "ActivationSymmetric": True},
    ),
    "A16W8": _legacy(
        "QInt16",
        "QInt8",
        "MinMax",
        {**ALIGNED, "ActivationSymmetric": True, "AlignEltwiseQuantType": True},
    ),
    "FP16": _legacy("QFloat16", "QFloat16", options=CHECKED),
    # No ranges are measured: casts, microscaling and block formats have no calibrated scale.
    "BF16": _legacy(
        "QBFloat16",
        "QBFloat16",
        options={**CHECKED, "QuantizeAllOpTypes": True},
    ),
    "BFP16": _legacy("QBFP", "QBFP", options=_BFP),
    # Widths of a block's value with its share of the exponents: 11, 13 and 16 bits are MX4, MX6,
    # MX9.
    "MX4": _legacy("QBFP", "QBFP", options=_microexponents(11)),
    "MX6": _legacy("QBFP", "QBFP", options=_microexponents(13)),
    "MX9": _legacy("QBFP", "QBFP", options=_microexponents(16)),
    "MXFP8E5M2": _legacy("QMX", "QMX", options=_mx("fp8_e5m2")),
    "MXFP8E4M3": _legacy("QMX", "QMX", options=_mx("fp8_e4m3")),
    "MXFP6E3M2": _legacy("QMX", "QMX", options=_mx("fp6_e3m2")),
    "MXFP6E2M3": _legacy("QMX", "QMX", options=_mx("fp6_e2m3")),
    "MXFP4E2M1": _legacy("QMX", "QMX", options=_mx("fp4_e2m1")),
    "MXINT8": _legacy("QMX", "QMX", options=_mx("int8")),
    # Wide first, then nodes are lowered to the narrow format in the second half of the name.
    "S16S16_MIXED_S8S8": _legacy(
        "QInt16",
        "QInt16",
        "Percentile",
        _mixed(Int8Spec(), **_MIXED_16),
        include_auto_mp=True,
    ),
    "BF16_MIXED_BFP16": _legacy(
        "QBFloat16",
        "QBFloat16",
        options=_mixed(BFP16Spec(), **_MIXED_BF16),
        include_auto_mp=True,
    ),
    "BF16_MIXED_MXINT8": _legacy(
        "QBFloat16",
        "QBFloat16",
        options=_mixed(MXInt8Spec(), **_MIXED_BF16),
        include_auto_mp=True,
    ),
    # Activations in the first format, weights in the second one.
    "BF16_BFP16": _legacy("QBFloat16", "QBFP", options=_BFP),
    "BF16_MXINT8": _legacy("QBFloat16", "QMX", options=_mx("int8")),
    "MX9_INT8": _legacy("QBFP", "QInt8", options=_microexponents(16)),
    "INT8_CNN_DEFAULT": _legacy("QUInt8", "QInt8", options=CHECKED),
    "INT16_CNN_DEFAULT": _legacy("QUInt16", "QInt16", options=CHECKED),
    # Only MatMul and Gemm with a constant matrix, see ``enable_npu_transformer``.
    "INT8_TRANSFORMER_DEFAULT": _legacy(
        "QUInt8",
        "QInt8",
        options={"CalibMovingAverage": True},
        enable_npu_transformer=True,
    ),
    "INT16_TRANSFORMER_DEFAULT": _legacy(
        "QUInt16",
        "QInt16",
        options={"CalibMovingAverage": True},
        enable_npu_transformer=True,
    ),
    "MATMUL_NBITS": _legacy(
        options={
            "UseMatMulNBits": True,
            "MatMulNBitsParams": {
                "GroupSize": 128,
                "Symmetric": True,
                "Bits": 4,
                # 1 lets MatMulNBits compute in float32, see the operator's attribute
                # accuracy_level.
                "AccuracyLevel": 1,
            },
        },
    ),
}


def _finetuned(
    config: QuantizationConfig,
    parameters: Mapping[str, Any],
) -> QuantizationConfig:
    """Return a preset with AdaRound or AdaQuant added."""
    # Dictionaries of options are shared by rows of the table.
    result = copy.deepcopy(config)
    result.include_fast_ft = True
    result.extra_options["FastFinetune"] = dict(parameters)
    return result


#: Presets that also exist with AdaRound, and with AdaQuant.
_WITH_ADAROUND = (
    "XINT8",
    "S8S8_AAWS",
    "U8S8_AAWS",
    "S16S8_ASWS",
    "U16S8_AAWS",
    "A8W8",
    "A16W8",
)
_WITH_ADAQUANT = (
    *_WITH_ADAROUND,
    "FP16",
    "BF16",
    "BFP16",
    "MX4",
    "MX6",
    "MX9",
    "MXFP8E5M2",
    "MXFP8E4M3",
    "MXFP6E3M2",
    "MXFP6E2M3",
    "MXFP4E2M1",
    "MXINT8",
    "BF16_MIXED_BFP16",
    "BF16_MIXED_MXINT8",
)


def _accurate(activation: str, weight: str, **settings: Any) -> QuantizationConfig:
    return _finetuned(
        _legacy(activation, weight, "Percentile", {**CHECKED, **_RARE}, **settings),
        DEFAULT_ADAROUND_PARAMS,
    )


#: All presets by name.
DefaultConfigMapping: dict[str, QuantizationConfig] = {
    **_PLAIN,
    **{
        f"{name}_ADAROUND": _finetuned(_PLAIN[name], DEFAULT_ADAROUND_PARAMS)
        for name in _WITH_ADAROUND
    },
    **{
        f"{name}_ADAQUANT": _finetuned(_PLAIN[name], DEFAULT_ADAQUANT_PARAMS)
        for name in _WITH_ADAQUANT
    },
    "INT8_CNN_ACCURATE": _accurate("QUInt8", "QInt8"),
    "INT16_CNN_ACCURATE": _accurate("QUInt16", "QInt16"),
    "INT8_TRANSFORMER_ACCURATE": _accurate(
        "QUInt8",
        "QInt8",
        enable_npu_transformer=True,
    ),
    "INT16_TRANSFORMER_ACCURATE": _accurate(
        "QUInt16",
        "QInt16",
        enable_npu_transformer=True,
    ),
}


def get_default_config_mapping() -> dict[str, QuantizationConfig]:
    """Return the presets by name."""
    return DefaultConfigMapping


def get_default_config(config_name: str) -> QuantizationConfig:
    """Return a copy of the preset with a name.

    Args:
        config_name: name of the preset.

    Raises:
        ConfigError: the name is unknown; the message suggests the closest name.
    """
    require_known(config_name, DefaultConfigMapping, "unknown preset")
    # Scripts change what they get: AMD Quark's own presets change with it.
    return copy.deepcopy(DefaultConfigMapping[config_name])
