"""Which nodes a call in onnxruntime's spelling means: by exact names, and by bare names of operators."""

from __future__ import annotations

from typing import Any

from quark_onnx.errors import nearest
from quark_onnx.graph.node import inner_nodes
from quark_onnx.onnxruntime_spelling.request import Request, logger, names
from quark_onnx.registry import RULES

#: Operators whose activations may have a scale that each run computes.
_DYNAMIC = frozenset({"MatMul", "Gemm", "Conv"})


def choose(request: Request) -> None:
    """Set which operators and nodes are quantized. A name that matches nothing is a warning, as onnxruntime takes it.

    What is asked for by name is done: safety is waived, unless the names leave nothing out.
    """
    types = names(request.arguments, "op_types_to_quantize")
    nodes = names(request.arguments, "nodes_to_quantize")
    excluded = names(request.arguments, "nodes_to_exclude")
    if types:
        _choose_types(request, types)
    if nodes:
        known = _known(request, nodes, "nodes_to_quantize")
        if known:
            request.changes |= {"nodes": known, "safe": False}
        else:
            request.changes["exclude"] = ("*",)
    if excluded:
        request.exclude += _known(request, excluded, "nodes_to_exclude")


def _choose_types(request: Request, types: tuple[str, ...]) -> None:
    nodes = [*request.graph.nodes, *inner_nodes(request.graph.nodes)]
    present = {node.kind for node in nodes}
    kinds = {kind for kind in RULES if kind in types or kind.partition("::")[2] in types}
    ruled = {kind for kind in present if kind in RULES}
    missing = [name for name in types if name not in {kind.partition("::")[2] or kind for kind in kinds}]
    carried = [name for name in missing if any(node.op_type == name for node in nodes)]
    if carried:
        logger.warning("op_types_to_quantize: there is no rule for %s, which stays float", ", ".join(carried))
    if not kinds & present:
        logger.warning(
            "op_types_to_quantize is %s, and the model has no such operator: nothing is quantized%s",
            list(types),
            nearest(types[0], present),
        )
        request.changes["exclude"] = ("*",)
        return
    if request.dynamic and (floats := sorted(kind for kind in kinds & present if kind not in _DYNAMIC)):
        logger.warning("quantize_dynamic has no products of codes for %s, which stay float", ", ".join(floats))
    if not ruled <= kinds:
        request.changes |= {"op_types": tuple(sorted(kinds)), "safe": False}


def _known(request: Request, given: tuple[str, ...], argument: str) -> tuple[str, ...]:
    nodes: list[Any] = [*request.graph.nodes, *inner_nodes(request.graph.nodes)]
    present = {node.name for node in nodes}
    for name in given:
        if name not in present:
            logger.warning("%s: no node of the model is called %r%s", argument, name, nearest(name, present))
    return tuple(name for name in given if name in present)
