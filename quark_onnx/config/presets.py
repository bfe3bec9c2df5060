"""Define the presets as composable values.

Presets with optimizers are in ``quark_onnx.optimizers.presets``.

With float scales, weights have per-channel scales, as a per-tensor scale of a depthwise convolution
degrades its small channels; and they use the codes -127..127, symmetric around zero. Each tensor of
8-bit activations is clipped to suit the average sample (best); 16 bits can represent the full range
(minmax).
"""

from calibrators import Best, MinMSE
from quark_onnx.common.registry import DTYPES, PRESETS
from quark_onnx.config.qconfig import QConfig
from quark_onnx.config.spec import QuantizationSpec
from quark_onnx.dtypes import (
    BFLOAT16,
    FLOAT16,
    INT4,
    INT8,
    INT16,
    UINT4,
    UINT8,
    UINT16,
    DType,
    Integer,
)

_POW2 = QuantizationSpec(INT8, pow2=True, calibrator=MinMSE())

#: 8-bit activations with a free zero point, 8-bit symmetric weights.
A8W8 = PRESETS.add("A8W8", QConfig())
#: 8-bit signed and symmetric throughout.
S8S8 = PRESETS.add("S8S8", QConfig(QuantizationSpec(INT8, calibrator=Best())))
#: 16-bit activations, 8-bit weights: close to float.
A16W8 = PRESETS.add("A16W8", QConfig(QuantizationSpec(UINT16, symmetric=False)))
#: 8-bit signed codes and per-tensor power-of-two scales, for AMD's integer engine and similar ones.
XINT8 = PRESETS.add("XINT8", QConfig(_POW2, _POW2, search=8))
#: The same format. AMD's VINT8 omits the rules of the convolution engine, which a target adds here.
PRESETS.add("VINT8", XINT8)

#: 8-bit unsigned codes throughout; and 16-bit signed activations with 8-bit weights. All channels
#: of a weight have the zero point 128, as in onnxruntime's quantizer: onnxruntime has no fast
#: kernel for a depthwise convolution whose channels have different ones.
PRESETS.add("U8U8", A8W8.with_(weight=QuantizationSpec(UINT8, per_channel=True)))
PRESETS.add("S16S8", A8W8.with_(activation=QuantizationSpec(INT16)))
#: 16-bit signed codes throughout, with per-channel weights; and 8-bit ones.
PRESETS.add(
    "INT16", QConfig(QuantizationSpec(INT16), QuantizationSpec(INT16, per_channel=True))
)
PRESETS.add("INT8", S8S8)

#: Weights of 8 bits, activations float.
PRESETS.add("W8", QConfig(None, form="operators"))

#: Integers of 4 bits in blocks.
BLOCKS = QuantizationSpec(INT4, block_size=32)
#: Weights of 4 bits in blocks, activations float.
PRESETS.add("INT4", QConfig(None, BLOCKS, form="operators"))
PRESETS.add(
    "UINT4", QConfig(None, BLOCKS.with_(dtype=UINT4, symmetric=False), form="operators")
)
#: 8-bit weights; 8-bit activations with a dynamic scale.
PRESETS.add(
    "DYNAMIC",
    QConfig(QuantizationSpec(UINT8, symmetric=False, dynamic=True), form="operators"),
)


def _same_for_both(row: DType) -> QConfig:
    """Return a configuration with one format for activations and weights."""
    # The range of float16 ends at 65504, which activations may exceed.
    spec = QuantizationSpec(row, saturate=row is FLOAT16)
    return QConfig(spec, spec.with_(per_channel=row.scaled))


#: The floating and the block formats, under their customary names.
_CUSTOMARY = {"float16": "FP16", "bfloat16": "BF16"}
for _name in DTYPES:
    _row = DTYPES[_name]
    # Presets of integers are spelled out above, as their zero points and calibrators differ.
    if not isinstance(_row, Integer):
        _preset = _CUSTOMARY.get(_row.name, _row.name.upper())
        PRESETS.add(_preset, _same_for_both(_row))

#: Activations in a floating or block format, and weights in another format.
for _activation, _weight in (
    (BFLOAT16, "bfp16"),
    (BFLOAT16, "mxint8"),
    (DTYPES["mx9"], "int8"),
):
    _row = DTYPES[_weight]
    _first = _CUSTOMARY.get(_activation.name, _activation.name.upper())
    # Block formats have shared exponents in place of scales per channel.
    _spec = QuantizationSpec(_row, per_channel=_row.scaled)
    PRESETS.add(
        f"{_first}_{_weight.upper()}", QConfig(QuantizationSpec(_activation), _spec)
    )
