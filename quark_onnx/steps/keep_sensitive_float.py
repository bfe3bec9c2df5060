"""Keep operators in float that one shared scale is known to degrade.

A detector joins box coordinates (hundreds) with scores (below one) into one output; with one scale
for both, the scores become zero. Nothing downstream can mend that, so the decoding part that such a
join belongs to stays float.

Attention adds a mask of -10000 or less to its scores where a token is padding; with one scale for
both, the scores that the softmax is to tell apart become equal. Such a sum stays float.
"""

from __future__ import annotations

import numpy as np

from calibrators import Range, params_for
from quark_onnx.graph import Graph, Node
from quark_onnx.plan import Keep, Plan, Quantize
from quark_onnx.steps.calibrate import Ranges
from quark_onnx.steps.decoding import connected, keep_whole, tail_of

#: Ranges of joined tensors may differ by this factor: three of eight bits are lost on the smaller
#: one.
RATIO = 8.0
#: A step in what an exponential reads changes a probability by this power of e.
STEP = 0.5

_EXPONENTIAL = frozenset({"Softmax", "LogSoftmax", "Exp"})
_DECODING = frozenset({"NonMaxSuppression", "TopK", "ArgMax", "ArgMin"})


def keep_sensitive_ops_float(graph: Graph, plan: Plan, ranges: Ranges) -> list[str]:
    """Turn decisions into ``Keep`` where they would ruin the model; what was found, for the report.

    A *tail* is a connected set of nodes from which no weighted operator is reached. A tail that
    joins tensors whose ranges differ by more than ``RATIO``, or that selects detections, stays
    float as a whole.
    """
    notes = [
        note
        for node in graph.nodes
        if node.kind in _EXPONENTIAL
        for note in _spare_scores(node, plan, ranges)
    ]
    tail = tail_of(graph)
    for node in graph.nodes:
        reason = _reason(node, plan, ranges)
        if not reason:
            continue
        if node not in tail:
            notes.append(
                f"{node.name} ({node.op_type}): {reason}; quantized all the same, a"
                " weighted operator reads it",
            )
            continue
        if node.name in plan.kept and node.kind not in _DECODING:
            continue
        notes.append(
            f"{node.name} ({node.op_type}): {reason}; it and the decoding around it"
            " stay float",
        )
        for member in connected(graph, node, tail):
            keep_whole(
                plan,
                member,
                f"part of the decoding around {node.name} ({node.op_type})",
            )
    return notes


def _spare_scores(node: Node, plan: Plan, ranges: Ranges) -> list[str]:
    """Keep float what an exponential reads, and what adds up to it, where it is too wide.

    What was found.
    """
    notes, todo, seen = list[str](), [(node.inputs[0], node)], set[Node]()
    while todo:
        tensor, reader = todo.pop()
        producer = plan.graph.producer(tensor)
        if (
            producer is not None
            and producer.kind in ("Add", "Sub")
            and producer not in seen
        ):
            seen.add(producer)
            todo += [(operand, producer) for operand in producer.inputs]
        use = plan.root(plan.use(tensor, reader))
        entry = plan.entries.get(use)
        if isinstance(entry, Quantize) and use in ranges:
            low, high = ranges[use].lo.min(), ranges[use].hi.max()
            span = f"from {low:.3g} to {high:.3g}"
            if (
                params_for(
                    Range(np.array([low]), np.array([high])),
                    entry.spec.grid,
                ).scale
                > STEP
            ):
                plan.entries[use] = Keep(
                    f"{span} is too wide for what {node.name} ({node.op_type}) tells"
                    " apart",
                )
                notes.append(
                    f"{node.name} ({node.op_type}): {use.tensor!r} reaches {span}; it"
                    " stays float",
                )
    return notes


def _reason(node: Node, plan: Plan, ranges: Ranges) -> str:
    if node.kind in _DECODING:
        return "it selects detections"
    if node.kind != "Concat":
        return ""
    reach_of = {}
    for tensor in node.inputs:
        use = plan.root(plan.use(tensor, node))
        entry = plan.entries.get(use)
        if isinstance(entry, Quantize) and entry.bounds:
            reach_of[tensor] = max(abs(bound) for bound in entry.bounds)
        elif use in ranges:
            reach_of[tensor] = max(
                float(-ranges[use].lo.min()),
                float(ranges[use].hi.max()),
            )
    if len(reach_of) < 2:
        return ""
    scores = [
        t
        for t in node.inputs
        if getattr(plan.entry(plan.use(t, node)), "bounds", None) == (0.0, 1.0)
    ]
    if scores and len(scores) < len(reach_of):
        return f"it joins {scores[0]!r}, scores between 0 and 1, with other values"
    small, large = (
        min(reach_of, key=reach_of.__getitem__),
        max(reach_of, key=reach_of.__getitem__),
    )
    if reach_of[large] <= RATIO * reach_of[small]:
        return ""
    return (
        f"it joins {large!r} (up to {reach_of[large]:.3g}) with {small!r} (up to"
        f" {reach_of[small]:.3g})"
    )
