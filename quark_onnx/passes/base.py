"""Define the contract of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from quark_onnx.common.conditions import otherwise
from quark_onnx.common.registry import PASSES
from quark_onnx.graph import Graph, Node

#: A pass rewrites the graph in place, without changing its function, and returns the number of
#: rewrites. The caller verifies the function by running the model before and after.
Pass = Callable[[Graph], int]
P = TypeVar("P", bound=Pass)


def register(function: P) -> P:
    """Register a pass under the function's name."""
    PASSES.add(function.__name__, function)
    return function


def rewrite_each(
    graph: Graph, rewrite: Callable[[Graph, Node], None], *kinds: str
) -> int:
    """Rewrite the nodes of some kinds, and return for how many it succeeded.

    Args:
        graph: the graph.
        rewrite: changes the graph at a node. The node stays unchanged where a condition that
            ``rewrite`` requires does not hold.
        *kinds: operators of the nodes.
    """
    # ``nodes_of`` returns a list, so that ``rewrite`` may remove nodes.
    return sum(_rewrite(graph, rewrite, node) for node in graph.nodes_of(kinds))


@otherwise(False)
def _rewrite(
    graph: Graph, rewrite: Callable[[Graph, Node], None], node: Node
) -> Literal[True]:
    rewrite(graph, node)
    return True
