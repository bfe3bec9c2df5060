"""Operators that bring values of several origins into one tensor: Concat, Pad."""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import control, rule


@rule("Concat")
def concat(node: Node, plan: Plan) -> None:
    """Every input and the result, each with its own scale."""
    steering = [name for name in node.inputs if control(plan.graph, name) or plan.masks(name)]
    if steering:
        plan.keep_node(node, f"{steering[0]!r} is a mask or a position, not a signal")
        return
    plan.activation(node, *node.inputs, node.outputs[0])


@rule("Pad")
def pad(node: Node, plan: Plan) -> None:
    """Padding with zeros or with the input's own values stays in its range; another constant widens it."""
    value = plan.graph.constant(node.input(2)) if node.input(2) else node.attribute("value", 0.0)
    own = node.attribute("mode", "constant") != "constant" or (value is not None and not np.any(value))
    if own:
        plan.same_as(node, node.outputs[0], node.inputs[0])
    elif plan.masks(node.input(2)):
        plan.keep_node(node, "it pads with a value that means 'never'")
    else:
        plan.activation(node, node.inputs[0], node.outputs[0])
