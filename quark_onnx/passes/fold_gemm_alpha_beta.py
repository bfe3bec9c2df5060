"""Multiply alpha and beta of a Gemm into the constants.

Compilers ignore alpha and beta (zmaychek84/vaip, 2025-03).
"""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each


@register
def fold_gemm_alpha_beta(graph: Graph) -> int:
    """Set alpha and beta of every Gemm with constant parameters to 1."""
    return rewrite_each(graph, _fold, "Gemm")


def _fold(graph: Graph, node: Node) -> bool:
    factors = {1: float(node.attribute("alpha", 1.0))}
    if node.input(2):
        factors[2] = float(node.attribute("beta", 1.0))
    places = [index for index, factor in factors.items() if factor != 1.0]
    arrays = [
        value
        for value in (graph.constant(node.input(index)) for index in places)
        if value is not None
    ]
    # One factor that cannot be folded leaves the node unchanged, as both would be reset below.
    if not places or len(arrays) < len(places):
        return False
    for index, array in zip(places, arrays, strict=True):
        # In float64, and rounded to the type of the constant once.
        product = (array.astype(np.float64) * factors[index]).astype(array.dtype)
        graph.set_input(
            node,
            index,
            graph.add_constant(f"{node.input(index)}_{node.name}_times", product),
        )
    for name in ("alpha", "beta"):
        node.set_attribute(name, 1.0)
    return True
