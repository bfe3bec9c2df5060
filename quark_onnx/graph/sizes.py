"""Sizes of the tensors that a model would compute, estimated before anything computes them.

A model of 600 bytes can ask for terabytes: ConstantOfShape, Expand, Tile, OneHot, Range, Resize and
Pad take the size of their result from a number. Runtimes allocate it as soon as they load the
model, since they fold constants.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from calibrators import CalibrationError
from calibrators.limits import raise_it, tensor_limit
from calibrators.onnx_runtime.session import initializers, open_session, tensor_bytes
from quark_onnx.errors import ModelError
from quark_onnx.graph.inlined import inlined
from quark_onnx.graph.node import STANDARD_DOMAINS, subgraphs
from quark_onnx.graph.ranks import check_ranks
from quark_onnx.graph.shapes import has_long_vector, import_all, open_negative_sizes

logger = logging.getLogger(__name__)

#: Bytes of a tensor for each weight of the model, quantized or not: what is large may ask for more
#: than the limit.
_PER_WEIGHT = 16
#: Bytes of constants that are computed here, since shapes may follow from them.
_SMALL = 1 << 16
#: Initializers of more bytes decide no shape.
_LARGE = 4096
#: How often shapes are inferred with the constants that earlier shapes have shown to be small,
#: without and with onnx's data propagation. That resolves a Reshape in each of a hundred layers at
#: once, and itself allocates 50 bytes for each element of a vector, so that it comes last.
_PLAIN, _PROPAGATED = 8, 4
_IR_VERSION = 10
#: Operators whose result is no constant although their inputs are.
_RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    },
)


def check_sizes(model: ModelProto) -> None:
    """Check that no tensor of a model is larger than the limit, as far as shapes and constants
    tell; and the ranks.

    Dimensions that only the data tells count as 1, so that a size is a lower bound.

    Raises:
        ModelError: a tensor is larger; the message names it, its size and the limit. Or a node does
            not take the rank of what it reads.
    """
    try:
        limit = max(
            tensor_limit(),
            _PER_WEIGHT
            * sum(math.prod(each.dims) for each in initializers(model.graph)),
        )
    except CalibrationError as error:
        raise ModelError(str(error)) from error
    _check_sparse(model, limit)
    light = _light(model)
    for propagate, rounds in ((False, _PLAIN), (True, _PROPAGATED)):
        for _ in range(rounds):
            inferred = _inferred(light, propagate=propagate)
            _check_graph(inferred.graph, limit)
            check_ranks(inferred.graph)
            if not _add_constants(light, light.graph, inferred.graph):
                break
            _hand_down(light.graph, {})


def _check_sparse(model: ModelProto, limit: int) -> None:
    """Runtimes make dense tensors of sparse ones as they load a model."""
    for graph in _graphs(model.graph):
        sparse = [(each.values.name, each) for each in graph.sparse_initializer]
        sparse += [
            (node.output[0], each)
            for node in graph.node
            for each in _attributes(node)
            if node.output
        ]
        for name, each in sparse:
            _require(
                f"sparse tensor {name!r}",
                each.values.data_type,
                list(each.dims),
                limit,
            )


def _attributes(node: NodeProto) -> Iterator[SparseTensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("sparse_tensor"):
            yield attribute.sparse_tensor
        yield from attribute.sparse_tensors


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for body in subgraphs(node):
            yield from _graphs(body)


def _light(model: ModelProto) -> ModelProto:
    """The model with open dimensions of 1, without declared shapes of what it computes, and without
    large weights.

    Functions are written out: inference tells the shapes of their results alone, not of what they
    compute inside.
    """
    light = ModelProto(
        ir_version=_IR_VERSION,
    )  # inference refuses old ones, and reads no field that is newer
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = "sizes"
    graph.node.extend(model.graph.node)
    fed = {value.name for value in model.graph.input}
    graph.input.extend(_closed(value) for value in model.graph.input)
    graph.output.extend(
        ValueInfoProto(name=value.name) for value in model.graph.output
    )  # their shapes may be lies
    for tensor in model.graph.initializer:
        if tensor_bytes(tensor) <= _LARGE:
            graph.initializer.append(tensor)
        elif tensor.name not in fed:
            graph.input.append(
                helper.make_tensor_value_info(
                    tensor.name,
                    tensor.data_type,
                    tensor.dims,
                ),
            )
    try:
        light = inlined(light)
    except (
        ModelError
    ) as error:  # raised again, and told, where the functions have to be written out
        logger.debug("sizes inside functions are not known: %s", error)
    open_negative_sizes(light.graph)
    _hand_down(light.graph, {})
    import_all(light)
    return light


def _hand_down(graph: GraphProto, around: Mapping[str, TensorProto]) -> None:
    """Give bodies the small constants of the graphs around them, from which shapes in them may
    follow.
    """
    own = {tensor.name for tensor in graph.initializer} | {
        value.name for value in graph.input
    }
    own |= {name for node in graph.node for name in node.output}
    read = {name for node in graph.node for name in node.input} - own
    graph.initializer.extend(around[name] for name in sorted(read) if name in around)
    known = {name: tensor for name, tensor in around.items() if name not in own}
    known |= {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor_bytes(tensor) <= _LARGE
    }
    for node in graph.node:
        for body in subgraphs(node):
            _hand_down(body, known)


def _closed(value: ValueInfoProto) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(value)
    if copy.type.WhichOneof("value") == "tensor_type":
        for dim in copy.type.tensor_type.shape.dim:
            if not (dim.HasField("dim_value") and dim.dim_value >= 0):
                dim.dim_value = 1
    return copy


def _inferred(light: ModelProto, *, propagate: bool) -> ModelProto:
    try:
        inferred = onnx.shape_inference.infer_shapes(light)
        values = (
            *inferred.graph.input,
            *inferred.graph.value_info,
            *inferred.graph.output,
        )
        if propagate and not has_long_vector(values):
            return onnx.shape_inference.infer_shapes(light, data_prop=True)
        return inferred
    except (
        Exception
    ) as error:  # several unrelated types; what cannot be inferred stays unknown
        logger.debug("sizes are not inferred: %s", error)
    return light


def _check_graph(graph: GraphProto, limit: int) -> None:
    makers = {name: node for node in graph.node for name in node.output}
    for value in (*graph.input, *graph.value_info, *graph.output):
        for kind in _tensor_types(value.type):
            node = makers.get(value.name)
            maker = (
                f" of node {node.name or node.output[0]!r} ({node.op_type})"
                if node
                else ""
            )
            sizes = [max(1, dim.dim_value) for dim in kind.shape.dim]
            if all(
                dim.dim_value != 0 or not dim.HasField("dim_value")
                for dim in kind.shape.dim
            ):
                _require(f"tensor {value.name!r}{maker}", kind.elem_type, sizes, limit)
    for node in graph.node:
        for body in subgraphs(node):
            _check_graph(body, limit)


def _tensor_types(kind: TypeProto) -> Iterable[TypeProto.Tensor]:
    return [kind.tensor_type] if kind.WhichOneof("value") == "tensor_type" else []


def _require(what: str, elem_type: int, sizes: list[int], limit: int) -> None:
    size = tensor_bytes(TensorProto(data_type=elem_type)) * math.prod(sizes)
    if size > limit:
        raise ModelError(
            f"{what} has the shape {sizes}, above the limit of {limit:,} bytes: {raise_it(size)}",
        )


def _add_constants(light: ModelProto, graph: GraphProto, inferred: GraphProto) -> bool:
    """Add the values of small constants that the shapes of other tensors follow from.

    Whether there are new ones.

    Args:
        light: the model.
        graph: its graph, or a body in it.
        inferred: the same graph with what is known of its tensors.
    """
    pairs = zip(graph.node, inferred.node, strict=True)
    bodies = [
        pair for nodes in pairs for pair in zip(*map(subgraphs, nodes), strict=True)
    ]
    inside = [_add_constants(light, body, known) for body, known in bodies]
    known = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    if not any(
        _is_open(known.get(name)) for node in graph.node for name in node.output if name
    ):
        return any(inside)
    shapes = {value.name: value for value in (*known.values(), *inferred.input)}
    constant = {tensor.name for tensor in graph.initializer} - {
        value.name for value in graph.input
    }
    nodes, found = list[NodeProto](), dict[str, NDArray[Any]]()
    for node in graph.node:
        value = _measured(node, shapes)
        if value is not None:
            found[node.output[0]] = value
            constant.add(node.output[0])
        elif _is_computable(node, constant, known):
            nodes.append(node)
            constant.update(name for name in node.output if name)
    found |= _values(light, graph, nodes, found)
    kept = [
        node for node in graph.node if not any(name in found for name in node.output)
    ]
    del graph.node[:]
    graph.node.extend(kept)
    graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in found.items()
    )
    return bool(found) or any(inside)


def _is_open(value: ValueInfoProto | None) -> bool:
    if value is None or not value.type.tensor_type.HasField("shape"):
        return value is None or value.type.WhichOneof("value") in ("tensor_type", None)
    return any(
        not dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim
    )


def _measured(
    node: NodeProto,
    shapes: Mapping[str, ValueInfoProto],
) -> NDArray[Any] | None:
    """The result of a Shape or Size of a tensor whose shape is known; None for any other node."""
    if (
        node.op_type not in ("Shape", "Size")
        or node.domain not in STANDARD_DOMAINS
        or not node.output
    ):
        return None
    value = shapes.get(node.input[0])
    if value is None or _is_open(value):
        return None
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    if node.op_type == "Size":
        return np.array(min(math.prod(sizes), 2**63 - 1), np.int64)
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return np.array(sizes[bounds.get("start", 0) : bounds.get("end")], np.int64)


def _is_computable(
    node: NodeProto,
    constant: set[str],
    known: dict[str, ValueInfoProto],
) -> bool:
    """Whether a node makes small tensors, by its inferred shapes, of constants alone."""
    if (
        node.domain not in STANDARD_DOMAINS
        or node.op_type in _RANDOM
        or subgraphs(node)
    ):
        return False
    if not all(not name or name in constant for name in node.input):
        return False
    for name in filter(None, node.output):
        value = known.get(name)
        if value is None or _is_open(value):
            return False
        kind = value.type.tensor_type
        sizes = [dim.dim_value for dim in kind.shape.dim]
        if (
            tensor_bytes(TensorProto(data_type=kind.elem_type)) * math.prod(sizes)
            > _SMALL
        ):
            return False
    return any(node.output)


def _values(
    light: ModelProto,
    around: GraphProto,
    nodes: list[NodeProto],
    found: dict[str, NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    """What nodes of a graph compute of its constants and of what was found already."""
    wanted = [name for node in nodes for name in node.output if name]
    if not wanted:
        return {}
    constants = [
        *around.initializer,
        *(numpy_helper.from_array(value, name) for name, value in found.items()),
    ]
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "constants",
        [],
        [ValueInfoProto(name=name) for name in wanted],
        [tensor for tensor in constants if tensor.name in read],
    )
    model = helper.make_model(
        graph,
        opset_imports=light.opset_import,
        ir_version=light.ir_version,
    )
    try:
        values = open_session(model, optimize=False).run(wanted, {})
    except Exception as error:
        # onnxruntime raises several unrelated types; what it cannot run decides no shape
        logger.debug("constants are not computed: %s", error)
        return {}
    return {
        name: value
        for name, value in zip(wanted, values, strict=True)
        if isinstance(value, np.ndarray)
    }
