"""Keep OpenVINO from wrong results of small products without a bias.

OpenVINO 2026.4 computes a chain of products with up to 8 rows and sizes of up to 256 in one kernel.
Where the dequantized result of one reaches the next pair by nothing but a Relu, a sum with one
number and the like, it leaves out the scales, and the results are off by a factor of 1e9. A Max
with the least float32 keeps the scales.
"""

from __future__ import annotations

import numpy as np

from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.codes import constant_behind
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.graph.shapes import known_sizes

_PRODUCTS = frozenset({"MatMul", "Gemm"})
#: Operators from one product to the next in a chain.
_BETWEEN = (
    QUANTIZE
    | DEQUANTIZE
    | {
        "Abs",
        "Add",
        "Clip",
        "Div",
        "Identity",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "Relu",
        "Sub",
    }
)
_MOST_ROWS, _MOST_SIZE = 8, 256


def bound_small_products(graph: Graph) -> list[str]:
    """Write a Max after the small products without a bias that another one follows.

    Args:
        graph: the quantized graph, which is changed.

    Returns:
        Notes for the report.
    """
    small = [node for node in graph.nodes_of(_PRODUCTS) if _is_small(graph, node)]

    def after(node: Node) -> list[Node]:
        return [each for each in graph.followers(node) if each.op_type in _BETWEEN]

    followed = [
        node
        for node in small
        if not _has_bias(graph, node)
        and any(
            reader in small
            for member in reach([node], after)
            for reader in graph.followers(member)
        )
    ]
    for node in followed:
        result = node.outputs[0]
        least = graph.add_constant(f"{result}_least", np.finfo(np.float32).min)
        unbounded = graph.fresh(f"{result}_unbounded")
        graph.set_output(node, 0, unbounded)
        graph.add("Max", [unbounded, least], [result], name=f"{node.name}_least")
    if not followed:
        return []
    written = counted(len(followed), "Max without effect is", "Max without effect are")
    return [f"{written} written, as OpenVINO would leave out scales of small products"]


def _is_small(graph: Graph, node: Node) -> bool:
    """Return whether the kernel of OpenVINO takes a product of codes."""
    weight = node.inputs[1]
    transpose = graph.producer_of_kind(weight, {"Transpose"})
    if transpose is not None:
        weight = transpose.inputs[0]
    if graph.producer_of_type(weight, DEQUANTIZE) is None:
        return False
    sizes = known_sizes(graph.shape(constant_behind(graph, weight)))
    result = known_sizes(graph.shape(node.outputs[0]))
    if sizes is None or result is None or len(result) != 2:
        return False
    return result[0] <= _MOST_ROWS and max(sizes) <= _MOST_SIZE


def _has_bias(graph: Graph, node: Node) -> bool:
    """Return whether values that differ are added to the result of a product."""
    if node.kind == "Gemm":
        return _differ(graph, node.input(2))
    readers = graph.consumers(node.outputs[0])
    if len(readers) != 1 or readers[0].kind != "Add":
        return False
    return any(_differ(graph, name) for name in readers[0].inputs)


def _differ(graph: Graph, name: str) -> bool:
    values = graph.constant(constant_behind(graph, name))
    return values is not None and bool(np.ptp(values.astype(np.float64)))
