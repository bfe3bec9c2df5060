"""Read and change constant inputs of nodes."""

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
    """A constant input of a node, with the axis of its channels."""

    node: Node
    index: int
    axis: int = -1

    def value(self, graph: Graph) -> Floats:
        """Return the constant as float64."""
        return graph.known(self.node.input(self.index)).astype(np.float64)

    def sizes(self, graph: Graph) -> tuple[int | str | None, ...]:
        """Return the shape of the constant."""
        return graph.sizes(self.node.input(self.index))

    def change(self, graph: Graph, key: str, by: Callable[[Floats], Floats]) -> None:
        """Let the node read a changed constant.

        Nodes that change the same constant under the same ``key`` share the result.

        Args:
            graph: the graph, which is changed in place.
            key: identifies the change, and ends the name of the new constant.
            by: returns the changed value, which is stored as float32.
        """
        name = self.node.input(self.index)

        # Nodes that share a weight go on sharing the changed one.
        result = graph.shared_constant(
            (name, key),
            f"{name}_{key}",
            lambda: by(self.value(graph)).astype(np.float32),
        )
        graph.set_input(self.node, self.index, result)

    def scale(self, graph: Graph, key: str, factor: Floats) -> None:
        """Multiply the channels; a scalar becomes a vector.

        Args:
            graph: the graph, which is changed in place.
            key: as for ``change``.
            factor: factors, (channels,).
        """
        self.change(
            graph,
            key,
            # Weight (channels, n) along the first axis, otherwise (..., channels).
            lambda value: value * (factor if self.axis == -1 else factor[:, None]),
        )

    def spread(self, graph: Graph, size: int) -> bool:
        """Return whether the constant is float with a value per channel, or a single one.

        Args:
            graph: the graph.
            size: number of channels, along the last axis.
        """
        array = graph.constant(self.node.input(self.index))
        return (
            array is not None
            and array.dtype == np.float32
            and (array.ndim == 0 or array.shape[-1] in (1, size))
        )


def private(graph: Graph, tensor: str) -> bool:
    """Return whether a tensor is neither an output nor captured by a body."""
    return not graph.is_output(tensor) and not graph.captured(tensor)


def is_number(graph: Graph, tensor: str, value: float, within: float = 0.0) -> bool:
    """Return whether a tensor is a constant scalar within ``within`` of ``value``.

    Args:
        graph: the graph.
        tensor: name of the tensor.
        value: the number.
        within: greatest difference from the number.
    """
    array = graph.constant(tensor)
    return (
        array is not None
        and array.size == 1
        and abs(float(array.reshape(())) - value) <= within
    )
