"""Convert float16 and bfloat16 models to float32 and back at the interface.

Few kernels of a CPU runtime compute in 16 bits, and no calibration runs in them; and the scale of a
Q/DQ pair has the type of the tensor. So a graph is planned, measured and quantized in float32. At
the end a Cast restores the type of each input and output, and constants that stayed float are
stored in 16 bits again.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    helper,
    numpy_helper,
)

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.containers import names_of, without
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import defined_names, subgraphs
from quark_onnx.graph.store import LEAST, Store

HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
#: Attributes whose value is a type.
_TYPES = frozenset({"to", "dtype", "output_dtype", "stash_type"})


@dataclass
class OriginalDtypes:
    """The original types of 16-bit inputs, outputs and constants, by name.

    Types are ``TensorProto.DataType``.
    """

    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.constants)

    def forget_inputs(self, names: Iterable[str]) -> None:
        """Forget inputs after their change to constants."""
        for name in names:
            self.inputs.pop(name, None)

    def store_constants(self, graph: Graph) -> None:
        """Store remaining constants in 16 bits again, each followed by a Cast."""
        for name, kind in self.constants.items():
            tensor = graph.initializers.get(name)
            if (
                tensor is None
                or tensor.data_type != TensorProto.FLOAT
                or not graph.consumers(name)
            ):
                continue
            if graph.is_output(name) or graph.is_input(name):
                continue
            array = values(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
            # The Cast takes over the name: bodies may capture it, too.
            del graph.initializers[name]
            graph.add(
                "Cast",
                [graph.add_constant(f"{name}_narrow", array)],
                [name],
                to=int(TensorProto.FLOAT),
            )
        graph.drop_unused()

    def restore_interface(self, model: ModelProto) -> ModelProto:
        """Return a copy of a model with the original types of inputs and outputs."""
        result = cast_interface(model, self.inputs, self.outputs, TensorProto.FLOAT)
        for tensor in result.graph.initializer:
            # The default value of an input has the type of the input.
            if tensor.name in self.inputs:
                dtype = helper.tensor_dtype_to_np_dtype(self.inputs[tensor.name])
                tensor.CopyFrom(
                    numpy_helper.from_array(values(tensor).astype(dtype), tensor.name),
                )
        return result


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
    taken = set(names_of(graph.initializer))
    for node in graph.node:
        taken.update(node.input, node.output)
    suffix = TensorProto.DataType.Name(inside).lower()
    inner_names = {
        name: _fresh(f"{name}_{suffix}", taken) for name in (*inputs, *outputs)
    }
    for node in graph.node:
        _rename(node, inner_names)
    casts = [
        helper.make_node(
            "Cast",
            [name],
            [inner_names[name]],
            _fresh(f"{name}_Cast", taken),
            to=int(inside),
        )
        for name in inputs
    ]
    nodes = [*casts, *graph.node]
    nodes += [
        helper.make_node(
            "Cast",
            [inner_names[name]],
            [name],
            _fresh(f"{name}_Cast", taken),
            to=kind,
        )
        for name, kind in outputs.items()
        if name not in inputs
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    for tensor in graph.initializer:
        if tensor.name in outputs:
            tensor.name = inner_names.get(tensor.name, tensor.name)
    for value in (*graph.input, *graph.output):
        kind = {**inputs, **outputs}.get(value.name)
        if kind is not None:
            value.type.tensor_type.elem_type = kind
    return result


def add_narrow(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """Add a 16-bit constant followed by a Cast to float32; return the name of its result."""
    narrow = graph.add_constant(f"{name}_narrow", array)
    wide = graph.fresh(name)
    graph.add(
        "Cast",
        [narrow],
        [wide],
        to=int(TensorProto.FLOAT),
    )
    return wide


def upcast_to_float32(
    model: ModelProto,
    store: Store | None = None,
) -> tuple[ModelProto, OriginalDtypes]:
    """Return ``model`` in float32 instead of 16-bit floats, and the original types.

    A model without 16-bit floats is returned uncopied.

    Args:
        model: the model, which is not changed.
        store: takes large tensors, whose size doubles.
    """
    if not _has_halves(model.graph):
        return model, OriginalDtypes()
    result = ModelProto()
    original = OriginalDtypes()
    result.CopyFrom(model)
    graph = result.graph
    for interface, names in (
        (graph.input, original.inputs),
        (graph.output, original.outputs),
    ):
        for value in interface:
            kind = value.type.tensor_type.elem_type
            if kind in HALVES:
                names[value.name] = kind
    original.constants.update(
        {t.name: t.data_type for t in graph.initializer if t.data_type in HALVES},
    )
    _widen(graph, store)
    return result, original


def _has_halves(graph: GraphProto) -> bool:
    values = (*graph.input, *graph.output, *graph.value_info)
    tensors = any(tensor.data_type in HALVES for tensor in graph.initializer)
    return (
        tensors
        or any(value.type.tensor_type.elem_type in HALVES for value in values)
        or _casts(graph.node)
    )


def _casts(nodes: Iterable[NodeProto]) -> bool:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in _TYPES and attribute.i in HALVES:
                return True
        if any(map(_has_halves, subgraphs(node))):
            return True
    return False


def _widen(graph: GraphProto, store: Store | None) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor, store)
    for value in (*graph.input, *graph.output, *graph.value_info):
        _widen_type(value.type)
    for node in graph.node:
        for attribute in node.attribute:
            _widen_attribute(attribute)
        for inner in subgraphs(node):
            _widen(inner, store)


def _widen_attribute(attribute: AttributeProto) -> None:
    if attribute.name in _TYPES and attribute.i in HALVES:
        attribute.i = TensorProto.FLOAT
    if attribute.type == AttributeProto.TENSOR:
        _widen_tensor(attribute.t, None)
        return
    for tensor in attribute.tensors:
        _widen_tensor(tensor, None)


def _widen_tensor(tensor: TensorProto, store: Store | None) -> None:
    if tensor.data_type not in HALVES:
        return
    narrow = values(tensor)
    if store is not None and narrow.nbytes >= LEAST:
        tensor.CopyFrom(store.converted(tensor, narrow, np.float32))
        return
    wide = narrow.astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))


def _widen_type(type_: TypeProto) -> None:
    kind = type_.WhichOneof("value")
    if kind == "tensor_type" and type_.tensor_type.elem_type in HALVES:
        type_.tensor_type.elem_type = TensorProto.FLOAT
    elif kind == "sequence_type":
        _widen_type(type_.sequence_type.elem_type)
    elif kind == "optional_type":
        _widen_type(type_.optional_type.elem_type)


def _rename(node: NodeProto, names: dict[str, str]) -> None:
    for place, name in enumerate(node.input):
        node.input[place] = names.get(name, name)
    for place, name in enumerate(node.output):
        node.output[place] = names.get(name, name)
    for inner in subgraphs(node):
        defined = defined_names(inner)
        captured = without(names, defined)
        for child in inner.node:
            _rename(child, captured)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
