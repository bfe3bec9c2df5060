"""Replace a Split by a Slice per result: operators with several results run on the CPU.

amd-quark does the same before the engine (0.13, preprocess), and so does the engine's own converter
where it can (zmaychek84/vaip, to_xir_ops_pass.cpp, 2025-03).
"""

from __future__ import annotations

import numpy as np

from quark_onnx.common.conditions import only_if, required
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import setting
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.passes.base import register, rewrite_each

#: First opset whose Slice reads its bounds from inputs.
_INPUTS_OPSET = 10


@register
def split_to_slices(graph: Graph) -> int:
    """Replace every Split with known sizes."""
    if graph.opset < _INPUTS_OPSET:
        return 0
    return rewrite_each(graph, _replace, "Split")


def _replace(graph: Graph, node: Node) -> None:
    source = node.inputs[0]
    # An omitted result has no name for the Slice to write.
    only_if(all(node.outputs))
    shape = required(graph.shape(source))
    # An axis may be negative.
    axis = node.attribute("axis", 0) % len(shape)
    sizes = sizes_of_parts(graph, node, shape[axis])
    graph.remove([node])
    ends = np.cumsum(sizes)
    for output, start, end in zip(
        node.outputs,
        [0, *ends[:-1]],
        ends,
        strict=True,
    ):
        inputs = [source]
        bounds = {"start": start, "end": end, "axis": axis, "step": 1}
        for name, value in bounds.items():
            vector = np.array([value], np.int64)
            inputs.append(graph.add_constant(f"{output}_{name}", vector))
        graph.add("Slice", inputs, [output], name=f"{node.name}_{output}")


def sizes_of_parts(
    graph: Graph,
    node: Node,
    size: int | str | None,
) -> list[int]:
    """Return the sizes of the results of a Split.

    Args:
        graph: the model.
        node: the Split.
        size: size of the split axis.

    Raises:
        UnmetError: the sizes are not known.
    """
    if node.input(1) or node.attribute("split") is not None:
        sizes = list(map(int, required(setting(graph, node, "split", 1))))
        only_if(len(sizes) == len(node.outputs))
        return sizes
    [length] = required(known_sizes([size]))
    return _equal_parts(length, len(node.outputs))


def _equal_parts(size: int, count: int) -> list[int]:
    """Divide a size as num_outputs does (ONNX, Split-18): rounded up, but for the last part."""
    part = -(-size // count)
    sizes = [min(part, size - part * index) for index in range(count)]
    only_if(min(sizes) > 0)
    return sizes
