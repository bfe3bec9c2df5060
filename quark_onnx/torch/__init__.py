"""The PyTorch side: quantize modules and language models, and write checkpoints that runtimes load.

``NATIVE`` lists the names of this package. ``AMD_QUARK`` lists those of ``quark.torch``: scripts
written for it change the name of the package and nothing else. A name is imported at its first use,
so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import nearest

if TYPE_CHECKING:
    from quark_onnx.torch.algorithms.registered import (
        AWQ,
        GPTAQ,
        GPTQ,
        HQQ,
        AutoSmoothQuant,
        Clip,
        Distillation,
        Qronos,
        Rotation,
        SignedRounding,
        SmoothQuant,
    )
    from quark_onnx.torch.calibration.perplexity import perplexity
    from quark_onnx.torch.checkpoints.export import write_checkpoint
    from quark_onnx.torch.checkpoints.load import load_checkpoint
    from quark_onnx.torch.config.language import config_for
    from quark_onnx.torch.config.schemes import scheme
    from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
    from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
    from quark_onnx.torch.export.api import (
        ModelExporter,
        ModelImporter,
        export_gguf,
        export_onnx,
        export_safetensors,
        import_model_from_safetensors,
    )
    from quark_onnx.torch.export.params import load_params, save_params
    from quark_onnx.torch.exports.gguf import write_gguf
    from quark_onnx.torch.exports.onnx import write_onnx
    from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
    from quark_onnx.torch.pipelines.graph.quantize_graph import quantize_graph
    from quark_onnx.torch.pipelines.in_memory import quantize_model
    from quark_onnx.torch.pipelines.mixed_precision import mix
    from quark_onnx.torch.pipelines.ptq import Text, ptq, write_page
    from quark_onnx.torch.pipelines.report import TorchReport
    from quark_onnx.torch.quantization.api import ModelQuantizer
    from quark_onnx.torch.quantization.config.template import LLMTemplate
    from quark_onnx.torch.quantization.config.type import QuantFlow, RuntimeOptions
    from quark_onnx.torch.validate.clients import validate as validate_checkpoint
    from quark_onnx.torch.validate.repair import repair as repair_checkpoint

#: Names of this package: name -> (module below ``quark_onnx.torch``, name there).
NATIVE = {
    # configurations
    "TorchConfig": ("config.torch_config", "TorchConfig"),
    "LayerSpec": ("config.spec", "LayerSpec"),
    "TensorSpec": ("config.spec", "TensorSpec"),
    "KVCache": ("config.torch_config", "KVCache"),
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
    "ModelQuantizer": ("quantization.api", "ModelQuantizer"),
    "QuantFlow": ("quantization.config.type", "QuantFlow"),
    "RuntimeOptions": ("quantization.config.type", "RuntimeOptions"),
    "export_gguf": ("export.api", "export_gguf"),
    "export_onnx": ("export.api", "export_onnx"),
    "export_safetensors": ("export.api", "export_safetensors"),
    "import_model_from_safetensors": ("export.api", "import_model_from_safetensors"),
    "load_params": ("export.params", "load_params"),
    "save_params": ("export.params", "save_params"),
}

__all__ = [
    "AWQ",
    "GPTAQ",
    "GPTQ",
    "HQQ",
    "AutoSmoothQuant",
    "Clip",
    "Distillation",
    "KVCache",
    "LLMTemplate",
    "LayerSpec",
    "ModelExporter",
    "ModelImporter",
    "ModelQuantizer",
    "Qronos",
    "QuantFlow",
    "Rotation",
    "RuntimeOptions",
    "SignedRounding",
    "SmoothQuant",
    "TensorSpec",
    "Text",
    "TorchConfig",
    "TorchReport",
    "config_for",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "import_model_from_safetensors",
    "load_checkpoint",
    "load_params",
    "mix",
    "perplexity",
    "ptq",
    "quantize_checkpoint",
    "quantize_graph",
    "quantize_model",
    "repair_checkpoint",
    "save_params",
    "scheme",
    "validate_checkpoint",
    "write_checkpoint",
    "write_gguf",
    "write_onnx",
    "write_page",
]


def __getattr__(name: str) -> Any:
    # PEP 562: called for names that the module does not have yet
    home = NATIVE.get(name) or AMD_QUARK.get(name)
    if home is None:
        raise AttributeError(f"{__name__} has no {name!r}{nearest(name, __all__)}")
    module, attribute = home
    return getattr(import_module(f"{__name__}.{module}"), attribute)
