"""Promises between the commands: a forecast is that of the file that deploy writes or refuses."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, npu, quantize
from quark_onnx.common.errors import ConfigError, QuarkError
from quark_onnx.common.registry import NPU_RECIPES
from quark_onnx.graph import Graph
from quark_onnx.optimizers import AutoMixedPrecision
from tests.cases import loop_over
from tests.models import MODELS, Factory, parse, run, samples, weight

POINT = (
    "kernel_shape = [1, 1], strides = [1, 1], pads = [0, 0, 0, 0], dilations = [1, 1],"
    " group = 1"
)


def mask() -> ModelProto:
    """An input of two axes that is no batch: it is added to the scores of one image."""
    return parse(
        f"""g (float[1,4,8,8] x, float[8,8] m) => (float[1,4,8,8] y) {{
            a = Conv <{POINT}> (x, w) b = Relu (a) c = Add (b, m) y = Conv <{POINT}> (c, v) }}""",
        w=weight(4, 4, 1, 1),
        v=weight(4, 4, 1, 1, seed=1),
    )


def fixed_branch() -> ModelProto:
    """An If whose condition is data, and whose shapes are all static."""
    return parse(
        f"""g (float[1,4,8,8] x, bool[1] k) => (float[1,4,8,8] y) {{
            a = Conv <{POINT}> (x, w) b = Relu (a) c = Conv <{POINT}> (b, v)
            y = If (k) <
                then_branch = t () => (float[1,4,8,8] p) {{ p = Relu (c) }},
                else_branch = e () => (float[1,4,8,8] q) {{ q = Neg (c) }}
            > }}""",
        w=weight(4, 4, 1, 1),
        v=weight(4, 4, 1, 1, seed=1),
    )


def hard_swish() -> ModelProto:
    """The activations of MobileNetV3, as exporters write them from opset 14 on."""
    return parse(
        """g (float[N,3,16,16] x) => (float[N,8] y) {
            a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w) b = HardSwish (a)
            c = Conv <pads = [1,1,1,1], group = 8> (b, d) e = HardSwish (c)
            f = ReduceMean <axes = [2,3], keepdims = 1> (e) h = Conv (f, v) i = HardSwish (h)
            y = Flatten (i) }""",
        w=weight(8, 3, 3, 3),
        d=weight(8, 1, 3, 3, seed=1),
        v=weight(8, 8, 1, 1, seed=2),
    )


def moves(sizes: list[int], perm: list[int], final: list[int]) -> ModelProto:
    """Two convolutions around a move of data between two reshapes."""
    return parse(
        f"""g (float[1,4,8,8] x) => (y) {{
            a = Conv <{POINT}> (x, w) r = Reshape (a, sizes) t = Transpose <perm = {perm}> (r)
            f = Reshape (t, final) y = Conv <{POINT}> (f, v) }}""",
        w=weight(4, 4, 1, 1),
        v=weight(4, final[1], 1, 1, seed=1),
        sizes=np.array(sizes),
        final=np.array(final),
    )


#: A shuffle of channels; windows of 4 x 4 positions as images, there and back.
MOVES = {
    "shuffle": ([1, 2, 2, 8, 8], [0, 2, 1, 3, 4], [1, 4, 8, 8]),
    "windows": ([1, 4, 2, 4, 2, 4], [0, 2, 4, 1, 3, 5], [4, 4, 4, 4]),
    "back": ([2, 2, 4, 4, 4, 1], [2, 0, 3, 1, 4, 5], [1, 4, 8, 8]),
    "reversed": ([1, 2, 2, 8, 8], [4, 3, 2, 1, 0], [1, 4, 8, 8]),
}


@pytest.mark.parametrize("case", MOVES)
def test_moves_in_more_dimensions_are_written_in_four(case: str) -> None:
    """Where axes stay neighbours; the outputs are those of the model, bit by bit."""
    model = moves(*MOVES[case])
    legal = npu.legalize(model, "stx").model
    graph = Graph.of(legal)
    ranks = {len(graph.sizes(name)) for name in graph.results()}
    assert (max(ranks) <= 4) == (case not in ("windows", "back"))
    feeds = samples(model, 1)[0]
    np.testing.assert_array_equal(run(legal, feeds)[0], run(model, feeds)[0])
    if case == "shuffle":
        forecast = npu.deploy_forecast(model, "stx", kind="A8W8").best
        assert (forecast.share, forecast.subgraphs) == (1.0, 1)


def one_bound() -> ModelProto:
    """A Clip from above alone, and one from below alone."""
    return parse(
        f"""g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{
            a = Conv <{POINT}> (x, w) b = Clip (a, , h) c = Conv <{POINT}> (b, v)
            y = Clip (c, l) }}""",
        w=weight(4, 4, 1, 1),
        v=weight(4, 4, 1, 1, seed=1),
        h=np.array(1.0, np.float32),
        l=np.array(0.0, np.float32),
    )


def test_a_clip_with_one_bound_runs_on_x1() -> None:
    """Its converter takes two constant bounds, which legalization writes."""
    assert npu.preflight(one_bound(), "phx").subgraphs == 2
    found = npu.deploy_forecast(one_bound(), "phx").best
    assert (found.share, found.subgraphs) == (1.0, 1)


OWN = {
    "mask": mask,
    "fixed_branch": fixed_branch,
    "hard_swish": hard_swish,
    "one_bound": one_bound,
}


@loop_over("make", {**MODELS, **OWN})
@pytest.mark.parametrize(
    ("target", "preset"), [("phx", "XINT8"), ("stx", "A8W8"), ("stx", "BF16")]
)
def test_a_forecast_is_that_of_the_written_file(
    make: Factory, target: str, preset: str
) -> None:
    model = make()
    data = None if preset == "BF16" else samples(model, 2)
    forecast = npu.deploy_forecast(model, target, kind=preset, data=data)
    with TemporaryDirectory() as folder:
        try:
            bundle = npu.deploy(
                model, data, Path(folder) / "b", target, preset, min_sqnr=None
            )
        except QuarkError as error:
            assert forecast.legalized is None and forecast.problem, error
            return
    assert not forecast.problem and bundle.check.errors == 0
    assert forecast.best.to_dict() == bundle.forecast.to_dict()


def bounded() -> ModelProto:
    """Blocks of MobileNetV2, whose Relu6 CLE replaces; the convolutions have no biases."""
    return parse(
        """g (float[1,3,8,8] x) => (float[1,8] y) {
            a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w) b = Clip (a, l, h)
            c = Conv <pads = [1,1,1,1], group = 8> (b, d) e = Clip (c, l, h)
            f = Conv (e, v) p = GlobalAveragePool (f) y = Flatten (p) }""",
        w=weight(8, 3, 3, 3),
        d=spread(weight(8, 1, 3, 3, seed=1)),
        v=weight(8, 8, 1, 1, seed=2),
        l=np.array(0.0, np.float32),
        h=np.array(6.0, np.float32),
    )


def gated() -> ModelProto:
    """SiLU as detectors have it; CLE adds an operator at each gate that it scales."""
    return parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            a = Conv <pads = [1,1,1,1]> (x, w) s = Sigmoid (a) m = Mul (a, s)
            b = Conv <pads = [1,1,1,1], group = 8> (m, d) t = Sigmoid (b) n = Mul (b, t)
            y = Conv (n, v) }""",
        w=spread(weight(8, 3, 3, 3)),
        d=spread(weight(8, 1, 3, 3, seed=1)),
        v=weight(4, 8, 1, 1, seed=2),
    )


def spread(weights: Any) -> Any:
    """Return weights whose output channels have unlike ranges, which CLE makes alike."""
    factors = np.geomspace(0.01, 1, len(weights), dtype=np.float32)
    return weights * factors.reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("make", "target", "expected"),
    [
        (bounded, "phx", {"classifier", "depthwise"}),
        (bounded, "stx", {"classifier", "depthwise"}),
        (bounded, "stx-x1", {"classifier", "depthwise"}),
        (gated, "phx", set()),
        (gated, "stx", {"detector"}),
        (hard_swish, "stx", {"detector"}),
    ],
)
def test_a_forecast_knows_the_recipe(
    make: Factory, target: str, expected: set[str]
) -> None:
    """The optimizers of the expected recipes replace or add operators."""
    model, changing = make(), set[str]()
    data = samples(model, 4)
    for name in NPU_RECIPES:
        config = NPU_RECIPES[name].config_for(target)
        forecast = npu.deploy_forecast(model, target, config=config, data=data)
        with TemporaryDirectory() as folder:
            bundle = npu.deploy(
                model, data, Path(folder) / "b", target, config, min_sqnr=None
            )
        assert forecast.best.to_dict() == bundle.forecast.to_dict(), name
        plain = npu.deploy_forecast(
            model, target, config=config.with_(optimizers=()), data=data
        )
        if operators(plain) != operators(forecast):
            changing.add(name)
    assert changing == expected


def operators(forecast: npu.DeployForecast) -> list[str]:
    return [placed.op_type for placed in forecast.best.placements]


@pytest.mark.parametrize(
    ("preset", "settings", "count"),
    [
        ("XINT8", {}, 9),
        ("XINT8", {"equalize": False}, 7),
        ("A8W8", {"optimizers": [AutoMixedPrecision(target=30.0, to="16bit")]}, 7),
    ],
)
def test_a_forecast_makes_the_trials_of_deploy(
    preset: str, settings: dict[str, Any], count: int
) -> None:
    """Output errors decide on the two operators of CLE, and on nodes of 16 bits."""
    model = gated()
    data = samples(model, 8)
    config = QConfig.of(preset).with_(target="stx", **settings)
    forecast = npu.deploy_forecast(model, "stx", config=config, data=data)
    with TemporaryDirectory() as folder:
        bundle = npu.deploy(
            model, data, Path(folder) / "b", "stx", config, min_sqnr=None
        )
    assert forecast.best.to_dict() == bundle.forecast.to_dict()
    assert len(forecast.best.placements) == count


def test_a_forecast_takes_one_format() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        npu.deploy_forecast(bounded(), "stx", kind="A8W8", config="A16W8")
    refused = npu.deploy_forecast(bounded(), "phx", config="A8W8")
    assert refused.legalized is None
    assert "config is A8W8, but phx" in refused.problem
    assert (
        "config is W8, but phx"
        in npu.deploy_forecast(bounded(), "phx", config="W8").problem
    )


@pytest.mark.parametrize(
    ("target", "kind"),
    [("phx", "XINT8")] + [("stx", kind) for kind in ("XINT8", "A8W8", "A16W8", "BF16")],
)
def test_legalization_costs_no_subgraph(target: str, kind: str) -> None:
    """The gates of HardSwish are written where they run on the processor, and only there."""
    forecast = npu.deploy_forecast(hard_swish(), target, kind=kind).best
    model = npu.legalize(hard_swish(), target, kind=kind).model
    kept = "HardSwish" in {node.op_type for node in model.graph.node}
    assert kept == ((target, kind) in (("stx", "XINT8"), ("stx", "BF16")))
    if kind == "BF16":  # HardSwish and HardSigmoid are on the CPU
        assert forecast.subgraphs == 3
    else:
        assert (forecast.share, forecast.subgraphs) == (1.0, 1)


def joined() -> ModelProto:
    """Two branches of unlike ranges that a Concat joins; a weight reaches its bound below zero."""
    low = weight(4, 3, 3, 3)
    low = np.where(low < 0, low / -low.min(), low / 4 / low.max()).astype(np.float32)
    same = "kernel_shape = [3, 3], pads = [1, 1, 1, 1]"
    return parse(
        f"""g (float[1,3,8,8] x) => (float[1,4,8,8] y) {{
            a = Conv <{same}> (x, w) b = Conv <{same}> (x, v) c = Sigmoid (b)
            d = Concat <axis = 1> (a, c) y = Conv <{POINT}> (d, u) }}""",
        w=low,
        v=3 * weight(4, 3, 3, 3, seed=1),
        u=weight(4, 8, 1, 1, seed=2),
    )


def test_16_bit_tensors_that_are_joined_have_one_scale() -> None:
    """As amd-quark's A16W8 has them; its A8W8 does not, whose range would lose a bit or more."""
    model = joined()
    found, sqnr = {}, {}
    for preset, target in (("A16W8", "stx"), ("A8W8", "stx"), ("A16W8", "")):
        config = QConfig.of(preset).with_(target=target)
        result = quantize(model, samples(model, 4), config)
        checked = npu.check(result.model, "stx").findings
        found[preset, target] = "S9" in {finding.rule for finding in checked}
        sqnr[preset, target] = result.report.worst_sqnr
    # The common scale costs nothing that the 8-bit weights do not hide.
    assert abs(sqnr["A16W8", "stx"] - sqnr["A16W8", ""]) < 0.2
    assert found == {
        ("A16W8", "stx"): False,
        ("A8W8", "stx"): False,
        ("A16W8", ""): True,
    }


def test_weights_of_the_engine_have_no_code_of_minus_128() -> None:
    model = joined()
    for target, rules in (("phx", set()), ("", {"S10"})):
        config = QConfig.of("XINT8").with_(target=target)
        quantized = quantize(model, samples(model, 4), config).model
        checked = npu.check(quantized, "phx").findings
        assert {finding.rule for finding in checked} & {"S10"} == rules


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_masks_branches_and_gates_are_taken(make: Factory) -> None:
    forecast = npu.deploy_forecast(make(), "stx", kind="A8W8")
    assert not forecast.problem
    assert (forecast.best.share, forecast.best.subgraphs) == (1.0, 1) or (
        make is fixed_branch and forecast.best.share > 0.9
    )
