"""Blocks against the gguf package, which decodes them, and whose quantizer is llama.cpp's
reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.exports.gguf import blocks
from quark_onnx.torch.exports.gguf.blocks import (
    MXFP4,
    Q4_0,
    Q4_1,
    Q8_0,
    form_of,
    round_blocks,
    store_codes,
)
from quark_onnx.torch.formats.quantized_tensor import quantize
from tests.cases import loop_over


def decoded(octets: Any, form: Any) -> Any:
    return gguf.quants.dequantize(octets, gguf.GGMLQuantizationType[form.name])


def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    normal = torch.randn(48, 96)
    outliers = normal.clone()
    outliers[::3, ::17] *= 40
    return {
        "normal": normal,
        "bfloat16": normal.bfloat16(),
        "float16": normal.half(),
        "outliers": outliers,
        "one side": normal.abs() + 3,
        "negative": -normal.abs() - 0.1,
        "constant": torch.full((2, 32), -0.7),
        "zeros": torch.zeros(2, 64),
        "one value": torch.nn.functional.one_hot(torch.arange(32)).float() * 5,
        "tiny": normal * 1e-6,
        "below float16": normal * 1e-9,
        "large": normal * 1e4,
    }


@loop_over("form", {form.name: form for form in [Q4_0, Q4_1, Q8_0]})
@loop_over("case", tuple(weights()))
def test_no_block_is_worse_than_the_reference(form: Any, case: str) -> None:
    weight = weights()[case]
    exact = weight.double().numpy()

    def errors(octets: Any) -> Any:
        return ((decoded(octets, form) - exact) ** 2).reshape(-1, 32).sum(1)

    kind = gguf.GGMLQuantizationType[form.name]
    with np.errstate(all="ignore"):  # the reference divides by scales that vanish
        reference = errors(gguf.quants.quantize(weight.float().numpy(), kind))
    ours = errors(round_blocks(weight, form))
    assert (ours <= reference * (1 + 1e-6) + 1e-300).all()
    if case == "normal":
        assert ours.sum() < 0.97 * reference.sum()


SPECS = {
    "uint4": (
        TensorSpec("uint4", symmetric=False, block_size=32, scale="float16"),
        Q4_1,
    ),
    "uint4 of 128": (
        TensorSpec("uint4", symmetric=False, block_size=128, scale="float16"),
        Q4_1,
    ),
    "uint4 of a channel": (
        TensorSpec("uint4", symmetric=False, per_channel=True, scale="float16"),
        Q4_1,
    ),
    "uint4 of a tensor": (TensorSpec("uint4", symmetric=False, scale="float16"), Q4_1),
    "uint4 symmetric": (TensorSpec("uint4", block_size=32, scale="float16"), Q4_1),
    "int4 asymmetric": (
        TensorSpec("int4", symmetric=False, block_size=32, scale="float16"),
        Q4_1,
    ),
    "uint3": (
        TensorSpec("uint3", symmetric=False, block_size=64, scale="float16"),
        Q4_1,
    ),
    "uint2": (
        TensorSpec("uint2", symmetric=False, block_size=32, scale="float16"),
        Q4_1,
    ),
    "int4": (TensorSpec("int4", block_size=32, scale="float16"), Q4_0),
    "int4 of 64": (TensorSpec("int4", block_size=64, scale="float16"), Q4_0),
    "int3": (TensorSpec("int3", block_size=32, scale="float16"), Q4_0),
    "int8": (TensorSpec("int8", block_size=32, scale="float16"), Q8_0),
    "int8 of a channel": (TensorSpec("int8", per_channel=True, scale="float16"), Q8_0),
}


@pytest.mark.parametrize("name", SPECS)
def test_codes_are_stored_as_they_are(name: str) -> None:
    """Of a width that 128 does not divide, with zeros off the middle."""
    spec, form = SPECS[name]
    torch.manual_seed(1)
    weight = quantize(torch.randn(24, 160) + 0.4, spec)
    assert form_of(weight) is form
    got = decoded(store_codes(weight, form), form)
    wanted = weight.dequantize(torch.float32).numpy()
    if (
        form is Q4_1
    ):  # the offset is rounded to float16: at most 15 steps of a scale, of 11 bits
        steps = np.repeat(np.broadcast_to(scales(weight), (24, 5)), 32, 1)
        assert (np.abs(got - wanted) <= steps * 16 * 2.0**-11).all()
        assert (np.round((got - wanted) / steps) == 0).all()
    else:
        np.testing.assert_array_equal(got, wanted)


def scales(weight: Any) -> Any:
    """One for each 32 values."""
    scale = weight.scale.float().numpy()
    if weight.spec.group:
        return np.repeat(scale, weight.spec.group // 32, 1)[:, :5]
    return scale[:, None] if scale.ndim else scale


def test_mxfp4_is_stored_as_it_is() -> None:
    torch.manual_seed(2)
    weight = torch.randn(24, 160) * torch.logspace(-30, 30, 24)[:, None]
    codes = quantize(weight, TensorSpec("mxfp4e2m1", exponent="ceil"))
    assert form_of(codes) is MXFP4
    np.testing.assert_array_equal(
        decoded(store_codes(codes, MXFP4), MXFP4), codes.dequantize().numpy()
    )
    rounded = quantize(weight, TensorSpec("mxfp4e2m1")).dequantize().numpy()
    np.testing.assert_array_equal(decoded(round_blocks(weight, MXFP4), MXFP4), rounded)


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "model"])
def test_scales_of_other_types_become_float16(scale: str) -> None:
    spec = TensorSpec("int4", block_size=32, scale=scale)
    weight = quantize(torch.linspace(-1, 1, 640).reshape(10, 64), spec)
    np.testing.assert_allclose(
        decoded(store_codes(weight, Q4_0), Q4_0),
        weight.dequantize().numpy(),
        rtol=2**-11,
    )


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("int4", block_size=16),
        TensorSpec("int8", symmetric=False, block_size=32),
        TensorSpec("uint8", symmetric=False, block_size=32),
        TensorSpec("fp8e4m3"),
        TensorSpec("mxfp6e3m2"),
    ],
    ids=str,
)
def test_codes_without_a_place_are_named(spec: TensorSpec) -> None:
    with pytest.raises(
        ModelError, match=r"'q_proj' \(.*no place in llama.cpp's blocks"
    ):
        form_of(quantize(torch.ones(4, 64), spec), "q_proj")


def test_numbers_that_cannot_be_stored_are_errors() -> None:
    weight = torch.ones(2, 32)
    weight[1, 3] = torch.nan
    with pytest.raises(
        ModelError, match="'q_proj' holds numbers that are infinite or none"
    ):
        round_blocks(weight, Q4_1, "q_proj")
    with pytest.raises(ModelError, match="'q_proj' is too great for float16"):
        round_blocks(torch.full((1, 32), 1e7), Q8_0, "q_proj")


def test_a_large_weight_is_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 64)
    whole = round_blocks(weight, Q4_1)
    monkeypatch.setattr("quark_onnx.torch.exports.gguf.blocks.CHUNK", 320)
    np.testing.assert_array_equal(round_blocks(weight, Q4_1), whole)


@pytest.mark.parametrize("form", [Q4_0, Q8_0], ids=lambda form: form.name)
def test_the_first_of_two_equal_magnitudes_gives_the_sign(
    form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of the fit is llama.cpp's scale; whole numbers have both ends equal in many
    blocks.
    """
    monkeypatch.setattr(blocks, "ROUNDS", 0)
    torch.manual_seed(0)
    weight = torch.randint(-4, 5, (256, 64)).float()
    weight[0] = torch.tensor([-4.0, 4.0]).repeat(32)
    weight[1] = -weight[0]
    weight[2], weight[3] = 0.0, -0.0
    octets = round_blocks(weight, form)
    kind = gguf.GGMLQuantizationType[form.name]
    expected = gguf.quants.quantize(weight.numpy(), kind)
    scales = [
        array.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])[:, :2].copy()
        for array in (octets, expected)
    ]
    found, wanted = (array.view(np.float16) for array in scales)
    np.testing.assert_array_equal(found, wanted)
    assert form is Q8_0 or {-1, 1} <= {*np.sign(found).ravel()}
