"""Weights in blocks at any opset: contributed operators, or one block in each row.

Against float64 arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph
from quark_onnx.planning.blocks import lower_blocks
from tests.models import Feeds, normal, parse, weight

Floats = NDArray[np.float64]
ROWS, WIDTH, HIDDEN, BLOCK = 100, 64, 96, 32
TABLE, FIRST, SECOND = (
    weight(ROWS, WIDTH),
    weight(HIDDEN, WIDTH).T.copy(),
    weight(WIDTH, HIDDEN).T.copy(),
)


# The numbers that codes stand for


def blocks_of(
    scales: Floats, zeros: Floats, axis: int, shape: Sequence[int], size: int
) -> tuple[Floats, Floats]:
    """Scales and zero points for each value, of those for each block."""
    place = np.minimum(np.arange(shape[axis]) // size, scales.shape[axis] - 1)
    return np.take(scales, place, axis), np.take(zeros, place, axis)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, np.int8])
@pytest.mark.parametrize(
    ("shape", "axis", "size"),
    [
        ((8, 6), 0, 4),
        ((8, 6), 1, 2),
        ((7, 6), 0, 4),
        ((6, 10), -1, 16),
        ((4, 3, 5), 1, 2),
        ((2, 3, 3, 3), 1, 2),
        ((5,), 0, 2),
    ],
)
@pytest.mark.parametrize("opset", [10, 13, 17])
def test_one_block_in_each_row_is_the_same_weight(
    opset: int, shape: tuple[int, ...], axis: int, size: int, dtype: Any
) -> None:
    """An operator with a scale for each row dequantizes blocks of any shape along any axis, filled
    up or not.
    """
    random = np.random.default_rng(len(shape))
    own = axis % len(shape)
    parts = tuple(
        -(-length // size) if place == own else length
        for place, length in enumerate(shape)
    )
    low, high = (0, 15) if dtype is ml_dtypes.uint4 else (-8, 7)
    codes, zeros = (
        random.integers(low, high, of, endpoint=True) for of in (shape, parts)
    )
    scales = random.uniform(-1, 1, parts).astype(np.float32)
    scale, zero = blocks_of(
        scales.astype(np.float64), zeros.astype(np.float64), own, shape, size
    )
    wanted = (codes - zero) * scale

    model = parse(
        "g (float x) => (float y) { y = Add (x, w) }", opset=opset, ir_version=10
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph = Graph.of(model)
    names = [
        graph.add_constant(name, array)
        for name, array in (
            ("c", codes.astype(dtype)),
            ("s", scales),
            ("z", zeros.astype(dtype)),
        )
    ]
    graph.import_domain("com.microsoft")
    graph.add(
        "DequantizeLinear",
        names,
        ["w"],
        domain="com.microsoft",
        axis=axis,
        block_size=size,
    )
    assert lower_blocks(graph) == 1
    [found] = open_session(graph.to_model()).run(None, {"x": np.zeros((), np.float32)})
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


#: Layers whose weights have blocks of 4: the model's text, the shapes of its input and of the
#: codes, the axis of the blocks, and whether they are full and contiguous, so that rows are faster.
LAYERS = {
    "1x1 kernel": ("y = Conv (x, w)", (1, 8, 1, 1), (8, 8, 1, 1), 1, True),
    "short lines": ("y = Conv (x, w)", (1, 3, 1, 1), (8, 3, 1, 1), 1, True),
    "flattened kernel": (
        "k = Reshape (w, s) y = Conv (x, k)",
        (1, 8, 3, 3),
        (8, 72),
        1,
        True,
    ),
    "sizes of the codes": (
        "k = Reshape (w, copied) y = Conv (x, k)",
        (1, 8, 1, 1),
        (8, 8),
        1,
        False,
    ),
    "transposed Gemm": ("y = Gemm <transB = 1> (x, w)", (1, 8), (6, 8), 1, True),
    "3x3 kernel": ("y = Conv (x, w)", (1, 8, 3, 3), (8, 8, 3, 3), 1, False),
    "partial block": ("y = Conv (x, w)", (1, 6, 1, 1), (8, 6, 1, 1), 1, False),
    "Gemm": ("y = Gemm (x, w)", (1, 8), (8, 6), 0, False),
    "MatMul": ("y = MatMul (x, w)", (1, 8), (8, 8), 1, False),
    "two readers": (
        "c = Conv (x, w) y = Add (c, w)",
        (1, 8, 1, 1),
        (8, 8, 1, 1),
        1,
        False,
    ),
}


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("name", LAYERS)
def test_contiguous_blocks_of_layers_are_rows(name: str, dtype: Any) -> None:
    """onnxruntime dequantizes rows in half the time of blocks."""
    text, read, shape, axis, rows = LAYERS[name]
    size = 4
    random = np.random.default_rng(0)
    parts = tuple(
        -(-extent // size) if place == axis else extent
        for place, extent in enumerate(shape)
    )
    low, high = (0, 15) if dtype is ml_dtypes.uint4 else (-8, 7)
    model = parse(
        f"g (float[{','.join(map(str, read))}] x) => (float y) {{ {text} }}",
        opset=21,
        ir_version=10,
        s=np.int64([8, 8, 3, 3]),
        copied=np.int64([0, 0, 1, 1]),
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph = Graph.of(model)
    inputs = [
        graph.add_constant("c", random.integers(low, high, shape).astype(dtype)),
        graph.add_constant("scale", random.uniform(0.5, 1, parts).astype(np.float32)),
    ]
    if dtype is ml_dtypes.uint4:
        zero = random.integers(low, high, parts).astype(dtype)
        inputs.append(graph.add_constant("zero", zero))
    graph.add("DequantizeLinear", inputs, ["w"], axis=axis, block_size=size)
    feeds = {"x": normal(*read)}
    [wanted] = open_session(graph.to_model()).run(None, feeds)
    assert lower_blocks(graph) == rows
    [pair] = [node for node in graph.nodes if node.op_type == "DequantizeLinear"]
    assert (pair.attribute("block_size") is None) == rows
    assert len(pair.inputs) == len(inputs)
    [found] = open_session(graph.to_model()).run(None, feeds)
    np.testing.assert_array_equal(found, wanted)


def test_symmetric_blocks_have_no_zero_points() -> None:
    """onnxruntime subtracts a zero point from each value if there is one."""
    model = parse(
        "g (float[N,64,5,5] x) => (float[N,8,3,3] y) { y = Conv (x, w) }",
        w=weight(8, 64, 3, 3),
    )
    data = [{"x": normal(1, 64, 5, 5, seed=seed)} for seed in range(4)]
    for preset, inputs in (("A16W4", 2), ("INT4", 2), ("UINT4", 3)):
        result = quantize(model, data if preset == "A16W4" else None, preset).model
        [pair] = [node for node in result.graph.node if "w_quantized" in node.input]
        assert len(pair.input) == inputs


# Models whose opset stays where it is


def transformer(norm: str, opset: int) -> ModelProto:
    """The start of a language model as onnxruntime's optimizer writes it: norms of its own in the
    standard domain.
    """
    shift = ", beta" if norm == "LayerNormalization" else ""
    return parse(
        f"""g (int64[N,5] ids) => (float[N,5,{WIDTH}] y) {{
            [embed] e = Gather (table, ids)
            [norm] n = {norm} <axis = -1, epsilon = 0.00001> (e, gamma{shift})
            [up] m = MatMul (n, first)
            [relu] r = Relu (m)
            [down] y = MatMul (r, second)
        }}""",
        opset=opset,
        table=TABLE,
        gamma=np.ones(WIDTH, np.float32),
        first=FIRST,
        second=SECOND,
        **({"beta": np.zeros(WIDTH, np.float32)} if shift else {}),
    )


DATA: list[Feeds] = [
    {"ids": np.random.default_rng(seed).integers(0, ROWS, (2, 5))} for seed in range(3)
]


def calculated(
    norm: str, ids: NDArray[Any], table: Floats, first: Floats, second: Floats
) -> Floats:
    e = table[ids]
    centred = e - e.mean(-1, keepdims=True) if norm == "LayerNormalization" else e
    n = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
    return np.maximum(n @ first, 0) @ second


def rounded(array: NDArray[Any], axis: int, *, signed: bool) -> Floats:
    """A weight rounded to 4 bits in blocks along an axis, in float64.

    The grid is what any quantizer may choose.
    """
    lines = np.moveaxis(array.astype(np.float64), axis, -1)
    blocks = lines.reshape(*lines.shape[:-1], -1, BLOCK)
    if signed:
        greatest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
        step, low, high, zero = greatest / -8, -8, 7, 0.0
    else:
        least, most = (
            np.minimum(blocks.min(-1, keepdims=True), 0),
            np.maximum(blocks.max(-1, keepdims=True), 0),
        )
        step, low, high = (most - least) / 15, 0, 15
        zero = np.rint(-least / step)
    codes = np.clip(np.rint(blocks / step) + zero, low, high)
    return np.moveaxis(((codes - zero) * step).reshape(lines.shape), -1, axis)


def unpacked(model: ModelProto) -> dict[str, Floats]:
    """The weights that MatMulNBits and GatherBlockQuantized stand for, by the result, in float64."""  # noqa: E501
    constants = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    found = dict[str, Floats]()
    for node in model.graph.node:
        settings = {
            attribute.name: helper.get_attribute_value(attribute)
            for attribute in node.attribute
        }
        if node.op_type == "MatMulNBits":
            k, n = settings["K"], settings["N"]
            packed = constants[node.input[1]].reshape(n, -1)
            codes = (
                np.stack([packed & 15, packed >> 4], -1)
                .reshape(n, -1)[:, :k]
                .astype(np.float64)
            )
            scales = constants[node.input[2]].reshape(n, -1).astype(np.float64)
            zeros = np.full(scales.shape, 8.0)
            if len(node.input) > 3 and node.input[3]:
                half = constants[node.input[3]].reshape(n, -1)
                zeros = (
                    np.stack([half & 15, half >> 4], -1)
                    .reshape(n, -1)[:, : scales.shape[1]]
                    .astype(np.float64)
                )
            scale, zero = blocks_of(
                scales, zeros, 1, codes.shape, settings["block_size"]
            )
            found[node.output[0]] = ((codes - zero) * scale).T
        elif node.op_type == "GatherBlockQuantized":
            codes = constants[node.input[0]].astype(np.float64)
            scales = constants[node.input[2]].astype(np.float64)
            zeros = (
                constants[node.input[3]].astype(np.float64)
                if len(node.input) > 3
                else np.zeros(scales.shape)
            )
            scale, zero = blocks_of(
                scales, zeros, 1, codes.shape, settings["block_size"]
            )
            found[node.output[0]] = (codes - zero) * scale
    return found


OLD = [
    ("SimplifiedLayerNormalization", 13),
    ("SimplifiedLayerNormalization", 17),
    ("LayerNormalization", 12),
]


def opset_of(model: ModelProto) -> int:
    return Graph.of(model).opset


@pytest.mark.parametrize("preset", ["INT4", "UINT4"])
@pytest.mark.parametrize(("norm", "opset"), OLD)
def test_contributed_operators_need_no_opset(
    norm: str, opset: int, preset: str
) -> None:
    """Where the opset stays, products and look-ups are MatMulNBits and GatherBlockQuantized, which
    any opset has.
    """
    model = transformer(norm, opset)
    config = QConfig.of(preset).with_(
        max_opset=opset, embedding=QConfig.of(preset).weight
    )
    result = quantize(model, None, config).model
    assert opset_of(result) == opset
    assert [node.op_type for node in result.graph.node] == [
        "GatherBlockQuantized",
        norm,
        "MatMulNBits",
        "Relu",
        "MatMulNBits",
    ]
    assert result.ByteSize() < 0.25 * model.ByteSize()
    weights = unpacked(result)
    for name, array, axis in (("e", TABLE, 1), ("m", FIRST, 0), ("y", SECOND, 0)):
        nearest = rounded(array, axis, signed=preset == "INT4")
        noise, least = (
            np.square(each - array).sum() for each in (weights[name], nearest)
        )
        assert noise < 1.05 * least, name
    for feeds in DATA:
        exact = calculated(norm, feeds["ids"], weights["e"], weights["m"], weights["y"])
        [found] = open_session(result).run(None, feeds)
        np.testing.assert_allclose(
            found, exact, rtol=0, atol=1e-4 * np.abs(exact).max()
        )


@pytest.mark.parametrize("form", ["qdq", "operators"])
@pytest.mark.parametrize("preset", ["INT4", "UINT4", "A8W4", "A16W4"])
@pytest.mark.parametrize(("norm", "opset"), OLD[::2])
def test_every_form_at_an_opset_that_stays(
    norm: str, opset: int, preset: str, form: str
) -> None:
    """Pairs of blocks have a form at every opset as well, and are as near to the float model as at
    a new one.
    """
    model = transformer(norm, opset)
    config = QConfig.of(preset).with_(form=form)
    errors = dict[int, float]()
    for limit in (opset, 21):
        chosen = config.with_(max_opset=limit)
        result = quantize(model, DATA if config.measures else None, chosen)
        assert opset_of(result.model) == limit and result.report.operators[
            "MatMul"
        ] == (2, 2)
        session = open_session(result.model)
        errors[limit] = sum(
            float(
                np.square(
                    calculated(norm, feeds["ids"], TABLE, FIRST, SECOND)
                    - session.run(None, feeds)[0]
                ).sum()
            )
            for feeds in DATA
        )
    power = sum(
        float(np.square(calculated(norm, feeds["ids"], TABLE, FIRST, SECOND)).sum())
        for feeds in DATA
    )
    assert errors[opset] < 0.03 * power
    assert errors[opset] < 1.05 * errors[21]


@pytest.mark.parametrize(
    "preset", ["INT4", "UINT4", "FP8E4M3", "FP4E2M1", "BFP16", "A16W8"]
)
@pytest.mark.parametrize(("norm", "opset"), OLD)
def test_operators_of_the_runtime_do_not_keep_the_opset_down(
    norm: str, opset: int, preset: str
) -> None:
    """onnx does not define what onnxruntime adds to the standard domain, which is the same at every
    opset.
    """
    model = transformer(norm, opset)
    config = QConfig.of(preset)
    result = quantize(model, DATA if config.measures else None, config)
    assert opset_of(result.model) >= (17 if preset == "BFP16" else 19)
    assert norm in [node.op_type for node in result.model.graph.node if not node.domain]
    session = open_session(result.model)
    for feeds in DATA:
        exact = calculated(norm, feeds["ids"], TABLE, FIRST, SECOND)
        noise = np.square(exact - session.run(None, feeds)[0]).sum()
        assert 10 * np.log10(np.square(exact).sum() / noise) > (
            8 if preset == "FP4E2M1" else 15
        )


def test_weights_that_no_contributed_operator_multiplies() -> None:
    """A convolution in blocks, inside a body, at an opset without blocks."""
    model = parse(
        """g (float[N,32,6,6] x, bool c) => (float[N,8,6,6] y) {
            [if] y = If (c) <
                then_branch = t () => (float[N,8,6,6] a) { [inner] a = Conv <pads = [1,1,1,1]> (x, k) },
                else_branch = e () => (float[N,8,6,6] b) { [other] z = Conv <pads = [1,1,1,1]> (x, k) b = Tanh (z) }>
        }""",  # noqa: E501
        k=weight(8, 32, 3, 3),
    )
    result = quantize(model, None, QConfig.of("INT4").with_(max_opset=17))
    assert opset_of(result.model) == 17 and result.report.operators["Conv"] == (2, 2)
    for taken in (True, False):
        feeds = {"x": normal(1, 32, 6, 6), "c": np.array(taken)}
        wanted, [found] = (
            open_session(model).run(None, feeds)[0],
            open_session(result.model).run(None, feeds),
        )
        assert (
            10 * np.log10(np.square(wanted).sum() / np.square(found - wanted).sum())
            > 15
        )


@pytest.mark.parametrize(
    ("preset", "name", "needed"), [("FP8E4M3", "fp8e4m3", 19), ("BFP16", "bfp16", 17)]
)
@pytest.mark.parametrize(
    ("line", "opset", "obstacle"),
    [
        ("Hardmax", 11, "node 'odd' (Hardmax) means something else from opset 13 on"),
        (
            'Upsample <mode = "linear", scales = [1.0, 2.0, 2.0, 1.0]>',
            7,
            "node 'odd' (Upsample) means something else from opset 11 on",
        ),
    ],
)
def test_a_format_that_no_operator_has_there_is_refused_with_the_obstacle(
    line: str, opset: int, obstacle: str, preset: str, name: str, needed: int
) -> None:
    """The message names the format, the opset, a node that wants it, and what keeps the opset down."""  # noqa: E501
    model = parse(
        "g (float[N,4,6,8] x) => (float[N,4,6,8] y, z) { [fc] y = MatMul (x, w) [odd]"
        f" z = {line} (x) }}",
        opset=opset,
        ir_version=4,
        w=weight(8, 8),
    )
    model.graph.output[1].CopyFrom(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    )
    message = (
        f"{name} needs opset {needed}, and the model's opset {opset} cannot be raised"
        f" to {needed}; export the model at that opset, or choose another format. Node"
        " 'fc' (MatMul) reads "
    )
    with pytest.raises(
        ModelError, match=f"^{re.escape(message)}'[xw]', .*; {re.escape(obstacle)}"
    ):
        quantize(model, [{"x": normal(1, 4, 6, 8)}], preset)


def test_codes_raise_the_ir_version_only_where_they_are_stored() -> None:
    """MatMulNBits stores bytes, which every IR version has.

    Pairs store 4 bits, which IR version 10 has.
    """
    model = transformer("LayerNormalization", 17)
    versions = {}
    for form in ("operators", "qdq"):
        chosen = QConfig.of("INT4").with_(max_opset=17, form=form, exclude="embed")
        versions[form] = quantize(model, None, chosen).model
    assert {form: each.ir_version for form, each in versions.items()} == {
        "operators": 8,
        "qdq": 10,
    }
    kinds = {tensor.data_type for tensor in versions["operators"].graph.initializer}
    assert TensorProto.INT4 not in kinds
