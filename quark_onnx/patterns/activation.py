"""Recognise the activation function after a layer, for the weight of rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.clip_bounds import clip_bounds


@dataclass(frozen=True)
class Activation:
    """An elementwise function.

    Attributes:
        kind: "linear", "clip", "leaky", "silu", "hardswish" or "gelu".
        low: lower bound of a clip.
        high: upper bound of a clip.
        slope: slope of a leaky Relu below zero.
    """

    kind: str = "linear"
    low: float = -np.inf
    high: float = np.inf
    slope: float = 0.0

    def value(self, x: Any, xp: ModuleType = np) -> Any:
        """Return the function at arrays of numpy, or of a module ``xp`` with the same functions."""
        return _VALUES[self.kind](self, x, xp)

    def derivative(self, x: Any, xp: ModuleType = np) -> Any:
        """Return a factor for the derivative: 1 for linear, booleans for a clip.

        The formulas have no choice per element: mispredicted branches take a processor ten times as
        long as
        a product.
        """
        return _DERIVATIVES[self.kind](self, x, xp)

    @property
    def linear(self) -> bool:
        """Whether the function is the identity."""
        return self.kind == "linear"


_ROOT = float(np.sqrt(2 / np.pi))


def _sigmoid(x: Any, xp: ModuleType) -> Any:
    return 1 / (1 + xp.exp(-xp.clip(x, -60, 60)))


def _silu_slope(x: Any, xp: ModuleType) -> Any:
    gate = _sigmoid(x, xp)
    return gate * (1 + x * (1 - gate))


def _gelu(x: Any, xp: ModuleType) -> Any:
    return 0.5 * x * (1 + xp.tanh(_ROOT * (x + 0.044715 * x * x * x)))


def _gelu_slope(x: Any, xp: ModuleType) -> Any:
    bend = xp.tanh(_ROOT * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + bend) + 0.5 * x * (1 - bend * bend) * _ROOT * (
        1 + 3 * 0.044715 * x * x
    )


def _within(x: Any, low: float, high: float) -> Any:
    if high == np.inf:
        return x > low
    return (x > low) & (x < high)


_Formula = Callable[[Activation, Any, Any], Any]
_VALUES: dict[str, _Formula] = {
    "linear": lambda f, x, xp: x,
    "clip": lambda f, x, xp: xp.clip(x, f.low, f.high),
    "leaky": lambda f, x, xp: xp.clip(x, 0, None) + f.slope * xp.clip(x, None, 0),
    "silu": lambda f, x, xp: x * _sigmoid(x, xp),
    "hardswish": lambda f, x, xp: x * xp.clip(x / 6 + 0.5, 0, 1),
    "gelu": lambda f, x, xp: _gelu(x, xp),
}
_DERIVATIVES: dict[str, _Formula] = {
    "linear": lambda f, x, xp: 1.0,
    "clip": lambda f, x, xp: _within(x, f.low, f.high),
    "leaky": lambda f, x, xp: (1 + f.slope) / 2 + (1 - f.slope) / 2 * xp.sign(x),
    "silu": lambda f, x, xp: _silu_slope(x, xp),
    "hardswish": lambda f, x, xp: (x / 3 + 0.5) * _within(x, -3.0, 3.0) + (x >= 3.0),
    "gelu": lambda f, x, xp: _gelu_slope(x, xp),
}


def activation_behind(graph: Graph, tensor: str) -> Activation:
    """Return the activation function after a tensor; linear without one."""
    readers = graph.consumers(tensor)
    if graph.is_output(tensor) or graph.captured(tensor):
        return Activation()
    if len(readers) == 2:
        return _gated(graph, tensor, readers)
    if len(readers) == 1:
        return _single(graph, readers[0])
    return Activation()


_KINDS = {"HardSwish": "hardswish", "Gelu": "gelu", "Swish": "silu"}


def _single(graph: Graph, node: Node) -> Activation:
    if node.kind in ("Relu", "Clip"):
        bounds = clip_bounds(graph, node)
        if bounds is None:
            return Activation()
        return Activation("clip", *bounds)
    if node.kind == "LeakyRelu":
        return Activation(
            "leaky",
            slope=float(node.attribute("alpha", 0.01)),
        )
    return Activation(_KINDS.get(node.kind, "linear"))


def gate_and_product(
    tensor: str,
    readers: Sequence[Node],
) -> tuple[Node, Node] | None:
    """Return the nodes of x * sigmoid(x) or x * hardsigmoid(x), or None.

    Args:
        tensor: the tensor x.
        readers: all readers of the tensor.
    """
    if len(readers) != 2:
        return None
    gate, product = readers
    if gate.kind == "Mul":
        gate, product = product, gate
    if product.kind != "Mul" or gate.kind not in ("Sigmoid", "HardSigmoid"):
        return None
    if set(product.inputs) != {tensor, gate.outputs[0]}:
        return None
    return gate, product


def _gated(graph: Graph, tensor: str, readers: list[Node]) -> Activation:
    """Recognise SiLU and HardSwish, decomposed into two nodes."""
    nodes = gate_and_product(tensor, readers)
    if nodes is None:
        return Activation()
    gate = nodes[0]
    if len(graph.consumers(gate.outputs[0])) != 1:
        return Activation()
    if gate.kind == "Sigmoid":
        return Activation("silu")
    alpha = gate.attribute("alpha", 0.2)
    beta = gate.attribute("beta", 0.5)
    # HardSwish is x * max(0, min(1, x / 6 + 0.5)); exporters round the factor
    if abs(alpha - 1 / 6) < 1e-3 and beta == 0.5:
        return Activation("hardswish")
    return Activation()
