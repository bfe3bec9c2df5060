"""Replace a mean over a large image by a mean of means over equal parts.

The engine averages at most 512 values: amd-quark 0.13, SplitLargeKernelPool.
"""

from __future__ import annotations

from quark_onnx.graph import Graph, Node
from quark_onnx.passes.base import register, rewrite_each

_MOST = 512
_RANK = 4


@register
def split_large_pools(graph: Graph) -> int:
    """Insert an AveragePool before every GlobalAveragePool of more than 512 values."""
    return rewrite_each(graph, "GlobalAveragePool", _split)


def _split(graph: Graph, node: Node) -> bool:
    shape = graph.shape(node.inputs[0])
    if shape is None or len(shape) != _RANK:
        return False
    height, width = shape[2:]
    if (
        not (isinstance(height, int) and isinstance(width, int))
        or height * width <= _MOST
    ):
        return False
    kernel = _kernel(height, width)
    if kernel is None:
        return False
    partial = graph.fresh(f"{node.inputs[0]}_means")
    graph.add(
        "AveragePool",
        [node.inputs[0]],
        [partial],
        name=f"{node.name}_parts",
        kernel_shape=list(kernel),
        strides=list(kernel),
        pads=[0, 0, 0, 0],
    )
    graph.set_input(node, 0, partial)
    return True


def _kernel(height: int, width: int) -> tuple[int, int] | None:
    """Return the part, of at most 512 values, that yields at most as many parts.

    The most square part is taken, then the smallest one.
    """
    parts = []
    for rows in range(1, height + 1):
        for columns in range(1, width + 1):
            # Only equal parts: the mean of means is the mean if each part has the same size.
            even = not height % rows and not width % columns
            count = (height // rows) * (width // columns)
            if even and rows * columns <= _MOST and count <= _MOST:
                parts.append((rows, columns))
    return min(
        parts,
        key=lambda part: (abs(part[0] - part[1]), part),
        default=None,
    )
