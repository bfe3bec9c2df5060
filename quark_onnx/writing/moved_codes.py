"""Leave out the pairs after operators that only move values, for engines that move codes anyway.

OpenVINO 2026.4 computes such a pair as an operator of its own (YOLOX-nano: 5 % of the runtime).
"""

from __future__ import annotations

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.rules.passthrough import REARRANGING

_MOVING = REARRANGING | {"Concat", "Expand", "MaxPool", "Slice", "Split", "Tile"}
_RESIZING = frozenset({"Resize", "Upsample"})


def drop_moved_pairs(graph: Graph) -> None:
    """Let readers of a pair after a moving operator read the moved values, which are equal.

    Args:
        graph: a graph with pairs; those that nobody reads any more are left in it.
    """
    #: A DequantizeLinear with the scale and zero point of the values, by tensor.
    origins = dict[str, Node]()
    for node in graph.sorted():
        if node.op_type in DEQUANTIZE:
            origins[node.outputs[0]] = node
        if not _moves(node):
            continue
        joined = node.inputs if node.kind == "Concat" else node.inputs[:1]
        pairs = [origins.get(name) for name in joined]
        if not all(_alike(graph, pair, pairs[0]) for pair in pairs):
            continue
        assert pairs[0] is not None
        for result in node.results:
            origins[result] = pairs[0]
            for dequantize in _pairs_after(graph, result):
                if _alike(graph, dequantize, pairs[0]):
                    graph.replace_uses(dequantize.outputs[0], result)


def _moves(node: Node) -> bool:
    """Return whether every value of a node's results is one of its inputs."""
    if node.kind in _RESIZING:
        mode = node.attribute("coordinate_transformation_mode", "")
        is_nearest: bool = node.attribute("mode", "nearest") == "nearest"
        # This mode extrapolates.
        return is_nearest and mode != "tf_crop_and_resize"
    # The second result of MaxPool holds indices.
    return node.kind in _MOVING and (node.kind != "MaxPool" or len(node.results) == 1)


def _pairs_after(graph: Graph, tensor: str) -> list[Node]:
    """Return the DequantizeLinear of each pair that reads a tensor."""
    return [
        reader
        for quantize in graph.consumers(tensor)
        if quantize.op_type in QUANTIZE
        for reader in graph.consumers(quantize.outputs[0])
        if reader.op_type in DEQUANTIZE and reader.inputs[1:] == quantize.inputs[1:]
    ]


def _alike(graph: Graph, one: Node | None, other: Node | None) -> bool:
    """Return whether two DequantizeLinear nodes have one equal, constant scale and zero point."""
    if one is None or other is None or len(one.inputs) < 3 or len(other.inputs) < 3:
        return False
    for name, counterpart in zip(one.inputs[1:], other.inputs[1:], strict=True):
        first, second = graph.constant(name), graph.constant(counterpart)
        if first is None or second is None or first.size != 1:
            return False
        if first.dtype != second.dtype or not np.array_equal(first, second):
            return False
    return True
