"""Operators whose results hold nothing but values of their input; they inherit its scale."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Node
from quark_onnx.plan import Plan, looks_up
from quark_onnx.rules.base import rule

#: Rearrangements: every value of the input appears in the result exactly once, so the scale may
#: travel either way.
REARRANGING = frozenset(
    {
        "Reshape",
        "Flatten",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "DepthToSpace",
        "SpaceToDepth",
        "Identity",
    }
    | {"ReverseSequence"},
)

#: Selections, repetitions, and those that fill up with zeros, which every scale has a code for.
_SELECTING = frozenset(
    {
        "MaxPool",
        "GlobalMaxPool",
        "MaxRoiPool",
        "ReduceMax",
        "ReduceMin",
        "Slice",
        "Split",
        "Expand",
        "Tile",
        "Compress",
    }
    | {"MaxUnpool", "CenterCropPad", "Trilu", "com.microsoft::Trilu"},
)

_GATHERING = frozenset(
    {"Gather", "GatherElements", "GatherND", "com.microsoft::GatherND"},
)

#: Operators that hand the scale of their input on, at least under some of their attributes.
HANDING_ON = (
    REARRANGING
    | _SELECTING
    | _GATHERING
    | {
        "Resize",
        "Upsample",
        "Pad",
        "GridSample",
        "com.microsoft::GridSample",
        "TopK",
        "Dropout",
    }
)


@rule(*sorted(REARRANGING | _SELECTING))
def passthrough(node: Node, plan: Plan) -> None:
    """Every float result is the same as the first input."""
    results = (
        node.outputs[:1] if node.kind == "MaxPool" else node.outputs
    )  # MaxPool's second result are indices
    for result in results:
        plan.same_as(node, result, node.inputs[0])


@rule("Dropout")
def dropout(node: Node, plan: Plan) -> None:
    """The result is the same as the input, unless it is asked to train."""
    training = plan.graph.constant(node.input(2)) if node.input(2) else np.False_
    if training is None or np.any(training):
        plan.keep_node(node, "it may be asked to drop values at random")
    else:
        plan.same_as(node, node.outputs[0], node.inputs[0])


@rule(*sorted(_GATHERING))
def gather(node: Node, plan: Plan) -> None:
    """A selection of the rows of a tensor, or of a constant table, which is then quantized like an
    activation.

    Where activations stay float, a table is a weight if its codes can be gathered: dequantizing all
    of it at each run to pick a few rows would cost more than it saves. ``QConfig.embedding`` says
    how.
    """
    table = node.inputs[0]
    if plan.fuses and not plan.static(node) and looks_up(plan.graph, node):
        shape = plan.graph.shape(table) or ()
        if len(shape) == 2:
            plan.weight(node, table, axis=0, along=1)
        return
    if plan.graph.is_constant(table):
        plan.activation(node, table)
    plan.same_as(node, node.outputs[0], table)


@rule("Resize", "Upsample")
def resize(node: Node, plan: Plan) -> None:
    """The result has the input's scale, or one of its own where it is extrapolated.

    Float where it is cubic.

    onnxruntime has no integer cubic resize, and refuses the Q/DQ pairs around one that it moves to
    another layout.
    """
    if node.attribute("mode", "nearest") == "cubic":
        plan.keep_node(node, "onnxruntime has no integer cubic interpolation")
    elif node.attribute("extrapolation_value", 0.0) != 0.0:
        plan.activation(node, node.inputs[0], node.outputs[0])
    else:
        plan.same_as(node, node.outputs[0], node.inputs[0])
