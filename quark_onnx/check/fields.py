"""Check the fields of a model once, when it is read.

Protobuf accepts any bytes of the right structure: nothing ensures that a tensor has as many values
as its shape, that an attribute has the type that its operator requires, or that libraries can
represent a version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    SparseTensorProto,
    TensorProto,
    defs,
    helper,
)
from onnx.external_data_helper import uses_external_data

from calibrators.onnx_runtime.tensors import tensor_size
from quark_onnx.check.calls import check_calls
from quark_onnx.common.errors import ModelError
from quark_onnx.graph.node import (
    LARGEST_VERSION,
    STANDARD_DOMAINS,
    described,
    normalized_domain,
    schema_of,
    subgraphs,
)

#: Greatest number of elements in a signed 64-bit integer.
_LARGEST_SIZE = 2**63 - 1
#: Field of the values of a type other than raw_data, and entries per value (onnx.proto,
#: TensorProto).
_FIELDS: dict[int, tuple[str, float]] = {
    TensorProto.FLOAT: ("float_data", 1.0),
    TensorProto.COMPLEX64: ("float_data", 2.0),
    TensorProto.DOUBLE: ("double_data", 1.0),
    TensorProto.COMPLEX128: ("double_data", 2.0),
    TensorProto.INT64: ("int64_data", 1.0),
    TensorProto.UINT32: ("uint64_data", 1.0),
    TensorProto.UINT64: ("uint64_data", 1.0),
    TensorProto.STRING: ("string_data", 1.0),
}
#: Field of all other types. Types of less than a byte are packed as in raw_data.
_OTHERS = "int32_data"
#: Field of the value of an attribute, by the type of the attribute; other types are lists.
_SINGLE = {
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
}

#: Greatest rank of a tensor: NumPy's limit, and more than any runtime takes.
_MOST_DIMENSIONS = 64
#: Attributes that count dimensions or name axes, by their name in all standard operators, with
#: their range. onnx's shape inference reads other memory at some values outside.
_RANGES = {
    "batch_dims": (0, _MOST_DIMENSIONS),
    **dict.fromkeys(
        ("axis", "axes", "perm", "batch_axis", "time_axis", "split_dim"),
        (-_MOST_DIMENSIONS, _MOST_DIMENSIONS),
    ),
}

_Single = defs.OpSchema.FormalParameterOption.Single
_Variadic = defs.OpSchema.FormalParameterOption.Variadic


def check_fields(model: ModelProto) -> None:
    """Check the constraints that protobuf leaves open.

    Raises:
        ModelError: a field has an invalid value; the message names the tensor, node or operator
            set.
    """
    check_text(model)
    versions = _versions(model.opset_import, "the model")
    _check_graph(model.graph, versions)
    for function in model.functions:
        imported = _versions(function.opset_import, f"function {function.name!r}")
        # A function imports its own versions; nested domains fall back to those of the model.
        _check_nodes(function.node, {**versions, **imported})
    check_calls(model)


def check_text(message: Message) -> None:
    """Check texts for UTF-8, as protobuf accepts invalid bytes.

    Raises:
        ModelError: a text in the message, such as a node's name, is not UTF-8.
    """
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            # A repeated field returns a container of its values.
            texts = [value] if isinstance(value, str | bytes) else value
            for text in texts:
                _require_text(text, field.name, message)
        elif field.type == field.TYPE_MESSAGE:
            messages = [value] if isinstance(value, Message) else value
            for inner in messages:
                check_text(inner)


def _require_text(text: str | bytes, field: str, message: Message) -> None:
    """Check that a text of a message's field is UTF-8."""
    # protobuf returns texts that it cannot decode as bytes
    if isinstance(text, bytes):
        kind = message.DESCRIPTOR.name.removesuffix("Proto")
        raise ModelError(f"the {field} of a {kind} is no UTF-8 text: {text[:80]!r}")


def check_tensor(tensor: TensorProto, where: str = "") -> None:
    """Check that a tensor has a known type, a possible shape, and as many values as the shape.

    Args:
        tensor: the tensor; values in another file are not checked.
        where: name of the tensor in messages.

    Raises:
        ModelError: a check failed.
    """
    where = where or f"tensor {tensor.name!r}"
    try:
        helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (KeyError, TypeError):
        raise ModelError(
            f"{where} has the unknown element type {tensor.data_type}",
        ) from None
    count = _size(tensor.dims, where)
    # io.read checks such a tensor again when the values are loaded.
    if uses_external_data(tensor):
        return
    if tensor.HasField("raw_data"):
        if tensor.data_type == TensorProto.STRING:
            raise ModelError(
                f"{where} holds strings as raw bytes; they belong into string_data",
            )
        needed = tensor_size(tensor)
        present = len(tensor.raw_data)
        unit = "bytes"
    else:
        field, factor = _FIELDS.get(tensor.data_type) or _packed(tensor.data_type)
        needed = math.ceil(count * factor)
        present = len(getattr(tensor, field))
        unit = f"entries in {field}"
    if needed != present:
        raise ModelError(
            f"{where} of shape {list(tensor.dims)} has {present:,} {unit}; it needs"
            f" {needed:,}",
        )


def _packed(data_type: int) -> tuple[str, float]:
    """Return the field of a type that ``_FIELDS`` lacks, and its entries per value."""
    # Values of 4 bits and fewer share an entry; types of a byte or more have an entry per value.
    # Eight values fill whole bytes in every type.
    bytes_of_eight = tensor_size(TensorProto(data_type=data_type, dims=[8]))
    return _OTHERS, min(bytes_of_eight / 8, 1.0)


def _size(dims: Iterable[int], where: str) -> int:
    """Return the number of elements of a shape.

    Raises:
        ModelError: a size is negative, or the number exceeds 64 bits.
    """
    sizes = list(dims)
    count = math.prod(sizes)
    # Two negative sizes have a positive product.
    if min(sizes, default=0) < 0 or not 0 <= count <= _LARGEST_SIZE:
        raise ModelError(f"{where} has the impossible shape {sizes}")
    return count


def _check_sparse(sparse: SparseTensorProto, where: str) -> None:
    """Check the parts of a sparse tensor, and that their shapes fit each other."""
    check_tensor(sparse.values, f"{where}: its values")
    check_tensor(sparse.indices, f"{where}: its indices")
    _size(sparse.dims, where)
    values = list(sparse.values.dims)
    indices = list(sparse.indices.dims)
    rank = len(sparse.dims)
    if len(values) != 1 or indices not in (values, [*values, rank]):
        raise ModelError(
            f"{where}: values of shape {values} and indices of shape {indices} make no"
            f" sparse tensor of rank {rank}",
        )


def _versions(imports: Iterable[OperatorSetIdProto], where: str) -> dict[str, int]:
    """Return versions of operator sets by domain, with one key for the standard domain.

    Raises:
        ModelError: a version is not positive or too large, or a domain has two versions.
    """
    versions = dict[str, int]()
    for entry in imports:
        domain = normalized_domain(entry.domain)
        if not 0 < entry.version <= LARGEST_VERSION:
            raise ModelError(
                f"{where} imports operator set {entry.domain!r} in the impossible"
                f" version {entry.version}",
            )
        if versions.setdefault(domain, entry.version) != entry.version:
            called = repr(domain) if domain else "'' and 'ai.onnx', which are one,"
            raise ModelError(
                f"{where} imports operator set {called} in two versions,"
                f" {versions[domain]} and {entry.version}; remove one of them",
            )
    return versions


def _check_graph(graph: GraphProto, versions: Mapping[str, int]) -> None:
    """Check the constants and nodes of a graph, also in bodies.

    Args:
        versions: versions of operator sets by domain, "" for the standard domain.
    """
    for tensor in graph.initializer:
        check_tensor(tensor)
    for sparse in graph.sparse_initializer:
        _check_sparse(sparse, f"sparse tensor {sparse.values.name!r}")
    _check_nodes(graph.node, versions)


def _check_nodes(nodes: Iterable[NodeProto], versions: Mapping[str, int]) -> None:
    """Check nodes and their bodies.

    Args:
        versions: versions of operator sets by domain, "" for the standard domain.

    Raises:
        ModelError: a check failed; the message names the node.
    """
    for node in nodes:
        where = described(node)
        if not node.op_type:
            raise ModelError(f"{where} names no operator")
        for attribute in node.attribute:
            _check_attribute(attribute, where)
        # A model without the standard operator set has no version; nodes of other domains need
        # none.
        schema = None
        if node.domain in STANDARD_DOMAINS:
            schema = schema_of(node.op_type, versions.get("", 1))
        if schema is not None:
            _check_call(node, schema, where)
        for body in subgraphs(node):
            _check_graph(body, versions)


def _check_attribute(attribute: AttributeProto, where: str) -> None:
    """Check the value of an attribute against the type, and check tensors in it.

    Raises:
        ModelError: the value is missing, or a tensor is not valid.
    """
    # An attribute of a function's node may refer to one of the function.
    # protobuf reads an unset message as an empty one, such as a tensor of type 0.
    if not (attribute.ref_attr_name or _has_value(attribute)):
        kind = AttributeProto.AttributeType.Name(attribute.type)
        raise ModelError(
            f"{where}: attribute {attribute.name!r} has the type {kind} and no such"
            " value",
        )
    called = f"{where}: the tensor of attribute {attribute.name!r}"
    for tensor in _tensors(attribute):
        check_tensor(tensor, called)
    if attribute.HasField("sparse_tensor"):
        _check_sparse(attribute.sparse_tensor, called)
    for sparse in attribute.sparse_tensors:
        _check_sparse(sparse, called)


def _has_value(attribute: AttributeProto) -> bool:
    """Return whether the field that the type of an attribute requires is set."""
    field = _SINGLE.get(attribute.type)
    return field is None or attribute.HasField(field)


def _tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    """Yield the dense tensors of an attribute."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors


def _check_call(node: NodeProto, schema: defs.OpSchema, where: str) -> None:
    """Check the inputs, outputs and attributes of a node against the operator.

    onnxruntime refuses invalid nodes, but rules and passes look at them before a session does.

    Raises:
        ModelError: an input, output or required attribute is missing; there are too many; or an
            attribute occurs twice or has another type.
    """
    _check_names(node.input, schema.inputs, f"{where} has", "inputs")
    _check_names(node.output, schema.outputs, f"{where} has", "outputs")
    given = set[str]()
    for attribute in node.attribute:
        definition = schema.attributes.get(attribute.name)
        if definition is None:
            continue  # onnxruntime reports unknown attributes
        # An enumeration of nanobind, which onnx's stubs declare without its members.
        wanted: Any = definition.type
        if attribute.type != wanted.value:
            present = AttributeProto.AttributeType.Name(attribute.type)
            raise ModelError(
                f"{where}: attribute {attribute.name!r} is of type {present}; it must be"
                f" {wanted.name}",
            )
        if attribute.name in given:
            raise ModelError(f"{where}: attribute {attribute.name!r} is there twice")
        given.add(attribute.name)
        _check_range(attribute, where)
    for name, definition in schema.attributes.items():
        if definition.required and name not in given:
            raise ModelError(f"{where} lacks the attribute {name!r}")


def _check_range(attribute: AttributeProto, where: str) -> None:
    """Check that an attribute of a standard operator names dimensions that a tensor may have."""
    if attribute.name not in _RANGES or attribute.ref_attr_name:
        return
    least, greatest = _RANGES[attribute.name]
    single = attribute.type == AttributeProto.INT
    for value in [attribute.i] if single else attribute.ints:
        if not least <= value <= greatest:
            raise ModelError(
                f"{where}: attribute {attribute.name!r} is {value}; it must be from"
                f" {least} to {greatest}",
            )


def _check_names(
    names: Sequence[str],
    formals: Sequence[defs.OpSchema.FormalParameter],
    where: str,
    what: str,
) -> None:
    """Check that the names of inputs or outputs fit the operator's parameters.

    Args:
        names: names of a node's inputs or outputs; an empty name is an omitted one.
        formals: the parameters in the operator's definition.
        where: beginning of messages: the node, and a verb.
        what: "inputs" or "outputs".

    Raises:
        ModelError: a required name is missing, or there are too many names.
    """
    # Optional parameters may be absent; variadic ones are the matter of ``check_variadic``.
    needed = {
        index: formal.name
        for index, formal in enumerate(formals)
        if formal.option == _Single
    }
    present = {index for index, name in enumerate(names) if name}
    if not present.issuperset(needed):
        given = f"{what} {list(names)}" if present else f"no {what}"
        raise ModelError(f"{where} {given}; it needs {list(needed.values())}")
    variadic = bool(formals) and formals[-1].option == _Variadic
    if len(names) > len(formals) and not variadic:
        raise ModelError(
            f"{where} {len(names)} {what}; it takes {len(formals)} at most",
        )
