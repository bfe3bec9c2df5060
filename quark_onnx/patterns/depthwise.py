"""Find depthwise convolutions whose inputs differ in range from channel to channel."""

from __future__ import annotations

import math

from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.clip_bounds import clip_bounds

#: Functions with results between fixed bounds.
_BOUNDED = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softsign", "Softmax"})


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Return whether a node is a Conv with one input channel per output channel, and several."""
    if node.kind != "Conv":
        return False
    weight = graph.sizes(node.input(1))
    return len(weight) > 2 and weight[1] == 1 and weight[0] not in (1, None)


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
    if producer is None or producer.kind in _BOUNDED:
        return False
    if producer.kind != "Clip":
        return True
    bounds = clip_bounds(graph, producer)
    return bounds is None or math.isinf(bounds[1])
