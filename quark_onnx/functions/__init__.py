"""Define the vendor's operators as ONNX functions of standard operators, for any runtime."""

from collections.abc import Iterable, Mapping

from onnx import FunctionProto, NodeProto

from quark_onnx.functions import bfp, extended, float4, mx
from quark_onnx.functions.body import DOMAIN

__all__ = ["DOMAIN", "DOMAINS", "definitions"]

#: Domains whose operators are written as functions.
DOMAINS = (DOMAIN, float4.DOMAIN)


def definitions(
    nodes: Iterable[NodeProto], opset: int, element_types: Mapping[str, int]
) -> list[FunctionProto]:
    """Return the functions for the operators of a model.

    Args:
        nodes: the model's nodes, including subgraphs; nodes of other domains are ignored.
        opset: version of the default domain, 17 or later.
        element_types: ``TensorProto.DataType`` of each zero point, by tensor name.

    Raises:
        ModelError: a node cannot be computed, or the opset is not supported.

    >>> from onnx import helper
    >>> nodes = [helper.make_node("MXQuantizeDequantize", ["x"], ["y"], domain=DOMAIN)]
    >>> [function.name for function in definitions(nodes, 17, {})]
    ['MXQuantizeDequantize']
    """
    # Iterated once per kind of function.
    nodes = list(nodes)
    vendor_nodes = [node for node in nodes if node.domain == DOMAIN]
    return [
        *bfp.definitions(vendor_nodes, opset),
        *mx.definitions(nodes, opset),
        *extended.definitions(vendor_nodes, opset, element_types),
        *float4.definitions(nodes, opset),
    ]
