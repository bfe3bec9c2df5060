"""Models of any number of nodes, small in everything else: what grows is the graph alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

WIDTH = 8


class _Builder:
    """Nodes and weights of a graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self._random = np.random.default_rng(0)

    def node(self, op_type: str, *inputs: str, **attributes: object) -> str:
        """Add a node; return the name of its result."""
        result = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [result], **attributes))
        return result

    def weight(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> str:
        """Add an initializer with values of its own; return its name."""
        values: NDArray[np.float64] = self._random.normal(offset, scale, shape)
        self.weights.append(
            numpy_helper.from_array(values.astype(np.float32), f"w{len(self.weights)}")
        )
        return self.weights[-1].name

    def dense(self, x: str) -> str:
        """Add MatMul, Add and Relu; the variance stays about the same from layer to layer."""
        x = self.node("MatMul", x, self.weight(WIDTH, WIDTH, scale=(2 / WIDTH) ** 0.5))
        return self.node("Relu", self.node("Add", x, self.weight(WIDTH, scale=0.1)))

    def model(self, result: str, dims: list[int | str]) -> ModelProto:
        """Finish the model, whose input and output have the same shape."""
        graph = helper.make_graph(
            [*self.nodes, helper.make_node("Identity", [result], ["y"])],
            "growing",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)],
            self.weights,
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
        )


def chain(count: int) -> ModelProto:
    """MatMul, Add, Relu one after the other, each with weights of its own."""
    builder, x = _Builder(), "x"
    while len(builder.nodes) < count:
        x = builder.dense(x)
    return builder.model(x, ["N", WIDTH])


def branches(count: int) -> ModelProto:
    """As many branches of MatMul, Add, Relu as fit, all of which read the input, summed by one
    node.
    """
    builder, ends = _Builder(), list[str]()
    while len(builder.nodes) < count:
        ends.append(builder.dense("x"))
    return builder.model(builder.node("Mean", *ends), ["N", WIDTH])


def constants(count: int) -> ModelProto:
    """Convolutions with batch normalization: six initializers for three nodes."""
    builder, x = _Builder(), "x"
    while len(builder.nodes) < count:
        x = builder.node(
            "Conv",
            x,
            builder.weight(WIDTH, WIDTH, 1, 1, scale=(2 / WIDTH) ** 0.5),
            builder.weight(WIDTH),
        )
        mean, variance = (
            builder.weight(WIDTH, scale=0.1),
            builder.weight(WIDTH, scale=0.02, offset=1.0),
        )
        gain, shift = (
            builder.weight(WIDTH, scale=0.02, offset=1.0),
            builder.weight(WIDTH, scale=0.1),
        )
        x = builder.node(
            "Relu", builder.node("BatchNormalization", x, gain, shift, mean, variance)
        )
    return builder.model(x, ["N", WIDTH, 4, 4])


def residual(count: int) -> ModelProto:
    """A chain of x + f(x), scaled so that the sum does not grow."""
    builder, x = _Builder(), "x"
    while len(builder.nodes) < count:
        x = builder.node(
            "Add",
            builder.node("Mul", x, builder.weight(1, scale=0.0, offset=0.7)),
            builder.dense(x),
        )
    return builder.model(x, ["N", WIDTH])


SHAPES: dict[str, Callable[[int], ModelProto]] = {
    "chain": chain,
    "branches": branches,
    "constants": constants,
    "residual": residual,
}
