"""Every cell of the table of formats and ways to use them: the model runs, and comes as close as
its bits allow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuantizationSpec, quantize
from quark_onnx.common.registry import DTYPES
from quark_onnx.config.support import WAYS, Way
from quark_onnx.dtypes import Block, DType, Half, Integer, Minifloat

CELLS = [
    (DTYPES[name], way) for name in DTYPES for way in WAYS if way.config(DTYPES[name])
]


def network() -> ModelProto:
    """A convolution, a selection, a product and a sum: whatever a format has to get along with."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 16, 8, 8] x) => (float[N, 24] y) {
            c = Conv <pads = [1, 1, 1, 1]> (x, k, b)
            r = Relu (c)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
            m = GlobalAveragePool (p)
            f = Flatten (m)
            h = Gemm (f, w, d)
            s = Sigmoid (h)
            t = Mul (h, s)
            y = MatMul (t, v)
        }""")
    random = np.random.default_rng(0)
    for name, shape in {
        "k": (32, 16, 3, 3),
        "b": (32,),
        "w": (32, 48),
        "d": (48,),
        "v": (48, 24),
    }.items():
        array = (random.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(
            np.float32
        )
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


MODEL = network()
DATA = [
    {"x": np.random.default_rng(seed).normal(size=(4, 16, 8, 8)).astype(np.float32)}
    for seed in range(8)
]


def fraction_bits(row: Minifloat) -> int:
    """The bits of the fraction: there are so many values from 1 to 2."""
    return int(np.log2(np.count_nonzero((row.levels >= 1) & (row.levels < 2))))


def least(row: DType, way: Way) -> float:
    """dB that a format has to reach: about five a bit of its mantissa, less the usual."""
    if isinstance(row, Half):
        return 40
    if isinstance(row, Block):
        return {
            "bfp16": 30,
            "mx9": 30,
            "mxint8": 28,
            "mx6": 17,
            "mx4": 3,
            "mxfp4e2m1": 5,
        }.get(row.name, 15)
    if not isinstance(row, Integer):
        assert isinstance(row, Minifloat)
        return {3: 18, 2: 12, 1: 5}[fraction_bits(row)]
    known = np.interp(row.bits, [2, 4, 8, 16, 32], [-5, 6, 26, 60, 60])
    return float(known) - 6 * (way.name == "pow2")


@pytest.mark.parametrize(("row", "way"), CELLS, ids=lambda value: value.name)
def test_a_cell_of_the_table(row: DType, way: Way) -> None:
    config = way.config(row)
    assert config is not None
    result = quantize(MODEL, DATA if config.measures else None, config)
    assert result.report.quantized > 0
    found: dict[bool, Any] = {}
    for optimize in (True, False):
        session = open_session(result.model, optimize=optimize)
        found[optimize] = np.concatenate(
            [session.run(None, sample)[0] for sample in DATA]
        ).astype(np.float64)
    session = open_session(MODEL)
    expected = np.concatenate([session.run(None, sample)[0] for sample in DATA]).astype(
        np.float64
    )
    for values in found.values():
        sqnr = 10 * np.log10(
            np.square(expected).sum() / np.square(values - expected).sum()
        )
        assert sqnr > least(row, way)


@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPES[name].scaled])
def test_codes_are_stored_in_their_own_type(name: str) -> None:
    row = DTYPES[name]
    [way] = [way for way in WAYS if way.name == "per channel"]
    model = quantize(MODEL, None, way.config(row)).model
    assert {
        t.data_type for t in model.graph.initializer if t.name.startswith("w_quantized")
    } == {row.onnx}


def half_scales(model: ModelProto) -> list[str]:
    """Where the values of Cast nodes go that make float32 of stored float16."""
    stored = {
        t.name
        for t in model.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT16
    }
    wide = {
        node.output[0]
        for node in model.graph.node
        if node.op_type == "Cast" and node.input[0] in stored
    }
    assert len(wide) == len(stored)
    return [
        node.op_type for node in model.graph.node for name in node.input if name in wide
    ]


@pytest.mark.parametrize("preset", ["INT4", "UINT4"])
def test_scales_in_float16_reach_the_operator_that_unpacks(preset: str) -> None:
    plain = QConfig.of(preset)
    config = plain.with_(weight=plain.weight.with_(scale="float16"))
    single, half = quantize(MODEL, None, plain), quantize(MODEL, None, config)
    assert half_scales(half.model).count("MatMulNBits") == 2
    assert abs(half.report.worst_sqnr - single.report.worst_sqnr) < 1


def test_scales_in_float16_hold_wide_biases_too() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    bias = next(t for t in model.graph.initializer if t.name == "b")
    bias.CopyFrom(numpy_helper.from_array(np.full(32, 3e4, np.float32), "b"))
    spec = QuantizationSpec("int8", scale="float16")
    result = quantize(model, DATA, QConfig(spec, spec.with_(per_channel=True)))
    assert any("raised" in note for note in result.report.notes)
    scales = {
        t.name
        for t in result.model.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT16
    }
    assert len(scales) > 4
    assert result.report.worst_sqnr > 15


UNEVEN = [
    {
        "x": sample["x"]
        * np.float32(10.0) ** np.linspace(-2, 2, 16, dtype=np.float32)[:, None, None]
    }
    for sample in DATA
]


@pytest.mark.parametrize("form", ["qdq", "operators", "vendor"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int4"])
def test_a_scale_for_each_channel_of_an_activation_holds_uneven_ones(
    dtype: str, form: str
) -> None:
    """The kernel takes every channel alike, so that what one scale does to the small ones shows."""
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    kernel = next(t for t in model.graph.initializer if t.name == "k")
    even = (
        numpy_helper.to_array(kernel)
        / np.float32(10.0) ** np.linspace(-2, 2, 16, dtype=np.float32)[:, None, None]
    )
    kernel.CopyFrom(numpy_helper.from_array(even, "k"))
    found = []
    for per_channel in (False, True):
        spec = QuantizationSpec(
            dtype, symmetric=dtype != "uint8", per_channel=per_channel
        )
        result = quantize(
            model, UNEVEN, QConfig(spec, QuantizationSpec("int16"), form=form)
        )
        sessions = [open_session(result.model, optimize=flag) for flag in (True, False)]
        expected = np.concatenate(
            [open_session(model).run(None, sample)[0] for sample in UNEVEN]
        )
        for session in sessions:
            values = np.concatenate([session.run(None, sample)[0] for sample in UNEVEN])
            found.append(
                10
                * np.log10(
                    np.square(expected).sum() / np.square(values - expected).sum()
                )
            )
    assert min(found[2:]) > max(found[:2]) + 8
    assert abs(found[2] - found[3]) < 1
    axes = [
        a.i
        for node in result.model.graph.node
        for a in node.attribute
        if a.name == "axis" and node.input[0] == "x"
    ]
    assert axes == [1]
