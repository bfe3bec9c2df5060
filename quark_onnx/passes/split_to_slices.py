"""Replace a Split by a Slice per result: operators with several results run on the CPU.

amd-quark does the same before the engine (0.13, preprocess), and so does the engine's own converter
where it can (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03).
"""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import setting
from quark_onnx.passes.base import register, rewrite_each

#: First opset whose Slice reads its bounds from inputs.
_INPUTS_OPSET = 10


@register
def split_to_slices(graph: Graph) -> int:
    """Replace every Split with known sizes."""
    if graph.opset < _INPUTS_OPSET:
        return 0
    return rewrite_each(graph, _replace, "Split")


def _replace(graph: Graph, node: Node) -> bool:
    source = node.inputs[0]
    shape = graph.shape(source)
    # An omitted result has no name for the Slice to write.
    if shape is None or not all(node.outputs):
        return False
    # An axis may be negative.
    axis = node.attribute("axis", 0) % len(shape)
    sizes = sizes_of_parts(graph, node, shape[axis])
    if sizes is None:
        return False
    graph.remove([node])
    ends = np.cumsum(sizes)
    for output, start, end in zip(node.outputs, [0, *ends[:-1]], ends, strict=True):
        inputs = [source]
        bounds = {"start": start, "end": end, "axis": axis, "step": 1}
        for name, value in bounds.items():
            vector = np.array([value], np.int64)
            inputs.append(graph.add_constant(f"{output}_{name}", vector))
        graph.add("Slice", inputs, [output], name=f"{node.name}_{output}")
    return True


def sizes_of_parts(
    graph: Graph, node: Node, size: int | str | None
) -> list[int] | None:
    """Return the sizes of the results of a Split; None if they are not known.

    Args:
        graph: the model.
        node: the Split.
        size: size of the split axis.
    """
    if node.input(1) or node.attribute("split") is not None:
        sizes = setting(graph, node, "split", 1)
        if sizes is None or len(sizes) != len(node.outputs):
            return None
        return [int(size) for size in sizes]
    if not isinstance(size, int):
        return None
    return _equal_parts(size, len(node.outputs))


def _equal_parts(size: int, count: int) -> list[int] | None:
    """Divide a size as num_outputs does (ONNX, Split-18): rounded up, but for the last part.

    None if a part would be empty.
    """
    part = -(-size // count)
    sizes = [min(part, size - part * index) for index in range(count)]
    return sizes if min(sizes) > 0 else None
