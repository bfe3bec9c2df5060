"""A model in two: both after each other compute what the whole computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx import npu
from quark_onnx.errors import ConfigError
from tests.models import kinds, normal, parse, run, weight

TEXT = """g (float[N,3,8,8] x) => (float[N,A] boxes, float[N,4,8,8] features) {
    features = Conv (x, w) r = Relu (features) a = Conv (r, u) b = Conv (r, v) s = Sigmoid (b) e = Exp (a)
    m = Mul (s, e) j = ReduceMean <axes = [2, 3], keepdims = 0> (x) f = Flatten (m)
    boxes = Concat <axis = 1> (f, j) }"""


def detector() -> onnx.ModelProto:
    return parse(TEXT, w=weight(4, 3, 1, 1), u=weight(2, 4, 1, 1), v=weight(2, 4, 1, 1))


def chained(parts: npu.Parts, feeds: dict[str, Any]) -> dict[str, Any]:
    known = dict(feeds)
    for part in (parts.first, parts.second):
        asked = {value.name: known[value.name] for value in part.graph.input}
        known |= dict(zip((value.name for value in part.graph.output), run(part, asked), strict=True))
    return known


@pytest.mark.parametrize("tensors", [(), ("a", "b"), ("r",), ("s", "a"), ("features",)], ids=str)
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
    assert kinds(parts.first) == ["Conv", "Relu", "Conv", "Conv"] and "Conv" not in kinds(parts.second)
    assert [value.name for value in parts.first.graph.output] == ["features", "a", "b"]
    assert [value.name for value in parts.second.graph.output] == ["boxes"]
    assert len(parts.second.graph.initializer) == 0, "weights go where they are read"


def test_file_to_file(tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx").read_bytes()
    parts = npu.cut(tmp_path / "model.onnx", first=tmp_path / "a.onnx", second=tmp_path / "b.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == before
    assert onnx.load(tmp_path / "a.onnx") == parts.first and onnx.load(tmp_path / "b.onnx") == parts.second


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


def test_a_model_without_products_and_one_without_a_tail() -> None:
    with pytest.raises(ConfigError, match="no Conv, Gemm or MatMul"):
        npu.cut(parse("g (float[1,2] x) => (float[1,2] y) { y = Relu (x) }"))
    with pytest.raises(ConfigError, match="leaves one part empty"):
        npu.cut(parse("g (float[1,2] x) => (float[1,2] y) { y = MatMul (x, w) }", w=weight(2, 2)))
