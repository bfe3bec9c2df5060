"""Readers: which nodes read a tensor, kept up to date one edge at a time, as a node may have
thousands of inputs.
"""

from __future__ import annotations

from collections.abc import Collection

from quark_onnx.graph.node import Node


class Readers:
    """How many times each node reads each tensor; nodes in the order in which they began to."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Node, int]] = {}

    def of(self, tensor: str) -> Collection[Node]:
        """The nodes that read a tensor, each once."""
        return self._counts.get(tensor, {}).keys()

    def add(self, node: Node, tensor: str) -> None:
        """Add one edge; an empty name is none."""
        if tensor:
            readers = self._counts.setdefault(tensor, {})
            readers[node] = readers.get(node, 0) + 1

    def remove(self, node: Node, tensor: str) -> None:
        """Take one edge away, if there is one."""
        readers = self._counts.get(tensor, {})
        if readers.get(node, 0) > 1:
            readers[node] -= 1
        else:
            readers.pop(node, None)
