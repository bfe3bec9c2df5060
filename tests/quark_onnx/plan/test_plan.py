"""Plan: the producer speaks first, a reader that disagrees has an entry of its own, and scales have
one origin.
"""

from __future__ import annotations

import pytest

from quark_onnx import Override, QConfig, QuantizationSpec
from quark_onnx.common.errors import PlanError
from quark_onnx.graph import Graph
from quark_onnx.plan import (
    BiasOf,
    Keep,
    Plan,
    PlanBuilder,
    Quantize,
    SameAs,
    Use,
    explain,
)
from quark_onnx.planning.make_plan import make_plan
from tests.cases import loop_over
from tests.models import (
    MODELS,
    Factory,
    normal,
    parse,
    shared_bias,
    shared_weight,
    weight,
)
from tests.settings import CHANNEL, TENSOR

CHAIN = (
    "g (float[N,4] x) => (float[N,4] y) { [first] h = Add (x, x) [turn] t = Flatten (h)"
    " [second] y = Mul (t, t) }"
)
SIXTEEN = QuantizationSpec("uint16", symmetric=False)


def plan_of(text: str, config: QConfig = TENSOR, **constants: object) -> Plan:
    return make_plan(Graph.of(parse(text, **constants)), config)


def test_a_reader_of_another_format_gets_a_use_of_its_own() -> None:
    plan = plan_of(
        CHAIN, TENSOR.with_(overrides=(Override("second", activation=SIXTEEN),))
    )
    assert (
        explain(plan) == "first (Add)\n"
        "  < x: quantize uint8 asymmetric minmax\n"
        "  < x: quantize uint8 asymmetric minmax\n"
        "  > h: quantize uint8 asymmetric minmax\n"
        "turn (Flatten)\n"
        "  < h: quantize uint8 asymmetric minmax\n"
        "  > t: same as h\n"
        "second (Mul)\n"
        "  < t: quantize uint16 asymmetric minmax\n"
        "  < t: quantize uint16 asymmetric minmax\n"
        "  > y: quantize uint16 asymmetric minmax"
    )
    own = Use("t", "second")
    assert plan.use("t", plan.graph.nodes[2]) == own and plan.use(
        "t", plan.graph.nodes[1]
    ) == Use("t")
    assert str(own) == "t in second"


def test_agreeing_readers_share_one_entry() -> None:
    plan = make_plan(Graph.of(shared_weight()), CHANNEL)
    assert [str(use) for use in plan.entries if use.tensor == "w"] == ["w"]


def test_readers_that_want_another_axis_do_not() -> None:
    plan = plan_of(
        "g (float[N,4] x) => (float[N,4] y) { [a] h = MatMul (x, w) [b] y = Gemm"
        " <transB = 1> (h, w) }",
        CHANNEL,
        w=weight(4, 4),
    )
    axes = {
        str(use): entry.axis
        for use, entry in plan.entries.items()
        if isinstance(entry, Quantize) and use.tensor == "w"
    }
    assert axes == {"w": 1, "w in b": 0}


def test_a_shared_bias_is_quantized_for_each_layer() -> None:
    plan = make_plan(Graph.of(shared_bias()), TENSOR)
    biases = {
        str(use): str(entry)
        for use, entry in plan.entries.items()
        if isinstance(entry, BiasOf)
    }
    assert biases == {
        "b in first": "bias of x and w",
        "b in second": "bias of l and w",
    }


def test_a_float_node_reads_a_float_value_where_there_is_one() -> None:
    plan = plan_of(
        "g (float[N,4] x) => (float[N,4] y, float[N,4] z) { [add] y = Add (x, x) [erf]"
        " z = Erf (x) }"
    )
    add, erf = plan.graph.nodes
    assert plan.quantized("x", add) and not plan.quantized("x", erf)


def test_a_tensor_that_is_kept_is_kept_for_all() -> None:
    plan = PlanBuilder.of(plan_of(CHAIN))
    plan.keep("h", "because")
    turn = plan.graph.nodes[1]
    plan.activation(turn, "h")
    assert plan.entry(Use("h")) == Keep("because") and plan.entry(Use("t")) == Keep(
        "because"
    )


def test_the_origin_of_a_scale() -> None:
    plan = plan_of(CHAIN)
    assert plan.entries[Use("t")] == SameAs(Use("h")) and plan.root(Use("t")) == Use(
        "h"
    )
    circle = plan.revised({Use("h"): SameAs(Use("t"))})
    with pytest.raises(PlanError, match=r"tensor [ht] has its own scale as its origin"):
        circle.root(Use("h"))


def test_a_plan_is_a_value() -> None:
    """It cannot be written to; a builder starts with a copy, and a revision is another plan."""
    plan = plan_of(CHAIN)
    before = str(plan)
    with pytest.raises(TypeError):
        plan.entries[Use("h")] = Keep("because")  # type: ignore[index]
    with pytest.raises(TypeError):
        plan.kept["turn"] = "because"  # type: ignore[index]
    builder = PlanBuilder.of(plan)
    builder.keep("h", "because")
    builder.keep_node(plan.graph.nodes[0], "because")
    built = builder.build()
    builder.keep("x", "too late")
    assert built.entry(Use("h")) == Keep("because") and built.quantized("x")
    assert plan.revised({Use("x"): Keep("because")}).entry(Use("x")) == Keep("because")
    assert not any(
        isinstance(entry, Quantize) for entry in plan.without(Quantize).entries.values()
    )
    assert str(plan) == before == explain(plan) and str(built) != before


def test_why_a_tensor_cannot_be_quantized() -> None:
    plan = plan_of(
        "g (float[N,4] x, int64[2] i, float[0] e) => (float[N,4] y) { y = Mul (x, k) }",
        k=normal(1) * float("inf"),
    )
    assert [plan.ineligible(t) for t in ("x", "", "i", "e", "k")] == [
        "",
        "omitted",
        "its type is int64",
        "it has no elements",
        "it holds values that are not finite",
    ]


@loop_over("make", MODELS)
def test_a_plan_is_the_same_every_time_and_changes_no_graph(make: Factory) -> None:
    graph = Graph.of(make())
    before = graph.to_model()
    assert explain(make_plan(graph, CHANNEL)) == explain(
        make_plan(graph.copy(), CHANNEL)
    )
    assert graph.to_model() == before
