"""Fuse a decomposed Gelu into com.microsoft::Gelu, which compilers read at any opset.

Erf is not offloaded with 16-bit activations (documentation of Ryzen AI 1.8, ops_support.rst,
2026-07-23; amd/RyzenAI-SW #127), and the converter of XDNA1 takes com.microsoft::Gelu
(zmaychek84/vaip, 2025-03).
"""

from __future__ import annotations

from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each
from quark_onnx.patterns.gelu import GELU

_DOMAIN = "com.microsoft"


@register
def fuse_gelu(graph: Graph) -> int:
    """Replace decomposed Gelus (with Erf) and ONNX Gelus by com.microsoft::Gelu."""
    count = rewrite_each(graph, _fuse, "Mul", "Div")
    count += rewrite_each(graph, _rename, "Gelu")
    # An unused import would be one more domain that a compiler has to know.
    if count:
        graph.import_domain(_DOMAIN)
    return count


def _fuse(graph: Graph, last: Node) -> bool:
    """Replace the decomposed Gelu that ends in a node."""
    result = last.outputs[0]
    match = GELU.match(graph, result)
    if match is None:
        return False
    source = match["x"]
    erf = graph.producer(match["erf"])
    assert erf is not None
    if graph.elem_type(source) != TensorProto.FLOAT:
        return False
    # A constant of higher rank would broadcast the result.
    if graph.shape(result) != graph.shape(source):
        return False
    # The other nodes of the formula become unused, and are dropped later.
    graph.remove([last])
    graph.add("Gelu", [source], [result], name=erf.name, domain=_DOMAIN)
    return True


def _rename(graph: Graph, gelu: Node) -> bool:
    if graph.elem_type(gelu.inputs[0]) != TensorProto.FLOAT:
        return False
    # com.microsoft::Gelu has no attribute for the approximation by tanh.
    if gelu.attribute("approximate", "none") != "none":
        return False
    gelu.drop_attribute("approximate")
    gelu.rename("Gelu", _DOMAIN)
    return True
