"""The operators of a graph and of the bodies in it as one flat list, in which values pass in and
out of bodies.

An If, Loop or Scan is replaced by operations that join what its bodies are given and what they hand
out, so that an analysis of the data flow need not know of bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod

from onnx import TensorProto

from quark_onnx.graph.bodies import Body, bodies
from quark_onnx.graph.control_inputs import (
    CONTROL_TYPES,
    control_inputs,
    has_schema,
    integer_results,
)
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import Node

#: The way to a body: the first output of each control flow node, the attribute and its place.
Path = tuple[tuple[str, str, int], ...]
#: A tensor: the way to the graph that defines it, and its name there.
Tensor = tuple[Path, str]

#: More values than a shape, the padding or the region of interest of any tensor has.
FEW = 16
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
#: Before this opset a Scan had the lengths of its sequences as its first input.
_SCAN_OPSET = 9


@dataclass(frozen=True)
class Operation:
    """An operator, or the joint between a body and what is around it.

    Attributes:
        kind: the operator type, that of the control flow node for a joint.
        inputs: without omitted ones.
        outputs: without omitted ones.
        controls: those of its inputs that are read as shapes, scales, positions or conditions.
    """

    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    controls: tuple[Tensor, ...] = ()


@dataclass
class Operations:
    """The flat list, and what is known of its tensors.

    Attributes:
        sequence: in an order in which most tensors are computed before they are read.
        inputs: of the model.
        constants: initializers, and what Constant nodes hold.
        tables: those of them that are neither shapes nor positions.
        learned: those of ``tables`` with more than a few values.
        integers: tensors of int32, int64 or bool, or of another integer type.
        static: tensors whose shape is known.
        small: tensors of a few values; ``flat`` is those of them without axes or with one.
        flat: see ``small``.
    """

    sequence: list[Operation] = field(default_factory=list)
    inputs: set[Tensor] = field(default_factory=set)
    constants: set[Tensor] = field(default_factory=set)
    tables: set[Tensor] = field(default_factory=set)
    learned: set[Tensor] = field(default_factory=set)
    integers: set[Tensor] = field(default_factory=set)
    static: set[Tensor] = field(default_factory=set)
    small: set[Tensor] = field(default_factory=set)
    flat: set[Tensor] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph, path: Path = ()) -> Operations:
        """The operations of a graph and of its bodies."""
        result = cls()
        result._add_graph(graph, path, {})
        result.inputs |= {(path, value.name) for value in graph.inputs}
        return result

    def _add_graph(self, graph: Graph, path: Path, outer: Mapping[str, Tensor]) -> None:
        """Add the nodes of a graph; ``outer`` has the tensors that are defined around it."""

        def tensor(name: str) -> Tensor:
            return outer.get(name, (path, name))

        for name in graph.initializers:
            self._describe(graph, name, tensor(name))
        for value in graph.inputs:
            self._describe(graph, value.name, tensor(value.name))
        for node in graph.nodes:
            for name in filter(None, node.outputs):
                self._describe(graph, name, tensor(name))
            reads = {
                name: tensor(name) for name in (*node.inputs, *node.captures) if name
            }
            if node.has_subgraph:
                self._add_bodies(graph, node, reads, path)
            if node.kind not in _CONTROL_FLOW:
                self._add_node(graph, node, reads, path)

    def _describe(self, graph: Graph, name: str, tensor: Tensor) -> None:
        elem_type, shape = graph.elem_type(name), graph.shape(name)
        if elem_type in _INTEGERS:
            self.integers.add(tensor)
        sizes = [size for size in shape or () if isinstance(size, int)]
        static = shape is not None and len(sizes) == len(shape)
        few = static and prod(sizes) <= FEW
        if static:
            self.static.add(tensor)
        if few:
            self.small.add(tensor)
        if few and len(sizes) <= 1:
            self.flat.add(tensor)
        producer = graph.producer(name)
        if graph.is_constant(name) or (
            producer is not None and producer.kind == "Constant"
        ):
            self.constants.add(tensor)
            if elem_type not in CONTROL_TYPES:
                self.tables.add(tensor)
                self.learned |= set() if few else {tensor}

    def _add_node(
        self,
        graph: Graph,
        node: Node,
        reads: Mapping[str, Tensor],
        path: Path,
    ) -> None:
        """Add an operator; ``reads`` has the tensors that it and its bodies read, by name."""
        controls = {node.inputs[index] for index in control_inputs(node, graph.opset)}
        if not has_schema(node):
            controls |= {
                name for name in reads if graph.elem_type(name) in CONTROL_TYPES
            }
        if node.kind == "Cast" and node.attribute("to") in CONTROL_TYPES:
            controls |= (
                reads.keys()
            )  # it cuts off the fraction of what becomes a position
        self.integers |= {(path, name) for name in _integer_results(node, graph.opset)}
        outputs = tuple((path, name) for name in node.outputs if name)
        steering = tuple(reads[name] for name in reads if name in controls)
        self.sequence.append(
            Operation(node.kind, tuple(reads.values()), outputs, steering),
        )

    def _add_bodies(
        self,
        graph: Graph,
        node: Node,
        reads: Mapping[str, Tensor],
        path: Path,
    ) -> None:
        """Add the nodes of a node's bodies and what joins them with the tensors around them."""
        given = [reads.get(name) for name in node.inputs]
        for body in bodies(graph, node, weights=False):
            inner, inside = Graph(body.model), (*path, step(body))
            borrowed = {name: reads[name] for name in body.borrowed}
            own = [
                (inside, value.name)
                for value in inner.inputs
                if value.name not in borrowed
            ]
            results = [
                borrowed.get(value.name, (inside, value.name))
                for value in inner.outputs
            ]
            self._join_inputs(graph, node, given, own, results)
            self._add_graph(inner, inside, borrowed)
            self._join_outputs(node, given, results, path)

    def _join_inputs(
        self,
        graph: Graph,
        node: Node,
        given: list[Tensor | None],
        own: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Let the inputs of a body hold what they are given at the first step, and what the step
        before hands out.
        """
        later: list[Tensor | None] = []
        if node.kind == "Loop":
            later = [None, *results]
        elif node.kind == "Scan":
            given = given[1:] if graph.opset < _SCAN_OPSET else given
            later = list(
                results[: len(own) - int(node.attribute("num_scan_inputs", 0))],
            )
        elif (
            node.kind != "If"
        ):  # it is not known which input is given to which input of the body
            self.sequence += [
                Operation(node.kind, tuple(filter(None, given)), (tensor,))
                for tensor in own
            ]
            return
        for tensor, *sources in zip_longest(own, given[: len(own)], later[: len(own)]):
            self.sequence.append(
                Operation(node.kind, tuple(filter(None, sources)), (tensor,)),
            )

    def _join_outputs(
        self,
        node: Node,
        given: list[Tensor | None],
        results: list[Tensor],
        path: Path,
    ) -> None:
        """Let the outputs of a node hold what its body hands out, or what it was given where no
        step is run.
        """
        controls: list[Tensor | None] = []
        first: list[Tensor | None] = []
        if node.kind == "If":
            controls = given[:1]
        elif node.kind == "Loop":
            controls = [*given[:2], *results[:1]]
            first = given[2:]
            results = results[1:]
        steering = tuple(filter(None, controls))
        sources = zip_longest(results, first[: len(results)])
        for name, values in zip(node.outputs, sources, strict=False):
            if name:
                reads = (*steering, *filter(None, values))
                self.sequence.append(
                    Operation(node.kind, reads, ((path, name),), steering),
                )


def step(body: Body) -> tuple[str, str, int]:
    """The last step of the way to a body."""
    return next(filter(None, body.node.outputs), ""), body.attribute, body.place


def _integer_results(node: Node, opset: int) -> list[str]:
    """The outputs whose type is an integer or bool by the operator alone."""
    indices = set(integer_results(node.kind, opset))
    if node.kind == "Cast" and node.attribute("to") in _INTEGERS:
        indices.add(0)
    return [name for index, name in enumerate(node.outputs) if index in indices]


_INTEGERS = frozenset(
    {
        *CONTROL_TYPES,
        TensorProto.INT8,
        TensorProto.INT16,
        TensorProto.UINT8,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
    },
)
