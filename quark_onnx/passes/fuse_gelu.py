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
from quark_onnx.graph.matching import only_reader, only_use, other_input
from quark_onnx.passes.base import register, rewrite_each

_DOMAIN = "com.microsoft"
_CLOSE = 1e-4


@register
def fuse_gelu(graph: Graph) -> int:
    """Replace decomposed Gelus (with Erf) and ONNX Gelus by com.microsoft::Gelu."""
    count = rewrite_each(graph, "Erf", _replace)
    for node in graph.nodes_of({"Gelu"}):
        floats = graph.elem_type(node.inputs[0]) == TensorProto.FLOAT
        if floats and node.attribute("approximate", "none") == "none":
            node.drop_attribute("approximate")
            node.rename("Gelu", _DOMAIN)
            count += 1
    if count:
        graph.import_domain(_DOMAIN)
    return count


def _replace(graph: Graph, erf: Node) -> bool:
    """Replace x * (1 + erf(x / sqrt(2))) / 2, with the factors in any order."""
    source = _scaled(graph, erf.inputs[0], np.sqrt(0.5))
    shifted = only_use(graph, erf.outputs[0], "Add")
    if shifted is None or graph.elem_type(source) != TensorProto.FLOAT:
        return False
    if not _is(graph, other_input(shifted, erf.outputs[0]), 1):
        return False
    last = _last_product(graph, shifted, source)
    if last is None:
        return False
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


def _last_product(graph: Graph, shifted: Node, source: str) -> Node | None:
    """Return the node after which 1 + erf is multiplied by both x and 0.5, or None.

    Exporters multiply by x and by 0.5 in any order, or halve x first: both factors are crossed off
    as the products are followed.
    """
    missing = {"half", "source"}
    last = shifted
    while missing:
        tensor = last.outputs[0]
        quotient = only_use(graph, tensor, "Div")
        product = quotient or only_use(graph, tensor, "Mul")
        if product is None:
            return None
        if quotient is None:
            factors = _factors(graph, other_input(product, tensor), source)
        else:
            factors = _divisors(graph, product, tensor)
        # a factor that is crossed off already would be applied twice
        if not factors or not factors <= missing:
            return None
        missing = missing - factors
        last = product
    return last


def _factors(graph: Graph, factor: str, source: str) -> set[str]:
    """Return which of the factors x and 0.5 a tensor holds."""
    if factor == source:
        return {"source"}
    if _is(graph, factor, 0.5):
        return {"half"}
    if _scaled(graph, factor, 0.5) == source:
        return {"half", "source"}
    return set()


def _divisors(graph: Graph, quotient: Node, tensor: str) -> set[str]:
    """Return the factor 0.5 if a node divides a tensor by 2."""
    halves = quotient.inputs[0] == tensor and _is(graph, quotient.inputs[1], 2)
    return {"half"} if halves else set()


def _is(graph: Graph, tensor: str, value: float) -> bool:
    return is_number(graph, tensor, value, _CLOSE)


def _scaled(graph: Graph, tensor: str, factor: float) -> str:
    """Return the tensor that is multiplied by a factor to get an intermediate ``tensor``.

    A division by the inverse of the factor counts, too. Empty if there is none, or if the
    intermediate
    tensor has other readers.
    """
    node = graph.producer(tensor)
    if node is None or not private(graph, tensor) or not only_reader(graph, tensor):
        return ""
    if node.kind == "Div" and _is(graph, node.inputs[1], 1 / factor):
        return node.inputs[0]
    if node.kind != "Mul":
        return ""
    first, second = node.inputs
    if _is(graph, first, factor):
        return second
    return first if _is(graph, second, factor) else ""
