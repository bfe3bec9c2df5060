"""Positions in a model with Q/DQ pairs, whoever wrote it.

A tensor is known by its codes: the output of a QuantizeLinear, or the constant that a lone
DequantizeLinear reads. The rules for what belongs to a node's result are those of amd-quark 0.13
(refine.py): behind an activation that is fused into it, and behind the factor that imitates the
engine's average or hard sigmoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.targets import Positions, chain, is_fused

#: The code in the middle, where it is not 0.
_MIDDLES: dict[int, int] = {TensorProto.UINT8: 128, TensorProto.UINT16: 1 << 15}
#: Operators that amd-quark puts a factor behind.
_FACTORED = frozenset({"AveragePool", "GlobalAveragePool", "HardSigmoid"})


@dataclass(frozen=True)
class Grid:
    """What a Q or DQ node reads beside the values.

    Attributes:
        scale: all its values; None if they are computed.
        zero_point: likewise; zeros where it is left out.
        elem_type: of the codes, as ONNX numbers types.
    """

    scale: NDArray[Any] | None
    zero_point: NDArray[Any] | None
    elem_type: int

    @property
    def position(self) -> int | None:
        """p of one scale 2**-p for the whole tensor; None if there is no such scale."""
        if self.scale is None or self.scale.size != 1:
            return None
        scale = float(self.scale.reshape(-1)[0])
        if not (np.isfinite(scale) and scale > 0):
            return None
        mantissa, exponent = np.frexp(scale)
        return 1 - int(exponent) if mantissa == 0.5 else None

    @property
    def symmetric(self) -> bool:
        """Whether zero lies in the middle of the codes."""
        if self.zero_point is None:
            return False
        middle = _MIDDLES.get(self.elem_type, 0)
        return bool((self.zero_point == middle).all())


class Pairs:
    """The Q and DQ nodes of a graph, and the positions of all tensors whose scale is a power of
    two.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.quantizing = [node for node in graph.nodes if node.op_type in QUANTIZE]
        self.dequantizing = [node for node in graph.nodes if node.op_type in DEQUANTIZE]
        self.positions: Positions = {}
        for node in (*self.quantizing, *self.dequantizing):
            position = self.grid(node).position
            if position is not None:
                self.positions[
                    node.outputs[0] if node.op_type in QUANTIZE else node.inputs[0]
                ] = position

    def grid(self, node: Node) -> Grid:
        """The grid of a Q or DQ node."""
        scale = self.graph.constant(node.input(1))
        if not node.input(2):
            codes = node.outputs[0] if node.op_type in QUANTIZE else node.inputs[0]
            kind = self.graph.elem_type(codes) or TensorProto.UINT8
            return Grid(scale, np.zeros(1, np.int64), kind)
        return Grid(
            scale,
            self.graph.constant(node.input(2)),
            self.graph.elem_type(node.input(2)),
        )

    # -- as constraints_of wants it
    # ------------------------------------------------------------------------------------

    def read(self, node: Node, index: int) -> str | None:
        producer = self.graph.producer(node.input(index))
        if producer is None:
            return None
        if producer.op_type in DEQUANTIZE:
            return self._known(producer.inputs[0])
        return (
            self.read(producer, 0)
            if producer.kind == "Pad" and node.kind.endswith("AveragePool")
            else None
        )

    def result(self, node: Node) -> str | None:
        return self._known(self.codes_of(self.chain(node)[-1]))

    def leaks(self, node: Node) -> bool:
        return any(each.kind == "LeakyRelu" for each in self.chain(node)[1:])

    def chain(self, node: Node) -> list[Node]:
        """A node, and what is computed with it, the factor behind an average or a hard sigmoid
        among it.
        """
        return chain(
            self.graph,
            node,
            lambda each: bool(self.codes_of(each)),
            lambda each, behind: (
                is_fused(each, behind)
                or (behind.kind == "Mul" and each.kind in _FACTORED)
            ),
        )

    def codes_of(self, node: Node) -> str:
        """The codes of what a node computes; empty where it is not rounded."""
        readers = self.graph.consumers(node.outputs[0]) if node.outputs else []
        return next(
            (reader.outputs[0] for reader in readers if reader.op_type in QUANTIZE),
            "",
        )

    def _known(self, codes: str) -> str | None:
        return codes if codes in self.positions else None
