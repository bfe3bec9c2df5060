"""Know the inputs that operators read as shapes, scales, positions or conditions.

The ONNX schema tells most of them: an input of type int32, int64 or bool only. A table lists
control inputs that may be float.
"""

from __future__ import annotations

from functools import cache

import onnx
from onnx import TensorProto
from onnx.defs import OpSchema

from quark_onnx.graph.node import Node

#: Types of shapes, positions and conditions. Integers of 8 and 16 bits may be codes or pixels.
CONTROL_TYPES = frozenset({TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL})
_CONTROL_TYPE_NAMES = frozenset({"tensor(int32)", "tensor(int64)", "tensor(bool)"})

#: Control inputs whose type may be float or any number, by operator
#: (https://onnx.ai/onnx/operators) and index.
_TABLE = {
    "Resize": {1, 2, 3},  # roi, scales, sizes
    "Upsample": {1},  # scales
    "Range": {0, 1, 2},  # start, limit, delta
    "OneHot": {0, 1},  # indices, depth
    "NonMaxSuppression": {2, 3, 4},  # number of boxes, thresholds
    "GridSample": {1},
    "RoiAlign": {1, 2},
    "MaxRoiPool": {1},
    "Dropout": {1, 2},  # ratio, training mode
    "QuantizeLinear": {1, 2},
    "DequantizeLinear": {1, 2},
    "MelWeightMatrix": {0, 1, 2, 3, 4},
    "com.microsoft::CropAndResize": {1, 2, 3},
    "com.microsoft::GridSample": {1},
    "com.microsoft::Range": {0, 1, 2},
    "com.microsoft::QuantizeLinear": {1, 2},
    "com.microsoft::DequantizeLinear": {1, 2},
}
#: Operators whose control inputs decide the positions of values, and never their number.
KEEPS_SIZE = frozenset(
    {
        "And",
        "ArrayFeatureExtractor",
        "CumProd",
        "CumSum",
        "DeformConv",
        "DequantizeLinear",
        "Dropout",
        "Gather",
        "GatherElements",
        "GatherND",
        "GridSample",
        "Not",
        "Or",
        "QuantizeLinear",
        "ReverseSequence",
        "RoiAlign",
        "RotaryEmbedding",
        "Scatter",
        "ScatterElements",
        "ScatterND",
        "TensorScatter",
        "Trilu",
        "Where",
        "Xor",
    },
)


def control_inputs(node: Node, opset: int) -> frozenset[int]:
    """Return the indices of a node's control inputs, by its schema or the table."""
    count = len(node.inputs)
    return frozenset(
        index for index in _known(node.kind, opset, count) if node.inputs[index]
    )


def has_schema(node: Node) -> bool:
    """Return whether ONNX defines the operator; of others only the input types are known."""
    return onnx.defs.has(node.op_type, node.domain) or node.kind in _TABLE


@cache
def integer_results(kind: str, opset: int) -> frozenset[int]:
    """Return the indices of the outputs that are always int32, int64 or bool."""
    schema = _schema(kind, opset)
    if schema is None:
        return frozenset()
    return frozenset(
        index for index, formal in enumerate(schema.outputs) if _is_control(formal)
    )


@cache
def _known(kind: str, opset: int, count: int) -> frozenset[int]:
    indices = set(_TABLE.get(kind, ()))
    schema = _schema(kind, opset)
    if schema is not None and schema.inputs:
        formal = list(schema.inputs)
        formal += [formal[-1]] * (count - len(formal))  # the last one may be variadic
        indices |= {index for index in range(count) if _is_control(formal[index])}
    return frozenset(index for index in indices if index < count)


def _is_control(formal: OpSchema.FormalParameter) -> bool:
    return bool(formal.types) and _CONTROL_TYPE_NAMES.issuperset(formal.types)


def _schema(kind: str, opset: int) -> OpSchema | None:
    domain, _, op_type = kind.rpartition("::")
    try:
        if domain:
            return onnx.defs.get_schema(op_type, domain=domain)
        return onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return None
