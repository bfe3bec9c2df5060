"""Write a Gelu that comes in parts as the one operator that it is, in the spelling that compilers
read at any opset.

Erf is not offloaded with 16-bit activations (documentation of Ryzen AI 1.8, ops_support.rst,
2026-07-23; amd/RyzenAI-SW #127), and the converter of XDNA1 takes com.microsoft::Gelu
(zmaychek84/vaip, 2025-03).
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.constant_input import is_number, private
from quark_onnx.passes.base import register

_DOMAIN = "com.microsoft"
_CLOSE = 1e-4


@register
def fuse_gelu(graph: Graph) -> int:
    """Make a Gelu of the domain com.microsoft of every one that is written with Erf, or is an
    operator of ONNX.
    """
    count = sum(_replace(graph, node) for node in graph.nodes if node.kind == "Erf")
    for node in graph.nodes:
        known = (
            node.kind == "Gelu" and graph.elem_type(node.inputs[0]) == TensorProto.FLOAT
        )
        if known and node.attribute("approximate", "none") == "none":
            node.drop_attribute("approximate")
            node.rename("Gelu", _DOMAIN)
            count += 1
    if count:
        graph.import_domain(_DOMAIN)
    return count


def _replace(graph: Graph, erf: Node) -> bool:
    """x * (1 + erf(x / sqrt(2))) / 2, its factors in any order."""
    source = _scaled(graph, erf.inputs[0], np.sqrt(0.5))
    shifted = _only(graph, erf.outputs[0], "Add")
    floats = graph.elem_type(source) == TensorProto.FLOAT
    if (
        not floats
        or shifted is None
        or not _is(graph, _other(shifted, erf.outputs[0]), 1)
    ):
        return False
    missing, tensor = {"half", "source"}, shifted.outputs[0]
    last = shifted
    while missing:
        halved = _only(graph, tensor, "Div")
        behind = halved or _only(graph, tensor, "Mul")
        if behind is None or (halved is not None and behind.inputs[0] != tensor):
            return False
        factor = _other(behind, tensor)
        if factor == source:
            found = {"source"}
        elif _is(graph, factor, 2 if halved else 0.5):
            found = {"half"}
        elif halved is None and _scaled(graph, factor, 0.5) == source:
            found = {"half", "source"}
        else:
            return False
        if not found <= missing or (halved is not None and found != {"half"}):
            return False
        missing, last, tensor = missing - found, behind, behind.outputs[0]
    result = last.outputs[0]
    if graph.shape(result) != graph.shape(source):  # a constant of more axes adds some
        return False
    graph.remove([last])
    graph.add("Gelu", [source], [result], name=erf.name, domain=_DOMAIN)
    return True


def _only(graph: Graph, tensor: str, kind: str) -> Node | None:
    """The node of a kind that alone reads a tensor, once."""
    readers = graph.consumers(tensor)
    if (
        len(readers) != 1
        or readers[0].kind != kind
        or readers[0].inputs.count(tensor) != 1
    ):
        return None
    return readers[0] if private(graph, tensor) else None


def _other(node: Node, tensor: str) -> str:
    return node.inputs[1 - node.inputs.index(tensor)]


def _is(graph: Graph, tensor: str, value: float) -> bool:
    return is_number(graph, tensor, value, _CLOSE)


def _scaled(graph: Graph, tensor: str, factor: float) -> str:
    """The tensor that is multiplied by a factor, or divided by its inverse, to get one that a
    single node reads.
    """
    node = graph.producer(tensor)
    if node is None or not private(graph, tensor) or len(graph.consumers(tensor)) != 1:
        return ""
    if node.kind == "Div" and _is(graph, node.inputs[1], 1 / factor):
        return node.inputs[0]
    for place in (0, 1) if node.kind == "Mul" else ():
        if _is(graph, node.inputs[place], factor):
            return node.inputs[1 - place]
    return ""
