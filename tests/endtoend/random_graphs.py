"""Small random graphs of operators with known shapes: a seed makes a model and the data for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Shape = tuple[int, ...]
BATCH, OPSET = 2, 17


@dataclass
class Maker:
    """A graph that grows by random operators.

    Attributes:
        shapes: of every float tensor that a node may read, the batch included.
    """

    seed: int
    shapes: dict[str, Shape] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choice = random.Random(self.seed)
        self.normal = np.random.default_rng(self.seed)

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        """A constant, now and then one that is there already."""
        same = [name for name, array in self.weights.items() if array.shape == shape]
        if same and self.choice.random() < 0.2:
            return self.choice.choice(same)
        name = f"w{len(self.weights)}"
        spread = 10 ** self.choice.uniform(-1, 1)
        self.weights[name] = (self.normal.normal(size=shape) * scale * spread).astype(
            np.float32
        )
        return name

    def integers(self, *values: int) -> str:
        name = f"i{len(self.weights)}"
        self.weights[name] = np.array(values, np.int64)
        return name

    def add(
        self, kind: str, inputs: list[str], shape: Shape, **attributes: Any
    ) -> None:
        name = f"t{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, inputs, [name], f"n{len(self.nodes)}", **attributes)
        )
        self.shapes[name] = shape

    def tensor(self, rank: int) -> str:
        """Some tensor of a rank, the latest more likely."""
        fitting = [name for name, shape in self.shapes.items() if len(shape) == rank]
        return self.choice.choice(fitting[-4:])

    def grow(self) -> None:
        """One more operator."""
        rank = self.choice.choice(
            [r for r in (2, 4) if any(len(s) == r for s in self.shapes.values())]
        )
        self.choice.choice(_RANK_4 if rank == 4 else _RANK_2)(self, self.tensor(rank))

    def model(self) -> ModelProto:
        read = {name for node in self.nodes for name in node.input}
        ends = [name for name in self.shapes if name not in read]
        declare = helper.make_tensor_value_info
        inputs = [
            declare(n, TensorProto.FLOAT, ["N", *self.shapes[n][1:]])
            for n in ("x", "z")
        ]
        outputs = [
            declare(n, TensorProto.FLOAT, ["N", *self.shapes[n][1:]])
            for n in ends
            if n not in ("x", "z")
        ]
        constants = [
            numpy_helper.from_array(array, name)
            for name, array in self.weights.items()
            if name in read
        ]
        graph = helper.make_graph(self.nodes, "random", inputs, outputs, constants)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8
        )


def _conv(maker: Maker, x: str) -> None:
    n, c, h, w = maker.shapes[x]
    groups = maker.choice.choice([1, 1, c])
    m = c if groups > 1 else maker.choice.choice([2, 4, 8])
    inputs = [
        x,
        maker.weight(m, c // groups, 3, 3, scale=1 / (3 * (c // groups) ** 0.5)),
    ]
    inputs += [maker.weight(m)] if maker.choice.random() < 0.7 else []
    maker.add("Conv", inputs, (n, m, h, w), pads=[1, 1, 1, 1], group=groups)


def _gemm(maker: Maker, x: str) -> None:
    n, k = maker.shapes[x]
    m, transposed = maker.choice.choice([3, 8, 16]), maker.choice.random() < 0.5
    inputs = [x, maker.weight(*((m, k) if transposed else (k, m)), scale=k**-0.5)]
    inputs += [maker.weight(m)] if maker.choice.random() < 0.7 else []
    maker.add("Gemm", inputs, (n, m), transB=int(transposed))


def _matmul(maker: Maker, x: str) -> None:
    n, k = maker.shapes[x]
    m = maker.choice.choice([3, 8, 16])
    maker.add("MatMul", [x, maker.weight(k, m, scale=k**-0.5)], (n, m))


def _unary(maker: Maker, x: str) -> None:
    kind = maker.choice.choice(
        ["Relu", "Sigmoid", "Tanh", "HardSwish", "LeakyRelu", "Identity", "Neg", "Abs"]
    )
    maker.add(kind, [x], maker.shapes[x])


def _binary(maker: Maker, x: str) -> None:
    shape = maker.shapes[x]
    other = maker.choice.choice(
        [name for name, s in maker.shapes.items() if s == shape]
    )
    if maker.choice.random() < 0.3:
        other = maker.weight(*([1] * (len(shape) - 1)), shape[-1])
    maker.add(maker.choice.choice(["Add", "Mul", "Sub"]), [x, other], shape)


def _concat(maker: Maker, x: str) -> None:
    shape = maker.shapes[x]
    fits = [
        n
        for n, s in maker.shapes.items()
        if len(s) == len(shape) and s[2:] == shape[2:]
    ]
    parts = [x, maker.choice.choice(fits)]
    maker.add(
        "Concat",
        parts,
        (shape[0], sum(maker.shapes[p][1] for p in parts), *shape[2:]),
        axis=1,
    )


def _slice(maker: Maker, x: str) -> None:
    shape = maker.shapes[x]
    end = max(1, shape[1] // 2)
    inputs = [x, maker.integers(0), maker.integers(end), maker.integers(1)]
    maker.add("Slice", inputs, (shape[0], end, *shape[2:]))


def _softmax(maker: Maker, x: str) -> None:
    maker.add("Softmax", [x], maker.shapes[x], axis=-1)


def _transpose(maker: Maker, x: str) -> None:
    n, c, h, w = maker.shapes[x]
    maker.add("Transpose", [x], (n, c, w, h), perm=[0, 1, 3, 2])


def _pool(maker: Maker, x: str) -> None:
    n, c, h, w = maker.shapes[x]
    if h > 1 and w > 1:
        kind = maker.choice.choice(["MaxPool", "AveragePool"])
        maker.add(
            kind, [x], (n, c, h // 2, w // 2), kernel_shape=[2, 2], strides=[2, 2]
        )


def _flatten(maker: Maker, x: str) -> None:
    n, c, h, w = maker.shapes[x]
    maker.add("Flatten", [x], (n, c * h * w))


_Grow = Callable[[Maker, str], None]
_ANY: tuple[_Grow, ...] = (_unary, _unary, _binary, _concat, _slice, _softmax)
_RANK_2: tuple[_Grow, ...] = (*_ANY, _gemm, _gemm, _matmul, _matmul)
_RANK_4: tuple[_Grow, ...] = (*_ANY, _conv, _conv, _conv, _transpose, _pool, _flatten)


def draw(seed: int, count: int = 6) -> tuple[ModelProto, list[dict[str, NDArray[Any]]]]:
    """A model of some ``count`` operators, at least one of them with a weight, and two samples."""
    maker = Maker(seed, {"x": (BATCH, 4, 6, 6), "z": (BATCH, 12)})
    _conv(maker, "x")
    _gemm(maker, "z")
    while len(maker.nodes) < count + 2:
        maker.grow()
    data = [
        {
            n: maker.normal.normal(size=maker.shapes[n]).astype(np.float32)
            for n in ("x", "z")
        }
        for _ in range(2)
    ]
    return maker.model(), data


def shuffled(model: ModelProto, seed: int) -> ModelProto:
    """The same model with its nodes in another topological order."""
    choice, known = (
        random.Random(seed),
        {"x", "z"} | {tensor.name for tensor in model.graph.initializer},
    )
    left, order = list(model.graph.node), list[NodeProto]()
    while left:
        node = choice.choice([node for node in left if known.issuperset(node.input)])
        left.remove(node)
        known.update(node.output)
        order.append(node)
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(order)
    return result


def renamed(model: ModelProto) -> ModelProto:
    """The same model under other names of what is inside: tensors, constants and nodes."""
    interface = {value.name for value in (*model.graph.input, *model.graph.output)}
    result = ModelProto()
    result.CopyFrom(model)

    def other(name: str) -> str:
        return name if name in interface else f"other/{name}"

    for tensor in result.graph.initializer:
        tensor.name = other(tensor.name)
    for node in result.graph.node:
        node.name = f"other/{node.name}"
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = other(name)
    return result
