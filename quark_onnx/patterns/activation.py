"""Recognise the activation function after a layer, for the weight of rounding errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import only_reader, only_use
from quark_onnx.graph.pattern import Match, Pattern, op, tensor
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
        """Return the function at arrays of numpy, or of a module ``xp`` with the same functions.

        Args:
            x: inputs of the function, of any shape.
            xp: the module.
        """
        return _VALUES[self.kind](self, x, xp)

    def derivative(self, x: Any, xp: ModuleType = np) -> Any:
        """Return a factor for the derivative: 1 for linear, booleans for a clip.

        The formulas have no choice per element: mispredicted branches take a processor ten times as
        long as a product.

        Args:
            x: inputs of the function, of any shape.
            xp: numpy, or a module with the same functions.
        """
        return _DERIVATIVES[self.kind](self, x, xp)

    def value_and_derivative(self, x: Any) -> tuple[Any, Any]:
        """Return the function and the factor for the derivative at an array of numpy."""
        if self.kind != "silu":
            return self.value(x), self.derivative(x)
        gate = _sigmoid(x, np)
        return x * gate, _silu_slope(x, gate)

    @property
    def linear(self) -> bool:
        """Whether the function is the identity."""
        return self.kind == "linear"


#: Factor of the approximation of Gelu by tanh (Hendrycks and Gimpel, 2016).
_ROOT = float(np.sqrt(2 / np.pi))


def _sigmoid(x: Any, xp: ModuleType) -> Any:
    # exp(60) is finite in float32, and sigmoid(-60) is 0 within the precision of any use.
    return 1 / (1 + xp.exp(-xp.clip(x, -60, 60)))


def _silu_slope(x: Any, gate: Any) -> Any:
    return gate * (1 + x * (1 - gate))


def _gelu(x: Any, xp: ModuleType) -> Any:
    return 0.5 * x * (1 + xp.tanh(_ROOT * (x + 0.044715 * x * x * x)))


def _gelu_slope(x: Any, xp: ModuleType) -> Any:
    # d/dx of x/2 (1 + tanh(u)) is (1 + tanh(u))/2 + x/2 (1 - tanh(u)^2) u'.
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
    # (1 + slope) / 2 plus or minus (1 - slope) / 2: 1 above zero, and the slope below.
    "leaky": lambda f, x, xp: (1 + f.slope) / 2 + (1 - f.slope) / 2 * xp.sign(x),
    "silu": lambda f, x, xp: _silu_slope(x, _sigmoid(x, xp)),
    # x (x / 6 + 1/2) has the slope x / 3 + 1/2 between -3 and 3, and 1 above.
    "hardswish": lambda f, x, xp: (x / 3 + 0.5) * _within(x, -3.0, 3.0) + (x >= 3.0),
    "gelu": lambda f, x, xp: _gelu_slope(x, xp),
}


def _is_hard_swish_gate(graph: Graph, gate: Node) -> bool:
    # HardSwish is x * max(0, min(1, x / 6 + 0.5)); exporters round the factor
    is_sixth = abs(gate.attribute("alpha", 0.2) - 1 / 6) < 1e-3
    return is_sixth and bool(gate.attribute("beta", 0.5) == 0.5)


_X = tensor("x")
#: Functions whose product with their input is an activation function, too.
GATES = frozenset({"Sigmoid", "HardSigmoid"})
#: A tensor times a gate, which is computed from the same tensor.
GATED = _X * op(GATES, _X)
_GATED = {
    "silu": _X * op("Sigmoid", _X),
    "hardswish": _X * op("HardSigmoid", _X, where=_is_hard_swish_gate),
}


def activation_behind(graph: Graph, result: str) -> Activation:
    """Return the activation function after a tensor; linear without one.

    Args:
        graph: the graph.
        result: name of the result of a layer.
    """
    # The caller or a body reads the linear result, whatever follows it.
    if graph.is_output(result) or graph.captured(result):
        return Activation()
    reader = only_reader(graph, result)
    if reader is not None:
        return _single(graph, reader)
    # A gated activation has two readers, the gate and the product.
    for kind, pattern in _GATED.items():
        if gated(graph, result, pattern):
            return Activation(kind)
    return Activation()


_KINDS = {"HardSwish": "hardswish", "Gelu": "gelu", "Swish": "silu"}


def _single(graph: Graph, node: Node) -> Activation:
    if node.kind in ("Relu", "Clip"):
        bounds = clip_bounds(graph, node)
        if bounds is None:
            return Activation()
        return Activation("clip", *bounds)
    if node.kind == "LeakyRelu":
        return Activation("leaky", slope=float(node.attribute("alpha", 0.01)))
    return Activation(_KINDS.get(node.kind, "linear"))


#: Activation functions that OpenVINO computes with a layer (oneDNN's post-operations).
FUNCTIONS = frozenset(
    {
        "Elu",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Mish",
        "PRelu",
        "Sigmoid",
        "Swish",
        "Tanh",
    }
)


def function_after(graph: Graph, result: str) -> tuple[Node, ...]:
    """Return the operators of the activation function that alone reads a layer's result.

    A bias that exporters write after a MatMul may lie between, and so may Relu and Clip. The latter
    are not among the functions: any engine computes them by rounding. A gated function may end in
    a constant factor.

    Args:
        graph: the graph.
        result: name of the result of a layer.
    """
    reader = only_reader(graph, result)
    if reader is None:
        match = gated(graph, result)
        if match is None:
            return ()
        factor = only_use(graph, match.nodes[0].outputs[0], "Mul")
        if factor is None or not any(map(graph.is_constant, factor.inputs)):
            return match.nodes
        return (factor, *match.nodes)
    is_biased = reader.kind == "Add" and any(map(graph.is_constant, reader.inputs))
    if is_biased or reader.kind in ("Relu", "Clip"):
        return function_after(graph, reader.outputs[0])
    # A PRelu may read the result as its slope.
    is_function = reader.kind in FUNCTIONS and reader.inputs[0] == result
    return (reader,) if is_function else ()


def gated(
    graph: Graph,
    tensor: str,
    pattern: Pattern = GATED,
) -> Match | None:
    """Return the product of a tensor and a gate; None if other nodes read the tensor.

    Args:
        graph: the graph.
        tensor: the tensor x of the pattern.
        pattern: a product with a gate.
    """
    readers = graph.consumers(tensor)
    # The product is one of the readers, so that a match that ends in it is looked for.
    for reader in readers:
        match = pattern.match(graph, reader.outputs[0], x=tensor)
        if match is not None and set(match.nodes) == set(readers):
            return match
    return None
