"""A thousand random graphs: each is quantized, checked and run, and what does not matter changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from calibrators.session import open_session
from quark_onnx import QConfig, QuantizationSpec, quantize, quantize_static
from quark_onnx.npu import check
from quark_onnx.steps import trial
from quark_onnx.steps.trial import Probe
from tests.endtoend.random_graphs import draw, renamed, shuffled

PRESETS = ("A8W8", "XINT8", "A16W8", "S8S8", "INT4", "DYNAMIC", "BF16", "BFP16", "FP8E4M3", "MXFP8E4M3")
GRAPHS, PART = 1000, 50


def config(preset: str) -> QConfig:
    return QConfig.of(preset).with_(search=0)  # which takes a second for each


def outputs(model: ModelProto, data: list[dict[str, Any]], *, optimize: bool = True) -> list[Any]:
    session = open_session(model, optimize=optimize)
    return [value for sample in data for value in session.run(None, sample)]


@pytest.mark.parametrize("part", range(GRAPHS // PART))
def test_graphs_are_quantized_and_run(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        model, data = draw(seed)
        quantized = quantize_static(model, data, config(PRESETS[seed % len(PRESETS)]))
        onnx.checker.check_model(quantized, full_check=True)
        assert [v.name for v in quantized.graph.output] == [v.name for v in model.graph.output]
        for before, after in zip(outputs(model, data), outputs(quantized, data), strict=True):
            assert before.shape == after.shape and before.dtype == after.dtype and np.isfinite(after).all()


def test_more_bits_are_better() -> None:
    mean = {}
    for bits in (4, 8, 16):
        weight = QuantizationSpec(f"int{bits}", per_channel=True)
        settings = QConfig(QuantizationSpec(f"uint{bits}", symmetric=False), weight)
        found = []
        for seed in range(2000, 2040):
            report = quantize(*draw(seed), settings).report
            found += [min(output.sqnr, 100.0) for output in report.outputs if output.sqnr is not None]
        mean[bits] = float(np.mean(found))
    assert mean[16] > mean[8] + 20 > mean[4] + 30


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "INT4", "BFP16"])
def test_names_and_order_do_not_matter(preset: str) -> None:
    for seed in range(3000, 3015):
        model, data = draw(seed)
        expected = outputs(quantize_static(model, data, preset), data)
        for same in (renamed(model), shuffled(model, seed)):
            for a, b in zip(expected, outputs(quantize_static(same, data, preset), data), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("preset", "target"), [("XINT8", ""), ("XINT8", "stx"), ("A8W8", ""), ("A16W8", "")])
def test_a_search_in_parts_sees_what_the_whole_model_does(
    preset: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: onnxruntime must round in each part as it does in the whole, biases as well."""
    noise, seen = Probe.noise, [0, 0]

    def both(self: Probe, scales: Any, best: list[float]) -> list[float]:
        found, stage = noise(self, scales, best), self._stage
        self._stage = self._whole
        assert noise(self, scales, best) == found
        self._stage = stage
        seen[stage is not self._whole] += 1
        return found

    monkeypatch.setattr(trial, "_WORTH", 0)
    monkeypatch.setattr(Probe, "noise", both)
    for seed in range(5000, 5010):
        quantize(*draw(seed), QConfig.of(preset).with_(search=3, target=target))
    assert seen[True] > 3 * seen[False] > 0


def test_the_same_input_gives_the_same_bytes() -> None:
    for seed in range(4000, 4010):
        model, data = draw(seed)
        first, second = (quantize_static(model, data, PRESETS[seed % len(PRESETS)]) for _ in range(2))
        assert first.SerializeToString() == second.SerializeToString()


@pytest.mark.parametrize("part", range(500 // PART))
def test_nothing_that_is_made_for_a_target_breaks_its_rules(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        quantized = quantize_static(*draw(seed), config("XINT8").with_(target="stx"))
        assert [str(finding) for finding in check(quantized, "stx", kind="XINT8").findings] == []
