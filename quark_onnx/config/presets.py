"""The presets: values that compose, not classes.

Those with optimizers stand in ``quark_onnx.optimizers.presets``.

With float scales, weights have a scale for each channel, as one scale for a depthwise convolution
ruins its small channels; and they use the codes -127..127, symmetric as the numbers are. Each
tensor of eight-bit activations is clipped as far as serves the average sample (best), or at the
rarest values where they are symmetric (percentile); sixteen bits have room for all (minmax).
"""

from calibrators import MinMSE, Percentile
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
from quark_onnx.registry import DTYPES, PRESETS

_POW2 = QuantizationSpec(INT8, pow2=True, calibrator=MinMSE())

#: 8-bit activations with a free zero point, 8-bit symmetric weights.
A8W8 = PRESETS.add("A8W8", QConfig())
#: 8-bit signed and symmetric throughout.
S8S8 = PRESETS.add("S8S8", QConfig(QuantizationSpec(INT8, calibrator=Percentile())))
#: 16-bit activations, 8-bit weights: close to float.
A16W8 = PRESETS.add("A16W8", QConfig(QuantizationSpec(UINT16, symmetric=False)))
#: 8-bit signed codes and power-of-two scales, one for each tensor, for AMD's integer engine and its
#: like.
XINT8 = PRESETS.add("XINT8", QConfig(_POW2, _POW2, search=8))
#: The same without the rules of AMD's convolution engine, which no preset but a target brings here.
PRESETS.add("VINT8", XINT8)

#: 8-bit codes with a free zero point throughout; and 16-bit signed activations beside 8-bit
#: weights.
PRESETS.add(
    "U8U8",
    A8W8.with_(weight=QuantizationSpec(UINT8, symmetric=False, per_channel=True)),
)
PRESETS.add("S16S8", A8W8.with_(activation=QuantizationSpec(INT16)))
#: 16-bit signed codes throughout, with a scale for each output channel of a weight; and 8-bit ones.
PRESETS.add(
    "INT16",
    QConfig(QuantizationSpec(INT16), QuantizationSpec(INT16, per_channel=True)),
)
PRESETS.add("INT8", S8S8)

#: Weights of 8 bits, activations float.
PRESETS.add("W8", QConfig(None, form="operators"))

#: Integers of 4 bits in blocks.
BLOCKS = QuantizationSpec(INT4, block_size=32)
#: Weights of 4 bits in blocks, activations float.
PRESETS.add("INT4", QConfig(None, BLOCKS, form="operators"))
PRESETS.add(
    "UINT4",
    QConfig(None, BLOCKS.with_(dtype=UINT4, symmetric=False), form="operators"),
)
#: Weights of 8 bits; activations of 8 bits with a scale that each run computes.
PRESETS.add(
    "DYNAMIC",
    QConfig(QuantizationSpec(UINT8, symmetric=False, dynamic=True), form="operators"),
)


def _same_for_both(row: DType) -> QConfig:
    """The same format for activations and weights."""
    spec = QuantizationSpec(
        row,
        saturate=row is FLOAT16,
    )  # whose range ends at 65504, where activations may well go
    return QConfig(spec, spec.with_(per_channel=row.scaled))


#: The floating and the block formats, under their customary names.
for _row in map(DTYPES.__getitem__, DTYPES):
    if not isinstance(_row, Integer):
        PRESETS.add(
            {"float16": "FP16", "bfloat16": "BF16"}.get(_row.name, _row.name.upper()),
            _same_for_both(_row),
        )

#: Activations in one of them and weights in another, or in integers.
for _activation, _weight in (
    (BFLOAT16, "bfp16"),
    (BFLOAT16, "mxint8"),
    (DTYPES["mx9"], "int8"),
):
    _row = DTYPES[_weight]
    _first = "BF16" if _activation is BFLOAT16 else _activation.name.upper()
    _spec = QuantizationSpec(_row, per_channel=_row.scaled)
    PRESETS.add(
        f"{_first}_{_weight.upper()}",
        QConfig(QuantizationSpec(_activation), _spec),
    )
