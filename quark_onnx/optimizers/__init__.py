"""Improve quantized models: rewrites of the float graph, and choices of weights and formats."""

from quark_onnx.optimizers.absorption import BiasAbsorption
from quark_onnx.optimizers.adaquant import AdaQuant
from quark_onnx.optimizers.adaround import AdaRound
from quark_onnx.optimizers.base import (
    Adaptive,
    FloatOptimizer,
    LayerOptimizer,
    Rewrites,
    Samples,
)
from quark_onnx.optimizers.bias_correction import BiasCorrection
from quark_onnx.optimizers.by_structure import with_equalization
from quark_onnx.optimizers.cle import CLE
from quark_onnx.optimizers.dpu import DPU
from quark_onnx.optimizers.gptq import GPTQ
from quark_onnx.optimizers.mixed import AutoMixedPrecision
from quark_onnx.optimizers.presets import A8W4, A16W4
from quark_onnx.optimizers.quarot import QuaRot
from quark_onnx.optimizers.smoothquant import SmoothQuant

__all__ = [
    "A8W4",
    "A16W4",
    "CLE",
    "DPU",
    "GPTQ",
    "AdaQuant",
    "AdaRound",
    "Adaptive",
    "AutoMixedPrecision",
    "BiasAbsorption",
    "BiasCorrection",
    "FloatOptimizer",
    "LayerOptimizer",
    "QuaRot",
    "Rewrites",
    "Samples",
    "SmoothQuant",
    "with_equalization",
]
