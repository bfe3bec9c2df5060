"""Define the contract of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quark_onnx.graph import Graph, Node
from quark_onnx.registry import PASSES

#: A pass rewrites the graph in place, without changing its function, and returns the number of
#: rewrites. The caller verifies the function by running the model before and after.
Pass = Callable[[Graph], int]
P = TypeVar("P", bound=Pass)


def register(function: P) -> P:
    """Register a pass under the function's name."""
    PASSES.add(function.__name__, function)
    return function


def rewrite_each(
    graph: Graph, kind: str, rewrite: Callable[[Graph, Node], bool]
) -> int:
    """Rewrite the nodes of a kind, and return for how many it succeeded.

    Args:
        graph: the graph.
        kind: operator of the nodes.
        rewrite: changes the graph at a node; returns False where the node stays as it is.
    """
    return sum(rewrite(graph, node) for node in graph.nodes_of({kind}))
