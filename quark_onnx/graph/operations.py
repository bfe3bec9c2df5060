"""Flatten the operators of a graph and of the bodies into a list.

An If, Loop or Scan is replaced by operations that connect the inputs and outputs of its bodies with
the outer graph, so that data-flow analyses need not know bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from quark_onnx.graph.shapes import is_static

#: Path to a body: per control flow node its first output, the attribute, and the index in it.
Path = tuple[tuple[str, str, int], ...]
#: A tensor: the path to the graph that defines it, and its name there.
Tensor = tuple[Path, str]

#: Most values of the shape, padding or region of interest of a tensor.
FEW = 16
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
#: First opset at which a Scan no longer has the sequence lengths as its first input.
_SCAN_OPSET = 9


@dataclass(frozen=True)
class Operation:
    """An operator, or a connection between a body and the outer graph.

    Attributes:
        kind: the operator type, that of the control flow node for a connection.
        inputs: without omitted ones.
        outputs: without omitted ones.
        controls: inputs that are read as shapes, scales, positions or conditions.
    """

    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    controls: tuple[Tensor, ...] = ()


@dataclass
class Operations:
    """The flat list, with the known properties of its tensors.

    Attributes:
        sequence: operations, most of them after the producers of their inputs.
        inputs: inputs of the model.
        outputs: outputs of the model.
        constants: initializers, and the values of Constant nodes.
        tables: constants that are neither shapes nor positions.
        learned: ``tables`` with more than a few values.
        integers: tensors of integer types, bool or texts.
        static: tensors whose shape is known.
        small: tensors of a few values.
        flat: ``small`` tensors of rank 0 or 1.
    """

    sequence: list[Operation] = field(default_factory=list)
    inputs: set[Tensor] = field(default_factory=set)
    outputs: set[Tensor] = field(default_factory=set)
    constants: set[Tensor] = field(default_factory=set)
    tables: set[Tensor] = field(default_factory=set)
    learned: set[Tensor] = field(default_factory=set)
    integers: set[Tensor] = field(default_factory=set)
    static: set[Tensor] = field(default_factory=set)
    small: set[Tensor] = field(default_factory=set)
    flat: set[Tensor] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph, path: Path = ()) -> Operations:
        """Return the operations of a graph and of its bodies.

        Args:
            graph: the graph, with inferred shapes.
            path: path to the graph if it is a body; empty for the main graph.
        """
        result = cls()
        result._add_graph(graph, path, {})
        result.inputs.update(_located(path, [value.name for value in graph.inputs]))
        result.outputs.update(_located(path, [output.name for output in graph.outputs]))
        return result

    def _add_graph(self, graph: Graph, path: Path, outer: Mapping[str, Tensor]) -> None:
        """Add the nodes of a graph, and those of its bodies.

        Args:
            graph: the graph, or a body extracted as a graph.
            outer: captured tensors by name, which a body has as inputs or constants.
        """

        def tensor(name: str) -> Tensor:
            return outer.get(name, (path, name))

        for name in graph.initializers:
            self._describe(graph, name, tensor(name))
        for value in graph.inputs:
            self._describe(graph, value.name, tensor(value.name))
        for node in graph.nodes:
            for name in node.results:
                self._describe(graph, name, tensor(name))
            # By name, in the order of the node's inputs and then of the captures.
            reads = {name: tensor(name) for name in node.reads}
            if node.has_subgraph:
                self._add_bodies(graph, node, reads, path)
            # The joins of ``_add_bodies`` stand for If, Loop and Scan.
            if node.kind not in CONTROL_FLOW:
                self._add_node(graph, node, reads, path)

    def _describe(self, graph: Graph, name: str, tensor: Tensor) -> None:
        """Add a tensor to the sets of the properties that it has.

        Args:
            graph: the graph that declares the tensor.
            name: name of the tensor in that graph.
            tensor: path and name of the tensor, which may belong to an outer graph.
        """
        elem_type = graph.elem_type(name)
        shape = graph.shape(name)
        # Without open dimensions: ``few`` requires a static shape, in which none is missing.
        sizes = [size for size in graph.sizes(name) if isinstance(size, int)]
        few = is_static(shape) and prod(sizes) <= FEW
        stored = _is_stored(graph, name)
        table = stored and elem_type not in CONTROL_TYPES
        for members, belongs in (
            (self.integers, elem_type in _INTEGERS),
            (self.static, is_static(shape)),
            (self.small, few),
            (self.flat, few and len(sizes) <= 1),
            (self.constants, stored),
            (self.tables, table),
            (self.learned, table and not few),
        ):
            if belongs:
                members.add(tensor)

    def _add_node(
        self,
        graph: Graph,
        node: Node,
        reads: Mapping[str, Tensor],
        path: Path,
    ) -> None:
        """Add an operator, or a node of another domain with bodies.

        Args:
            node: the node; no If, Loop or Scan.
            reads: tensors that the node or its bodies read, by name, in this order.
        """
        controls = {node.inputs[index] for index in control_inputs(node, graph.opset)}
        # Without a schema the types tell: integers of 32 and 64 bits, and conditions.
        if not has_schema(node):
            for name in reads:
                if graph.elem_type(name) in CONTROL_TYPES:
                    controls.add(name)
        if node.kind == "Cast" and node.attribute("to") in CONTROL_TYPES:
            # The Cast truncates values that become positions.
            controls |= reads.keys()
        self.integers.update(_located(path, _integer_results(graph, node)))
        self.sequence.append(
            Operation(
                node.kind,
                inputs=tuple(reads.values()),
                outputs=tuple(_located(path, node.results)),
                controls=tuple(reads[name] for name in reads if name in controls),
            ),
        )

    def _add_bodies(
        self,
        graph: Graph,
        node: Node,
        reads: Mapping[str, Tensor],
        path: Path,
    ) -> None:
        """Add the nodes of a node's bodies, and connect them with the outer graph.

        Args:
            reads: tensors that the node or its bodies read, by name.
        """
        # None for an omitted input, so that positions stay aligned with the body's inputs.
        given = [reads.get(name) for name in node.inputs]
        for body in bodies(graph, node, weights=False):
            inner = Graph(body.model)
            inside = (*path, step(body))
            borrowed = {name: reads[name] for name in body.borrowed if name in reads}
            body_inputs = [
                (inside, value.name)
                for value in inner.inputs
                if value.name not in borrowed
            ]
            # A body may return a captured tensor as it is.
            results = [
                borrowed.get(output.name, (inside, output.name))
                for output in inner.outputs
            ]
            self._join_inputs(graph, node, given, body_inputs, results)
            self._add_graph(inner, inside, borrowed)
            self._join_outputs(node, given, results, path)

    def _join_inputs(
        self,
        graph: Graph,
        node: Node,
        given: list[Tensor | None],
        body_inputs: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Connect the inputs of a body with their values in the first and in later iterations.

        Args:
            graph: the graph with the node, whose opset decides on the inputs of a Scan.
            given: inputs of the node, None for an omitted one.
            body_inputs: inputs of the body, without captured tensors.
            results: outputs of the body, in its order.
        """
        carried: list[Tensor | None] = []
        if node.kind == "Loop":
            # A body takes iteration number, condition and states; it returns condition and
            # states.
            carried = [None, *results]
        elif node.kind == "Scan":
            if graph.opset < _SCAN_OPSET:
                given = given[1:]
            # States come first; the scanned inputs and outputs after them are not carried on.
            carried = list(
                results[: len(body_inputs) - int(node.attribute("num_scan_inputs", 0))],
            )
        elif node.kind != "If":
            # An unknown operator: any input may reach any input of the body.
            for tensor in body_inputs:
                self.sequence.append(
                    Operation(node.kind, tuple(filter(None, given)), (tensor,)),
                )
            return
        # Values beyond the inputs of the body, such as scan outputs, are not read by the next
        # iteration.
        for tensor, *sources in zip_longest(
            body_inputs, given[: len(body_inputs)], carried[: len(body_inputs)]
        ):
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
        """Connect the outputs of node and body, or the initial values.

        Args:
            given: inputs of the node, None for an omitted one.
            results: outputs of the body, in its order.
            path: path to the graph with the node.
        """
        controls: list[Tensor | None] = []
        initial: list[Tensor | None] = []
        if node.kind == "If":
            # The condition of the If.
            controls = given[:1]
        elif node.kind == "Loop":
            # Trip count and condition of the Loop, and the condition that its body computes.
            controls = [*given[:2], *results[:1]]
            # A Loop of no iterations returns the initial values of the states.
            initial = given[2:]
            results = results[1:]
        steering = tuple(filter(None, controls))
        sources = zip_longest(results, initial[: len(results)])
        for name, values in zip(node.outputs, sources, strict=False):
            if name:
                reads = (*steering, *filter(None, values))
                self.sequence.append(
                    Operation(node.kind, reads, ((path, name),), steering),
                )


def _located(path: Path, names: Iterable[str]) -> list[Tensor]:
    """Return tensors of the graph at a path."""
    return [(path, name) for name in names]


def _is_stored(graph: Graph, name: str) -> bool:
    """Return whether a tensor is an initializer, or the value of a Constant node."""
    if graph.is_constant(name):
        return True
    return graph.producer_of_kind(name, {"Constant"}) is not None


def step(body: Body) -> tuple[str, str, int]:
    """Return the last step of the path to a body."""
    result = next(iter(body.node.results), "")
    return result, body.attribute, body.place


def _integer_results(graph: Graph, node: Node) -> list[str]:
    """Return the outputs whose type is an integer or bool by the operator alone."""
    indices = set(integer_results(node.kind, graph.opset))
    if node.kind == "Cast" and node.attribute("to") in _INTEGERS:
        indices.add(0)
    if node.kind == "CastLike" and graph.elem_type(node.inputs[1]) in _INTEGERS:
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
        TensorProto.STRING,
    },
)
