"""join_time_steps: the steps of an unrolled cell have common ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.patterns.time_steps import time_steps
from quark_onnx.plan import Use
from tests.models import Feeds, normal, parse, run
from tests.pipeline import Stages
from tests.settings import TENSOR

STEPS, INPUTS, HIDDEN = 12, 16, 32
CONSTANTS: dict[str, Any] = {
    "w": normal(INPUTS, 3 * HIDDEN, seed=1, scale=INPUTS**-0.5),
    "r": normal(HIDDEN, 3 * HIDDEN, seed=2, scale=HIDDEN**-0.5),
    "b": normal(3 * HIDDEN, seed=3, scale=0.1),
    "fc": normal(HIDDEN, 8, seed=4, scale=HIDDEN**-0.5),
}


def gru_cell() -> ModelProto:
    """The operators of a GRUCell, written once per step, and a linear layer."""
    lines = list[str]()
    for step in range(STEPS):
        lines.append(
            f"""x{step} = Gather <axis = 1> (x, t{step})
            i{step} = Gemm (x{step}, w, b) g{step} = Gemm (h{step}, r)
            ir{step}, iz{step}, in{step} = Split <axis = 1> (i{step}, thirds)
            gr{step}, gz{step}, gn{step} = Split <axis = 1> (g{step}, thirds)
            sr{step} = Add (ir{step}, gr{step}) r{step} = Sigmoid (sr{step})
            sz{step} = Add (iz{step}, gz{step}) z{step} = Sigmoid (sz{step})
            rn{step} = Mul (r{step}, gn{step}) sn{step} = Add (in{step}, rn{step})
            n{step} = Tanh (sn{step}) d{step} = Sub (h{step}, n{step})
            k{step} = Mul (d{step}, z{step}) h{step + 1} = Add (n{step}, k{step})"""
        )
    times: dict[str, Any] = {f"t{step}": np.array(step) for step in range(STEPS)}
    return parse(
        f"g (float[1,{STEPS},{INPUTS}] x) => (float[1,8] y)"
        f"{{ {' '.join(lines)} y = MatMul (h{STEPS}, fc) }}",
        thirds=np.array([HIDDEN] * 3),
        h0=np.zeros((1, HIDDEN), np.float32),
        **times,
        **CONSTANTS,
    )


def in_float64(x: np.ndarray) -> np.ndarray:
    """The cell by its definition (torch.nn.GRUCell)."""
    w, r, b, fc = (CONSTANTS[name].astype(np.float64) for name in ("w", "r", "b", "fc"))
    hidden = np.zeros((1, HIDDEN))
    for step in range(STEPS):
        inner = np.split(x[:, step].astype(np.float64) @ w + b, 3, axis=1)
        state = np.split(hidden @ r, 3, axis=1)
        reset = 1 / (1 + np.exp(-inner[0] - state[0]))
        update = 1 / (1 + np.exp(-inner[1] - state[1]))
        new = np.tanh(inner[2] + reset * state[2])
        hidden = new + update * (hidden - new)
    return np.asarray(hidden @ fc)


def samples(count: int, seed: int) -> list[Feeds]:
    random = np.random.default_rng(seed)
    return [
        {"x": random.normal(size=(1, STEPS, INPUTS)).astype(np.float32)}
        for _ in range(count)
    ]


def test_groups_are_the_tensors_of_the_steps() -> None:
    groups = {frozenset(group) for group in time_steps(Graph.of(gru_cell()))}
    for name, first in (("sr", 0), ("n", 0), ("k", 0), ("x", 0), ("h", 1)):
        expected = {f"{name}{step}" for step in range(first, STEPS)}
        assert any(expected <= group for group in groups), name
    # Tensors of two roles are never in one group.
    for group in groups:
        assert len({name.rstrip("0123456789") for name in group}) == 1


def test_the_steps_have_the_union_of_their_ranges() -> None:
    stages = Stages.of(gru_cell(), TENSOR, samples(6, seed=0))
    joined = [stages.params.table[Use(f"sn{step}")] for step in range(STEPS)]
    assert all(params == joined[0] for params in joined)
    measured = [stages.ranges[Use(f"sn{step}")] for step in range(STEPS)]
    low = min(float(part.lo.min()) for part in measured)
    high = max(float(part.hi.max()) for part in measured)
    assert 255 * float(joined[0].scale) == pytest.approx(high - low, rel=0.02)


@pytest.fixture(scope="module")
def unseen() -> dict[str, float]:
    """SQNR in dB on samples that did not calibrate, by preset; judged in float64."""
    model, tests = gru_cell(), samples(64, seed=1)
    expected = np.concatenate([in_float64(feeds["x"]) for feeds in tests])
    results = np.concatenate([run(model, feeds)[0] for feeds in tests])
    np.testing.assert_allclose(results, expected, rtol=1e-3, atol=1e-5)
    sqnr = dict[str, float]()
    for preset in ("A16W8", "A8W8", "XINT8"):
        config = QConfig.of(preset)
        quantized = quantize(model, samples(8, seed=0), config).model
        results = np.concatenate([run(quantized, feeds)[0] for feeds in tests])
        noise = np.square(results - expected).sum()
        sqnr[preset] = float(10 * np.log10(np.square(expected).sum() / noise))
    return sqnr


@pytest.mark.parametrize(
    ("preset", "least"), [("A16W8", 36), ("A8W8", 31), ("XINT8", 28)]
)
def test_unseen_samples_are_not_clipped(
    unseen: dict[str, float], preset: str, least: float
) -> None:
    """A few samples show each step few extremes: A16W8 has 21 dB with ranges of single steps."""
    assert unseen[preset] > least


def test_a8w8_is_not_behind_xint8(unseen: dict[str, float]) -> None:
    """XINT8 rounds scales up to powers of two, which hides ranges that are too small."""
    assert unseen["A8W8"] >= unseen["XINT8"]


def heads() -> ModelProto:
    """A head that reads four feature maps: it shares weights, and is no cell."""
    return parse(
        """g (float[1,8] a, float[1,8] b, float[1,8] c, float[1,8] d)
        => (float[1,4] p, float[1,4] q, float[1,4] r, float[1,4] s)
        { p = MatMul (a, w) q = MatMul (b, w) r = MatMul (c, w) s = MatMul (d, w) }""",
        w=normal(8, 4),
    )


def test_heads_that_share_weights_are_no_time_steps() -> None:
    assert not time_steps(Graph.of(heads()))


def iteration(decay: float) -> ModelProto:
    """Five steps h = tanh(W h), of which the first has no bias and the others one of zeros.

    W is orthogonal times ``decay``, so that the values shrink by that factor from step to step.
    """
    lines = ["h1 = Gemm (x, w)"]
    for step in range(1, 5):
        lines.append(f"t{step} = Tanh (h{step}) h{step + 1} = Gemm (t{step}, w, zeros)")
    orthogonal, _ = np.linalg.qr(normal(16, 16))
    return parse(
        f"g (float[4,16] x) => (float[4,16] y) {{ {' '.join(lines)} y = Tanh (h5) }}",
        w=np.float32(decay) * orthogonal.astype(np.float32),
        zeros=np.zeros(16, np.float32),
    )


def test_a_step_may_lack_the_bias_of_the_others() -> None:
    groups = [set(group) for group in time_steps(Graph.of(iteration(1.0)))]
    assert {"h1", "h2", "h3", "h4", "h5"} in groups


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.2])
def test_values_that_shrink_from_step_to_step_keep_codes(decay: float) -> None:
    """With the range of the first step alone, nothing is left of the last one: 0 dB."""
    model = iteration(decay)
    random = np.random.default_rng(0)
    data = [{"x": random.normal(size=(4, 16)).astype(np.float32)} for _ in range(8)]
    quantized = quantize(model, data, "A8W8").model
    [expected], [found] = run(model, data[0]), run(quantized, data[0])
    noise = np.square(found - expected).sum() / np.square(expected).sum()
    assert -10 * np.log10(noise) > 20


def test_blocks_that_share_a_rotation_are_no_time_steps() -> None:
    """Each block has a weight of its own and the common weight."""
    lines, tensor = list[str](), "x"
    for index in range(6):
        lines += [
            f"r{index} = MatMul ({tensor}, rotation)",
            f"h{index} = MatMul (r{index}, w{index})",
        ]
        tensor = f"h{index}"
    weights = {f"w{index}": normal(8, 8, seed=index) for index in range(6)}
    graph = Graph.of(
        parse(
            "g (float[N,8] x) => (float[N,8] y) {"
            + "\n".join([*lines, f"y = Relu ({tensor})"])
            + "}",
            rotation=normal(8, 8, seed=9),
            **weights,
        )
    )
    assert time_steps(graph) == []
