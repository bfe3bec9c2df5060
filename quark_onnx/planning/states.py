"""Float recurrent states, where rounding errors would accumulate from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quark_onnx.config import QuantizationSpec
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.bodies import Body
from quark_onnx.graph.states import State
from quark_onnx.plan import PlanBuilder
from quark_onnx.rules.base import WEIGHTED
from quark_onnx.rules.passthrough import HANDING_ON

#: Formats with this many bits are precise enough for recurrent states.
_FINE = 16
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_MOVING = HANDING_ON | {"Concat"}


def spare_states(plan: PlanBuilder, states: Sequence[State]) -> None:
    """Keep states float if arithmetic updates them, before rules are applied.

    The input stays float with its slices and rearrangements, as do the output and the
    arithmetic between the last weighted operators and the output. A state that is only moved,
    such as a row that enters a buffer, is rounded once and keeps its codes: no error
    accumulates.
    """
    graph = plan.graph
    for state in states:
        path = _path(graph, state)
        if not any(_coarse(plan.specs[node].activation) for node in path):
            continue
        # Rounding twice with one scale changes nothing: codes stay as they are from step to step.
        if all(node.kind in _MOVING for node in path):
            continue
        reason = (
            f"rounding would accumulate in the state: {state.output!r} is"
            f" {state.input!r} of the next step"
        )
        updates = _updates(plan, state.output, path, reason)
        for tensor in dict.fromkeys((*moved(graph, state.input), *updates)):
            if not plan.ineligible(tensor):
                plan.keep(tensor, reason)


def inner_states(graph: Graph, states: Sequence[State], body: Body) -> list[State]:
    """Return the outer states updated by a branch of an If, under inner names.

    Args:
        graph: the outer graph.
        states: its states.
        body: a body of the graph's node; other bodies than those of If have no such states.

    Returns:
        For each state that the branch reads and whose next value it returns, the names of input
        and output inside the branch.
    """
    if body.node.kind != "If":
        return []
    inner = list[State]()
    for state in states:
        before = [name for name in moved(graph, state.input) if name in body.borrowed]
        after = state.output
        # The result of the If may be rearranged before it becomes the state.
        while (
            producer := graph.producer(after)
        ) is not None and producer.kind in HANDING_ON:
            after = producer.inputs[0]
        if producer is body.node and before:
            result = body.model.graph.output[producer.outputs.index(after)]
            inner.append(State(before[-1], result.name))
    return inner


def moved(graph: Graph, tensor: str) -> list[str]:
    """Return a tensor and the tensors computed from it by pure moves.

    Args:
        graph: the graph.
        tensor: name of the tensor; the first name of the result.
    """
    names = [tensor]
    # The list grows while it is walked: a breadth-first search in the order of discovery.
    for name in names:
        for node in graph.consumers(name):
            if node.kind in _MOVING and (
                # Operands after the first are shapes and indices, except those of Concat.
                node.kind == "Concat" or node.inputs[0] == name
            ):
                names += [result for result in node.results if result not in names]
    return names


def _path(graph: Graph, state: State) -> dict[Node, None]:
    """Return the nodes between the two ends of a state, as an ordered set.

    Args:
        state: names of input and output of a step.
    """
    # A node is on the way if it follows the state's input and precedes the state's output.
    producer = graph.producer(state.output)
    if producer is None:
        return {}
    downstream = reach(graph.consumers(state.input), graph.followers)
    upstream = reach([producer], graph.leaders)
    return dict.fromkeys(node for node in downstream if node in upstream)


def _updates(
    plan: PlanBuilder, output: str, path: dict[Node, None], reason: str
) -> Iterator[str]:
    """Yield the tensors upstream of an output, up to weighted operators.

    Their constants are kept float.

    Args:
        plan: the plan under construction; constants are kept float in it.
        output: name of the state's output, the first name of the result.
        path: the nodes between input and output of the state.
    """
    names = [output]
    for name in names:
        yield name
        node = plan.graph.producer(name)
        if (
            node is None
            or node not in path
            or node.kind in WEIGHTED | _RECURRENT
            or node.has_subgraph
        ):
            continue
        for operand in node.inputs:
            # A float operator with a rounded constant would lose accuracy for nothing.
            if plan.graph.is_constant(operand):
                plan.keep_for(node, operand, reason)
            elif operand and operand not in names:
                names.append(operand)


def _coarse(spec: QuantizationSpec | None) -> bool:
    return spec is not None and not spec.dynamic and spec.dtype.bits < _FINE
