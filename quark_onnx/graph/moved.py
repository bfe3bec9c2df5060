"""Write Q/DQ pairs on moved tensors, where onnxruntime would insert invalid ones.

onnxruntime propagates the scale of a DequantizeLinear through the operators of `PROPAGATED`: it
inserts a Q/DQ pair on every edge after them. In 1.32 two of these insertions are wrong:

- An edge into a body of If, Loop or Scan is numbered as an implicit input. onnxruntime indexes the
  list of explicit inputs with that number (``InsertQDQPairs`` in qdq_propagation.cc), and the
  process aborts.
- From opset 21 on, an inserted QuantizeLinear states its type in ``output_dtype``. Where int8
  becomes uint8 for an x86 processor (``QDQS8ToU8Transformer``), the attribute stays int8, and the
  model does not load.

The propagation stops at a QuantizeLinear, so such a tensor gets its pair in the model, as
onnxruntime's own quantizer places it.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from quark_onnx.functions import float4
from quark_onnx.graph.codes import code_type
from quark_onnx.graph.graph import Graph
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, Node

#: Operators that onnxruntime propagates the scale of a DequantizeLinear through.
PROPAGATED = frozenset(
    {"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"},
)
#: Operators that onnxruntime may remove as no-ops before it propagates.
_REMOVED = frozenset({"Cast", "Dropout", "Identity"})
#: Functions for 4-bit floats become standard operators in a model without functions.
_DEQUANTIZE = DEQUANTIZE | {float4.DEQUANTIZE}
_QUANTIZE = QUANTIZE | {float4.QUANTIZE}
#: Types of integer codes that no QuantizeLinear writes.
_NOT_WRITTEN = frozenset({TensorProto.INT32})
#: First opset at which QuantizeLinear has the attribute ``output_dtype``.
OUTPUT_DTYPE_OPSET = 21


def pair_moved(graph: Graph) -> int:
    """Write Q/DQ pairs after moves, to keep onnxruntime from doing so; return the number.

    A pair has the scale of the DequantizeLinear before the movement, so that no value changes. Its
    result takes over the tensor's name, because bodies and users read it by name.
    """
    captured = {name: None for node in graph.nodes for name in node.captures}
    moved = {node.outputs[0]: None for node in graph.nodes_of(PROPAGATED)}
    count = 0
    # An ordered union: names of new tensors do not depend on the order of a set.
    for tensor in {**captured, **moved}:
        dequantize = _moved_from(graph, tensor)
        if dequantize is None:
            continue
        # The two faults of the module's docstring, in its order.
        if tensor in captured or _retyped(graph, tensor, dequantize):
            _write_pair(graph, tensor, dequantize)
            count += 1
    return count


def _retyped(graph: Graph, tensor: str, dequantize: Node) -> bool:
    """Return whether onnxruntime would insert an int8 pair and retype it partially to uint8.

    Args:
        tensor: name of a moved tensor.
        dequantize: the DequantizeLinear before the movements.
    """
    if graph.opset < OUTPUT_DTYPE_OPSET:
        return False
    if code_type(graph, dequantize) != TensorProto.INT8:
        return False
    if graph.is_output(tensor):
        return True
    # The propagation ends at a QuantizeLinear, and goes on after a movement.
    stops = {*QUANTIZE, *PROPAGATED, *_REMOVED}
    return any(node.op_type not in stops for node in graph.consumers(tensor))


def _moved_from(graph: Graph, tensor: str) -> Node | None:
    """Return the DequantizeLinear before the movements of a tensor.

    None for a tensor that is not moved, for several scales, and for int32 codes.
    """
    moved = False
    node = graph.producer(tensor)
    # Several movements in a row have one DequantizeLinear before them.
    while node is not None and _is_movement(node, tensor):
        moved |= node.kind in PROPAGATED
        tensor = node.inputs[0]
        node = graph.producer(tensor)
    if node is None or not moved or node.op_type not in _DEQUANTIZE:
        return None
    if not _has_one_scale(graph, node) or code_type(graph, node) in _NOT_WRITTEN:
        return None
    return node


def _is_movement(node: Node, result: str) -> bool:
    """Return whether a tensor is the first result of a moving operator, or of a possible no-op."""
    return node.kind in PROPAGATED | _REMOVED and node.outputs[0] == result


def _has_one_scale(graph: Graph, dequantize: Node) -> bool:
    """Return whether the scale is a constant scalar."""
    scale = dequantize.inputs[1]
    # A scale may be stored in float16, followed by a Cast.
    cast = graph.producer_of_kind(scale, {"Cast"})
    if cast is not None:
        scale = cast.inputs[0]
    shape = graph.shape(scale)
    return graph.producer(scale) is None and shape is not None and {1}.issuperset(shape)


def _write_pair(graph: Graph, tensor: str, dequantize: Node) -> None:
    """Let a Q/DQ pair with the scale of ``dequantize`` compute ``tensor``.

    An equal QuantizeLinear after the tensor is reused.

    Args:
        tensor: name of a moved tensor, which stays the name of the pair's result.
        dequantize: the DequantizeLinear before the movements, with a single scale.
    """
    producer = graph.producer(tensor)
    assert producer is not None
    parameters = _parameters(graph, dequantize)
    axis = dequantize.attribute("axis")
    attributes = {} if axis is None else {"axis": axis}
    moved = graph.fresh(f"{tensor}_moved")
    graph.set_output(producer, 0, moved)
    quantizing = (
        node
        for node in graph.consumers(tensor)
        if node.op_type in _QUANTIZE and node.inputs == (tensor, *parameters)
    )
    quantize = next(quantizing, None)
    if quantize is None:
        op_type = dequantize.op_type.replace("Dequantize", "Quantize")
        codes = graph.compute(
            op_type,
            [moved, *parameters],
            f"{tensor}_moved_quantized",
            name=f"{tensor}_{op_type}",
            domain=dequantize.domain,
            **attributes,
        )
    else:
        codes = quantize.outputs[0]
        graph.set_input(quantize, 0, moved)
        # The pair that followed already computes the same values under another name.
        for reader in graph.consumers(codes):
            if reader.op_type == dequantize.op_type and reader.inputs[1:] == parameters:
                graph.replace_uses(reader.outputs[0], tensor)
    graph.add(
        dequantize.op_type,
        [codes, *parameters],
        [tensor],
        name=f"{tensor}_{dequantize.op_type}",
        domain=dequantize.domain,
        **attributes,
    )


def _parameters(graph: Graph, dequantize: Node) -> tuple[str, ...]:
    """Return the names of scale and zero point.

    A QuantizeLinear without a zero point would write uint8.

    Args:
        graph: the graph, which gets a zero point if the node has none.
    """
    if dequantize.op_type == float4.DEQUANTIZE:
        return dequantize.inputs[1:2]  # no zero point
    if dequantize.input(2):
        return dequantize.inputs[1:3]
    dtype = helper.tensor_dtype_to_np_dtype(
        code_type(graph, dequantize) or TensorProto.UINT8,
    )
    rank = len(graph.sizes(dequantize.inputs[1]))
    # ONNX requires the shape of the scale, () or (1,).
    zero_point = graph.add_constant(
        f"{dequantize.name}_zero_point",
        np.zeros((1,) * rank, dtype),
    )
    return dequantize.inputs[1], zero_point
