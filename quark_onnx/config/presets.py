"""The presets: values that compose, not classes.

With float scales, weights have a scale for each channel, as one scale for a depthwise convolution ruins its small
channels; and they use the codes -127..127, as onnxruntime's kernels for older x86 processors add two products in 16
bits, which -128 could overflow. Eight-bit activations leave out the rarest values (percentile); sixteen bits have room
for all (minmax).
"""

from calibrators import MinMSE, Percentile
from quark_onnx.config.qconfig import QConfig
from quark_onnx.config.spec import QuantizationSpec
from quark_onnx.dtypes import INT8, UINT16
from quark_onnx.registry import PRESETS

_POW2 = QuantizationSpec(INT8, pow2=True, calibrator=MinMSE())

#: 8-bit activations with a free zero point, 8-bit symmetric weights.
A8W8 = PRESETS.add("A8W8", QConfig())
#: 8-bit signed and symmetric throughout.
S8S8 = PRESETS.add("S8S8", QConfig(QuantizationSpec(INT8, calibrator=Percentile())))
#: 16-bit activations, 8-bit weights: close to float.
A16W8 = PRESETS.add("A16W8", QConfig(QuantizationSpec(UINT16, symmetric=False)))
#: 8-bit signed codes and power-of-two scales, one for each tensor, for integer-only accelerators.
XINT8 = PRESETS.add("XINT8", QConfig(_POW2, _POW2, search=8))
