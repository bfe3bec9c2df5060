"""Codecs of torch against those of numpy, bit for bit, and against types that torch has itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrators import Range
from calibrators import affine as numpy_affine
from calibrators import layout as numpy_layout
from quark_onnx.common.errors import ModelError
from quark_onnx.dtypes import Minifloat
from quark_onnx.kernels import blockfloat, minifloat
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats import affine, block_formats, quantized_tensor
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import fake_quantize, quantize


def matrix(seed: int, rows: int, columns: int) -> np.ndarray:
    """Reals of many magnitudes, zeros and ties among them. Bytes end the shared exponents of torch
    at 2^-127, and numpy's do not, so that none is next to there.
    """
    generator = np.random.default_rng(seed)
    significands = generator.integers(-64, 65, (rows, columns)) / 32 + generator.choice(
        [0, 1e-3], (rows, columns)
    )
    exponents = generator.integers(-50, 50) + generator.integers(-6, 7, (rows, columns))
    return np.ldexp(significands, exponents).astype(np.float32)


MATRICES = st.builds(
    matrix, st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 140)
)
ELEMENTS = {
    "mxfp8e5m2": "fp8_e5m2",
    "mxfp8e4m3": "fp8_e4m3",
    "mxfp6e3m2": "fp6_e3m2",
    "mxfp6e2m3": "fp6_e2m3",
    "mxfp4e2m1": "fp4_e2m1",
    "mxint8": "int8",
}
RULES = ("floor", "even", "ceil", "rceil")
FORMATS = [
    minifloat.E4M3,
    minifloat.E5M2,
    minifloat.E3M2,
    minifloat.E2M3,
    minifloat.E2M1,
]


@pytest.mark.parametrize("rule", ["even", "floor", "ceil", "rceil"])
@pytest.mark.parametrize("name", ELEMENTS)
@given(x=MATRICES)
@settings(max_examples=100)
def test_microscaling_equals_numpy(name: str, rule: str, x: np.ndarray) -> None:
    expected = blockfloat.mx(x, -1, ELEMENTS[name], exponent=rule)
    spec, tensor = TensorSpec(name, exponent=rule), torch.from_numpy(x)
    np.testing.assert_array_equal(quantize(tensor, spec).dequantize().numpy(), expected)
    np.testing.assert_array_equal(fake_quantize(tensor, spec).numpy(), expected)


@pytest.mark.parametrize("rule", ["even", "ceil", "rceil"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_shared_exponents_of_all_maxima_equal_numpy(name: str, rule: str) -> None:
    mantissas = np.concatenate(
        [[0, 1, (1 << 23) - 1], *((np.arange(128) << 16) + by for by in (-1, 0, 1))]
    ).clip(0)
    tops = (
        (np.arange(255)[:, None] << 23 | mantissas)
        .astype(np.uint32)
        .view(np.float32)
        .reshape(-1, 1)
    )
    x = np.pad(tops, ((0, 0), (0, 31)))
    expected = blockfloat.mx(x, -1, ELEMENTS[name], exponent=rule)
    np.testing.assert_array_equal(
        fake_quantize(torch.from_numpy(x), TensorSpec(name, exponent=rule)).numpy(),
        expected,
    )


@pytest.mark.parametrize("name", ELEMENTS)
@given(x=MATRICES)
@settings(max_examples=50)
def test_the_better_of_two_exponents(name: str, x: np.ndarray) -> None:
    tensor, spec = torch.from_numpy(x), TensorSpec(name, exponent="best")
    best = quantize(tensor, spec).dequantize().numpy()
    np.testing.assert_array_equal(fake_quantize(tensor, spec).numpy(), best)
    errors = {}
    for rule, left in {
        "best": best,
        **{rule: blockfloat.mx(x, -1, ELEMENTS[name], exponent=rule) for rule in RULES},
    }.items():
        wide = np.square(left.astype(np.float64) - x)
        errors[rule] = np.add.reduceat(
            wide, range(0, x.shape[1], 32), axis=1
        )  # block by block
    for rule in RULES[:1] if name == "mxint8" else RULES:
        assert (errors["best"] <= errors[rule] * (1 + 1e-5) + 1e-300).all()


@pytest.mark.parametrize("name, width", [("mx4", 11), ("mx6", 13), ("mx9", 16)])
@given(x=MATRICES)
@settings(max_examples=100)
def test_shared_micro_exponents_equal_numpy(
    name: str, width: int, x: np.ndarray
) -> None:
    found = fake_quantize(torch.from_numpy(x), TensorSpec(name)).numpy()
    np.testing.assert_array_equal(found, blockfloat.bfp_prime(x, -1, bit_width=width))


@given(x=MATRICES)
def test_block_floating_point_equals_numpy(x: np.ndarray) -> None:
    np.testing.assert_array_equal(
        fake_quantize(torch.from_numpy(x), TensorSpec("bfp16")).numpy(),
        blockfloat.bfp(x, -1),
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "settings_", [{}, {"per_channel": True}, {"block_size": 32}], ids=str
)
@pytest.mark.parametrize(
    "name",
    ["int8", "uint8", "int4", "uint4", "int3", "uint2", "int16", "fp8e4m3", "fp8e5m2"],
)
@example(np.eye(2, dtype=np.float32)[:, :1])
@given(x=MATRICES)
@settings(max_examples=15)
def test_scales_and_codes_equal_numpy(
    name: str, settings_: dict[str, int], symmetric: bool, x: np.ndarray
) -> None:
    spec = TensorSpec(name, symmetric=symmetric, scale="float32", **settings_)
    found = quantize(torch.from_numpy(x), spec)
    axis = None if not settings_ else 1 if spec.block_size else 0
    rows = numpy_layout.rows(x, axis, spec.block_size)
    params = numpy_affine.params_for(
        Range(rows.min(axis=1), rows.max(axis=1)), spec.grid, axis=0
    )
    codes = spec.codes.encode(rows, params, spec.grid)
    np.testing.assert_array_equal(found.scale.numpy().reshape(-1), params.scale)
    np.testing.assert_array_equal(
        found.codes.float().numpy().reshape(codes.shape), codes.astype(np.float32)
    )
    if isinstance(spec.dtype, Minifloat):
        expected = codes.astype(np.float32) * params.scale[:, None]
    else:
        expected = numpy_affine.dequantize(codes.astype(np.int64), params)
    kept = found.dequantize().numpy()
    if not spec.block_size:
        np.testing.assert_array_equal(kept.reshape(expected.shape), expected)
    else:
        count = -(-x.shape[1] // 32) * 32
        np.testing.assert_array_equal(
            kept, expected.reshape(len(x), count)[:, : x.shape[1]]
        )


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_code_is_its_own(format: minifloat.MiniFloat) -> None:
    values = block_formats.value_table(format)
    values = values[values.abs() <= format.largest]
    kept = block_formats.round_to(values.clone(), format)
    assert torch.equal(kept, values)
    assert torch.equal(
        block_formats.value_table(format)[block_formats.code_of(kept, format).long()],
        values,
    )


@given(x=hnp.arrays(np.float32, 64, elements=st.floats(-500, 500, width=32)))
def test_codes_of_e4m3_are_those_of_torch(x: np.ndarray) -> None:
    values = block_formats.round_to(torch.from_numpy(x), minifloat.E4M3)
    expected = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(values, expected.float())
    ours, theirs = (
        block_formats.code_of(values, minifloat.E4M3),
        expected.view(torch.uint8),
    )
    assert torch.equal(ours & 127, theirs & 127)  # a zero has no sign here


@given(x=hnp.arrays(np.float32, (3, 48), elements=st.floats(-100, 100, width=32)))
def test_nvfp4_is_what_its_definition_says(x: np.ndarray) -> None:
    found = quantize(torch.from_numpy(x), TensorSpec("nvfp4"))
    greatest = np.abs(x.astype(np.float64)).reshape(3, 3, 16).max(axis=2)
    whole = np.float32(greatest.max()) / np.float32(6 * 448) or np.float32(1)
    scale = minifloat.round_to(
        (greatest / (6 * np.float64(whole))).astype(np.float32), minifloat.E4M3
    )
    scale = np.where(scale > 0, scale, 1)
    step = (scale * whole)[..., None].astype(np.float32)
    expected = minifloat.round_to(x.reshape(3, 3, 16) / step, minifloat.E2M1) * step
    assert found.whole.item() == whole
    np.testing.assert_allclose(
        found.dequantize().numpy(), expected.reshape(3, 48), rtol=1e-6, atol=0
    )


def test_scales_of_16_bits_are_computed_in_16_bits_as_amd_quark_does() -> None:
    weight = torch.tensor([[0.3, -1.7, 0.9]], dtype=torch.bfloat16)
    found = quantize(weight, TensorSpec("uint4", symmetric=False, per_channel=True))
    expected = (torch.tensor(0.9).bfloat16() - torch.tensor(-1.7).bfloat16()) / 15
    assert found.scale.dtype == torch.bfloat16 and found.scale.item() == expected.item()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(value: float) -> None:
    with pytest.raises(ModelError, match=r"'model.up'.*infinite or none"):
        quantize(torch.tensor([[1.0, value]]), TensorSpec("int8"), "model.up")


@pytest.mark.parametrize(
    "name", ["int8", "uint4", "fp8e4m3", "mxfp4e2m1", "nvfp4", "bfp16"]
)
def test_weights_without_values_or_of_zeros_stay_so(name: str) -> None:
    spec = TensorSpec(name)
    assert not quantize(torch.zeros(2, 40), spec).dequantize().any()
    assert fake_quantize(torch.zeros(0, 32), spec).shape == (0, 32)


def test_a_token_has_a_scale_of_its_own() -> None:
    x = torch.tensor([[1.0, -0.5], [100.0, 30.0]])
    found = fake_quantize(x, TensorSpec("int8", per_channel=True, dynamic=True))
    step = x.abs().amax(1, keepdim=True) / 127.5
    torch.testing.assert_close(
        found, (x / step).round().clamp(-128, 127) * step, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("fp8e4m3"),
        TensorSpec("int8", scale="float32"),
        TensorSpec("uint8", per_channel=True, symmetric=False),
        TensorSpec("uint4", block_size=32, symmetric=False),
        TensorSpec("mxfp4e2m1"),
        TensorSpec("nvfp4"),
        TensorSpec("bfp16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_is_rounded_the_same_in_parts(
    spec: TensorSpec, dtype: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.from_numpy(matrix(3, 11, 96)).to(dtype)
    given = [None]
    if spec.per_channel or spec.dtype.name == "uint4":
        whole = quantize(weight, spec)
        given.append(Params(whole.scale * 2, whole.zero))
    for params in given:
        whole = quantize(weight, spec, params=params)
        for size in (1, 200, 960):
            monkeypatch.setattr(quantized_tensor, "AT_ONCE", size)
            parts = quantize(weight, spec, params=params)
            for name in ("codes", "scale", "zero", "whole"):
                one, other = getattr(whole, name), getattr(parts, name)
                assert (one is None and other is None) or (
                    one.dtype == other.dtype and torch.equal(one, other)
                ), name
        monkeypatch.undo()


@pytest.mark.parametrize(
    "name", ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "fp8e4m3"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(values=MATRICES)
@settings(max_examples=20)
def test_what_is_rounded_is_what_its_codes_stand_for(
    name: str, dtype: torch.dtype, values: np.ndarray
) -> None:
    spec = TensorSpec(name, per_channel=True, symmetric=not name.startswith("uint"))
    x = torch.from_numpy(values).to(dtype)
    params = quantized_tensor.solve(x, spec)
    wide = Params(*(None if each is None else each[:, None] for each in params))
    wanted = affine.decode(affine.encode(x, wide, spec), wide, dtype)
    assert torch.equal(affine.rounded(x, wide, spec, dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.float64])
def test_codes_stay_when_they_are_decoded(dtype: torch.dtype) -> None:
    """Whatever type a file has stored them in."""
    codes = torch.tensor([[1.0, 3.0]]).to(dtype)
    for zero in (None, torch.tensor(1.0)):
        params = Params(torch.tensor(0.5), zero)
        assert torch.equal(affine.decode(codes, params), affine.decode(codes, params))
        assert codes.tolist() == [[1, 3]]
