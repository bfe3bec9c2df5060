"""Operators that Ryzen AI processors are documented to support, by number format.

The table is a prior for ``placement``. Source: documentation of Ryzen AI 1.8 (2026-07-23),
ops_support.rst; the rows are the same in every release from 1.5. "Listed" means broad coverage;
the compiler may still refuse single configurations.
"""

from __future__ import annotations

#: Release of the table, and releases with the same table.
RELEASE = "1.8"
RELEASES = ("1.5", "1.6", "1.6.1", "1.7", "1.7.1", "1.8")
SOURCE = "Ryzen AI documentation 1.8 (2026-07-23), ops_support.rst"
#: Number formats, with their letters in the table.
KINDS = {"BF16": "B", "A16W8": "6", "A8W8": "A", "XINT8": "X"}

# Letters of the formats that list the operators, as in KINDS.
_ROWS = {
    "B6AX": (
        "Add AveragePool BatchNormalization Concat Constant ConstantOfShape Conv"
        " DepthToSpace Div Expand Flatten Gemm GlobalAveragePool Identity"
        " InstanceNormalization MatMul Max MaxPool Min Mul Pad Reciprocal ReduceMax"
        " Reshape Shape Slice Sqrt Squeeze Sub Transpose Unsqueeze"
    ),
    "B6A": "ConvTranspose Sigmoid Sin",
    "B6X": "Tanh Where",
    "B6": "Exp GatherElements Split",
    "BAX": "ReduceMean ReduceMin ReduceSum Resize",
    "BX": (
        "Abs And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast"
        " Ceil CumSum Equal Erf Floor Greater Less Log Neg Or Pow Round Sign Tile"
    ),
    "B": "Einsum Gather GridSample Mod Not ScatterND Size Xor",
    "6AX": (
        "Clip DequantizeLinear Gelu GlobalMaxPool GroupNormalization LeakyRelu Relu"
        " Softmax Upsample"
    ),
    "6A": "Cos QLinearConv QuantizeLinear",
    "6X": "Elu TopK",
    "AX": "HardSwish",
    "A": "HardSigmoid QLinearMatMul",
    "X": (
        "Celu GreaterOrEqual LayerNormalization LessOrEqual Mish Range STFT Shrink"
        " Softsign ThresholdedRelu"
    ),
}
_LISTED = {name: letters for letters, names in _ROWS.items() for name in names.split()}
#: Operators that models of a format use on the processor although the table leaves them out: BF16
#: is shown with ResNet, BERT and Whisper, and a network with PRelu was compiled, which ran right
#: with random slopes (amd/RyzenAI-SW#390); every XINT8 model has QuantizeLinear, and the
#: converter takes the others (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03); logs of MobileNetV3
#: and ShuffleNetV2 show those of A16W8 (RyzenAI-SW quark_quantization, 2025-10-14).
_SHOWN = {
    "B": frozenset(
        {"Relu", "Clip", "Softmax", "LayerNormalization", "Gelu", "LeakyRelu", "PRelu"},
    ),
    "6": frozenset({"HardSigmoid", "ReduceMean"}),
    "X": frozenset({"QuantizeLinear", "ConvTranspose", "Split", "PRelu"}),
}

#: AMD's own runs, which name counts of operators: RyzenAI-SW, quark_quantization/models/*.log.
LOGS = "RyzenAI-SW quark_quantization logs (2025-10-14)"
ONNXSIM = "onnxsim/onnxsim#1404 (2026-09-13)"
#: Architecture and release of the measurements of a source, by the beginning of its name.
_MEASURED_ON = {
    LOGS: ("XDNA2", "1.7"),
    ONNXSIM: ("XDNA2", "1.8"),
    "XDNA1 study": ("XDNA1", "1.7.1"),
    "amd/RyzenAI-SW#343": ("XDNA2", "1.6"),
    "amd/RyzenAI-SW#401": ("XDNA2", "1.7"),
}
#: Operators of the networks that AMD's logs show on the processor as a whole: ResNet, SqueezeNet
#: in all three formats, MobileNetV3 and EfficientNet in the formats of float scales.
_IN_LOGS = frozenset(
    ["Add", "Concat", "Conv", "Flatten", "Gemm", "GlobalAveragePool", "MaxPool", "Relu"]
)
_IN_WIDER_LOGS = frozenset(["HardSigmoid", "Mul", "Sigmoid"])

_CONVERTED_NAMES = (
    "Abs Add ArgMax AveragePool BatchNormalization Cast Clip Concat Constant Conv"
    " ConvTranspose DepthToSpace Div Equal Expand Flatten Gather Gemm GlobalAveragePool"
    " HardSigmoid Identity InstanceNormalization LayerNormalization LeakyRelu"
    " LpNormalization MatMul Max MaxPool Min Mul Neg Pad Pow PRelu Reciprocal ReduceMax"
    " ReduceMean ReduceMin ReduceSum Relu Reshape Resize Round Sigmoid Slice Softmax"
    " SpaceToDepth Split Sqrt Squeeze Sub Tanh Tile Transpose Unsqueeze"
    " com.microsoft::Gelu"
)
#: Operators with a rule in the converter before the compiler X1: zmaychek84/vaip,
#: to_xir_ops_pass.cpp, 2025-03.
CONVERTED = frozenset(_CONVERTED_NAMES.split())


def listed(op_type: str, kind: str) -> bool:
    """Return True if the table lists an operator for a number format.

    >>> listed("Conv", "XINT8"), listed("Sigmoid", "XINT8"), listed("Sigmoid", "A8W8")
    (True, False, True)
    """
    # Each format is one letter, so that membership in the text is membership in the row.
    return KINDS[kind] in _LISTED.get(op_type, "")


def shown(op_type: str, kind: str) -> bool:
    """Return True if an operator is known to run by a source outside the table."""
    return op_type in _SHOWN.get(KINDS[kind], ())


def evidence(op_type: str, kind: str) -> tuple[str, str]:
    """Return certainty and source of a row of the table: "measured" in logs, or "documented"."""
    wider = kind in ("A8W8", "A16W8") and op_type in _IN_WIDER_LOGS
    if wider or (kind != "BF16" and op_type in _IN_LOGS):
        return "measured", LOGS
    return "documented", SOURCE


def is_listed(op_type: str) -> bool:
    """Return whether the table lists an operator for any format."""
    return op_type in _LISTED


def measured_on(source: str) -> tuple[str, str]:
    """Return architecture and release of a source's measurements; empty if it has none.

    >>> measured_on("onnxsim/onnxsim#1404 (2026-09-13); amd/RyzenAI-SW#343")
    ('XDNA2', '1.8')
    """
    for beginning, where in _MEASURED_ON.items():
        if source.startswith(beginning):
            return where
    return "", ""
