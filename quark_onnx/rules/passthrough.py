"""Plan the tensors of operators that only move values: results share the input's scale."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Node
from quark_onnx.patterns.weight_axes import transposed_matrix
from quark_onnx.plan import PlanBuilder, looks_up
from quark_onnx.rules.base import rule

#: Rearrangements: every input value appears in the result once, so both may share either scale.
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

#: Selections, repetitions, and padding with zeros, for which every scale has a code.
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

#: onnxruntime drops equal Q/DQ pairs around these operators, also below the first opset at which
#: they take bytes, and then cannot load the model.
_EXTREMES, _BYTES_OPSET = frozenset({"ReduceMax", "ReduceMin"}), 12

#: Operators that cut parts out of their first input.
PARTING = frozenset({"Slice", "Split", "Gather", "GatherND", "GatherElements"})

_GATHERING = frozenset(
    {"Gather", "GatherElements", "GatherND", "com.microsoft::GatherND"},
)

#: Operators whose results share the scale of the input, at least for some attributes.
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
def passthrough(node: Node, plan: PlanBuilder) -> None:
    """Share the scale of the first input with every float result."""
    if node.kind in _EXTREMES and plan.graph.opset < _BYTES_OPSET:
        reason = f"{node.kind} takes no bytes below opset {_BYTES_OPSET}"
        plan.keep(node.outputs[0], reason)
        return
    # The second result of MaxPool holds indices.
    results = node.outputs[:1] if node.kind == "MaxPool" else node.outputs
    for result in results:
        if transposed_matrix(plan.graph, result) is None:
            plan.same_as(node, result, node.inputs[0])


@rule("Dropout")
def dropout(node: Node, plan: PlanBuilder) -> None:
    """Share the input's scale with the result, unless the node may run in training mode."""
    # None if computed at runtime: training mode cannot be excluded then.
    training = plan.graph.optional_constant(node.input(2), False)
    if training is None or np.any(training):
        plan.keep_node(node, "it may be asked to drop values at random")
    else:
        plan.same_as(node, node.outputs[0], node.inputs[0])


@rule(*sorted(_GATHERING))
def gather(node: Node, plan: PlanBuilder) -> None:
    """Share the scale of a tensor with its selected rows; quantize a constant table first.

    Where activations stay float, a table is a weight if its codes can be gathered: dequantizing the
    table at each run to pick a few rows would cost more than it saves. ``QConfig.embedding`` has
    the settings.
    """
    table = node.inputs[0]
    if plan.fuses and not plan.static(node) and looks_up(plan.graph, node):
        _gather_codes(node, plan, table)
        return
    if plan.graph.is_constant(table):
        plan.activation(node, table)
    plan.same_as(node, node.outputs[0], table)


def _gather_codes(node: Node, plan: PlanBuilder, table: str) -> None:
    """Quantize a table (entries, features) by entry; a table of another rank stays float."""
    if len(plan.graph.sizes(table)) == 2:
        plan.weight_at(node, 0)


@rule("Resize", "Upsample")
def resize(node: Node, plan: PlanBuilder) -> None:
    """Share the input's scale; another scale for extrapolation, float for cubic interpolation.

    onnxruntime has no integer cubic resize, and refuses the Q/DQ pairs around one when it changes
    the layout.
    """
    if node.attribute("mode", "nearest") == "cubic":
        plan.keep_node(node, "onnxruntime has no integer cubic interpolation")
    # A value outside the image may lie outside the range of the image.
    elif node.attribute("extrapolation_value", 0.0) != 0.0:
        plan.activation(node, node.inputs[0], node.outputs[0])
    else:
        plan.same_as(node, node.outputs[0], node.inputs[0])
