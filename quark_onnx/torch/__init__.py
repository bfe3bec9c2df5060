"""The PyTorch side: quantize modules and language models, and write checkpoints that runtimes load.

``NATIVE`` lists the names of this package. ``AMD_QUARK`` lists those of ``quark.torch``: scripts
written for it change the name of the package and nothing else. A name is imported at its first use,
so that importing this package loads no torch. Type checkers read the stub, which
``scripts/stubs.py`` writes from both tables.
"""

from importlib import import_module
from typing import Any

from quark_onnx.common.aliases import ALIASES, imports_of, install
from quark_onnx.common.errors import nearest

#: Names of this package: name -> (module below ``quark_onnx.torch``, name there).
NATIVE = {
    # configurations
    "TorchConfig": ("config.torch_config", "TorchConfig"),
    "LayerSpec": ("config.spec", "LayerSpec"),
    "TensorSpec": ("config.spec", "TensorSpec"),
    "KVCache": ("config.torch_config", "KVCache"),
    "Attention": ("config.torch_config", "Attention"),
    "scheme": ("config.schemes", "scheme"),
    "config_for": ("config.language", "config_for"),
    # algorithms
    "AWQ": ("algorithms.registered", "AWQ"),
    "AutoSmoothQuant": ("algorithms.registered", "AutoSmoothQuant"),
    "Clip": ("algorithms.registered", "Clip"),
    "Distillation": ("algorithms.registered", "Distillation"),
    "GPTAQ": ("algorithms.registered", "GPTAQ"),
    "GPTQ": ("algorithms.registered", "GPTQ"),
    "HQQ": ("algorithms.registered", "HQQ"),
    "Qronos": ("algorithms.registered", "Qronos"),
    "Rotation": ("algorithms.registered", "Rotation"),
    "SignedRounding": ("algorithms.registered", "SignedRounding"),
    "SmoothQuant": ("algorithms.registered", "SmoothQuant"),
    # quantization
    "quantize_model": ("pipelines.in_memory", "quantize_model"),
    "quantize_graph": ("pipelines.graph.quantize_graph", "quantize_graph"),
    "quantize_checkpoint": ("pipelines.file_to_file", "quantize_checkpoint"),
    "mix": ("pipelines.mixed_precision", "mix"),
    "ptq": ("pipelines.ptq", "ptq"),
    "Text": ("pipelines.ptq", "Text"),
    "TorchReport": ("pipelines.report", "TorchReport"),
    "perplexity": ("calibration.perplexity", "perplexity"),
    # files
    "Writing": ("pipelines.file_to_file", "Writing"),
    "load_checkpoint": ("checkpoints.load", "load_checkpoint"),
    "write_checkpoint": ("checkpoints.export", "write_checkpoint"),
    "write_gguf": ("exports.gguf", "write_gguf"),
    "write_onnx": ("exports.onnx", "write_onnx"),
    "write_page": ("pipelines.ptq", "write_page"),
    "validate_checkpoint": ("validate.clients", "validate"),
    "repair_checkpoint": ("validate.repair", "repair"),
}
#: Names of AMD Quark's package ``quark.torch``, with its arguments.
AMD_QUARK = {
    "LLMTemplate": ("quantization.config.template", "LLMTemplate"),
    "ModelExporter": ("export.api", "ModelExporter"),
    "ModelImporter": ("export.api", "ModelImporter"),
    "ModelPruner": ("pruning.api", "ModelPruner"),
    "ModelQuantizer": ("quantization.api", "ModelQuantizer"),
    "QuantFlow": ("quantization.config.type", "QuantFlow"),
    "RuntimeOptions": ("quantization.config.type", "RuntimeOptions"),
    "disable_native_inference": ("quantization.api", "disable_native_inference"),
    "enable_native_inference": ("quantization.api", "enable_native_inference"),
    "export_gguf": ("export.api", "export_gguf"),
    "export_onnx": ("export.api", "export_onnx"),
    "export_safetensors": ("export.api", "export_safetensors"),
    "import_model_from_safetensors": ("export.api", "import_model_from_safetensors"),
    "load_params": ("quantization.params", "load_params"),
    "save_params": ("quantization.params", "save_params"),
}

__all__ = [*NATIVE, *AMD_QUARK]

install({path: imports_of(path) for path in ALIASES if path.startswith(f"{__name__}.")})


def __getattr__(name: str) -> Any:
    # PEP 562: called for names that the module does not have yet
    home = NATIVE.get(name) or AMD_QUARK.get(name)
    if home is None:
        raise AttributeError(f"{__name__} has no {name!r}{nearest(name, __all__)}")
    module, attribute = home
    return getattr(import_module(f"{__name__}.{module}"), attribute)
