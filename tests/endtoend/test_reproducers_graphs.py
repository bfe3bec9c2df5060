"""What users of quantizers ran into, one test a thread: the structure of graphs, and single
numbers.

See ``test_reproducers``.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrators.onnx_runtime.cpu_features import saturates
from calibrators.onnx_runtime.session import open_session
from quark_onnx import (
    QConfig,
    QuantizationSpec,
    quantize,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
)
from quark_onnx.common.errors import ModelError
from tests.endtoend.test_reproducers import (
    drawn,
    f32,
    i64,
    image_net,
    sound,
    static,
    stored,
    theirs,
)
from tests.models import Array, Feeds, interface, kinds, normal, parse, tied, weight
from tests.settings import portable

PRESETS = ["A8W8", "S8S8", "A16W8", "XINT8"]


def attributes(model: ModelProto, kind: str) -> list[dict[str, Any]]:
    """The attributes of every node of one operator type."""
    nodes = [node for node in model.graph.node if node.op_type == kind]
    return [
        {a.name: helper.get_attribute_value(a) for a in node.attribute}
        for node in nodes
    ]


def dequantized(model: ModelProto, tensor: str) -> tuple[Array, int]:
    """What the codes of a weight stand for, and along which axis their scales run."""
    [node] = [
        n
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and n.input[0] == tensor
    ]
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    codes, scale = (
        arrays[node.input[0]].astype(np.float64),
        arrays[node.input[1]].astype(np.float64),
    )
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    return (
        codes
        * (
            scale.reshape([-1 if i == axis else 1 for i in range(codes.ndim)])
            if scale.ndim
            else scale
        ),
        axis,
    )


def check_channels(model: ModelProto, tensor: str, original: Array, axis: int) -> None:
    """The scales of a weight run along ``axis``, and each is that channel's own."""
    found, along = dequantized(model, tensor)
    assert along == axis
    others = tuple(i for i in range(original.ndim) if i != axis)
    half_step = np.abs(original).max(axis=others, keepdims=True) / 127 / 2
    assert (np.abs(found - original) <= half_step * 1.001).all()


# 17-30: tails, foreign operators, shared tensors, subgraphs, names


def test_ort_21476_nms_tail() -> None:
    """17: shape inference failed on a detector's NonMaxSuppression.

    Here it passes, and finds the same boxes.
    """
    model = parse(
        """g (float[1,3,8,8] x) => (int64[K,3] found, float[1,64,4] boxes) {
            [conv] h = Conv <pads = [1,1,1,1]> (x, w, b)
            [flat] f = Reshape (h, shape)
            [turn] t = Transpose <perm = [0,2,1]> (f)
            [parts] deltas, logits = Split <axis = 2> (t, sizes)
            [decode] boxes = Add (deltas, anchors)
            [sigmoid] p = Sigmoid (logits)
            [turn2] scores = Transpose <perm = [0,2,1]> (p)
            [nms] found = NonMaxSuppression (boxes, scores, limit, overlap, least)
        }""",
        w=weight(5, 3, 3, 3) * f32([0.1, 0.1, 0.1, 0.1, 4]).reshape(5, 1, 1, 1),
        b=normal(5, scale=0.01),
        shape=i64([0, 5, 64]),
        sizes=i64([4, 1]),
        anchors=f32([[[4 * i, 0, 4 * i + 3, 3] for i in range(64)]]),
        limit=i64([100]),
        overlap=f32([0.5]),
        least=f32([0.2]),
    )
    data = list(drawn(6, 1, 3, 8, 8))
    result = quantize(model, data)
    assert result.report.operators["Conv"] == (1, 1)
    assert any(
        "nms (NonMaxSuppression): it selects detections" in note
        for note in result.report.notes
    )
    onnx.checker.check_model(result.model, full_check=True)
    assert interface(result.model) == interface(model)
    for feeds in data:
        before, after = (
            open_session(each).run(["found", "boxes"], feeds)
            for each in (model, result.model)
        )
        same = {tuple(row) for row in before[0]} & {tuple(row) for row in after[0]}
        assert len(same) >= 0.9 * max(len(before[0]), len(after[0])) > 10
        np.testing.assert_allclose(after[1], before[1], atol=0.05)


@pytest.mark.parametrize("sizes", [(8, 8), (6, 10)])
def test_ort_15898_shape_computed_from_shape(sizes: tuple[int, int]) -> None:
    """18: symbolic shape inference failed on Shape, Gather, Concat, Reshape.

    Here nothing depends on it.
    """
    model = parse(
        """g (float[N,3,H,W] x) => (float[N,L,5] y) {
            [conv] h = Conv <pads = [1,1,1,1]> (x, w)
            [size] s = Shape (h)
            [batch] n = Gather <axis = 0> (s, zero)
            [channels] c = Gather <axis = 0> (s, one)
            [join] target = Concat <axis = 0> (n, c, rest)
            [reshape] f = Reshape (h, target)
            [turn] t = Transpose <perm = [0,2,1]> (f)
            [fc] y = MatMul (t, v)
        }""",
        w=weight(4, 3, 3, 3),
        zero=i64([0]),
        one=i64([1]),
        rest=i64([-1]),
        v=weight(4, 5),
    )
    quantized = static(model, drawn(6, 2, 3, *sizes), "A8W8")
    assert not {"w", "v"} & stored(quantized, "float").keys()
    static(model, [*drawn(2, 1, 3, 4, 4), *drawn(2, 2, 3, *sizes)], "XINT8")


def test_model_optimizer_503_custom_domain(caplog: pytest.LogCaptureFixture) -> None:
    """19: a custom operator stopped everything.

    Here what is around it is quantized, or the operator is named.
    """
    text = """<ir_version: 8, opset_import: ["" : 17, "{0}" : 1]> g (float[2,4] x) => (float[2,4] y) {{
        [first] h = MatMul (x, w)
        [custom] p, n = {0}.NegPos (h)
        [second] y = MatMul (n, w)
    }}"""  # noqa: E501
    model = parse(text.format("ai.onnx.contrib"), w=weight(4, 4))
    quantized = static(model, drawn(6, 2, 4))
    assert [node.domain for node in quantized.graph.node if node.name == "custom"] == [
        "ai.onnx.contrib"
    ]
    assert "w" not in stored(quantized, "float")
    unknown = parse(text.format("my.own"), w=weight(4, 4))
    with pytest.raises(ModelError, match=r"my\.own:NegPos"):
        quantize_static(unknown, drawn(2, 2, 4))
    weights_only = quantize_weights(unknown)  # needs no run
    assert "w" not in stored(weights_only, "float")
    assert "neither loaded nor run" in caplog.text and "my.own:NegPos" in caplog.text


def test_ort_8770_fused_attention() -> None:
    """20: onnxruntime's fused transformer operators had no ranges.

    Here they pass through between quantized layers.
    """
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[N,5,8] x) => (float[N,5,8] y) {
            [in] h = MatMul (x, wi)
            [attention] a = com.microsoft.Attention <num_heads = 2> (h, wqkv, bqkv)
            [out] o = MatMul (a, wo)
            [skip] s = com.microsoft.SkipLayerNormalization <epsilon = 0.00001> (o, h, gamma, beta)
            [last] y = MatMul (s, wl)
        }""",  # noqa: E501
        wi=weight(8, 8),
        wqkv=weight(8, 24),
        bqkv=normal(24, scale=0.1),
        wo=weight(8, 8, seed=1),
        wl=weight(8, 8, seed=2),
        gamma=np.ones(8, np.float32),
        beta=np.zeros(8, np.float32),
    )
    for preset in ("A8W8", "A16W8"):
        quantized = static(model, drawn(6, 2, 5, 8), preset)
        assert {"Attention", "SkipLayerNormalization"} <= set(kinds(quantized))
        assert not {"wi", "wo", "wl"} & stored(quantized, "float").keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_ort_21277_shared_weight_of_two_matmuls(preset: str) -> None:
    """21: of two readers of one weight only one was quantized.

    Here both are, and share one copy.
    """
    text = (
        "g (float[N,8] x, float[N,8] z) => (float[N,8] y, float[N,8] u) { y = MatMul"
        " (x, w) u = MatMul (z, w) }"
    )
    model = parse(text, w=weight(8, 8))
    quantized = static(
        model,
        [
            {"x": normal(4, 8, seed=i), "z": 9 * normal(4, 8, seed=i + 9)}
            for i in range(6)
        ],
        preset,
    )
    assert "w" not in stored(quantized, "float")
    assert [
        codes.shape for codes in stored(quantized, "int8").values() if codes.ndim == 2
    ] == [(8, 8)]


def shared_bias(first: str = "h") -> ModelProto:
    """One bias for two layers, which a quantizer has to copy."""
    return parse(
        f"""g (float[N,3,4,4] x) => (float[N,3,4,4] y) {{
            [c1] {first} = Conv (x, w, b)
            [c2] y = Conv ({first}, w, b)
        }}""",
        w=weight(3, 3, 1, 1),
        b=normal(3),
    )


def test_ort_24705_names_that_are_taken() -> None:
    """22: the copy of an initializer got a name that a tensor had.

    Here no new name is one that is there already.
    """
    data = list(drawn(4, 2, 3, 4, 4))
    plain = static(shared_bias(), data)
    old = {"x", "y", "h", "w", "b"}
    new = {
        name
        for node in plain.graph.node
        for name in (*node.input, *node.output, node.name)
    } - old
    new |= {tensor.name for tensor in plain.graph.initializer} - old
    assert len(new) > 10
    for name in sorted(new | {"b0", "b_0", "b_1", "b_copy", "b_duplicated"}):
        model = shared_bias(name)
        model.graph.value_info.append(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 4, 4])
        )
        quantized = static(model, data)
        defined = [n for node in quantized.graph.node for n in node.output] + [
            t.name for t in quantized.graph.initializer
        ]
        assert len(defined) == len(set(defined))


@pytest.mark.parametrize("preset", PRESETS)
def test_qnn_739_bias_shared_by_four_convolutions(preset: str) -> None:
    """23: one int32 bias served four input scales, 56.6 instead of 81.5 mAP.

    Here each layer has its own codes.
    """
    factors = (1.0, 3.0, 6.0, 12.0)
    body = " ".join(f"s{i} = Mul (x, k{i})  y{i} = Conv (s{i}, w, b)" for i in range(4))
    outputs = ", ".join(f"float[N,3,4,4] y{i}" for i in range(4))
    constants: dict[str, Any] = {f"k{i}": f32([k]) for i, k in enumerate(factors)}
    model = parse(
        f"g (float[N,3,4,4] x) => ({outputs}) {{ {body} }}",
        w=weight(3, 3, 1, 1),
        b=5 * normal(3),
        **constants,
    )
    quantized = static(model, drawn(6, 2, 3, 4, 4), preset, bound=25.0)
    arrays = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    makers = {node.output[0]: node for node in quantized.graph.node}
    found = []
    for node in quantized.graph.node:
        if node.op_type == "Conv":
            x, w, b = (arrays[makers[name].input[1]] for name in node.input)
            np.testing.assert_allclose(b, (x * w) * np.ones_like(b), rtol=1e-6)
            found.append(float(b.max()))
    assert len(found) == 4 and max(found) > 6 * min(found)


def ids() -> list[Feeds]:
    return [{"ids": np.random.default_rng(i).integers(0, 7, (2, 3))} for i in range(6)]


def test_ort_28326_tied_embedding() -> None:
    """24: a fusion consumed the table that an embedding and the last layer share.

    Here both readers are served.
    """
    model, data = tied(), ids()
    for quantized in (
        *(static(model, data, preset) for preset in PRESETS),
        quantize_dynamic(model, portable(QConfig.of("DYNAMIC"))),
    ):
        sound(model, quantized, data)
        assert (
            max(array.size for array in stored(quantized, "float").values()) <= 7
        )  # scales alone
    sound(model, quantize_weights(model), data)
    sound(model, quantize_weights(model, "INT4"), data, bound=12.0)


def test_ort_28326_tied_table_is_stored_once() -> None:
    """24: where both readers want the same codes, there is one copy of them."""
    quantized = quantize_static(tied(), ids(), "XINT8")
    assert (
        len([codes for codes in stored(quantized, "int8").values() if codes.ndim == 2])
        == 1
    )


def test_ort_28326_tied_table_does_not_grow() -> None:
    """24: a model whose weights are quantized holds no float copy of them."""
    assert (
        max(array.size for array in stored(quantize_weights(tied()), "float").values())
        <= 7
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_ort_19418_branches_share_an_initializer(preset: str) -> None:
    """25: an initializer that both branches of an If read was lost.

    Here either branch computes what it did.
    """
    model = parse(
        """g (float[N,8] x, bool c) => (float[N,8] y) {
            [fc] h = MatMul (x, w)
            [if] r = If (c) <
                then_branch = a () => (float[N,8] t) { t = MatMul (h, w) },
                else_branch = b () => (float[N,8] e) { n = Neg (h)  e = MatMul (n, w) }
            >
            [last] y = MatMul (r, w)
        }""",
        w=weight(8, 8),
    )
    for way in (True, False):
        data = [{"x": normal(4, 8, seed=i), "c": np.array(way)} for i in range(6)]
        quantized = static(model, data, preset)
        sound(model, quantized, [{**feeds, "c": np.array(not way)} for feeds in data])
    sound(model, quantize_dynamic(model, portable(QConfig.of("DYNAMIC"))), data)
    sound(model, quantize_weights(model), data)


def test_ort_18681_lstm_in_a_loop() -> None:
    """26: an LSTM inside a Loop was an error.

    Here the loop passes through, and what is around it is quantized.
    """
    model = parse(
        """g (float[5,N,4] x) => (float[5,N,3] y) {
            [in] h = MatMul (x, w)
            [loop] r = Loop (times, always, h) <
                body = b (int64 i, bool c, float[5,N,4] s) => (bool d, float[5,N,4] o) {
                    d = Identity (c)
                    seq, hn, cn = LSTM <hidden_size = 4> (s, wl, rl)
                    o = Squeeze (seq, one)
                }
            >
            [out] y = MatMul (r, v)
        }""",
        w=weight(4, 4),
        v=weight(4, 3),
        wl=weight(1, 16, 4),
        rl=weight(1, 16, 4, seed=1),
        times=np.int64(2),
        always=np.array(True),
        one=i64([1]),
    )
    data = list(drawn(6, 5, 2, 4))
    for quantized in (
        static(model, data),
        static(model, data, "XINT8"),
        quantize_dynamic(model),
        quantize_weights(model),
    ):
        sound(model, quantized, data)
        assert not {"w", "v"} & stored(quantized, "float").keys()


@pytest.mark.parametrize("named", [False, True])
def test_ort_7707_names_of_nodes(named: bool) -> None:
    """27: "two nodes with same node name" after quantizing.

    Here empty names, and names that look taken, give none.
    """
    model, data = image_net(), list(drawn(4, 2, 3, 8, 8))
    new = [
        node.name
        for node in static(model, data).graph.node
        if node.op_type.endswith("quantizeLinear")
    ]
    for node, name in zip(model.graph.node, new, strict=False):
        node.name = name if named else ""
    found = [node.name for node in static(model, data).graph.node if node.name]
    assert len(found) == len(set(found)) >= len(new) > 4


@pytest.mark.parametrize(
    "behind", ["Cast", "Identity", "Transpose", "Reshape", "Constant"]
)
def test_ort_13358_weight_behind_a_cast(behind: str) -> None:
    """28: "Expected InsertedCast_... to be an initializer".

    Here a weight is seen through what it lies behind.
    """
    w = weight(6, 4)
    spelled: dict[str, tuple[str, dict[str, Any]]] = {
        "Cast": ("c = Cast <to = 1> (w)", {"w": w.astype(np.float16)}),
        "Identity": ("c = Identity (w)", {"w": w}),
        "Transpose": ("c = Transpose <perm = [1,0]> (w)", {"w": w.T.copy()}),
        "Reshape": (
            "c = Reshape (w, shape)",
            {"w": w.reshape(3, 8), "shape": i64([6, 4])},
        ),
        "Constant": ("c = Constant <value = float[2,2] {1.0, -0.5, 0.25, 2.0}> ()", {}),
    }
    text, constants = spelled[behind]
    width = 2 if behind == "Constant" else 6
    model = parse(
        f"g (float[N,{width}] x) => (float[N,M] y) {{ {text} y = MatMul (x, c) }}",
        **constants,
    )
    data = list(drawn(6, 2, width))
    for quantized in (static(model, data), sound(model, quantize_weights(model), data)):
        [codes] = [
            codes for codes in stored(quantized, "int8").values() if codes.ndim == 2
        ]
        assert codes.shape == ((2, 2) if behind == "Constant" else (6, 4))
        assert behind not in kinds(quantized)


def test_ort_11313_concat_of_int64() -> None:
    """29: "Only float type quantization is supported" for a Concat of integers.

    Here it stays what it is.
    """
    model = parse(
        """g (float[N,4] x, int64[N,1] i, int64[N,2] j) => (int64[N,3] k, float[N,8] y) {
            [ids] k = Concat <axis = 1> (i, j)
            [fc] h = MatMul (x, w)
            [floats] y = Concat <axis = 1> (h, x)
        }""",
        w=weight(4, 4),
    )
    data = [
        {"x": normal(2, 4, seed=n), "i": i64([[n], [2]]), "j": i64([[3, 4], [5, n]])}
        for n in range(6)
    ]
    quantized = static(model, data)
    assert [
        list(node.input) for node in quantized.graph.node if node.name == "ids"
    ] == [["i", "j"]]


def test_ort_9635_tensors_without_elements() -> None:
    """30: an initializer of no elements was an error; here it is left alone."""
    model = parse(
        """g (float[1,3,4,4] x) => (float[1,3,8,8] y, float[1,3,4,4] z) {
            [conv] h = Conv (x, w)
            [resize] y = Resize <mode = "nearest"> (h, roi, scales)
            [join] z = Concat <axis = 1> (h, empty)
        }""",
        w=weight(3, 3, 1, 1),
        roi=np.zeros(0, np.float32),
        scales=f32([1, 1, 2, 2]),
        empty=np.zeros((1, 0, 4, 4), np.float32),
    )
    for preset in PRESETS:
        static(model, drawn(6, 1, 3, 4, 4), preset)


# 32-38: one tensor for several readers, axes of channels


def test_nncf_1936_one_tensor_for_two_convolutions() -> None:
    """32: "Duplicate definition-site", and a model that did not shrink.

    Here one pair serves both.
    """
    model = parse(
        """g (float[N,32,4,4] x) => (float[N,32,4,4] y) {
            [stem] h = Relu (x)
            [left] l = Conv <pads = [1,1,1,1]> (h, w, b)
            [right] r = Conv <pads = [1,1,1,1]> (h, v, c)
            [sum] y = Add (l, r)
        }""",
        w=weight(32, 32, 3, 3),
        v=weight(32, 32, 3, 3, seed=1),
        b=normal(32),
        c=normal(32, seed=1),
    )
    quantized = static(model, drawn(6, 2, 32, 4, 4))
    convolutions = [node for node in quantized.graph.node if node.op_type == "Conv"]
    assert len({node.input[0] for node in convolutions}) == 1
    assert quantized.ByteSize() < model.ByteSize() / 3
    assert sum(codes.any() for codes in stored(quantized, "int32").values()) == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_ort_14501_output_inside_the_graph(preset: str) -> None:
    """34: an output that other nodes read as well was None after quantizing.

    Here all outputs are there, in order.
    """
    model = parse(
        """g (float[N,3,4,4] x) => (float[N,2,4,4] last, float[N,4,4,4] h, float[N,4,4,4] r) {
            [c1] h = Conv (x, w)
            [relu] r = Relu (h)
            [c2] last = Conv (r, v)
        }""",
        w=weight(4, 3, 1, 1),
        v=weight(2, 4, 1, 1),
    )
    quantized = static(model, drawn(6, 2, 3, 4, 4), preset)
    assert [value.name for value in quantized.graph.output] == ["last", "h", "r"]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("opset", [11, 17])
def test_ort_19694_channels_of_a_transposed_convolution(group: int, opset: int) -> None:
    """35: its output channels are axis 1 of the weight, not 0; here they are, at any opset."""
    w = weight(4, 6 // group, 3, 3) * f32(
        10.0 ** np.arange(-1, 6 // group - 1)
    ).reshape(1, -1, 1, 1)
    text = (
        "g (float[N,4,5,5] x) => (float[N,6,7,7] y) { y = ConvTranspose <group ="
        f" {group}> (x, w, b) }}"
    )
    model = parse(text, opset=opset, w=w, b=normal(6))
    quantized = static(model, drawn(6, 2, 4, 5, 5))
    check_channels(quantized, "w_quantized", w, axis=1)


@pytest.mark.parametrize(
    "bias", [None, (), (1,), (3,), (1, 3), (2, 3), (2, 1)], ids=str
)
@pytest.mark.parametrize("trans", [0, 1])
def test_ort_24815_gemm(trans: int, bias: tuple[int, ...] | None) -> None:
    """36: the axis of a transposed weight, and a bias of one element, broke Gemm.

    Here any that broadcasts works.
    """
    w = weight(3, 6) * f32([[1], [10], [0.1]])
    constants: dict[str, Any] = {"w": w if trans else w.T.copy()} | (
        {} if bias is None else {"b": normal(*bias)}
    )
    inputs = ", ".join(["x", *constants])
    model = parse(
        f"g (float[2,6] x) => (float[2,3] y) {{ y = Gemm <transB = {trans}>"
        f" ({inputs}) }}",
        **constants,
    )
    data = list(drawn(6, 2, 6))
    for preset in PRESETS:
        quantized = static(model, data, preset)
        if preset != "XINT8":
            check_channels(quantized, "w_quantized", constants["w"], axis=1 - trans)
    sound(model, quantize_dynamic(model, portable(QConfig.of("DYNAMIC"))), data)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 3])
def test_ort_convolutions_of_other_ranks(rank: int, group: int, preset: str) -> None:
    """37: 1-D and 3-D convolutions, grouped and depthwise, are quantized like those of images."""
    space, out = ",".join("6" * rank), ",".join("4" * rank)
    w = weight(8, 4 // group, *[3] * rank) * f32(10.0 ** (np.arange(8) % 3)).reshape(
        8, *[1] * (rank + 1)
    )
    text = (
        f"g (float[N,4,{space}] x) => (float[N,8,{out}] y) {{ y = Conv <group ="
        f" {group}> (x, w, b) }}"
    )
    model = parse(text, w=w, b=normal(8))
    quantized = static(model, drawn(4, 2, 4, *[6] * rank), preset)
    if preset != "XINT8":
        check_channels(quantized, "w_quantized", w, axis=0)
    assert list(attributes(quantized, "Conv")) == [{"group": group}]


@pytest.mark.parametrize("prepare", [True, False])
@pytest.mark.parametrize(
    ("axes", "shape"), [([2], (4, 3, 3)), ([0], (3, 1, 1)), ([1], (4, 3, 3))], ids=str
)
def test_ort_21793_axis_behind_an_unsqueeze(
    axes: list[int], shape: tuple[int, ...], prepare: bool
) -> None:
    """38: an Unsqueeze in front of the channels moved their axis, but not the scales'.

    Here the codes are right.
    """
    full = np.expand_dims(weight(*shape), tuple(axes))
    full = full * f32(10.0 ** np.arange(full.shape[0])).reshape(-1, 1, 1, 1)
    size = [1, full.shape[1], 6, 6]
    model = parse(
        f"g (float[{','.join(map(str, size))}] x) => (float[1,M,H,W] y) {{ u ="
        " Unsqueeze (w, axes) y = Conv (x, u) }",
        w=full.reshape(shape),
        axes=i64(axes),
    )
    data = list(drawn(6, *size))
    for preset in PRESETS:
        quantized = static(model, data, preset, prepare=prepare)
    if prepare:
        quantized = static(model, data, "A8W8")
        [name] = [
            name for name, codes in stored(quantized, "int8").items() if codes.ndim == 4
        ]
        check_channels(quantized, name, full, axis=0)


# 39-42: numbers


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("kind", ["Conv", "Gemm"])
def test_ort_22020_tiny_weight_and_large_bias(
    kind: str, per_channel: bool, preset: str
) -> None:
    """39: int32 clipped a bias beside a weight scale of 7.8e-10, 51 % accuracy lost.

    Here it keeps its value.
    """
    size: tuple[int, ...]
    if kind == "Conv":
        text, w, size = (
            "Conv (x, w, b)",
            1e-7 * normal(2, 3, 1, 1).clip(-1, 1),
            (2, 3, 4, 4),
        )
    else:
        text, w, size = (
            "Gemm <transB = 1> (x, w, b)",
            1e-7 * normal(2, 3).clip(-1, 1),
            (2, 3),
        )
    model = parse(
        f"g (float[{','.join(map(str, size))}] x) =>"
        f" (float[2,2{',4,4' if kind == 'Conv' else ''}] y) {{ y = {text} }}",
        w=w.astype(np.float32),
        b=f32([5, -4.5]),
    )
    quantized = static(
        model, drawn(6, *size), preset, bound=30.0, per_channel=per_channel
    )
    for codes in stored(quantized, "int32").values():
        assert (np.abs(codes.astype(np.int64)) < 2**31 - 1).all()


@pytest.mark.parametrize("preset", [*PRESETS, "FP8E4M3"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-38, 6e-8, 65504.0, 3e38])
def test_coremltools_2851_scales_that_underflow(value: float, preset: str) -> None:
    """40: a channel of zeros or denormals got a scale of 0, and then NaN.

    Here every scale is a normal number.
    """
    w = weight(3, 4)
    w[1] = np.float32(value) * f32([1, -1, 0.5, 0])
    model = parse(
        "g (float[N,4] x) => (float[N,3] y) { y = Gemm <transB = 1> (x, w) }", w=w
    )
    data = [{"x": normal(2, 4, seed=i) * np.float32(0.1)} for i in range(6)]
    quantized = static(model, data, preset)
    scales = [
        array
        for name, array in stored(quantized, "float").items()
        if name.endswith("scale")
    ]
    assert len(scales) >= 2
    for scale in scales:
        assert (scale >= np.finfo(np.float32).tiny).all() and np.isfinite(scale).all()


def test_coremltools_2851_float16_underflow() -> None:
    """40: weights whose scale is below float16 keep their values in a float16 model."""
    model = parse(
        "g (float16[N,8] x) => (float16[N,3] y) { y = MatMul (x, w) }",
        w=(1e-6 * normal(8, 3)).astype("float16"),
    )
    data = [{"x": 1000 * normal(4, 8, seed=i).astype(np.float16)} for i in range(6)]
    static(model, data, bound=20.0)


@pytest.mark.parametrize("spelling", ["own", "onnxruntime"])
def test_ort_6004_sums_of_products_that_saturate(spelling: str) -> None:
    """41: without VNNI, two products of u8 and s8 are added in 16 bits.

    With reduce_range no such sum leaves them.
    """
    w = np.where(normal(64, 8) > 0, 1.0, -1.0).astype(np.float32)
    model = parse("g (float[N,64] x) => (float[N,8] y) { y = MatMul (x, w) }", w=w)
    data: list[Feeds] = [
        {"x": np.full((1, 64), 1, np.float32)},
        {"x": np.abs(normal(4, 64)).clip(0, 1)},
    ]
    if spelling == "own":
        narrow = QuantizationSpec("int8", per_channel=True, reduce_range=True)
        quantized = static(model, data, QConfig(weight=narrow), bound=25.0)
    else:
        quantized = theirs(
            model,
            data,
            activation_type="QUInt8",
            weight_type="QInt8",
            reduce_range=True,
        )
        sound(model, quantized, data, bound=25.0)
    codes = stored(quantized, "int8")["w_quantized"].astype(np.int64)
    assert 255 * 2 * np.abs(codes).max() <= 2**15 - 1
    assert (
        np.abs(stored(quantize_static(model, data), "int8")["w_quantized"]).max() == 127
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_ort_16105_largest_codes(preset: str) -> None:
    """41: integer kernels were wrong for some weights.

    Whatever runs the model, its outputs are those of ONNX.

    But where activations have 16 bits onnxruntime 1.32 rounds those of a MatMul to blocks of 8
    bits, unless it is told.
    """
    model = parse(
        "g (float[N,64] x) => (float[N,8] y) { h = Gemm (x, w, b) y = Relu (h) }",
        w=np.where(normal(64, 8) > 0, 1.0, -1.0).astype(np.float32),
        b=normal(8),
        opset=19,  # the reference has no older DequantizeLinear
    )
    data = [
        {"x": np.where(normal(4, 64, seed=i) > 0, 1, -1).astype(np.float32)}
        for i in range(4)
    ]
    quantized = static(model, data, preset, bound=25.0)
    reference = ReferenceEvaluator(quantized)
    step = max(
        float(array.max())
        for name, array in stored(quantized, "float").items()
        if name.endswith("y_scale")
    )
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if saturates():  # as this test is about: the model is computed without such kernels
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    exact, default = (
        ort.InferenceSession(quantized.SerializeToString(), options),
        open_session(quantized),
    )
    for feeds in data:
        [expected], [found] = list(reference.run(None, feeds)), exact.run(None, feeds)
        np.testing.assert_allclose(found, expected, atol=1.01 * step)
        [found] = default.run(None, feeds)
        np.testing.assert_allclose(
            found, expected, atol=1.01 * step + np.abs(expected).max() * 2**-8
        )


@pytest.mark.parametrize("preset", PRESETS)
def test_ort_11576_optimizations_on_and_off(preset: str) -> None:
    """42: five points of accuracy were lost with graph optimizations on.

    Here they change a rounding at most.
    """
    model = parse(
        """g (float[N,8,8,8] x) => (float[N,4] y) {
            c1 = Conv <pads = [1,1,1,1]> (x, w1, b)
            s1 = Sigmoid (c1)
            m1 = Mul (c1, s1)
            c2 = Conv <pads = [1,1,1,1], group = 8> (m1, w2, b)
            r2 = Clip (c2, low, high)
            p = GlobalAveragePool (r2)
            e = Conv (p, w3, b)
            g = HardSigmoid (e)
            q = Mul (r2, g)
            a = Add (q, x)
            z = GlobalAveragePool (a)
            f = Flatten (z)
            y = Gemm (f, w4)
        }""",
        w1=weight(8, 8, 3, 3),
        w2=weight(8, 1, 3, 3),
        w3=weight(8, 8, 1, 1),
        w4=weight(8, 4),
        b=normal(8, scale=0.1),
        low=np.float32(0),
        high=np.float32(6),
    )
    data = list(drawn(8, 2, 8, 8, 8))
    quantized = static(model, data, preset)
    signal = error = 0.0
    for feeds in data:
        [on], [off] = (
            open_session(quantized, optimize=optimize).run(None, feeds)
            for optimize in (True, False)
        )
        signal, error = (
            signal + float(np.square(on).sum()),
            error + float(np.square(on - off).sum()),
        )
    assert 10 * np.log10(signal / (error + 1e-12)) > 35


# 43, 45, 49, 52-57: heads, recurrent layers, what accelerators are given


def test_tnn_1947_yolo_head() -> None:
    """43: boxes up to 640 and scores below 1 in one output left no score above 0.

    Here they stay float.
    """
    model = parse(
        """g (float[1,3,8,8] x) => (float[1,6,64] y) {
            [conv] h = Conv <pads = [1,1,1,1]> (x, w, b)
            [flat] f = Reshape (h, shape)
            [parts] deltas, logits = Split <axis = 1> (f, sizes)
            [unit] u = Sigmoid (deltas)
            [decode] boxes = Mul (u, stride)
            [score] scores = Sigmoid (logits)
            [join] y = Concat <axis = 1> (boxes, scores)
        }""",
        w=weight(6, 3, 3, 3),
        b=normal(6),
        shape=i64([0, 6, 64]),
        sizes=i64([4, 2]),
        stride=f32([640.0]),
    )
    data = list(drawn(8, 1, 3, 8, 8))
    for preset in ("A8W8", "S8S8", "XINT8"):
        result = quantize(model, data, preset)
        assert result.report.operators["Conv"] == (1, 1)
        assert any(
            "join (Concat): it joins" in note and "stay float" in note
            for note in result.report.notes
        )
        sound(model, result.model, data)
        for feeds in data:
            before, after = (
                open_session(each).run(None, feeds)[0][:, 4:]
                for each in (model, result.model)
            )
            assert np.abs(before - after).max() < 0.06
    unsafe = quantize(model, data, QConfig(safe=False)).model
    [y] = open_session(unsafe).run(None, data[0])
    assert len(np.unique(y[:, 4:])) <= 2  # what the default is there for


@pytest.mark.parametrize("preset", PRESETS)
def test_rai_390_super_resolution_with_prelu(preset: str) -> None:
    """45: trained PReLU slopes were miscompiled without a word.

    Here the graph is near float in every format.
    """
    model = parse(
        """g (float[1,3,6,6] x) => (float[1,3,12,12] y) {
            c1 = Conv <pads = [1,1,1,1]> (x, w1, b)
            p1 = PRelu (c1, s1)
            c2 = Conv <pads = [1,1,1,1]> (p1, w2, b)
            p2 = PRelu (c2, s2)
            a = Add (p1, p2)
            c3 = Conv <pads = [1,1,1,1]> (a, w3)
            d = DepthToSpace <blocksize = 2, mode = "CRD"> (c3)
            u = Resize <mode = "nearest"> (x, none, scales)
            y = Add (d, u)
        }""",
        w1=weight(8, 3, 3, 3),
        w2=weight(8, 8, 3, 3),
        w3=weight(12, 8, 3, 3),
        b=normal(8, scale=0.1),
        s1=normal(8, 1, 1, scale=0.4),
        s2=normal(8, 1, 1, scale=0.4, seed=1),
        none=np.zeros(0, np.float32),
        scales=f32([1, 1, 2, 2]),
    )
    quantized = static(model, drawn(8, 1, 3, 6, 6), preset)
    assert "PRelu" in kinds(quantized)


def recurrent(kind: str, directions: int) -> ModelProto:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    direction = "bidirectional" if directions == 2 else "forward"
    return parse(
        f"""g (float[7,N,8] x) => (float[7,N,3] y) {{
            [in] h = MatMul (x, w)
            [rnn] s = {kind} <hidden_size = 16, direction = "{direction}"> (h, wi, wr, b)
            [turn] t = Transpose <perm = [0,2,1,3]> (s)
            [flat] f = Reshape (t, shape)
            [out] y = MatMul (f, v)
        }}""",
        w=weight(8, 8),
        wi=weight(directions, gates * 16, 8),
        wr=weight(directions, gates * 16, 16),
        b=normal(directions, 2 * gates * 16, scale=0.1),
        shape=i64([0, 0, 16 * directions]),
        v=weight(16 * directions, 3),
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("directions", [1, 2])
def test_ort_9796_recurrent_layers(kind: str, directions: int) -> None:
    """49: GRU was never supported.

    Here recurrent layers pass through, and the layers around them are quantized.
    """
    model, data = recurrent(kind, directions), list(drawn(6, 7, 2, 8))
    for quantized in (
        static(model, data),
        quantize_dynamic(model, portable(QConfig.of("DYNAMIC"))),
        quantize_weights(model),
    ):
        sound(model, quantized, data)
        assert not {"w", "v"} & stored(quantized, "float").keys()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_ort_9796_recurrent_weights(kind: str) -> None:
    """49: the weights of a recurrent layer, which are most of its model, are stored in 8 bits."""
    model, data = recurrent(kind, 2), list(drawn(6, 7, 2, 8))
    quantized = sound(model, quantize_weights(model), data)
    assert not {"wi", "wr"} & stored(quantized, "float").keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_onnxsim_1404_convolution_without_attributes(preset: str) -> None:
    """52: a Conv that relies on defaults ended an accelerator's compiler.

    Here it is what spelled ones are.
    """
    constants: dict[str, Any] = {"w": weight(4, 3, 3, 3), "b": normal(4)}
    text = "g (float[1,3,6,6] x) => (float[1,4,4,4] y) {{ y = Conv {0} (x, w, b) }}"
    spelled = (
        "<kernel_shape = [3,3], strides = [1,1], pads = [0,0,0,0], dilations = [1,1],"
        " group = 1>"
    )
    data = list(drawn(6, 1, 3, 6, 6))
    short, long = (
        static(parse(text.format(each), **constants), data, preset)
        for each in ("", spelled)
    )
    for feeds in data:
        [a], [b] = (open_session(each).run(None, feeds) for each in (short, long))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ("ceil_mode = 1, strides = [2,2]", 24),
        ("pads = [0,0,1,1], strides = [2,2]", 24),
        ("pads = [1,0,0,1]", 47),
        ('auto_pad = "SAME_UPPER", strides = [2,2]', 24),
        ('auto_pad = "SAME_LOWER"', 47),
    ],
)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_rai_264_pooling_at_the_edge(
    kind: str, preset: str, how: str, size: int
) -> None:
    """53: a pool came out as 23x159 instead of 24x160; here it stays the same pool."""
    model = parse(
        f"""g (float[1,3,47,47] x) => (float[1,4,{size},{size}] y) {{
            c = Conv <pads = [1,1,1,1]> (x, w)
            p = {kind} <kernel_shape = [2,2], {how}> (c)
            y = Relu (p)
        }}""",
        w=weight(4, 3, 3, 3),
    )
    quantized = static(model, drawn(2, 1, 3, 47, 47), preset)
    assert attributes(quantized, kind) == attributes(model, kind)


@pytest.mark.parametrize("preset", PRESETS)
def test_rai_126_model_of_one_convolution(preset: str) -> None:
    """54: a model with a single Conv was "not a supported CNN model".

    Here it is quantized whole.
    """
    model = parse(
        "g (float[1,3,4,4] x) => (float[1,2,4,4] y) { y = Conv (x, w, b) }",
        w=weight(2, 3, 1, 1),
        b=normal(2),
    )
    quantized = static(model, drawn(6, 1, 3, 4, 4), preset)
    expected = ["DequantizeLinear"] * 4 + ["QuantizeLinear"] * 2 + ["Conv"]
    assert sorted(kinds(quantized)) == sorted(expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_rai_169_pool_then_multiply(preset: str) -> None:
    """55: a node read a tensor that nothing made, behind a global pool.

    Here every input is made before it is read.
    """
    model = parse(
        """g (float[N,3,7,7] x) => (float[N,4] y) {
            [conv] h = Conv <pads = [1,1,1,1]> (x, w, b)
            [relu] r = Relu (h)
            [pool] p = GlobalAveragePool (r)
            [mul] m = Mul (p, k)
            [flat] f = Flatten (m)
            [fc] y = Gemm (f, v)
        }""",
        w=weight(6, 3, 3, 3),
        b=normal(6),
        k=f32([0.98]),
        v=weight(6, 4),
    )
    for node in model.graph.node[2:4]:
        node.name = f"/avgpool/{node.op_type}"
    data = list(drawn(6, 1, 3, 7, 7))
    quantized = static(model, data, preset)
    for each in (
        quantized,
        quantize_static(quantized, data, QConfig.of(preset).with_(keep_existing=True)),
    ):
        made = {tensor.name for tensor in each.graph.initializer} | {"x"}
        for node in each.graph.node:
            assert made.issuperset(node.input), node.name
            made.update(node.output)
        sound(model, each, data)


@pytest.mark.parametrize("preset", PRESETS)
def test_rai_214_and_401_batches(preset: str) -> None:
    """56: batch slots above the first were never written.

    Here each row of a batch is what it is alone.
    """
    data, rows = list(drawn(6, 1, 3, 8, 8)), normal(4, 3, 8, 8, seed=3)
    dynamic = static(image_net(), data, preset)
    fixed = image_net()
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2
    pairs: list[Feeds] = [
        {"x": np.concatenate([a["x"], b["x"]])} for a, b in itertools.pairwise(data)
    ]
    two = static(fixed, pairs, preset)
    for quantized, size in ((dynamic, 4), (two, 2)):
        session = open_session(quantized)
        [together] = session.run(None, {"x": rows[:size]})
        for row in range(size):
            alone = session.run(
                None,
                {
                    "x": np.repeat(
                        rows[row : row + 1], 1 if quantized is dynamic else 2, axis=0
                    )
                },
            )
            np.testing.assert_allclose(
                together[row], alone[0][0], atol=1e-3
            )  # float sums are ordered otherwise
        assert len(np.unique(together, axis=0)) == size


GELU = {
    "erf": (
        (
            "d = Div (h, root)  e = Erf (d)  o = Add (e, one)  t = Mul (h, o)  a = Mul"
            " (t, half)"
        ),
        17,
    ),
    "tanh": (
        (
            "q = Pow (h, three) c = Mul (q, k) i = Add (h, c) j = Mul (i, l) e = Tanh"
            " (j) o = Add (e, one) t = Mul (h, o)  a = Mul (t, half)"
        ),
        17,
    ),
    "operator": ("a = Gelu (h)", 20),
    "contrib": ("a = com.microsoft.Gelu (h)", 17),
}


@pytest.mark.parametrize("form", GELU)
@pytest.mark.parametrize("preset", PRESETS)
def test_rai_127_gelu(preset: str, form: str) -> None:
    """57: Erf kept a transformer off the accelerator.

    Here GELU is quantized in all its spellings, or left float.
    """
    body, opset = GELU[form]
    constants = {
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
        "three": np.float32(3),
        "k": np.float32(0.044715),
        "l": np.float32((2 / np.pi) ** 0.5),
    }
    model = parse(
        f"""<ir_version: 9, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g (float[N,8] x) => (float[N,4] y) {{ h = MatMul (x, w) {body} y = MatMul (a, v) }}""",
        w=weight(8, 16),
        v=weight(16, 4),
        **{name: value for name, value in constants.items() if f"{name})" in body},
    )
    quantized = static(model, drawn(8, 4, 8), preset)
    assert not {"w", "v"} & stored(quantized, "float").keys()
