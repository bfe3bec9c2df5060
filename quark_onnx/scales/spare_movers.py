"""A second plan after a crash of onnxruntime, with float operators that move values.

onnxruntime moves DequantizeLinear nodes down and QuantizeLinear nodes up past Transpose,
Reshape, Slice, MaxPool and similar operators before it creates integer operators. Releases
differ in the nodes that they move and in the moves that crash the process (1.32: a moved
DequantizeLinear whose result a subgraph captures). Nothing is moved if these operators read and
write floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from quark_onnx.common.wording import tally
from quark_onnx.config import Override, QConfig
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import Ranges
from quark_onnx.plan import Keep, Plan, PlanBuilder, Quantize, Use
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.subgraph_plans import SubgraphPlan, plan_bodies
from quark_onnx.rules.passthrough import HANDING_ON

_REASON = "onnxruntime crashed with Q/DQ pairs around operators that move values"
_UNMEASURED = "it was not measured before onnxruntime crashed"


def spare_movers(
    graph: Graph,
    config: QConfig,
    plan: Plan,
    body_plans: Sequence[SubgraphPlan],
    ranges: Ranges,
) -> tuple[QConfig, Plan, list[SubgraphPlan], Ranges, str] | None:
    """Return configuration, plans and ranges with float operators that move values.

    Args:
        graph: the planned graph.
        config: the settings.
        plan: the plan whose result crashed. Its ranges are used again, as moved values keep
            their range.
        body_plans: the plans of bodies.
        ranges: the ranges of ``plan``.

    Returns:
        Configuration, plan, plans of bodies, ranges, and a note for the report. None if no
            moving operator is quantized.
    """
    movers = _movers(plan, body_plans)
    if not movers:
        return None
    config = config.with_(
        overrides=(*config.overrides, Override(op_types=sorted(HANDING_ON), keep=True)),
    )
    again, ranges = _spared(make_plan(graph, config, strict=False), plan, ranges)
    inner = _spare_bodies(plan_bodies(graph, config), body_plans)
    counts = tally(sorted(Counter(movers).items()))
    note = (
        "onnxruntime crashed on the quantized model; operators that move values were"
        f" then left float: {counts}"
    )
    return config, again, inner, ranges, note


def _movers(plan: Plan, body_plans: Sequence[SubgraphPlan]) -> list[str]:
    """Return the types of operators moving quantized values, per node, bodies included."""
    op_types = [
        node.op_type
        for node in plan.graph.nodes
        if node.kind in HANDING_ON and plan.touches(node)
    ]
    for body_plan in body_plans:
        op_types += _movers(body_plan.plan, body_plan.body_plans)
    return op_types


def _spare_bodies(
    again: Sequence[SubgraphPlan], before: Sequence[SubgraphPlan]
) -> list[SubgraphPlan]:
    """Let moving operators of bodies read floats, nested bodies included.

    Args:
        again: the new plans of bodies.
        before: the earlier plans of the same bodies, in the same order.
    """
    plans = list[SubgraphPlan]()
    for new, old in zip(again, before, strict=True):
        plan, ranges = _spared(new.plan, old.plan, old.ranges)
        body_plans = _spare_bodies(new.body_plans, old.body_plans)
        plans.append(replace(new, plan=plan, ranges=ranges, body_plans=body_plans))
    return plans


def _spared(decided: Plan, before: Plan, ranges: Ranges) -> tuple[Plan, Ranges]:
    """Let moving operators read floats; return plan and ranges of the quantized tensors.

    Args:
        decided: the new plan; not changed.
        before: the plan whose result crashed, for reasons and for the roots of moved tensors.
        ranges: the statistics measured for ``before``.

    Returns:
        The plan, in which tensors without a known range are float, and the statistics, extended by
        those of moved tensors, which have the range of their source.
    """
    plan = PlanBuilder.of(decided)
    for node in plan.graph.nodes:
        if node.kind in HANDING_ON:
            # A reason from the first plan is more informative.
            plan.keep_node(node, before.kept.get(node.name, _REASON))
            for tensor in filter(None, node.inputs):
                plan.entries[Use(tensor, node.name)] = Keep(_REASON)
                # Otherwise they would read the producer's rounded values.
                plan.spoken.discard(tensor)
    extended = dict(ranges)
    for use, entry in list(plan.entries.items()):
        if (
            not isinstance(entry, Quantize)
            or plan.graph.is_constant(use.tensor)
            or use in extended
        ):
            continue
        # A moved tensor had the scale of its source, whose range holds for all values that were
        # moved.
        root = before.root(before.use(use.tensor))
        kept = before.entry(root)
        if root in ranges:
            extended[use] = ranges[root]
        # Known bounds and dynamic scales need no measurement; other tensors are not measured again.
        elif entry.spec.measured and entry.bounds is None:
            plan.keep(
                use.tensor, kept.reason if isinstance(kept, Keep) else _UNMEASURED
            )
    return plan.build(), extended
