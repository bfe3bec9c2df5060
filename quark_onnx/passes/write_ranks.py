"""Give constants the rank of the tensor that they are compared with.

OpenVINO 2026.4 computes a PRelu, Max, Min or Where of an image and a constant (channels, 1, 1) in
another layout than its convolutions, with a reorder before and after. With a constant
(1, channels, 1, 1) it keeps the layout: a network as ESPNetv2 with 40 PRelu takes 0.79 of the time.
Sums and products keep the layout in either form.
"""

from __future__ import annotations

from quark_onnx.graph import Graph
from quark_onnx.graph.constant_input import private
from quark_onnx.passes.base import register

_KINDS = frozenset({"Max", "Min", "PRelu", "Where"})
#: First opset in which all of them broadcast.
_OPSET = 8


@register
def write_ranks(graph: Graph) -> int:
    """Write leading axes of size 1 in constants that PRelu, Max, Min and Where alone read."""
    if graph.opset < _OPSET:
        return 0
    constants = {name for node in graph.nodes_of(_KINDS) for name in node.inputs}
    return sum(_widen(graph, name) for name in sorted(constants))


def _widen(graph: Graph, name: str) -> bool:
    constant = graph.constant(name)
    readers = graph.consumers(name)
    if constant is None or not constant.ndim or not private(graph, name):
        return False
    ranks = {len(graph.sizes(node.outputs[0])) for node in readers}
    rank = max(ranks)
    if len(ranks) > 1 or rank <= constant.ndim:
        return False
    if any(node.kind not in _KINDS for node in readers):
        return False
    missing = [1] * (rank - constant.ndim)
    graph.set_constant(name, constant.reshape(*missing, *constant.shape))
    return True
