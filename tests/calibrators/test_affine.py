"""Scales, zero points and codes against onnxruntime, ONNX's reference evaluator, and exact
arithmetic.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from calibrators import (
    Grid,
    QParams,
    Range,
    covered,
    dequantize,
    fake_quantize,
    params_for,
    quantize,
    rows,
)
from tests.cases import loop_over

EXAMPLES = settings(deadline=None, derandomize=True)
FEW = settings(EXAMPLES, max_examples=30)

F32 = np.finfo(np.float32)
TYPES = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "uint16": (0, 65535),
}
GRIDS = [
    Grid(*codes, symmetric=symmetric, pow2=pow2)
    for codes in (*TYPES.values(), (-127, 127), (-8, 7), (0, 15), (-2, 1), (0, 3))
    for symmetric in (True, False)
    for pow2 in (False, True)
]


def label(grid: Grid) -> str:
    words = (
        f"{grid.qmin}..{grid.qmax}",
        "symmetric" if grid.symmetric else "",
        "pow2" if grid.pow2 else "",
    )
    return " ".join(filter(None, words))


FREE = [grid for grid in GRIDS if not grid.symmetric]
MIDDLE = [grid for grid in GRIDS if grid.symmetric]

types = st.sampled_from(sorted(TYPES))
grids = st.sampled_from(GRIDS)
reals = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-1e6, 1e6, width=32)
scales = st.floats(2.0**-60, 2.0**60, width=32)


@st.composite
def ranges(
    draw: st.DrawFn, rows: int = 1, ends: st.SearchStrategy[float] = moderate
) -> Range:
    values = np.sort(
        draw(arrays(np.float32, (2, rows), elements=ends)).astype(np.float64), axis=0
    )
    return Range(values[0], values[1])


def qdq(kind: str, axis: int) -> onnx.ModelProto:
    """A float tensor, its codes, and the reals the codes stand for."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    qdq (float[] x, float[] scale, {kind}[] zero) => ({kind}[] codes, float[] reals) {{
      codes = QuantizeLinear <axis = {axis}> (x, scale, zero)
      reals = DequantizeLinear <axis = {axis}> (codes, scale, zero)
    }}"""
    return onnx.parser.parse_model(text)


@functools.cache
def runtime(kind: str, axis: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(
        qdq(kind, axis).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def feeds(
    x: NDArray[np.float32], params: QParams, kind: str
) -> dict[str, NDArray[Any]]:
    return {"x": x, "scale": params.scale, "zero": params.zero_point.astype(kind)}


def agrees_with_onnxruntime(x: NDArray[np.float32], params: QParams, kind: str) -> None:
    codes, reals = runtime(kind, params.axis or 0).run(None, feeds(x, params, kind))
    ours = quantize(x, params, Grid(*TYPES[kind]))
    np.testing.assert_array_equal(ours, codes.astype(np.int64))
    np.testing.assert_array_equal(dequantize(ours, params), reals)


def fixed(scale: float, zero: int) -> QParams:
    return QParams(np.array(scale, np.float32), np.array(zero, np.int64))


# Codes and reals


@given(types, arrays(np.float32, (3, 4), elements=reals | moderate), scales, st.data())
@EXAMPLES
def test_per_tensor_as_onnxruntime(
    kind: str, x: NDArray[np.float32], scale: float, data: st.DataObject
) -> None:
    agrees_with_onnxruntime(x, fixed(scale, data.draw(st.integers(*TYPES[kind]))), kind)


@given(
    types,
    arrays(np.float32, (2, 3, 4), elements=reals | moderate),
    st.integers(0, 2),
    st.data(),
)
@EXAMPLES
def test_per_axis_as_onnxruntime(
    kind: str, x: NDArray[np.float32], axis: int, data: st.DataObject
) -> None:
    scale = data.draw(arrays(np.float32, x.shape[axis], elements=scales))
    zero = data.draw(
        arrays(np.int64, x.shape[axis], elements=st.integers(*TYPES[kind]))
    )
    agrees_with_onnxruntime(x, QParams(scale, zero, axis), kind)


@given(
    types,
    arrays(np.float32, (2, 3, 4), elements=moderate),
    st.integers(0, 2),
    st.data(),
)
@FEW
def test_per_axis_as_the_reference(
    kind: str, x: NDArray[np.float32], axis: int, data: st.DataObject
) -> None:
    scale = data.draw(
        arrays(
            np.float32, x.shape[axis], elements=st.floats(2.0**-10, 2.0**10, width=32)
        )
    )
    zero = data.draw(
        arrays(np.int64, x.shape[axis], elements=st.integers(*TYPES[kind]))
    )
    params = QParams(scale, zero, axis)
    codes, reals = ReferenceEvaluator(qdq(kind, axis)).run(None, feeds(x, params, kind))
    np.testing.assert_array_equal(
        quantize(x, params, Grid(*TYPES[kind])), codes.astype(np.int64)
    )
    np.testing.assert_array_equal(fake_quantize(x, params, Grid(*TYPES[kind])), reals)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", TYPES)
def test_every_tie_and_saturation_as_onnxruntime(kind: str, share: float) -> None:
    qmin, qmax = TYPES[kind]
    halves = (
        np.arange(2 * (qmin - qmax) - 9, 2 * (qmax - qmin) + 9, dtype=np.float32) / 2
    )  # ..., -0.5, 0, 0.5, 1, ...
    zero = qmin + round(share * (qmax - qmin))
    for scale in (1.0, 2.0**-7, 0.1):
        x = np.float32(halves * np.float32(scale))
        agrees_with_onnxruntime(x, fixed(scale, zero), kind)
        agrees_with_onnxruntime(
            np.nextafter(x, np.float32(np.inf)), fixed(scale, zero), kind
        )


def test_ties_go_to_even_before_the_zero_point_is_added() -> None:
    x = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert quantize(x, fixed(1, 3), Grid(-128, 127)).tolist() == [1, 1, 3, 3, 5, 5]


def test_codes_saturate_at_the_grid_not_at_the_type() -> None:
    x = np.float32([-9e9, -7.6, 7.6, 9e9, np.inf, -np.inf])
    assert quantize(x, fixed(1, 0), Grid(-7, 6)).tolist() == [-7, -7, 6, 6, 6, -7]


@given(st.lists(reals, min_size=1), scales, st.integers(-128, 127))
@EXAMPLES
def test_codes_rise_with_the_reals(x: list[float], scale: float, zero: int) -> None:
    codes = quantize(np.sort(np.float32(x)), fixed(scale, zero), Grid(-128, 127))
    assert (np.diff(codes) >= 0).all()


@given(grids, ranges())
@EXAMPLES
def test_what_is_on_the_grid_stays(grid: Grid, range_: Range) -> None:
    params, codes = (
        params_for(range_, grid),
        np.unique(np.linspace(grid.qmin, grid.qmax, 999).astype(np.int64)),
    )
    np.testing.assert_array_equal(
        quantize(dequantize(codes, params), params, grid), codes
    )


def test_the_arrays_handed_in_are_not_changed() -> None:
    x, scale, zero = np.float32([[0.3, 9.0]]), np.float32([1, 2]), np.int64([3, 4])
    for array in (x, scale, zero):
        array.setflags(write=False)
    reals = fake_quantize(x, QParams(scale, zero, axis=-1), Grid(0, 255))
    assert reals.tolist() == [[0, 8]] and reals.dtype == np.float32


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_shapes_without_extent(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    assert (
        fake_quantize(x, fixed(1, 0), Grid(0, 255)).shape
        == quantize(x, fixed(1, 0), Grid(0, 255)).shape
        == shape
    )


# Scales and zero points


@given(grids, ranges(3, reals | moderate | st.just(0.0)))
@example(Grid(-128, 127), Range(np.array([-1e-45]), np.array([1e-45])))
@example(Grid(0, 255, symmetric=False), Range(np.array([0.0]), np.array([1e-45])))
@EXAMPLES
def test_scales_are_normal_and_zero_points_codes(grid: Grid, range_: Range) -> None:
    params = params_for(range_, grid, axis=0)
    assert params.scale.dtype == np.float32 and params.zero_point.dtype == np.int64
    assert params.scale.shape == params.zero_point.shape == range_.lo.shape
    assert (np.isfinite(params.scale) & (params.scale >= F32.tiny)).all()
    assert ((params.zero_point >= grid.qmin) & (params.zero_point <= grid.qmax)).all()
    if grid.symmetric:
        assert (params.zero_point == grid.zero).all()
    if grid.pow2:
        assert (np.frexp(params.scale)[0] == 0.5).all()


@given(grids, ranges())
@EXAMPLES
def test_zero_is_exact(grid: Grid, range_: Range) -> None:
    assert fake_quantize(
        np.float32([0.0, -0.0]), params_for(range_, grid), grid
    ).tolist() == [0, 0]


@given(grids, ranges(), st.lists(st.floats(-1.5, 1.5, width=32), min_size=1))
@EXAMPLES
def test_the_error_is_half_a_step_inside_and_the_distance_outside(
    grid: Grid, range_: Range, at: list[float]
) -> None:
    params, bound = params_for(range_, grid), max(-range_.lo[0], range_.hi[0])
    x, scale = np.float32(bound * np.array(at)).astype(np.float64), float(params.scale)
    reach = covered(params, grid)
    error = np.abs(x - fake_quantize(x, params, grid).astype(np.float64))
    slop = 2.0**-22 * np.abs(x)  # float32
    outside = np.maximum(x - reach.hi, reach.lo - x)
    assert (error <= np.maximum(scale / 2, outside) + slop).all()
    assert (error >= outside - slop).all()


@given(grids, ranges())
@EXAMPLES
def test_both_ends_are_reached(grid: Grid, range_: Range) -> None:
    """To half a step with a free scale, altogether with a power of two."""
    params = params_for(range_, grid)
    reach, slop = (
        covered(params, grid),
        0 if grid.pow2 else float(params.scale) * (0.5 + grid.levels * 2.0**-23),
    )
    assert (reach.lo <= range_.lo + slop).all() and (reach.hi >= range_.hi - slop).all()


@pytest.mark.parametrize("grid", [grid for grid in FREE if not grid.pow2], ids=label)
@given(ranges(ends=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)))
@FEW
def test_a_free_zero_point_as_onnxruntime_chooses_it(grid: Grid, range_: Range) -> None:
    from onnxruntime.quantization.quant_utils import compute_scale_zp

    lo, hi = (np.array(end[0], np.float32) for end in (range_.lo, range_.hi))
    if (hi - lo) / grid.levels < F32.tiny:
        return
    zero, scale = compute_scale_zp(lo, hi, np.array(grid.qmin), np.array(grid.qmax))
    params = params_for(range_, grid)
    np.testing.assert_array_max_ulp(
        params.scale, np.float32(scale), 1
    )  # it divides in float32
    # there lo / scale is rounded in float32 (2^-24 of it), from a scale that is one ulp off
    # (2^-23), and so is the difference (2^-24); here all is float64: a tie may fall either way
    steps = range_.lo[0] / float(params.scale)
    exact = grid.qmin - steps
    assert int(params.zero_point) == int(zero) or abs(
        exact % 1 - 0.5
    ) <= 2.0**-22 * max(abs(exact), abs(steps))


@pytest.mark.parametrize("grid", [grid for grid in FREE if not grid.pow2], ids=label)
def test_a_zero_point_belongs_to_the_scale_as_it_is_stored(grid: Grid) -> None:
    """16 bits notice what float32 takes from a scale."""
    lo, hi = np.random.default_rng(0).exponential(size=(2, 20_000))
    params = params_for(Range(-lo, hi), grid, axis=0)
    want = np.rint(grid.qmin + lo / params.scale.astype(np.float64)).clip(
        grid.qmin, grid.qmax
    )
    np.testing.assert_array_equal(params.zero_point, want)


@pytest.mark.parametrize("grid", [grid for grid in MIDDLE if not grid.pow2], ids=label)
@given(ranges())
@FEW
def test_a_fixed_zero_point_takes_the_least_scale(grid: Grid, range_: Range) -> None:
    lo, hi = float(range_.lo[0]), float(range_.hi[0])
    steps = (grid.qmax - grid.zero, grid.zero - grid.qmin)  # above and below zero
    want = max(hi / steps[0], -lo / steps[1])
    assert float(params_for(range_, grid).scale) == float(
        np.float32(want if want else 1.0).clip(F32.tiny)
    )


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid.pow2], ids=label)
@given(ranges())
@example(Range(np.array([-128.0]), np.array([127.0])))
@example(Range(np.array([-1e-30]), np.array([255.0])))
@FEW
def test_a_power_of_two_is_the_smallest_that_fits(grid: Grid, range_: Range) -> None:
    if range_.lo[0] == range_.hi[0] == 0:
        return
    exponents = [e for e in range(-126, 40) if _fits(range_, 2.0**e, grid)]
    assert float(params_for(range_, grid).scale) == 2.0 ** min(exponents)


def _fits(range_: Range, scale: float, grid: Grid) -> bool:
    """Whether there is a zero point with which no end is clipped."""
    below, above = np.ceil(-range_.lo[0] / scale), np.ceil(range_.hi[0] / scale)
    if grid.symmetric:
        return bool(below <= grid.zero - grid.qmin and above <= grid.qmax - grid.zero)
    return bool(below + above <= grid.qmax - grid.qmin)


@given(grids, ranges(4), st.permutations(range(4)))
@EXAMPLES
def test_channels_are_independent(grid: Grid, range_: Range, order: list[int]) -> None:
    whole = params_for(Range(range_.lo[order], range_.hi[order]), grid, axis=1)
    for place, row in enumerate(order):
        one = params_for(Range(range_.lo[[row]], range_.hi[[row]]), grid)
        assert one.scale.shape == () and one.axis is None and whole.axis == 1
        assert (one.scale, one.zero_point) == (
            whole.scale[place],
            whole.zero_point[place],
        )


@given(
    grids,
    ranges(),
    arrays(np.float32, (2, 3, 2), elements=moderate),
    st.integers(-3, 2),
)
@EXAMPLES
def test_equal_channels_are_one_tensor(
    grid: Grid, range_: Range, x: NDArray[np.float32], axis: int
) -> None:
    channels = np.zeros(x.shape[axis], int)
    per_channel = params_for(
        Range(range_.lo[channels], range_.hi[channels]), grid, axis
    )
    np.testing.assert_array_equal(
        fake_quantize(x, per_channel, grid),
        fake_quantize(x, params_for(range_, grid), grid),
    )


@loop_over("grid", {label(grid): grid for grid in GRIDS})
def test_nothing_but_zeros_has_scale_one(grid: Grid) -> None:
    params = params_for(Range(np.zeros(2), np.array([0.0, 0.3])), grid, axis=0)
    assert params.scale[0] == 1 != params.scale[1]


@loop_over("grid", {label(grid): grid for grid in GRIDS})
@pytest.mark.parametrize("end", [1e-9, 3e-7, 0.01, 0.3, 1, 77, 1e3, 1e4])
def test_float16_scales_are_float16_numbers_that_still_hold_the_range(
    grid: Grid, end: float
) -> None:
    half, range_ = replace(grid, half=True), Range(-0.4 * end, end)  # type: ignore[arg-type]
    params, plain = params_for(range_, half), params_for(range_, grid)
    assert params.scale == params.scale.astype(np.float16)
    assert (
        0
        <= params.scale - plain.scale
        <= max(plain.scale * (1 if grid.pow2 else 2.0**-10), 2.0**-24)
    )
    reached, before = covered(params, half), covered(plain, grid)
    step = 0 if grid.pow2 else params.scale / 2 * 1.001
    assert reached.hi >= min(before.hi, range_.hi) - step
    assert reached.lo <= max(before.lo, range_.lo) + step


@pytest.mark.parametrize("ends", [(-1, 1), (0, 1), (-1, 0), (-1, 0.01), (-0.01, 1)])
@loop_over("grid", {label(grid): grid for grid in GRIDS})
def test_the_greatest_numbers_do_not_become_infinite(
    grid: Grid, ends: tuple[float, float]
) -> None:
    """Attention masks hold the least float32."""
    x = np.float32(float(F32.max) * np.array(ends))
    params = params_for(Range(x[:1], x[1:]), grid)  # type: ignore[arg-type]
    reals = fake_quantize(x, params, grid)
    assert np.isfinite(reals).all()
    if grid.pow2:  # the power of two that reaches the end may reach beyond float32
        assert (np.abs(reals) >= np.abs(x) / 4 - params.scale).all()
    else:
        np.testing.assert_allclose(
            reals / F32.max, x / F32.max, atol=1.01 / (grid.levels // 2)
        )


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_large_tensors_in_parts(
    axis: int | None, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And come out as if they had not been."""
    if axis is None and block_size:
        return
    random = np.random.default_rng(0)
    x = random.normal(size=(100, 40)).astype(np.float32)
    grid = Grid(-8, 7)
    lines = rows(x, axis, block_size)
    params = params_for(Range(lines.min(axis=1), lines.max(axis=1)), grid, axis)
    if block_size and axis is not None:
        params = params.in_blocks(x.shape, axis, block_size)
    whole = quantize(x, params, grid, np.dtype(np.int8))
    monkeypatch.setattr("calibrators.affine.SLAB", 1000)
    np.testing.assert_array_equal(quantize(x, params, grid, np.dtype(np.int8)), whole)
    scale, zero = params.spread(x.shape)
    exact = np.clip(np.rint(x.astype(np.float64) / scale) + zero, -8, 7)
    assert (whole == exact).mean() > 0.999
