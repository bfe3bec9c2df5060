"""Write the public names of AMD Quark, which a test compares with this package's.

    python scripts/amd_names.py

Run it where amd-quark is installed; nothing of this package is imported. The names are those of
``__all__``, and the classes and functions that a module defines.
"""

from __future__ import annotations

import importlib
import inspect
import json
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).parents[1] / "tests/quark_onnx/amd_quark/names.json"
#: Modules that documented scripts import from.
MODULES = [
    "quark.onnx",
    "quark.onnx.calibration",
    "quark.onnx.calibration.calibrate",
    "quark.onnx.calibration.data_readers",
    "quark.onnx.calibration.interface",
    "quark.onnx.calibration.methods",
    "quark.onnx.quantization",
    "quark.onnx.quantization.api",
    "quark.onnx.quantization.auto_search",
    "quark.onnx.quantization.config",
    "quark.onnx.quantization.config.config",
    "quark.onnx.quantization.config.custom_config",
    "quark.onnx.quantization.config.spec",
    "quark.onnx.quantization.quant_utils",
    "quark.onnx.quantization.quantize",
    "quark.onnx.utils.deploy_utils",
    "quark.onnx.utils.file_utils",
    "quark.onnx.utils.model_utils",
    "quark.onnx.utils.print_utils",
    "quark.onnx.utils.shapeshifter_utils",
    "quark.onnx.utils.system_utils",
    "quark.torch",
    "quark.torch.export",
    "quark.torch.export.api",
    "quark.torch.export.config.config",
    "quark.torch.pruning",
    "quark.torch.pruning.api",
    "quark.torch.quantization",
    "quark.torch.quantization.api",
    "quark.torch.quantization.config.config",
    "quark.torch.quantization.config.template",
    "quark.torch.quantization.config.type",
    "quark.torch.quantization.file2file_quantization",
    "quark.torch.quantization.nn.modules",
    "quark.torch.quantization.observer",
    "quark.torch.quantization.observer.observer",
    "quark.torch.quantization.tensor_quantize",
    "quark.torch.utils",
    "quark.torch.utils.device",
    "quark.torch.utils.llm",
]


def public_names(module_name: str) -> list[str]:
    """Return the public names of a module, without those that it lists and lacks."""
    module = importlib.import_module(module_name)
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module_name
    }
    listed = {name for name in getattr(module, "__all__", ()) if hasattr(module, name)}
    return sorted(listed | defined)


def names() -> dict[str, list[str]]:
    """Return the public names by module."""
    return {module: public_names(module) for module in MODULES}


if __name__ == "__main__":
    content = {"amd-quark": version("amd-quark"), "names": names()}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
