"""Barriers between operators and Q/DQ pairs that onnxruntime 1.31 fuses incorrectly.

Between Q/DQ pairs, onnxruntime replaces operators by integer ones, drops a Relu, and moves
rearrangements, including for code types and shapes without support. Each rule here was found by
experiment.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from calibrators import QParams
from quark_onnx.common.wording import counted
from quark_onnx.dtypes import INT32, Float4, Integer, Minifloat, Scaled
from quark_onnx.fusions.pointwise import softmax_fails
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE, kinds_of
from quark_onnx.kernels.nbits import BLOCK_SIZES
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.rules import WEIGHTED
from quark_onnx.rules.passthrough import HANDING_ON

#: Two-bit codes, four per byte: onnxruntime misreads rows of other lengths than multiples of four.
_TWO_BITS, _PER_BYTE = 2, 4
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_BYTE = 8
_CLIPPING = frozenset({"Relu", "Clip"})


def moves_codes(producer: Node | None) -> bool:
    """Return whether onnxruntime makes a producer move the codes of the next pair.

    Args:
        producer: the node before the pair; None before a graph input or constant.
    """
    return producer is not None and producer.kind in HANDING_ON | _CLIPPING


def is_small(dtype: Scaled) -> bool:
    """Return whether operators must not be fused with a pair of such codes."""
    # Pairs of Float4 are functions, which onnxruntime fuses with no operator.
    if isinstance(dtype, Float4):
        return False
    return isinstance(dtype, Minifloat) or dtype.bits < 8


def behind_softmax(
    graph: Graph, tensor: str, dtype: Scaled, params: QParams, *, cautious: bool = True
) -> bool:
    """Return whether a pair after ``tensor`` makes onnxruntime's 8-bit softmax wrong.

    The search looks through rearrangements.

    Args:
        graph: the float graph.
        tensor: name of the tensor.
        dtype: the type of its codes.
        params: its scale and zero point.
        cautious: as for ``softmax_fails``.
    """
    producer = graph.producer(tensor)
    while producer is not None and producer.kind in HANDING_ON | _CLIPPING:
        # onnxruntime moves the pair past these operators, next to the softmax.
        producer = graph.producer(producer.inputs[0])
    if producer is None or producer.kind != "Softmax" or dtype.bits != _BYTE:
        return False
    return softmax_fails(graph, producer, params.scale, cautious=cautious)


def from_readers(plan: Plan, use: Use, dtype: Scaled, params: QParams) -> bool:
    """Return whether the pair of a constant must be kept apart from consumers.

    onnxruntime has no product of 8-bit codes with float8, or with integers of 2 or 32 bits; in
    such a product, a float bias becomes an int32 that overflows. Rows of 2-bit codes that do
    not fill their bytes are misread. A product with a left matrix of codes takes no per-row
    zero points. Integer products do not support blocks.

    Args:
        plan: the plan.
        use: the use of the constant.
        dtype: the type of its codes.
        params: its scale and zero point.
    """
    graph = plan.graph
    weighted = [
        node
        for node in graph.consumers(use.tensor)
        if node.kind in WEIGHTED and plan.use(use.tensor, node) == use
    ]
    # A product is an integer one where the other operand has integer codes.
    in_integer_product = any(_reads_integers(plan, node) for node in weighted)
    if dtype is INT32 or _is_float8(dtype):
        return in_integer_product
    if dtype.bits == _TWO_BITS:
        # MatMulNBits unpacks rows that do not fill their bytes correctly
        unpacked = plan.fuses and params.block_size in BLOCK_SIZES
        read_as_matrix = not kinds_of(weighted).isdisjoint(_PRODUCTS)
        misread = read_as_matrix and _fills_no_bytes(graph, use.tensor) and not unpacked
        return in_integer_product or misread
    if params.block_size and dtype.bits == _BYTE and in_integer_product:
        return True
    # The constant as the left matrix: per-row scales are those of the rows of the result.
    lefts = {node.inputs[0] for node in weighted if node.kind == "MatMul"}
    has_zero_points = params.axis is not None and bool(np.any(params.zero_point))
    return use.tensor in lefts and has_zero_points


def _is_float8(dtype: Scaled) -> bool:
    return isinstance(dtype, Minifloat) and not isinstance(dtype, Float4)


def _fills_no_bytes(graph: Graph, tensor: str) -> bool:
    """Return whether rows of 2-bit codes may end within a byte."""
    # A scalar has no rows; symbolic sizes count as unknown.
    columns = (graph.shape(tensor) or (0,))[-1]
    return not isinstance(columns, int) or columns % _PER_BYTE != 0


def _reads_integers(plan: Plan, node: Node) -> bool:
    """Return whether the activation of a weighted node has integer codes."""
    for name in node.inputs[:2]:
        if plan.graph.is_constant(name):
            continue
        entry = plan.entry(plan.use(name, node))
        if isinstance(entry, Quantize) and isinstance(entry.spec.dtype, Integer):
            return True
    return False


def drop_barriers(graph: Graph) -> int:
    """Remove each Min whose bound no code of the adjacent pair exceeds; return the number.

    Such a Min has no effect but in onnxruntime, whose fusions it prevents.

    Args:
        graph: the quantized graph, which is changed.
    """
    dropped = sum(graph.bypass(node) for node in _barriers(graph))
    if dropped:
        graph.drop_unused()
    return dropped


def describe_barriers(graph: Graph) -> list[str]:
    """Return a note on the Min operators that only keep onnxruntime from fusions."""
    count = len(_barriers(graph))
    if not count:
        return []
    verb = "is" if count == 1 else "are"
    return [
        f"{counted(count, 'Min')} without effect {verb} written beside Q/DQ pairs that"
        " onnxruntime would fuse to operators with wrong results"
    ]


def _barriers(graph: Graph) -> list[Node]:
    return [
        node
        for node in graph.nodes_of({"Min"})
        if len(node.inputs) == 2 and _is_barrier(graph, node)
    ]


def _is_barrier(graph: Graph, node: Node) -> bool:
    """Return whether a Min has a bound that no code of the adjacent pair exceeds."""
    bound = graph.constant(node.inputs[1])
    if (
        bound is None or bound.ndim
    ):  # a bound of a higher rank would give its rank to the result
        return False
    producer = graph.producer_of_type(node.inputs[0], DEQUANTIZE)
    if producer is None and graph.is_output(node.outputs[0]):
        # Callers read the bounded values, which no codes bound.
        return False
    readers = graph.consumers(node.outputs[0])
    pairs: Iterable[Node] = readers if producer is None else [producer]
    greatest = [_greatest(graph, pair) for pair in pairs]
    return bool(greatest) and all(value <= bound.item() for value in greatest)


def _greatest(graph: Graph, node: Node) -> float:
    """Return the greatest value of the codes of a Q or DQ node; infinity if it is unknown."""
    if node.op_type not in QUANTIZE | DEQUANTIZE:
        return np.inf
    scale, zero_point = graph.constant(node.input(1)), graph.constant(node.input(2))
    kind = graph.elem_type(node.input(2))
    if scale is None or zero_point is None or not kind:
        return np.inf
    dtype = np.dtype(tensor_dtype_to_np_dtype(kind))
    if not np.issubdtype(dtype, np.integer):
        return np.inf
    steps = np.iinfo(dtype).max - zero_point.astype(np.float32)
    return float((scale.astype(np.float32) * steps).max())
