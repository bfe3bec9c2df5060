"""insert: where Q and DQ nodes stand, what they are called, and that the numbers in them are right."""  # noqa: E501

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto
from onnx.reference import ReferenceEvaluator

from calibrators import fake_quantize
from calibrators.onnx_runtime.session import open_session
from quark_onnx import Override, QConfig, QuantizationSpec
from quark_onnx.graph import Graph
from quark_onnx.plan import Quantize, Use
from quark_onnx.writing.fuse import fuse
from quark_onnx.writing.insert import insert, insert_live
from tests.models import (
    MODELS,
    Array,
    Factory,
    Feeds,
    conv_relu,
    inner_output,
    interface,
    kinds,
    name_collisions,
    normal,
    parse,
    residual,
    run,
    samples,
    shared_bias,
    shared_weight,
    weight,
)
from tests.pipeline import Stages
from tests.settings import ALL, CHANNEL, POW2, SIGNED, TENSOR, WIDE


def text(model: ModelProto) -> list[str]:
    """One line a node: results = operator (inputs)."""
    return [
        f"{', '.join(node.output)} ="
        f" {node.domain + '.' if node.domain else ''}{node.op_type}"
        f" ({', '.join(node.input)})"
        for node in model.graph.node
    ]


def test_a_layer() -> None:
    stages = Stages.of(conv_relu())
    assert sorted(text(stages.model)) == [
        (
            "b_DequantizeLinear_Output = DequantizeLinear (b_quantized, b_scale,"
            " b_zero_point)"
        ),
        (
            "w_DequantizeLinear_Output = DequantizeLinear (w_quantized, w_scale,"
            " w_zero_point)"
        ),
        (
            "x_DequantizeLinear_Output = DequantizeLinear (x_QuantizeLinear_Output,"
            " x_scale, x_zero_point)"
        ),
        "x_QuantizeLinear_Output = QuantizeLinear (x, x_scale, x_zero_point)",
        "y = DequantizeLinear (y_QuantizeLinear_Output, y_scale, y_zero_point)",
        (
            "y_QuantizeLinear_Input = Conv (x_DequantizeLinear_Output,"
            " w_DequantizeLinear_Output, b_DequantizeLinear_Output)"
        ),
        (
            "y_QuantizeLinear_Output = QuantizeLinear (y_QuantizeLinear_Input, y_scale,"
            " y_zero_point)"
        ),
    ]
    types = {t.name: t.data_type for t in stages.model.graph.initializer}
    assert (types["x_zero_point"], types["w_quantized"], types["b_quantized"]) == (
        TensorProto.UINT8,
        TensorProto.INT8,
        TensorProto.INT32,
    )
    assert "w" not in types and "b" not in types, "floats that nobody reads are gone"


@pytest.mark.parametrize("config", ALL.values(), ids=list(ALL))
@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_models_stay_valid_and_keep_their_interface(
    make: Factory, config: QConfig
) -> None:
    model = make()
    after = Stages.of(model, config).model
    assert interface(after) == interface(model)
    names = Counter(name for node in after.graph.node for name in node.output if name)
    names += Counter(t.name for t in after.graph.initializer) + Counter(
        v.name for v in after.graph.input
    )
    assert max(names.values()) == 1, "every tensor has one origin"
    assert max(Counter(node.name for node in after.graph.node).values()) == 1
    if config is not WIDE:  # 16 bits need a later opset, or another domain
        onnx.checker.check_model(after, full_check=True)
    run(after, samples(model)[0])


@pytest.mark.parametrize(
    "config",
    [TENSOR, CHANNEL, SIGNED, POW2],
    ids=["tensor", "channel", "signed", "pow2"],
)
def test_constants_are_stored_to_within_half_a_step(config: QConfig) -> None:
    stages = Stages.of(residual(), config)
    for tensor in ("w1", "b1", "w2", "b2", "w3", "b3"):
        original = stages.graph.constant(tensor)
        (stored,) = evaluate(
            stages.model,
            f"{tensor}_DequantizeLinear_Output",
            {"x": np.zeros((1, 4, 8, 8), np.float32)},
        )
        step = np.atleast_1d(stages.params.table[Use(tensor)].scale).reshape(
            -1, *[1] * (stored.ndim - 1)
        )
        assert (
            original is not None and (np.abs(stored - original) <= 0.501 * step).all()
        )


# Shared tensors and several readers


def test_a_shared_weight_is_stored_once() -> None:
    lines = text(Stages.of(shared_weight()).model)
    assert sum("w_quantized" in line for line in lines) == 1
    assert (
        sum("w_DequantizeLinear_Output" in line and "MatMul" in line for line in lines)
        == 2
    )


def test_a_shared_bias_is_stored_for_each_layer() -> None:
    lines = text(Stages.of(shared_bias()).model)
    assert (
        "b_first_DequantizeLinear_Output = DequantizeLinear (b_first_quantized,"
        " b_first_scale, b_first_zero_point)" in lines
    )
    assert (
        "b_second_DequantizeLinear_Output = DequantizeLinear (b_second_quantized,"
        " b_second_scale, b_second_zero_point)" in lines
    )


def test_an_activation_that_many_read_is_quantized_once() -> None:
    lines = text(Stages.of(residual()).model)
    assert sum(line.startswith("x_QuantizeLinear_Output") for line in lines) == 1


MIXED = (
    "g (float[N,4] x) => (float[N,4] y) { [first] h = Add (x, x) [second] y = Mul (h,"
    " h) }"
)


def test_a_reader_of_another_format_gets_a_second_pair() -> None:
    own = QuantizationSpec("uint16", symmetric=False)
    config = TENSOR.with_(overrides=(Override("second", activation=own),))
    model = Stages.of(parse(MIXED, opset=21, ir_version=10), config).model
    lines = text(model)
    assert lines[-5:] == [
        (
            "h_second_QuantizeLinear_Output = QuantizeLinear"
            " (h_DequantizeLinear_Output, h_second_scale, h_second_zero_point)"
        ),
        (
            "h_second_DequantizeLinear_Output = DequantizeLinear"
            " (h_second_QuantizeLinear_Output, h_second_scale, h_second_zero_point)"
        ),
        (
            "y_QuantizeLinear_Input = Mul (h_second_DequantizeLinear_Output,"
            " h_second_DequantizeLinear_Output)"
        ),
        (
            "y_QuantizeLinear_Output = QuantizeLinear (y_QuantizeLinear_Input, y_scale,"
            " y_zero_point)"
        ),
        "y = DequantizeLinear (y_QuantizeLinear_Output, y_scale, y_zero_point)",
    ]
    types = {t.name: t.data_type for t in model.graph.initializer}
    assert (
        types["h_zero_point"] == TensorProto.UINT8
        and types["h_second_zero_point"] == TensorProto.UINT16
    )


# Names


def test_names_that_are_taken_are_avoided() -> None:
    model = name_collisions()
    after = Stages.of(model).model
    feeds = samples(model)[0]
    np.testing.assert_allclose(run(after, feeds)[0], run(model, feeds)[0], atol=0.1)
    assert (
        "x_QuantizeLinear_Output_1 = QuantizeLinear (x, x_scale_1, x_zero_point)"
        in text(after)
    )


def test_an_output_that_others_read_keeps_its_name() -> None:
    lines = text(Stages.of(inner_output()).model)
    assert (
        "h_QuantizeLinear_Input = Conv (x_DequantizeLinear_Output,"
        " w_DequantizeLinear_Output)" in lines
    )
    assert (
        "h = DequantizeLinear (h_QuantizeLinear_Output, h_scale, h_zero_point)" in lines
    )
    assert "y_QuantizeLinear_Input = Relu (h)" in lines or "y = Relu (h)" in lines


def test_an_input_that_is_an_output_too_keeps_its_value() -> None:
    model = parse("g (float[2] x) => (float[2] x, float[2] y) { y = Add (x, x) }")
    after = Stages.of(model).model
    x = np.float32([0.1234, 3])
    np.testing.assert_array_equal(run(after, {"x": x})[0], x)


# Relu and Clip


def clipped(call: str, config: QConfig, **constants: object) -> list[str]:
    model = parse(
        f"g (float[N,3,4,4] x) => (float[N,2,4,4] y) {{ h = Conv (x, w) y = {call} }}",
        w=3 * weight(2, 3, 1, 1),
        **constants,
    )
    after = Stages.of(model, config).model
    feeds = samples(model)[0]
    expected, found = run(model, feeds)[0], run(after, feeds)[0]
    assert np.abs(expected - found).max() < 0.15
    return [kind for kind in kinds(after) if kind in ("Relu", "Clip")]


def test_relu_is_dropped_where_saturation_does_the_same() -> None:
    assert clipped("Relu (h)", TENSOR) == []
    assert clipped("Relu (h)", SIGNED) == ["Relu"], (
        "a symmetric grid reaches below zero"
    )


@pytest.mark.parametrize("call", ["Relu (h)", "Clip (h, low, high)"])
def test_a_layer_before_clipping_that_stays_runs_on_integers(call: str) -> None:
    ends = {"low": np.float32(0), "high": np.float32(0.7)}
    model = parse(
        f"""g (float[N,3,4,4] x) => (float[N,2,4,4] y)
        {{ h = Conv (x, w) r = {call} y = Conv (r, v) }}""",
        w=3 * weight(2, 3, 1, 1),
        v=weight(2, 2, 1, 1),
        **(ends if "Clip" in call else {}),
    )
    stages = Stages.of(model, SIGNED)
    after = stages.model
    [layer] = [n for n in after.graph.node if n.output[0] == "h"]
    assert layer.op_type == "Conv"
    readers = [n.op_type for n in after.graph.node if "h" in n.input]
    assert readers == ["QuantizeLinear"]

    # the codes of the result are those that rounding after the operator alone gives
    del after.graph.output[:]
    after.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in ("h", "r_DequantizeLinear_Output")
    )
    feeds = {"x": normal(64, 3, 4, 4, scale=4.0)}
    h, found = run(after, feeds)
    clipped_h = np.clip(h, 0, ends["high"] if "Clip" in call else None)
    expected = fake_quantize(
        clipped_h, stages.params.table[Use("r")], SIGNED.activation.grid
    )
    np.testing.assert_array_equal(found, expected)


def joined(config: QConfig) -> Stages:
    model = parse(
        """g (float[N,3,4,4] x) => (float[N,5,4,4] y)
        { a = Conv (x, w) b = Conv (x, v) h = Concat <axis = 1> (a, b) y = Relu (h) }""",
        w=3 * weight(2, 3, 1, 1),
        v=weight(3, 3, 1, 1),
    )
    return Stages.of(model, config)


def test_the_result_of_a_join_before_relu_has_the_codes_of_relu() -> None:
    """No code is spent on values that Relu makes zero: twice as many are left to the others."""
    stages = joined(TENSOR)
    assert "Relu" not in kinds(stages.model)
    params = stages.params.table
    assert int(params[Use("y")].zero_point) == 0
    highest = max(
        (255 - int(part.zero_point)) * float(part.scale)
        for part in (params[Use("a")], params[Use("b")])
    )
    assert 255 * float(params[Use("y")].scale) == pytest.approx(highest, rel=0.05)


def test_a_join_before_a_relu_that_stays_runs_on_integers() -> None:
    after = joined(SIGNED).model
    assert [n.op_type for n in after.graph.node if "h" in n.input] == ["QuantizeLinear"]
    found = kinds(fuse(Graph.of(after), [{"x": normal(4, 3, 4, 4)}])[0].to_model())
    assert "QLinearConcat" in found and "Relu" not in found


def test_an_integer_engine_joins_before_it_clips() -> None:
    """It copies the codes of a Concat, which must have the scale of its result."""
    stages = joined(POW2)
    params = stages.params.table
    assert Use("h") in params and "Relu" in kinds(stages.model)


@pytest.mark.parametrize("config", [POW2, WIDE])
def test_no_pair_before_clipping_where_integers_do_not_need_one(
    config: QConfig,
) -> None:
    model = parse(
        "g (float[N,3,4,4] x) => (float[N,2,4,4] y) { h = Conv (x, w) y = Relu (h) }",
        w=3 * weight(2, 3, 1, 1),
    )
    after = Stages.of(model, config).model
    readers = [n.op_type for n in after.graph.node if "h" in n.input]
    assert readers in (["Relu"], [])


def test_clip_is_dropped_where_it_coincides_with_the_ends_of_the_grid() -> None:
    low, six, huge = np.float32(0), np.float32(6), np.float32(1e6)
    assert clipped("Clip (h, low, high)", TENSOR, low=low, high=huge) == []
    assert (
        clipped("Clip (h, low, high)", TENSOR, low=low, high=six) == []
    )  # the data reaches 6
    assert clipped("Clip (h, low)", TENSOR, low=low) == []
    assert clipped("Clip (h, low, high)", TENSOR, low=np.float32(0.5), high=huge) == [
        "Clip"
    ]
    assert clipped("Clip (h, low, high)", SIGNED, low=low, high=six) == ["Clip"]


def test_relu_behind_something_that_is_needed_stays() -> None:
    assert "Relu" in kinds(Stages.of(inner_output()).model)


# Opsets


@pytest.mark.parametrize(
    ("opset", "config", "domains"),
    [
        (17, TENSOR, {""}),
        (10, TENSOR, {""}),
        (12, CHANNEL, {"", "com.microsoft"}),  # an axis came with opset 13
        (
            17,
            WIDE,
            {"", "com.microsoft"},
        ),  # 16 bits came with opset 21, the weight has 8
        (21, WIDE, {""}),
    ],
)
def test_the_domain_is_the_standard_one_if_the_opset_allows(
    opset: int, config: QConfig, domains: set[str]
) -> None:
    model = parse(
        "g (float[N,3,4,4] x) => (float[N,2,4,4] y) { y = Conv (x, w) }",
        opset=opset,
        ir_version=10,
        w=weight(2, 3, 1, 1),
    )
    after = Stages.of(model, config).model
    assert {node.domain for node in after.graph.node if "uantize" in node.op_type} | {
        ""
    } == domains
    assert {o.domain for o in after.opset_import} == domains
    feeds = samples(model)[0]
    np.testing.assert_allclose(run(after, feeds)[0], run(model, feeds)[0], atol=0.05)


def test_the_axis_is_written_per_channel_only() -> None:
    for config, expected in ((TENSOR, [None]), (CHANNEL, [0])):
        model = Stages.of(conv_relu(), config).model
        axes = [
            next((a.i for a in node.attribute if a.name == "axis"), None)
            for node in model.graph.node
            if node.output[0] == "w_DequantizeLinear_Output"
        ]
        assert axes == expected


# Live scales


def test_a_graph_whose_scales_are_inputs_computes_the_same() -> None:
    model = residual()
    stages = Stages.of(model, POW2)
    uses = [
        use for use, entry in stages.plan.entries.items() if isinstance(entry, Quantize)
    ]
    live, names = insert_live(stages.graph, stages.plan, stages.params, uses)
    feeds = samples(model)[0]
    scales = {
        names[use]: np.asarray(stages.params.table[use].scale)
        for use in uses
        if names[use]
    }
    assert len(scales) == len(uses)
    expected = run(Stages.of(model, POW2.with_(bias=False)).model, feeds)[0]
    np.testing.assert_allclose(
        run(live.to_model(), {**feeds, **scales})[0], expected, atol=1e-5
    )


@pytest.mark.parametrize("factor", [0.5, 1, 4])
def test_live_scales_of_small_formats_reach_all_codes(factor: float) -> None:
    """The Min that keeps such pairs from being fused has the range of the first scale."""
    model = parse(
        "g (float[2,4] x) => (float[2,4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )
    stages = Stages.of(model, QConfig(activation=QuantizationSpec("int4"), weight=None))
    use = Use("x")
    live, names = insert_live(stages.graph, stages.plan, stages.params, [use])
    start = stages.params.table[use]
    stages.params.table[use] = start.with_scale(factor * start.scale)
    feeds = {"x": 10 * normal(2, 4)}
    expected = insert(stages.graph, stages.plan, stages.params)
    results = [
        open_session(graph.to_model(), optimize=False).run(None, inputs)[0]
        for graph, inputs in (
            (expected, feeds),
            (live, {**feeds, names[use]: stages.params.table[use].scale}),
        )
    ]
    np.testing.assert_array_equal(*results)


def test_codes_are_those_of_the_onnx_operators() -> None:
    """QuantizeLinear as the reference evaluator computes it, and the calibrators' own arithmetic."""  # noqa: E501
    model = parse("g (float[64] x) => (float[64] y) { y = Add (x, x) }")
    stages = Stages.of(model)
    x = 3 * normal(64)
    (found,) = evaluate(stages.model, "x_DequantizeLinear_Output", {"x": x})
    entry = stages.plan.entries[Use("x")]
    assert isinstance(entry, Quantize)
    np.testing.assert_array_equal(
        found, fake_quantize(x, stages.params.table[Use("x")], entry.spec.grid)
    )


def evaluate(model: ModelProto, tensor: str, feeds: Feeds) -> list[Array]:
    """What onnx's reference evaluator computes for one tensor.

    It knows the Q/DQ operators from opset 19 on.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.opset_import[0].version = 19
    copy.graph.output.add(name=tensor)
    return list(ReferenceEvaluator(copy).run([tensor], feeds))


def test_insertions_share_the_codes_of_constants() -> None:
    """Codes are computed again for another scale or another value alone."""
    stages = Stages.of(conv_relu())
    graph, plan, params = stages.graph, stages.plan, stages.params
    first = insert(graph, plan, params).initializers["w_quantized"]
    again, _ = insert_live(graph.copy(), plan, params, [])
    assert again.initializers["w_quantized"] is first

    other = graph.copy()
    values = graph.constant("w")
    assert values is not None
    other.set_constant("w", values[::-1])
    flipped = insert(other, plan, params).initializers["w_quantized"]
    codes = onnx.numpy_helper.to_array(first)
    assert (onnx.numpy_helper.to_array(flipped) == codes[::-1]).all()

    use = Use("w")
    params.table[use] = params.table[use].with_scale(2 * params.table[use].scale)
    coarse = insert(graph, plan, params).initializers["w_quantized"]
    assert abs(onnx.numpy_helper.to_array(coarse)).max() < abs(codes).max()
