"""Layers that multiply by a constant weight, all seen alike: groups, then outputs, then inputs,
then what is left.
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

#: Operators that are layers under the right attributes.
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
#: Those whose channels are the second axis; those of the others are the last one.
SPATIAL = frozenset({"Conv", "ConvTranspose"})


@dataclass(frozen=True)
class Layer:
    """A Conv, ConvTranspose, Gemm or MatMul with a constant weight.

    Attributes:
        node: the operator.
        groups: how many independent layers it consists of.
        turned: inputs come before outputs in the stored weight.
    """

    node: Node
    groups: int
    turned: bool

    @classmethod
    def of(cls, graph: Graph, node: Node) -> Layer | None:
        """The layer that a node is; None if it is none."""
        if (
            node.kind not in LAYERS
            or graph.elem_type(node.input(1)) != TensorProto.FLOAT
        ):
            return None
        weight = graph.constant(node.input(1))
        if weight is None or not weight.size or node.input(0) == node.input(1):
            return None
        spatial = node.kind in SPATIAL
        plain = node.kind != "Gemm" or (
            unscaled(node) and not node.attribute("transA", 0)
        )
        return cls.stored(node) if spatial or (weight.ndim == 2 and plain) else None

    @classmethod
    def stored(cls, node: Node) -> Layer:
        """How a node of one of these operators stores its weight, whatever else it does."""
        if node.kind in SPATIAL:
            return cls(node, node.attribute("group", 1), node.kind == "ConvTranspose")
        return cls(node, 1, not (node.kind == "Gemm" and node.attribute("transB", 0)))

    def weight(self, graph: Graph) -> NDArray[np.float64]:
        """The weight as float64 of shape (groups, outputs / groups, inputs / groups, ...)."""
        stored = graph.constant(self.node.input(1))
        assert stored is not None
        return self.arranged(stored.astype(np.float64))

    def shape(self, graph: Graph) -> tuple[int, ...]:
        """That of ``weight``, which is not computed for it."""
        stored = graph.constant(self.node.input(1))
        assert stored is not None
        return self.arranged(stored).shape

    def outputs(self, graph: Graph) -> int:
        """How many channels it computes."""
        groups, outputs = self.shape(graph)[:2]
        return groups * outputs

    def arranged(self, stored: NDArray[T]) -> NDArray[T]:
        """An array that is stored as the weight is, as (groups, outputs / groups, inputs / groups,
        ...).
        """
        grouped = stored.reshape(self.groups, -1, *stored.shape[1:])
        return grouped.swapaxes(1, 2) if self.turned else grouped

    def as_stored(self, arranged: NDArray[T]) -> NDArray[T]:
        """The reverse of ``arranged``."""
        parts = arranged.swapaxes(1, 2) if self.turned else arranged
        return np.ascontiguousarray(parts.reshape(-1, *parts.shape[2:]))

    def set_weight(
        self,
        graph: Graph,
        weight: NDArray[np.float64],
        suffix: str,
    ) -> None:
        """Store another weight, of the shape that ``weight`` has, for this node alone."""
        stored = self.as_stored(weight).astype(np.float32)
        graph.set_input(
            self.node,
            1,
            graph.add_constant(f"{self.node.input(1)}_{suffix}", stored),
        )

    def bias(self, graph: Graph) -> NDArray[np.float64] | None:
        """The constant bias, one value for each output, zeros where there is none.

        None if it is of another kind.
        """
        outputs = self.outputs(graph)
        if not self.node.input(2) or self.node.kind == "MatMul":
            return np.zeros(outputs)
        stored = graph.constant(self.node.input(2))
        return (
            stored.astype(np.float64)
            if stored is not None and stored.shape == (outputs,)
            else None
        )

    def set_bias(self, graph: Graph, bias: NDArray[np.float64], suffix: str) -> None:
        """Store another bias, for this node alone; a MatMul cannot have one."""
        name = graph.add_constant(
            f"{self.node.input(2) or self.node.name + '_bias'}_{suffix}",
            bias.astype(np.float32),
        )
        if len(self.node.inputs) < 3:
            graph.append_input(self.node, name)
        else:
            graph.set_input(self.node, 2, name)


def plain_matrix(node: Node, shape: Sequence[object]) -> bool:
    """Return whether a node is a MatMul or an unscaled Gemm that multiplies rows by one matrix on
    its right.

    Args:
        node: the operator.
        shape: that of its second input.
    """
    if node.kind == "Gemm":
        return unscaled(node) and not node.attribute("transA", 0)
    return node.kind == "MatMul" and len(shape) == 2


def unscaled(node: Node) -> bool:
    """Whether a Gemm is a product and a sum, without factors."""
    return bool(node.attribute("alpha", 1.0) == 1.0 == node.attribute("beta", 1.0))
