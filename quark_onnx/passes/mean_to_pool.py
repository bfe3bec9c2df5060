"""Write the mean over both spatial axes as the pooling operator that engines know.

With XINT8 a ReduceMean stays on the CPU and cuts the model in two, a GlobalAveragePool does not:
logs of ShuffleNet, AMD RyzenAI-SW quark_quantization, 2025-10-14.
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register

_RANK, _SPATIAL = 4, {2, 3}


@register
def mean_to_pool(graph: Graph) -> int:
    """Replace every ReduceMean of a tensor of four axes over the last two."""
    return sum(
        _replace(graph, node) for node in graph.nodes if node.kind == "ReduceMean"
    )


def _replace(graph: Graph, node: Node) -> bool:
    shape = graph.shape(node.inputs[0])
    if shape is None or len(shape) != _RANK:
        return False
    value = graph.constant(node.input(1)) if node.input(1) else node.attribute("axes")
    if value is None or {int(axis) % _RANK for axis in value} != _SPATIAL:
        return False
    source, result = node.inputs[0], node.outputs[0]
    graph.remove([node])
    if node.attribute("keepdims", 1):
        graph.add("GlobalAveragePool", [source], [result], name=node.name)
        return True
    pooled = graph.fresh(f"{result}_pooled")
    graph.add("GlobalAveragePool", [source], [pooled], name=node.name)
    graph.add("Flatten", [pooled], [result], name=f"{node.name}_flat", axis=1)
    return True
