"""AMD Quark's names for how a PyTorch model is quantized.

Scripts written for ``quark.torch.quantization`` change the name of the package and nothing else.
"""

from quark_onnx.torch.quantization.config import config
from quark_onnx.torch.quantization.config.config import *  # noqa: F403

__all__ = config.__all__
