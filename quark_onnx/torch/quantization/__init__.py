"""Mirror of AMD Quark's API for the quantization of PyTorch models.

Scripts for ``quark.torch.quantization`` only change the name of the package.
"""

from quark_onnx.torch.quantization.config.config import *  # noqa: F403
from quark_onnx.torch.quantization.config.config import __all__ as __all__
