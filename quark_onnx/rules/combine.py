"""Operators that bring values of several origins into one tensor: Concat, Pad, Scatter."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import control, is_control_tensor, rule


@rule("Concat")
def concat(node: Node, plan: Plan) -> None:
    """Every input and the result, each with its own scale."""
    steering = [
        name
        for name in node.inputs
        if control(plan.graph, name) or plan.holds_mask_constants(name)
    ]
    if steering:
        plan.keep_node(node, f"{steering[0]!r} is a mask or a position, not a signal")
        return
    plan.activation(node, *node.inputs, node.outputs[0])


@rule("Pad")
def pad(node: Node, plan: Plan) -> None:
    """The result has the input's scale, or one of its own where it is padded with another value
    than zero.
    """
    value = (
        plan.graph.constant(node.input(2))
        if node.input(2)
        else node.attribute("value", 0.0)
    )
    own = node.attribute("mode", "constant") != "constant" or (
        value is not None and not np.any(value)
    )
    if own:
        plan.same_as(node, node.outputs[0], node.inputs[0])
    elif plan.holds_mask_constants(node.input(2)):
        plan.keep_node(node, "it pads with a value that means 'never'")
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])


@rule("ScatterElements", "ScatterND", "TensorScatter")
def scatter(node: Node, plan: Plan) -> None:
    """Data, updates and result, each with its own scale, unless one of them is a mask."""
    updates = node.input(1) if node.kind == "TensorScatter" else node.input(2)
    if not is_control_tensor(node, plan, node.inputs[0], updates):
        plan.activation(node, node.inputs[0], updates, node.outputs[0])
