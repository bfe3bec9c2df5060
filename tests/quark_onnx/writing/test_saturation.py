"""A pair saturates at the ends of its grid, also where the type of its codes has more of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from quark_onnx import QConfig, QuantizationSpec, quantize_static
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES
from quark_onnx.dtypes import Integer, integer
from tests.models import kinds, normal, parse, run, weight


def format_of(name: str, onnx_type: int, bits: int) -> Integer:
    """A format that is not registered: configurations take the row itself, too."""
    qmin = 0 if name.startswith("u") else -(1 << (bits - 1))
    storage = np.dtype(helper.tensor_dtype_to_np_dtype(onnx_type))
    row = DTYPES["int8" if bits <= 8 else "int16"]
    qmax = qmin + (1 << bits) - 1
    return Integer(name, bits, row.min_opset, onnx_type, storage, qmin, qmax)


#: Formats that ONNX has no type for, with the type that stores them.
FORMATS = [
    format_of("int6", TensorProto.INT8, 6),
    format_of("uint6", TensorProto.UINT8, 6),
    format_of("int12", TensorProto.INT16, 12),
    format_of("uint10", TensorProto.UINT16, 10),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "zero point": {"symmetric": False},
    "channels": {"per_channel": True},
    "pow2": {"pow2": True},
    "narrow": {"narrow": True},
    "reduce_range": {"reduce_range": True},
    "half scales": {"scale": "float16"},
}
SPECS = [
    pytest.param(QuantizationSpec(row, **settings), id=f"{row}-{name}")
    for row in (*FORMATS, DTYPES["int8"], DTYPES["uint8"])
    for name, settings in SETTINGS.items()
]

DATA = [{"x": normal(2, 3, 5, seed=seed)} for seed in range(4)]


def watched(model: ModelProto) -> tuple[ModelProto, onnx.NodeProto]:
    """The model with the codes of its first pair as another output, and the pair."""
    pair = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.append(helper.make_empty_tensor_value_info(pair.output[0]))
    return copy, pair


def parameters(model: ModelProto, pair: onnx.NodeProto) -> list[NDArray[Any]]:
    """Scale and zero point of a pair, to be broadcast along its axis."""
    session = ModelProto()
    session.CopyFrom(model)
    for name in pair.input[1:]:
        session.graph.output.append(helper.make_empty_tensor_value_info(name))
    found = run(session, DATA[0])[-2:]
    return [each.reshape(-1, 1) if each.ndim else each for each in found]


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_codes_beyond_the_calibrated_range(
    spec: QuantizationSpec, optimize: bool
) -> None:
    """The oracle is numpy: round, add the zero point, clip at the ends of the grid."""
    model = parse(
        "g (float[N,3,5] x) => (float[N,3,4] y) { y = MatMul (x, w) }", w=weight(5, 4)
    )
    result = quantize_static(model, DATA, QConfig(spec, None))
    other, pair = watched(result)
    x = 9 * normal(2, 3, 5, seed=7)
    _, codes = run(other, {"x": x}, optimize=optimize)
    scale, zero_point = parameters(result, pair)
    steps = np.rint(x / scale) + zero_point.astype(np.float32)
    expected = np.clip(steps, spec.grid.qmin, spec.grid.qmax)
    np.testing.assert_array_equal(codes.astype(np.float32), expected)
    assert {codes.min(), codes.max()} == {spec.grid.qmin, spec.grid.qmax}


@pytest.mark.parametrize("row", FORMATS, ids=str)
def test_a_relu_is_dropped_where_the_codes_begin_at_zero(row: Integer) -> None:
    """The pair saturates at zero then; without that, negative values would pass."""
    model = parse(
        """g (float[N,8] x) => (float[N,4] y) {
            c = MatMul (x, w)
            r = Relu (c)
            y = MatMul (r, v)
        }""",
        w=weight(8, 8),
        v=weight(8, 4),
    )
    data = [{"x": normal(8, 8, seed=seed)} for seed in range(4)]
    fine = QuantizationSpec("int16", per_channel=True)
    config = QConfig(QuantizationSpec(row, symmetric=False), fine)
    result = quantize_static(model, data, config)
    [expected] = run(model, data[0])
    [found] = run(result, data[0])
    noise = np.square(found - expected).sum() / np.square(expected).sum()
    assert 10 * np.log10(1 / noise) > {6: 25, 10: 48, 12: 60}[row.bits]
    assert "Relu" not in kinds(result)


def test_formats_that_fill_their_type_need_no_node() -> None:
    model = parse(
        "g (float[N,5] x) => (float[N,4] y) { y = MatMul (x, w) }", w=weight(5, 4)
    )
    data = [{"x": normal(2, 5, seed=seed)} for seed in range(4)]
    result = quantize_static(model, data, "A8W8")
    assert not {"Min", "Max"} & set(kinds(result))


def test_the_search_of_scales_saturates_too() -> None:
    """A smaller scale is better here only if the largest values were not clipped."""
    model = parse(
        "g (float[N,64] x) => (float[N,4] y) { y = MatMul (x, w) }", w=weight(64, 4)
    )
    data = [{"x": normal(16, 64, seed=seed)} for seed in range(4)]
    spec = QuantizationSpec(FORMATS[0], pow2=True, calibrator="minmse")
    scales = {}
    for search in (0, 4):
        config = QConfig(spec, QuantizationSpec("int16"), search=search)
        result = quantize_static(model, data, config)
        _, pair = watched(result)
        [scales[search]] = [
            float(numpy_helper.to_array(tensor))
            for tensor in result.graph.initializer
            if tensor.name == pair.input[1]
        ]
    x = np.concatenate([sample["x"] for sample in data]).astype(np.float64)
    errors = {
        scale: np.square(x - np.clip(np.rint(x / scale), -32, 31) * scale).sum()
        for scale in (scales[0] / 2, scales[0], scales[0] * 2)
    }
    assert scales[4] == min(errors, key=lambda scale: errors[scale])


def test_a_format_of_more_bits_than_its_type() -> None:
    with pytest.raises(
        ConfigError, match="int9: codes from -256 to 255 do not fit into INT8"
    ):
        integer("int9", TensorProto.INT8, 9, True, 10)
    assert "int9" not in DTYPES
