"""Replace the number of parts of a Split by their sizes.

Only opset 18 has num_outputs, and onnx has no adapter that converts such a Split to an earlier
opset.
"""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each
from quark_onnx.passes.split_to_slices import sizes_of_parts


@register
def write_sizes(graph: Graph) -> int:
    """Give the sizes of the parts to every Split along an axis of known size."""
    return rewrite_each(graph, _write, "Split")


def _write(graph: Graph, node: Node) -> bool:
    shape = graph.shape(node.inputs[0])
    # Without num_outputs, a Split has sizes, or equal parts as before opset 18.
    if shape is None or node.attribute("num_outputs") is None:
        return False
    axis = node.attribute("axis", 0) % len(shape)
    sizes = sizes_of_parts(graph, node, shape[axis])
    if sizes is None:
        return False
    name = graph.add_constant(f"{node.name}_sizes", np.array(sizes, np.int64))
    # The input of the sizes may be there under an empty name.
    graph.fill_input(node, 1, name)
    node.drop_attribute("num_outputs")
    return True
