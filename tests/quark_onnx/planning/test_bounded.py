"""bounded: power-of-two scales of functions whose range is known, against errors that numpy
computes in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrators import (
    Grid,
    MinMax,
    MinMSE,
    QParams,
    Statistic,
    fake_quantize,
    params_for,
)
from calibrators.grid import Range
from quark_onnx import QConfig
from quark_onnx.plan import Use
from quark_onnx.planning.bounded import params
from quark_onnx.scales.apply_target_constraints import apply_target_constraints
from tests.cases import loop_over
from tests.models import Array, parse
from tests.pipeline import Stages
from tests.settings import POW2, SIGNED, TENSOR

GRIDS = {
    "int8": Grid(-128, 127, pow2=True),
    "uint8": Grid(0, 255, pow2=True),
    "uint8 with a free zero": Grid(0, 255, symmetric=False, pow2=True),
    "int16": Grid(-32768, 32767, pow2=True),
    "int4": Grid(-8, 7, pow2=True),
    "narrow int8": Grid(-127, 127, pow2=True),
}
#: The least power of two that covers the unit interval.
COVERING = {
    "int8": 2**-6,
    "uint8": 2**-6,
    "uint8 with a free zero": 2**-7,
    "int16": 2**-14,
    "int4": 2**-2,
    "narrow int8": 2**-6,
}
every_grid = pytest.mark.parametrize("name", GRIDS)
RANDOM = np.random.default_rng(0)


def found(values: Array) -> object:
    statistic = MinMSE().statistic()
    statistic.observe(np.float32(values).reshape(1, -1))
    return statistic


def error(values: Array, scale: float, grid: Grid) -> float:
    """The sum of squares, by the definition of QuantizeLinear in float64."""
    zero = grid.zero if grid.symmetric else grid.qmin
    codes = np.clip(np.rint(values / scale) + zero, grid.qmin, grid.qmax)
    return float(np.square((codes - zero) * scale - values).sum())


def saturating(share: float) -> Array:
    """So much of a gate that is open, and the rest spread evenly."""
    spread = RANDOM.random(20000)
    return np.where(np.arange(20000) < share * 20000, 1.0, spread)


@every_grid
def test_without_data_the_codes_may_end_a_step_before_the_bound(name: str) -> None:
    assert params((0.0, 1.0), None, GRIDS[name]).scale == COVERING[name] / 2
    both = params((-1.0, 1.0), None, GRIDS[name])
    free = 2 if name == "uint8 with a free zero" else 1
    assert both.scale == COVERING[name] / 2 * free
    assert free == 1 or both.zero_point == 128


@every_grid
@loop_over("share", [0, 0.05, 0.1, 0.3, 0.6, 1])
def test_the_scale_of_less_error_is_taken(name: str, share: float) -> None:
    values, grid = saturating(share), GRIDS[name]
    chosen = float(params((0.0, 1.0), found(values), grid).scale)  # type: ignore[arg-type]
    errors = {
        scale: error(values, scale, grid)
        for scale in (COVERING[name], COVERING[name] / 2)
    }
    assert chosen == min(errors, key=errors.__getitem__)


def test_the_share_from_which_saturation_costs_more() -> None:
    """A fifth, where the rest is spread evenly over the steps."""
    for share, scale in ((0.19, 2**-7), (0.21, 2**-6)):
        assert (
            params((0.0, 1.0), found(saturating(share)), GRIDS["int8"]).scale == scale
        )  # type: ignore[arg-type]


@every_grid
@given(
    x=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20), both=st.booleans()
)
def test_no_value_is_further_off_than_half_a_step_of_the_covering_scale(
    name: str, x: list[float], both: bool
) -> None:
    bounds = (-1.0, 1.0) if both else (0.0, 1.0)
    values = np.clip(np.float32(x), *bounds)
    covering = params_for(Range(*bounds), GRIDS[name]).scale
    left = fake_quantize(values, params(bounds, None, GRIDS[name]), GRIDS[name])
    assert np.abs(left - values).max() <= covering / 2


@pytest.mark.parametrize(
    "grid", [Grid(-128, 127), Grid(0, 255, symmetric=False), Grid(-8, 7)], ids=str
)
def test_float_scales_cover_the_bounds(grid: Grid) -> None:
    for bounds in ((0.0, 1.0), (-1.0, 1.0)):
        assert params(bounds, None, grid) == params_for(Range(*bounds), grid)


def reach(params: QParams, grid: Grid) -> tuple[float, float]:
    """The least and the greatest value that there are codes for."""
    ends = np.float64([grid.qmin, grid.qmax])
    low, high = (ends - float(params.zero_point)) * float(params.scale)
    return low, high


@given(
    low=st.floats(-1, 1, width=32), width=st.floats(0, 1, width=32), both=st.booleans()
)
def test_unused_ends_of_known_bounds_get_few_codes(
    low: float, width: float, both: bool
) -> None:
    """All that was measured has codes, and no more than a margin of a half beyond it."""
    low = low if both else abs(low)
    high = min(low + width, 1.0)
    grid = Grid(0, 255, symmetric=False)
    chosen = params((-1.0 if both else 0.0, 1.0), extremes([low, high]), grid)
    step = float(chosen.scale)
    least, greatest = reach(chosen, grid)
    assert least <= min(low, 0.0) + step / 2
    assert greatest >= max(high, 0.0) - step / 2
    assert least >= 1.5 * min(low, 0.0) - step - 2**-12
    assert greatest <= 1.5 * max(high, 0.0) + step + 2**-12


def extremes(values: list[float]) -> Statistic:
    statistic = MinMax().statistic()
    statistic.observe(np.float32(values).reshape(1, -1))
    return statistic


def test_a_decomposed_mish_spends_no_code_on_a_negative_tanh() -> None:
    model = parse(
        """g (float[1,64] x) => (float[1,64] y)
        { s = Softplus (x) t = Tanh (s) y = Mul (x, t) }"""
    )
    data = [
        {"x": RANDOM.normal(scale=3.0, size=(1, 64)).astype(np.float32)}
        for _ in range(8)
    ]
    tanh = Stages.of(model, TENSOR, data).params.table[Use("t")]
    assert tanh.zero_point == 0 and tanh.scale == pytest.approx(1 / 255, rel=1e-3)


@pytest.mark.parametrize(
    "op", ["Sigmoid", "HardSigmoid", "Tanh", "Softsign", "Softmax", "LpNormalization"]
)
def test_all_functions_with_bounds_use_all_codes(op: str) -> None:
    model = parse(f"g (float[1,64] x) => (float[1,64] y) {{ y = {op} (x) }}")
    spread = {"Softmax": 12.0, "HardSigmoid": 1.5}.get(op, 3.0)
    data = [
        {"x": (spread * RANDOM.normal(size=(1, 64))).astype(np.float32)}
        for _ in range(8)
    ]
    if op == "LpNormalization":
        data[0]["x"] = np.full((1, 64), 0.01, np.float32)
        data[0]["x"][0, 0] = 3.0  # a vector that is almost an axis
        data[1]["x"] = -data[0]["x"]
    assert Stages.of(model, POW2, data).params.table[Use("y")].scale == 2**-7
    for config, steps in ((SIGNED, 127), (TENSOR, 255)):
        scale = Stages.of(model, config, data).params.table[Use("y")].scale
        wide = (
            1 if op in ("Sigmoid", "HardSigmoid", "Softmax") or config is SIGNED else 2
        )
        assert scale == pytest.approx(wide / steps)


def test_a_gate_that_is_open_or_shut_keeps_its_ends_but_where_the_target_has_a_rule() -> (
    None
):
    """C9: the engine computes HardSigmoid with at least seven fraction bits."""
    model = parse(
        "g (float[1,64] x) => (float[1,64] y) { y = HardSigmoid <alpha = 0.16666667,"
        " beta = 0.5> (x) }"
    )
    data = [
        {"x": np.where(RANDOM.random((1, 64)) < 0.5, -6, 6).astype(np.float32)}
        for _ in range(4)
    ]
    assert Stages.of(model, POW2, data).params.table[Use("y")].scale == 2**-6
    stages = Stages.of(model, QConfig.of("XINT8").with_(search=0, target="npu"), data)
    apply_target_constraints(stages.limits, stages.params)
    assert stages.params.table[Use("y")].scale == 2**-7
