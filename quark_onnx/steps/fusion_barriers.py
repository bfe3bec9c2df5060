"""Fusion barriers: operators that must not touch a Q/DQ pair, because onnxruntime 1.31 fuses both
incorrectly.

Between Q/DQ pairs it makes operators integer ones, drops a Relu, and moves rearrangements about,
also for types of codes and shapes that these do not work for. What each function here knows was
found by running it.
"""

from __future__ import annotations

import numpy as np

from calibrators import QParams
from quark_onnx.dtypes import INT32, Float4, Integer, Minifloat, Scaled
from quark_onnx.fusions.pointwise import softmax_fails
from quark_onnx.graph import Graph, Node
from quark_onnx.kernels.nbits import BLOCK_SIZES
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.rules import WEIGHTED
from quark_onnx.rules.passthrough import HANDING_ON

#: The fewest bits of which onnxruntime multiplies a row whose length is no multiple of so many
#: codes to a byte.
_TWO_BITS, _PER_BYTE = 2, 4
_BYTE = 8
_CLIPPING = frozenset({"Relu", "Clip"})


def moves_codes(producer: Node | None) -> bool:
    """Whether what computes a tensor would be made to move the codes of a pair behind it."""
    return producer is not None and producer.kind in HANDING_ON | _CLIPPING


def is_small(dtype: Scaled) -> bool:
    """Whether nothing may become one with a pair of these codes."""
    return (isinstance(dtype, Minifloat) or dtype.bits < 8) and not isinstance(
        dtype,
        Float4,
    )


def behind_softmax(graph: Graph, tensor: str, dtype: Scaled, params: QParams) -> bool:
    """Whether a pair behind this tensor would make a wrong 8-bit softmax, also seen through
    rearrangements.
    """
    producer = graph.producer(tensor)
    while producer is not None and producer.kind in HANDING_ON | _CLIPPING:
        producer = graph.producer(producer.inputs[0])
    if producer is None or producer.kind != "Softmax" or dtype.bits != _BYTE:
        return False
    return softmax_fails(graph, producer, params.scale)


def from_readers(plan: Plan, use: Use, dtype: Scaled, params: QParams) -> bool:
    """Whether the pair of a constant must not touch those who read it.

    There is no product of 8-bit codes with floats of 8 bits, or with integers of 2 or 32; beside
    them a float bias becomes an int32 that overflows. Rows of 2-bit codes that do not fill their
    bytes are misread. A product with a matrix of codes on the left takes no zero points of its own
    for each row. Products of integers know no blocks.
    """
    graph = plan.graph
    readers = [
        node
        for node in graph.consumers(use.tensor)
        if plan.use(use.tensor, node) == use
    ]
    weighted = [node for node in readers if node.kind in WEIGHTED]
    if isinstance(dtype, Minifloat) and not isinstance(dtype, Float4):
        return any(_reads_integers(plan, node) for node in weighted)
    if dtype is INT32:
        return any(_reads_integers(plan, node) for node in weighted)
    if dtype.bits == _TWO_BITS:
        columns = (graph.shape(use.tensor) or (0,))[-1]
        uneven = not isinstance(columns, int) or columns % _PER_BYTE != 0
        unpacked = (
            plan.fuses and params.block_size in BLOCK_SIZES
        )  # by an operator that does it right
        products = not unpacked and any(
            node.kind in ("MatMul", "Gemm") for node in weighted
        )
        return (uneven and products) or any(
            _reads_integers(plan, node) for node in weighted
        )
    if (
        params.block_size
        and dtype.bits == _BYTE
        and any(_reads_integers(plan, node) for node in weighted)
    ):
        return True
    left = any(
        node.kind == "MatMul" and node.inputs[0] == use.tensor for node in weighted
    )
    return left and params.axis is not None and bool(np.any(params.zero_point))


def _reads_integers(plan: Plan, node: Node) -> bool:
    """Whether what a node multiplies a weight with has integer codes."""
    entries = [
        plan.entry(plan.use(name, node))
        for name in node.inputs[:2]
        if not plan.graph.is_constant(name)
    ]
    return any(
        isinstance(entry, Quantize) and isinstance(entry.spec.dtype, Integer)
        for entry in entries
    )
