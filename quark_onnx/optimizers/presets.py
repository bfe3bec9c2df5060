"""Presets that come with optimizers; the others stand in ``quark_onnx.config.presets``.

Rounding weights to 4 bits moves the mean of what a layer computes, and from layer to layer the
shifts add up. Bias correction takes them back; it is kept where samples held out say that it helps.
"""

from quark_onnx.config.presets import A8W8, A16W8, BLOCKS
from quark_onnx.optimizers.bias_correction import BiasCorrection
from quark_onnx.registry import PRESETS

#: 8-bit or 16-bit activations and weights of 4 bits in blocks.
A8W4 = PRESETS.add("A8W4", A8W8.with_(weight=BLOCKS, optimizers=(BiasCorrection(),)))
A16W4 = PRESETS.add("A16W4", A16W8.with_(weight=BLOCKS, optimizers=(BiasCorrection(),)))
