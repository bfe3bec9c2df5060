"""Cancel Transposes against each other, through the operators between them.

Models that were converted from channels-last frameworks transpose before and after each layer.
With Q/DQ pairs each Transpose is an operator of its own, and separates a layer from its activation
function. An operator that treats all axes alike can compute before a Transpose instead of after it.

Every tensor after a Transpose is ``transpose(base, perm)``. The base follows through the operators
until another Transpose reads it. The rewrite is made where fewer Transposes are left.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import numpy as np

from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.matching import setting
from quark_onnx.passes.base import register

#: ``transpose(base, perm)`` has the axis ``perm[i]`` of the base as axis i.
Perm = tuple[int, ...]

_UNARY = (
    *("Abs", "Cast", "Ceil", "Celu", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu"),
    *("HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "Mish", "Neg", "Not"),
    *("Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus", "Softsign"),
    *("Sqrt", "Swish", "Tanh", "ThresholdedRelu"),
)
_BROADCASTING = (
    *("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    *("Max", "Mean", "Min", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where"),
)
_REDUCING = (
    *(
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
    ),
    *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
#: First opset at which operators broadcast as numpy does, without an attribute ``axis``.
_NUMPY_BROADCAST_OPSET = 7
#: First opset at which Softmax normalizes a single axis.
_SINGLE_AXIS_OPSET = 13


@dataclass(frozen=True)
class _Move:
    """How a node computes on the bases of its inputs.

    Attributes:
        perm: the perm of the result; None if the node computes the result itself, not a base.
        rewrite: changes attributes and constants of the node.
        added: number of Transposes that onnxruntime adds inside of the moved operator.
    """

    perm: Perm | None
    rewrite: Callable[[], None]
    added: int = 0


@register
def cancel_transposes(graph: Graph) -> int:
    """Move operators before Transposes where Transposes cancel; return how many are saved."""
    moves, perms = _movable(graph)
    count = 0
    done = set[Node]()
    for node in moves:
        if node in done:
            continue
        region = _region(graph, node, moves, perms)
        done |= region.keys()
        nodes = [member for member in moves if member in region]
        saved = _saved(graph, nodes, moves, perms)
        if saved > 0:
            _rewrite(graph, nodes, moves, perms)
            count += saved
    if count:
        graph.drop_unused()
    return count


def _movable(graph: Graph) -> tuple[dict[Node, _Move], dict[str, Perm]]:
    """Return the nodes that can read bases, in topological order, and the perms of tensors."""
    moves = dict[Node, _Move]()
    perms = dict[str, Perm]()
    for node in graph.sorted():
        move = _move(graph, node, perms)
        if move is None:
            continue
        moves[node] = move
        if move.perm is not None:
            perms[node.outputs[0]] = move.perm
    # A move pays only if a node that can read bases reads the result.
    for node in reversed(list(moves)):
        result = node.outputs[0]
        is_read = any(reader in moves for reader in graph.consumers(result))
        if node.kind != "Transpose" and result in perms and not is_read:
            del moves[node], perms[result]
    return moves, perms


def _move(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Return how a node computes on bases; None if it cannot."""
    move = _MOVES.get(node.kind)
    if move is None or len(node.outputs) != 1:
        return None
    return move(graph, node, perms)


def _unchanged() -> None:
    """Leave attributes and constants as they are."""


def _transpose(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Return the perm of a Transpose from the base of its input."""
    # Without the attribute, a Transpose reverses the axes.
    rank = len(graph.sizes(node.inputs[0]))
    perm: Perm = tuple(node.attribute("perm", range(rank)[::-1]))
    if not perm:
        return None
    input_perm = perms.get(node.inputs[0])
    if input_perm is not None:
        perm = tuple(input_perm[axis] for axis in perm)
    if perm == tuple(range(len(perm))):
        return _Move(None, _unchanged)
    return _Move(perm, lambda: node.set_attribute("perm", perm))


def _unary(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move an element-wise operator; further inputs are the bounds of a Clip."""
    del graph
    perm = perms.get(node.input(0))
    return None if perm is None else _Move(perm, _unchanged)


def _broadcasting(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move an operator whose inputs are transposed alike, or constants."""
    input_perms = {perms[name] for name in node.inputs if name in perms}
    if len(input_perms) != 1 or graph.opset < _NUMPY_BROADCAST_OPSET:
        return None
    [perm] = input_perms
    constants = [index for index, name in enumerate(node.inputs) if name not in perms]
    for index in constants:
        name = node.inputs[index]
        if not graph.is_constant(name) or len(graph.sizes(name)) > len(perm):
            return None

    def rewrite() -> None:
        for index in constants:
            graph.set_input(node, index, _base_of(graph, node.inputs[index], perm))

    return _Move(perm, rewrite)


def _base_of(graph: Graph, name: str, perm: Perm) -> str:
    """Return a constant, transposed to broadcast against bases instead of tensors."""
    array = graph.known(name)
    if array.size == 1 and array.ndim < 2:
        return name
    shape = (1,) * (len(perm) - array.ndim) + array.shape
    base = array.reshape(shape).transpose(np.argsort(perm))
    key = ("base", name, *map(str, perm))
    return graph.shared_constant(key, f"{name}_base", lambda: base)


def _concat(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move a Concat of tensors that are transposed alike."""
    del graph
    perm = perms.get(node.input(0))
    if perm is None or any(perms.get(name) != perm for name in node.inputs):
        return None
    axis = perm[int(node.attribute("axis", 0))]
    return _Move(perm, lambda: node.set_attribute("axis", axis))


def _softmax(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move a Softmax over a single axis."""
    perm = perms.get(node.input(0))
    if perm is None or graph.opset < _SINGLE_AXIS_OPSET:
        return None
    axis = perm[int(node.attribute("axis", -1))]
    is_last = axis == len(perm) - 1
    return _Move(perm, lambda: node.set_attribute("axis", axis), added=int(not is_last))


def _reduction(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move a reduction over known axes."""
    perm = perms.get(node.input(0))
    axes = setting(graph, node, "axes", 1, ())
    if perm is None or axes is None or not len(axes):
        return None
    reduced = [perm[int(axis)] for axis in axes]

    def rewrite() -> None:
        _set(graph, node, "axes", reduced)

    if node.attribute("keepdims", 1):
        return _Move(perm, rewrite)
    kept = [axis for axis in perm if axis not in reduced]
    # The kept axes are numbered from 0 again.
    result_perm = tuple(sorted(kept).index(axis) for axis in kept)
    if result_perm == tuple(range(len(result_perm))):
        return _Move(None, rewrite)
    return _Move(result_perm, rewrite)


def _pad(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move a Pad with constant sizes."""
    perm = perms.get(node.input(0))
    pads = setting(graph, node, "pads", 1, ())
    # Input 3 restricts the pads to some axes.
    if perm is None or pads is None or node.input(3) or len(pads) != 2 * len(perm):
        return None
    moved = np.zeros((2, len(perm)), np.int64)
    moved[:, perm] = np.reshape(pads, (2, -1))
    return _Move(perm, lambda: _set(graph, node, "pads", moved.reshape(-1).tolist()))


def _set(graph: Graph, node: Node, name: str, values: list[int]) -> None:
    """Set a value that is an attribute at low opsets, and the second input at higher ones."""
    if node.input(1):
        constant = graph.add_constant(f"{node.name}_{name}", np.array(values, np.int64))
        graph.set_input(node, 1, constant)
    else:
        node.set_attribute(name, values)


#: Operators that can read bases.
_MOVES: dict[str, Callable[[Graph, Node, Mapping[str, Perm]], _Move | None]] = {
    "Transpose": _transpose,
    "Concat": _concat,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Pad": _pad,
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BROADCASTING, _broadcasting),
    **dict.fromkeys(_REDUCING, _reduction),
}


def _region(
    graph: Graph, node: Node, moves: Mapping[Node, _Move], perms: Mapping[str, Perm]
) -> dict[Node, None]:
    """Return the nodes that transposed tensors connect with a node."""

    def neighbours(member: Node) -> list[Node]:
        tensors = [name for name in (*member.inputs, *member.outputs) if name in perms]
        candidates = [graph.producer(name) for name in tensors]
        candidates += [reader for name in tensors for reader in graph.consumers(name)]
        return [node for node in candidates if node is not None and node in moves]

    return reach([node], neighbours)


def _saved(
    graph: Graph,
    nodes: list[Node],
    moves: Mapping[Node, _Move],
    perms: Mapping[str, Perm],
) -> int:
    """Return how many Transposes the rewrite of a region saves; negative if it adds some."""
    saved = 0
    for node in nodes:
        is_needed = _is_read_outside(graph, node.outputs[0], moves)
        if node.kind != "Transpose":
            saved -= moves[node].added
            saved -= int(is_needed and node.outputs[0] in perms)
        # It has cancelled another Transpose, or nothing but members of the region read its result.
        elif moves[node].perm is None or not is_needed:
            saved += 1
    return saved


def _is_read_outside(graph: Graph, tensor: str, moves: Container[Node]) -> bool:
    """Return whether a tensor itself is needed: as an output, or by a node that reads no bases."""
    if graph.is_output(tensor) or graph.captured(tensor):
        return True
    return any(reader not in moves for reader in graph.consumers(tensor))


def _rewrite(
    graph: Graph,
    nodes: list[Node],
    moves: Mapping[Node, _Move],
    perms: Mapping[str, Perm],
) -> None:
    """Make the nodes of a region compute on bases."""
    bases = dict[str, str]()
    cancelled = list[Node]()
    for node in nodes:
        move = moves[node]
        result = node.outputs[0]
        is_needed = _is_read_outside(graph, result, moves)
        move.rewrite()
        for index, name in enumerate(node.inputs):
            if name in bases:
                graph.set_input(node, index, bases[name])
        if move.perm is None:
            if node.kind == "Transpose":
                node.rename("Identity")
                node.drop_attribute("perm")
                cancelled.append(node)
        elif node.kind == "Transpose":
            # The Transpose stays for readers outside of the region; without any it is unused.
            bases[result] = node.inputs[0]
        else:
            bases[result] = graph.fresh(f"{result}_base")
            graph.set_output(node, 0, bases[result])
            if is_needed:
                graph.add("Transpose", [bases[result]], [result], perm=move.perm)
    for node in cancelled:
        graph.bypass(node)
