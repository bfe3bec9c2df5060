"""Decide from the graph alone that a model has nothing to quantize."""

from __future__ import annotations

from onnx import TensorProto

from quark_onnx.common.errors import ModelError
from quark_onnx.common.registry import RULES
from quark_onnx.config import QConfig
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import bodies
from quark_onnx.rules.passthrough import REARRANGING

#: Element types that may be quantized; 0 is an unknown one.
FLOATS = frozenset(
    {
        TensorProto.UNDEFINED,
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.DOUBLE,
    },
)


def has_nothing_to_quantize(graph: Graph, config: QConfig) -> bool:
    """Return whether no operator of a graph computes floats by a rule, whatever the passes do.

    Such models are trees, or operators on integers, texts and shapes. They are never run.

    Args:
        graph: the float graph.
        config: the settings; a target may prepare models in which nothing is quantized, and some
            settings quantize operators that move values.
    """
    if config.prepares_float or config.overrides or config.tensors or config.movers:
        return False
    return not _computes_floats(graph)


def require_something_to_quantize(graph: Graph, config: QConfig) -> None:
    """Raise an error if a graph has nothing to quantize.

    Raises:
        ModelError: there is nothing to quantize; the message names the operators.
    """
    if has_nothing_to_quantize(graph, config):
        kinds = sorted({node.kind for node in graph.nodes}) or ["it has none"]
        raise ModelError(
            "there is nothing to quantize: no operator computes floats by a rule"
            f" ({', '.join(kinds)}); use the float model",
        )


def _computes_floats(graph: Graph) -> bool:
    if any(_computes(graph, node) for node in graph.nodes):
        return True
    return any(_computes_floats(Graph(body.model)) for body in bodies(graph))


def _computes(graph: Graph, node: Node) -> bool:
    """Return whether a node has a rule, does not only rearrange values, and may have floats."""
    if node.kind not in RULES or node.kind in REARRANGING:
        return False
    return any(
        graph.elem_type(name) in FLOATS for name in (*node.operands, *node.results)
    )
