"""Weights of 2, 4 and 8 bits, run by onnxruntime's MatMulNBits and measured against onnxruntime's
own quantizer.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import _pybind_state

from calibrators import Grid, Range, params_for, quantize
from quark_onnx.common.errors import ConfigError, PlanError
from quark_onnx.kernels import nbits
from quark_onnx.kernels.nbits import (
    BLOCK_SIZES,
    NBitsWeight,
    from_codes,
    round_to_nearest,
)
from tests.nbits import block_errors, dequantized, quantized, zero_points

F32 = np.finfo(np.float32)
VARIABLE = "QUARK_ONNX_DATA"
KINDS = [(bits, symmetric) for bits in (2, 4, 8) for symmetric in (True, False)]


def normal(k: int, n: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(k, n)).astype(np.float32)


def nearest(
    w: NDArray[np.float32], bits: int, block_size: int, symmetric: bool
) -> NBitsWeight:
    return quantized(
        w,
        bits,
        block_size,
        lambda blocks: round_to_nearest(blocks, bits, symmetric=symmetric),
    )


def run(
    weight: NBitsWeight, x: NDArray[np.float32], level: int = 0
) -> NDArray[np.float32]:
    """x @ weight, by a stock session."""
    names = ["B", "scales", "zero_points"][: len(weight.inputs)]
    initializers = [
        numpy_helper.from_array(array, name)
        for array, name in zip(weight.inputs, names, strict=True)
    ]
    k, n = weight.shape
    node = helper.make_node(
        "MatMulNBits",
        ["x", *names],
        ["y"],
        domain="com.microsoft",
        accuracy_level=level,
        **weight.attributes,
    )
    x_info, y_info = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, size])
        for name, size in (("x", k), ("y", n))
    )
    model = helper.make_model(
        helper.make_graph([node], "nbits", [x_info], [y_info], initializers),
        opset_imports=[
            helper.make_opsetid("", 21),
            helper.make_opsetid("com.microsoft", 1),
        ],
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # what is refused is an exception as well
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    y: NDArray[np.float32] = session.run(None, {"x": x})[0]
    return y


def assert_runs(
    weight: NBitsWeight, rows: int = 3, level: int = 0, tolerance: float = 2e-6
) -> None:
    x = normal(rows, weight.shape[0], seed=1)
    exact = x.astype(np.float64) @ dequantized(weight)
    np.testing.assert_allclose(
        run(weight, x, level), exact, rtol=0, atol=tolerance * np.abs(exact).max()
    )


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
def test_onnxruntime_computes_the_product(
    bits: int, symmetric: bool, block_size: int
) -> None:
    for k, n in ((512, 24), (300, 33), (10, 1)):
        weight = nearest(normal(k, n), bits, block_size, symmetric)
        for rows in (1, 17):
            assert_runs(weight, rows)
            assert_runs(weight, rows, level=4, tolerance=5e-2)


@pytest.mark.parametrize("bits", [2, 4])
def test_onnxruntime_runs_float_zero_points(bits: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**bits, (5, 3, 32))
    scales, zeros = (rng.uniform(1, 2, (5, 3)).astype(np.float32) for _ in range(2))
    weight = from_codes(codes, scales, zeros, bits, rows=70)
    expected = (
        ((codes - zeros.astype(np.float64)[..., None]) * scales[..., None])
        .reshape(5, -1)[:, :70]
        .T
    )
    np.testing.assert_allclose(dequantized(weight), expected, rtol=1e-6, atol=1e-6)
    assert_runs(weight, level=4)


def test_onnxruntime_refuses_what_the_module_says() -> None:
    small = NBitsWeight(
        np.zeros((1, 1, 4), np.uint8), np.ones((1, 1), np.float32), None, 4, 8, 8
    )
    with pytest.raises(Exception, match="block_size"):
        run(small, normal(1, 8))
    floats = from_codes(
        np.zeros((1, 1, 16), int), np.ones((1, 1), np.float32), np.ones((1, 1)), 8, 16
    )
    with pytest.raises(Exception, match="matmul_nbits"):
        run(floats, normal(1, 16))


@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
def test_unusual_columns(bits: int, symmetric: bool) -> None:
    w = normal(40, 8)
    w[:, 1], w[:, 2], w[:, 3] = 0, 2.5, -2.5
    w[:, 4] *= np.float32(1e-30)
    w[:, 5] *= np.float32(1e30)
    w[:, 6] = np.where(w[:, 6] > 0, F32.max, -F32.max)
    w[:, 7] = F32.smallest_subnormal
    weight = nearest(w, bits, 16, symmetric)
    real = dequantized(weight)
    assert np.isfinite(real.astype(np.float32)).all() and (real[:, 1] == 0).all()
    assert (np.abs(weight.scales) >= F32.tiny).all()
    np.testing.assert_allclose(real[:, 2:4], w[:, 2:4], rtol=1e-6)
    blocks = np.pad(w.astype(np.float64), [(0, 8), (0, 0)]).reshape(3, 16, 8)
    steps = np.abs(np.pad(real, [(0, 8), (0, 0)]).reshape(3, 16, 8) - blocks) / np.abs(
        weight.scales.T[:, None]
    )
    assert steps.max() <= 1.001  # what is clipped is off by a step at most
    x = normal(2, 40, seed=1) / 1024
    exact = x.astype(np.float64) @ real
    got = run(weight, x)
    size = np.abs(exact).max(axis=0).clip(F32.tiny)
    np.testing.assert_allclose(got / size, exact / size, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_block_is_what_the_block_alone_would_be(
    bits: int, symmetric: bool, block_size: int
) -> None:
    """Padding and packed rows of zero points: against one block at a time."""
    w = normal(150, 5000 // block_size)
    weight = nearest(w, bits, block_size, symmetric)
    zeros = zero_points(weight)
    for column in range(0, w.shape[1], 7):
        for block in range(-(-150 // block_size)):
            at = slice(block * block_size, min((block + 1) * block_size, 150))
            alone = nearest(w[at, column : column + 1], bits, block_size, symmetric)
            assert alone.scales[0, 0] == weight.scales[column, block]
            assert zero_points(alone)[0, 0] == zeros[column, block]
            np.testing.assert_array_equal(
                alone.packed[0, 0], weight.packed[column, block]
            )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_codes_are_those_of_the_projects_arithmetic(bits: int) -> None:
    grid = Grid(0, 2**bits - 1, symmetric=False)
    blocks = np.float32(np.random.default_rng(0).standard_t(2, size=(500, 32)))
    blocks[:100] = np.rint(blocks[:100] * 2) / 2  # ties
    blocks[0] = F32.smallest_subnormal
    params = params_for(Range(blocks.min(1), blocks.max(1)), grid, axis=0)
    for some in (
        params,
        params.with_scale(-params.scale),
        params.with_scale(np.full(500, F32.tiny)),
    ):
        np.testing.assert_array_equal(
            nbits.codes_of(blocks, some, grid.qmax), quantize(blocks, some, grid)
        )


def onnxruntimes(
    w: NDArray[np.float32], bits: int, block_size: int, symmetric: bool
) -> NBitsWeight:
    """What onnxruntime's quantizer makes of a matrix: the compiled function behind its
    matmul_nbits_quantizer.
    """
    k, n = w.shape
    count = -(-k // block_size)
    packed, scales = (
        np.zeros((n, count, block_size * bits // 8), np.uint8),
        np.zeros((n, count), np.float32),
    )
    zeros = np.zeros((n, -(-count * bits // 8)), np.uint8)
    padded = np.pad(w, [(0, count * block_size - k), (0, 0)])
    quantizer = getattr(_pybind_state, f"quantize_matmul_{bits}bits")
    quantizer(packed, padded, scales, zeros, block_size, n, k, symmetric)
    return NBitsWeight(
        packed, scales, None if symmetric else zeros, bits, block_size, k
    )


def assert_no_worse(
    w: NDArray[np.float32], bits: int, block_size: int, symmetric: bool
) -> None:
    ours = block_errors(w, nearest(w, bits, block_size, symmetric))
    theirs = block_errors(w, onnxruntimes(w, bits, block_size, symmetric))
    assert (ours <= theirs * (1 + 1e-4) + 1e-30).all()
    assert ours.sum() <= theirs.sum() * (1 + 1e-6)


@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_no_block_is_worse_than_onnxruntimes(
    bits: int, symmetric: bool, block_size: int
) -> None:
    rng = np.random.default_rng(0)
    for w in (
        rng.normal(size=(256, 96)),
        rng.standard_t(3, size=(300, 64)),
        rng.exponential(size=(256, 64)),
    ):
        assert_no_worse(w.astype(np.float32), bits, block_size, symmetric)


@pytest.mark.realdata
@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
def test_no_block_of_real_weights_is_worse_than_onnxruntimes(
    bits: int, symmetric: bool
) -> None:
    file = Path(os.environ.get(VARIABLE, ""), "realdata.py")
    if not os.environ.get(VARIABLE) or not file.is_file():
        pytest.skip(
            f"{VARIABLE} does not name a folder with realdata.py, real models and their data"
        )
    paths = sorted(file.parent.rglob("*minilm*.onnx"))
    if not paths:
        pytest.skip(f"{VARIABLE} has no MiniLM model")
    constants = (
        numpy_helper.to_array(tensor)
        for tensor in onnx.load(paths[0]).graph.initializer
    )
    matrices = [
        w.astype(np.float32)
        for w in constants
        if w.ndim == 2 and min(w.shape) >= 384 and max(w.shape) < 2000
    ]
    assert matrices
    for w in matrices[::8]:
        assert_no_worse(w, bits, 32, symmetric)


def test_refusals() -> None:
    codes, scales = np.zeros((2, 3, 16), int), np.ones((2, 3), np.float32)
    for bits in (3, 16):
        with pytest.raises(ConfigError, match=f"bits is {bits}"):
            from_codes(codes, scales, None, bits, rows=40)
    for block_size in (8, 48, 512):
        long = np.zeros((2, 3, block_size), int)
        with pytest.raises(ConfigError, match=f"block_size is {block_size}"):
            from_codes(long, scales, None, 4, rows=3 * block_size)
    with pytest.raises(PlanError, match="matrix of 20 rows"):
        from_codes(codes, scales, None, 4, rows=20)
    with pytest.raises(PlanError, match="differ in shape"):
        from_codes(codes, scales, np.zeros((3, 2)), 4, rows=40)
    with pytest.raises(PlanError, match="do not fit"):
        from_codes(codes + 16, scales, None, 4, rows=40)
