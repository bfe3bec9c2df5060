"""Find the tensors of shape arithmetic: values that are sizes or positions.

Two properties decide, both of them for any operator:

* *Origin*, forward: a tensor is computed from constants and sizes of tensors alone, from integers
  as well, or from a signal. Integers that meet a learned table or weight, such as the table of an
  embedding, become a signal.
* *Use*, backward: a tensor, or a tensor computed from it, is read as a shape, a scale, a position,
  a count or a condition.

Tensors of any origin that nothing but decisions read are found as well (``decisions``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import IntEnum

from quark_onnx.graph.bodies import Body
from quark_onnx.graph.control_inputs import KEEPS_SIZE, control_inputs
from quark_onnx.graph.decisions import SIZES, Decision, decisions
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import DEQUANTIZE, Node
from quark_onnx.graph.operations import Operation, Operations, Path, Tensor, step
from quark_onnx.graph.random_operators import RANDOM
from quark_onnx.graph.traversal import reach


class Origin(IntEnum):
    """The source of a tensor's values; of two sources the larger one decides."""

    CONSTANTS = 0
    SIZES = 1
    INTEGERS = 2
    SIGNAL = 3


#: Operators for which even a constant of a few values is a learned table.
_LOOKING_UP = frozenset({"Gather", "GatherElements", "GatherND"})
#: Operators whose result sizes depend on values.
_COUNTING = frozenset(
    {
        "Compress",
        "NonMaxSuppression",
        "NonZero",
        "StringSplit",
        "Unique",
        "com.microsoft::BeamSearch",
        "com.microsoft::GreedySearch",
        "com.microsoft::Sampling",
        "com.microsoft::Unique",
        "com.microsoft::WhisperBeamSearch",
    },
)
#: Operators of other domains may select values.
_KNOWN_DOMAINS = frozenset(
    {
        "",
        "ai.onnx.ml",
        "com.microsoft",
        "com.amd.quark",
        "com.vai.quantize",
        "quark_onnx",
    },
)

_READ = "is read as a shape, a scale, a position or a condition"
_WHY = {
    Origin.CONSTANTS: f"is computed from constants and {_READ}",
    Origin.SIZES: f"is computed from sizes of tensors and {_READ}",
    Origin.INTEGERS: f"is computed from integers and {_READ}",
    Origin.SIGNAL: f"holds a few values and {_READ}",
}
_SIZE_ALONE = "is a few values computed from sizes of tensors alone"


class ShapeArithmetic:
    """The tensors of shape arithmetic in a graph, and the outputs of data-dependent shape.

    Built once by `of` for a graph with its bodies; `inside` is the view of a body.
    """

    def __init__(
        self,
        reasons: dict[Tensor, str],
        shared: set[Tensor],
        sized: set[Tensor],
        decided: dict[Tensor, Decision],
        path: Path = (),
    ) -> None:
        self._reasons = reasons
        self._shared = shared
        self._sized = sized
        self._decided = decided
        self._path = path

    @classmethod
    def of(cls, graph: Graph) -> ShapeArithmetic:
        """Analyze a graph with its bodies.

        Args:
            graph: the main graph, with inferred types and shapes.
        """
        operations = Operations.of(graph)
        # Positions computed from a signal, such as those of NonZero, count as signals for sizes,
        # but are integers where rounding is concerned.
        raw = _origins(operations, integers_stay_integers=False)
        origins = _origins(operations, integers_stay_integers=True)
        reasons = dict[Tensor, str]()
        shared = set[Tensor]()
        # Neither integers nor constants become activations with Q/DQ pairs, so that a reason is
        # not needed.
        never_rounded = operations.integers | operations.constants
        for tensor in _read_as_shapes(operations, origins) - never_rounded:
            origin = origins.get(tensor, Origin.SIGNAL)
            reasons[tensor] = _WHY[origin]
            if origin is Origin.INTEGERS and tensor not in operations.small:
                shared.add(tensor)
        for tensor in operations.small - never_rounded:
            if origins.get(tensor) is Origin.SIZES:
                # The reason of a reader is more specific, and stays.
                reasons.setdefault(tensor, _SIZE_ALONE)
        sized = _sized_by_data(operations, raw)
        return cls(reasons, shared, sized, decisions(operations))

    def inside(self, body: Body) -> ShapeArithmetic:
        """Return the view of a body of the graph.

        Args:
            body: a body of this graph, as ``bodies`` yields it.
        """
        return ShapeArithmetic(
            self._reasons,
            self._shared,
            self._sized,
            self._decided,
            (*self._path, step(body)),
        )

    def reason(self, tensor: str) -> str:
        """Return the reason never to quantize a tensor; empty if quantizable.

        Integers that have other uses, too, may be a signal there, such as the pixels of an image.
        """
        key = (self._path, tensor)
        if key in self._shared:
            return ""
        return self._reasons.get(key, "")

    def computed_by(self, node: Node) -> str:
        """Return why a node is part of shape arithmetic; empty if it is not."""
        for name in node.outputs:
            if (self._path, name) in self._reasons:
                return f"its result {self._reasons[self._path, name]}"
        return ""

    def exact_inputs(self, node: Node, opset: int) -> dict[str, str]:
        """Return the inputs that a node has to read unrounded, with the reason.

        Args:
            node: a node of this graph.
            opset: version of the standard operator set.

        Returns:
            The reason by the name of an input: inputs read as shapes, and all inputs of a node that
                is part of shape arithmetic itself.
        """
        controls = [node.inputs[index] for index in control_inputs(node, opset)]
        names = dict.fromkeys(controls, f"its reader {node.name} reads it as a shape")
        why = self.computed_by(node)
        if why:
            names |= dict.fromkeys(node.operands, why)
        return names

    def decision(self, tensor: str) -> Decision | None:
        """Return the decision for which alone a float tensor is read; None if it is a signal."""
        # A body may read a tensor of an outer graph, whose names the body cannot define again.
        for length in range(len(self._path), -1, -1):
            decision = self._decided.get((self._path[:length], tensor))
            if decision is not None:
                return decision
        return None

    def sized_by_data(self, tensor: str) -> bool:
        """Return whether the shape of a tensor depends on signal values, as in box selection."""
        return (self._path, tensor) in self._sized


def _origins(
    operations: Operations,
    *,
    integers_stay_integers: bool,
) -> dict[Tensor, Origin]:
    """Return the origins of computed tensors.

    Args:
        integers_stay_integers: an integer computed from a signal, such as the position of a
            maximum, counts as an integer and not as a signal.
    """
    # A tensor without an entry has not been reached yet, and counts as constant.
    origins = dict.fromkeys(operations.constants, Origin.CONSTANTS)
    for tensor in operations.inputs - operations.constants:
        origins[tensor] = Origin.SIGNAL
        if tensor in operations.integers:
            origins[tensor] = Origin.INTEGERS
    changed = True
    # Several rounds are needed only if a loop carries values to its next step.
    while changed:
        changed = False
        for operation in operations.sequence:
            origin = _origin(operation, operations, origins)
            for tensor in operation.outputs:
                bounded = integers_stay_integers and tensor in operations.integers
                # An origin only grows, so that the rounds end.
                new = max(
                    min(origin, Origin.INTEGERS) if bounded else origin,
                    origins.get(tensor, Origin.CONSTANTS),
                )
                changed |= origins.get(tensor) != new
                origins[tensor] = new
    return origins


def _origin(
    operation: Operation,
    operations: Operations,
    origins: dict[Tensor, Origin],
) -> Origin:
    """Return the origin of an operation's results.

    Args:
        origins: origins so far; a tensor without one counts as constant.
    """
    if operation.kind in SIZES:
        return Origin.SIZES
    # Random values and dequantized codes are signals even if all inputs are constants.
    if operation.kind in RANDOM or operation.kind in DEQUANTIZE:
        return Origin.SIGNAL
    origin = max(
        (origins.get(tensor, Origin.CONSTANTS) for tensor in operation.inputs),
        default=Origin.CONSTANTS,
    )
    learned = not operations.learned.isdisjoint(operation.inputs)
    # The first input is the table; indices are no table.
    if operation.kind in _LOOKING_UP:
        learned |= operation.inputs[0] in operations.tables
    if learned and origin > Origin.CONSTANTS:
        return Origin.SIGNAL
    return origin


def _read_as_shapes(
    operations: Operations,
    origins: dict[Tensor, Origin],
) -> set[Tensor]:
    """Return the tensors that are read as shapes, directly or indirectly.

    Signals of many values are excluded.

    Args:
        origins: origins by tensor; a tensor without one counts as constant.
    """
    read = defaultdict[Tensor, list[Tensor]](list)
    for operation in operations.sequence:
        # A size depends on the shape of its input alone, not on the values.
        inputs = () if operation.kind in SIZES else operation.inputs
        for tensor in operation.outputs:
            read[tensor] += inputs

    # A signal of a few values may be a computed scale or position; more values are data.
    def exact(tensors: Iterable[Tensor]) -> list[Tensor]:
        return [
            tensor
            for tensor in tensors
            if origins.get(tensor) is not Origin.SIGNAL or tensor in operations.flat
        ]

    controls = [
        control for operation in operations.sequence for control in operation.controls
    ]
    return set(reach(exact(controls), lambda tensor: exact(read[tensor])))


def _sized_by_data(operations: Operations, raw: dict[Tensor, Origin]) -> set[Tensor]:
    """Return the tensors whose shape depends on values of a signal.

    Args:
        raw: origins in which integers computed from a signal count as signals.

    Returns:
        The tensors, without those whose shape is known all the same.
    """
    sized = set[Tensor]()
    # A body's input may depend on a result further down in the sequence, by the next iteration.
    changed = True
    while changed:
        changed = False
        for operation in operations.sequence:
            if sized.issuperset(operation.outputs):
                continue
            decided = any(
                raw.get(tensor) is Origin.SIGNAL for tensor in _deciding(operation)
            )
            if decided or not sized.isdisjoint(operation.inputs):
                sized.update(operation.outputs)
                changed = True
    # A declared or inferred static shape is the better evidence.
    return sized - operations.static


def _deciding(operation: Operation) -> tuple[Tensor, ...]:
    """Return the inputs whose values may decide the shapes of an operator's results."""
    domain = operation.kind.rpartition("::")[0]
    if operation.kind in _COUNTING or domain not in _KNOWN_DOMAINS:
        return operation.inputs
    return () if operation.kind in KEEPS_SIZE else operation.controls
