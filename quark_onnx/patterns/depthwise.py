"""Recognise depthwise convolutions, and those whose input channels can differ in range."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.clip_bounds import clip_bounds

_CONVOLUTIONS = ("Conv", "QLinearConv")
#: Functions with results between fixed bounds.
_BOUNDED = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softsign", "Softmax"})


def has_depthwise_kernel(node: Node, kernel: Sequence[int | str | None]) -> bool:
    """Return whether a node is a convolution with several groups of one input channel each.

    Args:
        node: any node, whose weight can be float or quantized.
        kernel: shape of the second operand: (M, C / group, k1, ..., kn).
    """
    # C / group is 1 as well where a single input channel has a single group: that is no depthwise
    # convolution, as every output reads all of the input.
    return (
        node.kind in _CONVOLUTIONS
        and node.attribute("group", 1) > 1
        and tuple(kernel[1:2]) == (1,)
    )


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Return whether a node of a float graph is a depthwise Conv."""
    return node.kind == "Conv" and has_depthwise_kernel(
        node, graph.sizes(node.input(1))
    )


def unbounded_depthwise(graph: Graph) -> list[Node]:
    """Return the depthwise convolutions that read a computed tensor without an upper bound.

    The channels of such a tensor often differ in range by orders of magnitude, and no sum over
    channels hides the rounding errors of the small ones.
    """
    return [
        node
        for node in graph.nodes
        if is_depthwise(graph, node) and _is_unbounded(graph, node.input(0))
    ]


def _is_unbounded(graph: Graph, name: str) -> bool:
    producer = graph.producer(name)
    # Inputs of the model have the range of the data, alike in all channels.
    if producer is None or producer.kind in _BOUNDED:
        return False
    if producer.kind != "Clip":
        return True
    bounds = clip_bounds(graph, producer)
    return bounds is None or math.isinf(bounds[1])
