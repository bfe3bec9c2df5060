"""Calls: nodes with input values and context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import only_reader, other_input
from quark_onnx.graph.segment import segment
from quark_onnx.npu.integers.fixed import Fixed
from quark_onnx.running.run import run


@dataclass(frozen=True)
class Real:
    """Floats: inputs of the model and results that are computed in float.

    Attributes:
        values: float64.
        given: True if the values are values of an input, moved at most.
        known: True if the values follow the engine's documentation.
    """

    values: NDArray[np.float64]
    given: bool = False
    known: bool = False


#: Value of an input. A bare array is a constant or a shape.
Value = Fixed | Real | NDArray[Any]


@dataclass(frozen=True)
class NodeCall:
    """A node with the values of its inputs.

    Attributes:
        graph: graph of the node.
        node: the node to compute.
        inputs: a value for each input, None for an omitted input.
        engine: operators that follow the engine's documentation instead of exact arithmetic:
            "average", "gate", "softmax".
        single: True to multiply by float constants in float32, as onnxruntime does, so that ties
            are the same; False for exact products.
    """

    graph: Graph
    node: Node
    inputs: tuple[Value | None, ...]
    engine: frozenset[str] = frozenset()
    single: bool = False

    def operands(self) -> list[Value]:
        """Return the values of the inputs that are not omitted."""
        return [value for value in self.inputs if value is not None]

    def has(self, index: int) -> bool:
        """Return True if an input is present."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def fixed(self, index: int) -> Fixed:
        """Return an input as integers.

        Raises:
            ModelError: the input is float.
        """
        value = self.inputs[index]
        if value is None or isinstance(value, Real):
            raise self.refused(
                f"its input {self.node.input(index)!r} is float; quantize it, too",
            )
        return exact(value)

    def moved(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> list[Value]:
        """Apply a move or a selection of values to the first input."""
        value = self.inputs[0]
        if isinstance(value, Real):
            return [replace(value, values=change(value.values))]
        return [self.fixed(0).shaped(change)]

    def size(self) -> tuple[int, ...]:
        """Return the shape of the first input."""
        value = self.inputs[0]
        assert value is not None
        return (value.values if isinstance(value, Fixed | Real) else value).shape

    def known(self, index: int) -> NDArray[Any]:
        """Return the value of a constant input.

        Raises:
            ModelError: the input is computed.
        """
        value = self.inputs[index]
        if not isinstance(value, np.ndarray):
            raise self.refused(f"its input {self.node.input(index)!r} is no constant")
        return value

    @property
    def corrected(self) -> bool:
        """Return True if only a Mul with a constant reads the result.

        amd-quark writes this factor to imitate the engine's arithmetic.
        """
        graph, result = self.graph, self.node.outputs[0]
        # The Mul must be the only reader: any other reader would get the uncorrected result.
        reader = only_reader(graph, result)
        if reader is None or reader.kind != "Mul":
            return False
        factor = other_input(reader, result)
        # The square of a result is no correction: its factor is the result itself.
        return factor != result and _is_constant(graph, factor)

    def refused(self, reason: str) -> ModelError:
        """Return the error for a node that cannot be simulated."""
        source = self.node.input(0)
        # Inputs of the graph have no producer, before which a simulation could stop.
        way = ""
        if self.graph.producer(source):
            way = f"; until={source!r} stops in front of it"
        return ModelError(f"{self.node!r} cannot be simulated: {reason}{way}")

    def evaluated(self, arrays: Mapping[int, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return all outputs, as computed by ONNX's reference evaluator.

        Args:
            arrays: replacements for input values, by input index.
        """
        given = dict[str, NDArray[Any]]()
        for index, name in enumerate(self.node.inputs):
            if self.has(index):
                given[name] = np.asarray(arrays.get(index, self.inputs[index]))
        names = self.node.results
        try:
            evaluator = ReferenceEvaluator(
                # A model of this node alone; the values become constants or inputs of their type.
                segment(self.graph, [self.node], given, names),
            )
            return list(map(np.asarray, evaluator.run(None, given)))
        except Exception as error:  # of whatever type the operator there raises
            raise self.refused(
                f"the reference evaluator of ONNX fails: {error}",
            ) from error


def _is_constant(graph: Graph, name: str) -> bool:
    """Return True for a constant, and for the result of a node that reads constants alone."""
    producer = graph.producer(name)
    if producer is None:
        return graph.is_constant(name)
    # A Constant node, as which amd-quark writes the factor, has no inputs at all.
    return all(map(graph.is_constant, producer.inputs))


Operator = Callable[[NodeCall], "list[Value]"]


def exact(value: Fixed | NDArray[Any]) -> Fixed:
    """Return a value as integers; constants are represented exactly."""
    return value if isinstance(value, Fixed) else Fixed.exactly(value)


def reals(value: Value) -> NDArray[np.float64]:
    """Return a value as floats, rounded to nearest."""
    if isinstance(value, Fixed):
        return value.reals()
    if isinstance(value, Real):
        return value.values
    return value.astype(np.float64)


def in_float(call: NodeCall) -> list[Value]:
    """Compute a node in float32 by onnxruntime, for want of documented integers.

    ONNX's reference evaluator has LogSoftmax of opset 13 alone, and other sizes than onnxruntime in
    a linear Resize by fractions.
    """
    values = dict(zip(call.node.inputs, call.inputs, strict=True))
    given = {
        name: reals(value).astype(np.float32)
        for name, value in values.items()
        if isinstance(value, Fixed | Real)
    }
    model = segment(call.graph, [call.node], given, call.node.results)
    # Constants, which may be results of nodes: shapes have to be known when a model is loaded.
    del model.graph.initializer[:]
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name)
        for name, value in values.items()
        if isinstance(value, np.ndarray)
    )
    try:
        outputs = run(model, given)
    except ModelError as error:
        raise call.refused(str(error)) from error
    return [Real(output.astype(np.float64)) for output in outputs.values()]
