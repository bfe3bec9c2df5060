"""Import all algorithms to register them: a new algorithm is a file and a line here."""

from quark_onnx.torch.algorithms.gptq.gptq import GPTAQ, GPTQ, Qronos
from quark_onnx.torch.algorithms.hqq import HQQ
from quark_onnx.torch.algorithms.learned_rounding.autoround import SignedRounding
from quark_onnx.torch.algorithms.learned_rounding.distill import Distillation
from quark_onnx.torch.algorithms.rescaling.awq import AWQ
from quark_onnx.torch.algorithms.rescaling.clip import Clip
from quark_onnx.torch.algorithms.rescaling.smoothquant import (
    AutoSmoothQuant,
    SmoothQuant,
)
from quark_onnx.torch.algorithms.rotation.settings import Rotation

__all__ = [
    "AWQ",
    "GPTAQ",
    "GPTQ",
    "HQQ",
    "AutoSmoothQuant",
    "Clip",
    "Distillation",
    "Qronos",
    "Rotation",
    "SignedRounding",
    "SmoothQuant",
]
