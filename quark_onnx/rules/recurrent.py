"""Recurrent layers: LSTM, GRU, RNN."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import Plan
from quark_onnx.rules.base import rule


@rule("LSTM", "GRU", "RNN")
def recurrent(node: Node, plan: Plan) -> None:
    """Weights W and R, one scale for each direction.

    Input, bias and results too where there is no float32.

    No runtime has integer gates: between Q/DQ pairs the activations would lose digits and gain
    nothing. The weights are (directions, gates * hidden, input), and stay constants behind a
    DequantizeLinear.
    """
    x, bias = node.inputs[0], node.input(3)
    for w in node.inputs[1:3]:
        if plan.graph.is_constant(w):
            plan.weight(node, w, axis=0, along=2)
    if plan.rounds_results(node):
        plan.activation(node, x, along=-1)
        plan.bias(node, bias, x, node.inputs[1])
        plan.activation(
            node,
            *node.outputs[:2],
        )  # the state of the cell is not bounded as its output is
