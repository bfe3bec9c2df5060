"""Products on integers: Conv, ConvTranspose, Gemm, MatMul.

A product of codes at positions i and w has the position i + w. A bias of position b is shifted to
this position by i + w - b bits to the left ("shift_bias"), and the sum to the output by i + w - o
bits to the right ("shift_cut": amd-quark 0.13, onnx/postprocess/refinement/refine.py). If the bias
is finer, the products are shifted. C8 allows this shift, and no source documents the bits that the
engine drops.
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from quark_onnx.kernels.im2col import Window, windowed
from quark_onnx.npu.integers.call import NodeCall, Operator, Value
from quark_onnx.npu.integers.fixed import Fixed, summed, times, together
from quark_onnx.npu.integers.windows import placed, places
from quark_onnx.patterns.conv_and_gemm import Layer

Doubles = NDArray[np.float64]

#: Output positions in a chunk of the computation, which limits memory use.
_SLAB = 8192


def convolution(call: NodeCall) -> list[Value]:
    """Compute Conv or ConvTranspose of any rank, groups, strides, pads and dilations.

    Padding has the real value zero.
    """
    # Conv stores (out, in / groups, ...), ConvTranspose (in, out / groups, ...).
    x, weight, layer = call.fixed(0), call.fixed(1), Layer.stored(call.node)
    arranged = weight.shaped(layer.arranged)  # (groups, outputs, inputs, ...)
    window, output = placed(call.node, x.values.shape[2:], arranged.values.shape[3:])
    # The products in one sum: input channels of a group times the size of the kernel.
    taps = prod(arranged.values.shape[2:])
    sums = summed(x, arranged, taps, partial(_convolved, window=window, output=output))
    # ONNX adds the bias of a convolution along the channels, axis 1 of (N, M, ...).
    shape = (-1, *[1] * len(output))
    return [_biased(call, sums, shape)]


def _convolved(
    x: Doubles, weight: Doubles, window: Window, output: tuple[int, ...]
) -> Doubles:
    """Return the sums of a convolution, (batch, channels, *output).

    Args:
        x: integers as float64, (batch, channels, ...).
        weight: integers as float64, (groups, outputs, inputs, *kernel).
        window: geometry of the kernel.
        output: spatial sizes of the output.
    """
    groups, outputs = weight.shape[:2]
    # (groups, outputs, taps) @ (groups, taps, positions) for each slab of output positions.
    rows, count = weight.reshape(groups, outputs, -1), places(len(x), output)
    sums = np.empty((groups, outputs, count))
    for start in range(0, count, _SLAB):
        end = min(count, start + _SLAB)
        [patches] = windowed([x], np.arange(start, end)[None], output, window, groups)
        # Exact in float64, in whatever order BLAS adds: the caller has checked the bound of the
        # sums.
        sums[:, :, start:end] = rows @ patches.swapaxes(1, 2)
    joined: Doubles = sums.reshape(groups * outputs, len(x), *output).swapaxes(0, 1)
    return joined


def gemm(call: NodeCall) -> list[Value]:
    """Compute Gemm; alpha and beta are multiplied like other numbers."""
    a, b = _operand(call, 0, "transA"), _operand(call, 1, "transB")
    # The number of products in a sum is the length of the inner axis.
    sums = summed(a, b, a.values.shape[-1], np.matmul)
    # C of a Gemm broadcasts from the last axis, as numpy does: no reshape is needed.
    return [_biased(call, times(sums, _factor(call, "alpha")), None)]


def _operand(call: NodeCall, index: int, transposed: str) -> Fixed:
    """Return a factor of a Gemm, transposed if the attribute is set."""
    operand = call.fixed(index)
    if call.node.attribute(transposed, 0):
        return operand.shaped(np.transpose)
    return operand


def matmul(call: NodeCall) -> list[Value]:
    """Compute MatMul of inputs of any rank."""
    a, b = call.fixed(0), call.fixed(1)
    return [summed(a, b, a.values.shape[-1], np.matmul)]


def _biased(call: NodeCall, sums: Fixed, shape: tuple[int, ...] | None) -> Fixed:
    """Add the bias of a Conv or Gemm, if there is one.

    Args:
        call: the node, with the bias as its third input.
        shape: shape to which the bias is reshaped; None to broadcast from the last axis.
    """
    if not call.has(2):
        return sums
    bias = times(call.fixed(2), _factor(call, "beta"))
    if shape is not None:
        bias = bias.shaped(lambda values: values.reshape(shape))
    return together(np.add, sums, bias)


def _factor(call: NodeCall, name: str) -> Fixed:
    """Return alpha or beta of a Gemm as a number of one element; 1 if absent."""
    return Fixed.exactly(np.float32(call.node.attribute(name, 1.0)))


PRODUCTS: dict[str, Operator] = {
    "Conv": convolution,
    "ConvTranspose": convolution,
    "Gemm": gemm,
    "MatMul": matmul,
}
