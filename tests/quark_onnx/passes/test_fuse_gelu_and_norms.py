"""Operators that come in parts are written whole, where what the parts compute is that operator,
and nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, npu, quantize
from quark_onnx.graph import Graph
from quark_onnx.passes import fuse_gelu, fuse_layer_norm, whole_image_norms
from quark_onnx.passes.base import Pass
from tests.models import kinds, normal, parse, run, weight

#: Factors and sums in the orders in which exporters write them.
GELUS = {
    "torch": (
        "a = Div (x, root) e = Erf (a) b = Add (e, one) c = Mul (x, b) y = Mul (c,"
        " half)"
    ),
    "half of the source": (
        "a = Div (x, root) e = Erf (a) b = Add (e, one) h = Mul (half, x) y = Mul"
        " (h, b)"
    ),
    "half of the sum": (
        "a = Mul (inverse, x) e = Erf (a) b = Add (one, e) h = Mul (b, half) y = Mul"
        " (x, h)"
    ),
    "over two": (
        "a = Mul (x, inverse) e = Erf (a) b = Add (e, one) c = Mul (b, x) y = Div (c,"
        " two)"
    ),
}
NOT_GELUS = {
    "another root": (
        "a = Div (x, two) e = Erf (a) b = Add (e, one) c = Mul (x, b) y = Mul (c, half)"
    ),
    "another sum": (
        "a = Div (x, root) e = Erf (a) b = Add (e, two) c = Mul (x, b) y = Mul (c,"
        " half)"
    ),
    "another tensor": (
        "a = Div (x, root) e = Erf (a) b = Add (e, one) r = Neg (x) c = Mul (r, b) y ="
        " Mul (c, half)"
    ),
    "read elsewhere": (
        "a = Div (x, root) e = Erf (a) b = Add (e, one) c = Mul (x, b) d = Mul (c,"
        " half) y = Add (d, e)"
    ),
    "twice a half": (
        "a = Div (x, root) e = Erf (a) b = Add (e, one) c = Mul (b, half) d = Mul (c,"
        " half) y = Mul (x, d)"
    ),
    "two over it": (
        "a = Div (x, root) e = Erf (a) b = Add (e, one) c = Mul (x, b) y = Div (two, c)"
    ),
    "squared": (
        "a = Div (x, root) e = Erf (a) b = Add (e, one) c = Mul (b, b) y = Mul (c,"
        " half)"
    ),
}
NUMBERS = {
    "root": 2**0.5,
    "inverse": 0.5**0.5,
    "one": 1,
    "two": 2,
    "half": 0.5,
    "minus": -0.5,
    "zero": 0,
    "eight": 8,
    "eighth": 1 / 8,
}
NORMS = {
    "pow": (
        "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) q = Pow (d, two) v ="
        " ReduceMean <axes = [2]> (q) e = Add (v, small) r = Sqrt (e) n = Div (d, r) g"
        " = Mul (n, scale) y = Add (g, shift)"
    ),
    "product": (
        "m = ReduceMean <axes = [2]> (x) d = Sub (x, m) q = Mul (d, d) v = ReduceMean"
        " <axes = [2]> (q) e = Add (small, v) r = Sqrt (e) i = Reciprocal (r) n = Mul"
        " (i, d) g = Mul (scale, n) y = Add (shift, g)"
    ),
    "no shift": (
        "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) q = Pow (d, two) v ="
        " ReduceMean <axes = [-1]> (q) e = Add (v, small) r = Sqrt (e) n = Div (d, r) y"
        " = Mul (n, scale)"
    ),
    "bare": (
        "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) q = Pow (d, two) v ="
        " ReduceMean <axes = [-1]> (q) e = Add (v, small) r = Sqrt (e) y = Div (d, r)"
    ),
    "power": (
        "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) q = Mul (d, d) v = ReduceMean"
        " <axes = [-1]> (q) e = Add (v, small) r = Pow (e, minus) y = Mul (d, r)"
    ),
    "difference of moments": (
        "m = ReduceMean <axes = [-1]> (x) q = Mul (x, x) h = ReduceMean <axes = [2]>"
        " (q) o = Pow (m, two) v = Sub (h, o) p = Max (zero, v) e = Add (p, small) r ="
        " Sqrt (e) d = Sub (x, m) y = Div (d, r)"
    ),
}
#: Sums over the last axis alone: here the axes are an input.
SUMS = {
    "sums": (
        "t = ReduceSum (x, last) m = Mul (eighth, t) d = Sub (x, m) q = Mul (d, d) u ="
        " ReduceSum (q, last) v = Div (u, eight) e = Add (v, small) r = Sqrt (e) n ="
        " Div (d, r) g = Mul (n, scale) y = Add (g, shift)"
    ),
    "sums of moments": (
        "t = ReduceSum (x, last) m = Mul (t, eighth) q = Mul (x, x) u = ReduceSum (q,"
        " last) h = Mul (u, eighth) o = Mul (m, m) v = Sub (h, o) p = Relu (v) e = Add"
        " (p, small) r = Sqrt (e) i = Reciprocal (r) d = Sub (x, m) n = Mul (d, i) y ="
        " Mul (n, scale)"
    ),
}
#: Of images: a number for each channel, with and without an axis for the batch in front of it.
IMAGE_NORMS = {
    name: (
        text.replace("[-1]", "[2, 3]")
        .replace("[2]", "[-1, 2]")
        .replace("shift", "shift4")
        .replace("scale", "scale3")
    )
    for name, text in NORMS.items()
}
NOT_IMAGE_NORMS = {
    "rows alone": IMAGE_NORMS["pow"].replace("[-1, 2]", "[3]"),
    "channels, too": (
        IMAGE_NORMS["pow"]
        .replace("[2, 3]", "[1, 2, 3]")
        .replace("[-1, 2]", "[1, 2, 3]")
    ),
    "without what is kept": (
        IMAGE_NORMS["bare"].replace("axes = [2, 3]", "axes = [2, 3], keepdims = 0", 1)
    ),
    "read elsewhere": (
        IMAGE_NORMS["bare"].replace("y = Div", "n = Div") + " y = Add (n, v)"
    ),
}
NOT_NORMS = {
    "another axis": NORMS["pow"].replace("[2]", "[1]"),
    "not centered": (
        "q = Pow (x, two) v = ReduceMean <axes = [-1]> (q) e = Add (v, small) r = Sqrt"
        " (e) n = Div (x, r) y = Mul (n, scale)"
    ),
    "read elsewhere": NORMS["bare"].replace("y = Div", "n = Div") + " y = Add (n, v)",
    "a power of the root": (
        NORMS["bare"].replace(
            "Sqrt (e) y = Div (d, r)", "Pow (minus, e) y = Mul (d, r)"
        )
    ),
}


def model_of(text: str, opset: int = 17) -> ModelProto:
    known: dict[str, Any] = {
        name: np.asarray(value, np.float32) for name, value in NUMBERS.items()
    }
    known |= {
        "small": np.asarray(1e-3, np.float32),
        "scale": 1 + normal(8, scale=0.1),
        "shift": normal(8),
        "last": np.array([-1]),
    }
    words = text.replace(",", " ").replace("(", " ").replace(")", " ").split()
    own = {name: value for name, value in known.items() if name in words}
    return parse(
        f"g (float[2,3,8] x) => (float[2,3,8] y) {{ {text} }}", opset=opset, **own
    )


def rewritten(model: ModelProto, single: Pass) -> tuple[int, ModelProto]:
    graph = Graph.of(model)
    count = single(graph)
    graph.drop_unused()
    return count, graph.to_model()


@pytest.mark.parametrize(
    ("single", "kind", "text"),
    [(fuse_gelu, "Gelu", text) for text in GELUS.values()]
    + [
        (fuse_layer_norm, "LayerNormalization", text)
        for text in (NORMS | SUMS).values()
    ],
    ids=[*GELUS, *NORMS, *SUMS],
)
def test_parts_become_the_operator(single: Pass, kind: str, text: str) -> None:
    model = model_of(text)
    count, after = rewritten(model, single)
    assert count == 1 and kinds(after) == [kind]
    onnx.checker.check_model(after)
    x = {"x": normal(2, 3, 8, scale=2)}
    np.testing.assert_allclose(run(after, x)[0], run(model, x)[0], rtol=1e-4, atol=1e-5)
    assert rewritten(after, single)[0] == 0
    assert Graph.of(after).shape("y") == (2, 3, 8)


@pytest.mark.parametrize(
    "text", [NORMS["difference of moments"], *SUMS.values()], ids=["moments", *SUMS]
)
def test_the_operator_is_as_exact_as_a_formula_in_float64(text: str) -> None:
    model = model_of(text)
    _, after = rewritten(model, fuse_layer_norm)
    x = normal(2, 3, 8, scale=2) + np.float32(5)
    exact = x.astype(np.float64)
    exact -= exact.mean(axis=-1, keepdims=True)
    exact /= np.sqrt(np.square(exact).mean(axis=-1, keepdims=True) + 1e-3)
    if "scale" in text:
        exact *= 1 + normal(8, scale=0.1)
    if "shift" in text:
        exact += normal(8)
    np.testing.assert_allclose(run(after, {"x": x})[0], exact, rtol=1e-5, atol=1e-5)


def image_model(text: str, shape: str = "2,3,4,5") -> ModelProto:
    known: dict[str, Any] = {
        "two": np.float32(2),
        "minus": np.float32(-0.5),
        "small": np.full((1, 1, 1, 1), 1e-3),
        "zero": np.float32(0),
    }
    known |= {"scale3": 1 + normal(3, 1, 1, scale=0.1), "shift4": normal(1, 3, 1, 1)}
    words = text.replace(",", " ").replace("(", " ").replace(")", " ").split()
    own = {
        name: np.asarray(value, np.float32)
        for name, value in known.items()
        if name in words
    }
    return parse(
        f"g (float[{shape}] x) => (float[{shape}] y) {{ {text} }}", opset=17, **own
    )


@pytest.mark.parametrize("text", IMAGE_NORMS.values(), ids=[*IMAGE_NORMS])
def test_parts_over_images_become_the_operator(text: str) -> None:
    model = image_model(text)
    count, after = rewritten(model, whole_image_norms)
    assert count == 1 and kinds(after) == ["InstanceNormalization"]
    onnx.checker.check_model(after)
    x = {"x": normal(2, 3, 4, 5, scale=2)}
    np.testing.assert_allclose(run(after, x)[0], run(model, x)[0], rtol=1e-4, atol=1e-5)
    assert rewritten(model, fuse_layer_norm)[0] == 0 and Graph.of(after).shape("y") == (
        2,
        3,
        4,
        5,
    )


@pytest.mark.parametrize("text", NOT_IMAGE_NORMS.values(), ids=[*NOT_IMAGE_NORMS])
def test_means_over_something_else_stay(text: str) -> None:
    if "keepdims = 0" in text:
        text = text.replace("d = Sub (x, m)", "k = Unsqueeze (m, last) d = Sub (x, k)")
        model = image_model(text)
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.array([2, 3]), "last")
        )
    else:
        model = image_model(text, "1,3,4,4")
    assert rewritten(model, whole_image_norms)[0] == 0


def test_a_target_gets_normalized_images_on_the_engine() -> None:
    text = (
        "h = Conv (x, w)"
        f" {IMAGE_NORMS['pow'].replace('(x', '(h').replace('y =', 'z =')} y = Relu (z)"
    )
    model = image_model(text, "1,3,6,6")
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(weight(3, 3, 1, 1), "w")
    )
    result = quantize(
        model,
        [{"x": normal(1, 3, 6, 6, seed=seed)} for seed in range(4)],
        QConfig.of("A16W8").with_(target="stx"),
    )
    assert "whole_image_norms: 1" in result.report.notes
    found = [kind for kind in kinds(result.model) if not kind.endswith("antizeLinear")]
    assert found == ["Conv", "InstanceNormalization", "Relu"]
    assert not npu.check(result.model, "stx").findings


@pytest.mark.parametrize(
    ("single", "text"),
    [(fuse_gelu, text) for text in NOT_GELUS.values()]
    + [(fuse_layer_norm, text) for text in NOT_NORMS.values()],
    ids=[*NOT_GELUS, *NOT_NORMS],
)
def test_what_computes_something_else_stays(single: Pass, text: str) -> None:
    model = model_of(text)
    count, after = rewritten(model, single)
    assert count == 0 and kinds(after) == kinds(model)


def test_constants_that_add_an_axis() -> None:
    for single, text, name in (
        (fuse_layer_norm, NORMS["pow"], "small"),
        (fuse_gelu, GELUS["torch"], "half"),
    ):
        model = model_of(text)
        for tensor in model.graph.initializer:
            if tensor.name == name:
                tensor.dims.extend([1, 1, 1, 1])
        model.graph.output[0].CopyFrom(
            onnx.helper.make_tensor_value_info(
                "y", onnx.TensorProto.FLOAT, (1, 2, 3, 8)
            )
        )
        assert rewritten(model, single)[0] == 0


def test_a_shift_that_is_longer_than_the_axis() -> None:
    model = parse(
        f"g (float[2,3,1] x) => (float[2,3,4] y) {{ {NORMS['pow']} }}",
        **{
            name: np.asarray(value, np.float32)
            for name, value in {"two": 2, "small": 1e-3, "scale": [2]}.items()
        },
        shift=normal(4),
    )
    assert rewritten(model, fuse_layer_norm)[0] == 0


def test_a_scale_that_makes_more_channels_than_are_declared() -> None:
    model = image_model(IMAGE_NORMS["no shift"], "2,1,4,5")
    assert run(model, {"x": normal(2, 1, 4, 5)})[0].shape == (2, 3, 4, 5)
    assert rewritten(model, whole_image_norms)[0] == 0


def test_an_opset_without_the_operator() -> None:
    assert rewritten(model_of(NORMS["pow"], opset=16), fuse_layer_norm)[0] == 0


def test_the_operator_of_onnx_is_spelled_for_any_opset() -> None:
    model = model_of("y = Gelu (x)", opset=20)
    count, after = rewritten(model, fuse_gelu)
    assert count == 1 and [node.domain for node in after.graph.node] == [
        "com.microsoft"
    ]
    x = {"x": normal(2, 3, 8, scale=2)}
    np.testing.assert_allclose(run(after, x)[0], run(model, x)[0], rtol=1e-5, atol=1e-6)
    assert (
        rewritten(model_of('y = Gelu <approximate = "tanh"> (x)', opset=20), fuse_gelu)[
            0
        ]
        == 0
    )


def test_a_target_gets_both_at_its_opset() -> None:
    text = (
        f"h = MatMul (x, w) {GELUS['torch'].replace('x', 'h').replace('y =', 'z =')} y"
        " = LayerNormalization (z, scale)"
    )
    model = model_of(text, opset=20)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight(8, 8), "w"))
    data = [{"x": normal(1, 3, 8, seed=seed)} for seed in range(4)]
    for entry in model.graph.input[0].type.tensor_type.shape.dim[:1]:
        entry.dim_value = 1
    model.graph.output[0].CopyFrom(
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, 3, 8))
    )
    result = quantize(model, data, QConfig.of("A16W8").with_(target="stx"))
    assert Graph.of(result.model).opset == 17 and "fuse_gelu: 1" in result.report.notes
    forecast = npu.preflight(result.model, "stx", kind="A16W8")
    assert {each.device for each in forecast.placements if each.op_type == "Gelu"} == {
        "NPU"
    }
