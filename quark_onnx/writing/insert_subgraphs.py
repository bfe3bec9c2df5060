"""Insertion of the planned Q/DQ pairs into the bodies of If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Sequence

from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.plan import Quantize
from quark_onnx.planning.subgraph_plans import SubgraphPlan
from quark_onnx.scales.compute_qparams import compute_bias_qparams, compute_qparams
from quark_onnx.scales.keep_sensitive_float import keep_sensitive_ops_float
from quark_onnx.writing.insert import insert


def quantize_bodies(
    graph: Graph, body_plans: Sequence[SubgraphPlan], config: QConfig
) -> list[str]:
    """Quantize the bodies of a quantized graph in place, as planned.

    Returns:
        Notes for the report.
    """
    planned = {
        (body_plan.body.node.name, body_plan.body.attribute): body_plan
        for body_plan in body_plans
    }
    notes = list[str]()
    for body in list(bodies(graph)):
        # By name: the quantized graph is a copy with other node objects.
        body_plan = planned.get((body.node.name, body.attribute))
        if body_plan is None:
            continue
        inner, plan = body_plan.graph, body_plan.plan
        # Insertion has given the outer graph new names since the body was planned.
        inner.reserve(graph.names)
        reasons = list[str]()
        if config.safe:
            plan, reasons = keep_sensitive_ops_float(inner, plan, body_plan.ranges)
        plan, params = compute_qparams(inner, plan, body_plan.ranges)
        plan = compute_bias_qparams(inner, plan, params)
        result = insert(
            inner, plan, params, form=config.pairs, lower=config.form != "operators"
        )
        deeper = quantize_bodies(result, body_plan.body_plans, config)
        count = sum(isinstance(entry, Quantize) for entry in plan.entries.values())
        # An unchanged body stays byte for byte.
        if count or deeper:
            put_back(graph, body, result)
            if count:
                notes.append(
                    f"{counted(count, 'tensor')} inside {body.node.name!r} ({body.attribute})"
                )
            notes += [*reasons, *params.notes, *deeper]
    return notes
