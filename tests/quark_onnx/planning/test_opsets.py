"""opsets: what formats need, what the runtime has, and what a target advises."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto

from quark_onnx import QConfig, npu, quantize, quantize_static
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.graph import Graph
from quark_onnx.planning import opsets
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.opsets import lower_opset, newest_with_pairs, raise_opset_for
from quark_onnx.running.run import Reference
from tests.models import Feeds, interface, normal, old_ir, parse, run, samples, weight
from tests.settings import CHANNEL, TENSOR, WIDE

insert_step = sys.modules[
    "quark_onnx.writing.insert"
]  # the package gives its name to the function


@pytest.mark.parametrize(
    ("opset", "config", "needed", "note"),
    [
        (17, TENSOR, 17, []),
        (17, CHANNEL, 17, []),
        (11, CHANNEL, 13, []),
        (13, WIDE, 21, ["opset raised from 13 to 21"]),
        (21, WIDE, 21, []),
    ],
)
def test_the_opset_is_raised_to_what_is_needed(
    opset: int, config: QConfig, needed: int, note: list[str]
) -> None:
    """A note says so where an older runtime may not read the result."""
    model = parse(
        "g (float[N,2,4,4] x) => (float[N,2,4,4] y) { y = Conv (x, w) }",
        opset=opset,
        w=np.ones((2, 2, 1, 1), np.float32),
    )
    graph = Graph.of(model)
    plan = make_plan(graph, config)
    raised, notes = raise_opset_for(
        graph, plan, config, Reference(model), samples(model)[0]
    )
    assert notes == note and raised.opset == needed
    assert interface(raised.to_model()) == interface(model)


@pytest.mark.parametrize("optimizers", [(), ("cle",)], ids=["plain", "optimized"])
def test_a_model_that_cannot_be_raised_uses_another_domain(
    monkeypatch: pytest.MonkeyPatch, optimizers: tuple[str, ...]
) -> None:
    monkeypatch.setattr(opsets, "raise_opset", lambda model, opset: None)
    model = old_ir()
    result = quantize(model, samples(model), WIDE.with_(optimizers=optimizers))
    [note] = [note for note in result.report.notes if "be raised" in note]
    assert note.startswith("opset 9 could not be raised to 21")
    domains = {
        node.domain for node in result.model.graph.node if "uantize" in node.op_type
    }
    assert domains == {"com.microsoft"} and result.report.worst_sqnr > 35


@pytest.mark.parametrize(
    ("limit", "opset", "domains"),
    [(21, 21, {""}), (20, 13, {"", "com.microsoft"}), (None, 21, {""})],
)
def test_the_opset_has_a_limit(
    limit: int | None, opset: int, domains: set[str]
) -> None:
    model = parse(
        "g (float[N,2,4,4] x) => (float[N,2,4,4] y) { y = Conv (x, w) }",
        opset=12,
        w=np.ones((2, 2, 1, 1), np.float32),
    )
    quantized = quantize_static(model, samples(model), WIDE.with_(max_opset=limit))
    assert {entry.domain: entry.version for entry in quantized.opset_import}[
        ""
    ] == opset
    assert {node.domain for node in quantized.graph.node} == domains


def test_a_format_beyond_the_limit() -> None:
    model = parse(
        "g (float[N,2] x) => (float[N,2] y) { y = MatMul (x, w) }",
        w=np.eye(2, dtype=np.float32),
    )
    with pytest.raises(
        ConfigError, match="fp8e4m3 needs opset 19, but max_opset is 17"
    ):
        quantize_static(
            model, samples(model), QConfig.of("FP8E4M3").with_(max_opset=17)
        )
    with pytest.raises(
        ConfigError, match="max_opset is 9; it must be an opset, 11 or higher"
    ):
        QConfig(max_opset=9)


def domains(model: ModelProto) -> set[str]:
    return {
        node.domain for node in model.graph.node if "quantize" in node.op_type.lower()
    }


def opset_of(model: ModelProto) -> int:
    return Graph.of(model).opset


def test_the_runtime_has_pairs_of_the_newest_opset_that_is_said() -> None:
    newest = opsets.newest_with_pairs()
    assert (
        newest >= 25
        and opsets.loads_pairs(newest)
        and not opsets.loads_pairs(newest + 1)
    )


def two_layers(opset: int, between: str = "Relu (h)") -> tuple[ModelProto, list[Feeds]]:
    text = (
        f"g (float[N,8] x) => (float[N,3] y) {{ h = MatMul (x, w) r = {between} y ="
        " MatMul (r, v) }"
    )
    model = parse(
        text,
        opset=opset,
        ir_version=10,
        w=weight(6, 8).T.copy(),
        v=weight(3, 6).T.copy(),
    )
    return model, [{"x": normal(1, 8, seed=seed)} for seed in range(6)]


def test_an_opset_that_the_runtime_lacks_pairs_of_is_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opsets, "newest_with_pairs", lambda: 20)
    model, data = two_layers(22)
    result = quantize(model, data, TENSOR)
    assert (
        opset_of(result.model) == 20
        and domains(result.model) == {""}
        and result.report.worst_sqnr > 30
    )
    assert (
        "opset lowered from 22 to 20: onnxruntime has Q/DQ nodes up to 20"
        in result.report.notes
    )


def test_where_it_cannot_be_lowered_pairs_are_of_another_domain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (opsets, insert_step):
        monkeypatch.setattr(module, "newest_with_pairs", lambda: 19)
    model, data = two_layers(20, "Gelu (h)")  # which 19 does not have
    result = quantize(model, data, TENSOR)
    assert opset_of(result.model) == 20 and domains(result.model) == {"com.microsoft"}
    assert result.report.worst_sqnr > 30
    [note] = [
        note for note in result.report.notes if "the model stays at opset 20" in note
    ]
    assert note.startswith("onnxruntime has Q/DQ nodes up to 19; ")


def test_an_opset_that_means_something_else_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data = two_layers(20)
    wrong, _ = two_layers(17, "Neg (h)")
    monkeypatch.setattr(opsets, "at_opset", lambda graph, version: Graph.of(wrong))
    graph, notes = lower_opset(Graph.of(model), "stx", Reference(model), data[0])
    assert graph.opset == 20
    assert notes == [
        "the target stx advises 17; the model stays at opset 20: at 17 it computes"
        " something else"
    ]


def test_a_target_lowers_the_opset_to_what_it_advises() -> None:
    model, data = two_layers(21)
    result = quantize(model, data, QConfig.of("XINT8").with_(target="stx"))
    assert opset_of(result.model) == 17 and result.report.worst_sqnr > 25
    assert (
        "opset lowered from 21 to 17: the target stx advises 17" in result.report.notes
    )
    legal = npu.legalize(model, "stx", shapes={"x": (1, 8)})
    assert legal.notes[-1] == "opset lowered from 21 to 17: the target stx advises 17"
    np.testing.assert_allclose(
        run(legal.model, data[0])[0], run(model, data[0])[0], rtol=1e-5
    )


def test_16_bits_for_a_target_are_of_the_domain_that_has_them_at_its_opset() -> None:
    model, data = two_layers(17)
    result = quantize(model, data, QConfig.of("A16W8").with_(target="stx"))
    assert opset_of(result.model) == 17 and result.report.worst_sqnr > 35
    assert domains(result.model) == {
        "",
        "com.microsoft",
    }  # weights of 8 bits are ONNX's own
    assert opset_of(quantize(model, data, QConfig.of("A16W8")).model) == 21
    assert (
        opset_of(
            quantize(
                model, data, QConfig.of("A16W8").with_(target="stx", max_opset=21)
            ).model
        )
        == 21
    )


def test_shapes_behind_pairs_of_another_domain_are_known() -> None:
    model, data = two_layers(17)
    quantized = Graph.of(quantize(model, data, WIDE.with_(max_opset=17)).model)
    behind = {
        node.outputs[0]: node
        for node in quantized.nodes
        if node.kind == "com.microsoft::DequantizeLinear"
    }
    assert "x_DequantizeLinear_Output" in behind and domains(quantized.to_model()) == {
        "",
        "com.microsoft",
    }
    for name, node in behind.items():
        assert quantized.elem_type(node.inputs[0]) == TensorProto.UINT16
        assert (
            quantized.shape(name)
            == quantized.shape(node.inputs[0])
            == ("N", 8 if name.startswith("x") else 6)
        )


def test_both_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opsets, "newest_with_pairs", lambda: 20)
    model, data = two_layers(21, 'Gelu <approximate = "tanh"> (h)')
    graph, notes = lower_opset(Graph.of(model), "stx", Reference(model), data[0])
    assert graph.opset == 20 and len(notes) == 2
    assert notes[0].startswith(
        "the target stx advises 17; the model stays at opset 21: "
    )
    assert (
        notes[1] == "opset lowered from 21 to 20: onnxruntime has Q/DQ nodes up to 20"
    )


@pytest.mark.parametrize(
    "preset",
    ["A8W8", "XINT8", "INT4", "DYNAMIC", "BF16", "BFP16", "MXFP8E4M3", "FP8E4M3"],
)
def test_an_opset_of_which_onnxruntime_has_no_pairs(preset: str) -> None:
    """A graph that cannot be lowered gets the com.microsoft domain's nodes.

    A format that this domain lacks is refused.

    onnxruntime 1.32 loads opset 28, and has QuantizeLinear up to 27. Mod of floats that may be
    negative needs opset 28.
    """
    newest = newest_with_pairs()
    if newest == onnx.defs.onnx_opset_version():
        return  # of this onnxruntime no opset is beyond
    body = "a = Conv (x, w) [odd] m = Mod <fmod = 0> (a, three) y = Add (a, m)"
    model = parse(
        f"g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{ {body} }}",
        opset=28,
        w=weight(4, 4, 1, 1),
        three=np.float32(3),
    )
    samples = [{"x": normal(1, 4, 8, 8, seed=seed)} for seed in range(4)]
    if preset != "FP8E4M3":
        result = quantize(model, samples, preset).model
        assert result.opset_import[0].version == 28
        return
    message = (
        rf"fp8e4m3 needs Q/DQ nodes, .* up to opset {newest}, and the model's opset 28"
        r" cannot be lowered .*'x'"
    )
    with pytest.raises(ModelError, match=message):
        quantize(model, samples, preset)
