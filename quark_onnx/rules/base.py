"""The contract of a rule, and the families of operators that several files speak of."""

from __future__ import annotations

from collections.abc import Callable

from quark_onnx.graph import Graph, Node
from quark_onnx.plan import Plan
from quark_onnx.registry import RULES

#: A rule reads the node and writes to the plan, nothing else.
Rule = Callable[[Node, Plan], None]

#: Operators that multiply by weights; what they read is worth being quantized, whatever it cost to join it.
WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

#: Operators that normalize a residual stream, whose few outlier channels are many times larger than the rest.
NORMALIZING = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
RESIDUAL = "the residual stream around a layer normalization is too wide for 8 bits"


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Decorator: registers a rule for operator types."""
    return RULES.register(*op_types)


def control(graph: Graph, tensor: str) -> bool:
    """Whether a float tensor is computed from integers and booleans alone: a mask, a position, a size.

    Such tensors steer; they do not carry the signal. Calibration data often shows only one of their values (a mask of
    all ones), so that their range cannot be measured.
    """
    producer = graph.producer(tensor)
    if producer is None or producer.kind not in _STEERING:
        return False
    todo, seen = [producer], {producer}
    found = False
    while todo:
        node = todo.pop()
        if node.kind not in _STEERING:
            return False
        for name in node.inputs:
            if not name or graph.is_constant(name):
                continue
            before = graph.producer(name)
            if graph.elem_type(name) not in _FLOATS:
                found = True  # an integer or a boolean: what lies behind it does not matter
            elif before is None:
                return False  # a float input of the model
            elif before not in seen:
                seen.add(before)
                todo.append(before)
    return found


_FLOATS = frozenset({0, 1, 10, 11, 16})  # undefined (taken for float), float, float16, double, bfloat16
_STEERING = frozenset(
    {
        "Cast",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "Where",
        "Expand",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
    }
    | {"Slice", "Concat", "Identity", "Tile", "Range", "ConstantOfShape", "Min", "Max", "Clip", "Flatten"}
)
