"""Multiply alpha and beta of a Gemm into the constants.

Compilers ignore alpha and beta (zmaychek84/vaip, 2025-03).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    products = dict[int, NDArray[Any]]()
    for index, factor in factors.items():
        if factor != 1.0:
            array = graph.constant(node.input(index))
            # One factor that cannot be folded leaves the node unchanged, as both are reset below.
            if array is None:
                return False
            # In float64, and rounded to the type of the constant once.
            products[index] = (array.astype(np.float64) * factor).astype(array.dtype)
    if not products:
        return False
    for index, product in products.items():
        name = f"{node.input(index)}_{node.name}_times"
        graph.set_input(node, index, graph.add_constant(name, product))
    for name in ("alpha", "beta"):
        node.set_attribute(name, 1.0)
    return True
