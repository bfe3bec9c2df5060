"""Check the names of variadic inputs and outputs, as of Max and Split.

An empty name means an omitted optional input or output. A variadic one cannot be omitted, but no
checker tells, and onnxruntime (seen in 1.32) reads the missing tensor of a Max, Einsum, Split, Loop
or QLinearConcat and crashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import ModelProto, NodeProto, OperatorSetIdProto

from quark_onnx.common.errors import ModelError
from quark_onnx.graph.node import normalized_domain, subgraphs

_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
#: Index of the first variadic input of operators without an ONNX schema (onnxruntime's
#: ContribOperators.md).
_CONTRIBUTED = {
    ("com.microsoft", "QLinearConcat"): 2,
    ("com.microsoft", "IsAllFinite"): 0,
}
#: The largest version for onnx's look-up, which finds the newest schema up to it.
_NEWEST = 2**31 - 1

Operator = tuple[str, str]


def check_variadic(model: ModelProto) -> None:
    """Check that every variadic input and output of a model has a name.

    Raises:
        ModelError: a name is empty; the message names node, operator and position.
    """
    functions = {
        (normalized_domain(function.domain), function.name)
        for function in model.functions
    }
    _check(model.graph.node, model.opset_import, functions)
    for function in model.functions:
        _check(function.node, function.opset_import, functions)


def _check(
    nodes: Iterable[NodeProto],
    imports: Sequence[OperatorSetIdProto],
    functions: set[Operator],
) -> None:
    """Check nodes, also in subgraphs.

    Args:
        functions: domain and name of the model's functions, which have no variadic parameters.
    """
    opsets = {normalized_domain(entry.domain): entry.version for entry in imports}
    # A stack, as bodies may be nested deeply.
    todo = list(nodes)
    while todo:
        node = todo.pop()
        for graph in subgraphs(node):
            todo += graph.node
        # Most nodes have all names; a look-up of the schema costs more than this check.
        if "" not in node.input and "" not in node.output:
            continue
        if (normalized_domain(node.domain), node.op_type) in functions:
            continue  # inputs of a function are all optional
        first_input, first_output = _first_variadic(node, opsets)
        for what, names, first in (
            ("input", node.input, first_input),
            ("output", node.output, first_output),
        ):
            _require_names(node, what, names, first)


def _require_names(
    node: NodeProto,
    what: str,
    names: Sequence[str],
    first: int | None,
) -> None:
    """Check that no variadic input or output has an empty name.

    Args:
        node: the node, for messages.
        what: "input" or "output".
        names: the names of all inputs, or of all outputs.
        first: index of the first variadic one; None if there is none.

    Raises:
        ModelError: a variadic name is empty.
    """
    if first is None or "" not in names[first:]:
        return
    position = first + list(names[first:]).index("")
    name = node.name or next(filter(None, node.output), "")
    raise ModelError(
        f"node {name!r} ({node.op_type}): the name of {what} {position} is empty. It is"
        f" one of the variadic {what}s, which cannot be omitted; remove it from the"
        " node, or name the tensor",
    )


def _first_variadic(
    node: NodeProto,
    opsets: Mapping[str, int],
) -> tuple[int | None, int | None]:
    """Return the positions of the first variadic input and output, or None.

    Args:
        opsets: versions of operator sets by domain, "" for the standard domain.
    """
    domain = normalized_domain(node.domain)
    # A domain that is not imported is looked up in its newest version. Versions that no int32 holds
    # are an error of ``check_fields``, which runs later.
    version = max(0, min(opsets.get(domain, _NEWEST), _NEWEST))
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return _CONTRIBUTED.get((domain, node.op_type)), None
    return _last_if_variadic(schema.inputs), _last_if_variadic(schema.outputs)


def _last_if_variadic(
    parameters: Sequence[onnx.defs.OpSchema.FormalParameter],
) -> int | None:
    """Return the position of the last parameter if variadic, as only the last may be."""
    if not parameters or parameters[-1].option != _VARIADIC:
        return None
    return len(parameters) - 1
