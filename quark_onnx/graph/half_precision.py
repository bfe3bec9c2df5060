"""Models that compute in float16 or bfloat16, as a float32 graph with the same names, and back
again at the interface.

Few kernels of a CPU runtime compute in 16 bits, and none calibrates in them; and the scale of a
Q/DQ pair has the type of the tensor. So a graph is planned, measured and quantized in float32. In
the end its inputs and outputs get their types back by a Cast each, and constants that stayed float
are stored in 16 bits again.
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
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import subgraphs
from quark_onnx.graph.store import LEAST, Store

HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
#: Attributes that name a type.
_TYPES = frozenset({"to", "dtype", "output_dtype", "stash_type"})


@dataclass
class OriginalDtypes:
    """What was in 16 bits: names of inputs, outputs and constants, with their
    ``TensorProto.DataType``.
    """

    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.constants)

    def forget_inputs(self, names: Iterable[str]) -> None:
        """Take inputs that became constants out of the interface."""
        for name in names:
            self.inputs.pop(name, None)

    def store_constants(self, graph: Graph) -> None:
        """Store in 16 bits again what is left of the constants, with a Cast behind them."""
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
            del graph.initializers[
                name
            ]  # the Cast takes its name: bodies may read it, too
            graph.add(
                "Cast",
                [graph.add_constant(f"{name}_narrow", array)],
                [name],
                to=int(TensorProto.FLOAT),
            )
        graph.drop_unused()

    def restore_interface(self, model: ModelProto) -> ModelProto:
        """A copy of a model whose inputs and outputs have their types back."""
        result = cast_interface(model, self.inputs, self.outputs, TensorProto.FLOAT)
        for tensor in result.graph.initializer:
            if (
                tensor.name in self.inputs
            ):  # the stored value of an input has the type of the input
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
    """A copy of a model whose inputs and outputs get these types, by a Cast each from and to the
    type inside.

    Args:
        inputs, outputs: the ``TensorProto.DataType`` of those that are to change.
        inside: in which the model computes them.
    """
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | {
        t.name for t in graph.initializer
    }
    suffix = TensorProto.DataType.Name(inside).lower()
    own = {name: _fresh(f"{name}_{suffix}", taken) for name in (*inputs, *outputs)}
    for node in graph.node:
        _rename(node, own)
    casts = [
        helper.make_node(
            "Cast",
            [name],
            [own[name]],
            _fresh(f"{name}_Cast", taken),
            to=int(inside),
        )
        for name in inputs
    ]
    nodes = [*casts, *graph.node]
    nodes += [
        helper.make_node(
            "Cast",
            [own[name]],
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
        tensor.name = (
            own.get(tensor.name, tensor.name) if tensor.name in outputs else tensor.name
        )
    for value in (*graph.input, *graph.output):
        kind = {**inputs, **outputs}.get(value.name)
        if kind is not None:
            value.type.tensor_type.elem_type = kind
    return result


def add_narrow(graph: Graph, name: str, array: NDArray[Any]) -> str:
    """Add a constant of 16 bits with a Cast to float32 behind it.

    The name of what the Cast computes.
    """
    narrow, wide = graph.add_constant(f"{name}_narrow", array), graph.fresh(name)
    graph.add("Cast", [narrow], [wide], to=int(TensorProto.FLOAT))
    return wide


def upcast_to_float32(
    model: ModelProto,
    store: Store | None = None,
) -> tuple[ModelProto, OriginalDtypes]:
    """``model`` with float32 in place of every 16-bit float, and what was changed.

    ``model`` itself if it has none.

    Args:
        store: takes large tensors, which are then twice as large.
    """
    if not _has_halves(model.graph):
        return model, OriginalDtypes()
    result, narrowing = ModelProto(), OriginalDtypes()
    result.CopyFrom(model)
    graph = result.graph
    for interface, names in (
        (graph.input, narrowing.inputs),
        (graph.output, narrowing.outputs),
    ):
        for value in interface:
            kind = value.type.tensor_type.elem_type
            if kind in HALVES:
                names[value.name] = kind
    narrowing.constants.update(
        {t.name: t.data_type for t in graph.initializer if t.data_type in HALVES},
    )
    _widen(graph, store)
    return result, narrowing


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
            if attribute.name in _TYPES and attribute.i in HALVES:
                attribute.i = TensorProto.FLOAT
            for tensor in (
                [attribute.t]
                if attribute.type == AttributeProto.TENSOR
                else attribute.tensors
            ):
                _widen_tensor(tensor, None)
        for inner in subgraphs(node):
            _widen(inner, store)


def _widen_tensor(tensor: TensorProto, store: Store | None) -> None:
    if tensor.data_type in HALVES:
        narrow = values(tensor)
        if store is not None and narrow.nbytes >= LEAST:
            tensor.CopyFrom(store.converted(tensor, narrow, np.float32))
        else:
            tensor.CopyFrom(
                numpy_helper.from_array(narrow.astype(np.float32), tensor.name),
            )


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
        own = {value.name for value in inner.input} | {
            tensor.name for tensor in inner.initializer
        }
        own |= {name for child in inner.node for name in child.output}
        for child in inner.node:
            _rename(child, {old: new for old, new in names.items() if old not in own})


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
