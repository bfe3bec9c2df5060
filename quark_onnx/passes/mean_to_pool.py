"""Replace the mean over both spatial axes by GlobalAveragePool.

With XINT8 a ReduceMean runs on the CPU and splits the model, a GlobalAveragePool does not: logs of
ShuffleNet, AMD RyzenAI-SW quark_quantization, 2025-10-14.
"""

from __future__ import annotations

from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import reduced_axes
from quark_onnx.passes.base import register, rewrite_each

_RANK = 4
_SPATIAL = {2, 3}


@register
def mean_to_pool(graph: Graph) -> int:
    """Replace every ReduceMean of a 4-D tensor over the last two axes."""
    return rewrite_each(graph, _replace, "ReduceMean")


def _replace(graph: Graph, node: Node) -> bool:
    source = node.inputs[0]
    # A GlobalAveragePool of integers does not exist (ONNX), a ReduceMean does.
    if graph.elem_type(source) != TensorProto.FLOAT:
        return False
    if len(graph.sizes(source)) != _RANK or reduced_axes(graph, node) != _SPATIAL:
        return False
    result = node.outputs[0]
    graph.remove([node])
    # The pool keeps both axes with size 1: (N, C, 1, 1).
    if node.attribute("keepdims", 1):
        graph.add("GlobalAveragePool", [source], [result], name=node.name)
        return True
    # Without keepdims the mean is (N, C), as after a Flatten.
    pooled = graph.compute(
        "GlobalAveragePool", [source], f"{result}_pooled", name=node.name
    )
    graph.add("Flatten", [pooled], [result], name=f"{node.name}_flat", axis=1)
    return True
