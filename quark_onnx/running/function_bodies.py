"""Function bodies in standard operators for a vendor's operators.

With the bodies, onnxruntime runs every model with such operators.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto

from quark_onnx.common.errors import ModelError
from quark_onnx.dtypes import BODY_OPSET
from quark_onnx.functions import DOMAIN, DOMAINS, definitions
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import bodies, put_back
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, nested_nodes, subgraphs

#: Former domain of AMD's operators, and current names of the operators supported here
#: (amd-quark 0.13 registers both).
OLD_DOMAIN = "com.vai.quantize"
RENAMED = {
    "VitisQuantizeLinear": "ExtendedQuantizeLinear",
    "VitisDequantizeLinear": "ExtendedDequantizeLinear",
    "VitisInstanceNormalization": "ExtendedInstanceNormalization",
    "VitisLSTM": "ExtendedLSTM",
    "BFPFixNeuron": "BFPQuantizeDequantize",
    "MXFixNeuron": "MXQuantizeDequantize",
}
#: Types that QuantizeLinear and DequantizeLinear support from their first opset on.
_BYTES = frozenset({TensorProto.INT8, TensorProto.UINT8})
_PAIRS_OPSET, _PER_AXIS_OPSET = 10, 13


def define_functions(graph: Graph) -> None:
    """Add function bodies for the graph's vendor operators, subgraphs included.

    Args:
        graph: the graph; changed in place. Domains and functions are added for the operators that
            occur.

    Raises:
        ModelError: an operator has no function body at the graph's opset.
    """
    nodes = list[NodeProto]()
    types = {name: tensor.data_type for name, tensor in graph.initializers.items()}
    # Only nodes whose types or subgraphs matter are serialized.
    todo = [
        node.to_proto()
        for node in graph.nodes
        if node.domain in DOMAINS or node.has_subgraph
    ]
    while todo:
        node = todo.pop()
        if node.domain in DOMAINS:
            nodes.append(node)
        for body in subgraphs(node):
            # Bodies depend on the types of zero points, which are initializers.
            types |= {tensor.name: tensor.data_type for tensor in body.initializer}
            todo += body.node
    if nodes:
        graph.set_functions(definitions(nodes, graph.opset, types))
        for domain in sorted({node.domain for node in nodes}):
            graph.import_domain(domain)
        graph.require(graph.opset)


def with_bodies(model: ModelProto) -> ModelProto:
    """Return an equivalent model for onnxruntime.

    AMD's operators get their current names, and function bodies. A model that lacks no body is
    returned unchanged. Operators in the bodies of If, Loop and Scan are included.

    Raises:
        ModelError: an operator cannot be computed.
    """
    carried = {(function.domain, function.name) for function in model.functions}
    known = {*DOMAINS, OLD_DOMAIN}
    operators = {
        (node.domain, node.op_type)
        for node in nested_nodes(model.graph.node)
        if node.domain in known
    }
    # Bodies of the model itself are trusted.
    if operators <= carried:
        return model
    graph = Graph.of(model)
    # Definitions exist for the current names alone.
    _modernize(graph)
    try:
        define_functions(graph)
    except ModelError as error:
        raise ModelError(
            f"the vendor's operators of the model cannot be run: {error}",
        ) from error
    return graph.to_model()


def _modernize(graph: Graph) -> bool:
    """Rename AMD's operators to current or ONNX names, subgraphs included.

    Returns:
        Whether an operator was renamed.
    """
    changed = False
    # A list, because bypassed nodes are removed.
    for node in list(graph.nodes):
        if node.domain == OLD_DOMAIN and node.op_type in RENAMED:
            node.rename(RENAMED[node.op_type], DOMAIN)
            changed = True
        if node.domain != DOMAIN:
            continue
        # The sets have the Extended operators, too.
        if node.op_type in QUANTIZE | DEQUANTIZE:
            _standardize(graph, node)
            changed = True
        # No operator of the domain lacks inputs; a damaged file may have one.
        elif node.inputs and graph.shape(node.inputs[0]) == ():
            # a block of one number, without an axis in the function bodies
            graph.bypass(node)
            changed = True
    for body in list(bodies(graph)):
        inner = Graph(body.model)
        inner.reserve(graph.names)
        if _modernize(inner):
            put_back(graph, body, inner)
            changed = True
    return changed


def _standardize(graph: Graph, node: Node) -> None:
    """Replace an operator by ONNX's equivalent if the opset is too old for bodies.

    Args:
        node: an Extended QuantizeLinear or DequantizeLinear; changed in place.
    """
    # Before opset 13, QuantizeLinear has one scale per tensor.
    single = graph.shape(node.input(1)) in ((), (1,)) or graph.opset >= _PER_AXIS_OPSET
    if (
        _PAIRS_OPSET <= graph.opset < BODY_OPSET
        and single
        and graph.elem_type(node.input(2)) in _BYTES
    ):
        node.rename(node.op_type.removeprefix("Extended"), "")
        if graph.opset < _PER_AXIS_OPSET:
            node.drop_attribute("axis")
