"""Cross-layer equalization: the function stays, the ranges of channels become alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import QuantizationSpec, from_dict, to_dict
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import EIGHT_BITS
from quark_onnx.optimizers import CLE
from quark_onnx.optimizers.balance import balance
from quark_onnx.patterns.channel_pairs import Passed, pairs_of
from quark_onnx.patterns.conv_and_gemm import Layer
from tests.models import normal


def parse(text: str, **constants: Any) -> ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()
    )
    return model


def uneven(*shape: int, axis: int = 0, seed: int = 0) -> np.ndarray:
    """Normal numbers of which some channels are much larger than others."""
    random = np.random.default_rng(seed)
    by = 10.0 ** random.uniform(
        -2, 2, [size if place == axis else 1 for place, size in enumerate(shape)]
    )
    return (random.normal(size=shape) * by).astype(np.float32)


CONV = "a = Conv <pads = [1,1,1,1]> (x, k, b) "
MODELS = {
    "conv": (CONV + "r = Relu (a) y = Conv (r, l)", {}),
    "conv without bias": ("a = Conv (x, k) r = LeakyRelu (a) y = Conv (r, l)", {}),
    "two readers": (
        CONV
        + "r = Relu (a) p = Conv (r, l) q = Conv (r, l2) y = Concat <axis = 1> (p, q)",
        {},
    ),
    "pools": (
        CONV + "p = MaxPool <kernel_shape = [2,2]> (a) q = AveragePool <kernel_shape ="
        " [2,2], pads = [1,1,1,1]> (p) y = Conv (q, l)",
        {},
    ),
    "pad": (
        CONV + "r = Relu (a) p = Pad (r, pads) y = Conv (p, l)",
        {"pads": np.int64([0, 0, 1, 1, 0, 0, 1, 1])},
    ),
    "depthwise": (
        CONV
        + "r = Relu (a) d = Conv <group = 8> (r, dw, db) s = Relu (d) y = Conv (s, l)",
        {"dw": uneven(8, 1, 3, 3, seed=5), "db": uneven(8, seed=6)},
    ),
    "grouped": (
        CONV + "r = Relu (a) y = Conv <group = 2> (r, g)",
        {"g": uneven(6, 4, 3, 3, seed=7)},
    ),
    "transposed": (
        CONV
        + "r = Relu (a) t = ConvTranspose <group = 2> (r, ct) s = Relu (t) y = Conv"
        " (s, l6)",
        {"ct": uneven(8, 3, 3, 3, seed=8), "l6": uneven(4, 6, 3, 3, seed=9)},
    ),
    "head": (
        CONV
        + "r = Relu (a) p = GlobalAveragePool (r) f = Flatten (p) y = Gemm <transB = 1>"
        " (f, h, hb)",
        {"h": uneven(5, 8, seed=10), "hb": uneven(5, seed=11)},
    ),
    "flat": (
        CONV + "r = Relu (a) f = Flatten (r) y = MatMul (f, m)",
        {"m": uneven(800, 5, seed=12)},
    ),
    "joined": (
        CONV
        + "r = Relu (a) e = Conv <pads = [1,1,1,1]> (x, k2) s = Relu (e) j = Concat"
        " <axis = 1> (s, r) y = Conv (j, l11)",
        {"k2": uneven(3, 3, 3, 3, seed=13), "l11": uneven(4, 11, 1, 1, seed=14)},
    ),
    "prelu": (
        CONV + "r = PRelu (a, slope) y = Conv (r, l)",
        {"slope": np.full((8, 1, 1), 0.2, np.float32)},
    ),
}
PAIRS = {"depthwise": 2, "transposed": 2, "joined": 2}


def model_of(name: str) -> tuple[ModelProto, dict[str, np.ndarray]]:
    text, constants = MODELS[name]
    weights = {
        "k": uneven(8, 3, 3, 3, seed=1),
        "b": uneven(8, seed=2),
        "l": uneven(4, 8, 1, 1, axis=1, seed=3),
    }
    weights["l2"] = uneven(4, 8, 1, 1, axis=1, seed=4)
    weights = {
        key: value
        for key, value in weights.items()
        if f" {key}," in text or f" {key})" in text
    }
    model = parse(f"g (float[2,3,10,10] x) => (y) {{ {text} }}", **weights, **constants)
    model.graph.output[0].type.tensor_type.elem_type = 1
    return model, {
        "x": np.random.default_rng(99).normal(size=(2, 3, 10, 10)).astype(np.float32)
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays_and_channels_become_alike(name: str) -> None:
    model, feeds = model_of(name)
    graph = Graph.of(model)
    assert CLE()(graph) == PAIRS.get(name, 1)
    graph.drop_unused()
    [found], [expected] = (
        open_session(each).run(None, feeds) for each in (graph.to_model(), model)
    )
    np.testing.assert_allclose(
        found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max()
    )
    first = Layer.of(graph, next(node for node in graph.nodes if node.kind == "Conv"))
    assert first is not None
    if name not in PAIRS and name != "two readers":
        before = np.abs(first.weight(graph)).reshape(8, -1).max(axis=1)
        reader = next(
            node
            for node in graph.nodes
            if node.kind in ("Conv", "Gemm", "MatMul") and node is not first.node
        )
        layer = Layer.of(graph, reader)
        assert layer is not None
        rows = np.abs(np.moveaxis(layer.weight(graph), 2, 1))
        behind = (
            rows.reshape(rows.shape[0] * rows.shape[1], -1)
            .max(axis=1)
            .reshape(8, -1)
            .max(axis=1)
        )
        np.testing.assert_allclose(before, behind, rtol=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        CONV + "r = Sigmoid (a) y = Conv (r, l)",
        CONV + "r = Relu (a) s = Add (r, r) y = Conv (s, l)",
        CONV + "r = Clip (a, zero, six) y = Conv (r, l)",
        CONV + "r = Relu (a) p = Pad (r, pads, six) y = Conv (p, l)",
        CONV + "r = Relu (a) y = MatMul (r, wide)",
        CONV + "y = Conv (a, l) z = Identity (a)",
    ],
)
def test_what_does_not_commute_is_left_alone(text: str) -> None:
    constants = {
        "zero": np.float32(0),
        "six": np.float32(6),
        "pads": np.int64([0, 0, 1, 1, 0, 0, 1, 1]),
    }
    constants |= {
        "k": uneven(8, 3, 3, 3),
        "b": uneven(8),
        "l": uneven(4, 8, 1, 1),
        "wide": uneven(10, 4),
    }
    used = {
        key: value
        for key, value in constants.items()
        if f" {key}," in text or f" {key})" in text
    }
    output = "(y, z)" if "z =" in text else "(y)"
    model = parse(f"g (float[2,3,10,10] x) => {output} {{ {text} }}", **used)
    for value in model.graph.output:
        value.type.tensor_type.elem_type = 1
    assert CLE()(Graph.of(model)) == 0


CLIP = (
    CONV
    + "r = Clip (a, zero, six) p = MaxPool <kernel_shape = [2,2]> (r) y = Conv (p, l)"
)
GATE = CONV + "s = Sigmoid (a) r = Mul (a, s) y = Conv (r, l)"
POOLED_GATE = (
    CONV
    + "p = MaxPool <kernel_shape = [2,2]> (a) s = Sigmoid (p) r = Mul (p, s) y = Conv (r, l)"
)
HARD_GATE = (
    CONV + "s = HardSigmoid <alpha = 0.1666667> (a) r = Mul (s, a) f = Flatten (r) y ="
    " MatMul (f, m)"
)


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        (CLIP, CLE(relu6="bound")),
        (GATE, CLE(silu="scale")),
        (HARD_GATE, CLE(silu="scale")),
        (GATE, CLE(silu="after")),
        (HARD_GATE, CLE(silu="after")),
        (POOLED_GATE, CLE(silu="scale")),
        (CONV + "r = Resize (a, , sizes) y = Conv (r, l)", CLE()),
    ],
)
def test_functions_are_passed_by_what_makes_up_for_the_factors(
    text: str, optimizer: CLE
) -> None:
    constants = {
        "zero": np.float32(0),
        "six": np.float32(6),
        "sizes": np.float32([1, 1, 2, 2]),
    }
    constants |= {
        "k": uneven(8, 3, 3, 3, seed=1),
        "b": uneven(8, seed=2),
        "l": uneven(4, 8, 1, 1, axis=1, seed=3),
    }
    constants |= {"m": uneven(800, 5, seed=12)}
    used = {
        key: value
        for key, value in constants.items()
        if f" {key}," in text or f" {key})" in text
    }
    model = parse(f"g (float[2,3,10,10] x) => (y) {{ {text} }}", **used)
    model.graph.output[0].type.tensor_type.elem_type = 1
    feeds = {
        "x": np.random.default_rng(99).normal(size=(2, 3, 10, 10)).astype(np.float32)
    }
    graph = Graph.of(model)
    assert optimizer.exact and optimizer(graph) == 1
    [found], [expected] = (
        open_session(each).run(None, feeds) for each in (graph.to_model(), model)
    )
    np.testing.assert_allclose(
        found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max()
    )


ACTIVE = {**{name: CLE() for name in MODELS}, "clip": CLE(relu6="bound")}
ACTIVE |= {name: CLE(silu="scale") for name in ("gate", "hard gate")}


def active(name: str) -> tuple[ModelProto, list[dict[str, np.ndarray]]]:
    text = {"clip": CLIP, "gate": GATE, "hard gate": HARD_GATE}.get(name)
    if text is None:
        model = model_of(name)[0]
    else:
        constants = {
            "zero": np.float32(0),
            "six": np.float32(6),
            "m": uneven(800, 5, seed=12),
        }
        constants |= {
            "k": uneven(8, 3, 3, 3, seed=1),
            "b": uneven(8, seed=2),
            "l": uneven(4, 8, 1, 1, axis=1, seed=3),
        }
        used = {
            key: value
            for key, value in constants.items()
            if f" {key}," in text or f" {key})" in text
        }
        model = parse(f"g (float[2,3,10,10] x) => (y) {{ {text} }}", **used)
        model.graph.output[0].type.tensor_type.elem_type = 1
    random = np.random.default_rng(99)
    return model, [
        {"x": random.normal(size=(2, 3, 10, 10)).astype(np.float32)} for _ in range(6)
    ]


@pytest.mark.parametrize("name", ACTIVE)
def test_activations_count_and_the_function_stays(name: str) -> None:
    model, data = active(name)
    graph, again = Graph.of(model), Graph.of(model)
    found = ACTIVE[name](graph, data)
    assert found == PAIRS.get(name, 1) and ACTIVE[name](again, data[::-1]) == found
    assert graph.to_model() == again.to_model()
    before, after = (
        float(word) for word in found.notes[0].split() if word[0].isdigit()
    )
    assert after < before
    [computed], [expected] = (
        open_session(each).run(None, data[0]) for each in (graph.to_model(), model)
    )
    np.testing.assert_allclose(
        computed, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "S8S8"])
def test_activations_are_not_spread_for_the_sake_of_weights(preset: str) -> None:
    """Half of the channels have large weights for an input that is nothing.

    Each output has a scale of its own.
    """
    random = np.random.default_rng(0)
    first, second = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((8, 2, 1, 1), (4, 8, 1, 1))
    )
    first[:4, 1] *= 1000
    model = parse(
        "g (float[2,2,10,10] x) => (y) { a = Conv (x, k) r = Relu (a) y = Conv (r,"
        " l) }",
        k=first,
        l=second,
    )
    model.graph.output[0].type.tensor_type.elem_type = 1
    once = np.float32([1, 1e-9]).reshape(2, 1, 1)
    data = [
        {"x": (random.normal(size=(2, 2, 10, 10)) * once).astype(np.float32)}
        for _ in range(8)
    ]
    config = QConfig.of(preset).with_(
        weight=QuantizationSpec("int16", per_channel=True),
        calibrator="minmax",
        search=0,
    )

    def error(*optimizers: CLE) -> float:
        return quantize(
            model, data, config.with_(optimizers=optimizers)
        ).report.worst_sqnr

    assert error(CLE(activations=False)) < error() - 3
    assert error(CLE()) > error() + 0.1


GROW = "a = Conv (x, k) b = Conv (x, k2) c = Concat <axis = 1> (a, b) "
BEHIND = "e = Conv (d, l) f = Relu (e) y = Conv (f, m)"
PART = {
    "clip": (GROW + "d = Clip (c, zero, six) " + BEHIND, CLE(relu6="bound")),
    "gate": (GROW + "s = Sigmoid (c) d = Mul (c, s) " + BEHIND, CLE(silu="scale")),
    "weights alone": (
        GROW + "d = Clip (c, zero, six) " + BEHIND,
        CLE(relu6="bound", activations=False),
    ),
}


@pytest.mark.parametrize("case", PART)
def test_what_stands_behind_a_concat_is_not_taken_for_one_of_its_parts(
    case: str,
) -> None:
    text, optimizer = PART[case]
    constants = {"zero": np.float32(0), "six": np.float32(6)} if "Clip" in text else {}
    weights = {
        "k": uneven(4, 3, 3, 3),
        "k2": uneven(6, 3, 3, 3),
        "l": uneven(8, 10, 1, 1),
        "m": uneven(4, 8, 1, 1),
    }
    model = parse(
        f"g (float[2,3,10,10] x) => (float[2,4,8,8] y) {{ {text} }}",
        **weights,
        **constants,
    )
    data = active("conv")[1]
    notes = quantize(
        model, data, QConfig.of("A8W8").with_(optimizers=optimizer)
    ).report.notes
    assert "cle: 1" in notes, notes  # that of e; it is not rolled back


LAST = {
    "gate": (
        "a = MatMul (x, k) s = Sigmoid (a) d = Mul (a, s) e = MatMul (d, l) f = Relu"
        " (e) y = MatMul (f, m)"
    ),
    "pool": (
        "a = MatMul (x, k) d = MaxPool <kernel_shape = [3], pads = [1,1]> (a) e ="
        " MatMul (d, l) f = Relu (e) y = MatMul (f, m)"
    ),
}


@pytest.mark.parametrize("case", LAST)
def test_channels_that_come_last_are_not_taken_for_the_second_axis(case: str) -> None:
    weights = {
        "k": uneven(8, 16, axis=1),
        "l": uneven(16, 12, axis=1),
        "m": uneven(12, 5),
    }
    model = parse(
        f"g (float[2,16,8] x) => (float[2,16,5] y) {{ {LAST[case]} }}", **weights
    )
    data = [{"x": normal(2, 16, 8, seed=seed)} for seed in range(4)]
    config = QConfig.of("A8W8").with_(optimizers=CLE(silu="scale"))
    notes = quantize(model, data, config).report.notes
    assert "cle: 1" in notes, notes


def test_a_batch_of_any_size_passes_a_resize() -> None:
    weights = {
        "k": uneven(8, 3, 3, 3),
        "l": uneven(4, 8, 1, 1),
        "sizes": np.float32([1, 1, 2, 2]),
    }
    text = "a = Conv (x, k) r = Resize (a, , sizes) y = Conv (r, l)"
    graph = Graph.of(
        parse(f"g (float[N,3,10,10] x) => (float[N,4,16,16] y) {{ {text} }}", **weights)
    )
    assert CLE()(graph) == 1


SILU = "s = Sigmoid (a) r = Mul (a, s)"
#: OpenVINO does not compute this gate with the layer, nor a factor before or after it.
APART = "p = MaxPool <kernel_shape = [1,1]> (a) s = Sigmoid (p) r = Mul (p, s)"


def separable(activation: str, channels: int) -> ModelProto:
    """Two convolutions, of which much or little is the function between them."""
    return parse(
        "g (float[2,3,10,10] x) => (float[2,4,10,10] y) { a = Conv <pads = [1,1,1,1]>"
        f" (x, k, b) {activation} y = Conv (r, l) }}",
        k=uneven(channels, 3, 3, 3, seed=1),
        b=uneven(channels, seed=2),
        l=uneven(4, channels, 1, 1, axis=1, seed=3),
    )


@pytest.mark.parametrize(
    ("activation", "fused", "settings"),
    [
        (SILU, False, [("keep", "scale"), ("keep", "keep")]),
        (SILU, True, [("keep", "after"), ("keep", "keep")]),
        (APART, False, [("keep", "scale"), ("keep", "keep")]),
        (APART, True, [("keep", "keep")]),
        ("r = Relu (a)", False, [("keep", "keep")]),
    ],
)
def test_settings_to_try_follow_from_the_graph(
    activation: str, fused: bool, settings: list[tuple[str, str]]
) -> None:
    variants = CLE().variants(Graph.of(separable(activation, 8)), fused=fused)
    assert [(each.relu6, each.silu) for each, _ in variants] == settings
    slowdowns = [slowdown for _, slowdown in variants]
    assert slowdowns == sorted(slowdowns, reverse=True) and slowdowns[-1] == 0.0
    assert (slowdowns[0] > 0) == (settings[0][1] == "scale")


def test_factors_after_a_gate_leave_gates_of_other_operators() -> None:
    graph = Graph.of(separable(APART, 8))
    assert CLE(silu="after")(graph) == 0


def test_what_would_cost_half_the_runtime_is_not_tried_unless_it_is_asked_for() -> None:
    """A Clip is fused into the convolution before it, a Relu and a Min are not."""
    model, _ = active("clip")
    graph = Graph.of(model)
    assert [each.relu6 for each, _ in CLE().variants(graph)] == ["keep"]
    [(asked, slowdown)] = CLE(relu6="bound").variants(graph)
    assert (asked.relu6, slowdown) == ("bound", 0.0)


def test_the_settings_that_were_chosen_are_reported_with_their_price() -> None:
    model = separable(SILU, 8)
    random = np.random.default_rng(7)
    data = [
        {"x": random.normal(size=(2, 3, 10, 10)).astype(np.float32)} for _ in range(24)
    ]
    config = QConfig.of("S8S8").with_(optimizers="cle")
    report = quantize(model, data, config).report
    assert [
        note for note in report.notes if note.startswith("cle:relu6=keep,silu=scale: 1")
    ]
    assert any(
        note.startswith("cle:relu6=keep,silu=scale: about")
        and "more runtime (estimated)" in note
        for note in report.notes
    )


@pytest.mark.parametrize("preset", ["BF16", "FP8E4M3", "MXINT8"])
def test_where_no_integer_rounds_nothing_is_changed(preset: str) -> None:
    model, data = active("gate")
    optimized = QConfig.of(preset).with_(optimizers=CLE(silu="scale"))
    plain, found = (
        quantize(model, data, each) for each in (QConfig.of(preset), optimized)
    )
    assert found.model.graph == plain.model.graph
    assert "cle: nothing to do" in found.report.notes


def test_results_that_do_not_vary_do_not_outweigh_the_others() -> None:
    """A part of the model that reads constants, which leave its results without variance."""
    weights = {"k": uneven(8, 3, 3, 3, seed=1), "l": uneven(4, 8, 1, 1, axis=1, seed=3)}
    weights |= {"m": uneven(6, 8, seed=5), "n": uneven(8, 4, axis=1, seed=6)}
    model = parse(
        """g (float[2,3,10,10] x, float[2,6] t) => (float[2,4,8,8] y) {
            a = Conv (x, k) r = Relu (a) c = Conv (r, l) e = MatMul (t, m) f = Relu (e) h = MatMul (f, n)
            i = Unsqueeze (h, last) y = Add (c, i) }""",  # noqa: E501
        last=np.int64([2, 3]), **weights,
    )  # fmt: skip
    factors = []
    for part in (normal(2, 6, seed=9), np.ones((2, 6), np.float32)):
        data = [{"x": normal(2, 3, 10, 10, seed=seed), "t": part} for seed in range(4)]
        graph = Graph.of(model)
        found = CLE()(graph, data)
        assert float(found.notes[0].split()[5]) < 1, found.notes
        layer = Layer.of(
            graph, next(node for node in graph.nodes if node.kind == "Conv")
        )
        assert layer is not None
        factors.append(
            layer.weight(graph) / uneven(8, 3, 3, 3, seed=1).reshape(1, 8, 3, 3, 3)
        )
    np.testing.assert_allclose(factors[0], factors[1], rtol=0.1)
    assert np.ptp(np.log(factors[1])) > 1


def test_the_gain_of_a_pair_is_the_noise_without_its_factors() -> None:
    """Only the layers of the pair are computed again, and the sum is the same."""
    model, data = active("transposed")
    graph = Graph.of(model)
    balanced = balance(graph, pairs_of(graph, Passed(False, False)), data, EIGHT_BITS)
    assert len(balanced.pairs) > 1
    for index in range(len(balanced.pairs)):
        without = balanced.without([index])
        assert balanced.gain(index) == without.after - balanced.after > 0


def test_without_data_weights_alone_count() -> None:
    model, _ = model_of("conv")
    weights = QConfig.of("W8").with_(weight=QuantizationSpec("int4"))
    found, alone = (
        quantize(model, None, weights.with_(optimizers=each))
        for each in ("cle", "cle:activations=false")
    )
    assert (
        found.model.graph
        == alone.model.graph
        != quantize(model, None, weights).model.graph
    )
    assert (
        "cle: without calibration data weights alone chose the factors"
        in found.report.notes
    )
    notes = quantize(
        model, None, QConfig.of("BF16").with_(optimizers="cle")
    ).report.notes
    assert "cle: nothing to do" in notes


def test_a_replaced_clip_is_said_to_change_the_model() -> None:
    weights = {
        "k": 3 * uneven(8, 3, 3, 3, seed=1),
        "b": uneven(8, seed=2),
        "l": uneven(4, 8, 1, 1, axis=1, seed=3),
    }
    ends = {"zero": np.float32(0), "six": np.float32(6)}
    model = parse(f"g (float[2,3,10,10] x) => (y) {{ {CLIP} }}", **weights, **ends)
    model.graph.output[0].type.tensor_type.elem_type = 1
    data = [
        {
            "x": (
                np.random.default_rng(seed)
                .normal(size=(2, 3, 10, 10))
                .astype(np.float32)
            )
        }
        for seed in range(4)
    ]
    result = quantize(
        model, data, QConfig.of("XINT8").with_(optimizers=("cle:relu6=replace",))
    )
    (note,) = [note for note in result.report.notes if note.startswith("cle: 1")]
    assert "it changed the float model" in note and "dB SQNR" in note
    assert not any(node.op_type == "Clip" for node in result.model.graph.node)


def test_it_is_a_setting_and_in_the_report() -> None:
    model, feeds = model_of("depthwise")
    config = QConfig.of("XINT8").with_(optimizers=(CLE(sweeps=3, activations=False),))
    assert (
        from_dict(to_dict(config))
        == config
        == QConfig.of("XINT8").with_(optimizers="cle:sweeps=3,activations=false")
    )
    plain, better = (
        quantize(model, [feeds] * 4, each)
        for each in (QConfig.of("XINT8").with_(equalize=False), config)
    )
    assert "cle: 2" in better.report.notes
    assert "optimizers: cle:sweeps=3,activations=False" in better.report.config
    assert better.report.worst_sqnr > plain.report.worst_sqnr + 3


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ("cel", "unknown optimizer 'cel'; did you mean 'cle'"),
        ("cle:sweep=3", "CLE has no setting 'sweep'; did you mean 'sweeps'"),
        ("cle:sweeps=-1", "sweeps of cle is -1"),
        ("cle:sweeps=2", "sweeps of cle is 2, and activations is true"),
        ("cle:sweeps", "is not of the form setting=value"),
        (
            "cle:relu6=drop",
            "relu6 of cle is 'drop'; it must be one of auto, keep, bound, replace",
        ),
        ("cle:activations=3", "activations of cle is 3; it must be true or false"),
        (
            "cle:silu=yes",
            "silu of cle is 'yes'; it must be one of auto, keep, scale, after",
        ),
        (3, "optimizers is 3"),
        ((CLE,), "it must be an optimizer or a name"),
    ],
)
def test_wrong_settings(optimizers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QConfig(optimizers=optimizers)
