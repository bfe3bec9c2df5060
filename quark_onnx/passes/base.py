"""Define the contract of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
    graph: Graph, rewrite: Callable[[Graph, Node], bool], *kinds: str
) -> int:
    """Rewrite the nodes of some kinds, and return for how many it succeeded.

    Args:
        graph: the graph.
        rewrite: changes the graph at a node. Returns False if the graph stays unchanged.
        *kinds: operators of the nodes.
    """
    # ``nodes_of`` returns a list, so that ``rewrite`` may remove nodes.
    return sum(rewrite(graph, node) for node in graph.nodes_of(kinds))
