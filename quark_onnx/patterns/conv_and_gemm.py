"""View the weights of Conv, ConvTranspose, Gemm and MatMul in a common layout.

The axes are groups, outputs, inputs, and the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node

T = TypeVar("T", bound=np.generic)

#: Layers with the channels along the second axis.
SPATIAL = frozenset({"Conv", "ConvTranspose"})
#: Layers with the channels along the last axis, depending on their attributes.
PRODUCTS = frozenset({"Gemm", "MatMul"})
#: All layers.
LAYERS = SPATIAL | PRODUCTS
#: Rank of a matrix.
MATRIX = 2


@dataclass(frozen=True)
class Layer:
    """A Conv, ConvTranspose, Gemm or MatMul with a constant weight.

    Attributes:
        node: the operator.
        groups: number of independent groups.
        turned: inputs come before outputs in the stored weight.
    """

    node: Node
    groups: int
    turned: bool

    @classmethod
    def of(cls, graph: Graph, node: Node) -> Layer | None:
        """Return the layer of a node; None if the node is not a layer."""
        # A product of a tensor with itself has no weight.
        if node.kind not in LAYERS or node.input(0) == node.input(1):
            return None
        if graph.elem_type(node.input(1)) != TensorProto.FLOAT:
            return None
        weight = graph.constant(node.input(1))
        if weight is None or not weight.size:
            return None
        is_matrix = weight.ndim == MATRIX and plain_matrix(node, weight.shape)
        if node.kind in PRODUCTS and not is_matrix:
            return None
        return cls.stored(node)

    @classmethod
    def stored(cls, node: Node) -> Layer:
        """Return the layout of a node's weight, whatever else the node does."""
        if node.kind in SPATIAL:
            groups = node.attribute("group", 1)
            # ONNX: Conv (out, in / groups, *kernel), ConvTranspose (in, out / groups, *kernel).
            return cls(node, groups, turned=node.kind == "ConvTranspose")
        transposed = node.kind == "Gemm" and node.attribute("transB", 0)
        # MatMul and Gemm store (in, out), Gemm with transB (out, in).
        return cls(node, 1, turned=not transposed)

    def weight(self, graph: Graph) -> NDArray[np.float64]:
        """Return the weight as float64 (groups, outputs / groups, inputs / groups, ...)."""
        return self.arranged(graph.known(self.node.input(1)).astype(np.float64))

    def shape(self, graph: Graph) -> tuple[int, ...]:
        """Return the shape of ``weight`` cheaply."""
        # Views only: no conversion to float64.
        return self.arranged(graph.known(self.node.input(1))).shape

    def outputs(self, graph: Graph) -> int:
        """Return the number of output channels."""
        groups, outputs = self.shape(graph)[:2]
        return groups * outputs

    def arranged(self, stored: NDArray[T]) -> NDArray[T]:
        """Arrange an array from the layout of the stored weight to that of ``weight``.

        Args:
            stored: an array of the stored weight's shape, such as the weight or its codes.

        Returns:
            A view where possible, (groups, outputs / groups, inputs / groups, ...).
        """
        # Groups divide the first axis: (groups, rows / groups, columns, *kernel).
        return self._exchanged(stored.reshape(self.groups, -1, *stored.shape[1:]))

    def as_stored(self, arranged: NDArray[T]) -> NDArray[T]:
        """Arrange an array from the layout of ``weight`` to that of the stored weight.

        Args:
            arranged: (groups, outputs / groups, inputs / groups, ...).
        """
        grouped = self._exchanged(arranged)
        return np.ascontiguousarray(grouped.reshape(-1, *grouped.shape[2:]))

    def _exchanged(self, grouped: NDArray[T]) -> NDArray[T]:
        """Exchange inputs and outputs where the layer stores them the other way around."""
        return grouped.swapaxes(1, 2) if self.turned else grouped

    def set_weight(
        self,
        graph: Graph,
        weight: NDArray[np.float64],
        suffix: str,
    ) -> None:
        """Store a new weight, in the layout of ``weight``, for the node alone.

        Args:
            graph: the graph, which gets a constant; the former one stays for other readers.
            weight: (groups, outputs / groups, inputs / groups, ...).
            suffix: end of the new constant's name.
        """
        stored = self.as_stored(weight).astype(np.float32)
        name = graph.add_constant(f"{self.node.input(1)}_{suffix}", stored)
        graph.set_input(self.node, 1, name)

    def bias(self, graph: Graph) -> NDArray[np.float64] | None:
        """Return the constant bias, shape (outputs,); zeros without a bias.

        None if the bias is computed, or of another shape.
        """
        outputs = self.outputs(graph)
        # A MatMul has no third input; an Add after it is no part of the layer.
        if not self.node.input(2) or self.node.kind == "MatMul":
            return np.zeros(outputs)
        stored = graph.constant(self.node.input(2))
        if stored is not None and stored.shape == (outputs,):
            return stored.astype(np.float64)
        return None

    def set_bias(
        self,
        graph: Graph,
        bias: NDArray[np.float64],
        suffix: str,
    ) -> None:
        """Store a new bias for the node alone; not for a MatMul.

        Args:
            graph: the graph, which gets a constant; the former one stays for other readers.
            bias: (outputs,).
            suffix: end of the new constant's name.
        """
        name = graph.add_constant(
            f"{self.node.input(2) or self.node.name + '_bias'}_{suffix}",
            bias.astype(np.float32),
        )
        if len(self.node.inputs) < 3:
            graph.append_input(self.node, name)
        else:
            graph.set_input(self.node, 2, name)


def plain_matrix(node: Node, shape: Sequence[object]) -> bool:
    """Return whether a node multiplies rows by a matrix on the right, without factors.

    Args:
        node: a node of any operator.
        shape: shape of the second input.
    """
    if node.kind == "Gemm":
        return unscaled(node) and not node.attribute("transA", 0)
    return node.kind == "MatMul" and len(shape) == MATRIX


def reads_activation(node: Node, tensor: str) -> bool:
    """Return whether a tensor is the first input of a node, and none of the others."""
    return node.input(0) == tensor and node.inputs.count(tensor) == 1


def output_axis(gemm: Node) -> int:
    """Return the axis of the output channels in the weight of a Gemm."""
    return 0 if gemm.attribute("transB", 0) else 1


def unscaled(node: Node) -> bool:
    """Return whether a Gemm has no factors alpha and beta."""
    return bool(node.attribute("alpha", 1.0) == 1.0 == node.attribute("beta", 1.0))


def is_padded(node: Node) -> bool:
    """Return whether a Conv or ConvTranspose reads padding."""
    padding = node.attribute("auto_pad", "NOTSET")
    if padding == "NOTSET":
        return any(node.attribute("pads", []))
    return bool(padding != "VALID")
