"""What a graph costs grows with its nodes: calls are counted, of four times as many nodes and of
the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import analyze, quantize_dynamic, quantize_static, quantize_weights
from quark_onnx.api import plan_for
from quark_onnx.graph import Graph
from quark_onnx.npu import check, preflight
from quark_onnx.plan import explain
from tests.models import parse

SMALL, TIMES = 10, 4
#: What is the same for any graph makes the growth less than TIMES; what is sorted, a little more.
MOST = 1.1 * TIMES


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, those of C too; in this thread."""
    count = 0

    def called(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def grown(
    build: Callable[[int], ModelProto], work: Callable[[ModelProto], object]
) -> float:
    """How many times as many calls TIMES as many layers take."""
    few, many = build(SMALL), build(TIMES * SMALL)
    work(few)  # what is imported and made once
    return calls(lambda: work(many)) / calls(lambda: work(few))


def with_weights(body: list[str], result: str, count: int) -> ModelProto:
    model = parse(f"g (float[1,8] x) => (float[1,8] {result}) {{ {' '.join(body)} }}")
    graph, random = Graph.of(model), np.random.default_rng(0)
    for place in range(count):
        graph.set_constant(
            f"w{place}", random.normal(0, 0.5, (8, 8)).astype(np.float32)
        )
        graph.set_constant(f"b{place}", random.normal(0, 0.5, 8).astype(np.float32))
    return graph.to_model()


def layer(place: int, source: str) -> str:
    return (
        f"m{place} = MatMul ({source}, w{place}) a{place} = Add (m{place}, b{place})"
        f" r{place} = Relu (a{place})"
    )


def branches(count: int) -> ModelProto:
    body = [layer(place, "x") for place in range(count)]
    return with_weights(
        [*body, f"y = Mean ({', '.join(f'r{place}' for place in range(count))})"],
        "y",
        count,
    )


def residual(count: int) -> ModelProto:
    body = ["s0 = Identity (x)"]
    body += [
        f"{layer(place, f's{place}')} s{place + 1} = Add (s{place}, r{place})"
        for place in range(count)
    ]
    return with_weights(body, f"s{count}", count)


DATA = [{"x": np.linspace(-1, 1, 8, dtype=np.float32)[None]}]
WORK: dict[str, Callable[[ModelProto], object]] = {
    "W8": quantize_weights,
    "DYNAMIC": quantize_dynamic,
    "A8W8": lambda model: quantize_static(model, DATA),
    "explain": lambda model: explain(plan_for(model)),
}
LOOKS: dict[str, Callable[[ModelProto, ModelProto], object]] = {
    "check": lambda _, quantized: check(quantized),
    "preflight": lambda _, quantized: preflight(quantized),
    "analyze": lambda model, quantized: analyze(model, quantized, DATA),
}


@pytest.mark.parametrize("build", [branches, residual])
@pytest.mark.parametrize("name", WORK)
def test_quantizing_grows_with_the_graph(
    name: str, build: Callable[[int], ModelProto]
) -> None:
    assert grown(build, WORK[name]) < MOST


@pytest.mark.parametrize("build", [branches, residual])
@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_a_model_grows_with_it(
    name: str, build: Callable[[int], ModelProto]
) -> None:
    pairs = {
        id(model): (model, quantize_static(model, DATA))
        for model in map(build, (SMALL, TIMES * SMALL))
    }
    few, many = pairs.values()
    LOOKS[name](*few)
    assert calls(lambda: LOOKS[name](*many)) / calls(lambda: LOOKS[name](*few)) < MOST


def test_an_input_of_many_is_set_without_a_look_at_the_others() -> None:
    graph = Graph.of(branches(1))
    node = next(node for node in graph.nodes if node.op_type == "Mean")
    for place in range(999):
        graph.append_input(node, f"old{place}")

    def rewire() -> None:
        for place in range(999):
            graph.replace_uses(f"old{place}", f"new{place}")

    assert calls(rewire) < 30 * 999
    assert node.inputs[1:] == tuple(f"new{place}" for place in range(999))
    assert graph.consumers("new7") == [node]
    assert graph.consumers("old7") == []
