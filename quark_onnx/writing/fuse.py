"""Fusion of Q/DQ pairs into operators on codes, verified by running the model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.cpu_features import ADVICE, SATURATION, saturates
from calibrators.onnx_runtime.session import open_session
from quark_onnx.common.wording import counted
from quark_onnx.fusions import FUSIONS, INTEGER_PRODUCTS, Fusion
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.planning.blocks import lower_blocks
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.running.run import Sample

logger = logging.getLogger(__name__)

#: Minimum SQNR in dB of operators on codes against Q/DQ pairs: a value halfway between two
#: codes may round either way.
AGREEMENT = 30.0
#: Such roundings accumulate in deep models (a transformer of six layers reaches 15 dB against
#: itself). The loss may exceed the loss under slightly changed scales by MARGIN dB. Scales
#: change by NUDGE, alternately up and down; a ten times smaller change affects a rounding only
#: by chance.
MARGIN, NUDGE = 6.0, 1e-5
#: Number of samples: on a single sample, a code of the last layer may differ by chance.
SAMPLES = 3

#: A fusion by name and the operator type that it replaces.
Kind = tuple[str, str]
#: A kind of fusion, and the name of the fused node.
Place = tuple[Kind, str]
#: Maximum number of model runs to find the nodes that break a kind of fusion.
_ATTEMPTS = 16


def fuse(
    graph: Graph,
    samples: Sequence[Sample],
    before: Collection[str] = frozenset(),
    *,
    runs: bool = True,
    fusions: Mapping[str, Sequence[Fusion]] = FUSIONS,
) -> tuple[Graph, list[str]]:
    """Return a copy of a Q/DQ graph with operators on codes, and notes for the report.

    Fusions of every kind are verified together on the first samples. If the copy does not run,
    or computes other values, fusions are added kind by kind, and the offending nodes or kinds
    are left out.

    Args:
        graph: the graph with Q/DQ pairs.
        samples: samples for the verification.
        before: nodes that computed with codes before this run, as named by
            ``quantized_before``; they are not changed.
        runs: False where onnxruntime lacks an operator of the model, so that nothing can be
            verified.
        fusions: the fusions to try for each operator type, in order.
    """
    plain = graph.copy()
    # Nothing to rewrite: the graph itself serves, without a copy.
    if not lower_blocks(plain):
        plain = graph
    fused, done = _lowered(graph, None, before, fusions)
    if not done:
        return plain, []
    # One session on the pairs serves every comparison.
    check = Agreement(plain, samples[:SAMPLES])
    if not runs or not check.objection(fused):
        return fused, [*_counted(done), *_slow(fused)]
    kept, notes = list[Place](), list[str]()
    for kind, names in done.items():
        places = [(kind, name) for name in names]
        # Each kind is tried together with the accepted ones, as fusions may depend on each other.
        broken = _culprits(
            places,
            kept,
            lambda chosen: check.objection(_lowered(graph, chosen, before, fusions)[0]),
            [_ATTEMPTS],
        )
        kept += [place for place in places if place not in broken]
        notes += _left_out(kind, places, broken)
    result, done = _lowered(graph, kept, before, fusions) if kept else (plain, {})
    return result, [*_counted(done), *_slow(result), *notes]


def _culprits(
    places: Sequence[Place],
    kept: Sequence[Place],
    objection: Callable[[list[Place]], str],
    attempts: list[int],
) -> dict[Place, str]:
    """Return the unfusable places in addition to ``kept``, with reasons.

    The search bisects.

    Args:
        kept: the accepted fusions.
        objection: returns why a set of places is wrong; empty if it is right.
        attempts: number of models that may still be run; at zero, unverified places count as
            wrong.
    """
    # A list, because both halves of the recursion share the budget.
    attempts[0] -= 1
    reason = objection([*kept, *places])
    if not reason:
        return {}
    if len(places) == 1 or attempts[0] < 1:
        return dict.fromkeys(places, reason)
    middle = len(places) // 2
    # The right places of the first half join the accepted ones before the second half is tried.
    broken = _culprits(places[:middle], kept, objection, attempts)
    right = [place for place in places[:middle] if place not in broken]
    return broken | _culprits(places[middle:], [*kept, *right], objection, attempts)


def _left_out(
    kind: Kind, places: Sequence[Place], broken: dict[Place, str]
) -> list[str]:
    """Log the fusions of a kind that were left out, and return the notes.

    Args:
        kind: name of the fusion, and operator type.
        broken: the places left out, with reasons; one note if these are all.
    """
    name, op_type = kind
    if len(broken) == len(places):
        notes = [f"{name} of {op_type} was left out: {next(iter(broken.values()))}"]
    else:
        notes = [
            f"{name} of {node!r} ({op_type}) was left out: {why}"
            for (_, node), why in broken.items()
        ]
    for note in notes:
        logger.warning("%s", note)
    return notes


def _lowered(
    graph: Graph,
    places: Collection[Place] | None,
    before: Collection[str],
    fusions: Mapping[str, Sequence[Fusion]],
) -> tuple[Graph, dict[Kind, list[str]]]:
    """Return the result of ``_fused``, its other blocks lowered for onnxruntime."""
    fused, done = _fused(graph, places, before, fusions)
    if lower_blocks(fused):
        fused.infer()
    return fused, done


def _fused(
    graph: Graph,
    places: Collection[Place] | None,
    before: Collection[str],
    fusions: Mapping[str, Sequence[Fusion]],
    where: str = "",
) -> tuple[Graph, dict[Kind, list[str]]]:
    """Return a copy with fusions at ``places`` (None for all), bodies included.

    Args:
        places: the fusions to make; None for all.
        before: names of nodes to skip.
        fusions: as for ``fuse``.
        where: prefix of node names, distinct for each body.

    Returns:
        The copy, and the fused nodes by kind.
    """
    fused, done = graph.copy(), dict[Kind, list[str]]()
    # From the end: a clip is dropped in favor of the operator before it.
    for node in reversed(list(fused.nodes)):
        if where + node.name in before or not _is_present(fused, node):
            continue
        for fusion in fusions.get(node.kind, ()):
            kind, name = (fusion.__name__, node.kind), where + node.name
            if (places is None or (kind, name) in places) and fusion(fused, node):
                done.setdefault(kind, []).append(name)
                break
    for body in list(bodies(fused)):
        inner = Graph(body.model)
        inner.reserve(fused.names)
        inner, inside = _fused(
            inner, places, before, fusions, f"{where}{body.node.name}/{body.attribute}/"
        )
        if inside:
            put_back(fused, body, inner)
            for kind, names in inside.items():
                done.setdefault(kind, []).extend(names)
    fused.drop_unused()
    fused.infer()
    return fused, done


def _is_present(graph: Graph, node: Node) -> bool:
    """Return whether a node still computes a result, which another fusion may have taken."""
    return any(graph.producer(name) is node for name in node.results)


def _counted(done: dict[Kind, list[str]]) -> list[str]:
    total = Counter[str]()
    for (name, _), nodes in done.items():
        total[name] += len(nodes)
    return [f"{name}: {count}" for name, count in total.items()]


def _slow(graph: Graph) -> list[str]:
    """Return a note where onnxruntime lacks a fast kernel on most processors."""
    signed = sum(
        node.op_type in INTEGER_PRODUCTS
        and graph.elem_type(node.inputs[0]) == TensorProto.INT8
        for node in graph.nodes
    )
    if not signed:
        return []
    operators = counted(signed, "operator multiplies", "operators multiply")
    return [
        f"{operators} int8 activations, for which onnxruntime has no fast kernel on x86"
        " processors: uint8 ones (A8W8) run several times faster there"
    ]


class Agreement:
    """The results of a graph with unfused Q/DQ pairs, to compare fused graphs with."""

    def __init__(self, graph: Graph, samples: Sequence[Sample]) -> None:
        self._graph = graph
        self._samples = samples

    def objection(self, fused: Graph) -> str:
        """Return why a graph cannot replace the graph with pairs; empty if it can.

        Args:
            fused: the graph with operators on codes.
        """
        try:
            session = open_session(
                fused.to_model(),
                # Of a large model the optimizer would dequantize and copy the weights.
                optimize=fused.store is None,
                what="the quantized model with operators on codes",
            )
            worst = self._agreement(session)
        except Exception as error:  # onnxruntime raises several unrelated types
            return f"onnxruntime does not run it ({error})"
        # The second condition needs further sessions, and is evaluated only where the first one
        # fails.
        if worst >= AGREEMENT or worst >= self._usual - MARGIN:
            return ""
        why = ""
        if saturates():
            why = f" ({SATURATION}; if that is why, {ADVICE})"
        return f"its results are {worst:.1f} dB from those of the Q/DQ pairs{why}"

    @cached_property
    def _pairs(self) -> Any:
        """Open a session on the graph with pairs.

        None if onnxruntime cannot load the graph, for example at an opset without an operator.
        """
        try:
            # Without optimizations, which would replace pairs by onnxruntime's own integer
            # operators.
            # Lean: the codes of all weights would be dequantized at once.
            return open_session(self._graph.to_model(), optimize=False, lean=True)
        except Exception as error:  # onnxruntime raises several unrelated types
            logger.debug("onnxruntime cannot load the Q/DQ pairs: %s", error)
            return None

    @cached_property
    def _usual(self) -> float:
        """Return the usual deviation of the pairs, in dB.

        The deviation is measured against the pairs with onnxruntime's optimizations, or with
        slightly changed scales.
        """
        agreements = [
            self._agreement(open_session(self._nudged(share), optimize=False))
            for share in (NUDGE, -NUDGE)
        ]
        try:
            agreements.append(self._agreement(open_session(self._graph.to_model())))
        except Exception as error:  # onnxruntime raises several unrelated types
            logger.debug("onnxruntime cannot optimize the Q/DQ pairs: %s", error)
        return min(agreements)

    def _nudged(self, share: float) -> ModelProto:
        """Return the pairs with scales alternately raised and lowered by ``share``.

        Args:
            share: relative change; its sign decides which of the scales are raised.
        """
        nudged = self._graph.copy()
        pairs = [
            node
            for node in nudged.nodes
            if node.op_type in ("QuantizeLinear", "DequantizeLinear")
        ]
        for number, name in enumerate(dict.fromkeys(node.inputs[1] for node in pairs)):
            scale = nudged.constant(name)
            if scale is not None:
                # 1 and -1 alternately within a scale and from scale to scale, so that changes do
                # not add up.
                up = (np.arange(scale.size).reshape(scale.shape) + number) % 2 * 2 - 1
                changed = (scale * (1 + share * up)).astype(scale.dtype)
                nudged.replace_uses(name, nudged.add_constant(name, changed))
        return nudged.to_model()

    def _agreement(self, session: Any) -> float:
        """Return the worst agreement over the float outputs, in dB."""
        # Without a session on the pairs, a model that runs at all passes.
        errors = measure(self._pairs or session, session, self._samples)
        return least_sqnr(errors, float("inf"))
