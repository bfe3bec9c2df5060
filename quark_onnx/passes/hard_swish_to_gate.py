"""Write HardSwish as the product of the input and a HardSigmoid.

The converter of X1 has no rule for HardSwish, and the operator table lists it for two formats only;
it takes HardSigmoid with alpha 1/6 and beta 0.5 (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03).
Exporters below opset 14 write the same two nodes.
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each


@register
def hard_swish_to_gate(graph: Graph) -> int:
    """Replace every HardSwish by x * HardSigmoid(x), as ONNX defines the operator."""
    return rewrite_each(graph, _replace, "HardSwish")


def _replace(graph: Graph, node: Node) -> bool:
    source, result = node.inputs[0], node.outputs[0]
    gate = graph.fresh(f"{result}_gate")
    graph.remove([node])
    graph.add(
        "HardSigmoid",
        [source],
        [gate],
        name=f"{node.name}_gate",
        alpha=1 / 6,
        beta=0.5,
    )
    graph.add("Mul", [source, gate], [result], name=node.name)
    return True
