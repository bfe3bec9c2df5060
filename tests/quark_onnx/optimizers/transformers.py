"""Small transformers with random weights, as exporters write them: the shapes of Llama, GPT-2 and
BERT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

VOCABULARY, TOKENS = 40, 7


@dataclass
class Builder:
    """Nodes and seeded weights of a growing graph.

    Attributes:
        hidden, heads, wide: the sizes of the residual stream, and of what a feed-forward layer has
        inside. loud: channels of the residual stream that are much larger than the others.
    """

    hidden: int = 48
    heads: int = 4
    wide: int = 96
    loud: tuple[int, ...] = (5, 17)
    opset: int = 17
    random: np.random.Generator = field(
        default_factory=lambda: np.random.default_rng(0)
    )
    nodes: list[object] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def node(
        self,
        op: str,
        *inputs: str,
        domain: str = "",
        outputs: int = 1,
        **attributes: object,
    ) -> str:
        names = [f"{op}_{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(
            helper.make_node(
                op, list(inputs), names, names[0], domain=domain, **attributes
            )
        )
        return names[-1] if outputs > 1 else names[0]

    def constant(self, array: np.ndarray) -> str:
        self.weights.append(
            numpy_helper.from_array(np.asarray(array), f"c{len(self.weights)}")
        )
        return self.weights[-1].name

    @property
    def loudness(self) -> np.ndarray:
        return np.where(np.isin(np.arange(self.hidden), self.loud), 30.0, 1.0)

    def writing(self, *shape: int) -> str:
        """A weight whose last axis is the residual stream, with its loud channels."""
        return self.constant(
            (self.random.normal(size=shape) * self.loudness * shape[0] ** -0.5).astype(
                np.float32
            )
        )

    def reading(self, *shape: int) -> str:
        """A weight whose first axis is the residual stream, of which it hears all channels alike."""  # noqa: E501
        return self.constant(
            (self.random.normal(size=shape) / self.loudness[:, None] * 0.15).astype(
                np.float32
            )
        )

    def vector(self, size: int, around: float = 0.0) -> str:
        return self.constant(
            (around + 0.2 * self.random.normal(size=size)).astype(np.float32)
        )

    def linear(
        self, x: str, into: int, out: int, *, bias: bool, writing: bool = False
    ) -> str:
        """Reads the residual stream, or writes to it."""
        weight = self.writing(into, out) if writing else self.reading(into, out)
        y = self.node("MatMul", x, weight)
        return self.node("Add", self.vector(out), y) if bias else y

    # -- normalizations
    # --------------------------------------------------------------------------------------------

    def simplified(self, x: str) -> str:
        kind = (
            "RMSNormalization" if self.opset >= 23 else "SimplifiedLayerNormalization"
        )
        return self.node(kind, x, self.vector(self.hidden, 1.0), axis=-1, epsilon=1e-5)

    def layer_norm(self, x: str) -> str:
        return self.node(
            "LayerNormalization",
            x,
            self.vector(self.hidden, 1.0),
            self.vector(self.hidden),
        )

    def _mean(self, x: str) -> str:
        if self.opset >= 18:
            return self.node("ReduceMean", x, self.constant(np.int64([-1])))
        return self.node("ReduceMean", x, axes=[-1])

    def rms_parts(self, x: str) -> str:
        mean = self._mean(self.node("Pow", x, self.constant(np.float32(2))))
        root = self.node(
            "Sqrt", self.node("Add", mean, self.constant(np.float32(1e-5)))
        )
        inverse = self.node("Div", self.constant(np.float32(1)), root)
        return self.node(
            "Mul", self.vector(self.hidden, 1.0), self.node("Mul", x, inverse)
        )

    def layer_parts(self, x: str) -> str:
        centered = self.node("Sub", x, self._mean(x))
        mean = self._mean(self.node("Pow", centered, self.constant(np.float32(2))))
        root = self.node(
            "Sqrt", self.node("Add", mean, self.constant(np.float32(1e-5)))
        )
        scaled = self.node(
            "Mul", self.node("Div", centered, root), self.vector(self.hidden, 1.0)
        )
        return self.node("Add", scaled, self.vector(self.hidden))

    # -- blocks
    # ----------------------------------------------------------------------------------

    def split(self, x: str, count: int) -> str:
        each = self.hidden // self.heads
        y = self.node("Reshape", x, self.constant(np.int64([0, 0, count, each])))
        return self.node("Transpose", y, perm=[0, 2, 1, 3])

    def attend(self, q: str, k: str, v: str) -> str:
        scores = self.node("MatMul", q, self.node("Transpose", k, perm=[0, 1, 3, 2]))
        scaled = self.node(
            "Mul",
            scores,
            self.constant(np.float32((self.hidden // self.heads) ** -0.5)),
        )
        sums = self.node("MatMul", self.node("Softmax", scaled, axis=-1), v)
        turned = self.node("Transpose", sums, perm=[0, 2, 1, 3])
        return self.node(
            "Reshape", turned, self.constant(np.int64([0, 0, self.hidden]))
        )

    def attention(self, x: str, *, bias: bool, groups: int = 1) -> str:
        """With several query heads to one of keys and values, if it is said so."""
        n, few = self.hidden, self.heads // groups
        q = self.split(self.linear(x, n, n, bias=bias), self.heads)
        k, v = (
            self.split(self.linear(x, n, n // groups, bias=bias), few) for _ in "kv"
        )
        if groups > 1:
            k, v = (self.repeated(each, groups) for each in (k, v))
        return self.linear(self.attend(q, k, v), n, n, bias=bias, writing=True)

    def repeated(self, x: str, groups: int) -> str:
        each = self.hidden // self.heads
        wide = self.node("Unsqueeze", x, self.constant(np.int64([2])))
        shape = self.constant(np.int64([1, self.heads // groups, groups, 1, each]))
        return self.node(
            "Reshape",
            self.node("Expand", wide, shape),
            self.constant(np.int64([0, self.heads, -1, each])),
        )

    def fused_attention(self, x: str) -> str:
        """As GPT-2 has it: one Gemm for query, key and value."""
        n = self.hidden
        rows = self.node("Reshape", x, self.constant(np.int64([-1, n])))
        all_three = self.node("Gemm", rows, self.reading(n, 3 * n), self.vector(3 * n))
        back = self.node(
            "Reshape", all_three, self.constant(np.int64([-1, TOKENS, 3 * n]))
        )
        names = [f"part{len(self.nodes)}_{place}" for place in range(3)]
        sizes = self.constant(np.int64([n, n, n]))
        self.nodes.append(
            helper.make_node(
                "Split", [back, sizes], names, f"split{len(self.nodes)}", axis=2
            )
        )
        sums = self.attend(*(self.split(name, self.heads) for name in names))
        return self.linear(sums, n, n, bias=True, writing=True)

    def gated(self, x: str) -> str:
        gate, up = (
            self.linear(x, self.hidden, self.wide, bias=False) for _ in range(2)
        )
        silu = self.node("Mul", gate, self.node("Sigmoid", gate))
        return self.linear(
            self.node("Mul", silu, up), self.wide, self.hidden, bias=False, writing=True
        )

    def relu(self, x: str) -> str:
        inner = self.node("Relu", self.linear(x, self.hidden, self.wide, bias=True))
        return self.linear(inner, self.wide, self.hidden, bias=True, writing=True)

    def embed(self, *, positions: bool = False) -> str:
        x = self.node("Gather", self.writing(VOCABULARY, self.hidden), "ids")
        return (
            self.node("Add", x, self.writing(1, TOKENS, self.hidden))
            if positions
            else x
        )

    def model(self, result: str, size: int) -> ModelProto:
        self.nodes.append(helper.make_node("Identity", [result], ["y"], "end"))
        ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", TOKENS])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", None, size])
        graph = helper.make_graph(self.nodes, "transformer", [ids], [y], self.weights)
        opsets = [
            helper.make_opsetid("", self.opset),
            helper.make_opsetid("com.microsoft", 1),
        ]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


Norm = Callable[[Builder, str], str]


def llama(
    norm: Norm = Builder.simplified, *, layers: int = 2, groups: int = 1, **sizes: int
) -> ModelProto:
    """Normalizations in front, gated feed-forward layers, no biases."""
    b = Builder(**sizes)  # type: ignore[arg-type]
    x = b.embed()
    for _ in range(layers):
        x = b.node("Add", x, b.attention(norm(b, x), bias=False, groups=groups))
        x = b.node("Add", x, b.gated(norm(b, x)))
    return b.model(b.linear(norm(b, x), b.hidden, VOCABULARY, bias=False), VOCABULARY)


def gpt(
    norm: Norm = Builder.layer_norm, *, layers: int = 2, **sizes: int
) -> ModelProto:
    """Layer normalizations in front, positions, biases, and query, key and value of one product."""
    b = Builder(**sizes)  # type: ignore[arg-type]
    x = b.embed(positions=True)
    for _ in range(layers):
        x = b.node("Add", b.fused_attention(norm(b, x)), x)
        x = b.node("Add", x, b.relu(norm(b, x)))
    return b.model(b.linear(norm(b, x), b.hidden, VOCABULARY, bias=False), VOCABULARY)


def skipping(*, simplified: bool = False) -> ModelProto:
    """As onnxruntime fuses it: a sum and its normalization are one operator."""
    b, kind = (
        Builder(),
        "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization",
    )
    x = b.embed()
    more = [] if simplified else [b.vector(b.hidden)]
    part = b.relu(b.layer_norm(x) if not simplified else b.simplified(x))
    scale = b.vector(b.hidden, 1.0)
    names = [f"skip_{place}" for place in range(4)]
    inputs = [x, part, scale, *more, b.vector(b.hidden)]
    b.nodes.append(
        helper.make_node(
            kind, inputs, [names[0], "", "", names[3]], "skip", domain="com.microsoft"
        )
    )
    x = b.node("Add", names[3], b.relu(names[0]))
    last = b.simplified(x) if simplified else b.layer_norm(x)
    return b.model(b.linear(last, b.hidden, VOCABULARY, bias=True), VOCABULARY)


def bert(*, layers: int = 2) -> ModelProto:
    """Normalizations behind the sums, so that their results are part of the stream."""
    b = Builder()
    x = b.layer_norm(b.embed(positions=True))
    for _ in range(layers):
        x = b.layer_norm(b.node("Add", b.attention(x, bias=True), x))
        x = b.layer_norm(b.node("Add", b.relu(x), x))
    return b.model(x, b.hidden)


def samples(count: int = 24) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [{"ids": random.integers(0, VOCABULARY, (2, TOKENS))} for _ in range(count)]
