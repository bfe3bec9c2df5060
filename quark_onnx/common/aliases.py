"""Modules that only pass names on: an import makes them from a table, without a file.

AMD Quark and onnxruntime have the same names under many module paths. A path that defines nothing
of its own is a row of ``ALIASES``. ``quark_onnx.onnx`` has a file, which reads its row. Type
checkers read stubs (.pyi), which ``scripts/stubs.py`` writes from the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader

_MIRROR = "quark_onnx.compat_onnxruntime"

#: Module path -> module that defines the names -> the names. All other names of a module below
#: ``compat_onnxruntime`` are those of the same module of onnxruntime.
ALIASES: dict[str, dict[str, str]] = {
    "quark_onnx.onnx": {
        "quark_onnx.onnx.auto_search": (
            "AutoSearch AutoSearchConfig AutoSearchPro SearchSpace"
            " generate_all_configs get_auto_search_config"
        ),
        "quark_onnx.onnx.calibration.data_readers": (
            "CachedDataReader PathDataReader RandomDataReader"
        ),
        "quark_onnx.onnx.operators.custom_ops": (
            "_COP_DOMAIN _COP_VERSION get_library_path"
        ),
        "quark_onnx.onnx.quant_utils": (
            "ExtendedCalibrationMethod ExtendedQuantFormat ExtendedQuantType"
            " Int16Method LayerWiseMethod PowerOfTwoMethod QuantizationMode"
            " VitisQuantFormat VitisQuantType"
        ),
        "quark_onnx.onnx.quantization.api": "ModelQuantizer",
        "quark_onnx.onnx.quantization.config.algorithm": (
            "AdaQuantConfig AdaRoundConfig AlgoConfig AutoMixprecisionConfig"
            " BiasCorrectionConfig CLEConfig GPTQConfig QuarotConfig"
            " SmoothQuantConfig"
        ),
        "quark_onnx.onnx.quantization.config.config": (
            "Config QConfig QuantizationConfig"
        ),
        "quark_onnx.onnx.quantization.config.custom_config": (
            "A8W8_ADAQUANT_QCONFIG A8W8_ADAROUND_QCONFIG A8W8_QCONFIG"
            " A16W8_ADAQUANT_QCONFIG A16W8_ADAROUND_QCONFIG A16W8_QCONFIG"
            " BF16_QCONFIG BFP16_QCONFIG VINT8_QCONFIG XINT8_ADAQUANT_QCONFIG"
            " XINT8_ADAROUND_QCONFIG XINT8_QCONFIG get_default_config"
        ),
        "quark_onnx.onnx.quantization.config.data_type": (
            "BFP16 BFloat16 DataType Float16 Int8 Int16 Int32 UInt8 UInt16 UInt32"
        ),
        "quark_onnx.onnx.quantization.config.spec": (
            "BFloat16Spec BFP16Spec CalibMethod Float16Spec Int4Spec Int8Spec"
            " Int16Spec Int32Spec MX4Spec MX6Spec MX9Spec MXFP4E2M1Spec"
            " MXFP6E2M3Spec MXFP6E3M2Spec MXFP8E4M3Spec MXFP8E5M2Spec MXInt8Spec"
            " QLayerConfig QTensorConfig QuantGranularity ScaleType UInt4Spec"
            " UInt8Spec UInt16Spec UInt32Spec XInt8Spec"
        ),
        "quark_onnx.onnx.quantize": "quantize_dynamic quantize_static",
        "quark_onnx.onnxruntime_spelling": (
            "CalibrationDataReader CalibrationMethod QuantFormat QuantType"
        ),
    },
    "quark_onnx.onnx.calibration.methods": {
        "quark_onnx.onnx.quant_utils": (
            "ExtendedCalibrationMethod Int16Method LayerWiseMethod PowerOfTwoMethod"
        ),
    },
    "quark_onnx.onnx.quantization.auto_search": {
        "quark_onnx.onnx.auto_search": (
            "AutoSearch AutoSearchConfig AutoSearchPro SearchSpace generate_all_configs"
            " get_auto_search_config"
        ),
    },
    "quark_onnx.onnx.quantization.auto_search.auto_search_pro": {
        "quark_onnx.onnx.auto_search": "AutoSearchPro",
    },
    "quark_onnx.onnx.quantization.auto_search.auto_search_v1": {
        "quark_onnx.onnx.auto_search": "AutoSearch AutoSearchConfig SearchSpace",
    },
    "quark_onnx.onnx.quantization.auto_search.config_generator": {
        "quark_onnx.onnx.auto_search": "generate_all_configs",
    },
    "quark_onnx.onnx.quantization.auto_search.qconfig_mapping": {
        "quark_onnx.onnx.auto_search": "get_auto_search_config",
    },
    "quark_onnx.onnx.quantization.quant_utils": {
        "quark_onnx.onnx.quant_utils": (
            "ExtendedQuantFormat ExtendedQuantType VitisQuantFormat VitisQuantType"
        ),
    },
    "quark_onnx.onnx.quantization.quantize": {
        "quark_onnx.onnx.quantize": "quantize_dynamic quantize_static",
    },
    f"{_MIRROR}.base_quantizer": {},
    f"{_MIRROR}.calibrate": {},
    f"{_MIRROR}.cuda_quantizer": {},
    f"{_MIRROR}.execution_providers": {},
    f"{_MIRROR}.execution_providers.qnn": {},
    f"{_MIRROR}.execution_providers.qnn.fusion_lpnorm": {},
    f"{_MIRROR}.execution_providers.qnn.fusion_spacetodepth": {},
    f"{_MIRROR}.execution_providers.qnn.mixed_precision_overrides_utils": {},
    f"{_MIRROR}.execution_providers.qnn.preprocess": {},
    f"{_MIRROR}.execution_providers.qnn.quant_config": {},
    f"{_MIRROR}.fusions": {},
    f"{_MIRROR}.matmul_bnb4_quantizer": {},
    f"{_MIRROR}.matmul_nbits_quantizer": {f"{_MIRROR}.weights": "MatMulNBitsQuantizer"},
    f"{_MIRROR}.onnx_model": {},
    f"{_MIRROR}.onnx_quantizer": {f"{_MIRROR}.quantizers": "ONNXQuantizer"},
    f"{_MIRROR}.preprocess": {},
    f"{_MIRROR}.qdq_loss_debug": {},
    f"{_MIRROR}.qdq_quantizer": {f"{_MIRROR}.quantizers": "QDQQuantizer"},
    f"{_MIRROR}.quant_utils": {},
    f"{_MIRROR}.registry": {},
    f"{_MIRROR}.shape_inference": {},
    f"{_MIRROR}.tensor_quant_overrides": {},
}


class SourceFinder(MetaPathFinder, InspectLoader):
    """Finder and loader of modules by their source, which ``python -m`` runs as well.

    Args:
        sources: source by the full name of the module.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table; None for others."""
        if fullname not in self.sources:
            return None
        # Command lines show the origin as the name of the program.
        return spec_from_loader(fullname, self, origin=fullname)

    def is_package(self, fullname: str) -> bool:
        """Return True if other modules of the table lie below the module."""
        return any(name.startswith(f"{fullname}.") for name in self.sources)

    def get_source(self, fullname: str) -> str:
        """Return the source of a module of the table."""
        return self.sources[fullname]


def install(sources: Mapping[str, str]) -> None:
    """Let ``import`` and ``python -m`` find modules without a file.

    Args:
        sources: source by the full name of the module.
    """
    # A package that is loaded again installs its modules once.
    for finder in sys.meta_path:
        if isinstance(finder, SourceFinder) and finder.sources == sources:
            return
    # First, as a folder that has stubs alone would be found as a namespace package.
    sys.meta_path.insert(0, SourceFinder(sources))


def imports_of(path: str) -> str:
    """Return the statements that import the names of an alias.

    Args:
        path: module path, a key of ``ALIASES``.

    >>> print(imports_of("quark_onnx.onnx.quantization.auto_search.auto_search_pro"), end="")
    from quark_onnx.onnx.auto_search import AutoSearchPro as AutoSearchPro
    """
    return "".join(
        f"from {home} import {name} as {name}\n"
        for home, names in ALIASES[path].items()
        for name in names.split()
    )
