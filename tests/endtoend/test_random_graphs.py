"""Random graphs, a thousand every night: each is quantized, checked and run, and what does not
matter changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuantizationSpec, quantize, quantize_static
from quark_onnx.npu import check
from tests.endtoend.random_graphs import draw, renamed, shuffled
from tests.settings import NIGHTLY

PRESETS = (
    "A8W8",
    "XINT8",
    "A16W8",
    "S8S8",
    "INT4",
    "DYNAMIC",
    "BF16",
    "BFP16",
    "FP8E4M3",
    "MXFP8E4M3",
)
#: All graphs, those for a target, and the number in one test.
GRAPHS, TARGETED, PART = (1000, 500, 50) if NIGHTLY else (200, 80, 20)
#: Presets whose sessions take ten times as long to open take every fourth of their graphs.
BLOCKS = ("BFP16", "MXFP8E4M3")


def config(preset: str) -> QConfig:
    return QConfig.of(preset).with_(search=0)  # which takes a second for each


def preset_for(seed: int) -> str:
    """The presets take turns; A8W8 takes the graphs that block formats leave."""
    preset = PRESETS[seed % len(PRESETS)]
    if preset in BLOCKS and seed // len(PRESETS) % 4:
        return "A8W8"
    return preset


def outputs(
    model: ModelProto, data: list[dict[str, Any]], *, optimize: bool = True
) -> list[Any]:
    session = open_session(model, optimize=optimize)
    return [value for sample in data for value in session.run(None, sample)]


@pytest.mark.parametrize("part", range(GRAPHS // PART))
def test_graphs_are_quantized_and_run(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        model, data = draw(seed)
        quantized = quantize_static(model, data, config(preset_for(seed)))
        onnx.checker.check_model(quantized, full_check=True)
        assert [v.name for v in quantized.graph.output] == [
            v.name for v in model.graph.output
        ]
        for before, after in zip(
            outputs(model, data), outputs(quantized, data), strict=True
        ):
            assert (
                before.shape == after.shape
                and before.dtype == after.dtype
                and np.isfinite(after).all()
            )


@pytest.mark.slow
def test_more_bits_are_better() -> None:
    mean = {}
    for bits in (4, 8, 16):
        weight = QuantizationSpec(f"int{bits}", per_channel=True)
        settings = QConfig(QuantizationSpec(f"uint{bits}", symmetric=False), weight)
        found = []
        for seed in range(2000, 2040):
            report = quantize(*draw(seed), settings).report
            found += [
                min(output.sqnr, 100.0)
                for output in report.outputs
                if output.sqnr is not None
            ]
        mean[bits] = float(np.mean(found))
    assert mean[16] > mean[8] + 20 > mean[4] + 30


@pytest.mark.parametrize(
    ("preset", "graphs"), [("A8W8", 15), ("XINT8", 15), ("INT4", 15), ("BFP16", 5)]
)
def test_names_and_order_do_not_matter(preset: str, graphs: int) -> None:
    for seed in range(3000, 3000 + graphs):
        model, data = draw(seed)
        expected = outputs(quantize_static(model, data, preset), data)
        for same in (renamed(model), shuffled(model, seed)):
            for a, b in zip(
                expected,
                outputs(quantize_static(same, data, preset), data),
                strict=True,
            ):
                np.testing.assert_array_equal(a, b)


def test_the_same_input_gives_the_same_bytes() -> None:
    for seed in range(4000, 4010):
        model, data = draw(seed)
        first, second = (
            quantize_static(model, data, PRESETS[seed % len(PRESETS)]) for _ in range(2)
        )
        assert first.SerializeToString() == second.SerializeToString()


@pytest.mark.parametrize("part", range(TARGETED // PART))
def test_nothing_that_is_made_for_a_target_breaks_its_rules(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        quantized = quantize_static(*draw(seed), config("XINT8").with_(target="stx"))
        assert [
            str(finding) for finding in check(quantized, "stx", kind="XINT8").findings
        ] == []
