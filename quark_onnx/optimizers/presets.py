"""Define presets with optimizers; others are in ``quark_onnx.config.presets``.

Rounding weights to 4 bits shifts the mean of a layer's result, and the shifts of successive layers
add up. Bias correction removes them; it is kept if held-out samples show a gain.
"""

from quark_onnx.common.registry import PRESETS
from quark_onnx.config.presets import A8W8, A16W8, BLOCKS
from quark_onnx.optimizers.bias_correction import BiasCorrection

#: 8-bit or 16-bit activations, and 4-bit weights in blocks.
A8W4 = PRESETS.add(
    "A8W4",
    A8W8.with_(weight=BLOCKS, optimizers=(BiasCorrection(),)),
)
A16W4 = PRESETS.add(
    "A16W4",
    A16W8.with_(weight=BLOCKS, optimizers=(BiasCorrection(),)),
)
