"""Which constraints a graph has, whoever knows its positions: a plan, or one who reads Q/DQ pairs.

What a node computes has the position of the tensor that is rounded: behind a fused activation, or
behind the factor that imitates the engine's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.targets.constraints import (
    Constraint,
    Constraints,
    Equal,
    Key,
    Near,
    Shift,
)

#: Activations that are computed with the operator in front of them.
FUSED = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu"})
_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
#: alpha of the hard sigmoid that the engine computes, and beta.
_SIXTH, _HALF = 1 / 6, 0.5


class Wiring(Protocol):
    """What is known of positions; None stands for a tensor that has none."""

    def read(self, node: Node, index: int) -> Key | None:
        """The key of an input."""

    def result(self, node: Node) -> Key | None:
        """The key of what a node computes, behind what is fused into it."""

    def leaks(self, node: Node) -> bool:
        """Whether a LeakyRelu is fused into a node."""


def is_fused(node: Node, behind: Node) -> bool:
    """Whether an activation is computed with the operator in front of it."""
    return behind.kind in FUSED


def chain(
    graph: Graph,
    node: Node,
    rounded: Callable[[Node], bool],
    fused: Callable[[Node, Node], bool] = is_fused,
) -> list[Node]:
    """A node, and what is computed with it: that alone reads it, and in front of which nothing is
    rounded.
    """
    found = [node]
    while found[-1].outputs and not rounded(found[-1]):
        readers = graph.consumers(found[-1].outputs[0])
        if (
            len(readers) != 1
            or graph.is_output(found[-1].outputs[0])
            or not fused(found[-1], readers[0])
        ):
            break
        found.append(readers[0])
    return found


def constraints_of(graph: Graph, nodes: Iterable[Node], wiring: Wiring) -> Constraints:
    """The constraints of some nodes, those that need a position which is not known left out.

    The order is amd-quark's: alignments, what Add reads and writes, what Conv writes, biases, hard
    sigmoids, swishes.
    """
    every = list(nodes)
    gates = {
        key
        for node in every
        if is_hard_sigmoid(node) and (key := wiring.read(node, 0)) is not None
    }
    found = list[Constraint]()
    for node in every:
        found += _of(node, wiring, gates)
    order = {
        rule: place
        for place, rule in enumerate(
            ("C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10"),
        )
    }
    return Constraints(sorted(found, key=lambda each: order[each.rule]))


def is_hard_sigmoid(node: Node) -> bool:
    """Whether it is the hard sigmoid that the engine has."""
    if node.kind != "HardSigmoid":
        return False
    alpha, beta = (
        float(node.attribute("alpha", 0.2)),
        float(node.attribute("beta", 0.5)),
    )
    return bool(np.isclose(alpha, _SIXTH, atol=1e-6) and beta == _HALF)


def _of(node: Node, wiring: Wiring, gates: set[Key]) -> list[Constraint]:  # noqa: PLR0911
    kind, name = node.kind, node.name
    o = wiring.result(node)
    inputs = [
        wiring.read(node, place) for place, tensor in enumerate(node.inputs) if tensor
    ]
    if o is None or not inputs or inputs[0] is None:
        return []
    i = inputs[0]
    if kind == "Concat":
        known = tuple(key for key in inputs if key is not None)
        return [Equal("C1", name, (*known, o))]
    for rule, kinds in (("C2", _POOLS), ("C3", ("Pad",)), ("C4", ("Slice",))):
        if kind in kinds:
            return [Equal(rule, name, (i, o))]
    both = tuple(key for key in inputs[:2] if key is not None)
    if kind in ("Add", "Sub", "Mul") and len(both) == 2:
        return _elementwise(kind, name, both, o, gates)
    if kind in ("Conv", "Gemm") and len(both) == 2:
        return _product(node, wiring, both, o)
    if is_hard_sigmoid(node):
        return [
            Shift("C9", name, (i,), (), 0, 15, i),
            Shift("C9", name, (o,), (), 7, None, o),
            Shift("C9", name, (i,), (o,), -14, None, o),
        ]
    return []


def _elementwise(
    kind: str,
    name: str,
    inputs: tuple[Key, ...],
    o: Key,
    gates: set[Key],
) -> list[Constraint]:
    if kind == "Mul":
        found: list[Constraint] = [Shift("C6", name, inputs, (o,), 0, 32, o)]
        swish = (
            [Shift("C10", name, inputs, (o,), 0, 15, o)]
            if gates.intersection(inputs)
            else []
        )
        return [*found, *swish]
    near: list[Constraint] = [Near("C5", name, inputs, 7)]
    return (
        near
        if kind == "Sub"
        else [*near, Shift("C6", name, inputs, (o,), -7, 25, o, smallest=True)]
    )


def _product(
    node: Node,
    wiring: Wiring,
    both: tuple[Key, ...],
    o: Key,
) -> list[Constraint]:
    name, w = node.name, both[1]
    found: list[Constraint] = [Shift("C7", name, both, (o,), 0, 16, w, free=True)]
    b = wiring.read(node, 2) if node.input(2) else None
    if b is not None:
        least = 0 if wiring.leaks(node) else None
        found.append(Shift("C8", name, both, (b,), least, 15, b, free=True))
        found.append(Shift("C8", name, (b,), (o,), None, 16, b, free=True))
    return found
