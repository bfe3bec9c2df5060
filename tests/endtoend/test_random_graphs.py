"""A thousand random graphs: each is quantized, checked and run, and what does not matter changes
nothing.
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
from quark_onnx.steps import scale_trials
from quark_onnx.steps.scale_trials import ScaleTrial
from tests.endtoend.random_graphs import draw, renamed, shuffled
from tests.models import normal, parse, weight

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
GRAPHS, PART = 1000, 50


def config(preset: str) -> QConfig:
    return QConfig.of(preset).with_(search=0)  # which takes a second for each


def outputs(
    model: ModelProto, data: list[dict[str, Any]], *, optimize: bool = True
) -> list[Any]:
    session = open_session(model, optimize=optimize)
    return [value for sample in data for value in session.run(None, sample)]


@pytest.mark.parametrize("part", range(GRAPHS // PART))
def test_graphs_are_quantized_and_run(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        model, data = draw(seed)
        quantized = quantize_static(model, data, config(PRESETS[seed % len(PRESETS)]))
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


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "INT4", "BFP16"])
def test_names_and_order_do_not_matter(preset: str) -> None:
    for seed in range(3000, 3015):
        model, data = draw(seed)
        expected = outputs(quantize_static(model, data, preset), data)
        for same in (renamed(model), shuffled(model, seed)):
            for a, b in zip(
                expected,
                outputs(quantize_static(same, data, preset), data),
                strict=True,
            ):
                np.testing.assert_array_equal(a, b)


def attention() -> ModelProto:
    """A block with biases behind its products, and GELU in parts."""
    return parse(
        """g (float[N,7,16] x) => (float[N,7,16] y) {
            q0 = MatMul (x, wq) q = Add (q0, b) k0 = MatMul (x, wk) k = Add (k0, b) v0 = MatMul (x, wv) v = Add (v0, b)
            t = Transpose <perm = [0,2,1]> (k) s0 = MatMul (q, t) s = Mul (s0, quarter) p = Softmax <axis = -1> (s)
            o = MatMul (p, v) o1 = MatMul (o, wo) o2 = Add (o1, b) h = Add (o2, x)
            n = LayerNormalization <axis = -1> (h, ones, b) f0 = MatMul (n, wf) f = Add (f0, c) e0 = Div (f, root)
            e1 = Erf (e0) e2 = Add (e1, one) e3 = Mul (f, e2) e = Mul (e3, half) z0 = MatMul (e, wz) z1 = Add (z0, b)
            z = Add (z1, n) y = LayerNormalization <axis = -1> (z, ones, b)
        }""",  # noqa: E501
        **{f"w{name}": weight(16, 16, seed=place) for place, name in enumerate("qkvo")},
        wf=weight(16, 32),
        wz=weight(32, 16),
        b=normal(16),
        c=normal(32),
        ones=np.ones(16, np.float32),
        **{
            n: np.float32(v)
            for n, v in (("quarter", 0.25), ("root", 2**0.5), ("one", 1), ("half", 0.5))
        },
    )


def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every search be one in parts that is compared with the whole.

    Trials on the whole and in parts so far.
    """
    noise, seen = ScaleTrial.noise, [0, 0]

    def both(self: ScaleTrial, scales: Any, best: list[float]) -> list[float]:
        found, stage = noise(self, scales, best), self._stage
        self._stage = self._whole
        assert noise(self, scales, best) == found
        self._stage = stage
        seen[stage is not self._whole] += 1
        return found

    monkeypatch.setattr(scale_trials, "_WORTH", 0)
    monkeypatch.setattr(ScaleTrial, "noise", both)
    return seen


def test_the_same_input_gives_the_same_bytes() -> None:
    for seed in range(4000, 4010):
        model, data = draw(seed)
        first, second = (
            quantize_static(model, data, PRESETS[seed % len(PRESETS)]) for _ in range(2)
        )
        assert first.SerializeToString() == second.SerializeToString()


@pytest.mark.parametrize("part", range(500 // PART))
def test_nothing_that_is_made_for_a_target_breaks_its_rules(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        quantized = quantize_static(*draw(seed), config("XINT8").with_(target="stx"))
        assert [
            str(finding) for finding in check(quantized, "stx", kind="XINT8").findings
        ] == []
