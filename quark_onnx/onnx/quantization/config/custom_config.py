"""Presets of AMD Quark for ONNX, with AMD's names: the newer ones, and constants of the older."""

from __future__ import annotations

import copy
from typing import Any

from quark_onnx.common.errors import nearest
from quark_onnx.onnx.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
)
from quark_onnx.onnx.quantization.config import presets
from quark_onnx.onnx.quantization.config.config import QConfig, QuantizationConfig
from quark_onnx.onnx.spec import (
    BFloat16Spec,
    BFP16Spec,
    Int8Spec,
    Int16Spec,
    QLayerConfig,
    QTensorConfig,
    XInt8Spec,
)

DEFAULT_ADAQUANT_PARAMS = presets.DEFAULT_ADAQUANT_PARAMS
DEFAULT_ADAROUND_PARAMS = presets.DEFAULT_ADAROUND_PARAMS
DEFAULT_BFP_PARAMS = presets.DEFAULT_BFP_PARAMS
DEFAULT_MICROEXPONENTS_PARAMS = presets.DEFAULT_MICROEXPONENTS_PARAMS
DEFAULT_MICROSCALING_PARAMS = presets.DEFAULT_MICROSCALING_PARAMS
DefaultConfigMapping = presets.DefaultConfigMapping
get_default_config = presets.get_default_config
get_default_config_mapping = presets.get_default_config_mapping


def _new(
    spec: type[QTensorConfig],
    weight: type[QTensorConfig],
    *algorithms: AlgoConfig,
    **options: Any,
) -> QConfig:
    """Return a row of the newer presets."""
    layer = QLayerConfig(input_tensors=spec(), weight=weight())
    return QConfig(layer, algo_config=list(algorithms), extra_options=options)


# The newer presets have no CLE: a QConfig runs the algorithms of algo_config alone.
XINT8_QCONFIG = _new(XInt8Spec, XInt8Spec, **presets.CHECKED)
XINT8_ADAROUND_QCONFIG = _new(XInt8Spec, XInt8Spec, AdaRoundConfig(), **presets.CHECKED)
XINT8_ADAQUANT_QCONFIG = _new(XInt8Spec, XInt8Spec, AdaQuantConfig(), **presets.CHECKED)
VINT8_QCONFIG = _new(XInt8Spec, XInt8Spec, **{**presets.VINT8, "EnableNPUCnn": False})
A8W8_QCONFIG = _new(Int8Spec, Int8Spec, **presets.ALIGNED)
A8W8_ADAROUND_QCONFIG = _new(Int8Spec, Int8Spec, AdaRoundConfig(), **presets.ALIGNED)
A8W8_ADAQUANT_QCONFIG = _new(Int8Spec, Int8Spec, AdaQuantConfig(), **presets.ALIGNED)
A16W8_QCONFIG = _new(Int16Spec, Int8Spec, **presets.ALIGNED, AlignEltwiseQuantType=True)
A16W8_ADAROUND_QCONFIG = _new(
    Int16Spec,
    Int8Spec,
    AdaRoundConfig(),
    **presets.ALIGNED,
    AlignEltwiseQuantType=True,
)
A16W8_ADAQUANT_QCONFIG = _new(
    Int16Spec,
    Int8Spec,
    AdaQuantConfig(),
    **presets.ALIGNED,
    AlignEltwiseQuantType=True,
)
BF16_QCONFIG = _new(BFloat16Spec, BFloat16Spec, **presets.CHECKED)
# Without attributes, as in AMD Quark.
BFP16_QCONFIG = _new(BFP16Spec, BFP16Spec)

#: AMD's constant ``NAME_CONFIG`` of each older preset.
_CONSTANTS = {f"{name}_CONFIG": config for name, config in DefaultConfigMapping.items()}
# The only constant that is no row of the table.
XINT8_WEIGHTSONLY_ADAROUND_CONFIG = copy.deepcopy(
    DefaultConfigMapping["XINT8_ADAROUND"],
)
XINT8_WEIGHTSONLY_ADAROUND_CONFIG.extra_options["WeightsOnly"] = True


# Called for names that the module does not define (PEP 562): 65 assignments are saved.
def __getattr__(name: str) -> QuantizationConfig:
    """Return the constant of an older preset.

    Args:
        name: name of the constant.
    """
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}{nearest(name, _CONSTANTS)}",
    )
