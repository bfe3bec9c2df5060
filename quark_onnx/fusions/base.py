"""The contract of a fusion, and how it looks at Q/DQ pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.graph import Graph, Node

#: Writes an operator that computes on codes in place of a node between Q/DQ pairs; False if it has none for the node.
Fusion = Callable[[Graph, Node], bool]

CONTRIB = "com.microsoft"


@dataclass(frozen=True)
class Codes:
    """What a DequantizeLinear reads.

    Attributes:
        node: the DequantizeLinear.
        codes, scale, zero_point: names; zero_point is empty where it is left out.
    """

    node: Node
    codes: str
    scale: str
    zero_point: str

    @property
    def axis(self) -> int:
        return int(self.node.attribute("axis", 1))

    @property
    def block_size(self) -> int:
        return int(self.node.attribute("block_size", 0))


def codes_of(graph: Graph, tensor: str) -> Codes | None:
    """The codes behind a tensor; None if it is not dequantized."""
    node = graph.producer(tensor)
    if node is None or node.op_type != "DequantizeLinear":
        return None
    return Codes(node, node.input(0), node.input(1), node.input(2))


def stored_codes(graph: Graph, tensor: str) -> Codes | None:
    """The codes behind a constant; None if it is computed, or not dequantized."""
    found = codes_of(graph, tensor)
    return found if found is not None and graph.is_constant(found.codes) else None


def value(graph: Graph, tensor: str) -> NDArray[Any]:
    """A constant that is known to be one."""
    array = graph.constant(tensor)
    assert array is not None, tensor
    return array


def zero_points(graph: Graph, codes: Codes) -> NDArray[np.int64]:
    """Zero points of constant codes, of the shape of their scale; zeros where they are left out."""
    if codes.zero_point:
        return value(graph, codes.zero_point).astype(np.int64)
    return np.zeros(value(graph, codes.scale).shape, np.int64)


def replace(graph: Graph, node: Node, result: str) -> None:
    """Let ``result`` stand for the first output of ``node``, which goes."""
    output = node.outputs[0]
    graph.remove([node])
    producer = graph.producer(result)
    assert producer is not None
    graph.set_output(producer, producer.outputs.index(result), output)
