"""Plan the tensors of recurrent layers: LSTM, GRU, RNN."""

from __future__ import annotations

from quark_onnx.graph import Node
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import rule


@rule("LSTM", "GRU", "RNN")
def recurrent(node: Node, plan: PlanBuilder) -> None:
    """Quantize the weights W and R with a scale per unit of each gate.

    Input, bias and results are quantized where the engine has no float32. No runtime has integer
    gates with static scales: between Q/DQ pairs the activations would lose precision and gain
    nothing. The weights stay constants after a DequantizeLinear.
    """
    x = node.inputs[0]
    bias = node.input(3)
    for index in (1, 2):
        if plan.graph.is_constant(node.inputs[index]):
            plan.weight_at(node, index)
    if plan.specs[node].dynamic:
        # DynamicQuantizeLSTM computes the gates on integers, with scales of each run.
        plan.activation(node, x)
    if plan.rounds_results(node):
        plan.activation(node, x, along=-1)
        plan.bias(node, bias, x, node.inputs[1])
        # The state of the cell, the third result, is not bounded like the first ones.
        plan.activation(node, *node.outputs[:2])
