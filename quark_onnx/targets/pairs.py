"""Positions of tensors in a model with Q/DQ pairs of any tool.

A tensor is identified by its codes: the output of a QuantizeLinear, or the constant that a lone
DequantizeLinear reads. The codes of a node's result are found by the rules of amd-quark 0.13
(refine.py): after a fused activation, and after the factor that imitates the engine's average or
hard sigmoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import code_type, codes_of
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.targets.constraints import Positions
from quark_onnx.targets.wiring import chain, is_fused

#: Middle code by type, if not 0.
_MIDDLES: dict[int, int] = {TensorProto.UINT8: 128, TensorProto.UINT16: 1 << 15}
#: Operators that amd-quark follows with a factor.
_FACTORED = frozenset({"AveragePool", "GlobalAveragePool", "HardSigmoid"})


@dataclass(frozen=True)
class PairParameters:
    """Scale, zero point and type of a Q or DQ node.

    Attributes:
        scale: values of the scale; None if the scale is computed.
        zero_point: values of the zero point; zeros if it is omitted, None if it is computed.
        elem_type: type of the codes, as ``TensorProto.DataType``.
    """

    scale: NDArray[Any] | None
    zero_point: NDArray[Any] | None
    elem_type: int

    @property
    def position(self) -> int | None:
        """Return p of a per-tensor scale 2**-p; None unless the scale has this form."""
        if self.scale is None or self.scale.size != 1:
            return None
        # The mantissa of 0, infinity and NaN is the number itself.
        # frexp returns a mantissa in [0.5, 1): a power of two 2**k is 0.5 * 2**(k + 1), so p = -k.
        mantissa, exponent = np.frexp(float(self.scale.reshape(-1)[0]))
        return 1 - int(exponent) if mantissa == 0.5 else None

    @property
    def symmetric(self) -> bool:
        """Return True if the zero point is the middle code."""
        if self.zero_point is None:
            return False
        # Codes of signed types are symmetric around 0.
        middle = _MIDDLES.get(self.elem_type, 0)
        return bool((self.zero_point == middle).all())


class Pairs:
    """Q and DQ nodes of a graph, and positions of tensors with power-of-two scales."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.quantizing = graph.nodes_of_type(QUANTIZE)
        self.dequantizing = graph.nodes_of_type(DEQUANTIZE)
        self.positions: Positions = {}
        # DQ nodes second: weights and biases have constant codes, and no Q node.
        for node in (*self.quantizing, *self.dequantizing):
            position = self.grid(node).position
            if position is not None:
                self.positions[codes_of(node)] = position

    def grid(self, node: Node) -> PairParameters:
        """Return the grid of a Q or DQ node."""
        scale = self.graph.constant(node.input(1))
        zero_point = self.graph.optional_constant(node.input(2), np.zeros(1, np.int64))
        kind = code_type(self.graph, node) or int(TensorProto.UINT8)
        return PairParameters(scale, zero_point, kind)

    # -- the interface of constraints_of
    # ------------------------------------------------------------------------------------

    def read(self, node: Node, index: int) -> str | None:
        """Return the codes of an input; None if it is not rounded."""
        producer = self.graph.producer(node.input(index))
        if producer is None:
            return None
        if producer.op_type in DEQUANTIZE:
            return self._known(producer.inputs[0])
        # amd-quark removes the pair between a Pad and the average that alone reads the result.
        if producer.kind == "Pad" and node.kind.endswith("AveragePool"):
            return self.read(producer, 0)
        return None

    def result(self, node: Node) -> str | None:
        """Return the codes of the result, after fused nodes; None if it is not rounded."""
        return self._known(self.codes_of(self.chain(node)[-1]))

    def leaks(self, node: Node) -> bool:
        """Return True if a LeakyRelu is fused with a node."""
        return any(fused.kind == "LeakyRelu" for fused in self.chain(node)[1:])

    def chain(self, node: Node) -> list[Node]:
        """Return a node with its fused nodes.

        The factor after an average or a hard sigmoid is part of the chain.
        """
        return chain(
            self.graph,
            node,
            lambda member: bool(self.codes_of(member)),
            lambda member, behind: (
                is_fused(member, behind)
                or (behind.kind == "Mul" and member.kind in _FACTORED)
            ),
        )

    def codes_of(self, node: Node) -> str:
        """Return the codes of a node's result; empty if the result is not rounded."""
        # The first QuantizeLinear decides: pairs of their own for further readers have equal
        # scales.
        # Dedicated pairs write several codes of one tensor: the first ones stand for the tensor.
        for reader in self.graph.consumers(node.output(0)):
            if reader.op_type in QUANTIZE:
                return reader.outputs[0]
        return ""

    def _known(self, codes: str) -> str | None:
        return codes if codes in self.positions else None
