"""Small models and readers that the tests of AMD Quark's spelling share."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto

from tests.models import normal, parse, weight


def classifier() -> ModelProto:
    """Two convolutions, pooling and a product."""
    return parse(
        """g (float[N,4,8,8] x) => (float[N,10] y) {
            [conv1] a = Conv <pads = [1,1,1,1]> (x, k1, b1)
            [relu1] r = Relu (a)
            [conv2] c = Conv <pads = [1,1,1,1]> (r, k2, b2)
            [relu2] s = Relu (c)
            [pool] p = GlobalAveragePool (s)
            [flat] f = Flatten (p)
            [fc] y = Gemm (f, w, d)
        }""",
        k1=weight(8, 4, 3, 3),
        b1=normal(8, scale=0.1),
        k2=weight(12, 8, 3, 3),
        b2=normal(12, scale=0.1),
        w=weight(10, 12).T.copy(),
        d=normal(10, scale=0.1),
    )


def detector() -> ModelProto:
    """A convolution, and a decoding of boxes behind it."""
    return parse(
        """g (float[N,4,8,8] x) => (float[N,6,64] y) {
            [conv1] a = Conv <pads = [1,1,1,1]> (x, k1, b1)
            [relu1] r = Relu (a)
            [conv2] c = Conv <pads = [1,1,1,1]> (r, k2, b2)
            [flat] f = Reshape (c, shape)
            [decode1] e = Sigmoid (f)
            [decode2] y = Mul (e, size)
        }""",
        k1=weight(8, 4, 3, 3),
        b1=normal(8, scale=0.1),
        k2=weight(6, 8, 3, 3),
        b2=normal(6, scale=0.1),
        shape=np.array([0, 6, 64]),
        size=normal(1, 6, 1, scale=10),
    )


def transformer() -> ModelProto:
    """A feed-forward block behind a layer normalization."""
    return parse(
        """g (float[N,8,64] x) => (float[N,8,64] y) {
            [norm] n = LayerNormalization <axis = -1> (x, g1, g2)
            [up] u = MatMul (n, w1)
            [act] a = Relu (u)
            [down] d = MatMul (a, w2)
            [turn] t = Transpose <perm = [0,2,1]> (n)
            [score] s = MatMul (d, t)
            [back] o = MatMul (s, n)
            [add] y = Add (o, x)
        }""",
        g1=normal(64) + 1,
        g2=normal(64, scale=0.1),
        w1=weight(128, 64).T.copy(),
        w2=weight(64, 128).T.copy(),
    )


class Reader:
    """Samples of a model's only input, as a data reader gives them."""

    def __init__(self, model: ModelProto, count: int = 6, seed: int = 0) -> None:
        value = model.graph.input[0]
        shape = [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim]
        self.samples = [
            {value.name: normal(*shape, seed=seed + i)} for i in range(count)
        ]
        self.next = 0

    def get_next(self) -> dict[str, Any] | None:
        if self.next == len(self.samples):
            return None
        self.next += 1
        return self.samples[self.next - 1]

    def rewind(self) -> None:
        self.next = 0
