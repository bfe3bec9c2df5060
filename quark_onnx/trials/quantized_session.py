"""Sessions that measure a quantized graph before the model is written."""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.worker import Session
from quark_onnx.graph import Graph
from quark_onnx.scales.encoded_constants import EncodedConstants
from quark_onnx.writing.unsigned_codes import (
    faster_unsigned,
    in_unsigned_codes,
    use_unsigned_codes,
)


def open_equivalent(model: ModelProto) -> Session:
    """Open a session with the results of a quantized model, on the kernels that are fastest."""
    # Most models have none, and a search opens many: reading the graph takes longer than this.
    unsigned = in_unsigned_codes(Graph.of(model)) if _quantizes_to_int8(model) else None
    equivalent = model if unsigned is None else unsigned.to_model()
    session: Session = open_session(equivalent, what="the quantized model")
    return session


def _quantizes_to_int8(model: ModelProto) -> bool:
    """Return whether a QuantizeLinear of the main graph has a constant int8 zero point."""
    signed = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.INT8
    }
    return any(
        node.op_type == "QuantizeLinear" and not signed.isdisjoint(node.input[2:])
        for node in model.graph.node
    )


def make_fast(graph: Graph, encoded: EncodedConstants) -> None:
    """Change a quantized graph to an equivalent form that was measured to be faster.

    Int8 activations are computed in unsigned codes where these are faster.

    Args:
        graph: a graph with Q/DQ pairs; changed in place.
        encoded: codes of the graph, which it refers to afterwards.
    """
    if faster_unsigned():
        use_unsigned_codes(graph)
    encoded.share(graph)


def open_graph(graph: Graph, encoded: EncodedConstants) -> Session:
    """Open a session with the results of a quantized graph.

    Args:
        graph: the quantized graph.
        encoded: codes of the graph, which sessions on several graphs share.
    """
    fast = graph.copy()
    make_fast(fast, encoded)
    # The optimizer of onnxruntime would copy the weights of a large model.
    lean = graph.store is not None
    session: Session = open_session(
        fast.to_model(), lean=lean, optimize=not lean, what="the quantized model"
    )
    return session
