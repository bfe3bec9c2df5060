"""Define BFPQuantizeDequantize as an ONNX function: block floating point, MX4, MX6, MX9.

Computes the same as ``quark_onnx.kernels.blockfloat``, bit for bit, with operators of opset 17 that
are unchanged up to opset 28.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from onnx import FunctionProto, NodeProto, TensorProto

from quark_onnx.common.errors import ModelError
from quark_onnx.functions.blocks import (
    doubled_power,
    from_rows,
    is_finite,
    passing_on,
    step,
    to_rows,
    to_steps,
)
from quark_onnx.functions.body import (
    BodyBuilder,
    Settings,
    Value,
    dispatch,
    distinct,
    function,
    settings,
    where,
)
from quark_onnx.kernels.blockfloat import BIT_WIDTHS, EXPONENT_AND_SIGN

NAME = "BFPQuantizeDequantize"

#: Default values of the attributes.
DEFAULTS: Settings = {
    "bfp_method": "to_bfp",
    "axis": 1,
    "bit_width": 16,
    "block_size": 8,
    "rounding_mode": 0,
    "sub_block_size": 2,
    "sub_block_shift_bits": 1,
    "convert_to_bfloat_before_bfp": 0,
    "use_compiler_version_cpu_kernel": 0,
}

#: Relevant attributes of each method, apart from the axis.
_PLAIN = ("bfp_method", "bit_width", "block_size", "rounding_mode")
_KEYS = {
    "to_bfp": _PLAIN,
    "to_bfp_prime": (*_PLAIN, "sub_block_size", "sub_block_shift_bits"),
}

#: Exponent of the least normal float32.
_LEAST_NORMAL_EXPONENT = -126
#: Greatest difference of exponents of float32.
_GREATEST_SHIFT = 254


def definitions(nodes: Iterable[NodeProto], opset: int) -> list[FunctionProto]:
    """Return a function for all BFPQuantizeDequantize nodes of a model.

    The function holds a variant for each combination of attributes in the model; the axis is free.
    It takes float32 of any shape of rank 1 or more, static or dynamic. The model needs opset 17 or
    later, IR version 8 or later and an import of the vendor's domain.

    Args:
        nodes: the model's nodes; other operators are ignored.
        opset: version of the default domain.

    Returns:
        One function, or none without such nodes.

    Raises:
        ModelError: an attribute value is not supported, or the opset is not.

    >>> from onnx import helper
    >>> node = helper.make_node(NAME, ["x"], ["y"], domain="com.amd.quark", rounding_mode=2)
    >>> [function.name for function in definitions([node], 17)]
    ['BFPQuantizeDequantize']
    """
    checked = [_checked(node) for node in nodes if node.op_type == NAME]
    if not checked:
        return []
    variants: list[Settings] = []
    # Attributes that a method does not read make no further variants.
    for method, keys in _KEYS.items():
        of_method = [row for row in checked if row["bfp_method"] == method]
        variants += distinct(of_method, keys)
    body = BodyBuilder()
    dispatch(body, variants, _variant)
    return [function(NAME, ["x"], body, DEFAULTS, opset)]


def _checked(node: NodeProto) -> Settings:
    allowed: dict[str, Collection[Value]] = {
        "bfp_method": tuple(_KEYS),
        "bit_width": BIT_WIDTHS,
        "block_size": range(1, 1 << 16),
        "rounding_mode": range(3),
        # Of the next two, only the default 0 is supported.
        "convert_to_bfloat_before_bfp": range(1),
        "use_compiler_version_cpu_kernel": range(1),
    }
    values = settings(node, DEFAULTS, allowed)
    if values["bfp_method"] == "to_bfp_prime":
        size, parts, bits = (
            int(values[name])
            for name in ("block_size", "sub_block_size", "sub_block_shift_bits")
        )
        if parts < 1 or size % parts or bits < 0:
            raise ModelError(
                f"{where(node)}: sub-blocks of {parts} do not divide blocks of {size},"
                f" or a shift has {bits} bits"
            )
    return values


def _variant(body: BodyBuilder, variant: Settings) -> str:
    size = int(variant["block_size"])
    rows = to_rows(body, "x", size)
    if variant["bfp_method"] == "to_bfp":
        bits = _bits(variant)
        rounding = int(variant["rounding_mode"])

        def core(inner: BodyBuilder, values: str, top: str) -> str:
            # Codes of ``bits`` bits and a sign: the greatest magnitude lies between 2^(bits-1)
            # and 2^bits steps.
            steps = step(inner, doubled_power(inner, top), 1 - bits)
            return to_steps(inner, values, steps, (1 - 2**bits, 2**bits - 1), rounding)

        return from_rows(body, passing_on(body, rows.values, size, core), rows, size)
    parts = int(variant["sub_block_size"])
    # (block size, columns) as (sub-blocks, places, columns).
    split = body.op("Concat", body.ints(size // parts, parts), rows.columns, axis=0)
    values = body.op("Reshape", rows.values, split, allowzero=1)
    return from_rows(body, _prime(body, values, variant), rows, size)


def _bits(variant: Settings) -> int:
    return int(variant["bit_width"]) - EXPONENT_AND_SIGN


def _prime(body: BodyBuilder, values: str, variant: Settings) -> str:
    """Quantize values of shape (sub-blocks of a block, places in a sub-block, blocks)."""
    sub_size = int(variant["sub_block_size"])
    subs = int(variant["block_size"]) // sub_size
    sub_top = body.largest(body.op("Abs", values), 1, sub_size)
    top = body.largest(sub_top, 0, subs)

    def cautious(inner: BodyBuilder) -> str:
        magnitudes = inner.op("Abs", values)
        finite = is_finite(inner, magnitudes)
        normal = inner.op(
            "GreaterOrEqual", magnitudes, inner.constant(2.0**_LEAST_NORMAL_EXPONENT)
        )
        clean = inner.op(
            "Where", inner.op("And", finite, normal), values, inner.constant(0)
        )
        sub = inner.largest(inner.op("Abs", clean), 1, sub_size)
        result = _in_sub_blocks(inner, clean, sub, inner.largest(sub, 0, subs), variant)
        broken = inner.op("Cast", inner.op("Not", finite), to=TensorProto.FLOAT)
        broken = inner.largest(inner.largest(broken, 1, sub_size), 0, subs)
        broken = inner.op("Greater", broken, inner.constant(0))
        return inner.op("Where", broken, inner.constant(np.nan), result)

    # In other blocks a step exceeds twice any subnormal, which rounds to zero by itself.
    exponent = _LEAST_NORMAL_EXPONENT + 1 + _shift(variant) + _bits(variant) - 1
    regular = body.op(
        "GreaterOrEqual",
        top,
        body.constant(2.0**exponent if exponent < 128 else np.inf),
    )
    # A block of zeros is regular: its result is zeros.
    regular = body.op("Or", regular, body.op("Equal", top, body.constant(0)))
    odd = body.any(body.op("Not", body.op("And", regular, is_finite(body, top))))
    # The rare case is a branch, so that its operators do not run in every call.
    return body.choose(
        odd,
        cautious,
        lambda inner: _in_sub_blocks(inner, values, sub_top, top, variant),
        TensorProto.FLOAT,
    )


def _shift(variant: Settings) -> int:
    # 2^bits - 1, but no more than what a float32 exponent can differ by.
    return int(min(2 ** int(variant["sub_block_shift_bits"]) - 1, _GREATEST_SHIFT))


def _in_sub_blocks(
    body: BodyBuilder, values: str, sub_top: str, top: str, variant: Settings
) -> str:
    bits = _bits(variant)
    block = doubled_power(body, top)
    shifted = body.op("Mul", block, body.constant(2.0 ** -_shift(variant), np.float64))
    # Zeros have no exponent, and must not lead to a step of zero in a sub-block or a block.
    shifted = body.op(
        "Max", shifted, body.constant(2.0 ** (_LEAST_NORMAL_EXPONENT + 1), np.float64)
    )
    positive = body.op("Greater", block, body.constant(0, np.float64))
    shifted = body.op("Where", positive, shifted, body.constant(2.0**bits, np.float64))
    # A sub-block has the exponent of its own magnitude, at most ``shift`` below that of the
    # block.
    power = body.op("Max", doubled_power(body, sub_top), shifted)
    steps = body.op(
        "Cast",
        body.op("Mul", power, body.constant(2.0**-bits, np.float64)),
        to=TensorProto.FLOAT,
    )
    return to_steps(
        body, values, steps, (1 - 2**bits, 2**bits - 1), int(variant["rounding_mode"])
    )
