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
from quark_onnx.graph.traversal import in_order
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
    """A node that can read bases.

    Attributes:
        perm: the perm of the result; None if the result is the same.
        rewrite: changes attributes and constants of the node.
        costs: Transposes that onnxruntime makes inside of the moved operator.
    """

    perm: Perm | None
    rewrite: Callable[[], None]
    costs: int = 0


@register
def cancel_transposes(graph: Graph) -> int:
    """Move operators before Transposes where Transposes cancel; return the number that is saved."""
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
    """Return the nodes that may read bases, in topological order, and the perms of tensors."""
    moves = dict[Node, _Move]()
    perms = dict[str, Perm]()
    for node in in_order(graph.nodes, graph.leaders):
        move = _move(graph, node, perms)
        if move is None:
            continue
        moves[node] = move
        if move.perm is not None:
            perms[node.outputs[0]] = move.perm
    # An operator whose result is read by no member gains nothing before the Transpose.
    for node in reversed(list(moves)):
        result = node.outputs[0]
        is_read = any(reader in moves for reader in graph.consumers(result))
        if node.kind != "Transpose" and result in perms and not is_read:
            del moves[node], perms[result]
    return moves, perms


def _move(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Return how a node reads bases; None if it cannot."""
    move = _MOVES.get(node.kind)
    if move is None or len(node.outputs) != 1:
        return None
    return move(graph, node, perms)


def _nothing() -> None:
    """Leave attributes and constants as they are."""


def _transpose(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Return the perm of a Transpose from the base of its input."""
    # Without the attribute, a Transpose reverses the axes.
    rank = len(graph.sizes(node.inputs[0]))
    own: Perm = tuple(node.attribute("perm", range(rank)[::-1]))
    if not own:
        return None
    before = perms.get(node.inputs[0])
    perm = own if before is None else tuple(before[axis] for axis in own)
    if perm == tuple(range(len(perm))):
        return _Move(None, _nothing)
    return _Move(perm, lambda: node.set_attribute("perm", perm))


def _unary(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move an operator on single values; further inputs are the bounds of a Clip."""
    del graph
    perm = perms.get(node.input(0))
    return None if perm is None else _Move(perm, _nothing)


def _broadcasting(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move an operator whose inputs are transposed alike, or constants."""
    transposed = {perms[name] for name in node.inputs if name in perms}
    if len(transposed) != 1 or graph.opset < _NUMPY_BROADCAST_OPSET:
        return None
    [perm] = transposed
    constants = [place for place, name in enumerate(node.inputs) if name not in perms]
    for place in constants:
        name = node.inputs[place]
        if not graph.is_constant(name) or len(graph.sizes(name)) > len(perm):
            return None

    def rewrite() -> None:
        for place in constants:
            graph.set_input(node, place, _base_of(graph, node.inputs[place], perm))

    return _Move(perm, rewrite)


def _base_of(graph: Graph, name: str, perm: Perm) -> str:
    """Return the constant that broadcasts against a base as another does against the tensor."""
    array = graph.constant(name)
    assert array is not None
    if array.size == 1 and array.ndim < 2:
        return name
    shape = (1,) * (len(perm) - array.ndim) + array.shape
    base = array.reshape(shape).transpose(np.argsort(perm))
    [result] = graph.once(
        ("base", name, *map(str, perm)),
        lambda: [graph.add_constant(f"{name}_base", base)],
    )
    return result


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
    return _Move(perm, lambda: node.set_attribute("axis", axis), costs=int(not is_last))


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
    # The axes that are left count from 0 again.
    after = tuple(sorted(kept).index(axis) for axis in kept)
    return _Move(None if after == tuple(range(len(after))) else after, rewrite)


def _pad(graph: Graph, node: Node, perms: Mapping[str, Perm]) -> _Move | None:
    """Move a Pad with constant sizes."""
    perm = perms.get(node.input(0))
    pads = setting(graph, node, "pads", 1, ())
    # Input 3 names some axes.
    if perm is None or pads is None or node.input(3) or len(pads) != 2 * len(perm):
        return None
    moved = np.zeros((2, len(perm)), np.int64)
    moved[:, perm] = np.reshape(pads, (2, -1))
    return _Move(perm, lambda: _set(graph, node, "pads", moved.reshape(-1).tolist()))


def _set(graph: Graph, node: Node, name: str, values: list[int]) -> None:
    """Set what is an attribute of a node at low opsets, and the second input at higher ones."""
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
    """Return the members that are connected with a node by transposed tensors."""

    def neighbours(member: Node) -> list[Node]:
        tensors = [name for name in (*member.inputs, *member.outputs) if name in perms]
        around = [graph.producer(name) for name in tensors]
        around += [reader for name in tensors for reader in graph.consumers(name)]
        return [other for other in around if other is not None and other in moves]

    return reach([node], neighbours)


def _saved(
    graph: Graph,
    nodes: list[Node],
    moves: Mapping[Node, _Move],
    perms: Mapping[str, Perm],
) -> int:
    """Return by how many Transposes the graph has fewer after the rewrite of a region."""
    saved = 0
    for node in nodes:
        needed = _is_read_outside(graph, node.outputs[0], moves)
        if node.kind != "Transpose":
            saved -= moves[node].costs
            saved -= int(needed and node.outputs[0] in perms)
        # One that reads another cancels it, or takes its place.
        elif moves[node].perm is None or not needed:
            saved += 1
    return saved


def _is_read_outside(graph: Graph, tensor: str, moves: Container[Node]) -> bool:
    """Return whether the tensor itself is needed, not only its base."""
    if graph.is_output(tensor) or graph.captured(tensor):
        return True
    return any(reader not in moves for reader in graph.consumers(tensor))


def _rewrite(
    graph: Graph,
    nodes: list[Node],
    moves: Mapping[Node, _Move],
    perms: Mapping[str, Perm],
) -> None:
    """Let the nodes of a region read and compute bases."""
    bases = dict[str, str]()
    cancelled = list[Node]()
    for node in nodes:
        move = moves[node]
        result = node.outputs[0]
        needed = _is_read_outside(graph, result, moves)
        move.rewrite()
        for place, name in enumerate(node.inputs):
            if name in bases:
                graph.set_input(node, place, bases[name])
        if move.perm is None:
            if node.kind == "Transpose":
                node.rename("Identity")
                node.drop_attribute("perm")
                cancelled.append(node)
        elif node.kind == "Transpose":
            # It stays for readers outside, and is unused otherwise.
            bases[result] = node.inputs[0]
        else:
            bases[result] = graph.fresh(f"{result}_base")
            graph.set_output(node, 0, bases[result])
            if needed:
                graph.add("Transpose", [bases[result]], [result], perm=move.perm)
    for node in cancelled:
        graph.bypass(node)
