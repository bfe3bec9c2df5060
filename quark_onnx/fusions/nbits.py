"""Write MatMul and Gemm by a weight in blocks as com.microsoft::MatMulNBits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.layout import turned
from quark_onnx.files.half_precision import add_narrow
from quark_onnx.fusions.base import (
    CONTRIB,
    Codes,
    replace,
    stored_codes,
    value,
    zero_points,
)
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.bodies import in_bodies
from quark_onnx.kernels.nbits import BLOCK_SIZES, NBitsWeight, from_codes, joined
from quark_onnx.kernels.packing import BITS
from quark_onnx.patterns.conv_and_gemm import unscaled

#: First opset whose Unsqueeze has its axes as an input.
_AXES_OPSET = 13
#: Codes that are packed at a time.
_PART = 1 << 21
_TYPES = {f"int{bits}": bits for bits in BITS} | {f"uint{bits}": bits for bits in BITS}


def matmul_nbits(graph: Graph, node: Node) -> bool:
    """Replace a product by a constant of 2, 4 or 8 bits with scales per block of its rows."""
    codes = stored_codes(graph, node.input(1))
    if codes is None or codes.block_size not in BLOCK_SIZES:
        return False
    # MatMulNBits has neither factors nor a transposed activation.
    if not unscaled(node) or node.attribute("transA", 0):
        return False
    stored = value(graph, codes.codes)
    transposed = bool(node.attribute("transB", 0))
    bits = _TYPES.get(str(stored.dtype))
    if bits is None or stored.ndim < 2 or any(size != 1 for size in stored.shape[:-2]):
        return False
    if codes.axis % stored.ndim != stored.ndim - (1 if transposed else 2):
        return False
    # The result of a product has the axes of a stack of one matrix, which the operator drops.
    missing = _missing_axes(graph, node, stored.ndim)
    if missing is None:
        return False
    # K inputs per column, N columns.
    k, n = stored.shape[::-1] if transposed else stored.shape[-2:]
    inputs = graph.once(
        ("nbits", codes.codes, codes.scale, codes.zero_point, str(transposed)),
        lambda: _written(graph, codes, bits, transposed),
    )
    attributes = {"K": k, "N": n, "bits": bits, "block_size": codes.block_size}
    bias = node.input(2)
    graph.import_domain(CONTRIB)
    if bias and graph.is_constant(bias) and value(graph, bias).size == n:
        flat = graph.shared_constant(
            ("flat", bias), f"{bias}_flat", lambda: value(graph, bias).reshape(n)
        )
        # Zero points and the group index, which come before the bias, may be missing.
        inputs = [*inputs, *[""] * (4 - len(inputs)), flat]
        bias = ""
    result = graph.compute(
        "MatMulNBits",
        [node.inputs[0], *inputs],
        f"{node.name}_product",
        name=node.name,
        domain=CONTRIB,
        **attributes,
    )
    if bias:
        result = graph.compute("Add", [result, bias], f"{node.name}_biased")
    if missing:
        axes = graph.add_constant(f"{node.name}_axes", np.arange(missing))
        result = graph.compute("Unsqueeze", [result, axes], f"{node.name}_stacked")
    replace(graph, node, result)
    return True


def _missing_axes(graph: Graph, node: Node, rank: int) -> int | None:
    """Return the number of leading axes that a matrix takes from a product; None if unknown.

    Args:
        rank: the rank of the weight, a matrix or a stack of one matrix.
    """
    if rank == 2:
        return 0
    shape = graph.shape(node.inputs[0])
    # A vector becomes a matrix in a product with a stack.
    if shape is None or len(shape) < 2:
        return None
    missing = max(0, rank - len(shape))
    return None if missing and graph.opset < _AXES_OPSET else missing


def set_accuracy_level(graph: Graph, level: int, before: Collection[str]) -> int:
    """Set the attribute ``accuracy_level`` of MatMulNBits nodes; return their number.

    Args:
        graph: changed in place, with its bodies.
        level: lowest precision that onnxruntime may compute in: 0 leaves the choice to onnxruntime,
            1 is float32, 2 float16, 3 bfloat16, 4 int8 activations.
        before: names of nodes that are left unchanged.
    """
    if not level:
        return 0
    count = 0
    for node in graph.nodes:
        if node.op_type == "MatMulNBits" and node.name not in before:
            node.set_attribute("accuracy_level", level)
            count += 1
    return count + in_bodies(
        graph, lambda body: set_accuracy_level(body, level, before)
    )


def _written(graph: Graph, codes: Codes, bits: int, transposed: bool) -> list[str]:
    """Add the operator's constant inputs, which many nodes may share."""
    weight = _packed(graph, codes, bits, transposed)
    names = ("packed", "scales", "zero_points")
    inputs = [
        graph.add_constant(f"{codes.codes}_{name}", array)
        for name, array in zip(names, weight.inputs, strict=False)
    ]
    if not graph.is_constant(codes.scale):  # stored in 16 bits
        scales = weight.scales.astype(np.float16)
        inputs[1] = add_narrow(graph, f"{codes.codes}_scales_wide", scales)
    return inputs


def _matrix(array: NDArray[Any]) -> NDArray[Any]:
    """Return the only matrix of a stack."""
    return array.reshape(array.shape[-2:])


def _packed(graph: Graph, codes: Codes, bits: int, transposed: bool) -> NBitsWeight:
    """Return a weight in the operator's layout: columns as rows, unsigned codes."""
    stored = _matrix(value(graph, codes.codes))
    scales = _matrix(value(graph, codes.scale)).astype(np.float32)
    zeros = _matrix(zero_points(graph, codes))
    # Unsigned codes are two's complement ones shifted by half of their range.
    signed = not str(stored.dtype).startswith("u")
    offset = 1 << bits - 1 if signed else 0
    if not transposed:
        scales = scales.T
        zeros = zeros.T
    count, k = stored.shape if transposed else stored.shape[::-1]
    blocks = -(-k // codes.block_size)
    zeros = zeros + offset
    # The operator's default zero point is half of the range.
    middle = (zeros == 1 << bits - 1).all()

    def columns(start: int) -> NBitsWeight:
        part = slice(start, start + step)
        lines = stored[part] if transposed else stored[:, part]
        lines = lines.astype(np.int8 if signed else np.uint8)
        if not transposed:
            lines = turned(lines)
        # The last block of a row is padded with the code 0, which is shifted like the others.
        unsigned = np.full((len(lines), blocks * codes.block_size), offset, np.uint8)
        # Addition modulo 256, as in two's complement.
        np.add(lines.view(np.uint8), np.uint8(offset), out=unsigned[:, :k])
        return from_codes(
            unsigned.reshape(len(lines), blocks, codes.block_size),
            scales[part],
            None if middle else zeros[part],
            bits,
            k,
        )

    # A part at a time, as there are several copies between the codes and the packed ones.
    step = max(1, _PART // k)
    parts = [columns(start) for start in range(0, count, step)]
    return joined(parts)
