"""Blocks of kernels run where they hold enough values, and no weight takes more space than its
floats.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, quantize
from quark_onnx.config import QuantizationSpec
from quark_onnx.plan import Keep, Quantize
from quark_onnx.plan.blocks import in_blocks
from tests.cases import loop_over
from tests.models import Array, Feeds, normal, parse, run, weight

INT4 = QuantizationSpec("int4", block_size=32)
#: Shape, axis of the channels, axis of the sum: what becomes of the weight.
FORMS = {
    "many input channels": ((64, 64, 3, 3), 0, 1, "int4 symmetric axis 1 blocks of 32"),
    "half a block of input channels": (
        (64, 16, 3, 3),
        0,
        1,
        "int4 symmetric axis 1 blocks of 32",
    ),
    "few input channels": (
        (64, 3, 7, 7),
        0,
        1,
        "int4 symmetric axes from 1, blocks of 32",
    ),
    "a spectrum": ((256, 1, 512), 0, 1, "int4 symmetric axes from 1, blocks of 32"),
    "depthwise": ((64, 1, 3, 3), 0, 1, "int8 symmetric axis 0"),
    "pixels": ((16, 3, 3, 3), 0, 1, "int8 symmetric axis 0"),
    "one value": ((64, 1, 1, 1), 0, 1, "float: its scales would take more"),
    "transposed": ((64, 16, 2, 2), 1, 0, "int4 symmetric axis 0 blocks of 32"),
    "transposed, few input channels": (
        (3, 16, 4, 4),
        1,
        0,
        "int4 symmetric axes from 1, blocks of 32",
    ),
    "a matrix": ((64, 32), 1, 0, "int4 symmetric axis 0 blocks of 32"),
    "a matrix of few rows": ((3, 32), 1, 0, "int8 symmetric axis 1"),
    "a matrix of one row": ((1, 32), 1, 0, "float: its scales would take more"),
    "a recurrent layer": ((2, 64, 6), 0, 2, "int4 symmetric axis 2 blocks of 32"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    shape, axis, along, expected = FORMS[name]
    entry = in_blocks(INT4, shape, axis, along, padded=True)
    assert str(entry).removeprefix("quantize ").startswith(expected)


@loop_over("scale", ["float32", "float16"])
@loop_over("dtype", ["int2", "int4", "uint4", "int8", "fp8e4m3"])
@loop_over("size", [16, 32, 128, 512])
def test_nothing_takes_more_space_than_its_floats(
    size: int, dtype: str, scale: str
) -> None:
    """Codes, scales and zero points as they are stored, in bits."""
    spec = QuantizationSpec(
        dtype, symmetric=dtype != "uint4", block_size=size, scale=scale
    )
    for rank in (2, 3, 4):
        for channels in (1, 2, 3, 5, 16, 33, 64):
            for kernel in (1, 2, 3, 7):
                shape: tuple[int, ...] = (48, channels, kernel, kernel)[:rank]
                entry = in_blocks(spec, shape, 0, 1, padded=True)
                assert isinstance(entry, Keep | Quantize)
                if isinstance(entry, Keep):
                    assert prod(shape[1:]) <= 2
                    continue
                values, chosen = prod(shape), entry.spec
                length = prod(shape[1:]) if entry.flat else shape[1]
                blocks = -(-length // chosen.block_size) if chosen.block_size else 0
                scales = values // length * blocks if blocks else shape[0]
                codes = scales * chosen.block_size if blocks and rank == 2 else values
                zeros = 0 if chosen.symmetric else chosen.dtype.bits
                bits = codes * chosen.dtype.bits + scales * (
                    (16 if scale == "float16" else 32) + zeros
                )
                assert bits < 32 * values, (shape, str(entry))


KERNELS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "few input channels": ("Conv <strides = [2,2]>", (24, 3, 5, 5), (1, 3, 17, 17)),
    "groups": ("Conv <group = 2>", (8, 2, 5, 5), (1, 4, 9, 9)),
    "a spectrum": ("Conv <strides = [16]>", (20, 1, 64), (1, 1, 160)),
    "depthwise": ("Conv <group = 40>", (40, 1, 3, 3), (1, 40, 7, 7)),
    "one block": ("Conv", (1, 2, 4, 4), (1, 2, 9, 9)),
    "transposed": ("ConvTranspose <strides = [2,2]>", (3, 16, 3, 3), (1, 3, 5, 5)),
}


def model_of(name: str, opset: int) -> ModelProto:
    operator, shape, given = KERNELS[name]
    dims = ",".join(map(str, given))
    unknown = ",".join("ABCD"[: len(given)])
    text = f"g (float[{dims}] x) => (float[{unknown}] y) {{ y = {operator} (x, w, b) }}"
    outputs = shape[1] if operator.startswith("ConvT") else shape[0]
    return parse(text, opset=opset, ir_version=10, w=weight(*shape), b=normal(outputs))


def stored_bytes(model: ModelProto) -> int:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def stored_weight(model: ModelProto, shape: tuple[int, ...]) -> Array:
    """The weight that codes stand for, in float64: with one scale for each channel, or for each
    block of a row.
    """
    arrays = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    [node] = [
        each
        for each in model.graph.node
        if each.op_type == "DequantizeLinear"
        and each.input[0] in arrays
        and arrays[each.input[0]].dtype != np.int32
    ]
    codes, scale = (arrays[name].astype(np.float64) for name in node.input[:2])
    zero = np.zeros_like(scale)  # where it is omitted
    if len(node.input) > 2:
        zero = arrays[node.input[2]].astype(np.float64)
    if codes.shape == shape:
        spread = [-1 if length == scale.size else 1 for length in shape[:2]] + [1] * (
            len(shape) - 2
        )
        return (codes - zero.reshape(spread)) * scale.reshape(spread)
    # A transposed convolution is stored as the kernel of a Conv, outputs first.
    turned = "Transpose" in [each.op_type for each in model.graph.node]
    kernel = (shape[1], shape[0], *shape[2:]) if turned else shape
    lines = codes.reshape(kernel[0], -1)
    parts = (scale.reshape(kernel[0], -1), zero.reshape(kernel[0], -1))
    scale, zero = (np.repeat(part, 32, 1)[:, : lines.shape[1]] for part in parts)
    values = ((lines - zero) * scale)[:, : prod(kernel[1:])].reshape(kernel)
    return values.swapaxes(0, 1) if turned else values


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("preset", ["INT4", "UINT4", "A8W4", "A16W4"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, preset: str, opset: int) -> None:
    """The file is smaller, the codes stand for the weight, and onnxruntime computes with what they
    stand for.
    """
    float_model, shape = model_of(name, opset), KERNELS[name][1]
    data: list[Feeds] = [
        {"x": normal(*KERNELS[name][2], seed=seed)} for seed in range(3)
    ]
    config = QConfig.of(preset).with_(max_opset=opset)
    done = quantize(float_model, data if preset.startswith("A") else None, config)
    assert stored_bytes(done.model) < stored_bytes(float_model)
    found = stored_weight(done.model, shape)
    original = numpy_helper.to_array(float_model.graph.initializer[0]).astype(
        np.float64
    )
    assert 10 * np.log10((original**2).sum() / ((original - found) ** 2).sum()) > 15
    if preset.startswith("A"):
        return
    rounded = ModelProto()
    rounded.CopyFrom(float_model)
    rounded.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(found.astype(np.float32), "w")
    )
    for feeds in data:
        [expected] = run(rounded, feeds)
        for optimize in (False, True):
            [result] = run(done.model, feeds, optimize=optimize)
            np.testing.assert_allclose(
                result, expected, atol=1e-5 * np.abs(expected).max()
            )


def test_the_report_says_which() -> None:
    notes = quantize(model_of("depthwise", 21), None, "INT4").report.notes
    assert any(
        note.startswith("1 weight ('w' the first): quantize int8 symmetric axis 0")
        for note in notes
    )
    notes = quantize(model_of("few input channels", 21), None, "INT4").report.notes
    assert any(
        "axes from 1, blocks of 32 minmax, as few values lie along the axis of the sum"
        in note
        for note in notes
    )
