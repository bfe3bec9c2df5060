"""Two small networks with every kind of layer that optimizers choose codes for, and data of
changing shapes.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from tests.models import Feeds, normal, parse, weight


def convolutional() -> ModelProto:
    """Whole, depthwise, pointwise and transposed convolutions, with and without biases, each with
    its activation.
    """
    return parse(
        """g (float[N,3,H,W] x) => (float[N,5] y) {
            [first] a = Conv <pads = [1,1,1,1]> (x, w1, b1)
            [relu] r = Relu (a)
            [deep] d = Conv <group = 8, auto_pad = "SAME_LOWER", strides = [2,2]> (r, w2)
            [hard] s = HardSwish (d)
            [point] p = Conv (s, w3, b3)
            [leaky] l = LeakyRelu (p)
            [up] t = ConvTranspose <strides = [2,2], group = 2, output_padding = [1,1]> (l, w4, b4)
            [gate] q = Sigmoid (t)
            [silu] m = Mul (t, q)
            [pool] g = GlobalAveragePool (m)
            [flat] f = Flatten (g)
            [head] y = Gemm <transB = 1> (f, w5, b5)
        }""",
        w1=weight(8, 3, 3, 3),
        b1=normal(8),
        w2=weight(8, 1, 3, 3),
        w3=weight(6, 8, 1, 1),
        b3=normal(6),
        w4=weight(6, 4, 2, 2),
        b4=normal(8),
        w5=weight(5, 8),
        b5=normal(5),
    )


def attentive() -> ModelProto:
    """One block of a transformer; biases are added on either side."""
    size, wide = 16, 32
    matrices = {
        f"w{name}": weight(size, size, seed=seed) for seed, name in enumerate("qkvo")
    }
    vectors = {f"b{name}": normal(size, seed=seed) for seed, name in enumerate("qod")}
    return parse(
        """g (float[N,T,16] x) => (float[N,T,16] y) {
            [q] q = MatMul (x, wq)
            [qb] qa = Add (q, bq)
            [k] k = MatMul (x, wk)
            [v] v = MatMul (x, wv)
            [turn] kt = Transpose <perm = [0,2,1]> (k)
            [scores] s = MatMul (qa, kt)
            [softmax] sm = Softmax <axis = -1> (s)
            [mix] av = MatMul (sm, v)
            [o] o = MatMul (av, wo)
            [ob] oa = Add (bo, o)
            [first] h = Add (x, oa)
            [norm] n = LayerNormalization <axis = -1> (h, gamma, beta)
            [up] u = MatMul (n, wu)
            [ub] ua = Add (u, bu)
            [relu] g = Relu (ua)
            [down] d = MatMul (g, wd)
            [db] da = Add (d, bd)
            [second] y = Add (h, da)
        }""",
        **matrices,
        **vectors,
        gamma=normal(size, seed=5),
        beta=normal(size, seed=6),
        wu=weight(size, wide, seed=7),
        bu=normal(wide),
        wd=weight(wide, size, seed=8),
    )


def images(count: int = 10, seed: int = 0) -> list[Feeds]:
    """Batches of one to three images of several sizes."""
    random = np.random.default_rng(seed)
    shapes = [(1 + index % 3, 3, 6 + index % 4, 7) for index in range(count)]
    return [{"x": random.normal(size=shape).astype(np.float32)} for shape in shapes]


def texts(count: int = 10, seed: int = 0) -> list[Feeds]:
    """Batches of one or two sequences of several lengths."""
    random = np.random.default_rng(seed)
    shapes = [(1 + index % 2, 4 + index % 3, 16) for index in range(count)]
    return [{"x": random.normal(size=shape).astype(np.float32)} for shape in shapes]


NETWORKS = {"convolutional": (convolutional, images), "attentive": (attentive, texts)}
