"""The kind of each output of small models: type, shape, values and operator decide."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from quark_onnx.report.verdict.task import Traits, find_task, output_kinds
from tests.cases import loop_over
from tests.models import in_a_branch, normal, parse, run, weight

Arrays = dict[str, NDArray[Any]]


class Case(NamedTuple):
    """A model, the shape of its float inputs, and the right kind of each output."""

    name: str
    model: ModelProto
    feeds: Arrays
    kinds: tuple[str, ...]


def case(
    name: str, signature: str, body: str, kinds: str, *shape: int, **weights: Any
) -> Case:
    """A model of the input x of float values, with the kinds of its outputs."""
    inputs = ", ".join("N" if i == 0 else str(size) for i, size in enumerate(shape))
    model = parse(f"g (float[{inputs}] x) => ({signature}) {{ {body} }}", **weights)
    return Case(name, model, {"x": normal(*shape)}, tuple(kinds.split()))


def of_tokens(name: str, body: str, kinds: str, **weights: Any) -> Case:
    """A model of token identifiers, which look up a table of 50 rows."""
    model = parse(
        f"""g (int64[N, T] ids) => (float y) {{
            e = Gather (table, ids) {body}
        }}""",
        table=weight(50, 64),
        **weights,
    )
    feeds = {"ids": np.arange(12, dtype=np.int64).reshape(2, 6)}
    return Case(name, model, feeds, (kinds,))


RGB, GRAY = (2, 3, 32, 32), (2, 1, 32, 32)
#: Maps of 32 x 32 pixels by a convolution, and vectors by pooling.
CONV = "y = Conv <pads = [1, 1, 1, 1]> (x, w)"
MAPS = "c = Conv <pads = [1, 1, 1, 1]> (x, w)"
POOLED = f"{MAPS} p = GlobalAveragePool (c) f = Flatten (p)"


def conv(channels: int, inputs: int = 3, size: int = 3) -> NDArray[np.float32]:
    return weight(channels, inputs, size, size)


GRU = Case(
    "recurrent state",
    parse(
        """g (float[1, 8] x, float[1, 6] h_in) => (float[1, 3] y, float[1, 6] h_out) {
            a = MatMul (x, w) b = MatMul (h_in, u) c = Add (a, b) h_out = Tanh (c)
            y = MatMul (h_out, v)
        }""",
        w=weight(8, 6),
        u=weight(6, 6),
        v=weight(6, 3),
    ),
    {"x": normal(1, 8), "h_in": normal(1, 6)},
    ("regression", "state"),
)

CASES = [
    case(
        "probabilities of an image",
        "float y",
        f"{POOLED} y = Softmax (f)",
        "classifier",
        *RGB,
        w=conv(7),
    ),
    case(
        "logits of an image",
        "float y",
        f"{POOLED} y = Identity (f)",
        "classifier",
        *RGB,
        w=conv(7),
    ),
    case(
        "pooled probabilities",
        "float y",
        f"{MAPS} p = GlobalAveragePool (c) y = Softmax <axis = 1> (p)",
        "classifier",
        *RGB,
        w=conv(7),
    ),
    case(
        "chosen class",
        "int64 y",
        f"{POOLED} y = ArgMax <axis = 1, keepdims = 0> (f)",
        "classifier",
        *RGB,
        w=conv(7),
    ),
    case(
        "logits of a table",
        "float logits",
        "logits = MatMul (x, w)",
        "classifier",
        4,
        6,
        w=weight(6, 5),
    ),
    case(
        "probabilities of each frame",
        "float y",
        "y = Softmax <axis = 1> (x)",
        "classifier",
        2,
        9,
        40,
    ),
    of_tokens(
        "classes of each token", "y = MatMul (e, w)", "classifier", w=weight(64, 9)
    ),
    of_tokens("language model", "y = MatMul (e, w)", "language", w=weight(64, 50)),
    of_tokens("vectors of tokens", "y = Tanh (e)", "embedding"),
    case(
        "normalized vectors",
        "float y",
        "m = MatMul (x, w) y = LpNormalization <axis = 1> (m)",
        "embedding",
        4,
        6,
        w=weight(6, 48),
    ),
    case(
        "labels of a table",
        "float y",
        "m = MatMul (x, w) y = Sigmoid (m)",
        "decisions",
        4,
        6,
        w=weight(6, 64),
    ),
    case(
        "one decision",
        "float y",
        "m = MatMul (x, w) y = Sigmoid (m)",
        "decisions",
        4,
        6,
        w=weight(6, 1),
    ),
    case(
        "decisions of each step",
        "float y",
        "m = MatMul (x, w) y = Sigmoid (m)",
        "decisions",
        1,
        600,
        8,
        w=weight(8, 1),
    ),
    case(
        "moved decisions",
        "float prob",
        "m = MatMul (x, w) s = Sigmoid (m) t = Transpose <perm = [0, 2, 1]> (s)"
        " prob = Squeeze (t, axes)",
        "decisions",
        1,
        600,
        8,
        w=weight(8, 1),
        axes=np.int64([1]),
    ),
    case(
        "events in a spectrum",
        "float y",
        "s = Squeeze (x, axes) m = MatMul (s, w) y = Sigmoid (m)",
        "decisions",
        1,
        1,
        250,
        64,
        w=weight(64, 10),
        axes=np.int64([1]),
    ),
    case(
        "mask of an image",
        "float y",
        f"{MAPS} y = Sigmoid (c)",
        "mask",
        *RGB,
        w=conv(1),
    ),
    case(
        "mask of a gray image",
        "float y",
        f"{MAPS} y = Sigmoid (c)",
        "mask",
        *GRAY,
        w=conv(1, 1),
    ),
    case(
        "mask of a sound",
        "float mask",
        "m = MatMul (x, w) mask = Sigmoid (m)",
        "mask",
        1,
        40,
        65,
        w=weight(65, 65),
    ),
    case("classes of pixels", "float y", CONV, "segmentation", *RGB, w=conv(5)),
    case(
        "classes of pixels in the last axis",
        "float y",
        "y0 = MatMul (x, w) y = Softmax (y0)",
        "segmentation",
        2,
        32,
        32,
        3,
        w=weight(3, 5),
    ),
    case(
        "chosen classes of pixels",
        "int64 y",
        f"{MAPS} y = ArgMax <axis = 1, keepdims = 0> (c)",
        "segmentation",
        *RGB,
        w=conv(5),
    ),
    case("image", "float y", CONV, "image", *RGB, w=conv(3)),
    case(
        "image of a Sigmoid",
        "float y",
        f"{MAPS} y = Sigmoid (c)",
        "image",
        *RGB,
        w=conv(3),
    ),
    case(
        "depth in metres",
        "float y",
        f"{MAPS} y = Mul (c, k)",
        "regression",
        *RGB,
        w=conv(1),
        k=np.float32(900),
    ),
    case(
        "one number", "float y", "y = MatMul (x, w)", "regression", 4, 6, w=weight(6, 1)
    ),
    case(
        "means with a name of classes",
        "float pred_mean",
        "pred_mean = MatMul (x, w)",
        "regression",
        4,
        6,
        w=weight(6, 5),
    ),
    case(
        "means of an image",
        "float pred_mean",
        f"{POOLED} pred_mean = Identity (f)",
        "regression",
        *RGB,
        w=conv(7),
    ),
    case(
        "landmarks",
        "float landmarks",
        f"{POOLED} landmarks = Identity (f)",
        "regression",
        *RGB,
        w=conv(96),
    ),
    case(
        "a value of each step",
        "float y",
        "m = MatMul (x, w) y = Squeeze (m, axes)",
        "series",
        2,
        24,
        3,
        w=weight(3, 1),
        axes=np.int64([2]),
    ),
    case(
        "several values of each step",
        "float y",
        "y = MatMul (x, w)",
        "series",
        2,
        24,
        3,
        w=weight(3, 4),
    ),
    GRU,
    case(
        "boxes and scores",
        "float boxes, float scores",
        "b = MatMul (x, w) boxes = Reshape (b, four) c = MatMul (x, v) d = Reshape (c, three)"
        " scores = Softmax (d)",
        "detector detector",
        1,
        3,
        32,
        32,
        w=weight(32, 32),
        v=weight(32, 24),
        four=np.int64([1, -1, 4]),
        three=np.int64([1, -1, 3]),
    ),
    case(
        "heat map and sizes of faces",
        "float hm, float wh, float points",
        "h = Conv <strides = [4, 4]> (x, w) hm = Sigmoid (h) wh = Conv <strides = [4, 4]> (x, u)"
        " points = Conv <strides = [4, 4]> (x, v)",
        "detector detector detector",
        1,
        3,
        64,
        64,
        w=conv(1, 3, 4),
        u=conv(2, 3, 4),
        v=conv(10, 3, 4),
    ),
    case(
        "anchors of faces with landmarks",
        "float boxes, float scores",
        "b = MatMul (x, w) boxes = Reshape (b, wide) c = MatMul (x, v) scores = Reshape (c, one)",
        "detector detector",
        1,
        3,
        32,
        32,
        w=weight(32, 16),
        v=weight(32, 1),
        wide=np.int64([1, -1, 16]),
        one=np.int64([1, -1, 1]),
    ),
    case(
        "undecoded boxes of several strides",
        "float a, float b",
        "a = Conv <strides = [4, 4]> (x, w) b = Conv <strides = [8, 8]> (x, u)",
        "detector detector",
        1,
        3,
        64,
        64,
        w=conv(18, 3, 4),
        u=conv(18, 3, 8),
    ),
    case(
        "features",
        "float y",
        "y = Conv <strides = [8, 8]> (x, w)",
        "signal",
        *RGB,
        w=conv(64, 3, 8),
    ),
    case("codes", "int64 y", "y = Cast <to = 7> (x)", "signal", 4, 6),
]


@loop_over("each", {each.name: each for each in CASES})
def test_the_kind_of_each_output(each: Case) -> None:
    names = [value.name for value in each.model.graph.output]
    outputs = dict(zip(names, run(each.model, each.feeds), strict=True))
    found = output_kinds(Traits.of(each.model), each.feeds, outputs)
    assert {name: kind.name for name, kind in found.items()} == dict(
        zip(names, each.kinds, strict=True)
    )


def test_the_operator_may_stand_in_a_body() -> None:
    model = parse("g (float[N, 5] x) => (float y) { y = Sigmoid (x) }")
    outputs = {"y": run(model, {"x": normal(4, 5)})[0]}
    for place in (model, in_a_branch(model), in_a_branch(in_a_branch(model))):
        found = output_kinds(Traits.of(place), {"x": normal(4, 5)}, outputs)
        assert found["y"].name == "decisions"


def test_a_state_is_never_the_result() -> None:
    outputs = {"h_out": normal(1, 6), "y": normal(1, 3)}
    assert find_task(GRU.model, GRU.feeds, outputs).output == "y"
