"""Fuse a decomposed Gelu into com.microsoft::Gelu, which compilers read at any opset.

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
    """Replace decomposed Gelus (with Erf) and ONNX Gelus by com.microsoft::Gelu."""
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
    """Replace x * (1 + erf(x / sqrt(2))) / 2, with the factors in any order."""
    source = _scaled(graph, erf.inputs[0], np.sqrt(0.5))
    shifted = _only(graph, erf.outputs[0], "Add")
    floats = graph.elem_type(source) == TensorProto.FLOAT
    if (
        not floats
        or shifted is None
        or not _is(graph, _other(shifted, erf.outputs[0]), 1)
    ):
        return False
    # Exporters multiply by x and by 0.5 in any order, or halve x first: both factors are crossed
    # off as the products are followed.
    missing = {"half", "source"}
    tensor = shifted.outputs[0]
    last = shifted
    while missing:
        halved = _only(graph, tensor, "Div")
        product = halved or _only(graph, tensor, "Mul")
        if product is None or (halved is not None and product.inputs[0] != tensor):
            return False
        factor = _other(product, tensor)
        if factor == source:
            factors = {"source"}
        elif _is(graph, factor, 2 if halved else 0.5):
            factors = {"half"}
        elif halved is None and _scaled(graph, factor, 0.5) == source:
            factors = {"half", "source"}
        else:
            return False
        if not factors <= missing or (halved is not None and factors != {"half"}):
            return False
        missing = missing - factors
        last = product
        tensor = product.outputs[0]
    result = last.outputs[0]
    # A constant of higher rank would broadcast the result.
    if graph.shape(result) != graph.shape(source):
        return False
    graph.remove([last])
    graph.add(
        "Gelu",
        [source],
        [result],
        name=erf.name,
        domain=_DOMAIN,
    )
    return True


def _only(graph: Graph, tensor: str, kind: str) -> Node | None:
    """Return the only reader of a tensor, if it is of a kind and reads the tensor once."""
    readers = graph.consumers(tensor)
    if (
        len(readers) != 1
        or readers[0].kind != kind
        or readers[0].inputs.count(tensor) != 1
    ):
        return None
    if private(graph, tensor):
        return readers[0]
    return None


def _other(node: Node, tensor: str) -> str:
    return node.inputs[1 - node.inputs.index(tensor)]


def _is(graph: Graph, tensor: str, value: float) -> bool:
    return is_number(graph, tensor, value, _CLOSE)


def _scaled(graph: Graph, tensor: str, factor: float) -> str:
    """Return the tensor that is multiplied by a factor to get an intermediate ``tensor``.

    A division by the inverse of the factor counts, too. Empty if there is none, or if the
    intermediate
    tensor has other readers.
    """
    node = graph.producer(tensor)
    if node is None or not private(graph, tensor) or len(graph.consumers(tensor)) != 1:
        return ""
    if node.kind == "Div" and _is(
        graph,
        node.inputs[1],
        1 / factor,
    ):
        return node.inputs[0]
    for place in (0, 1) if node.kind == "Mul" else ():
        if _is(graph, node.inputs[place], factor):
            return node.inputs[1 - place]
    return ""
