"""Kinds of fusion that break a model are found and left out, and only these."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import QConfig
from quark_onnx.fusions import FUSIONS, Fusion
from quark_onnx.graph import Graph, Node
from quark_onnx.writing.fuse import fuse
from tests.models import kinds, parse, residual, run, samples, weight
from tests.pipeline import Stages
from tests.settings import SIGNED, TENSOR


def pairs(model: ModelProto) -> Graph:
    return Graph(Stages.of(model).model)


def breaking(factor: float) -> Fusion:
    """A fusion that multiplies what a node reads, or, by 0, puts an operator before it that nobody
    has.
    """

    def broken(graph: Graph, node: Node) -> bool:
        wrong = graph.fresh(f"{node.name}_wrong")
        if factor:
            graph.add(
                "Mul",
                [node.inputs[0], graph.add_constant("factor", np.float32(factor))],
                [wrong],
            )
        else:
            graph.add("Nothing", [node.inputs[0]], [wrong])
        graph.set_input(node, 0, wrong)
        return True

    return broken


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(0.0, "does not run"), (0.7, "dB from those of the Q/DQ pairs")],
)
def test_a_kind_that_breaks_the_model_is_left_out(
    factor: float,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(FUSIONS, "GlobalAveragePool", (breaking(factor),))
    model = residual()
    fused, notes = fuse(pairs(model), samples(model))
    assert {"QLinearConv", "QLinearAdd", "QGemm", "GlobalAveragePool"} <= set(
        kinds(fused.to_model())
    )
    [left] = [note for note in notes if "left out" in note]
    assert (
        left.startswith("broken of GlobalAveragePool was left out: ") and reason in left
    )
    assert left in caplog.text
    run(fused.to_model(), samples(model)[0])


def test_without_samples_it_is_loaded() -> None:
    model = residual()
    fused, notes = fuse(pairs(model), [])
    assert "QLinearConv" in kinds(fused.to_model()) and not [
        note for note in notes if "left out" in note
    ]


def test_nothing_to_fuse() -> None:
    graph = Graph.of(residual())
    assert fuse(graph, samples(residual())) == (graph, [])


def test_the_graph_is_not_changed() -> None:
    graph = pairs(residual())
    before = graph.to_model().SerializeToString(deterministic=True)
    fuse(graph, samples(residual()))
    assert graph.to_model().SerializeToString(deterministic=True) == before


def test_slow_kernels_are_told_of() -> None:
    model = residual()
    fast, slow = (
        fuse(Graph(Stages.of(model, config).model), samples(model))[1]
        for config in (TENSOR, SIGNED)
    )
    assert not [note for note in fast if "x86" in note]
    assert [
        note
        for note in slow
        if note.startswith("3 operators multiply int8 activations")
    ]


def quantized(text: str, **constants: np.ndarray) -> Graph:
    """A graph of Q/DQ pairs as somebody else writes it."""
    return Graph(parse(text, opset=21, ir_version=10, **constants))


def test_zero_points_that_were_left_out_are_written() -> None:
    graph = quantized(
        """g (float[1,4] x) => (float[1,3] y) {
            q = QuantizeLinear (x, s) d = DequantizeLinear (q, s) e = DequantizeLinear (w, s)
            m = MatMul (d, e) r = QuantizeLinear (m, s) y = DequantizeLinear (r, s)
        }""",
        s=np.float32(0.1),
        w=(weight(4, 3) * 50).astype(np.int8),
    )
    fused, _ = fuse(graph, [{"x": np.float32([[1, 2, 3, 4]])}])
    model = fused.to_model()
    onnx.checker.check_model(model, full_check=True)
    assert kinds(model) == ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear"]


def test_rounding_again_is_dropped() -> None:
    graph = quantized(
        """g (float[1,4] x) => (float[1,4] y, float[1,4] z) {
            q = QuantizeLinear (x, s, o) d = DequantizeLinear (q, s, o)
            r = QuantizeLinear (d, t, o) y = DequantizeLinear (r, t, o)
            u = QuantizeLinear (d, n, o) z = DequantizeLinear (u, n, o)
        }""",
        s=np.float32(0.1),
        t=np.float32(0.1),
        n=np.float32(0.2),
        o=np.uint8(3),
    )
    fused, notes = fuse(graph, [{"x": np.float32([[1, 2, 3, 4]])}])
    assert kinds(fused.to_model()).count("QuantizeLinear") == 2
    assert notes == ["drop_rounding_again: 1"]


@pytest.mark.parametrize("wrong", ["scale", "zero point", "type"])
def test_a_bias_that_counts_otherwise_is_not_fused(wrong: str) -> None:
    graph = quantized(
        """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
            q = QuantizeLinear (x, s, o) d = DequantizeLinear (q, s, o) e = DequantizeLinear (w, t)
            f = DequantizeLinear (b, bs, bo) m = Conv (d, e, f)
            r = QuantizeLinear (m, s, o) y = DequantizeLinear (r, s, o)
        }""",
        s=np.float32(0.1),
        o=np.uint8(128),
        t=np.float32(0.02),
        w=(weight(2, 2, 1, 1) * 50).astype(np.int8),
        b=(np.int8 if wrong == "type" else np.int32)([50, -50]),
        bs=np.float32(0.004 if wrong == "scale" else 0.002),
        bo=(np.int8 if wrong == "type" else np.int32)(wrong == "zero point"),
    )
    fused, _ = fuse(graph, [{"x": np.ones((1, 2, 4, 4), np.float32)}])
    assert "Conv" in kinds(fused.to_model())


def test_operators_that_run_where_the_pairs_do_not() -> None:
    """Before opset 21 there are no blocks for DequantizeLinear, but there is MatMulNBits."""
    model = parse(
        "g (float[2,32] x) => (float[2,4] y) { y = MatMul (x, w) }",
        w=weight(4, 32).T.copy(),
    )
    graph = Graph(Stages.of(model, QConfig.of("INT4")).model)
    fused, notes = fuse(graph, samples(model))
    assert kinds(fused.to_model()) == ["MatMulNBits"] and notes == ["matmul_nbits: 1"]
