"""Know the inputs that operators read as shapes, scales, positions or conditions.

The ONNX schema tells most of them: an input of type int32, int64 or bool only. A table lists
control inputs that may be float.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import onnx
from onnx import TensorProto
from onnx.defs import OpSchema

from quark_onnx.graph.node import LARGEST_VERSION, Node, schema_of

_Formals = Sequence[OpSchema.FormalParameter]
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
    "DeformConv": {2},  # offsets
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
    """Return the indices of a node's control inputs, by its schema or the table.

    Args:
        node: a node of any kind; a kind without a schema or an entry in ``_TABLE`` has none.
        opset: version of the standard operator set.
    """
    indices = _control_indices(node.kind, opset, len(node.inputs))
    # An empty name is an omitted input.
    return frozenset(index for index in indices if node.inputs[index])


def has_schema(node: Node) -> bool:
    """Return whether ONNX defines the operator; of others only the input types are known."""
    return onnx.defs.has(node.op_type, node.domain) or node.kind in _TABLE


@cache
def integer_results(kind: str, opset: int) -> frozenset[int]:
    """Return the indices of the outputs that are always int32, int64 or bool.

    Args:
        kind: operator type, with the domain unless it is the standard one (``Node.kind``).
        opset: version of the standard operator set.
    """
    return _controls(_schema(kind, opset)[1])


@cache
def _control_indices(kind: str, opset: int, count: int) -> frozenset[int]:
    formal = list(_schema(kind, opset)[0])
    formal += formal[-1:] * (count - len(formal))  # the last one may be variadic
    return (_controls(formal) | _TABLE.get(kind, set())) & frozenset(range(count))


def _controls(formals: Sequence[OpSchema.FormalParameter]) -> frozenset[int]:
    """Return the indices of the parameters that take integers or conditions alone."""
    return frozenset(
        index
        for index, formal in enumerate(formals)
        if formal.types and _CONTROL_TYPE_NAMES.issuperset(formal.types)
    )


def _schema(kind: str, opset: int) -> tuple[_Formals, _Formals]:
    """Return the inputs and outputs of an operator's definition; none for unknown ones.

    Args:
        kind: operator type, with the domain unless it is the standard one.
        opset: version of the standard operator set; of other domains the newest version counts.
    """
    domain, _, op_type = kind.rpartition("::")
    # Versions of other domains have no relation to the standard opset.
    schema = schema_of(op_type, LARGEST_VERSION if domain else opset, domain)
    return ((), ()) if schema is None else (schema.inputs, schema.outputs)
