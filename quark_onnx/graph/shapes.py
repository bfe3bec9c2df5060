"""Infer types and shapes of tensors, as far as possible.

Failing to infer is never an error, unless onnx crashes in the isolated process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
)

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.tensors import initializers, tensor_bytes
from quark_onnx.graph.native import infer_shapes
from quark_onnx.graph.node import (
    all_graphs,
    imported_domains,
    nested_nodes,
    normalized_domain,
)
from quark_onnx.graph.pool_windows import POOLS, without_those_in_padding
from quark_onnx.graph.traversal import copy_fields

logger = logging.getLogger(__name__)

#: Larger initializers (in bytes) do not determine shapes; omitting them makes large models cheap.
LARGE = 4096
#: Domain of trees and other classical models.
_CLASSICAL = "ai.onnx.ml"
#: Length of a vector beyond which onnx's data propagation is skipped.
_LONG = 1 << 20
#: Prefix of the names that onnx's inference gives to dimensions.
_INVENTED = "unk__"
#: Operators of com.microsoft and of AMD's domains, with standard operators of equal shape rules.
_TWINS = {
    "QuantizeLinear": "QuantizeLinear",
    "DequantizeLinear": "DequantizeLinear",
    "Gelu": "Identity",
    "QuickGelu": "Identity",
    "ExtendedQuantizeLinear": "QuantizeLinear",
    "ExtendedDequantizeLinear": "DequantizeLinear",
    "VitisQuantizeLinear": "QuantizeLinear",
    "VitisDequantizeLinear": "DequantizeLinear",
    "BFPQuantizeDequantize": "Identity",
    "MXQuantizeDequantize": "Identity",
    "BFPFixNeuron": "Identity",
    "MXFixNeuron": "Identity",
}
_DOMAINS = frozenset(
    {"com.microsoft", "com.amd.quark", "com.vai.quantize", "quark_onnx"},
)


def is_static(shape: Sequence[int | str | None] | None) -> bool:
    """Return whether every size of a shape is known.

    >>> is_static((1, 3)), is_static(("N", 3)), is_static(()), is_static(None)
    (True, False, True, False)
    """
    return shape is not None and all(isinstance(size, int) for size in shape)


def known_sizes(shape: Sequence[int | str | None] | None) -> tuple[int, ...] | None:
    """Return the sizes of a shape; None if the rank or a size is unknown.

    >>> known_sizes((1, 3)), known_sizes(("N", 3)), known_sizes(()), known_sizes(None)
    ((1, 3), None, (), None)
    """
    sizes = tuple(size for size in shape or () if isinstance(size, int))
    return sizes if is_static(shape) else None


def infer_values(
    skeleton: ModelProto,
    initializers: Iterable[TensorProto],
) -> dict[str, ValueInfoProto]:
    """Return types and shapes of the results of a model's nodes, by name.

    Args:
        skeleton: the model without its initializers, which is consumed.
        initializers: the missing initializers.
    """
    add_initializers(skeleton.graph, initializers)
    # onnx has no shape rules for operators of these domains.
    for node in skeleton.graph.node:
        if node.domain in _DOMAINS and node.op_type in _TWINS:
            node.domain = ""
            node.op_type = _TWINS[node.op_type]
    import_all(skeleton)
    open_negative_sizes(skeleton.graph)
    values = _inferred_values(skeleton)
    while _has_too_many_windows(skeleton, values):
        # Shapes that follow from the pool are outdated.
        del skeleton.graph.value_info[:]
        values = _inferred_values(skeleton)
    return values


def add_initializers(
    graph: GraphProto, initializers: Iterable[TensorProto]
) -> list[TensorProto]:
    """Add small initializers to a graph, and declare large ones as inputs, in place.

    Inference needs only type and shape of a weight, as an input declares them.

    Returns:
        The large initializers.
    """
    declared = {value.name for value in graph.input}
    large = list[TensorProto]()
    for tensor in initializers:
        if tensor_bytes(tensor) <= LARGE:
            graph.initializer.append(tensor)
            continue
        large.append(tensor)
        # An initializer that is an input as well is declared already.
        if tensor.name not in declared:
            value = helper.make_tensor_value_info(
                tensor.name, tensor.data_type, tensor.dims
            )
            graph.input.append(value)
    return large


def without_parameters(node: NodeProto) -> NodeProto:
    """Return a node of ai.onnx.ml without its long attributes; other nodes are returned uncopied.

    Trees have all of their parameters, often gigabytes, in lists. No shape depends on these.
    """
    if node.domain != _CLASSICAL:
        return node
    light = NodeProto(name=node.name, op_type=node.op_type, domain=node.domain)
    light.input.extend(node.input)
    light.output.extend(node.output)
    for attribute in node.attribute:
        long = max(len(attribute.floats), len(attribute.ints), len(attribute.strings))
        if max(long, tensor_bytes(attribute.t)) <= LARGE:
            light.attribute.append(attribute)
    return light


def without_all_parameters(model: ModelProto) -> ModelProto:
    """Return a copy of a model without the parameters of trees; the model if it has none."""
    if all(node.domain != _CLASSICAL for node in model.graph.node):
        return model
    light = ModelProto()
    copy_fields(model, light, but="graph")
    copy_fields(model.graph, light.graph, but="node")
    light.graph.node.extend(map(without_parameters, model.graph.node))
    return light


def import_all(model: ModelProto) -> None:
    """Import the domains of the nodes: inference fails on a missing domain."""
    imported = imported_domains(model.opset_import)
    used = {normalized_domain(node.domain) for node in nested_nodes(model.graph.node)}
    for domain in sorted(used - imported):
        # Inference has no operators of other domains, so that any version of them will do.
        version = 1 if domain else onnx.defs.onnx_opset_version()
        model.opset_import.append(helper.make_opsetid(domain, version))


def _inferred_values(model: ModelProto) -> dict[str, ValueInfoProto]:
    """Return inferred declarations by name; none if the inference fails."""
    result = inferred(model, propagate=True)
    if result is None:
        return {}
    values = (*result.graph.value_info, *result.graph.output)
    return {value.name: value for value in values}


def inferred(model: ModelProto, *, propagate: bool) -> ModelProto | None:
    """Return a copy of a model with inferred shapes; None if the inference fails.

    Args:
        model: the model, which is not changed.
        propagate: use onnx's data propagation, too, unless a vector is too long for it.
    """
    result: ModelProto | None = None
    # Plain inference first: its result tells whether data propagation is safe, and stays if that
    # fails.
    for with_values in (False, True) if propagate else (False,):
        if with_values and has_long_vector(declared_values((result or model).graph)):
            break
        try:
            result = infer_shapes(model, propagate=with_values)
        except RuntimeCrash:
            # The isolated process has crashed: each further inference would crash it again.
            raise
        except Exception as error:
            # onnx raises several unrelated types, and custom operators may raise anything.
            logger.debug(
                "shape inference (data_prop=%s) failed: %s", with_values, error
            )
    return result


def open_negative_sizes(graph: GraphProto) -> None:
    """Make negative dimensions unknown, also in bodies; exporters write -1.

    onnx 1.23 infers the shape of a Slice of such a tensor by ``std::clamp`` between 0 and -1, which
    ends the process.
    """
    for subgraph in all_graphs(graph):
        for value in declared_values(subgraph):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:
                    dim.Clear()


def declared_values(graph: GraphProto) -> Iterator[ValueInfoProto]:
    """Yield the declarations of a graph's tensors: inputs, inner tensors and outputs."""
    yield from graph.input
    yield from graph.value_info
    yield from graph.output


def untyped(names: Iterable[str]) -> list[ValueInfoProto]:
    """Return declarations of outputs by name alone; onnxruntime infers their types."""
    return [ValueInfoProto(name=name) for name in names]


def is_tensor(value: ValueInfoProto) -> bool:
    """Return whether a value is declared as a tensor, not as a sequence, optional or map."""
    return bool(value.type.WhichOneof("value") == "tensor_type")


def has_shape(value: ValueInfoProto) -> bool:
    """Return whether the rank of a tensor is declared."""
    return bool(value.type.tensor_type.HasField("shape"))


def open_invented_sizes(graph: GraphProto) -> None:
    """Make dimensions unknown whose names onnx's inference invented, in place.

    A name that an input or output declares stays. Of a tensor's shape the rank and the other
    dimensions stay. Invented names let onnxruntime 1.32 prove that two shapes are equal, and
    replace an Add and a LayerNormalization by SkipLayerNormalization, which takes six times as
    long on the CPU.

    >>> from onnx import helper
    >>> shapes = {"x": ["batch", 4], "y": ["unk__0", 4], "z": ["batch", 4]}
    >>> x, y, z = (helper.make_tensor_value_info(name, 1, shapes[name]) for name in shapes)
    >>> graph = helper.make_graph([], "g", [x], [], value_info=[y, z])
    >>> open_invented_sizes(graph)
    >>> [sizes_of(value) for value in graph.value_info]
    [(None, 4), ('batch', 4)]
    """
    declared = set[str]()
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            declared.add(dim.dim_param)
    for value in graph.value_info:
        if not value.type.HasField("tensor_type"):
            continue
        for dim in value.type.tensor_type.shape.dim:
            name = dim.dim_param
            if name.startswith(_INVENTED) and name not in declared:
                dim.Clear()


def has_long_vector(values: Iterable[ValueInfoProto]) -> bool:
    """Return whether data propagation would exhaust memory on a long vector.

    onnx 1.23 takes a vector for a shape, and allocates some 50 bytes per element, whatever its
    type.
    """
    for value in values:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 1 and dims[0].dim_value > _LONG:
            return True
    return False


def _has_too_many_windows(
    model: ModelProto,
    values: Mapping[str, ValueInfoProto],
) -> bool:
    """Return whether onnx counts too many windows of a pool; fix the first pool.

    Args:
        model: the model, in which the pool is changed in place.
        values: inferred declarations by name.
    """
    declared = {value.name: value for value in model.graph.input} | dict(values)
    for node in model.graph.node:
        if node.op_type not in POOLS or node.domain or node.input[0] not in declared:
            continue
        # One pool at a time: a changed pool changes the shapes that the next one reads.
        if without_those_in_padding(node, sizes_of(declared[node.input[0]])):
            return True
    return False


def sizes_of(value: ValueInfoProto) -> tuple[int | str | None, ...]:
    """Return the sizes of a tensor, a name or None if open; empty if unknown."""
    sizes = list[int | str | None]()
    for dim in value.type.tensor_type.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            sizes.append(dim.dim_value)
        else:
            sizes.append(dim.dim_param or None)
    return tuple(sizes)


#: Types that an IR version introduced.
_SINCE = {
    9: ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    10: ("INT4", "UINT4"),
    11: ("FLOAT4E2M1",),
    12: ("FLOAT8E8M0",),
    13: ("INT2", "UINT2"),
}
_IR_VERSIONS = {}
for _version, _names in _SINCE.items():
    for _name in _names:
        # The installed onnx may lack newer types.
        if _name in TensorProto.DataType.keys():  # noqa: SIM118  (protobuf's enum is no container)
            _IR_VERSIONS[TensorProto.DataType.Value(_name)] = _version


def ir_version_for(model: ModelProto) -> int:
    """Return the least IR version for a model's declared version and types of constants."""
    version = model.ir_version
    for tensor in initializers(model.graph):
        version = max(version, _IR_VERSIONS.get(tensor.data_type, 1))
    return version
