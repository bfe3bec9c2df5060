"""Scripts written for AMD Quark find every name where they look for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from quark_onnx.common.errors import ConfigError
from quark_onnx.onnx.quant_utils import (
    ExtendedQuantFormat,
    ExtendedQuantType,
    VitisQuantFormat,
)
from quark_onnx.onnx.quantization.config.custom_config import get_default_config_mapping
from tests.cases import loop_over


def words(text: str) -> list[str]:
    """Return the names in a text."""
    return text.split()


#: What ``quark.onnx`` 0.13 exports, but for classes that calibrate by themselves.
NAMES = words("""
A16W8_ADAQUANT_QCONFIG A16W8_ADAROUND_QCONFIG A16W8_QCONFIG A8W8_ADAQUANT_QCONFIG A8W8_ADAROUND_QCONFIG A8W8_QCONFIG
AdaQuantConfig AdaRoundConfig AlgoConfig AutoMixprecisionConfig AutoSearch AutoSearchPro BF16_QCONFIG BFP16 BFP16Spec
BFP16_QCONFIG BFloat16 BFloat16Spec BiasCorrectionConfig CLEConfig CachedDataReader CalibMethod CalibrationDataReader
CalibrationMethod Config DataType ExtendedCalibrationMethod ExtendedQuantFormat ExtendedQuantType Float16 Float16Spec
GPTQConfig Int16 Int16Method Int16Spec Int32 Int32Spec Int8 Int8Spec LayerWiseMethod MX4Spec MX6Spec MX9Spec
MXFP4E2M1Spec MXFP6E2M3Spec MXFP6E3M2Spec MXFP8E4M3Spec MXFP8E5M2Spec MXInt8Spec ModelQuantizer PathDataReader
PowerOfTwoMethod QConfig QLayerConfig QTensorConfig QuantFormat QuantGranularity QuantType QuantizationConfig
QuantizationMode QuarotConfig RandomDataReader ScaleType SearchSpace SmoothQuantConfig UInt16 UInt16Spec UInt32
UInt32Spec UInt8 UInt8Spec VINT8_QCONFIG VitisQuantFormat VitisQuantType XINT8_ADAQUANT_QCONFIG XINT8_ADAROUND_QCONFIG
XINT8_QCONFIG XInt8Spec _COP_DOMAIN _COP_VERSION generate_all_configs get_auto_search_config get_library_path
quantize_dynamic quantize_static
""")  # noqa: E501

#: Module paths of documented scripts, and a name that they take from there.
PATHS = {
    "quantization": "ModelQuantizer QConfig",
    "quantization.api": "ModelQuantizer",
    "quantization.auto_search": "AutoSearch AutoSearchConfig AutoSearchPro",
    "quantization.config": (
        "QConfig Config QuantizationConfig get_default_config DefaultConfigMapping"
    ),
    "quantization.config.algorithm": "AdaRoundConfig CLEConfig SmoothQuantConfig",
    "quantization.config.config": "Config QConfig QuantizationConfig",
    "quantization.config.custom_config": (
        "get_default_config XINT8_CONFIG S8S8_AAWS_ADAROUND_CONFIG"
        " INT8_TRANSFORMER_DEFAULT_CONFIG XINT8_WEIGHTSONLY_ADAROUND_CONFIG"
        " DEFAULT_ADAROUND_PARAMS XINT8_QCONFIG"
    ),
    "quantization.config.data_type": "Int8 MXInt8 parse_data_type",
    "quantization.config.spec": (
        "XInt8Spec QLayerConfig CalibMethod ScaleType QuantGranularity"
    ),
    "auto_search": "AutoSearch AutoSearchConfig",
    "calibration": "RandomDataReader PathDataReader CachedDataReader",
    "operators.custom_ops": "get_library_path _COP_DOMAIN _COP_VERSION",
    "quant_utils": "PowerOfTwoMethod VitisQuantFormat ExtendedQuantType",
}

#: The presets of ``get_default_config`` in AMD Quark 0.13.
PRESETS = words("""
A16W8 A16W8_ADAQUANT A16W8_ADAROUND A8W8 A8W8_ADAQUANT A8W8_ADAROUND BF16 BF16_ADAQUANT BF16_BFP16 BF16_MIXED_BFP16
BF16_MIXED_BFP16_ADAQUANT BF16_MIXED_MXINT8 BF16_MIXED_MXINT8_ADAQUANT BF16_MXINT8 BFP16 BFP16_ADAQUANT FP16
FP16_ADAQUANT INT16_CNN_ACCURATE INT16_CNN_DEFAULT INT16_TRANSFORMER_ACCURATE INT16_TRANSFORMER_DEFAULT
INT8_CNN_ACCURATE INT8_CNN_DEFAULT INT8_TRANSFORMER_ACCURATE INT8_TRANSFORMER_DEFAULT MATMUL_NBITS MX4 MX4_ADAQUANT
MX6 MX6_ADAQUANT MX9 MX9_ADAQUANT MX9_INT8 MXFP4E2M1 MXFP4E2M1_ADAQUANT MXFP6E2M3 MXFP6E2M3_ADAQUANT MXFP6E3M2
MXFP6E3M2_ADAQUANT MXFP8E4M3 MXFP8E4M3_ADAQUANT MXFP8E5M2 MXFP8E5M2_ADAQUANT MXINT8 MXINT8_ADAQUANT S16S16_MIXED_S8S8
S16S8_ASWS S16S8_ASWS_ADAQUANT S16S8_ASWS_ADAROUND S8S8_AAWS S8S8_AAWS_ADAQUANT S8S8_AAWS_ADAROUND U16S8_AAWS
U16S8_AAWS_ADAQUANT U16S8_AAWS_ADAROUND U8S8_AAWS U8S8_AAWS_ADAQUANT U8S8_AAWS_ADAROUND U8U8_AAWA UINT8_DYNAMIC_QUANT
VINT8 XINT8 XINT8_ADAQUANT XINT8_ADAROUND
""")  # noqa: E501


@loop_over("name", NAMES)
def test_the_package_has_every_name(name: str) -> None:
    assert hasattr(import_module("quark_onnx.onnx"), name)


@pytest.mark.parametrize("path", PATHS)
def test_every_module_path_exists(path: str) -> None:
    module = import_module(f"quark_onnx.onnx.{path}")
    assert all(hasattr(module, name) for name in PATHS[path].split())


def test_a_star_import_works() -> None:
    namespace: dict[str, object] = {}
    exec("from quark_onnx.onnx import *", namespace)
    assert set(NAMES) <= set(namespace)


def test_all_presets_are_there() -> None:
    assert sorted(get_default_config_mapping()) == sorted(PRESETS)


def test_an_unknown_preset_names_the_nearest() -> None:
    module = import_module("quark_onnx.onnx")
    with pytest.raises(ConfigError, match=r"unknown preset 'XINT'.*XINT8"):
        module.QConfig.get_default_config("XINT")
    with pytest.raises(AttributeError, match="XINT8_CONFIG"):
        import_module("quark_onnx.onnx.quantization.config.custom_config").__getattr__(
            "XINT8_CONFIGS"
        )


@pytest.mark.parametrize(
    "kind", [ExtendedQuantType, ExtendedQuantFormat, VitisQuantFormat]
)
def test_enumerations_are_read_and_written_by_name(kind: Any) -> None:
    """As those of AMD Quark: ``argparse`` takes ``from_string`` as a type, and shows bare names."""
    for member in kind:
        assert str(member) == member.name
        assert kind.from_string(member.name) is member
    with pytest.raises(ValueError, match="is none of: Q"):
        kind.from_string("int8")


@pytest.mark.parametrize("name", ["quantize_static", "quantize_dynamic"])
def test_an_unknown_argument_is_one_of_the_called_function(name: str) -> None:
    function = getattr(import_module("quark_onnx.onnx"), name)
    with pytest.raises(
        ConfigError, match=f"^{name} has no argument 'per_chanel'.*per_channel"
    ):
        function("model.onnx", per_chanel=True)
