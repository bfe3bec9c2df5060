"""The engine's slopes and gates: what becomes of them, and that the report says what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx import QConfig, npu, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.graph import Graph
from quark_onnx.optimizers import DPU
from tests.models import kinds, normal, parse, run, weight

TEXT = """g (float[N,4] x) => (float[N,4] y)
    { m = MatMul (x, w) a = LeakyRelu <alpha = 0.1> (m) s = Sigmoid (a) y = Mul (a, s) }"""


def test_slopes_and_gates_are_those_of_the_engine() -> None:
    graph = Graph.of(parse(TEXT, w=weight(4, 4)))
    assert DPU()(graph) == 2 and DPU()(graph) == 0
    model, x = graph.to_model(), normal(3, 4)
    assert kinds(model) == ["MatMul", "LeakyRelu", "HardSigmoid", "Mul"]
    m = x @ weight(4, 4)
    a = np.where(m > 0, m, m * 26 / 256)  # npu-reference: 0.1 is 26/256
    np.testing.assert_allclose(
        run(model, {"x": x})[0], a * np.clip(a / 6 + 0.5, 0, 1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"slopes": False}, 1), ({"gates": False}, 1), ({}, 2)],
    ids=str,
)
def test_settings(settings: dict[str, bool], count: int) -> None:
    assert DPU(**settings)(Graph.of(parse(TEXT, w=weight(4, 4)))) == count


def test_the_report_says_what_it_costs_and_the_checker_finds_nothing() -> None:
    data = [{"x": normal(1, 4, seed=seed)} for seed in range(16)]
    config = QConfig.of("XINT8").with_(target="stx", optimizers=("dpu",))
    made = quantize(parse(TEXT, w=weight(4, 4)), data, config)
    [note] = [note for note in made.report.notes if note.startswith("dpu")]
    assert note.startswith("dpu: 2; it changed the float model, whose outputs have ")
    assert (
        "HardSigmoid" in kinds(made.model) and not npu.check(made.model, "stx").findings
    )


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="gates of dpu is 3"):
        DPU(gates=3)  # type: ignore[arg-type]
