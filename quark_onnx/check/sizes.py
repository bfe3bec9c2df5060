"""Estimate the sizes of a model's tensors before a run.

A model of 600 bytes can request terabytes: ConstantOfShape, Expand, Tile, OneHot, Range, Resize and
Pad read the size of their result from a number. Runtimes allocate it as soon as they load the
model, since they fold constants. Sizes that depend on an open dimension of an input are known only
with a sample: K / H, for example, is greatest at H = 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from calibrators import CalibrationError
from calibrators.limits import raise_it, tensor_limit
from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.tensors import initializers, tensor_bytes
from quark_onnx.check.inlined import InliningError, inlined
from quark_onnx.check.ranks import check_ranks
from quark_onnx.common.errors import ModelError
from quark_onnx.graph.node import (
    STANDARD_DOMAINS,
    all_graphs,
    bodies_of,
    defined_names,
    makers_of,
    read_by,
    results_of,
    subgraphs,
)
from quark_onnx.graph.random_operators import RANDOM
from quark_onnx.graph.shapes import (
    LARGE,
    add_initializers,
    declared_values,
    has_shape,
    import_all,
    inferred,
    is_tensor,
    open_negative_sizes,
    untyped,
    without_parameters,
)

logger = logging.getLogger(__name__)

#: Bytes of a tensor per weight of the model, quantized or not: large models may exceed the limit.
_PER_WEIGHT = 16
#: Most bytes of constants that are computed here, since shapes may depend on them.
_SMALL = 1 << 16
#: Rounds of shape inference with the small constants of earlier rounds, without and with onnx's
#: data propagation. Propagation resolves a Reshape in each of a hundred layers at once, but
#: allocates 50 bytes per element of a vector, so that it comes last.
_PLAIN = 8
_PROPAGATED = 4
_IR_VERSION = 10
#: Declaration of a tensor of which neither the type nor the shape is known.
_UNKNOWN = ValueInfoProto()


def check_sizes(
    model: ModelProto,
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Check that no tensor of a model exceeds the size limit, as far as known; check ranks.

    Dimensions that depend on data, or on an open dimension of an input, count as 1, so that a size
    is a lower bound.

    Args:
        model: the model, which is not changed.
        shapes: shapes of inputs by name, as a sample has them; others are those of the model.

    Raises:
        ModelError: a tensor is too large; the message names it, its size and the limit. Or a rank
            is wrong.
    """
    try:
        weights = sum(math.prod(tensor.dims) for tensor in initializers(model.graph))
        limit = max(tensor_limit(), _PER_WEIGHT * weights)
    except CalibrationError as error:
        raise ModelError(str(error)) from error
    _check_sparse(model, limit)
    light = _light(model, shapes)
    for propagate, rounds in ((False, _PLAIN), (True, _PROPAGATED)):
        for _ in range(rounds):
            # Sizes are checked before ``_add_constants`` lets onnxruntime allocate any of the
            # tensors.
            shaped = inferred(light, propagate=propagate) or light
            for graph in all_graphs(shaped.graph):
                _check_graph(graph, limit)
            check_ranks(shaped.graph)
            if not _add_constants(light, light.graph, shaped.graph):
                break
            # Shapes inside bodies may depend on the constants of this round.
            _hand_down(light.graph, {})


def _check_sparse(model: ModelProto, limit: int) -> None:
    """Check the dense sizes of sparse tensors, which runtimes expand at loading."""
    for graph in all_graphs(model.graph):
        for tensor in graph.sparse_initializer:
            _require_sparse(tensor.values.name, tensor, limit)
        for node in graph.node:
            for tensor in _sparse_attributes(node):
                # A node without a result computes nothing.
                if node.output:
                    _require_sparse(node.output[0], tensor, limit)


def _require_sparse(name: str, tensor: SparseTensorProto, limit: int) -> None:
    """Check the size of a sparse tensor in its dense form."""
    what = f"sparse tensor {name!r}"
    _require(what, tensor.values.data_type, list(tensor.dims), limit)


def _sparse_attributes(node: NodeProto) -> Iterator[SparseTensorProto]:
    """Yield the sparse tensors among a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("sparse_tensor"):
            yield attribute.sparse_tensor
        yield from attribute.sparse_tensors


def _light(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """Return the model with shapes of a sample, without computed shapes and large weights.

    Functions are inlined: inference tells the shapes of their results alone, not of their inner
    tensors. The nodes and small initializers are copied.
    """
    # Inference refuses old IR versions, and reads no field of newer ones.
    light = ModelProto(ir_version=_IR_VERSION)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = "sizes"
    graph.node.extend(map(without_parameters, model.graph.node))
    graph.input.extend(_shaped(value, shapes) for value in model.graph.input)
    # Declared shapes of outputs may be wrong.
    graph.output.extend(untyped([value.name for value in model.graph.output]))
    # The values of large weights would be copied in each round.
    add_initializers(graph, model.graph.initializer)
    try:
        light = inlined(light)
    except InliningError as error:
        # Raised again, and reported, where the functions have to be inlined.
        logger.debug("sizes inside functions are not known: %s", error)
    open_negative_sizes(light.graph)
    _hand_down(light.graph, {})
    import_all(light)
    return light


def _hand_down(graph: GraphProto, around: Mapping[str, TensorProto]) -> None:
    """Copy small constants of outer graphs into bodies, where shapes may depend on them.

    Args:
        graph: the graph; its bodies, and the graph itself, get the constants that they read.
        around: small constants of outer graphs by name; none for the main graph.
    """
    defined = defined_names(graph)
    missing = sorted(read_by(graph.node) - defined)
    graph.initializer.extend(around[name] for name in missing if name in around)
    # A tensor that the graph defines hides an outer one of the same name.
    visible = {name: tensor for name, tensor in around.items() if name not in defined}
    for tensor in graph.initializer:
        if tensor_bytes(tensor) <= LARGE:
            visible[tensor.name] = tensor
    for body in bodies_of(graph.node):
        _hand_down(body, visible)


def _shaped(
    value: ValueInfoProto, shapes: Mapping[str, Sequence[int]]
) -> ValueInfoProto:
    """Return the declaration of an input with the given shape, if any."""
    if value.name not in shapes or not is_tensor(value):
        return value
    elem_type = value.type.tensor_type.elem_type
    return helper.make_tensor_value_info(value.name, elem_type, shapes[value.name])


def _check_graph(graph: GraphProto, limit: int) -> None:
    """Check the inferred sizes of a graph's tensors, without bodies.

    Raises:
        ModelError: a tensor has more bytes than ``limit``.
    """
    producers = makers_of(graph.node)
    for value in filter(is_tensor, declared_values(graph)):
        kind = value.type.tensor_type
        dims = kind.shape.dim
        # A tensor with an empty axis takes no memory.
        if not any(dim.HasField("dim_value") and dim.dim_value == 0 for dim in dims):
            # An unset dim_value reads as 0; a dimension of unknown size counts as 1.
            sizes = [max(1, dim.dim_value) for dim in dims]
            what = _described(value.name, producers.get(value.name))
            _require(what, kind.elem_type, sizes, limit)


def _described(tensor: str, producer: NodeProto | None) -> str:
    """Return a description of a tensor, with the node that computes it, if any."""
    if producer is None:
        return f"tensor {tensor!r}"
    name = producer.name or producer.output[0]
    return f"tensor {tensor!r} of node {name!r} ({producer.op_type})"


def _require(what: str, elem_type: int, sizes: list[int], limit: int) -> None:
    """Raise ModelError for a tensor of more than ``limit`` bytes; unknown sizes are 1."""
    size = tensor_bytes(TensorProto(data_type=elem_type)) * math.prod(sizes)
    if size > limit:
        raise ModelError(
            f"{what} has the shape {sizes}, above the limit of {limit:,} bytes: {raise_it(size)}",
        )


def _add_constants(light: ModelProto, graph: GraphProto, inferred: GraphProto) -> bool:
    """Add the values of small constants that determine shapes; return whether there are new ones.

    Args:
        graph: the graph of the model, or a body in it.
        inferred: the same graph with inferred shapes.
    """
    added = False
    # Inference keeps the nodes and their order, so that both can be walked in parallel.
    for node, inferred_node in zip(graph.node, inferred.node, strict=True):
        bodies = zip(subgraphs(node), subgraphs(inferred_node), strict=True)
        for body, inferred_body in bodies:
            added |= _add_constants(light, body, inferred_body)
    results = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    if not _has_open_result(graph, results):
        return added
    shapes = {value.name: value for value in (*results.values(), *inferred.input)}
    computed = _computed_constants(light, graph, results, shapes)
    # Nodes with known values become initializers, which the next round of inference can use.
    open_nodes = [
        node for node in graph.node if computed.keys().isdisjoint(node.output)
    ]
    del graph.node[:]
    graph.node.extend(open_nodes)
    for name, value in computed.items():
        graph.initializer.append(numpy_helper.from_array(value, name))
    return bool(computed) or added


def _computed_constants(
    light: ModelProto,
    graph: GraphProto,
    declared: dict[str, ValueInfoProto],
    shapes: Mapping[str, ValueInfoProto],
) -> dict[str, NDArray[Any]]:
    """Return the values of the nodes of a graph that follow from constants and shapes.

    Args:
        graph: the graph of the model, or a body in it.
        declared: inferred shapes of the nodes' results.
        shapes: the same, and those of the inputs.
    """
    constant = {tensor.name for tensor in graph.initializer}
    # A caller may override an initializer that is an input.
    constant -= {value.name for value in graph.input}
    nodes = list[NodeProto]()
    computed = dict[str, NDArray[Any]]()
    for node in graph.node:
        value = _measured(node, shapes)
        if value is not None:
            computed[node.output[0]] = value
            constant.add(node.output[0])
        # Nodes are in topological order: a computable result is a constant for later nodes.
        elif _is_computable(node, constant, declared):
            nodes.append(node)
            constant.update(results_of([node]))
    return computed | _values(light, graph, nodes, computed)


def _has_open_result(graph: GraphProto, declared: Mapping[str, ValueInfoProto]) -> bool:
    """Return whether a node of a graph, without bodies, has a result of unknown shape."""
    results = results_of(graph.node)
    return any(_is_open(declared.get(name, _UNKNOWN)) for name in results)


def _is_open(value: ValueInfoProto) -> bool:
    """Return whether a tensor's shape is not known; sequences and maps have none."""
    if has_shape(value):
        dims = value.type.tensor_type.shape.dim
        return not all(dim.HasField("dim_value") for dim in dims)
    return value.type.WhichOneof("value") in ("tensor_type", None)


def _measured(
    node: NodeProto, shapes: Mapping[str, ValueInfoProto]
) -> NDArray[Any] | None:
    """Return the result of a Shape or Size of a known shape; otherwise None.

    An int64 vector for a Shape, an int64 scalar for a Size.
    """
    if node.op_type not in ("Shape", "Size") or node.domain not in STANDARD_DOMAINS:
        return None
    if not node.output or _is_open(shapes.get(node.input[0], _UNKNOWN)):
        return None
    value = shapes[node.input[0]]
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    if node.op_type == "Size":
        # dimensions may have a product that int64 does not hold
        return np.array(min(math.prod(sizes), 2**63 - 1), np.int64)
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    # Slices clamp positions and count negative ones from the end, as Shape does from opset 15 on.
    return np.array(sizes[bounds.get("start", 0) : bounds.get("end")], np.int64)


def _is_computable(
    node: NodeProto, constant: set[str], declared: dict[str, ValueInfoProto]
) -> bool:
    """Return whether a node computes small tensors from constants alone.

    Args:
        constant: names of tensors with known values.
        declared: inferred declarations of results by name; results of unknown shape are not small.
    """
    if node.domain not in STANDARD_DOMAINS or node.op_type in RANDOM:
        return False
    if subgraphs(node) or not constant.issuperset(filter(None, node.input)):
        return False
    results = [declared.get(name, _UNKNOWN) for name in results_of([node])]
    return bool(results) and all(_is_small(value) for value in results)


def _is_small(value: ValueInfoProto) -> bool:
    """Return whether a tensor is known to have few bytes."""
    if _is_open(value):
        return False
    kind = value.type.tensor_type
    count = math.prod(dim.dim_value for dim in kind.shape.dim)
    return tensor_bytes(TensorProto(data_type=kind.elem_type)) * count <= _SMALL


def _values(
    light: ModelProto,
    around: GraphProto,
    nodes: list[NodeProto],
    measured: dict[str, NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    """Compute nodes of a graph from its constants, and from the values of other nodes."""
    wanted = results_of(nodes)
    if not wanted:
        return {}
    constants = list(around.initializer)
    for name, value in measured.items():
        constants.append(numpy_helper.from_array(value, name))
    # The session would copy constants that no node reads, too.
    read = read_by(nodes)
    constants = [tensor for tensor in constants if tensor.name in read]
    graph = helper.make_graph(nodes, "constants", [], untyped(wanted), constants)
    model = helper.make_model(
        graph, opset_imports=light.opset_import, ir_version=light.ir_version
    )
    try:
        values = open_session(model, optimize=False).run(wanted, {})
    except Exception as error:
        # onnxruntime raises several unrelated types. Shapes then stay unknown.
        logger.debug("constants are not computed: %s", error)
        return {}
    # A sequence is returned as a list.
    return {
        name: value
        for name, value in zip(wanted, values, strict=True)
        if isinstance(value, np.ndarray)
    }
