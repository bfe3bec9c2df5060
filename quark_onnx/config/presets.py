"""The presets: values that compose, not classes.

Weights of the float-scale presets use the codes -127..127: with eight-bit activations onnxruntime's kernels for older
x86 processors add two products in 16 bits, which the code -128 could overflow.
"""

from quark_onnx.config.qconfig import QConfig
from quark_onnx.config.spec import QuantizationSpec
from quark_onnx.dtypes import INT8, UINT8, UINT16
from quark_onnx.registry import PRESETS

_W8 = QuantizationSpec(INT8, symmetric=True, narrow=True)
_POW2 = QuantizationSpec(INT8, symmetric=True, pow2=True).with_(calibrator="minmse")

#: 8-bit activations with a free zero point, 8-bit symmetric weights.
A8W8 = PRESETS.add("A8W8", QConfig(QuantizationSpec(UINT8, symmetric=False), _W8))
#: 8-bit signed and symmetric throughout.
S8S8 = PRESETS.add("S8S8", QConfig(QuantizationSpec(INT8, symmetric=True), _W8))
#: 16-bit activations, 8-bit weights: close to float.
A16W8 = PRESETS.add("A16W8", QConfig(QuantizationSpec(UINT16, symmetric=False), _W8))
#: 8-bit signed codes and power-of-two scales for integer-only accelerators.
XINT8 = PRESETS.add("XINT8", QConfig(_POW2, _POW2, search=8))
