"""Float arithmetic where tokens are joined to a residual stream.

Vision transformers join a class token with the tokens of the image. One scale for both leaves few
codes to the smaller one: class attention (CaiT) has 11 dB then, and 38 dB without. The sums and the
normalizations around such a Concat are float in any case, so that no layer becomes slower.
"""

from __future__ import annotations

from collections.abc import Iterable

from quark_onnx.graph import Node, reach
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import PARTING, RESIDUAL, normalizes

#: Operators whose inputs are a part of the stream if their result is.
_CARRYING = PARTING | {"Add", "Concat"}


def spare_joined_tokens(plan: PlanBuilder) -> None:
    """Keep a Concat float whose result reaches a normalization, before rules are applied.

    It may pass sums on its way, as with positions, and other operators that only move values.
    Decomposed normalizations have to be known (``spare_composites``).
    """
    graph = plan.graph

    def carriers(node: Node) -> Iterable[Node]:
        return [leader for leader in graph.leaders(node) if leader.kind in _CARRYING]

    normalizations = [node for node in graph.nodes if normalizes(node, plan)]
    for node in reach(normalizations, carriers):
        if node.kind == "Concat" and plan.is_low_bit(node):
            plan.keep_node(node, RESIDUAL)
