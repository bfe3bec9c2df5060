"""Constants as inputs of nodes, and how to change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ConstantInput:
    """A constant as an input of a node, and the axis along which its channels lie."""

    node: Node
    index: int
    axis: int = -1

    def value(self, graph: Graph) -> Floats:
        found = graph.constant(self.node.input(self.index))
        assert found is not None
        return found.astype(np.float64)

    def change(self, graph: Graph, key: str, by: Callable[[Floats], Floats]) -> None:
        """Let the node read a changed constant.

        Nodes that change the same one by the same ``key`` share the result.
        """
        name, value = self.node.input(self.index), self.value
        [changed] = graph.once(
            (name, key),
            lambda: [
                graph.add_constant(
                    f"{name}_{key}", by(value(graph)).astype(np.float32)
                ),
            ],
        )
        graph.set_input(self.node, self.index, changed)

    def scale(self, graph: Graph, key: str, factor: Floats) -> None:
        """Multiply each channel; a constant that all channels share becomes one for each."""
        self.change(
            graph,
            key,
            lambda value: value * (factor if self.axis == -1 else factor[:, None]),
        )

    def spread(self, graph: Graph, size: int) -> bool:
        """Whether it is a float with one value for each of ``size`` channels, or one for all of
        them.
        """
        found = graph.constant(self.node.input(self.index))
        return (
            found is not None
            and found.dtype == np.float32
            and (found.ndim == 0 or found.shape[-1] in (1, size))
        )


def private(graph: Graph, tensor: str) -> bool:
    """Whether nobody sees a tensor but the nodes of the graph itself."""
    return not graph.is_output(tensor) and not graph.captured(tensor)


def is_number(graph: Graph, tensor: str, value: float, within: float = 0.0) -> bool:
    """Whether a tensor is a constant that holds one number, this one or one no farther from it."""
    found = graph.constant(tensor)
    return (
        found is not None
        and found.size == 1
        and abs(float(found.reshape(())) - value) <= within
    )
