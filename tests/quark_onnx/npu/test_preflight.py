"""The forecast of what a processor runs: against AMD's own logs, and rule by rule."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import TARGETS
from quark_onnx.graph import Graph
from quark_onnx.graph.cost import operations
from quark_onnx.npu import (
    NodePlacement,
    Preflight,
    cut,
    deploy_forecast,
    legalize,
    preflight,
)
from quark_onnx.npu.partition import pieces, root_in
from quark_onnx.npu.placement import FLOAT_TAIL, NPU, Case, place
from quark_onnx.npu.support import KINDS, listed
from quark_onnx.report import percentage
from tests.models import kinds, normal, parse, weight
from tests.quark_onnx.npu.networks import NETWORKS, densenet

#: Nodes on the NPU, on the CPU, in VITIS_EP_CPU, and pieces, as the logs of AMD's runs have them:
#: RyzenAI-SW, quark_quantization/models, 2025-10-14, release 1.7, Strix.
LOGGED = {
    ("ResNet-18", "XINT8"): (164, 0, 2, 1),
    ("ResNet-18", "A8W8"): (163, 0, 2, 1),
    ("ResNet-34", "XINT8"): (292, 0, 2, 1),
    ("ResNet-34", "A16W8"): (291, 0, 2, 1),
    ("ResNet-50", "XINT8"): (393, 0, 2, 1),
    ("ResNet-50", "A8W8"): (392, 0, 2, 1),
    ("SqueezeNet 1.0", "XINT8"): (201, 1, 2, 1),
    ("SqueezeNet 1.0", "A8W8"): (200, 1, 2, 1),
    ("SqueezeNet 1.1", "XINT8"): (201, 1, 2, 1),
    ("SqueezeNet 1.1", "A16W8"): (200, 1, 2, 1),
    ("MobileNetV2", "XINT8"): (239, 36, 74, 18),
    ("MobileNetV2", "A8W8"): (238, 36, 74, 18),
    ("MobileNetV2", "A16W8"): (346, 0, 2, 1),
    ("MobileNetV3", "XINT8"): (448, 62, 70, 32),
    ("MobileNetV3", "A8W8"): (540, 0, 2, 1),
    ("MobileNetV3", "A16W8"): (540, 0, 2, 1),
    ("EfficientNet-b0", "XINT8"): (792, 130, 132, 66),
    ("EfficientNet-b0", "A8W8"): (970, 0, 2, 1),
    ("EfficientNet-b1", "XINT8"): (1135, 184, 186, 93),
    ("EfficientNet-b1", "A16W8"): (1387, 0, 2, 1),
    ("EfficientNet-b2", "XINT8"): (1135, 184, 186, 93),
    ("ShuffleNetV2", "XINT8"): (467, 50, 100, 18),
    ("ShuffleNetV2", "A8W8"): (470, 48, 98, 17),
    ("ShuffleNetV2", "A16W8"): (470, 48, 98, 17),
}
#: Nodes on the NPU in the logs that the networks here do not have.
UNEXPLAINED = {
    "MobileNetV3": 3,
    "EfficientNet-b0": 15,
    "EfficientNet-b1": 24,
    "EfficientNet-b2": 24,
}


def forecast(network: str, kind: str) -> tuple[int, int, int, int]:
    found = preflight(NETWORKS[network](kind), "stx", kind=kind, release="1.6")
    return (
        *(found.counts.get(device, 0) for device in ("NPU", "CPU", "VITIS_EP_CPU")),
        found.subgraphs,
    )


@pytest.mark.parametrize(("network", "kind"), LOGGED, ids="-".join)
def test_counts_of_the_logs(network: str, kind: str) -> None:
    """Equal, but for one of MobileNetV2's convolutions, and nodes of three networks that the logs
    do not explain.
    """
    found, logged = forecast(network, kind), LOGGED[network, kind]
    if network == "MobileNetV2" and kind != "A16W8":
        assert found == (logged[0] + 6, 34, 70, 18)
        return
    assert found[1:] == logged[1:]
    assert found[0] == logged[0] - UNEXPLAINED.get(network, 0)


def test_the_table_of_the_guide_is_what_the_code_forecasts() -> None:
    text = (Path(__file__).parents[3] / "docs" / "npu.md").read_text(encoding="utf-8")
    for (network, kind), logged in LOGGED.items():
        found = forecast(network, kind)
        cells = [
            f"{a}" if a == b else f"{a} ({b})"
            for a, b in zip(found, logged, strict=True)
        ]
        assert f"| {network} | {kind} | {' | '.join(cells)} |" in text


def test_later_releases_are_less_sure_of_gates() -> None:
    model = NETWORKS["EfficientNet-b0"]("XINT8")
    old, new = (
        preflight(model, "stx", kind="XINT8", release=release)
        for release in ("1.6", "1.8")
    )
    confidences = [
        {v.confidence for v in each.placements if v.op_type == "HardSigmoid"}
        for each in (old, new)
    ]
    assert confidences == [{"measured"}, {"inferred"}]


def test_an_older_compiler_takes_gates() -> None:
    found = preflight(NETWORKS["EfficientNet-b0"]("XINT8"), "phx")
    assert found.counts["NPU"] > 900 and found.subgraphs == 1


# Rule by rule

CONV = (
    "Conv <kernel_shape = [3, 3], strides = [1, 1], pads = [1, 1, 1, 1], dilations ="
    " [1, 1], group = 1>"
)
POOL = 'MaxPool <kernel_shape = [3, 3], auto_pad = "SAME_UPPER">'
X = "float[1,4,8,8]"


def found(
    body: str, target: str = "stx", kind: str = "", shape: str = X, **constants: Any
) -> Preflight:
    model = parse(
        f"g ({shape} x) => ({shape} y) {{ a = {CONV} (x, w) b = {CONV} (a, w)"
        f" {body} }}",
        **constants,
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(weight(4, 4, 3, 3), "w")
    )
    return preflight(model, target, kind=kind)


def only(result: Preflight, op_type: str) -> NodePlacement:
    return next(
        placement for placement in result.placements if placement.op_type == op_type
    )


@pytest.mark.parametrize(
    ("body", "op_type", "device", "words"),
    [
        ("y = Relu (b)", "Relu", "NPU", "listed for XINT8"),
        ("y = Sigmoid (b)", "Sigmoid", "CPU", "a gate with power-of-two scales"),
        ("y = PRelu (b, s)", "PRelu", "NPU", "not listed, but"),
        ("y = Softplus (b)", "Softplus", "CPU", "not listed for XINT8"),
        ("y = Conv (b, w)", "Conv", "NPU", "listed"),
        (f"m = {POOL} (b) y = Relu (m)", "MaxPool", "abort", "auto_pad"),
        ("m = ReduceMean <axes = [2, 3]> (b) y = Add (b, m)", "ReduceMean", "CPU", "GlobalAveragePool"),  # noqa: E501
        ("p, q = TopK (b, k) y = Add (b, b)", "TopK", "CPU", "more than one result"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_rules(body: str, op_type: str, device: str, words: str) -> None:
    result = found(body, s=normal(4, 1, 1), k=np.array([2], np.int64))
    placement = only(result, op_type)
    assert placement.device == device and words in placement.reason
    assert placement.source and placement.confidence in (
        "documented",
        "measured",
        "read",
        "inferred",
        "unknown",
    )


def test_a_prelu_in_bf16_runs_on_the_processor_and_is_in_doubt() -> None:
    """A network with it was compiled, and wrong with trained slopes: amd/RyzenAI-SW#390."""
    result = found("y = PRelu (b, s)", kind="BF16", s=normal(4, 1, 1))
    assert only(result, "PRelu").device == "NPU" and result.subgraphs == 1
    assert any("trained slopes" in str(doubt) for doubt in result.doubts)
    assert result.band == "risky"


def test_a_convolution_without_attributes_ends_the_process() -> None:
    model = parse(
        f"g ({X} x) => (float[1,4,6,6] y) {{ y = Conv (x, w) }}", w=weight(4, 4, 3, 3)
    )
    [placement] = preflight(model, "stx").aborts
    assert (
        "missing: kernel_shape, strides, pads, dilations, group" in placement.reason
        and "legalize" in placement.fix
    )


@pytest.mark.parametrize(
    ("target", "kind", "shape", "words"),
    [
        ("phx", "A8W8", X, "phx takes XINT8, the model is A8W8"),
        ("stx", "A8W8", "float[2,4,8,8]", "input 'x' has a batch of 2"),
    ],
)
def test_whole_models_that_stay_on_the_cpu(
    target: str, kind: str, shape: str, words: str
) -> None:
    result = found("y = Relu (b)", target, kind, shape)
    assert result.counts["NPU"] == 0 and result.subgraphs == 0 and result.share == 0
    assert {words in placement.reason for placement in result.placements} == {True}


@pytest.mark.parametrize(
    ("model", "cause", "fix"),
    [
        (
            "g (float[N,4,8,8] x) => (float[N,4,8,8] y) { y = Relu (x) }",
            "the batch is dynamic",
            "quark-onnx npu legalize MODEL -o OUT",
        ),
        (
            "g (float[1,4,H,W] x, float[1,M] m) => (float[1,4,H,W] y) { y = Relu (x) }",
            "an input has a dynamic shape",
            "quark-onnx npu legalize MODEL -o OUT --shape x=SIZES --shape m=SIZES",
        ),
        (
            """g (float[1,4,8,8] x) => (y) <int64[1] axes = {0}> {
                s = Shape (x) n = Cast <to = 1> (s) m = Cast <to = 7> (n)
                y = Expand (x, m) }""",
            "a shape is computed of constants",
            "quark-onnx npu legalize MODEL -o OUT",
        ),
        (
            "g (float[1,8] x) => (y) { i = NonZero (x) y = Abs (i) }",
            "data decides a shape",
            "cut the model in front of it (quark-onnx npu cut)",
        ),
    ],
    ids=["batch", "input", "arithmetic", "data"],
)
def test_advice_on_a_dynamic_shape_fits_its_cause(
    model: str, cause: str, fix: str
) -> None:
    """Inputs of fixed sizes need no --shape: arithmetic on sizes is folded, data is not."""
    result = preflight(parse(model), "stx", kind="BF16")
    causes = {(group.cause, group.fix) for group in result.groups}
    assert (f"a tensor has a dynamic shape: {cause}", fix) in causes


def test_a_vision_transformer_of_any_exporter_has_static_shapes_once_legalized() -> (
    None
):
    """Arithmetic on sizes, as a tracing exporter writes it for every layer, leaves no node."""
    both = deploy_forecast(sized_reshapes(6), "stx", kind="BF16")
    assert both.as_is.share < 0.5 and both.as_is.actions[0][0].endswith("-o OUT")
    assert both.legalized is not None and both.legalized.share > 0.9
    assert not [group for group in both.legalized.groups if "dynamic" in group.cause]


def sized_reshapes(layers: int) -> onnx.ModelProto:
    """Products between reshapes whose sizes are read from tensors of the layer before.

    The sizes are rounded in float, as of an interpolation, which shape inference does not follow.
    """
    text = ""
    for i in range(layers):
        text += f"""
            s{i} = Shape (h{i}) b{i} = Gather <axis = 0> (s{i}, zero)
            l{i} = Gather <axis = 0> (s{i}, one) c{i} = Cast <to = 1> (l{i})
            e{i} = Floor (c{i}) d{i} = Cast <to = 7> (e{i}) u{i} = Unsqueeze (b{i}, axes)
            v{i} = Unsqueeze (d{i}, axes)
            k{i} = Concat <axis = 0> (u{i}, v{i}, heads) r{i} = Reshape (h{i}, k{i})
            t{i} = Transpose <perm = [0,2,1,3]> (r{i}) q{i} = Transpose <perm = [0,2,1,3]> (t{i})
            w{i} = Concat <axis = 0> (u{i}, v{i}, width) f{i} = Reshape (q{i}, w{i})
            h{i + 1} = MatMul (f{i}, m)"""
    return parse(
        f"g (float[1,5,8] h0) => (float[1,5,8] h{layers}) {{ {text} }}",
        m=weight(8, 8),
        heads=np.array([2, 4]),
        width=np.array([8]),
        axes=np.array([0]),
        zero=np.array(0),
        one=np.array(1),
    )


CUBIC = 'Resize <mode = "cubic"> (b, , , sizes)'


@pytest.mark.parametrize("target", ["phx", "stx"])
def test_a_cubic_resize_is_not_promised(target: str) -> None:
    result = found(
        f"y = {CUBIC}", target, "XINT8", sizes=np.array([1, 4, 8, 8], np.int64)
    )
    placement = result.placements[-1]
    assert (placement.op_type, placement.device) == ("Resize", "CPU")
    assert placement.confidence in ("inferred", "read")


ATTENTION = """
    k = Transpose <perm = [0,1,3,2]> (b) s = MatMul (b, k) p = Softmax (s) y = MatMul (p, b)"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [("XINT8", "measured"), ("A8W8", "inferred"), ("A16W8", ""), ("BF16", "")],
)
def test_a_transformer_in_eight_bits_is_in_doubt(kind: str, words: str) -> None:
    """Another one was seen on the CPU; Windows ML recommends 16 bits."""
    result = found(ATTENTION, kind=kind)
    about = [doubt for doubt in result.doubts if "transformer" in doubt.reason]
    assert [doubt.confidence for doubt in about] == [words] * bool(words)
    if words:
        assert result.least_share == 0 and result.band != "good"
        in_doubt = "% in doubt (a transformer in 8-bit integers)"
        assert result.sentence.endswith(in_doubt)
        assert "amd/RyzenAI-SW#208" in str(result)


def test_a_product_larger_than_any_that_is_shown_is_in_doubt() -> None:
    """Only above the size of AMD's own examples, and only for the compiler with that report."""
    for rows, kind, doubts in ((64, "BF16", 0), (2048, "BF16", 1), (2048, "A16W8", 0)):
        model = parse(
            f"g (float[1,{rows},1024] x) => (float[1,{rows},1024] y) {{ y = MatMul (x, w) }}",
            w=weight(1024, 1024),
        )
        result = preflight(model, "stx", kind=kind)
        assert len(result.doubts) == doubts and result.share == 1
        assert result.least_share == (0 if doubts else 1)


def islands(operator: str) -> str:
    """Convolutions, each behind an operator that ends a subgraph."""
    return " ".join(
        f"s{i} = {operator} (b{i}) b{i + 1} = {CONV} (s{i}, w)" for i in range(6)
    )


def test_small_subgraphs_among_many_are_in_doubt() -> None:
    """Each Softplus splits the graph; a subgraph with a fifth of the work is not small."""
    body = f"b0 = Relu (b) {islands('Softplus')} y = Relu (b6)"
    result = found(body, kind="BF16")
    *_, doubt = result.doubts
    assert "small" in doubt.reason
    assert result.subgraphs == 7 and len(doubt.pieces) == 6
    assert 0 < result.least_share < result.share
    few = found(f"s = Softplus (b) y = {CONV} (s, w)", kind="BF16")
    assert few.doubts == ()


def test_integer_subgraphs_of_a_chain_are_not_in_doubt() -> None:
    """Up to 93 of them ran in AMD's logs of EfficientNet."""
    result = found(f"b0 = Relu (b) {islands('Sin')} y = Relu (b6)", kind="XINT8")
    assert result.subgraphs == 7 and result.doubts == ()
    assert result.sentence.endswith("on the NPU, in 7 subgraphs")
    for network in ("MobileNetV2", "MobileNetV3", "EfficientNet-b1", "ShuffleNetV2"):
        known = preflight(NETWORKS[network]("XINT8"), "stx", kind="XINT8")
        doubts = [doubt.reason for doubt in known.doubts if "join" in doubt.reason]
        assert not doubts and known.least_share > 0.9 * known.share


@pytest.mark.parametrize(
    ("blocks", "on_cpu", "subgraphs"),
    [((6, 12, 24, 16), 356, 63), ((6, 12, 32, 32), 500, 87)],
)
def test_subgraphs_that_join_others_are_in_doubt(
    blocks: tuple[int, ...], on_cpu: int, subgraphs: int
) -> None:
    """Counts of DenseNet121 and DenseNet169 in AMD's logs: 5 subgraphs of either run."""
    result = preflight(densenet("XINT8", blocks), "stx", kind="XINT8")
    (doubt,) = result.doubts
    assert result.subgraphs == subgraphs
    assert len(doubt.pieces) == subgraphs - 5 == sum(blocks)
    outside = sum(placed.device != NPU for placed in result.placements)
    outside += sum(piece in doubt.pieces for piece in result.pieces)
    assert outside == on_cpu
    share = percentage(result.share - result.least_share)
    expected = f"{share} in doubt ({sum(blocks)} subgraphs join results of others)"
    assert result.sentence.endswith(expected)


def test_a_subgraph_without_a_layer_is_in_doubt() -> None:
    """Behind a Sin on the CPU the Relu is a subgraph of its own."""
    result = found("s = Sin (b) y = Relu (s)", kind="XINT8")
    (doubt,) = result.doubts
    assert "no convolution or product" in doubt.reason and len(doubt.pieces) == 1
    assert 0 < result.least_share < result.share < 1


@pytest.mark.parametrize(("target", "share"), [("phx", 0.0), ("stx", 1.0)])
def test_a_convolution_along_one_axis_is_in_doubt(target: str, share: float) -> None:
    line = (
        CONV.replace("3, 3", "3").replace("1, 1, 1, 1", "1, 1").replace("[1, 1]", "[1]")
    )
    line = line.replace("pads = [1]", "pads = [1, 1]")
    model = parse(
        f"g (float[1,4,8] x) => (float[1,4,8] y) {{ a = {line} (x, w) y = {line} (a, w) }}",
        w=weight(4, 4, 3),
    )
    result = preflight(model, target, kind="XINT8")
    assert (result.share, result.least_share) == (share, 0)
    assert result.band != "good"


def test_a_bias_that_is_added_in_float_keeps_its_product_on_the_cpu() -> None:
    codes = {"q": np.ones((8, 8), np.int8), "s": np.array(0.1, np.float32)}
    for addend, share in (("f", 0.0), ("c", 1.0)):
        model = parse(
            f"""g (float[1,8] x) => (float[1,8] y) {{
                i = QuantizeLinear (x, s) p = DequantizeLinear (i, s)
                d = DequantizeLinear (q, s) c = DequantizeLinear (k, s)
                a = MatMul (p, d) b = Add (a, {addend})
                o = QuantizeLinear (b, s) y = DequantizeLinear (o, s) }}""",
            f=np.ones(8, np.float32),
            k=np.ones(8, np.int8),
            **codes,
        )
        assert preflight(model, "stx").share == share


def test_a_measurement_elsewhere_is_an_inference() -> None:
    """An LSTM was seen to crash on Strix Halo, not on Phoenix."""
    text = "h, y, z = LSTM <hidden_size = 4> (b, k, r)"
    model = parse(
        f"g (float[1,4,4] b) => (float[1,1,4,4] h) {{ {text} }}",
        k=weight(1, 16, 4),
        r=weight(1, 16, 4),
    )
    graph = Graph.of(model)
    for target, words in (
        ("stx", ("measured", "XDNA2, Ryzen AI 1.8")),
        ("phx", ("inferred", "")),
    ):
        placed = place(Case(graph, TARGETS[target], "XINT8", "1.8"), graph.nodes[0])
        assert placed.device == "abort"
        assert (placed.confidence, placed.measured_on) == words


@pytest.mark.parametrize("kind", ["XINT8", "A8W8", "BF16"])
def test_a_model_without_layers_stays_on_the_cpu(kind: str) -> None:
    """Activations, norms and moves alone were measured there."""
    model = parse("g (float[1,4] x) => (float[1,4] y) { a = Relu (x) y = Softmax (a) }")
    result = preflight(model, "stx", kind=kind)
    assert result.share == 0 and "no convolution" in result.placements[0].reason


def test_a_piece_does_not_wait_for_what_waits_for_it() -> None:
    """Both sides of a detour over the CPU are apart, although they hang together."""
    result = found("g = Sigmoid (b) y = Mul (b, g)")
    assert (
        result.pieces == (0, 0, 1, 2)
        and result.links == ((0, 1), (0, 2), (1, 2))
        and result.subgraphs == 2
    )
    assert found("r = Relu (b) y = Mul (b, r)").pieces == (0, 0, 0, 0)


class _Counted(dict[Any, Any]):
    """A dictionary that counts how often it is looked into."""

    looked = 0

    def __getitem__(self, key: Any) -> Any:
        self.looked += 1
        return super().__getitem__(key)


def test_the_pieces_of_a_chain_are_found_in_a_few_steps_a_node() -> None:
    count = 3000
    body = " ".join(f"t{place + 1} = Relu (t{place})" for place in range(count))
    model = parse(f"g (float[4] t0) => (float[4] t{count}) {{ {body} }}")
    graph = Graph.of(model)
    root = _Counted((node, node) for node in graph.nodes)
    for before, after in itertools.pairwise(graph.nodes):
        root[root_in(root, before)] = root_in(root, after)
    assert len({root_in(root, node) for node in graph.nodes}) == 1
    assert root.looked < 20 * count
    [piece] = pieces(graph, dict.fromkeys(graph.nodes, NPU))
    assert piece.nodes == tuple(graph.nodes)


def test_quantized_models_are_counted_as_they_are() -> None:
    model = parse(
        f"g ({X} x) => ({X} y) {{ a = {CONV} (x, w) r = Relu (a) y = {CONV} (r, w) }}",
        w=weight(4, 4, 3, 3),
    )
    data = [{"x": normal(1, 4, 8, 8, seed=seed)} for seed in range(4)]
    for preset in ("XINT8", "A16W8"):
        quantized = quantize(model, data, QConfig.of(preset).with_(target="stx")).model
        result = preflight(quantized, "stx")
        assert result.kind == preset and sum(result.counts.values()) == len(
            quantized.graph.node
        )
        assert result.counts["VITIS_EP_CPU"] == 2 and result.share == 1


@pytest.mark.parametrize(
    ("body", "op_type", "words"),
    [
        ("y = Slice (b, n, m)", "Slice", "axes are left out"),
        ('y = Resize <mode = "cubic"> (b, , s)', "Resize", "none of the resizings"),
        (
            "r = Resize (b, , t) m = ReduceMax <axes = [1]> (r) y = Add (b, m)",
            "Resize",
            "none of the resizings",
        ),
        ("p = ReduceMax <axes = [2]> (b) y = Add (b, p)", "ReduceMax", ""),
        ("y = LpNormalization <p = 1> (b)", "LpNormalization", "p is not 2"),
        ("y = Clip (b, , h)", "Clip", "lacks a bound"),
        ("f = Flatten <axis = 4> (b) y = Add (b, f)", "Flatten", "axis is the rank"),
        (
            "p = ReduceMean <keepdims = 0> (b) q = Relu (p) y = Add (b, q)",
            "Relu",
            "a single number",
        ),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_the_converter_of_xdna1_does_not_take(
    body: str, op_type: str, words: str
) -> None:
    values = {
        "n": np.array([0], np.int64),
        "m": np.array([4], np.int64),
        "s": np.ones(4, np.float32),
    }
    values |= {"t": np.float32([1, 2, 1, 1]), "h": np.array(6, np.float32)}
    placement = only(found(body, "phx", **values), op_type)
    assert placement.device == ("CPU" if words else "NPU") and words in placement.reason


def test_weights_that_are_computed_and_tensors_of_bfloat16() -> None:
    computed = found("t = Transpose (b) y = MatMul (b, t)", kind="A8W8")
    assert "its weight is computed" in only(computed, "MatMul").reason
    narrow = parse("g (bfloat16[1,4] x) => (bfloat16[1,4] y) { y = Relu (x) }")
    result = preflight(narrow, "stx", kind="BF16")
    assert result.counts["NPU"] == 0 and "is bfloat16" in result.placements[0].reason


def test_a_weight_that_is_an_input_too_is_repaired_by_legalizing() -> None:
    model = parse(
        f"g ({X} x, float[4,4,3,3] w) => ({X} y) {{ y = {CONV} (x, w) }}",
        w=weight(4, 4, 3, 3),
    )
    result = preflight(model, "stx")
    assert "an input of the model, too" in only(result, "Conv").reason
    assert only(result, "Conv").fix == "quark-onnx npu legalize MODEL -o OUT"
    assert only(preflight(legalize(model).model, "stx"), "Conv").device == "NPU"


def test_what_is_left_float_can_refuse_a_model_on_xdna1() -> None:
    model = parse(
        f"g ({X} x) => ({X} y) {{ a = {CONV} (x, w) r = Relu (a) y = {CONV} (r, w) }}",
        w=weight(4, 4, 3, 3),
    )
    data = [{"x": normal(1, 4, 8, 8, seed=seed)} for seed in range(4)]
    last = model.graph.node[-1].name = "last"
    quantized = quantize(
        model, data, QConfig.of("XINT8").with_(target="phx", exclude=(last,))
    ).model
    placements = {
        placement.node: placement
        for placement in preflight(quantized, "phx").placements
    }
    assert (
        "left float" in placements["last"].reason
        and placements["last"].fix == "quark-onnx npu cut MODEL -o FIRST SECOND"
    )


@pytest.mark.parametrize(
    ("target", "preset"),
    [("phx", "XINT8"), ("stx", "XINT8"), ("stx", "A8W8"), ("stx", "A16W8")],
)
def test_what_is_left_float_between_integer_operators_is_on_the_cpu(
    target: str, preset: str
) -> None:
    """The tables of operators and the logs are about quantized ones; moves keep what is rounded."""
    model = parse(
        f"""g ({X} x) => ({X} y) {{ a = {CONV} (x, w) r = PRelu (a, k) m = Mul (r, r)
        s = Add (m, r) t = Transpose <perm = [0, 1, 3, 2]> (s) y = {CONV} (t, w) }}""",
        w=weight(4, 4, 3, 3),
        k=np.full((4, 1, 1), 0.25, np.float32),
    )
    data = [{"x": normal(1, 4, 8, 8, seed=seed)} for seed in range(4)]
    names = model.graph.node[2].name, model.graph.node[3].name = "product", "sum"
    for exclude in ((), names):
        config = QConfig.of(preset).with_(target=target, exclude=exclude, search=0)
        placements = preflight(quantize(model, data, config).model, target).placements
        left = [placed for placed in placements if "left float" in placed.reason]
        assert {placed.node for placed in left} == set(exclude)
        assert {placed.confidence for placed in left} <= {"inferred"}
        on_npu = {placed.node for placed in placements if placed.device == "NPU"}
        assert set(names) & on_npu == set(names) - set(exclude)


@pytest.mark.parametrize("target", ["phx", "stx"])
def test_float_decoding_behind_the_last_layer_is_put_apart(target: str) -> None:
    """On XDNA1 it pushed YOLOv8n off the processor; elsewhere detectors run with it."""
    model = parse(
        f"""g ({X} x) => ({X} y) {{ a = {CONV} (x, w) r = Relu (a) b = {CONV} (r, w)
            e = Exp (b) s = Sub (e, b) y = Mul (s, e) }}""",
        w=weight(4, 4, 3, 3),
    )
    for node in model.graph.node:
        node.name = node.output[0]
    data = [{"x": normal(1, 4, 8, 8, seed=seed)} for seed in range(4)]
    config = QConfig.of("XINT8").with_(target=target, exclude=("e", "s", "y"))
    quantized = quantize(model, data, config).model
    result = preflight(quantized, target)
    (group,) = result.groups
    assert group.cause == FLOAT_TAIL and len(group.placements) == 3
    front = preflight(cut(quantized).first, target)
    assert (front.share, front.least_share, front.band) == (1, 1, "good")
    if target == "stx":
        assert result.doubts == () and result.actions == []
        assert result.share == result.least_share > 0.95 and result.band == "good"
        return
    (doubt,) = result.doubts
    assert (doubt.confidence, group.fix) == (
        "measured",
        "quark-onnx npu cut MODEL -o FIRST SECOND",
    )
    assert "deploy with --cut" in doubt.reason
    assert result.share > 0.95 and result.least_share == 0 and result.band == "risky"
    in_doubt = "(3 float nodes decode behind the last layer)"
    assert result.sentence.endswith(in_doubt)


def test_one_subgraph_joins_no_others() -> None:
    """Its Concat reads what an operator on the CPU computes, as the Focus of YOLOX does."""
    body = "s = Sin (x) c = Concat <axis = 1> (b, s) y = Conv <kernel_shape = [1, 1], strides ="
    body += " [1, 1], pads = [0, 0, 0, 0], dilations = [1, 1], group = 1> (c, v)"
    result = found(body, kind="XINT8", v=weight(4, 8, 1, 1))
    assert result.subgraphs == 1 and result.doubts == ()


def test_sizes_below_zero_are_none() -> None:
    model = parse("g (float[1,4,6,6] x) => (float[1,4,6,6] y) { y = Relu (x) }")
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    result = preflight(model, "stx")
    assert 0 <= result.share <= 1 and "None" in result.placements[0].reason


def test_operations() -> None:
    model = parse(
        """g (float[1,4,8,8] x) => (float[1,10] y) { c = Conv <group = 2, pads = [1, 1, 1, 1]> (x, w)
        t = ConvTranspose <strides = [2, 2]> (c, u) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (t)
        m = GlobalAveragePool (p) f = Flatten (m) y = Gemm (f, v) }""",  # noqa: E501
        w=weight(6, 2, 3, 3),
        u=weight(6, 5, 2, 2),
        v=weight(5, 10),
    )
    graph = Graph.of(model)
    found = dict(
        zip(
            kinds(model), (operations(graph, node) for node in graph.nodes), strict=True
        )
    )
    assert found == {
        "Conv": 2 * 6 * 64 * 2 * 9,
        "ConvTranspose": 2 * 6 * 64 * 5 * 4,
        "MaxPool": 5 * 64 * 4,
        "GlobalAveragePool": 5 * 64,
        "Flatten": 0,
        "Gemm": 2 * 5 * 10,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "INT3"}, "kind is 'INT3'"),
        ({"release": "9"}, "release is '9'"),
        ({"target": "sty"}, "unknown target"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(parse(f"g ({X} x) => ({X} y) {{ y = Relu (x) }}"), **settings)


def test_the_table_of_operators() -> None:
    """Counts of the documentation's page; each row of it counted once."""
    counts = {
        kind: sum(listed(schema.name, kind) for schema in onnx.defs.get_all_schemas())
        for kind in KINDS
    }
    # without LSTM, which crashes the compiler, GroupConv, which is no operator, and what is none of
    # ONNX any more
    assert counts == {"BF16": 75, "A16W8": 53, "A8W8": 53, "XINT8": 83}


def test_text_names_what_is_not_there() -> None:
    text = str(found("y = Sigmoid (b)"))
    assert (
        ": forecast for stx (XINT8, Ryzen AI 1.8): " in text
        and "CPU       1 node (1 Sigmoid): a gate with power-of-two scales" in text
        and "\n          fix: quantize to A8W8 or A16W8" in text
    )
    assert json.dumps(text) and NPU in text


def chain(length: int, batch: str = "N") -> onnx.ModelProto:
    """A chain of convolutions without their optional attributes, with a batch of any size."""
    steps = "".join(f"x{i + 1} = Conv (x{i}, w) " for i in range(length))
    return parse(
        f"g (float[{batch},4,32,32] x0) => (float[{batch},4,m,n] x{length}) {{ {steps} }}",
        w=weight(4, 4, 3, 3),
    )


def test_nodes_with_the_same_reason_are_one_group() -> None:
    """Shapes and names of tensors differ from node to node; the reason does not."""
    forecast = preflight(parse("""g (float[N,4] x) => (float[N,4] y) {
        a = Relu (x) b = Sigmoid (a) y = Relu (b) }"""), "stx", kind="A8W8")  # fmt: skip
    (group,) = forecast.groups
    assert group.cause == "a tensor has a dynamic shape: the batch is dynamic"
    assert group.kinds == "2 Relu, 1 Sigmoid"
    assert str(forecast).count("a tensor has a dynamic shape") == 1


def test_the_forecast_of_deploy_is_that_of_the_legalized_model() -> None:
    both = deploy_forecast(chain(4), "stx", kind="XINT8")
    assert len(both.as_is.aborts) == 4 and both.as_is.band == "poor"
    assert both.legalized is not None and both.best is both.legalized
    assert (both.legalized.share, both.legalized.band) == (1.0, "good")
    (line,) = [line for line in str(both).splitlines() if line.startswith("legalized ")]
    assert "'quark-onnx npu deploy', which legalizes and quantizes the model" in line
    assert "the file as it is: the compiler would crash at 4 nodes" in line


def test_a_model_that_deploy_refuses_has_a_poor_forecast() -> None:
    both = deploy_forecast(chain(20), "stx", kind="XINT8")
    assert both.legalized is None and both.best is both.as_is
    assert "'quark-onnx npu deploy' refuses the model: the model runs on no" in str(
        both
    )
    assert "poor: forecast" in str(both)


def test_the_fix_for_most_nodes_comes_first() -> None:
    forecast = preflight(chain(4), "stx", kind="XINT8")
    assert forecast.actions[0] == (
        "quark-onnx npu legalize MODEL -o OUT",
        "affects 4 nodes",
    )
