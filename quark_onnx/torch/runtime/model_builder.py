"""The model builder of onnxruntime-genai: whether it is installed, and which layers it supports."""

from __future__ import annotations

import re
from importlib.util import find_spec

from quark_onnx.common.errors import MissingDependency
from quark_onnx.common.extras import pip_install

#: The layers that onnxruntime-genai's model builder supports, in every decoder that it builds like
#: a Llama, and the sizes of the blocks of MatMulNBits.
LAYERS = re.compile(
    r"model\.layers\.\d+\.(self_attn\.([qkvo]|qkv)_proj|mlp\.(gate|up|down|gate_up)_proj)",
)
BLOCKS = (16, 32, 64, 128, 256)


def require_builder() -> None:
    """Raise MissingDependency if onnxruntime-genai is not installed."""
    if find_spec("onnxruntime_genai") is None:
        raise MissingDependency(
            "onnxruntime-genai is not installed, whose model builder is needed:"
            f" {pip_install('oga')}",
        )
