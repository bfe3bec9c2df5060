"""Operators whose results hold nothing but values of their input; they inherit its scale."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule

#: Rearrangements: every value of the input appears in the result exactly once, so the scale may travel either way.
REARRANGING = frozenset(
    {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "DepthToSpace", "SpaceToDepth", "Identity"}
)

_SELECTING = frozenset({"MaxPool", "GlobalMaxPool", "Slice", "Split", "Expand", "Tile"})

#: Operators that hand the scale of their input on, at least under some of their attributes.
HANDING_ON = REARRANGING | _SELECTING | {"Gather", "Resize", "Upsample", "Pad"}


@rule(*sorted(REARRANGING | _SELECTING))
def passthrough(node: Node, plan: Plan) -> None:
    """Every float result is the same as the first input."""
    results = node.outputs[:1] if node.kind == "MaxPool" else node.outputs  # MaxPool's second result are indices
    for result in results:
        plan.same_as(node, result, node.inputs[0])


@rule("Gather")
def gather(node: Node, plan: Plan) -> None:
    """A selection of the rows of a tensor, or of a constant table, which is then quantized like an activation.

    Where activations stay float, a table is a weight if its codes can be gathered: dequantizing all of it at each run
    to pick a few rows would cost more than it saves.
    """
    table = node.inputs[0]
    if plan.graph.is_constant(table) and plan.fuses and not plan.static(node) and node.attribute("axis", 0) == 0:
        shape = plan.graph.shape(table) or ()
        if len(shape) == 2:
            plan.weight(node, table, axis=0, along=1)
        return
    if plan.graph.is_constant(table):
        plan.activation(node, table)
    plan.same_as(node, node.outputs[0], table)


@rule("Resize", "Upsample")
def resize(node: Node, plan: Plan) -> None:
    """Nearest and linear interpolation stay within the input's range; cubic interpolation and extrapolation leave it.

    onnxruntime has no integer cubic resize, and refuses the Q/DQ pairs around one that it moves to another layout.
    """
    if node.attribute("mode", "nearest") == "cubic":
        plan.keep_node(node, "onnxruntime has no integer cubic interpolation")
    elif node.attribute("extrapolation_value", 0.0) != 0.0:
        plan.activation(node, node.inputs[0], node.outputs[0])
    else:
        plan.same_as(node, node.outputs[0], node.inputs[0])
