"""What every result promises: lines for people, and a JSON document for programs."""

from __future__ import annotations

import inspect
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from quark_onnx import QConfig, analysis, npu, quantize
from quark_onnx.page.blocks import Judgement
from quark_onnx.page.browser import render_page
from quark_onnx.page.reported import Reported
from quark_onnx.search.candidate import Candidate
from quark_onnx.search.result import SearchResult
from quark_onnx.study.record import Record
from quark_onnx.torch.validate.finding import Validation
from quark_onnx.torch.validate.repair import Repair
from tests.browser import check_alone
from tests.models import conv_relu, samples

TORCH = find_spec("torch") is not None


@cache
def results() -> tuple[Reported, ...]:
    """A result of every class."""
    model = conv_relu()
    data = samples(model, 8)
    quantized = quantize(model, data, "A8W8")
    candidate = Candidate(40.0, 0.5, 900, name="A8W8", config=QConfig.of("A8W8"))
    found: list[Reported] = [
        quantized.report,
        analysis.compare(model, quantized.model, data, time=True),
        analysis.analyze(model, quantized.model, data),
        analysis.quantize_to_accuracy(model, data, "10dB"),
        SearchResult([candidate], 6, 2, ["XINT8"], 2, False, None),  # type: ignore[arg-type]
        npu.check(quantized.model, "stx"),
        npu.preflight(model, "stx"),
        npu.deploy_forecast(model, "stx"),
        npu.legalize(model),
        npu.cut(model),
        npu.Scored({"NPU": (3, 2)}, 3, (("relu", "Relu", "NPU", "CPU"),)),
    ]
    with TemporaryDirectory() as folder:
        bundle = npu.deploy(model, data, Path(folder) / "bundle", min_sqnr=None)
    validation = Validation("out", "vllm", "vLLM 0.11", "quark", {"int4": 1}, (), ())
    repaired = Repair(None, ("the index says where each tensor is",), validation)
    found += [bundle, validation, repaired]
    if TORCH:
        found += torch_results()
    return tuple(found)


def torch_results() -> list[Reported]:
    from quark_onnx.torch.algorithms.base import Outcome
    from quark_onnx.torch.config.schemes import scheme
    from quark_onnx.torch.pipelines.estimate import Estimate
    from quark_onnx.torch.pipelines.ptq import PtqResult
    from quark_onnx.torch.pipelines.report import TorchReport
    from quark_onnx.torch.pipelines.scheme_search import (
        SchemeCombination,
        SchemeSearchResult,
        TriedScheme,
    )
    from quark_onnx.torch.pipelines.verdict import CheckpointVerdict

    report = TorchReport(
        {"q_proj": scheme("int4_wo_32")},
        {"lm_head": "excluded"},
        outcomes=[Outcome("q_proj", "gptq", 0.2, 0.1)],
    )
    loss = CheckpointVerdict(
        8 << 20, 2 << 20, 4 << 20, "of the data", 64, 0.01, 5.0, 5.1
    )
    result = PtqResult(report, Estimate(1 << 30, 1 << 20), 5.0, 5.1, loss)
    candidate = SchemeCombination("int4_wo_32")
    trial = TriedScheme(candidate, Record(-0.05, 20.0, 2 << 20), 4.5)
    search = SchemeSearchResult((trial,), candidate, (), 5.0)
    return [report, loss, result, search]


def classes() -> list[type[Reported]]:
    """Every class of results outside of tests."""
    results()
    found = list[type[Reported]]()
    waiting = [Reported]
    while waiting:
        subclasses = waiting.pop().__subclasses__()
        waiting += subclasses
        found += [each for each in subclasses if "quark_onnx" in each.__module__]
    return found


def test_every_class_of_results_is_tested() -> None:
    names = {f"{each.__module__}.{each.__name__}" for each in classes()}
    tested = {f"{type(each).__module__}.{type(each).__name__}" for each in results()}
    assert names == tested


def test_lines_are_the_text() -> None:
    for result in results():
        lines = result.lines()
        assert lines and all(line and "\n" not in line for line in lines), lines
        assert str(result) == "\n".join(lines)


def test_every_result_is_a_page() -> None:
    for result in results():
        check_alone(render_page("result", result.blocks()))


def test_a_verdict_is_the_end() -> None:
    """Of the text, with the actions that it leads to; a result may have two verdicts."""
    for result in results():
        starts = [line[:9].strip() for line in result.lines()]
        if "verdict" in starts:
            end = starts[starts.index("verdict") :]
            assert set(end) <= {"verdict", "", "try"}, result.lines()
        judged = [block for block in result.blocks() if isinstance(block, Judgement)]
        assert starts.count("verdict") == len(judged)


def test_the_document_is_json() -> None:
    for result in results():
        document = json.loads(result.to_json())
        assert document["schema"] == 1
        assert document.keys() - {"schema"} == result.to_dict().keys() - {"schema"}
        assert result.to_json() == result.to_json()


def test_every_class_is_documented() -> None:
    for each in classes():
        assert (inspect.getdoc(each) or "").partition("\n")[0].endswith(".")


@pytest.mark.parametrize("method", ["blocks", "lines", "to_dict"])
def test_the_base_has_no_content(method: str) -> None:
    result: Any = Reported()
    with pytest.raises(NotImplementedError):
        getattr(result, method)()
