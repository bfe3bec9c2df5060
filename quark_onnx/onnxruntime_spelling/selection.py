"""Selection of nodes by onnxruntime's exact node names and operator names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quark_onnx.common.errors import nearest
from quark_onnx.common.registry import RULES
from quark_onnx.graph import Graph
from quark_onnx.graph.node import inner_nodes, kinds_of
from quark_onnx.onnxruntime_spelling.request import Request, logger, names

#: Operators that onnxruntime quantizes by default: QDQRegistry and QLinearOpsRegistry of
#: ``onnxruntime.quantization.registry`` 1.32.
DEFAULT_TYPES = (
    "Add",
    "ArgMax",
    "AveragePool",
    "BatchNormalization",
    "Clip",
    "Concat",
    "Conv",
    "ConvTranspose",
    "CumSum",
    "EmbedLayerNormalization",
    "Flatten",
    "Gather",
    "GatherElements",
    "Gemm",
    "GlobalAveragePool",
    "InstanceNormalization",
    "LayerNormalization",
    "LeakyRelu",
    "MatMul",
    "MaxPool",
    "Mul",
    "Pad",
    "Relu",
    "Reshape",
    "Resize",
    "Sigmoid",
    "Slice",
    "Softmax",
    "Split",
    "Squeeze",
    "TopK",
    "Transpose",
    "Unsqueeze",
    "Where",
)

#: Those of them that have pairs only: they are not in QLinearOpsRegistry.
_PAIRED_ONLY = (
    "BatchNormalization",
    "ConvTranspose",
    "CumSum",
    "GatherElements",
    "InstanceNormalization",
    "LayerNormalization",
    "Slice",
    "TopK",
)

#: Operators with dynamic quantization of activations, or with lookups in a table of codes:
#: IntegerOpsRegistry of ``onnxruntime.quantization.registry`` 1.32, and Gemm, which onnxruntime
#: turns into MatMul and Add before it selects.
_DYNAMIC = (
    "Attention",
    "MatMul",
    "Gemm",
    "Conv",
    "Gather",
    "LSTM",
    "EmbedLayerNormalization",
)


def choose(request: Request) -> None:
    """Set the operators and nodes to quantize.

    Unknown names cause a warning, as in onnxruntime. Explicit names disable the exclusions for
    safety.

    Args:
        request: the request.
    """
    types = names(request.arguments, "op_types_to_quantize")
    nodes = names(request.arguments, "nodes_to_quantize")
    excluded = names(request.arguments, "nodes_to_exclude")
    if types:
        _choose_types(request, types)
    else:
        _choose_defaults(request)
    if nodes:
        existing = known_nodes(request.graph, nodes, "nodes_to_quantize")
        if existing:
            request.changes |= {"nodes": existing, "safe": False}
        else:
            # An empty list of nodes would mean all nodes: nothing is written as an exclusion of
            # all.
            request.changes["exclude"] = ("*",)
    if excluded:
        request.exclude += known_nodes(request.graph, excluded, "nodes_to_exclude")


def _choose_defaults(request: Request) -> None:
    types: tuple[str, ...] = DEFAULT_TYPES
    if request.dynamic:
        types = _DYNAMIC
    elif request.operators:
        types = tuple(name for name in DEFAULT_TYPES if name not in _PAIRED_ONLY)
    kinds = ruled_kinds(types)
    if kinds_of(every_node(request.graph)).isdisjoint(kinds):
        # A QConfig refuses types that a model lacks: nothing is written as an exclusion of all.
        request.changes["exclude"] = ("*",)
    else:
        # Sorted, as a set of strings has another order in each process.
        request.changes["op_types"] = tuple(sorted(kinds))


def _choose_types(request: Request, types: tuple[str, ...]) -> None:
    # Names in bodies are known, too, although bodies are quantized only with EnableSubgraph.
    nodes = every_node(request.graph)
    present = kinds_of(nodes)
    kinds = ruled_kinds(types)
    if request.dynamic and "MatMul" in kinds:
        kinds.add("Gemm")
    # A kind is an operator with its domain, as "com.microsoft::Gelu"; scripts give the operator
    # alone.
    with_rule = {kind.rpartition("::")[2] for kind in kinds}
    in_model = {node.op_type for node in nodes}
    without_rule = [
        op_type for op_type in types if op_type in in_model and op_type not in with_rule
    ]
    if without_rule:
        logger.warning(
            "op_types_to_quantize: there is no rule for %s, which stays float",
            ", ".join(without_rule),
        )
    if request.dynamic:
        kinds &= ruled_kinds(_DYNAMIC)
        # Types that are asked for, are in the model, and have no dynamic form.
        floats = sorted(ruled_kinds(types) & present - kinds)
        if floats:
            logger.warning(
                "quantize_dynamic has no products of codes for %s, which stay float",
                ", ".join(floats),
            )
    if not kinds & present:
        logger.warning(
            "op_types_to_quantize is %s, and the model has no such operator to quantize:"
            " nothing is quantized%s",
            list(types),
            nearest(types[0], present),
        )
        request.changes["exclude"] = ("*",)
        return
    request.changes |= {"op_types": tuple(sorted(kinds)), "safe": False}


def every_node(graph: Graph) -> list[Any]:
    """Return the nodes of a graph and of its bodies.

    Args:
        graph: the graph.
    """
    return [*graph.nodes, *inner_nodes(graph.nodes)]


def ruled_kinds(types: Sequence[str]) -> set[str]:
    """Return the kinds of operators that have a rule and a given name.

    A bare name counts for every domain.

    Args:
        types: names of operators.
    """
    # partition: a kind without a domain has no "::", and an empty third part.
    return {kind for kind in RULES if kind in types or kind.partition("::")[2] in types}


def known_nodes(graph: Graph, given: Sequence[str], argument: str) -> tuple[str, ...]:
    """Return the names of existing nodes, including bodies; warn of unknown names.

    Args:
        graph: the float model.
        given: names of nodes.
        argument: name of the argument in the warning.
    """
    present = {node.name for node in every_node(graph)}
    for name in given:
        if name not in present:
            logger.warning(
                "%s: no node of the model is called %r%s",
                argument,
                name,
                nearest(name, present),
            )
    return tuple(name for name in given if name in present)
