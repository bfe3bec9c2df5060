"""float16 and bfloat16: convert a float32 model to 16 bits.

Every float32 tensor gets the other type under the same name. Inputs for which an operator's ONNX
definition has no 16-bit type, as the scales of Resize, stay float32 between Casts; so do operators
on codes, whose scales would be rounded, and operators of other domains, whose definitions are
unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.common.errors import ModelError
from quark_onnx.common.wording import counted, tally
from quark_onnx.convert.base import ConversionSettings, conversion
from quark_onnx.dtypes import BFLOAT16, FLOAT16, Half
from quark_onnx.files.half_precision import cast_interface, retype, typed
from quark_onnx.graph import Graph, Node, store_constants
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.graph.node import schema_of
from quark_onnx.plan.existing import is_quantizing

_TENSOR = {FLOAT16.onnx: "tensor(float16)", BFLOAT16.onnx: "tensor(bfloat16)"}
#: Attributes with the type of a result.
_TYPES = ("to", "dtype", "output_dtype", "output_datatype")
_FLOAT = int(TensorProto.FLOAT)


@conversion("float16", keeps="no", reads=["io"])
def float16(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert weights and arithmetic of a float32 model to float16.

    Inputs and outputs stay float32 without --io.
    """
    return _narrowed(graph, FLOAT16, settings.io)


@conversion("bfloat16", keeps="no", reads=["io"])
def bfloat16(graph: Graph, settings: ConversionSettings) -> tuple[Graph, list[str]]:
    """Convert weights and arithmetic of a float32 model to bfloat16.

    Inputs and outputs stay float32 without --io.
    """
    return _narrowed(graph, BFLOAT16, settings.io)


def _narrowed(graph: Graph, half: Half, io: bool) -> tuple[Graph, list[str]]:
    """Convert a graph to 16 bits.

    Args:
        graph: the graph, which is changed in place.
        half: the 16-bit type.
        io: convert inputs and outputs, too; otherwise they stay float32, next to Casts.

    Returns:
        The converted graph, and notes. Without a float32 tensor, the graph and no notes.

    Raises:
        ModelError: the type, or an operator of the model with the type, needs a later opset; or a
            tensor or body cannot be converted.
    """
    if graph.opset < half.min_opset:
        raise ModelError(
            f"{half.name} needs opset {half.min_opset}, the model has {graph.opset};"
            f" convert that first (--to opset {half.name} --opset 22)",
        )
    narrow = _Narrow(half)
    inputs = typed(graph.inputs, {_FLOAT})
    outputs = typed(graph.outputs, {_FLOAT})
    # Before the conversion: an input that stays float32 keeps its default value.
    defaults = {
        name: graph.initializers[name] for name in inputs if name in graph.initializers
    }
    narrow.graph(graph)
    if not narrow.count:
        return graph, []
    model = graph.to_model()
    # The inferred types are those before the conversion.
    del model.graph.value_info[:]
    if not io:
        model = cast_interface(model, inputs, outputs, half.onnx)
        for tensor in model.graph.initializer:
            tensor.CopyFrom(defaults.get(tensor.name, tensor))
    return Graph.of(model, graph.store), narrow.notes()


class _Narrow:
    """Converts a graph to 16 bits, and counts the changes."""

    def __init__(self, half: Half) -> None:
        self.half = half
        self.count = 0
        self.clipped = 0
        self.raised = 0
        self.wide: Counter[str] = Counter()

    def notes(self) -> list[str]:
        """Return a line per kind of change."""
        name = self.half.name
        lines = [f"{counted(self.count, 'tensor')} became {name}"]
        if self.wide:
            kinds = tally(sorted(self.wide.items()))
            lines.append(f"stay float32, at this opset or altogether: {kinds}")
        if self.clipped:
            lines.append(
                f"{counted(self.clipped, 'constant reaches', 'constants reach')} beyond"
                f" {name}, clipped to"
                f" {self.half.largest:.5g}",
            )
        if self.raised:
            lines.append(
                f"{counted(self.raised, 'constant')} would have become zero; now the least"
                f" {name}",
            )
        return lines

    def graph(self, graph: Graph, borrowed: Collection[str] = ()) -> None:
        """Convert a graph and the bodies in place.

        Args:
            graph: the graph, or a body extracted as a graph.
            borrowed: names of captured tensors of a body; their constants are counted in the outer
                graph.

        Raises:
            ModelError: a sparse constant, or a node with bodies, cannot be converted.
        """
        store_constants(graph)
        _refuse_sparse(graph)
        # Bodies first: captured tensors of the outer graph still have their float32 declarations.
        self._bodies(graph)
        results = _floats(graph, graph.results())
        self.count += len(results)
        kinds = results | _floats(graph, [value.name for value in graph.inputs])
        constants = {
            name: tensor
            for name, tensor in graph.initializers.items()
            if tensor.data_type == _FLOAT
        }
        # float32 values of constants that are read in float32, before these constants are rounded
        # below.
        before = {
            name: graph.constant(name)
            for name in self._read_wide(graph, constants)
            if graph.is_constant(name)
        }
        # A list, as Casts are added on the way.
        for node in list(graph.nodes):
            self._node(graph, node, kinds, before)
        for name in constants:
            graph.set_constant(name, self._array(graph, name))
        for value in (*graph.inputs, *graph.outputs):
            retype(value.type, {_FLOAT}, self.half.onnx)
        graph.drop_unused()
        self.count += len(constants.keys() & graph.initializers.keys() - set(borrowed))

    def _bodies(self, graph: Graph) -> None:
        """Convert the bodies of a graph in place."""
        # Extracted before the first one is put back, which changes the node.
        for body in list(bodies(graph)):
            if body.node.domain:
                raise ModelError(
                    f"{body.node!r} has a graph of its own, of which nothing is known;"
                    " it cannot be converted",
                )
            inner = Graph(body.model, store=graph.store)
            inner.reserve(graph.names)
            self.graph(inner, body.borrowed)
            put_back(graph, body, inner)

    def _read_wide(self, graph: Graph, constants: dict[str, Any]) -> set[str]:
        """Return the float32 constants that a node reads at an input without a 16-bit type."""
        names = set[str]()
        for node in graph.nodes:
            for index, name in enumerate(node.inputs):
                if name in constants and not self._takes(graph, node, index):
                    names.add(name)
        return names

    def _node(
        self, graph: Graph, node: Node, kinds: set[str], before: dict[str, Any]
    ) -> None:
        """Let a node read and compute 16 bits, or insert a Cast on each side.

        Args:
            kinds: names of the float32 tensors of the original graph, which become 16 bits.
            before: float32 values, by name, of the constants that a node reads in float32.

        Raises:
            ModelError: the outputs of an If, Loop or Scan have no 16-bit type at the opset.
        """
        wide = False
        schema = _schema(graph, node)
        # The outputs of an If or Loop have the types that its bodies compute.
        if node.has_subgraph and not (
            schema and self._allowed(schema, schema.outputs, 0)
        ):
            raise ModelError(
                f"{node!r} has no {self.half.name} at opset {graph.opset}; convert to a"
                " later one first",
            )
        for index, name in enumerate(node.inputs):
            if name in before and not self._takes(graph, node, index):
                # A constant is read as float32 itself, without rounding and a Cast back.
                graph.set_input(node, index, _float_constant(graph, name, before[name]))
            elif name in kinds and not self._takes(graph, node, index):
                wide = True
                graph.set_input(node, index, _cast(graph, name))
        for index, name in enumerate(node.outputs):
            if name in kinds and not self._makes(graph, node, index):
                wide = True
                float_name = graph.fresh(f"{name}_float")
                graph.set_output(node, index, float_name)
                graph.add("Cast", [float_name], [name], to=self.half.onnx)
        self.wide[node.kind] += wide
        # Adding an empty counter drops the zeros.
        self.wide += Counter()

    def _takes(self, graph: Graph, node: Node, index: int) -> bool:
        """Return whether an input may have 16 bits at the graph's opset.

        False, too, for an operator whose definition is unknown, or that reads or writes codes.
        """
        schema = _schema(graph, node)
        return schema is not None and self._allowed(schema, schema.inputs, index)

    def _makes(self, graph: Graph, node: Node, index: int) -> bool:
        """Return whether a result has 16 bits if the inputs have, where they may.

        Attributes with the type of the result are changed.
        """
        schema = _schema(graph, node)
        if schema is None or not self._allowed(schema, schema.outputs, index):
            return False
        kind = _formal(schema.outputs, index).type_str
        input_kinds = {
            _formal(schema.inputs, position).type_str
            for position, name in enumerate(node.inputs)
            if name
        }
        # The result has the type of an input, which has become the 16-bit type.
        if kind in input_kinds or node.has_subgraph:
            return True
        for name in _TYPES:
            if node.attribute(name) == _FLOAT:
                node.set_attribute(name, self.half.onnx)
                return True
        value = node.attribute("value")
        # The type of the result is that of the attribute, float32 by default.
        if node.kind == "ConstantOfShape":
            number: NDArray[Any] = np.zeros(1, np.float32)
            if value is not None:
                number = numpy_helper.to_array(value)
            node.set_attribute("value", numpy_helper.from_array(self._fitted(number)))
            return True
        return False

    def _allowed(self, schema: Any, formals: Any, index: int) -> bool:
        """Return whether an input or output of an operator may have the 16-bit type.

        Args:
            schema: definition of the operator (``onnx.defs.OpSchema``).
            formals: the inputs of the definition, or the outputs.
        """
        kind = _formal(formals, index).type_str
        constraints = {
            constraint.type_param_str: constraint.allowed_type_strs
            for constraint in schema.type_constraints
        }
        # A type that is no type parameter, such as "tensor(float)", allows itself alone.
        return _TENSOR[self.half.onnx] in constraints.get(kind, [kind])

    def _array(self, graph: Graph, name: str) -> NDArray[Any]:
        """Return the values of a constant, or the default value of an input, in 16 bits."""
        array = graph.constant(name)
        assert array is not None or graph.is_input(name), name
        if array is None:
            # The default value of an input.
            array = values(graph.initializers[name])
        return self._fitted(array)

    def _fitted(self, array: NDArray[Any]) -> NDArray[Any]:
        """Convert values to 16 bits: finite ones are clipped, and a nonzero scalar stays nonzero.

        A scalar is often an epsilon. Arrays with clipped or raised values are counted.
        """
        largest = self.half.largest
        # Infinities stay: masks of attention add them.
        finite = np.isfinite(array)
        beyond = finite & (np.abs(array) > largest)
        self.clipped += bool(beyond.any())
        with np.errstate(over="ignore"):
            clipped = np.where(beyond, np.copysign(largest, array), array)
            result: NDArray[Any] = clipped.astype(self.half.numpy)
        if array.size == 1 and array.any() and not result.astype(np.float32).any():
            self.raised += 1
            # Bits 1: the least subnormal number of either type.
            least = np.array(1, np.uint16).view(self.half.numpy).astype(np.float32)
            result = np.copysign(least, array).astype(self.half.numpy)
        return result


def _refuse_sparse(graph: Graph) -> None:
    """Raise ModelError for a sparse constant of float32."""
    for name in graph.sparse:
        if graph.elem_type(name) in (_FLOAT, TensorProto.UNDEFINED):
            raise ModelError(
                f"the sparse constant {name!r} cannot be converted; make it dense first",
            )


def _floats(graph: Graph, names: Iterable[str]) -> set[str]:
    """Return the names of float32 tensors."""
    return {name for name in names if graph.elem_type(name) == _FLOAT}


def _float_constant(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """Return the float32 constant of a constant, which is added once."""
    return graph.shared_constant(("float32", name), f"{name}_float", lambda: array)


def _cast(graph: Graph, name: str) -> str:
    """Return the float32 tensor of a tensor: one Cast, however many nodes read float32."""
    [float_name] = graph.once(
        ("cast", name),
        lambda: [graph.compute("Cast", [name], f"{name}_float", to=_FLOAT)],
    )
    return float_name


def _schema(graph: Graph, node: Node) -> Any:
    """Return the definition of an operator; None for float32 operators."""
    if node.domain or is_quantizing(node):
        return None
    return schema_of(node.op_type, graph.opset)


def _formal(formals: Any, index: int) -> Any:
    """Return the parameter of an input or output; the last one may be variadic."""
    return formals[min(index, len(formals) - 1)]
