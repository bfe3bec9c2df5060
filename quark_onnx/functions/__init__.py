"""The vendor's operators as ONNX functions of standard operators, so that a stock runtime runs
models that use them.
"""

from collections.abc import Iterable, Mapping

from onnx import FunctionProto, NodeProto

from quark_onnx.functions import bfp, extended, float4, mx
from quark_onnx.functions.body import DOMAIN

__all__ = ["DOMAIN", "DOMAINS", "definitions"]

#: Whose operators are written as functions.
DOMAINS = (DOMAIN, float4.DOMAIN)


def definitions(
    nodes: Iterable[NodeProto],
    opset: int,
    element_types: Mapping[str, int],
) -> list[FunctionProto]:
    """One function for each operator of these domains that a model uses.

    Args:
        nodes: the model's nodes, those of subgraphs included; only those of these domains count.
        opset: of the default domain, as the model imports it; 17 or later.
        element_types: the ``TensorProto.DataType`` of each zero point, by the name of its tensor.

    Raises:
        ModelError: a node cannot be computed, or the opset is too old or too new; the message says
            why.

    >>> from onnx import helper
    >>> nodes = [helper.make_node("MXQuantizeDequantize", ["x"], ["y"], domain=DOMAIN)]
    >>> [function.name for function in definitions(nodes, 17, {})]
    ['MXQuantizeDequantize']
    """
    nodes = list(nodes)
    own = [node for node in nodes if node.domain == DOMAIN]
    return [
        *bfp.definitions(own, opset),
        *mx.definitions(nodes, opset),
        *extended.definitions(own, opset, element_types),
        *float4.definitions(nodes, opset),
    ]
