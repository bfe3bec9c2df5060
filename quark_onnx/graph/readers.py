"""Index the readers of tensors, updated edge by edge, as a node may have thousands of inputs."""

from __future__ import annotations

from collections.abc import Collection

from quark_onnx.graph.node import Node


class Readers:
    """Counts of the edges from tensors to nodes; nodes in the order of their first edge."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Node, int]] = {}

    def of(self, tensor: str) -> Collection[Node]:
        """Return the distinct readers of a tensor."""
        return self._counts.get(tensor, {}).keys()

    def add(self, node: Node, tensor: str) -> None:
        """Add an edge, except for an empty name.

        Args:
            node: the reader.
            tensor: name of the tensor. A node that reads a tensor twice has two edges.
        """
        if tensor:
            readers = self._counts.setdefault(tensor, {})
            readers[node] = readers.get(node, 0) + 1

    def remove(self, node: Node, tensor: str) -> None:
        """Remove an edge, if present.

        Args:
            node: the reader.
            tensor: name of the tensor.
        """
        readers = self._counts.get(tensor, {})
        # A node may read a tensor at several inputs, and in its bodies.
        if readers.get(node, 0) > 1:
            readers[node] -= 1
        else:
            readers.pop(node, None)
