"""The verdict on two files and samples is the same from every command."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import analyze, compare, npu, quantize
from quark_onnx.common.errors import ModelError
from quark_onnx.measuring.held_out import is_held_out
from quark_onnx.page.browser import render_page
from quark_onnx.report.verdict import Verdict
from quark_onnx.search.search import Search
from tests.models import Feeds, normal, parse, weight

#: Vectors of three values with a large constant part.
OFFSET = parse(
    """g (float[N, 6] x) => (float[N, 3] y) {
        a = MatMul (x, w1) r = Relu (a) b = MatMul (r, w2) y = Add (b, c)
    }""",
    w1=weight(6, 8),
    w2=weight(8, 3, seed=1),
    c=np.float32([40, -20, 30]),
)
#: A classifier of ten classes.
CLASSES = parse(
    """g (float[N, 6] x) => (float[N, 10] y) {
        a = MatMul (x, w1) r = Relu (a) b = MatMul (r, w2) y = Softmax (b)
    }""",
    w1=weight(6, 8),
    w2=weight(8, 10, seed=1),
)
#: Decisions at every step of a signal.
STEPS = parse(
    """g (float[N, 6] x) => (float[N, 9] y) {
        a = MatMul (x, w1) r = Relu (a) b = MatMul (r, w2) y = Sigmoid (b)
    }""",
    w1=weight(6, 8),
    w2=weight(8, 9, seed=1),
)
#: A recurrent layer.
STATE = parse(
    """g (float[1, 6] x, float[1, 8] h_in) => (float[1, 3] y, float[1, 8] h_out) {
        a = MatMul (x, w) b = MatMul (h_in, u) s = Add (a, b) h_out = Tanh (s)
        y = MatMul (h_out, v)
    }""",
    w=weight(6, 8),
    u=weight(8, 8),
    v=weight(8, 3),
)


def drawn(count: int, seed: int = 0) -> list[Feeds]:
    return [{"x": normal(1, 6, seed=1000 * seed + place)} for place in range(count)]


def held_out(samples: list[Feeds]) -> list[Feeds]:
    return [sample for place, sample in enumerate(samples) if is_held_out(place)]


def said(verdict: Verdict | None) -> tuple[Any, ...]:
    """What a verdict says, without what to try next."""
    assert verdict is not None
    return verdict.task, verdict.band, verdict.sentence, verdict.figures


@pytest.mark.parametrize("model", [OFFSET, CLASSES, STEPS])
@pytest.mark.parametrize("count", [64, 40])
def test_quantize_compare_and_analyze_agree(model: ModelProto, count: int) -> None:
    data = drawn(count)
    result = quantize(model, data, "A8W8")
    judges = held_out(data)
    expected = said(result.report.verdict)
    compared = compare(model, result.model, judges)
    analyzed = analyze(model, result.model, judges)
    # A verdict of few samples says how many are needed, which depends on what is held out.
    if count == 64:
        assert expected == said(compared.verdict)
    assert expected[1] == said(compared.verdict)[1]
    assert said(compared.verdict) == said(analyzed.verdict)
    assert compared.outputs == analyzed.outputs == result.report.outputs
    page = render_page("analysis", analyzed.blocks())
    assert f'class="verdict {expected[1]}"' in page
    assert analyzed.verdict is not None
    assert escape(analyzed.verdict.sentence[1:]) in page


def test_without_a_verdict_the_model_is_the_same() -> None:
    """What is left out is the judgement of the task, and the check of the preprocessing."""
    model = ModelProto()
    model.CopyFrom(CLASSES)
    # The same class for every input looks like wrong preprocessing.
    model.graph.initializer[1].raw_data = bytes(4 * 8 * 10)
    judged, plain = (
        quantize(model, drawn(64), "A8W8", verdict=verdict) for verdict in (True, False)
    )
    assert plain.model == judged.model
    assert plain.report.outputs == judged.report.outputs
    assert judged.report.verdict is not None and judged.report.warnings
    assert plain.report.verdict is None and not plain.report.warnings
    assert "verdict   unknown: left out" in str(plain.report)
    assert repr(plain).endswith("verdict left out")


def test_states_are_fed_back_by_every_command() -> None:
    data = [
        {"x": normal(1, 6, seed=place), "h_in": np.zeros((1, 8), np.float32)}
        for place in range(80)
    ]
    result = quantize(STATE, data, "A8W8")
    report = result.report
    judges = data[10 : 10 + report.held_out]
    compared = compare(STATE, result.model, judges)
    assert [error.steps for error in compared.outputs] == [0, 0, 18, 18]
    assert said(compared.verdict) == said(report.verdict)
    assert said(analyze(STATE, result.model, judges).verdict) == said(report.verdict)


def test_search_judges_its_best_candidate_alike(tmp_path: Path) -> None:
    data = drawn(64)
    space = {"presets": ["A8W8"], "calibrators": [], "optimizers": []}
    with Search(OFFSET, data, space=space) as running:
        found = running.run()
        running.write(found.best, tmp_path / "best.onnx")
    judges = [sample for place, sample in enumerate(data) if place % 4 == 1]
    compared = compare(OFFSET, tmp_path / "best.onnx", judges)
    assert said(found.verdict) == said(compared.verdict)
    assert found.verdict is not None
    page = render_page("search", found.blocks())
    assert f'class="verdict {found.verdict.band}"' in page
    assert escape(found.verdict.sentence) in page
    assert found.to_dict()["verdict"]["band"] == found.verdict.band


def test_deploy_judges_alike(tmp_path: Path) -> None:
    model = parse(
        """g (float[1, 3, 16, 16] x) => (float[1, 10] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) p = GlobalAveragePool (r)
            f = Flatten (p) y = Gemm (f, v)
        }""",
        w=weight(8, 3, 3, 3),
        b=np.linspace(-1, 1, 8, dtype=np.float32),
        v=weight(8, 10, seed=1),
    )
    onnx.save(model, tmp_path / "model.onnx")
    data = [{"x": normal(1, 3, 16, 16, seed=place)} for place in range(64)]
    bundle = npu.deploy(tmp_path / "model.onnx", data, tmp_path / "out", target="stx")
    assert bundle.report is not None
    (written,) = [
        path for path in (tmp_path / "out").glob("*.onnx") if "float" not in path.name
    ]
    compared = compare(model, written, held_out(data))
    assert said(bundle.report.verdict)[:2] == said(compared.verdict)[:2]


def test_swapped_models_are_noticed() -> None:
    result = quantize(OFFSET, drawn(16), "A8W8")
    with pytest.raises(ModelError, match=r"the float model comes first; swap the two"):
        compare(result.model, OFFSET, drawn(4))
    # Two quantized models can be compared.
    assert compare(result.model, result.model, drawn(4)).sqnr == np.inf


@pytest.mark.parametrize("count", [32, 100])
def test_a_constant_part_does_not_make_a_model_good(count: int) -> None:
    """Errors of a tenth of what varies are a thousandth of the whole."""
    result = quantize(OFFSET, drawn(count), "A8W8")
    verdict = result.report.verdict
    assert verdict is not None
    (output,) = result.report.outputs
    assert output.sqnr is not None and output.varying is not None
    assert output.sqnr > output.varying + 20
    assert verdict.figures[0].value == output.varying
