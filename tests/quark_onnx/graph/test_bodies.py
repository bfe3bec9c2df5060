"""Bodies are extracted once for many rewrites, and again after each that changes something."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from onnx import ModelProto

from quark_onnx.graph import Graph
from quark_onnx.graph.bodies import Extracted, in_bodies
from quark_onnx.passes import CLEANING, Pass, fold_constants, remove_identity
from quark_onnx.planning.prepare import clean
from tests.models import (
    batch_norm_net,
    constants_in_branches,
    in_a_branch,
    parse,
    weight,
)


def test_bodies_are_extracted_again_only_after_a_rewrite() -> None:
    graph = Graph.of(constants_in_branches())
    extracted: Extracted = {}
    visits: list[list[Graph]] = []

    def visit(rewrites: int) -> list[Graph]:
        visits.append([])

        def rewrite(body: Graph) -> int:
            visits[-1].append(body)
            for node in body.nodes_of({"MatMul"}) * rewrites:
                body.add("Neg", node.inputs[:1], [body.fresh("negated")])
            return rewrites

        in_bodies(graph, rewrite, extracted)
        return visits[-1]

    first, second = visit(0), visit(0)
    assert len(first) == 2
    assert all(a is b for a, b in zip(first, second, strict=True))
    visit(1)
    for body in visit(0):
        assert not any(body is earlier for earlier in first)
        assert body.nodes_of({"Neg"})


def fold_main_graph(graph: Graph) -> int:
    """Fold the constants of the main graph alone, as it is no pass for bodies."""
    return fold_constants(graph)


def captured_constant() -> ModelProto:
    """A branch computes constants from one that the main graph computes."""
    return parse(
        """g (float[N,8] x, bool c) => (float[N,8] y) {
            t = Transpose <perm = [1,0]> (w)
            [choice] y = If (c) <
                then_branch = a () => (float[N,8] r) {
                    u = Transpose <perm = [1,0]> (t)
                    [inner] r = MatMul (x, u) },
                else_branch = b () => (float[N,8] s) {
                    [other] s = Relu (x) }>
        }""",
        w=weight(8, 8),
    )


@pytest.mark.parametrize(
    ("model", "passes", "rewrites"),
    [
        (in_a_branch(in_a_branch(batch_norm_net())), CLEANING, 2),
        (captured_constant(), (remove_identity, fold_constants), 1),
        (captured_constant(), (remove_identity, fold_main_graph, fold_constants), 2),
    ],
    ids=["nested", "captured", "main graph alone"],
)
def test_passes_together_see_what_each_has_changed(
    model: ModelProto, passes: Sequence[Pass], rewrites: int
) -> None:
    """The oracle extracts the bodies anew for each pass."""
    together, notes = clean(Graph.of(model), passes)
    one_by_one = Graph.of(model)
    expected = []
    for single in passes:
        one_by_one, done = clean(one_by_one, (single,))
        expected += done
    assert notes == expected
    assert len(notes) >= rewrites
    assert together.to_model() == one_by_one.to_model()
