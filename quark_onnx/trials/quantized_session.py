"""Sessions that measure a quantized graph before the model is written."""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.worker import Session
from quark_onnx.graph import Graph
from quark_onnx.plan import Plan
from quark_onnx.running.function_bodies import define_functions
from quark_onnx.scales.compute_qparams import Params
from quark_onnx.writing.insert import insert
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
    signed = set[str]()
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            signed.add(tensor.name)
    return any(
        node.op_type == "QuantizeLinear" and not signed.isdisjoint(node.input[2:])
        for node in model.graph.node
    )


def graph_to_measure(graph: Graph, plan: Plan, params: Params) -> Graph:
    """Return a graph with pairs that has the results of the quantized model.

    Int8 activations are computed in unsigned codes where these are faster.

    Args:
        graph: the float graph.
        plan: the decisions about its tensors.
        params: scales of every planned tensor, biases included.
    """
    result = insert(graph, plan, params)
    define_functions(result)
    if faster_unsigned():
        use_unsigned_codes(result)
    params.encoded.share(result)
    return result


def open_to_measure(graph: Graph, plan: Plan, params: Params) -> Session:
    """Open a session with the results of the quantized model, as ``graph_to_measure``."""
    result = graph_to_measure(graph, plan, params)
    # The optimizer of onnxruntime would copy the weights of a large model.
    lean = result.store is not None
    session: Session = open_session(result.to_model(), lean=lean, optimize=not lean)
    return session
