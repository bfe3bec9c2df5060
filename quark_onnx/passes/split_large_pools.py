"""Replace a mean over a large image by a mean of means over equal parts.

The engine averages at most 512 values: amd-quark 0.13, SplitLargeKernelPool.
"""

from __future__ import annotations

from itertools import product
from math import prod

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.passes.base import register, rewrite_each

_MOST = 512
_RANK = 4


@register
def split_large_pools(graph: Graph) -> int:
    """Insert an AveragePool before every GlobalAveragePool of more than 512 values."""
    return rewrite_each(graph, _split, "GlobalAveragePool")


def _split(graph: Graph, node: Node) -> bool:
    shape = graph.sizes(node.inputs[0])
    sizes = known_sizes(shape[2:])
    if len(shape) != _RANK or sizes is None or prod(sizes) <= _MOST:
        return False
    kernel = _kernel(*sizes)
    if kernel is None:
        return False
    partial = graph.compute(
        "AveragePool",
        [node.inputs[0]],
        f"{node.inputs[0]}_means",
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
    # Only equal parts: the mean of means is the mean if each part has the same size.
    parts = list[tuple[int, int]]()
    for part in product(_divisors(height), _divisors(width)):
        count = height * width // prod(part)
        if max(prod(part), count) <= _MOST:
            parts.append(part)
    # Ties are decided by the part itself, so that each run takes the same one.
    return min(parts, key=lambda part: (abs(part[0] - part[1]), part), default=None)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
