"""Write a Transpose of more than four dimensions, between two reshapes, in four.

The engine of Ryzen AI moves data in four dimensions: the 5-dimensional channel shuffles of
ShuffleNetV2 run on the CPU and split the model (AMD RyzenAI-SW quark_quantization logs,
2025-10-14). Axes that stay neighbours are one axis, and axes of size 1 are none: shuffles of
channels, windows of attention and patches need four at most.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.shapes import known_sizes
from quark_onnx.passes.base import register, rewrite_each

_RANK = 4


@register
def lower_rank_moves(graph: Graph) -> int:
    """Merge axes of a Transpose between two reshapes, where four remain at most."""
    return rewrite_each(graph, _merge, "Transpose")


def _merge(graph: Graph, node: Node) -> bool:
    before = graph.producer(node.inputs[0])
    readers = graph.consumers(node.outputs[0])
    if before is None or before.kind != "Reshape" or len(readers) != 1:
        return False
    (after,) = readers
    if after.kind != "Reshape" or graph.is_output(node.outputs[0]):
        return False
    # The result of the first Reshape gets another shape, which no other node may read.
    if len(graph.consumers(before.outputs[0])) != 1 or graph.is_output(
        before.outputs[0]
    ):
        return False
    sizes = known_sizes(graph.shape(node.inputs[0]))
    final = known_sizes(graph.shape(after.outputs[0]))
    if sizes is None or final is None or len(sizes) <= _RANK or 0 in (*sizes, *final):
        return False
    perm = node.attribute("perm", list(reversed(range(len(sizes)))))
    runs = _runs(perm, sizes)
    if len(runs) > _RANK:
        return False
    _rewrite(graph, (before, node, after), runs, sizes, final)
    return True


def _runs(perm: list[int], sizes: tuple[int, ...]) -> list[list[int]]:
    """Return the axes that stay neighbours, in the order of the result, without axes of size 1.

    >>> _runs([0, 2, 1, 3, 4], (1, 2, 3, 8, 8))
    [[2], [1], [3, 4]]
    """
    kept = [axis for axis in range(len(sizes)) if sizes[axis] != 1]
    following = dict(pairwise(kept))
    runs = list[list[int]]()
    for axis in perm:
        if sizes[axis] == 1:
            continue
        if runs and following.get(runs[-1][-1]) == axis:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def _rewrite(
    graph: Graph,
    nodes: tuple[Node, Node, Node],
    runs: list[list[int]],
    sizes: tuple[int, ...],
    final: tuple[int, ...],
) -> None:
    """Replace a move by one of merged axes.

    Args:
        nodes: Reshape, Transpose and Reshape.
        runs: merged axes in the order of the result.
        sizes: sizes between the first Reshape and the Transpose.
        final: sizes of the last result.
    """
    before, node, after = nodes
    # A leading 1 keeps the place of the batch where there is room.
    lead = [1] * (len(runs) < _RANK)
    ordered = sorted(runs)
    merged = [*lead, *(prod(sizes[axis] for axis in run) for run in ordered)]
    perm = [len(lead) + ordered.index(run) for run in runs]
    graph.remove([before, node, after])
    inner = graph.add_constant(f"{node.outputs[0]}_merged", np.array(merged, np.int64))
    outer = graph.add_constant(f"{after.outputs[0]}_sizes", np.array(final, np.int64))
    source = before.inputs[0]
    parts = graph.fresh(before.outputs[0])
    moved = graph.fresh(node.outputs[0])
    graph.add("Reshape", [source, inner], [parts], name=before.name)
    perm = [*range(len(lead)), *perm]
    graph.add("Transpose", [parts], [moved], name=node.name, perm=perm)
    graph.add("Reshape", [moved, outer], after.outputs, name=after.name)
