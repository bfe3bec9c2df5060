"""insides: write the plans of the bodies of If, Loop and Scan into a quantized graph."""

from __future__ import annotations

from collections.abc import Sequence

from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.plan import Quantize
from quark_onnx.steps.compute_qparams import solve, solve_biases
from quark_onnx.steps.insert import insert
from quark_onnx.steps.keep_sensitive_float import guard
from quark_onnx.steps.subgraph_plans import Inside


def quantize_insides(graph: Graph, insides: Sequence[Inside], config: QConfig) -> list[str]:
    """Quantize the bodies of a quantized graph in place, as planned; what was done, for the report."""
    planned = {(inside.body.node.name, inside.body.attribute): inside for inside in insides}
    notes = list[str]()
    for body in list(bodies(graph)):
        inside = planned.get((body.node.name, body.attribute))
        if inside is None:
            continue
        inner, plan = inside.graph, inside.plan
        inner.reserve(graph.names)
        found = guard(inner, plan, inside.ranges) if config.safe else []
        params = solve(inner, plan, inside.ranges)
        solve_biases(inner, plan, params)
        result = insert(inner, plan, params, form=config.pairs, lower=config.form != "operators")
        deeper = quantize_insides(result, inside.insides, config)
        count = sum(isinstance(entry, Quantize) for entry in plan.entries.values())
        if count or deeper:
            put_back(graph, body, result)
            notes += [f"{count} tensors inside {body.node.name!r} ({body.attribute})"] if count else []
            notes += [*found, *params.notes, *deeper]
    return notes
