"""AutoMixedPrecision: the fewest nodes that reach a target, and a report that says when it is out
of reach.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import Override, QConfig, QuantizationSpec, compare, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.graph import Graph
from quark_onnx.measuring.held_out import is_held_out
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.patterns.runtime import raised_runtime
from quark_onnx.trials.mixed_precision import Runtimes, Sensitivity, describe
from tests.models import Feeds, kinds, parse, run, samples, weight
from tests.quark_onnx.optimizers.networks import attentive, texts


def broken(batch: str = "N") -> tuple[ModelProto, list[Feeds]]:
    """Between two ordinary layers, a tensor with one channel a thousand times larger than the
    others.

    The Mul before it is folded into its layer, so that six nodes are left.
    """
    spread = np.ones(8, np.float32)
    spread[3] = 1000
    model = parse(
        f"g (float[{batch},8] x) => (float[{batch},8] y) {{"
        """
            [a] a = Gemm (x, w1)
            [spread] s = Mul (a, big)
            [relu] r = Relu (s)
            [back] b = Mul (r, small)
            [b] c = Gemm (b, w2)
            [c] d = Relu (c)
            [d] y = Gemm (d, w3)
        }""",
        w1=weight(8, 8, seed=1),
        w2=weight(8, 8, seed=2),
        w3=weight(8, 8, seed=3),
        big=spread,
        small=1 / spread,
    )
    random = np.random.default_rng(0)
    return model, [
        {"x": random.normal(size=(16, 8)).astype(np.float32)} for _ in range(12)
    ]


def residual_of_weights() -> tuple[ModelProto, list[Feeds]]:
    """Three layers, the second with an outlier in each channel, which matters little."""
    wide = weight(8, 8, seed=2)
    wide[0] = 20
    model = parse(
        "g (float[N,8] x) => (float[N,8] y) { [a] p = Gemm (x, w1) [r] r = Relu (p) [b]"
        " q = Gemm (r, w2) [c] y = Gemm (q, w3) }",
        w1=weight(8, 8, seed=1) * np.array([0.001, 1, 1, 1, 1, 1, 1, 1], np.float32),
        w2=wide,
        w3=weight(8, 8, seed=3),
    )
    random = np.random.default_rng(0)
    return model, [
        {"x": random.normal(size=(16, 8)).astype(np.float32)} for _ in range(12)
    ]


def sqnr(model: ModelProto, quantized: ModelProto, data: list[Feeds]) -> float:
    pairs = [(run(model, sample)[0], run(quantized, sample)[0]) for sample in data]
    signal = sum(float(np.square(a, dtype=np.float64).sum()) for a, _ in pairs)
    noise = sum(float(np.square((a - b).astype(np.float64)).sum()) for a, b in pairs)
    return 10 * float(np.log10(signal / noise))


def mixed(**settings: Any) -> QConfig:
    return QConfig.of("A8W8").with_(
        optimizers=AutoMixedPrecision(**settings), safe=False
    )


def raised(result: Any) -> list[str]:
    lines = [note for note in result.report.notes if note.startswith("raised to ")]
    return [line.partition(": ")[2].partition(" (")[0] for line in lines]


def headline(result: Any) -> str:
    return str(
        next(
            note
            for note in result.report.notes
            if note.startswith("auto_mixed_precision: ")
        )
    )


@pytest.mark.parametrize("to", ["16bit", "float"])
def test_the_target_is_met_by_a_few_nodes(to: str) -> None:
    model, data = broken()
    plain = quantize(model, data, QConfig.of("A8W8").with_(safe=False))
    result = quantize(model, data, mixed(target=30.0, to=to))
    assert sqnr(model, plain.model, data) < 15 < 29 < sqnr(model, result.model, data)
    assert 0 < len(raised(result)) < 5 and not {"a", "d"} & set(raised(result))
    word = "16 bits" if to == "16bit" else "float"
    assert f"{len(raised(result))} of 6 nodes {word}" in headline(
        result
    ) and "missed" not in headline(result)


def test_weights_get_eight_bits_where_four_are_too_few() -> None:
    """The layer whose weights have an outlier in every channel, and its weights alone."""
    model, data = residual_of_weights()
    config = QConfig.of("A8W8").with_(weight=QuantizationSpec("int4", per_channel=True))
    plain = quantize(model, data, config)
    result = quantize(
        model,
        data,
        config.with_(optimizers=AutoMixedPrecision(target=14.0, to="8bit_weights")),
    )
    assert sqnr(model, plain.model, data) < 1 < 14 < sqnr(model, result.model, data)
    assert raised(result) == ["b"] and "1 of 4 nodes 8-bit weights" in headline(result)
    stored = [
        each.data_type for each in result.model.graph.initializer if len(each.dims) == 2
    ]
    assert sorted(stored) == sorted(
        [TensorProto.INT4, TensorProto.INT8, TensorProto.INT4]
    )


@pytest.mark.parametrize("preset", ["A8W8", "FP8E4M3", "DYNAMIC"])
def test_weights_that_have_eight_bits_cannot_be_raised(preset: str) -> None:
    config = QConfig.of(preset).with_(optimizers=AutoMixedPrecision(to="8bit_weights"))
    with pytest.raises(ConfigError, match="no weights are integers of fewer bits"):
        quantize(attentive(), texts(4), config)


def test_a_model_that_is_good_already_is_left_as_it_is() -> None:
    model, data = attentive(), texts()
    plain = quantize(model, data, "A8W8")
    result = quantize(
        model, data, QConfig.of("A8W8").with_(optimizers=AutoMixedPrecision(target=5.0))
    )
    assert result.model.graph == plain.model.graph and not raised(result)
    assert "0 of" in headline(result)


def test_no_more_than_the_share_is_raised_and_a_miss_is_said() -> None:
    model, data = broken()
    result = quantize(model, data, mixed(target=30.0, share=0.15))
    assert len(raised(result)) == 1 and headline(result).endswith("missed)")
    result = quantize(model, data, mixed(target=200.0))
    assert headline(result).endswith("(target 200 dB, missed)")
    run(result.model, data[0])


def test_a_metric_of_the_user() -> None:
    model, data = broken()
    labels = [run(model, sample)[0].argmax(axis=1) for sample in data]
    calls = list[float]()

    def accuracy(candidate: ModelProto) -> float:
        session = open_session(candidate)
        hits = [
            session.run(None, s)[0].argmax(axis=1) == label
            for s, label in zip(data, labels, strict=True)
        ]
        calls.append(float(np.mean(hits)))
        return calls[-1]

    result = quantize(model, data, mixed(target=0.05, metric=accuracy))
    assert (
        accuracy(result.model) >= 0.9
        and "dB" not in headline(result)
        and "missed" not in headline(result)
    )
    assert len(calls) > 8 and raised(result)


@pytest.mark.parametrize("answer", [None, "good", float("nan"), [1, 2]])
def test_a_metric_that_gives_no_number(answer: Any) -> None:
    model, data = broken()
    with pytest.raises(ConfigError, match="metric of auto_mixed_precision returned"):
        quantize(model, data, mixed(target=0.05, metric=lambda candidate: answer))


def test_a_distance_between_outputs() -> None:
    """The greatest that is allowed is the target."""
    model, data = broken()
    seen = list[int]()

    def distance(expected: Any, found: Any) -> float:
        seen.append(len(expected))
        pairs = zip(expected, found, strict=True)
        return float(np.mean([np.abs(one - other).mean() for [one], [other] in pairs]))

    def measured(candidate: ModelProto) -> float:
        return distance(
            [run(model, s) for s in data], [run(candidate, s) for s in data]
        )

    plain = measured(quantize(model, data, QConfig.of("A8W8").with_(safe=False)).model)
    result = quantize(model, data, mixed(target=plain / 4, distance=distance))
    assert measured(result.model) <= plain / 4 * 1.2
    # of 11 samples 8 rank the nodes, and decide with two others
    assert seen[1:3] == [10, 8] and 0 < len(raised(result)) < 5
    assert "dB" not in headline(result) and "missed" not in headline(result)
    # Distances are not negative.
    before, _, after, *_ = headline(result).partition(" bits, ")[2].split()
    assert 0 < float(after) < float(before)
    assert "alone -" not in " ".join(result.report.notes)


def test_the_report_says_that_no_choice_is_better() -> None:
    model, data = broken()
    config = mixed(target=0.1, distance=lambda expected, actual: 0.5)
    result = quantize(model, data, config)
    assert raised(result) == []
    reason = "nothing is raised, as no choice that was tried is better"
    assert f"auto_mixed_precision: {reason}" in result.report.notes


def test_the_report_says_that_every_lowered_node_misses_the_target() -> None:
    found = Sensitivity(before=40.0, bound=39.0, noise={"a": 30.0})
    settings = AutoMixedPrecision(target=39.0, to="8bit")
    reason = "nothing is lowered, as every choice that was tried misses the target"
    assert f"auto_mixed_precision: {reason}" in describe(found, settings, 1)


def test_only_some_nodes_may_be_changed() -> None:
    model, data = broken()
    settings = {"target": 90.0, "to": "float"}
    some = raised(quantize(model, data, mixed(**settings, op_types=["Mul"])))
    assert some and set(some) <= {"spread", "back"}
    rest = raised(quantize(model, data, mixed(**settings, exclude=["[ac]"])))
    assert rest and not {"a", "c"} & set(rest)
    model, data = residual_of_weights()
    few_bits = QuantizationSpec("int4", per_channel=True)
    config = mixed(target=90.0, to="8bit_weights", nodes="b").with_(weight=few_bits)
    assert raised(quantize(model, data, config)) == ["b"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": "b0"}, "no node of the model is one of b0"),
        ({"op_types": "Conv"}, "no node of the model is one of Conv"),
        ({"exclude": 3}, "exclude of auto_mixed_precision is 3"),
        ({"distance": 3}, "distance of auto_mixed_precision is 3"),
        ({"distance": min, "metric": min}, "has a metric and a distance"),
        ({"distance": lambda a, b: "far"}, "distance of auto_mixed_precision returned"),
    ],
)
def test_wrong_distances_and_candidates(settings: Any, message: str) -> None:
    model, data = broken()
    with pytest.raises(ConfigError, match=message):
        quantize(model, data, mixed(target=0.05, **settings))


@pytest.mark.parametrize(
    "preset", ["A8W4", "INT4", "XINT8", "FP8E4M3", "FP4E2M1", "DYNAMIC", "A16W8"]
)
def test_with_any_format(preset: str) -> None:
    """Those that need another opset, or come as functions, can be measured, too.

    What has 16 bits can only be float.
    """
    config = QConfig.of(preset)
    result = quantize(
        attentive(),
        texts(4),
        config.with_(optimizers=AutoMixedPrecision(target=60.0, samples=2)),
    )
    assert headline(result)
    run(result.model, texts(1)[0])
    if preset in ("A16W8", "DYNAMIC", "INT4"):
        assert "16 bits" not in headline(result)


def lowered(result: Any) -> list[str]:
    lines = [note for note in result.report.notes if note.startswith("lowered to ")]
    return [line.partition(": ")[2].partition(" (")[0] for line in lines]


def code_types(model: ModelProto) -> list[str]:
    """Types of the codes of activations."""
    constants = {each.name: each.data_type for each in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    return sorted(
        {TensorProto.DataType.Name(constants[node.input[2]]).lower() for node in nodes}
    )


def test_nodes_of_16_bits_are_lowered_where_8_do_no_harm() -> None:
    """All but those around the tensor with the outlier.

    Every other node would miss the target, too.
    """
    model, data = broken()
    wide = QConfig.of("A16W8").with_(safe=False)
    plain = quantize(model, data, wide)
    result = quantize(
        model, data, wide.with_(optimizers=AutoMixedPrecision(target=30.0, to="8bit"))
    )
    assert 29 < sqnr(model, result.model, data) <= sqnr(model, plain.model, data)
    assert code_types(plain.model) == ["uint16"] and code_types(result.model) == [
        "uint16",
        "uint8",
    ]
    assert {"a", "d"} <= set(lowered(result)) and not {"relu", "back"} & set(
        lowered(result)
    )
    assert f"{len(lowered(result))} of 6 nodes 8 bits" in headline(
        result
    ) and "missed" not in headline(result)
    for name in {"relu", "back"} - set(lowered(result)):
        narrow = Override(
            (*lowered(result), name), activation=QConfig.of("A8W8").activation
        )
        worse = quantize(model, data, wide.with_(overrides=(narrow,)))
        assert sqnr(model, worse.model, data) < 30


def test_lowering_and_raising_meet() -> None:
    """Both ways end with a mixture that has the target, with as many nodes of 16 bits within one."""  # noqa: E501
    model, data = broken()
    up = quantize(model, data, mixed(target=30.0))
    wide = QConfig.of("A16W8").with_(safe=False)
    down = quantize(
        model, data, wide.with_(optimizers=AutoMixedPrecision(target=30.0, to="8bit"))
    )
    assert abs(len(raised(up)) - (6 - len(lowered(down)))) <= 1


def test_all_is_lowered_where_the_target_is_low_and_nothing_where_it_is_missed() -> (
    None
):
    model, data = broken()
    wide = QConfig.of("A16W8").with_(safe=False)
    low = quantize(
        model, data, wide.with_(optimizers=AutoMixedPrecision(target=-100.0, to="8bit"))
    )
    assert len(lowered(low)) == 6 and code_types(low.model) == ["uint8"]
    missed = quantize(
        model, data, wide.with_(optimizers=AutoMixedPrecision(target=200.0, to="8bit"))
    )
    assert not lowered(missed) and headline(missed).endswith("(target 200 dB, missed)")
    some = quantize(
        model,
        data,
        wide.with_(optimizers=AutoMixedPrecision(target=-100.0, to="8bit", share=0.5)),
    )
    assert len(lowered(some)) == 3


def rms(model: ModelProto, quantized: ModelProto, data: list[Feeds]) -> float:
    errors = [
        run(model, sample)[0].astype(np.float64) - run(quantized, sample)[0]
        for sample in data
    ]
    return float(np.sqrt(np.mean(np.square(errors))))


def test_lowered_nodes_have_the_formats_that_are_given() -> None:
    """Weights, too; and a metric says how far to go."""
    model, data = broken()
    wide = QConfig.of("A16W8").with_(
        safe=False, weight=QuantizationSpec("int16", per_channel=True)
    )
    given = {
        "activation": QuantizationSpec("int8"),
        "weight": QuantizationSpec("int8", per_channel=True),
    }

    def lower(loss: float) -> Any:
        narrow = AutoMixedPrecision(
            loss, "8bit", metric=lambda each: -rms(model, each, data), **given
        )
        return quantize(model, data, wide.with_(optimizers=narrow))

    whole = lower(1e9)
    assert code_types(whole.model) == ["int8"] and len(lowered(whole)) == 6
    stored = [
        each.data_type for each in whole.model.graph.initializer if len(each.dims) == 2
    ]
    assert stored == [TensorProto.INT8] * 3
    loss = rms(model, whole.model, data) / 4
    part = lower(loss)
    assert 0 < len(lowered(part)) < 6 and code_types(part.model) == ["int8", "uint16"]
    assert rms(model, part.model, data) <= loss * 1.01
    assert "int8" in headline(part) and "dB" not in headline(part)


@pytest.mark.parametrize("preset", ["A8W8", "BF16", "W8"])
def test_nothing_of_16_bits_cannot_be_lowered(preset: str) -> None:
    config = QConfig.of(preset).with_(optimizers=AutoMixedPrecision(to="8bit"))
    with pytest.raises(
        ConfigError,
        match=r"neither activations nor weights are integers of 16 bits.*A16W8",
    ):
        quantize(attentive(), texts(4), config)


def test_the_names_of_nodes_are_names_not_patterns() -> None:
    model, data = broken()
    for place, node in enumerate(model.graph.node):
        node.name = f"layers.{place}[*]/re:^{node.name}?"
    result = quantize(model, data, mixed(target=30.0))
    assert raised(result) and "missed" not in headline(result)


def test_weights_are_quantized_from_the_float_ones() -> None:
    """Not from those of eight bits: a node left float has its own weights."""
    model, data = broken()
    result = quantize(model, data, mixed(target=1000.0, to="float"))
    assert "QuantizeLinear" not in kinds(result.model)
    np.testing.assert_array_equal(run(result.model, data[0])[0], run(model, data[0])[0])


def test_what_cannot_be_done_is_an_error() -> None:
    model, data = broken()
    with pytest.raises(ConfigError, match="needs calibration data"):
        quantize(model, None, QConfig.of("INT4").with_(optimizers=AutoMixedPrecision()))
    with pytest.raises(ConfigError, match="given twice"):
        quantize(
            model,
            data,
            QConfig.of("A8W8").with_(
                optimizers=(AutoMixedPrecision(), AutoMixedPrecision())
            ),
        )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("target", "high"),
        ("target", float("nan")),
        ("target", True),
        ("to", "8bits"),
        ("activation", "int8"),
        ("weight", 8),
        ("to", ["16bit"]),
        ("samples", 0),
        ("samples", 2.5),
        ("share", 0),
        ("share", 1.5),
        ("share", float("nan")),
        ("metric", 3),
    ],
)
def test_bad_settings(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} of auto_mixed_precision is"):
        AutoMixedPrecision(**{setting: value})


@pytest.mark.parametrize("to", ["16bit", "float"])
def test_figures_of_samples_that_nothing_was_decided_by_are_reported(to: str) -> None:
    model, _ = broken()
    random = np.random.default_rng(1)
    data = [{"x": random.normal(size=(16, 8)).astype(np.float32)} for _ in range(80)]
    plain = quantize(model, data, QConfig.of("A8W8").with_(safe=False))
    result = quantize(model, data, mixed(target=25, to=to))
    first, second = [
        note
        for note in result.report.notes
        if note.startswith("auto_mixed_precision: ")
    ][:2]
    found = re.search(r", ([\d.]+) -> ([\d.]+) dB on (\d+) samples that nothing", first)
    assert found is not None
    # 8 rank; of up to 48 others a third checks, with those that are held out from calibration and
    # decide nothing: biases, scales and rewrites are decided by four of these
    assert "on the 32 that decided between" in second
    held_out = [sample for i, sample in enumerate(data) if is_held_out(i)]
    calibrated = [sample for i, sample in enumerate(data) if not is_held_out(i)]
    deciding = held_out[:: len(held_out) // 4][:4]
    checking = calibrated[8:56][2::3]
    checking += [
        sample for sample in held_out if not any(sample is other for other in deciding)
    ]
    before, after, checked = map(float, found.groups())
    assert checked == len(checking) >= 16
    for figure, made in ((before, plain), (after, result)):
        np.testing.assert_allclose(figure, sqnr(model, made.model, checking), atol=0.05)


def test_a_target_that_other_samples_miss_is_called_missed() -> None:
    """Of the samples that decide, all reach the target; the verdict on it is of the others."""
    found = Sensitivity(changed=["a"], noise={"a": 3.0}, into="float", bound=30.0)
    found.before, found.after, found.decided, found.models = 25.05, 30.11, 14, 43
    found.held_out, found.checked = (20.5, 21.8), 10
    first, second = describe(found, AutoMixedPrecision(target=30), 60)[:2]
    assert "1 of 60 nodes float, 20.50 -> 21.80 dB on 10 samples" in first
    assert first.endswith("(target 30 dB, missed)")
    assert "25.05 -> 30.11 dB on the 14 that decided between 43 models" in second
    found.held_out = None
    (line, _) = describe(found, AutoMixedPrecision(target=30), 60)
    assert "25.05 -> 30.11 dB (target 30 dB) on the 14 samples that decided" in line


def test_a_model_that_became_slower_than_the_float_one_is_named() -> None:
    found = Sensitivity(changed=["a"], noise={"a": 3.0}, into="16 bits")
    found.runtimes = Runtimes(floating=0.01, plain=0.005, mixed=0.0234)
    lines = describe(found, AutoMixedPrecision(), 9)
    assert any("takes 23 ms with the raised nodes and 5 ms without" in e for e in lines)
    (line,) = [each for each in lines if "long as" in each]
    assert "with 16 bits takes about 2.3 times as long as the float model" in line
    found.runtimes = Runtimes(floating=0.01, plain=0.005, mixed=0.008)
    lines = describe(found, AutoMixedPrecision(), 9)
    assert not any("long as" in each for each in lines)


def test_the_report_names_the_estimated_price_of_each_raised_node() -> None:
    prices = {"a": 1_234_000.0, "b": 900.0, "c": 1.2345e9}
    found = Sensitivity(noise=dict.fromkeys(prices, 3.0), into="16 bits")
    found.prices, found.changed = prices, list(prices)
    lines = describe(found, AutoMixedPrecision(), 9)
    assert lines[1:] == [
        "raised to 16 bits: a (alone 3.00 dB; 1.2 ms more, estimated)",
        "raised to 16 bits: b (alone 3.00 dB; 0.001 ms more, estimated)",
        "raised to 16 bits: c (alone 3.00 dB; 1,234 ms more, estimated)",
    ]


def test_a_layer_with_more_multiply_adds_costs_more_to_raise() -> None:
    """Two branches with the same values; many more multiply-adds follow one of them."""
    spread = np.ones(8, np.float32)
    spread[3] = 1000
    wide = np.zeros((8, 256), np.float32)
    wide[:, :8] = weight(8, 8, seed=2)
    model = parse(
        """g (float[16,8] x) => (float[16,8] y, float[16,256] z) {
            [s] s = Mul (x, big)
            [r] r = Relu (s)
            [b] b = Mul (r, small)
            [cheap] y = Gemm (b, narrow)
            [dear] z = Gemm (b, wide)
        }""",
        big=spread,
        small=1 / spread,
        narrow=weight(8, 8, seed=2),
        wide=wide,
    )
    graph = Graph.of(model)
    nodes = {node.name: node for node in graph.nodes}
    assert raised_runtime(graph, nodes["cheap"]) < raised_runtime(graph, nodes["dear"])
    assert raised_runtime(graph, nodes["s"]) < raised_runtime(graph, nodes["dear"])


CHAIN = """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
    [conv] c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
    [relu] r = Relu (c)
    [apart] y = Relu (r)
}"""


def test_raising_an_absorbed_activation_raises_its_layer() -> None:
    """onnxruntime runs Conv and Relu as one operator, on floats where Relu has 16 bits."""
    kernel = np.ones((4, 3, 3, 3), np.float32)
    graph = Graph.of(parse(CHAIN, w=kernel))
    conv, relu, apart = graph.nodes
    multiply_adds, values = 4 * 8 * 8 * 27, 4 * 8 * 8
    arithmetic = raised_runtime(graph, conv) - 3 * 8 * 8  # 1 ns for each value of x
    assert arithmetic == pytest.approx(0.02 * multiply_adds)
    assert raised_runtime(graph, relu) == pytest.approx(arithmetic + values)
    assert raised_runtime(graph, apart) == 2 * values


def test_prices_count_the_sizes_of_a_sample_for_dynamic_dimensions() -> None:
    prices = []
    for batch in ("N", "16"):
        model, data = broken(batch)
        notes = quantize(model, data, mixed(target=60)).report.notes
        prices.append([each for each in notes if each.startswith("raised to 16 bits")])
    assert prices[0] == prices[1]
    assert prices[0] and all("ms more, estimated" in each for each in prices[0])


def test_a_grouped_convolution_costs_more_for_each_multiply_add() -> None:
    """onnxruntime has no fast float kernel for depthwise convolutions."""
    shapes = {"dense": (8, 8, 1, 1), "depthwise": (8, 1, 3, 3)}
    prices = {}
    for name, shape in shapes.items():
        text = f"""g (float[1,8,16,16] x) => (float[1,8,14,14] y) {{
            [layer] y = Conv <group = {8 // shape[1]}> (x, w)
        }}"""
        graph = Graph.of(parse(text, w=np.ones(shape, np.float32)))
        values = (16 * 16 + 14 * 14) * 8
        arithmetic = raised_runtime(graph, graph.nodes[0]) - values
        prices[name] = arithmetic / (14 * 14 * 8 * np.prod(shape[1:]))
    assert prices["depthwise"] == pytest.approx(15 * prices["dense"])


def test_raising_a_lookup_dequantizes_the_whole_table() -> None:
    text = "g (int64[3] i) => (float[3,4] y) { [lookup] y = Gather (table, i) }"
    graph = Graph.of(parse(text, table=np.ones((1000, 4), np.float32)))
    results = 3 * 4
    assert raised_runtime(graph, graph.nodes[0]) == 1000 + results


def averaged() -> ModelProto:
    """Return a convolutional network whose output is the mean of many values."""
    return parse(
        """g (float[N,3,12,12] x) => (float[N,5] y) {
            [a] a = Conv <pads = [1,1,1,1]> (x, w1, b1)
            [r] r = Relu (a)
            [c] c = Conv <pads = [1,1,1,1]> (r, w2, b2)
            [s] s = Add (c, r)
            [p] p = GlobalAveragePool (s)
            [f] f = Flatten (p)
            [y] y = Gemm (f, w3, b3)
        }""",
        w1=weight(8, 3, 3, 3),
        b1=weight(8),
        w2=weight(8, 8, 3, 3, seed=1),
        b2=weight(8, seed=2),
        w3=weight(8, 5, seed=3),
        b3=weight(5, seed=4),
    )


@pytest.mark.parametrize("preset", ["XINT8", "A8W8", "S8S8", "A8W8 operators"])
def test_what_is_judged_is_what_is_written(preset: str) -> None:
    """The search of scales, the bias correction and the form of the result count, too.

    With a target that the plain model meets, the file is the plain model's.
    """
    name, _, form = preset.partition(" ")
    config = QConfig.of(name).with_(form=form or "qdq")
    model = averaged()
    data = samples(model, count=32)
    plain = quantize(model, data, config)
    least = plain.report.worst_sqnr - 3
    met = config.with_(optimizers=AutoMixedPrecision(target=least))
    assert quantize(model, data, met).model.graph == plain.model.graph
    # The first 8 samples rank, two of three others decide, and held-out samples are left out.
    others = [each for i, each in enumerate(data) if not is_held_out(i)][8:]
    deciding = [each for i, each in enumerate(others) if i % 3 != 2]
    missed = config.with_(optimizers=AutoMixedPrecision(target=200.0))
    result = quantize(model, data, missed)
    (decided,) = [
        note for note in result.report.notes if "that decided between" in note
    ]
    figures = decided.removeprefix("auto_mixed_precision: ").split(" dB")[0]
    before, after = figures.split(" -> ")
    found = compare(model, result.model, deciding).sqnr
    assert found == pytest.approx(float(after), abs=0.006)
    found = compare(model, plain.model, deciding).sqnr
    assert found == pytest.approx(float(before), abs=0.006)
    assert float(after) >= float(before), "nothing tried is written that makes it worse"
