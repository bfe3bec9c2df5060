"""Derive the constraints of a graph from positions, as known to a plan or from Q/DQ pairs.

The result of a node has the position of the tensor that is rounded: after a fused activation, or
after the factor that imitates the engine's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import only_reader
from quark_onnx.targets.constraints import (
    NAMES,
    Constraint,
    Constraints,
    Key,
    Near,
    Shift,
)

#: Activations that the engine fuses with the operator before them.
FUSED = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu"})
_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
#: alpha and beta of the engine's hard sigmoid.
_SIXTH = 1 / 6
_HALF = 0.5


class Wiring(Protocol):
    """Source of the keys of positions; None stands for a tensor without a position."""

    def read(self, node: Node, index: int) -> Key | None:
        """Return the key of an input."""

    def result(self, node: Node) -> Key | None:
        """Return the key of a node's result, after fused operators."""

    def leaks(self, node: Node) -> bool:
        """Return whether a LeakyRelu is fused into a node."""


def is_fused(node: Node, behind: Node) -> bool:
    """Return whether an activation is fused with the operator before it."""
    return behind.kind in FUSED


def chain(
    graph: Graph,
    node: Node,
    rounded: Callable[[Node], bool],
    fused: Callable[[Node, Node], bool] = is_fused,
) -> list[Node]:
    """Return a node with the operators fused into the node.

    A fused operator is the only reader of an unrounded result.

    Args:
        graph: the model.
        node: the first node.
        rounded: whether the result of a node is rounded.
        fused: whether the second node can be fused into the first.
    """
    nodes = [node]
    # A rounded result ends the chain: the position of the node is that of its Q/DQ pair.
    while nodes[-1].outputs and not rounded(nodes[-1]):
        last = nodes[-1]
        reader = only_reader(graph, last.outputs[0])
        if (
            # Further readers, or an output, need the unfused value.
            reader is None
            or graph.is_output(last.outputs[0])
            or not fused(last, reader)
        ):
            break
        nodes.append(reader)
    return nodes


def constraints_of(graph: Graph, nodes: Iterable[Node], wiring: Wiring) -> Constraints:
    """Return the constraints of nodes on known positions.

    The order is amd-quark's: alignments, what Add reads and writes, what Conv writes, biases, hard
    sigmoids, swishes.

    Args:
        graph: the model.
        nodes: the nodes.
        wiring: source of the keys of positions.
    """
    # An iterator would be exhausted by the search for gates.
    nodes = list(nodes)
    gates = {wiring.read(node, 0) for node in nodes if is_hard_sigmoid(node)} - {None}
    # Sorting is stable: within a rule, the order is that of the graph.
    constraints = [rule for node in nodes for rule in _of(node, wiring, gates)]
    # NAMES lists the rules in the order of amd-quark's loop.
    order = list(NAMES)
    constraints.sort(key=lambda constraint: order.index(constraint.rule))
    return Constraints(constraints)


def is_hard_sigmoid(node: Node) -> bool:
    """Return whether a node is the hard sigmoid of the engine."""
    if node.kind != "HardSigmoid":
        return False
    # 0.2 and 0.5 are the defaults of ONNX, which are not those of the engine.
    alpha = float(node.attribute("alpha", 0.2))
    beta = float(node.attribute("beta", 0.5))
    # 1/6 as a float32 attribute differs from the double by 5e-9.
    return bool(np.isclose(alpha, _SIXTH, atol=1e-6) and beta == _HALF)


#: Rules of operators whose input and result have equal positions.
_EQUAL = {
    **dict.fromkeys(_POOLS, "C2"),
    "Pad": "C3",
    "Slice": "C4",
}


def _of(node: Node, wiring: Wiring, gates: set[Key]) -> list[Constraint]:
    """Return the constraints at a node; none if a position is unknown.

    Args:
        wiring: source of the keys of positions.
        gates: keys of the inputs of hard sigmoids, by which a swish is recognized.
    """
    kind = node.kind
    name = node.name
    o = wiring.result(node)
    inputs = _keys_read(node, wiring)
    # amd-quark skips a check as well if a position is missing.
    if o is None or not inputs or inputs[0] is None:
        return []
    i = inputs[0]
    both = tuple(key for key in inputs[:2] if key is not None)
    constraints = list[Constraint]()
    if kind == "Concat":
        # An input without a position, such as a float constant, leaves the others constrained.
        known = (key for key in inputs if key is not None)
        constraints = [Near("C1", name, (*known, o))]
    elif kind in _EQUAL:
        constraints = [Near(_EQUAL[kind], name, (i, o))]
    elif kind in ("Add", "Sub", "Mul") and len(both) == 2:
        constraints = _elementwise(kind, name, both, o, gates)
    elif kind in ("Conv", "Gemm") and len(both) == 2:
        constraints = _product(node, wiring, both, o)
    elif is_hard_sigmoid(node):
        constraints = _gate(name, i, o)
    return constraints


def _keys_read(node: Node, wiring: Wiring) -> list[Key | None]:
    """Return the keys of the inputs that are not omitted."""
    return [
        wiring.read(node, index) for index, tensor in enumerate(node.inputs) if tensor
    ]


def _gate(name: str, i: Key, o: Key) -> list[Constraint]:
    """Return the constraints of a hard sigmoid.

    0 <= i <= 15, o >= 7 and o <= i + 14; the reference's bound of 31 on 14 + i - o cannot bind.
    """
    return [
        Shift("C9", name, (i,), (), 0, 15, i),
        Shift("C9", name, (o,), (), 7, None, o),
        Shift("C9", name, (i,), (o,), -14, None, o),
    ]


def _elementwise(
    kind: str, name: str, inputs: tuple[Key, ...], o: Key, gates: set[Key]
) -> list[Constraint]:
    """Return the constraints of an Add, Sub or Mul of two tensors with positions.

    Args:
        inputs: keys of the operands.
        o: key of the result.
        gates: keys of the inputs of hard sigmoids.
    """
    if kind == "Mul":
        constraints: list[Constraint] = [Shift("C6", name, inputs, (o,), 0, 32, o)]
        # A product with the input of a hard sigmoid is a swish.
        if gates.intersection(inputs):
            constraints.append(Shift("C10", name, inputs, (o,), 0, 15, o))
        return constraints
    # Both inputs are shifted to one position before the sum.
    constraints = [Near("C5", name, inputs, 7)]
    # amd-quark has no shift_write for Sub.
    if kind == "Add":
        constraints.append(Shift("C6", name, inputs, (o,), -7, 25, o, smallest=True))
    return constraints


def _product(
    node: Node, wiring: Wiring, both: tuple[Key, ...], o: Key
) -> list[Constraint]:
    """Return the constraints of a Conv or Gemm.

    Args:
        wiring: source of the keys of positions.
        both: keys of the input and the weight.
        o: key of the result.
    """
    name = node.name
    w = both[1]
    constraints: list[Constraint] = [Shift("C7", name, both, (o,), 0, 16, w, free=True)]
    b = wiring.read(node, 2) if node.input(2) else None
    if b is not None:
        # Two shifts of the bias: against the products by i + w - b, and against the output by
        # b - o. The source bounds i + w - b from below by shift_cut - 16, which with
        # shift_cut = i + w - o is the upper bound of 16 for b - o.
        # With a LeakyRelu after the node the bias may be no finer than the products.
        least = 0 if wiring.leaks(node) else None
        constraints += [
            Shift("C8", name, both, (b,), least, 15, b, free=True),
            Shift("C8", name, (b,), (o,), None, 16, b, free=True),
        ]
    return constraints
