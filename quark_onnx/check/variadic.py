"""Check the names of variadic inputs and outputs, as of Max and Split.

An empty name means an omitted optional input or output. A variadic one cannot be omitted, but no
checker tells, and onnxruntime (seen in 1.32) reads the missing tensor of a Max, Einsum, Split, Loop
or QLinearConcat and crashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import ModelProto, NodeProto

from quark_onnx.common.errors import ModelError
from quark_onnx.graph.node import (
    LARGEST_VERSION,
    described,
    nested_nodes,
    normalized_domain,
    schema_of,
)

_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
#: Index of the first variadic input of operators without an ONNX schema (onnxruntime's
#: ContribOperators.md).
_CONTRIBUTED = {
    ("com.microsoft", "QLinearConcat"): 2,
    ("com.microsoft", "IsAllFinite"): 0,
}

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
    scopes = [(model.graph.node, model.opset_import)]
    scopes += [(function.node, function.opset_import) for function in model.functions]
    for nodes, imports in scopes:
        opsets = {normalized_domain(entry.domain): entry.version for entry in imports}
        for node in nested_nodes(nodes):
            # Most nodes have all names; a look-up of the schema costs more than this check.
            if "" not in node.input and "" not in node.output:
                continue
            # Inputs of a function are all optional.
            if (normalized_domain(node.domain), node.op_type) not in functions:
                first_input, first_output = _first_variadic(node, opsets)
                _require_names(node, "input", node.input, first_input)
                _require_names(node, "output", node.output, first_output)


def _require_names(
    node: NodeProto,
    what: str,
    names: Sequence[str],
    first: int | None,
) -> None:
    """Raise ModelError if a variadic input or output has an empty name.

    Args:
        what: "input" or "output".
        names: the names of all inputs, or of all outputs.
        first: index of the first variadic one; None if there is none.
    """
    if first is None or "" not in names[first:]:
        return
    position = first + list(names[first:]).index("")
    raise ModelError(
        f"{described(node)}: the name of {what} {position} is empty. It is"
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
    version = opsets.get(domain, LARGEST_VERSION)
    schema = schema_of(node.op_type, max(0, min(version, LARGEST_VERSION)), domain)
    if schema is None:
        return _CONTRIBUTED.get((domain, node.op_type)), None
    return _last_if_variadic(schema.inputs), _last_if_variadic(schema.outputs)


def _last_if_variadic(
    parameters: Sequence[onnx.defs.OpSchema.FormalParameter],
) -> int | None:
    """Return the position of the last parameter if variadic, as only the last may be."""
    if not parameters or parameters[-1].option != _VARIADIC:
        return None
    return len(parameters) - 1
