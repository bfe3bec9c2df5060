"""The PyTorch side: quantize modules and language models, and write checkpoints that runtimes load.

Scripts written for ``quark.torch`` change the name of the package and nothing else. Names are
loaded when they are asked for, so that a part that needs no torch does not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark_onnx.errors import nearest

if TYPE_CHECKING:
    from quark_onnx.torch.export.api import (
        ModelExporter,
        ModelImporter,
        export_gguf,
        export_onnx,
        export_safetensors,
        import_model_from_safetensors,
    )
    from quark_onnx.torch.export.params import load_params, save_params
    from quark_onnx.torch.quantization.api import ModelQuantizer
    from quark_onnx.torch.quantization.config.template import LLMTemplate
    from quark_onnx.torch.quantization.config.type import QuantFlow, RuntimeOptions

__all__ = [
    "LLMTemplate",
    "ModelExporter",
    "ModelImporter",
    "ModelQuantizer",
    "QuantFlow",
    "RuntimeOptions",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "import_model_from_safetensors",
    "load_params",
    "save_params",
]

#: Where the names are that are not in ``export.api``.
_HOMES = {
    "LLMTemplate": "quantization.config.template",
    "ModelQuantizer": "quantization.api",
    "QuantFlow": "quantization.config.type",
    "RuntimeOptions": "quantization.config.type",
    "load_params": "export.params",
    "save_params": "export.params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"{__name__} has no {name!r}{nearest(name, __all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'export.api')}"), name)
