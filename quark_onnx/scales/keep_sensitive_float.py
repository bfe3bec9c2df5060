"""Float operators where a single shared scale is known to degrade accuracy.

A detector joins box coordinates (hundreds) with scores (below one) into one output; with a
single scale for both, the scores become zero. Nothing downstream can fix the scores, so the
decoding subgraph of such a Concat stays float.

Attention adds a mask of -10000 or less to its scores at padding tokens. With a single scale for
scores and mask, the scores before the softmax become equal. Such a sum stays float.
"""

from __future__ import annotations

import numpy as np

from calibrators import Range, params_for
from quark_onnx.graph import Graph, Node
from quark_onnx.measuring.calibrate import Ranges
from quark_onnx.plan import Keep, Plan, PlanBuilder, Quantize
from quark_onnx.planning.decoding import connected, keep_whole, tail_of
from quark_onnx.planning.spare_decisions import is_decided
from quark_onnx.rules.base import WEIGHTED

#: Maximum ratio of joined ranges: the smaller range then loses three of eight bits.
RATIO = 8.0
#: Maximum step of an exponential's input: a step changes a probability by this power of e.
STEP = 0.5

_EXPONENTIAL = frozenset({"Softmax", "LogSoftmax", "Exp"})
_SIGMOIDS = frozenset({"Sigmoid", "HardSigmoid"})
_DECODING = frozenset({"NonMaxSuppression", "TopK", "ArgMax", "ArgMin"})


def keep_sensitive_ops_float(
    graph: Graph, plan: Plan, ranges: Ranges
) -> tuple[Plan, list[str]]:
    """Keep operators float where quantization would destroy the output.

    A *tail* is a connected set of nodes that reach no weighted operator. A tail stays float if
    it joins tensors whose ranges differ by more than ``RATIO``, or if it selects detections.

    Args:
        graph: the planned graph.
        plan: the plan of the graph.
        ranges: the calibrated ranges.

    Returns:
        The plan with these operators float, and notes for the report.
    """
    changed = PlanBuilder.of(plan)
    notes = list[str]()
    for node in graph.nodes:
        if node.kind in _EXPONENTIAL:
            notes += _spare_scores(node, changed, ranges)
    tail = tail_of(graph)
    detects = bool(graph.nodes_of(WEIGHTED))
    for node in graph.nodes:
        # Without weighted operators there are no detections to select.
        if node.kind in _DECODING and not detects:
            continue
        reason = _reason(node, changed, ranges)
        if not reason:
            continue
        # Codes are needed before a weighted operator; the note tells what may be lost.
        if node not in tail:
            notes.append(
                f"{node.name} ({node.op_type}): {reason}; quantized all the same, a"
                " weighted operator reads it",
            )
            continue
        # A float Concat has its own reason; selections are float always, and their inputs matter.
        if node.name in changed.kept and node.kind not in _DECODING:
            continue
        notes.append(
            f"{node.name} ({node.op_type}): {reason}; it and the decoding around it"
            " stay float",
        )
        _keep_decoding(changed, node, tail)
    return changed.build(), notes


def _keep_decoding(plan: PlanBuilder, node: Node, tail: dict[Node, None]) -> None:
    """Keep the nodes of a tail around a node float, and the inputs that no other node reads."""
    decoding = connected(plan.graph, node, tail)
    reason = f"part of the decoding around {node.name} ({node.op_type})"
    # Float arithmetic between two roundings would still lose the small values.
    for member in decoding:
        # What only decisions read is float altogether, for a reason of its own.
        if not is_decided(plan, member):
            keep_whole(plan, member, reason)
    # A rule has quantized them for a node that is float now, such as the scale of an image.
    for value in plan.graph.inputs:
        readers = plan.graph.consumers(value.name)
        if readers and decoding.keys() >= set(readers):
            plan.keep(value.name, reason)


def _spare_scores(node: Node, plan: PlanBuilder, ranges: Ranges) -> list[str]:
    """Keep the input of an exponential and its summands float if too wide.

    Args:
        node: the Softmax, LogSoftmax or Exp.
        plan: the plan; changed in place.

    Returns:
        Notes for the report.
    """
    notes, todo, seen = list[str](), [(node.inputs[0], node)], set[Node]()
    while todo:
        tensor, reader = todo.pop()
        producer = plan.graph.producer(tensor)
        if (
            # Summands of the scores, such as a mask, are read with the same exponential.
            producer is not None
            and producer.kind in ("Add", "Sub")
            and producer not in seen
        ):
            seen.add(producer)
            todo += [(operand, producer) for operand in producer.inputs]
        use = plan.root(plan.use(tensor, reader))
        entry = plan.entries.get(use)
        # Tensors without a measured range have known bounds or float values.
        if isinstance(entry, Quantize) and use in ranges:
            low, high = ranges[use].lo.min(), ranges[use].hi.max()
            span = f"from {low:.3g} to {high:.3g}"
            whole = Range(np.array([low]), np.array([high]))
            if params_for(whole, entry.spec.grid).scale > STEP:
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
    """Return why quantization of a node would lose values; empty if it would not.

    Args:
        node: a node of any operator; those that select detections, and Concat, have reasons.
    """
    if node.kind in _DECODING:
        return "it selects detections"
    if node.kind != "Concat":
        return ""
    magnitudes = _magnitudes(node, plan, ranges)
    # A ratio needs two inputs with a known range, which float inputs lack.
    if len(magnitudes) < 2:
        return ""
    scores = [tensor for tensor in node.inputs if _is_score(node, tensor, plan)]
    if scores and len(scores) < len(magnitudes):
        return f"it joins {scores[0]!r}, scores between 0 and 1, with other values"
    small = min(magnitudes, key=magnitudes.__getitem__)
    large = max(magnitudes, key=magnitudes.__getitem__)
    if magnitudes[large] <= RATIO * magnitudes[small]:
        return ""
    return (
        f"it joins {large!r} (up to {magnitudes[large]:.3g}) with {small!r} (up to"
        f" {magnitudes[small]:.3g})"
    )


def _is_score(node: Node, tensor: str, plan: Plan) -> bool:
    """Return whether a node reads values between 0 and 1, as those of a Sigmoid or Softmax."""
    use = plan.root(plan.use(tensor, node))
    entry = plan.entries.get(use)
    if not isinstance(entry, Quantize):
        return False
    # The range of a Sigmoid may be measured.
    producer = plan.graph.producer(use.tensor)
    return entry.bounds == (0.0, 1.0) or (
        producer is not None and producer.kind in _SIGMOIDS
    )


def _magnitudes(node: Node, plan: Plan, ranges: Ranges) -> dict[str, float]:
    """Return the greatest magnitude of a node's inputs with a known range, by tensor.

    Args:
        plan: the plan; known bounds precede measured ranges.

    Returns:
        The magnitudes in the order of the inputs; inputs without a known range are left out.
    """
    magnitudes = dict[str, float]()
    for tensor in node.inputs:
        use = plan.root(plan.use(tensor, node))
        entry = plan.entries.get(use)
        if isinstance(entry, Quantize) and entry.bounds:
            # Known bounds first, which the measured range may not reach.
            magnitudes[tensor] = max(map(abs, entry.bounds))
        elif use in ranges:
            low, high = ranges[use].lo.min(), ranges[use].hi.max()
            magnitudes[tensor] = max(float(-low), float(high))
    return magnitudes
