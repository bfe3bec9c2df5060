"""Lookup of nodes by the names of their results."""

from __future__ import annotations

from collections.abc import Iterable

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.graph import Graph, Node


def producers_of(graph: Graph, tensors: Iterable[str]) -> list[Node]:
    """Return the nodes that compute tensors, in the order of the names.

    Raises:
        ConfigError: no node computes a tensor.
    """
    producers = list[Node]()
    # Inputs and initializers have no producer: a cut or a stop at one has nothing before it.
    for name in tensors:
        node = graph.producer(name)
        if node is None:
            raise ConfigError(
                f"no node computes the tensor {name!r}{nearest(name, graph.results())}",
            )
        producers.append(node)
    return producers
