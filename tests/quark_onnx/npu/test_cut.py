"""A model in two: both after each other compute what the whole computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx import npu
from quark_onnx.common.errors import ConfigError
from tests.models import kinds, normal, parse, run, weight

TEXT = """g (float[N,3,8,8] x) => (float[N,A] boxes, float[N,4,8,8] features) {
    features = Conv (x, w) r = Relu (features) a = Conv (r, u) b = Conv (r, v) s = Sigmoid (b) e = Exp (a)
    m = Mul (s, e) j = ReduceMean <axes = [2, 3], keepdims = 0> (x) f = Flatten (m)
    boxes = Concat <axis = 1> (f, j) }"""  # noqa: E501


def detector() -> onnx.ModelProto:
    return parse(TEXT, w=weight(4, 3, 1, 1), u=weight(2, 4, 1, 1), v=weight(2, 4, 1, 1))


def chained(parts: npu.Parts, feeds: dict[str, Any]) -> dict[str, Any]:
    known = dict(feeds)
    for part in (parts.first, parts.second):
        asked = {value.name: known[value.name] for value in part.graph.input}
        known |= dict(
            zip(
                (value.name for value in part.graph.output),
                run(part, asked),
                strict=True,
            )
        )
    return known


@pytest.mark.parametrize(
    "tensors", [(), ("a", "b"), ("r",), ("s", "a"), ("features",)], ids=str
)
def test_both_compute_what_the_whole_computes(tensors: tuple[str, ...]) -> None:
    model, feeds = detector(), {"x": normal(2, 3, 8, 8)}
    parts = npu.cut(model, tensors)
    assert parts.verified and set(parts.tensors) == set(tensors or ("a", "b"))
    found = chained(parts, feeds)
    for name, expected in zip(("boxes", "features"), run(model, feeds), strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
    for part in (parts.first, parts.second):
        onnx.checker.check_model(part, full_check=True)


def test_the_tail_has_no_products_and_the_front_no_decoding() -> None:
    parts = npu.cut(detector())
    assert kinds(parts.first) == [
        "Conv",
        "Relu",
        "Conv",
        "Conv",
    ] and "Conv" not in kinds(parts.second)
    assert [value.name for value in parts.first.graph.output] == ["features", "a", "b"]
    assert [value.name for value in parts.second.graph.output] == ["boxes"]
    assert len(parts.second.graph.initializer) == 0, "weights go where they are read"


def test_file_to_file(tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx").read_bytes()
    parts = npu.cut(
        tmp_path / "model.onnx", first=tmp_path / "a.onnx", second=tmp_path / "b.onnx"
    )
    assert (tmp_path / "model.onnx").read_bytes() == before
    assert (
        onnx.load(tmp_path / "a.onnx") == parts.first
        and onnx.load(tmp_path / "b.onnx") == parts.second
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (("nothing",), "no node computes the tensor 'nothing'"),
        (("aa",), "did you mean 'a'"),
        (("a",), "behind the cut 'r' is read, too"),
        (("boxes", "features"), "leaves one part empty"),
        (("x",), "no node computes the tensor 'x'"),
    ],
    ids=str,
)
def test_cuts_that_part_nothing(tensors: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        npu.cut(detector(), tensors)


def test_sums_that_are_rounded_otherwise_are_no_defect() -> None:
    conv = "Conv <pads = [1, 1, 1, 1]>"
    text = (
        f"g (float[1,64,16,16] x) => (float[1,64,16,16] y) {{ a = {conv} (x, w) r ="
        f" Relu (a) b = {conv} (r, u)"
    )
    model = parse(
        f"{text} c = Conv (r, v) y = Add (b, c) }}",
        w=normal(64, 64, 3, 3),
        u=normal(64, 64, 3, 3, seed=1),
        v=normal(64, 64, 1, 1),
    )
    assert npu.cut(model).tensors == ("b", "c")


def test_interfaces_of_all_kinds() -> None:
    model = detector()
    model.graph.input.append(
        onnx.helper.make_tensor_value_info("w", 1, [4, 3, 1, 1])
    )  # a constant that is an input, too
    model.graph.output.append(model.graph.input[0])  # an input that is an output, too
    parts = npu.cut(model)
    assert parts.verified and [v.name for v in parts.first.graph.output] == [
        "features",
        "x",
        "a",
        "b",
    ]
    text = parse(
        "g (float[1,2] x) => (string[1,2] y) { a = MatMul (x, w) y = Cast <to = 8>"
        " (a) }",
        w=weight(2, 2),
    )
    assert npu.cut(text).verified
    sequence = parse(
        "g (float[1,2] x) => (float[1,2] y) { a = MatMul (x, w) c = SequenceConstruct"
        " (a, x) y = SequenceAt (c, i) }",
        w=weight(2, 2),
        i=np.array(0, np.int64),
    )
    with pytest.raises(ConfigError, match="goes through 'c', which is no tensor"):
        npu.cut(sequence, ["c"])


def test_files_that_belong_to_others_stay(tmp_path: Path) -> None:
    """Weights of the input, and the first part where both would have one name."""
    model = tmp_path / "in.onnx"
    onnx.save_model(
        detector(),
        model,
        save_as_external_data=True,
        location="first.onnx.data",
        size_threshold=0,
    )
    before = (tmp_path / "first.onnx.data").read_bytes()
    with pytest.raises(ConfigError, match="holds weights of the input model"):
        npu.cut(model, first=tmp_path / "first.onnx", second=tmp_path / "b.onnx")
    assert (tmp_path / "first.onnx.data").read_bytes() == before
    with pytest.raises(ConfigError, match="give two names"):
        npu.cut(model, first=tmp_path / "o.onnx", second=tmp_path / "o.onnx")


def test_a_model_without_products_and_one_without_a_tail() -> None:
    with pytest.raises(ConfigError, match="no Conv, Gemm or MatMul"):
        npu.cut(parse("g (float[1,2] x) => (float[1,2] y) { y = Relu (x) }"))
    with pytest.raises(ConfigError, match="leaves one part empty"):
        npu.cut(
            parse(
                "g (float[1,2] x) => (float[1,2] y) { y = MatMul (x, w) }",
                w=weight(2, 2),
            )
        )


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_models_of_16_bits_are_compared_in_float32(kind: str) -> None:
    """What goes through the cut is rounded, which is more than the parts may differ by, and no
    defect.
    """
    model = parse(
        f"g ({kind}[1,3,8,8] x) => ({kind}[1,8] y) {{ c = Conv <auto_pad ="
        ' "SAME_UPPER"> (x, w) r = Relu (c) d = Conv (r, u) y = ReduceMean <axes = [2,'
        " 3], keepdims = 0> (d) }"
    )
    for name, array in (("w", weight(8, 3, 3, 3)), ("u", weight(8, 8, 1, 1))):
        number = onnx.TensorProto.DataType.Value(kind.upper())
        model.graph.initializer.append(
            onnx.helper.make_tensor(name, number, array.shape, array.ravel())
        )
    parts = npu.cut(model, ["d"])
    assert parts.verified and parts.tensors == ("d",)
