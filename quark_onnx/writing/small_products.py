"""Keep the scales of small products, which OpenVINO leaves out (``patterns.openvino_faults``)."""

from __future__ import annotations

import numpy as np

from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph
from quark_onnx.patterns.openvino_faults import unscaled_products


def bound_small_products(graph: Graph) -> list[str]:
    """Write a Max with the least float32, which keeps their scales, after small products.

    Args:
        graph: the quantized graph, which is changed.

    Returns:
        Notes for the report.
    """
    products = unscaled_products(graph)
    for node in products:
        result = node.outputs[0]
        least = graph.add_constant(f"{result}_least", np.finfo(np.float32).min)
        unbounded = graph.fresh(f"{result}_unbounded")
        graph.set_output(node, 0, unbounded)
        graph.add("Max", [unbounded, least], [result], name=f"{node.name}_least")
    if not products:
        return []
    written = counted(len(products), "Max without effect is", "Max without effect are")
    return [f"{written} written, as OpenVINO would leave out scales of small products"]
