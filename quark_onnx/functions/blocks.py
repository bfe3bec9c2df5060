"""Build the common parts of block-format bodies: blocks, exponents and rounding.

A tensor becomes a matrix with a row for each position in a block and a column for each block:
runtimes broadcast a row of steps over rows many times faster than a step over eight neighbours.

Opset 17 has no operator for exponents, so sums that round are used instead. With c = (2^53 + 2) x,
c - (c - x) is 2^(floor(log2 x) + 1) in float64 for every float32 x; and adding 1.5 * 2^23 leaves a
float32 no bits for fractions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from quark_onnx.functions.body import END, BodyBuilder, Ref
from quark_onnx.kernels.blockfloat import LEAST_EXPONENT
from quark_onnx.kernels.minifloat import HALF_AWAY, HALF_EVEN

GREATEST = float(np.finfo(np.float32).max)

_FLOOR = 2.0**53 + 2
#: Greatest width of codes that a sum in float32 rounds: the sum stays in the constant's binade.
_NARROW = 22


@dataclass(frozen=True)
class TensorAsMatrix:
    """A tensor as a matrix; names of tensors in the body.

    Attributes:
        values: float32 (block_size, columns).
        columns: number of blocks, as int64 (1,).
        grouped: the shape (blocks along the axis and before it, block_size, axes after).
        padded: the shape (axes before, the axis with its last block padded, axes after).
        length: length of the axis, as int64 (1,).
        shape: shape of the tensor.
    """

    values: str
    columns: str
    grouped: tuple[str, str]
    padded: str
    length: str
    shape: str


def to_rows(body: BodyBuilder, x: str, block_size: int) -> TensorAsMatrix:
    """Return the tensor as rows; the axis is the node's attribute ``axis``."""
    # Product of the sizes before the axis; 1 for none, the neutral element of ReduceProd.
    before = body.op("ReduceProd", body.op("Shape", x, end=Ref("axis")))
    from_axis = body.op("Shape", x, start=Ref("axis"))
    length = body.op("Slice", from_axis, body.ints(0), body.ints(1))
    after = body.op(
        "ReduceProd", body.op("Slice", from_axis, body.ints(1), body.ints(END))
    )
    size = body.ints(block_size)
    # ceil(length / block size) blocks along the axis.
    count = body.op("Div", body.op("Add", length, body.ints(block_size - 1)), size)
    full = body.op("Mul", count, size)
    # Pads of (before, length, after): zeros at the end of the axis only.
    fill = body.op(
        "Concat",
        body.ints(0, 0, 0, 0),
        body.op("Sub", full, length),
        body.ints(0),
        axis=0,
    )
    blocks = body.op("Mul", before, count)
    columns = body.op("Mul", blocks, after)
    # Shapes are explicit, as neither 0 nor -1 works for tensors without elements.
    solid = _reshape(body, x, body.op("Concat", before, length, after, axis=0))
    filled = body.op("Pad", solid, fill)
    groups = _reshape(body, filled, body.op("Concat", blocks, size, after, axis=0))
    # (blocks, size, after) to (size, blocks, after): a row per position, a column per block.
    transposed = body.op("Transpose", groups, perm=[1, 0, 2])
    values = _reshape(body, transposed, body.op("Concat", size, columns, axis=0))
    return TensorAsMatrix(
        values,
        columns,
        (blocks, after),
        body.op("Concat", before, full, after, axis=0),
        length,
        body.op("Shape", x),
    )


def from_rows(
    body: BodyBuilder, values: str, rows: TensorAsMatrix, block_size: int
) -> str:
    """Return the tensor of ``rows`` with other values."""
    blocks, after = rows.grouped
    transposed = _reshape(
        body, values, body.op("Concat", body.ints(block_size), blocks, after, axis=0)
    )
    filled = _reshape(
        body, body.op("Transpose", transposed, perm=[1, 0, 2]), rows.padded
    )
    # Without the padding of the last block.
    solid = body.op("Slice", filled, body.ints(0), rows.length, body.ints(1))
    return _reshape(body, solid, rows.shape)


def _reshape(body: BodyBuilder, x: str, shape: str) -> str:
    return body.op("Reshape", x, shape, allowzero=1)


def passing_on(
    body: BodyBuilder,
    values: str,
    block_size: int,
    core: Callable[[BodyBuilder, str, str], str],
) -> str:
    """Return ``core`` of rows and of their greatest magnitudes; NaN and infinities pass.

    Only tensors with non-finite values take the slower branch.
    """
    top = body.largest(body.op("Abs", values), 0, block_size)

    def cautious(inner: BodyBuilder) -> str:
        finite = is_finite(inner, inner.op("Abs", values))
        clean = inner.op("Where", finite, values, inner.constant(0))
        result = core(
            inner, clean, inner.largest(inner.op("Abs", clean), 0, block_size)
        )
        return inner.op("Where", finite, result, values)

    # ``top`` is NaN or infinite if any value of its block is.
    odd = body.any(body.op("Not", is_finite(body, top)))
    return body.choose(
        odd, cautious, lambda inner: core(inner, values, top), TensorProto.FLOAT
    )


def is_finite(body: BodyBuilder, magnitudes: str) -> str:
    """Return a mask that is False for infinities and NaN."""
    # A comparison with NaN is False.
    return body.op("LessOrEqual", magnitudes, body.constant(GREATEST))


def doubled_power(body: BodyBuilder, magnitudes: str) -> str:
    """Return 2^(floor(log2) + 1) of finite float32 magnitudes, as float64; 0 of 0."""
    wide = body.op("Cast", magnitudes, to=TensorProto.DOUBLE)
    far = body.op("Mul", wide, body.constant(_FLOOR, np.float64))
    return body.op("Sub", far, body.op("Sub", far, wide))


def step(body: BodyBuilder, power: str, exponent: int) -> str:
    """Return 2^(E + exponent) as float32, for a ``doubled_power`` of exponent E; 1 for 0.

    Dividing zeros by a subnormal step would be correct too, but slow.
    """
    # The exponent of a block is at least LEAST_EXPONENT.
    least = body.constant(2.0 ** (LEAST_EXPONENT + exponent), np.float64)
    steps = body.op(
        "Max",
        body.op("Mul", power, body.constant(2.0 ** (exponent - 1), np.float64)),
        least,
    )
    positive = body.op("Greater", power, body.constant(0, np.float64))
    steps = body.op("Where", positive, steps, body.constant(1, np.float64))
    return body.op("Cast", steps, to=TensorProto.FLOAT)


def to_steps(
    body: BodyBuilder, values: str, steps: str, bounds: tuple[int, int], rounding: int
) -> str:
    """Round values to multiples of steps within bounds; zeros are positive."""
    codes = _to_integer(
        body,
        body.op("Div", values, steps),
        # The step follows from the greatest magnitude of a block, which bounds the values.
        max(bounds).bit_length(),
        rounding,
    )
    clipped = body.op("Clip", codes, body.constant(bounds[0]), body.constant(bounds[1]))
    return body.op("Mul", clipped, steps)


def _to_integer(body: BodyBuilder, v: str, bits: int, rounding: int) -> str:
    """Round values below 2^bits to integers."""
    # Addition rounds half to even by itself (IEEE 754).
    if rounding == HALF_EVEN and bits <= _NARROW:
        shift = body.constant(1.5 * 2**23)
        return body.op("Sub", body.op("Add", v, shift), shift)
    wide = body.op("Cast", v, to=TensorProto.DOUBLE)
    # Only ties are moved to the side they round to: other float32 values are farther from a tie.
    if rounding == HALF_AWAY:
        # Not a product with 1 + 2^-40: onnxruntime mistakes it for a product with 1, and removes
        # it (NoopElimination, microsoft/onnxruntime#13460; seen in 1.32).
        wide = body.op(
            "Add", wide, body.op("Mul", wide, body.constant(2.0**-40, np.float64))
        )
    elif rounding != HALF_EVEN:
        wide = body.op(
            "Add",
            wide,
            # Half up: float32 values next to a tie are at least 2^-25 away.
            body.constant(2.0**-27, np.float64),
        )
    shift = body.constant(1.5 * 2**52, np.float64)
    return body.op(
        "Cast", body.op("Sub", body.op("Add", wide, shift), shift), to=TensorProto.FLOAT
    )
