"""Write a Sum of two tensors as Add, which has integer kernels and rules for residual streams."""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each

#: First opset whose Sum broadcasts as Add does.
_BROADCASTING = 8


@register
def sum_to_add(graph: Graph) -> int:
    """Replace each Sum of two tensors by Add.

    Exporters of several frameworks write residual sums as Sum, and so does
    ``writing.cpu_forms``, whose models may be quantized a second time. onnxruntime has an
    integer kernel for Add alone.
    """
    return rewrite_each(graph, _replace, "Sum")


def _replace(graph: Graph, node: Node) -> bool:
    if len(node.inputs) != 2 or graph.opset < _BROADCASTING:
        return False
    node.rename("Add")
    return True
