"""What every registered pass promises, on models with and without its pattern."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx.common.registry import PASSES
from quark_onnx.graph import Graph
from quark_onnx.passes import FOR_OPENVINO, LEGALIZING
from tests.cases import loop_over
from tests.models import (
    MODELS,
    Array,
    Feeds,
    canonical,
    inferred,
    interface,
    run,
    samples,
)
from tests.quark_onnx.passes.patterns import PATTERNS

Pass = Callable[[Graph], int]

EVERY = MODELS | {f"pattern of {name}": make for name, make in PATTERNS.items()}

every_pass = pytest.mark.parametrize("name", PASSES)
every_model = loop_over("make", EVERY)


@cache
def outputs(make: Callable[[], ModelProto]) -> tuple[list[Feeds], list[list[Array]]]:
    """Samples for a model, and its outputs in float before any pass."""
    model = make()
    feeds = samples(model, 2)
    return feeds, [run(model, each) for each in feeds]


def rewritten(single: Pass, model: ModelProto) -> tuple[int, ModelProto]:
    graph = inferred(model)
    count = single(graph)
    return count, graph.to_model()


@every_model
@every_pass
def test_the_function_the_interface_and_the_callers_model_are_kept(
    name: str, make: Callable[[], ModelProto]
) -> None:
    model = make()
    original = canonical(model)
    count, after = rewritten(PASSES[name], model)
    assert canonical(model) == original, "the caller's model is never changed"
    if not count:
        untouched = inferred(model).to_model()
        assert canonical(after) == canonical(untouched), "0 rewrites, and it differs"
        return
    onnx.checker.check_model(after, full_check=True)
    assert interface(after) == interface(model)
    feeds, expected = outputs(make)
    for sample, results in zip(feeds, expected, strict=True):
        for before, found in zip(results, run(after, sample), strict=True):
            assert found.dtype == before.dtype and found.shape == before.shape
            atol = 1e-5 * max(1.0, np.abs(before).max(initial=0))
            np.testing.assert_allclose(found, before, rtol=1e-4, atol=atol)


@every_model
@every_pass
def test_a_second_application_finds_nothing(
    name: str, make: Callable[[], ModelProto]
) -> None:
    _, once = rewritten(PASSES[name], make())
    count, twice = rewritten(PASSES[name], once)
    assert count == 0
    assert canonical(twice) == canonical(inferred(once).to_model())


@every_model
@every_pass
def test_it_is_deterministic(name: str, make: Callable[[], ModelProto]) -> None:
    first, second = (rewritten(PASSES[name], make()) for _ in range(2))
    assert first[0] == second[0]
    assert canonical(first[1]) == canonical(second[1])


@pytest.mark.parametrize("name", PATTERNS)
def test_its_pattern_is_rewritten(name: str) -> None:
    count, _ = rewritten(PASSES[name], PATTERNS[name]())
    assert type(count) is int and count > 0


@every_pass
def test_an_empty_graph_is_left_alone(name: str) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] x) { }'
    assert rewritten(PASSES[name], onnx.parser.parse_model(text))[0] == 0


@every_pass
def test_it_is_a_documented_function_of_its_name(name: str) -> None:
    single = PASSES[name]
    assert single.__name__ == name
    assert (inspect.getdoc(single) or "").partition("\n")[0].endswith(".")


def test_the_order_has_every_pass_once() -> None:
    passes = (*LEGALIZING, *FOR_OPENVINO)
    assert sorted(single.__name__ for single in passes) == sorted(PASSES)


def test_an_unknown_name_finds_the_nearest() -> None:
    with pytest.raises(Exception, match="unknown pass 'fuse_gellu'; did you mean"):
        PASSES["fuse_gellu"]
