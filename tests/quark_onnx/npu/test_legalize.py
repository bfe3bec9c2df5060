"""Legalizing: the same function in the words of the compiler, float or quantized by any tool, file
to file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, npu, quantize
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.graph import Graph
from tests.cases import loop_over
from tests.models import MODELS, Factory, kinds, normal, parse, run, weight

TEXT = """g (float[N,6,H,8] x) => (float[N,4] y) {
    a, b = Split <axis = 1, num_outputs = 2> (x) s = Concat <axis = 1> (b, a)
    c = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (s, w, v) r = Relu (c) d = Conv (r, u, t)
    h = Conv (d, u, t) e = Conv (h, u, t) n = BatchNormalization (e, gamma, beta, mean, variance) m = Relu (n)
    f = ReduceMean <keepdims = 0> (m, axes) y = Gemm (f, k) }"""  # noqa: E501


POINT = (
    "kernel_shape = [1, 1], strides = [1, 1], pads = [0, 0, 0, 0], dilations = [1, 1],"
    " group = 1"
)


def float_model() -> ModelProto:
    constants = {
        name: normal(4, seed=seed)
        for seed, name in enumerate(("v", "t", "gamma", "beta", "mean"))
    }
    constants |= {
        "w": weight(4, 6, 3, 3),
        "u": weight(4, 4, 1, 1),
        "k": weight(4, 4),
        "variance": np.ones(4, np.float32),
    }
    model = parse(TEXT, opset=18, **constants)
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([2, 3], np.int64), "axes")
    )
    return model


def same(first: ModelProto, second: ModelProto) -> None:
    feeds = {"x": normal(1, 6, 10, 8)}
    np.testing.assert_allclose(
        run(second, feeds)[0], run(first, feeds)[0], rtol=1e-4, atol=1e-5
    )


def test_a_float_model_loses_what_the_compiler_does_not_take(tmp_path: Path) -> None:
    model = float_model()
    onnx.save(model, tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx").read_bytes()
    found = npu.legalize(
        tmp_path / "model.onnx",
        "stx",
        shapes={"x": (1, 6, 10, 8)},
        output=tmp_path / "deep" / "legal.onnx",
    )
    assert (tmp_path / "model.onnx").read_bytes() == before and len(
        npu.check(model, "stx").findings
    ) > 4
    assert onnx.load(tmp_path / "deep" / "legal.onnx") == found.model
    assert not npu.check(found.model, "stx").findings
    assert not {"Split", "ReduceMean", "BatchNormalization"} & set(kinds(found.model))
    assert {"GlobalAveragePool", "Slice"} <= set(kinds(found.model))
    same(model, found.model)
    onnx.checker.check_model(found.model, full_check=True)
    assert "unshare_initializers: 2" in found.notes
    assert (
        npu.legalize(found.model).notes == ()
        and str(npu.legalize(found.model)) == "rewrites  none was necessary"
    )


def test_a_quantized_model_keeps_its_codes() -> None:
    data = [{"x": normal(1, 6, 10, 8, seed=seed)} for seed in range(4)]
    quantized = quantize(float_model(), data, QConfig.of("A8W8")).model
    assert {finding.rule for finding in npu.check(quantized, "stx").findings} >= {
        "G1",
        "G3",
    }
    found = npu.legalize(quantized, shapes={"x": (1, 6, 10, 8)})
    assert [finding.rule for finding in npu.check(found.model, "stx").findings] == [
        "G11"
    ]  # onnx lowers no Split, nor are axes alike
    assert sorted(kinds(found.model)).count("QuantizeLinear") == kinds(quantized).count(
        "QuantizeLinear"
    )
    np.testing.assert_array_equal(
        run(found.model, data[0])[0], run(quantized, data[0])[0]
    )


def test_quantized_models_of_later_opsets_are_lowered() -> None:
    """Split has a number of parts from opset 18 on, and there is no Gelu before opset 20."""
    model = parse(
        """g (float[1,5,6,6] x) => (float[1,3,6,6] y, float[1,2,6,6] z) {
        q = QuantizeLinear (x, s, z0) d = DequantizeLinear (q, s, z0) g = Gelu (d) p = QuantizeLinear (g, s, z0)
        e = DequantizeLinear (p, s, z0) y, z = Split <axis = 1, num_outputs = 2> (e) }""",  # noqa: E501
        opset=20,
        s=np.array(0.25, np.float32),
        z0=np.array(0, np.int8),
    )
    found = npu.legalize(model, "stx")
    assert (
        found.model.opset_import[0].version == 17
        and not npu.check(found.model, "stx").findings
    )
    feeds = {"x": normal(1, 5, 6, 6)}
    for first, second in zip(run(model, feeds), run(found.model, feeds), strict=True):
        np.testing.assert_array_equal(first, second)


def test_shared_codes_are_copied_with_their_scales() -> None:
    model = parse(
        f"""g (float[1,4,6,6] x) => (float[1,4,6,6] y) {{ d = DequantizeLinear (q, s, z)
        a = Conv <{POINT}> (x, d) y = Conv <{POINT}> (a, d) }}""",
        q=np.arange(-8, 8, dtype=np.int8).reshape(4, 4, 1, 1),
        s=np.array(0.25, np.float32),
        z=np.array(0, np.int8),
    )
    assert {finding.rule for finding in npu.check(model, kind="integer").findings} == {
        "G5"
    }
    found = npu.legalize(model)
    assert (
        not npu.check(found.model, kind="integer").findings
        and kinds(found.model).count("DequantizeLinear") == 2
    )
    feeds = {"x": normal(1, 4, 6, 6)}
    np.testing.assert_array_equal(run(found.model, feeds)[0], run(model, feeds)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": "sty"}, ConfigError, "unknown target 'sty'"),
        ({"shapes": {"z": (1,)}}, ConfigError, "no input 'z'"),
        ({"shapes": {"x": (1, 6, 10)}}, ConfigError, "3 dimensions, the input has 4"),
        ({"output": "model.txt/x"}, ConfigError, "output"),
    ],
    ids=str,
)
def test_bad_input(
    arguments: Any,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.txt").write_text("no folder", encoding="utf-8")
    with pytest.raises(error, match=message):
        npu.legalize(float_model(), **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["model.txt"]


def test_a_model_that_runs_on_nothing_random_says_so() -> None:
    model = parse("g (float[N,S] x) => (float[M,T] y) { y = Reshape (x, s) }")
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([7, 31], np.int64), "s")
    )
    with pytest.raises(
        ModelError, match=r"runs on no random input.*give the shapes of x"
    ):
        npu.legalize(model)
    assert (
        npu.legalize(model, shapes={"x": (1, 217)}).model.graph.node[0].op_type
        == "Reshape"
    )


def test_a_model_of_which_nothing_is_quantized_is_legalized_all_the_same() -> None:
    model = parse(
        "g (float[N,3,9,9] x) => (float[N,3,4,4] y) { y = AveragePool <kernel_shape ="
        " [3, 3], strides = [2, 2]> (x) }"
    )
    made = quantize(
        model, [{"x": normal(1, 3, 9, 9)}], QConfig.of("XINT8").with_(target="stx")
    )
    assert kinds(made.model) == ["AveragePool"] and "nothing was quantized" in " ".join(
        made.report.notes
    )
    assert {finding.rule for finding in npu.check(made.model, "stx").findings} == set()


def test_channels_last() -> None:
    model = parse(
        """g (float[1,3,8,6] x, float[1,4] b) => (float[1,4,8,6] y, float[1,4,8,6] z, float[1,4] c)
        { y = Conv <pads = [1,1,1,1]> (x, w) z = Relu (y) p = GlobalAveragePool (z) f = Flatten (p) c = Add (f, b) }""",  # noqa: E501
        w=weight(4, 3, 3, 3),
    )
    found = npu.legalize(model, "stx", nhwc=True)
    assert [note for note in found.notes if "channels" in note] == [
        *(
            "'x' has its channels last",
            "'y' has its channels last",
            "'z' has its channels last",
        )
    ]
    graph = Graph.of(found.model)
    assert graph.shape("x") == (1, 8, 6, 3) and graph.shape("y") == graph.shape(
        "z"
    ) == (1, 8, 6, 4)
    assert graph.shape("c") == (1, 4)
    x, b = normal(1, 3, 8, 6), normal(1, 4)
    y, z, c = run(model, {"x": x, "b": b})
    for wanted, got in zip(
        (y.transpose(0, 2, 3, 1), z.transpose(0, 2, 3, 1), c),
        run(found.model, {"x": x.transpose(0, 2, 3, 1), "b": b}),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    onnx.checker.check_model(found.model, full_check=True)
    plain = parse("g (float[1,4] x) => (float[1,4] y) { y = Relu (x) }")
    assert npu.legalize(plain, nhwc=True).notes == ()


def test_channels_last_that_would_change_an_output_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = parse("g (float[1,3,4,4] x) => (float[1,3,4,4] y) { y = Relu (x) }")
    step = sys.modules["quark_onnx.npu.legalize"]
    monkeypatch.setattr(step, "channels_last", lambda graph: (graph, []))
    npu.legalize(model, nhwc=True)
    other = Graph.of(
        parse("g (float[1,3,4,4] x) => (float[1,3,4,4] y) { y = Neg (x) }")
    )
    monkeypatch.setattr(step, "channels_last", lambda graph: (other, []))
    with pytest.raises(ModelError, match="computes another 'y'; leave them first"):
        npu.legalize(model, nhwc=True)


def test_channels_of_what_is_input_and_output_at_once_stay() -> None:
    model = parse(
        "g (float[1,3,4,4] x) => (float[1,3,4,4] x, float[1,3,4,4] y) { y = Relu (x) }"
    )
    found = npu.legalize(model, "stx", nhwc=True)
    onnx.checker.check_model(found.model, full_check=True)
    assert [note for note in found.notes if "channels" in note] == [
        "'y' has its channels last"
    ]
    x = normal(1, 3, 4, 4)
    same, turned = run(found.model, {"x": x})
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(turned, np.maximum(x, 0).transpose(0, 2, 3, 1))


def sizes_in_float() -> ModelProto:
    """Arithmetic on sizes that shape inference does not follow, once for each layer."""
    text = "".join(
        f"""s{i} = Shape (h{i}) c{i} = Cast <to = 1> (s{i}) e{i} = Floor (c{i})
            d{i} = Cast <to = 7> (e{i}) h{i + 1} = Reshape (h{i}, d{i}) """
        for i in range(3)
    )
    return parse(f"g (float[N,4] h0) => (float[N,4] y) {{ {text} y = Relu (h3) }}")


def chunks() -> ModelProto:
    """The shape of a Concat of slices, as an exporter with a dynamic batch writes it."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,M] y) {
            a = Conv <pads = [1,1,1,1]> (x, w) u, v = Split <axis = 1> (a)
            c = Concat <axis = 1> (v, u) s = Shape (c)
            n = Gather <axis = 0> (s, first) r = Gather <axis = 0> (s, others)
            p = ReduceProd <axes = [0], keepdims = 1> (r) k = Concat <axis = 0> (n, p)
            y = Reshape (c, k)
        }""",
        w=weight(4, 3, 3, 3),
        first=np.array([0]),
        others=np.array([1, 2, 3]),
    )


@loop_over("make", {**MODELS, "sizes": sizes_in_float, "chunks": chunks})
def test_a_legalized_model_has_nothing_to_legalize(make: Factory) -> None:
    """One run reaches the end: a second finds nothing, and computed sizes are constants."""
    legal = npu.legalize(make(), "stx")
    again = npu.legalize(legal.model, "stx")
    assert again.notes == ()
    assert again.model.SerializeToString(deterministic=True) == (
        legal.model.SerializeToString(deterministic=True)
    )


@pytest.mark.parametrize("make", [sizes_in_float, chunks])
def test_computed_sizes_become_constants(make: Factory) -> None:
    legal = npu.legalize(make(), "stx").model
    graph = Graph.of(legal)
    assert "Shape" not in kinds(legal)
    assert all(map(graph.has_static_shape, graph.results()))
