"""Promises between the commands: a forecast is that of the file that deploy writes or refuses."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from onnx import ModelProto

from quark_onnx import npu
from quark_onnx.common.errors import QuarkError
from tests.cases import loop_over
from tests.models import MODELS, Factory, parse, samples, weight

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


OWN = {"mask": mask, "fixed_branch": fixed_branch, "hard_swish": hard_swish}


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


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_masks_branches_and_gates_are_taken(make: Factory) -> None:
    forecast = npu.deploy_forecast(make(), "stx", kind="A8W8")
    assert not forecast.problem
    assert (forecast.best.share, forecast.best.subgraphs) == (1.0, 1) or (
        make is fixed_branch and forecast.best.share > 0.9
    )
