"""Float arithmetic in residual streams where tokens are cut out and joined.

Vision transformers join a class token with the tokens of the image. One scale for both leaves few
codes to the smaller one: class attention (CaiT) has 11 dB then, and 38 dB without. The sums and the
normalizations around such a Concat are float in any case, so that no layer becomes slower.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from quark_onnx.graph import Graph, Node, reach
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import RESIDUAL, normalizes
from quark_onnx.rules.passthrough import PARTING, REARRANGING

#: Operators whose results are parts of their input, or its values in another order.
_MOVING = REARRANGING | PARTING


def spare_joined_tokens(plan: PlanBuilder) -> None:
    """Keep each Concat float whose result reaches a normalization, before rules are applied.

    The path may contain sums, such as that with positions, and operators that only move values.
    A sum whose result reaches a normalization without another sum is added to ``plan.streams``,
    which the rule of Add reads. Runs after ``spare_composites``, which marks decomposed
    normalizations.
    """
    normalizations = [node for node in plan.graph.nodes if normalizes(node, plan)]
    for node in _before(plan.graph, normalizations, {"Add", "Concat"}):
        if node.kind == "Concat" and plan.is_low_bit(node):
            plan.keep_node(node, RESIDUAL)
    joined = _before(plan.graph, normalizations, {"Concat"})
    plan.streams.update(
        leader.name
        for node in joined
        for leader in plan.graph.leaders(node)
        if leader.kind == "Add"
    )


def _before(
    graph: Graph, nodes: Iterable[Node], kinds: Container[str]
) -> dict[Node, None]:
    """Return nodes with the nodes before them that only move values or are of some kinds.

    Args:
        nodes: the nodes to start from.
        kinds: the operator types to pass.
    """

    def step(node: Node) -> list[Node]:
        return [
            leader
            for leader in graph.leaders(node)
            if leader.kind in _MOVING or leader.kind in kinds
        ]

    return reach(nodes, step)
