"""Convert float16 and bfloat16 models to float32 and back at the interface.

Few kernels of a CPU runtime compute in 16 bits, and no calibration runs in them; and the scale of a
Q/DQ pair has the type of the tensor. So a graph is planned, measured and quantized in float32. At
the end a Cast restores the type of each input and output, and constants that stayed float are
stored in 16 bits again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import (
    all_graphs,
    all_names,
    attributes_of,
    bodies_of,
    defined_names,
    read_by,
    rename_entries,
    results_of,
)
from quark_onnx.graph.shapes import declared_values
from quark_onnx.graph.store import LEAST, Store
from quark_onnx.patterns.coded_constants import CodedConstant

HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
#: Attributes whose value is a type.
_TYPES = frozenset({"to", "dtype", "output_dtype", "stash_type"})


@dataclass
class OriginalDtypes:
    """The original types of 16-bit inputs, outputs and constants, by name.

    Types are ``TensorProto.DataType``. ``coded`` has the constants that the model stores as integer
    codes.
    """

    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    coded: dict[str, CodedConstant] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.constants)

    def forget_inputs(self, names: Iterable[str]) -> None:
        """Forget inputs after their change to constants."""
        for name in names:
            self.inputs.pop(name, None)

    def store_constants(self, graph: Graph) -> None:
        """Store remaining constants in 16 bits, or as codes, again, before the same operators."""
        for name, coded in self.coded.items():
            if _is_inner_float(graph, name) and np.array_equal(
                values(graph.initializers[name]), coded.dequantized()
            ):
                del graph.initializers[name]
                coded.write(graph, name)
        for name, kind in self.constants.items():
            if _is_inner_float(graph, name):
                tensor = graph.initializers[name]
                array = values(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
                # The Cast takes over the name: bodies may capture it, too.
                del graph.initializers[name]
                narrow = graph.add_constant(f"{name}_narrow", array)
                graph.add("Cast", [narrow], [name], to=int(TensorProto.FLOAT))
        graph.drop_unused()

    def restore_interface(self, model: ModelProto) -> ModelProto:
        """Return a copy of a model with the original types of inputs and outputs.

        Args:
            model: the float32 model, with inputs and outputs of the original names.
        """
        result = cast_interface(model, self.inputs, self.outputs, TensorProto.FLOAT)
        for tensor in result.graph.initializer:
            # The default value of an input has the type of the input.
            if tensor.name in self.inputs:
                dtype = helper.tensor_dtype_to_np_dtype(self.inputs[tensor.name])
                array = values(tensor).astype(dtype)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        return result


def _is_inner_float(graph: Graph, name: str) -> bool:
    """Return whether a tensor is a float32 constant that only nodes read."""
    if not graph.is_constant(name) or graph.elem_type(name) != TensorProto.FLOAT:
        return False
    return bool(graph.consumers(name)) and not graph.is_output(name)


def cast_interface(
    model: ModelProto,
    inputs: dict[str, int],
    outputs: dict[str, int],
    inside: int,
) -> ModelProto:
    """Return a copy of a model with a Cast at each input and output of another type.

    Args:
        model: the model.
        inputs: new ``TensorProto.DataType`` by input name.
        outputs: new ``TensorProto.DataType`` by output name.
        inside: the type in which the model computes them.
    """
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    taken = {tensor.name for tensor in graph.initializer}
    taken.update(read_by(graph.node), results_of(graph.node))
    # A name that a body defines would hide the renamed tensor there.
    for body in bodies_of(graph.node):
        taken |= all_names(body)
    suffix = TensorProto.DataType.Name(inside).lower()
    # The interface keeps its names; the tensors inside are renamed.
    inner_names = {
        name: _fresh(f"{name}_{suffix}", taken) for name in (*inputs, *outputs)
    }
    _rename(graph, inner_names)
    # Casts of inputs first, those of outputs last: the order stays topological.
    before = [_cast(name, inner_names[name], int(inside), taken) for name in inputs]
    after = list[NodeProto]()
    for name, kind in outputs.items():
        # An input that is an output as well keeps name, type and value: no Cast back.
        if name not in inputs:
            # The node is named after the tensor of the interface, as that of an input.
            after.append(_cast(inner_names[name], name, kind, taken, of=name))
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    # An initializer that is an output itself: the Cast above reads it under its inner name.
    for tensor in graph.initializer:
        if tensor.name in outputs:
            tensor.name = inner_names[tensor.name]
    kinds = {**inputs, **outputs}
    for value in (*graph.input, *graph.output):
        if value.name in kinds:
            value.type.tensor_type.elem_type = kinds[value.name]
    return result


def _cast(
    source: str, result: str, kind: int, taken: set[str], of: str = ""
) -> NodeProto:
    """Return a Cast, named after ``of`` or ``source``; the name is added to ``taken``."""
    name = _fresh(f"{of or source}_Cast", taken)
    return helper.make_node("Cast", [source], [result], name, to=kind)


def add_narrow(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """Add a 16-bit constant followed by a Cast to float32; return the name of the Cast's result.

    Args:
        graph: the graph, which is changed in place.
        name: preferred name of the result.
        array: values in float16 or bfloat16.
    """
    narrow = graph.add_constant(f"{name}_narrow", array)
    return graph.compute("Cast", [narrow], name, to=int(TensorProto.FLOAT))


def upcast_to_float32(
    model: ModelProto, store: Store | None = None
) -> tuple[ModelProto, OriginalDtypes]:
    """Return ``model`` in float32 instead of 16-bit floats, and the original types.

    A model without 16-bit floats is returned uncopied.

    Args:
        model: the model, which is not changed.
        store: takes large tensors, whose size doubles.
    """
    if not any(_has_halves(subgraph) for subgraph in all_graphs(model.graph)):
        return model, OriginalDtypes()
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    # Only constants of the main graph are stored in 16 bits again; those of bodies stay wide.
    constants = {
        tensor.name: tensor.data_type
        for tensor in graph.initializer
        if tensor.data_type in HALVES
    }
    original = OriginalDtypes(
        typed(graph.input, HALVES), typed(graph.output, HALVES), constants
    )
    for subgraph in all_graphs(graph):
        _widen(subgraph, store)
    return result, original


def typed(values: Iterable[ValueInfoProto], kinds: Collection[int]) -> dict[str, int]:
    """Return the element type of the declared tensors of some types, by name."""
    return {
        value.name: value.type.tensor_type.elem_type
        for value in values
        if value.type.tensor_type.elem_type in kinds
    }


def _has_halves(graph: GraphProto) -> bool:
    """Return whether a tensor or a type in a graph, without bodies, has 16 bits."""
    kinds = {tensor.data_type for tensor in graph.initializer}
    kinds.update(typed(declared_values(graph), HALVES).values())
    kinds.update(_named_type(attribute) for attribute in attributes_of(graph.node))
    return not HALVES.isdisjoint(kinds)


def _named_type(attribute: AttributeProto) -> int:
    """Return the type that an attribute such as ``to`` names; otherwise 0 (UNDEFINED)."""
    return attribute.i if attribute.name in _TYPES else TensorProto.UNDEFINED


def _widen(graph: GraphProto, store: Store | None) -> None:
    """Convert the 16-bit tensors and types of a graph to float32 in place, without bodies.

    Args:
        store: takes large tensors; None keeps them in memory.
    """
    for tensor in graph.initializer:
        _widen_tensor(tensor, store)
    for value in declared_values(graph):
        retype(value.type, HALVES, TensorProto.FLOAT)
    for attribute in attributes_of(graph.node):
        _widen_attribute(attribute)


def _widen_attribute(attribute: AttributeProto) -> None:
    """Convert the 16-bit tensors, or the type, of an attribute to float32 in place."""
    if _named_type(attribute) in HALVES:
        attribute.i = TensorProto.FLOAT
    if attribute.type == AttributeProto.TENSOR:
        _widen_tensor(attribute.t, None)
        return
    for tensor in attribute.tensors:
        _widen_tensor(tensor, None)


def _widen_tensor(tensor: TensorProto, store: Store | None) -> None:
    """Convert a 16-bit tensor to float32 in place; leave other tensors unchanged.

    Args:
        store: takes a large tensor; None keeps it in memory.
    """
    if tensor.data_type not in HALVES:
        return
    narrow = values(tensor)
    # Widening doubles the size of a tensor, which a large model has no memory for.
    if store is not None and narrow.nbytes >= LEAST:
        tensor.CopyFrom(store.converted(tensor, narrow, np.float32))
        return
    # Exact: float32 holds every float16 and every bfloat16.
    wide = narrow.astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))


def retype(type_: TypeProto, kinds: Collection[int], new: int) -> None:
    """Replace some element types in a declared type or its elements, in place."""
    kind = type_.WhichOneof("value")
    if kind == "tensor_type" and type_.tensor_type.elem_type in kinds:
        type_.tensor_type.elem_type = new
    elif kind == "sequence_type":
        retype(type_.sequence_type.elem_type, kinds, new)
    elif kind == "optional_type":
        retype(type_.optional_type.elem_type, kinds, new)


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    """Rename tensors that nodes read and compute, also where bodies capture them.

    Args:
        graph: the graph, which is changed in place.
        names: new names by present name.
    """
    for node in graph.node:
        rename_entries(node.input, names)
        rename_entries(node.output, names)
    for body in bodies_of(graph.node):
        # A name that a body defines hides the outer tensor of this name.
        defined = defined_names(body)
        _rename(body, {old: new for old, new in names.items() if old not in defined})


def _fresh(name: str, taken: set[str]) -> str:
    """Return an unused name that begins with a given one, and add it to the names in use."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
