"""Package configuration of Olive with the passes of this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quark_onnx.common.errors import MissingDependency

# Quantization runs on the CPU, whatever executes the result.
_EVERYWHERE = {"supported_providers": ["*"], "supported_accelerators": ["*"]}
_MODULE = "quark_onnx.olive.passes"

#: The passes by name, as a package configuration of Olive describes them.
PASSES: dict[str, dict[str, Any]] = {
    "QuarkOnnxStaticQuantization": {
        "module_path": f"{_MODULE}.QuarkOnnxStaticQuantization",
        **_EVERYWHERE,
        "supported_precisions": ["int4", "uint4", "int8", "uint8", "int16", "uint16"],
        "supported_algorithms": ["rtn"],
        "supported_quantization_encodings": ["qdq"],
        "dataset": "dataset_required",
    },
    "QuarkOnnxDynamicQuantization": {
        "module_path": f"{_MODULE}.QuarkOnnxDynamicQuantization",
        **_EVERYWHERE,
        "supported_precisions": ["int8", "uint8"],
        "supported_algorithms": ["rtn"],
        "supported_quantization_encodings": [],
        "dataset": "dataset_not_required",
    },
    "QuarkOnnxWeightOnlyQuantization": {
        "module_path": f"{_MODULE}.QuarkOnnxWeightOnlyQuantization",
        **_EVERYWHERE,
        "supported_precisions": ["int4", "uint4", "int8", "uint8"],
        "supported_algorithms": ["rtn", "gptq", "hqq"],
        "supported_quantization_encodings": ["qdq"],
        "dataset": "dataset_optional",
    },
    "QuarkOnnxQuantization": {
        "module_path": f"{_MODULE}.QuarkOnnxQuantization",
        **_EVERYWHERE,
        "supported_precisions": ["int8", "uint8", "int16", "uint16", "bf16", "fp16"],
        "supported_algorithms": ["rtn", "gptq"],
        "supported_quantization_encodings": ["qdq"],
        "dataset": "dataset_optional",
    },
}


def package_config() -> dict[str, Any]:
    """Return Olive's package configuration with the passes of this package added.

    Raises:
        MissingDependency: olive-ai is not installed.
    """
    try:
        # Imported here: the translation of parameters works without Olive.
        from olive.package_config import OlivePackageConfig
    except ImportError as error:
        raise MissingDependency(
            "the passes for Olive need olive-ai: pip install olive-ai",
        ) from error
    # Olive reads one file only: a configuration of these passes alone would hide its own passes.
    path = Path(OlivePackageConfig.get_default_config_path())
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["passes"] = {**config["passes"], **PASSES}
    return config
