"""Operators that compute element by element.

Sums align their inputs at the finer position, as "shift_read" does (amd-quark 0.13,
onnx/postprocess/refinement/refine.py: C5 bounds that shift, C6 the shift of the result). An
activation is computed on unrounded values, as the engine does if the activation is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from quark_onnx.graph.node import softmax_axis
from quark_onnx.npu.integers.call import (
    NodeCall,
    Operator,
    Real,
    Value,
    exact,
    in_float,
    reals,
)
from quark_onnx.npu.integers.fixed import Fixed, Ints, times, together
from quark_onnx.patterns.clip_bounds import clip_bounds

Doubles = NDArray[np.float64]

#: The engine's factor for 1/6, and its position (amd-quark 0.13, simulate_dpu.py).
_SIXTH = (2731, 14)
#: Coefficients of the engine's polynomial for powers; the last two coefficients are 1.
_POWERS = (0.21875, 0.486328125)


def _elementwise(function: Callable[..., Any]) -> Operator:
    """Return an operator on several inputs, with a result in the inputs' unit.

    The result is float if an input is float.
    """

    def operator(call: NodeCall) -> list[Value]:
        # Pairwise, as Max, Min and Sum take any number of inputs.
        def both(first: Value, second: Value) -> Value:
            if isinstance(first, Real) or isinstance(second, Real):
                return Real(function(reals(first), reals(second)))
            return together(function, exact(first), exact(second))

        return [reduce(both, call.operands())]

    return operator


def multiply(call: NodeCall) -> list[Value]:
    """Compute Mul; positions add up, and a float constant gets an exact position."""
    first, second = call.operands()
    if isinstance(first, Real) or isinstance(second, Real):
        return [Real(reals(first) * reals(second))]
    return [_product(call, first, second)]


def clip(call: NodeCall) -> list[Value]:
    """Compute Relu or Clip."""
    bounds = clip_bounds(call.graph, call.node)
    if bounds is None:
        raise call.refused("its bounds are computed")
    value = call.inputs[0]
    if isinstance(value, Real):
        return [Real(value.values.clip(*bounds))]
    return [_clipped(call.fixed(0), *bounds)]


def leaky(call: NodeCall) -> list[Value]:
    """Compute LeakyRelu or PRelu, with the slopes of the model.

    The engine has slopes in 256ths, such as 26 / 256 for 0.1; amd-quark writes such slopes into its
    models (amd-quark 0.13, onnx/postprocess/simulation/simulate_dpu.py).
    """
    x = call.fixed(0)
    # A slope that is computed in float is an error.
    slope: Fixed | NDArray[Any] = _constant(call, "alpha", 0.01)
    if call.has(1):
        constant = call.inputs[1]
        slope = constant if isinstance(constant, np.ndarray) else call.fixed(1)
    return [together(_where_negative, _product(call, x, slope), x)]


def _product(
    call: NodeCall, first: Fixed | NDArray[Any], second: Fixed | NDArray[Any]
) -> Fixed:
    """Multiply; a product with a float constant is rounded to float32 where onnxruntime's is.

    A constant of 24 bits times a code can lie next to a tie where the product in float32 is one.
    """
    if call.single and isinstance(first, np.ndarray) != isinstance(second, np.ndarray):
        narrow = [_float32(value) for value in (first, second)]
        if narrow[0] is not None and narrow[1] is not None:
            return Fixed.exactly(narrow[0] * narrow[1])
    return times(exact(first), exact(second))


def _float32(value: Fixed | NDArray[Any]) -> NDArray[np.float32] | None:
    """Return numbers in float32; None if one of them is no float32."""
    if isinstance(value, Fixed) and value.divisor != 1:
        return None
    numbers = reals(value)
    narrow = numbers.astype(np.float32)
    return narrow if np.array_equal(narrow, numbers) else None


def _where_negative(below: Ints, above: Ints) -> Ints:
    # Both arms are aligned at one position, so that the signs of the integers are those of the
    # values.
    chosen: Ints = np.where(above < 0, below, above)
    return chosen


def hard_sigmoid(call: NodeCall) -> list[Value]:
    """Compute HardSigmoid with alpha and beta as float32.

    The engine's approximation of 1/6 increases the result by 1/8192 of its value.
    """
    alpha, beta = _constant(call, "alpha", 0.2), _constant(call, "beta", 0.5)
    gate = _hard_sigmoid(call, alpha, beta)
    is_of_engine = alpha == np.float32(1 / 6) and beta == 0.5
    # A model with amd-quark's factor already holds the correction.
    if "gate" in call.engine and is_of_engine and not call.corrected:
        # 2731 * 6 / 2**14 = 1 + 1/8192.
        return [times(gate, Fixed(np.array(_SIXTH[0] * 6), _SIXTH[1]))]
    return [gate]


def hard_swish(call: NodeCall) -> list[Value]:
    """Compute HardSwish: the input times its hard sigmoid of slope 1 / 6."""
    gate = _hard_sigmoid(
        call, np.asarray(np.float32(1 / 6)), np.asarray(np.float32(0.5))
    )
    x, narrow = call.fixed(0), _float32(gate)
    # The gate is a float32 as well, if it was computed as one.
    return [_product(call, x, gate if narrow is None else narrow)]


def _hard_sigmoid(
    call: NodeCall, alpha: NDArray[np.float32], beta: NDArray[np.float32]
) -> Fixed:
    product = _product(call, call.fixed(0), alpha)
    narrow = _float32(product) if call.single and "gate" not in call.engine else None
    if narrow is not None:
        # onnxruntime adds in float32, too.
        return Fixed.exactly((narrow + beta).clip(0, 1))
    return _clipped(together(np.add, product, exact(beta)), 0.0, 1.0)


def _constant(call: NodeCall, name: str, default: float) -> NDArray[np.float32]:
    """Return a float attribute, which ONNX stores in float32."""
    return np.asarray(call.node.attribute(name, default), np.float32)


def _clipped(x: Fixed, low: float, high: float) -> Fixed:
    """Return numbers between bounds, exactly."""
    # Bounds that no value reaches are left out: at the position of x, the greatest float32 would
    # overflow.
    most = float(np.abs(x.reals()).max(initial=0))
    if low >= -most:
        x = together(np.maximum, x, _number(low))
    if high <= most:
        return together(np.minimum, x, _number(high))
    return x


def _number(value: float) -> Fixed:
    """Return a float as an exact number of one element, after rounding to float32."""
    return Fixed.exactly(np.asarray(np.float32(value)))


def _in_float(function: Callable[[Doubles], Doubles]) -> Operator:
    """Return an operator in float64, rounded as on a CPU.

    The engine's arithmetic of these operators is not documented.
    """

    def operator(call: NodeCall) -> list[Value]:
        value = call.inputs[0]
        assert value is not None
        return [Real(function(reals(value)))]

    return operator


def softmax(call: NodeCall) -> list[Value]:
    """Compute Softmax in float64, or by the engine's documentation."""
    value, axis = call.inputs[0], softmax_axis(call.node, call.graph.opset)
    assert value is not None
    x = reals(value)
    # Before opset 13 Softmax flattened all axes from ``axis`` on.
    axes = (axis,) if call.graph.opset >= 13 else tuple(range(axis % x.ndim, x.ndim))
    if "softmax" in call.engine:
        return [Real(engine_softmax(x, axes), known=True)]
    # The maximum is subtracted, so that no power overflows.
    powers = np.exp(x - x.max(axis=axes, keepdims=True))
    return [Real(powers / powers.sum(axis=axes, keepdims=True))]


def engine_softmax(x: Doubles, axes: tuple[int, ...]) -> Doubles:
    """Compute Softmax in bfloat16: ``2**n`` times a polynomial of ``x - n * ln(2)``.

    Source: amd-quark 0.13, postprocess/simulation/simulate_dpu_softmax.py. The maximum is not
    subtracted first.

    Raises:
        OverflowError: a power exceeds the range of bfloat16.
    """
    x = _bfloat16(x)
    whole = np.floor(_bfloat16(x * _bfloat16(np.float64(np.log2(np.e)))))
    rest = _bfloat16(x - _bfloat16(whole * _bfloat16(np.float64(np.log(2)))))
    # Horner's scheme: ((0.21875 r + 0.486328125) r + 1) r + 1, close to e**r for r in [0, ln 2).
    power = _bfloat16(rest * _POWERS[0] + _POWERS[1])
    for _ in range(2):
        power = _bfloat16(rest * power + 1)
    with np.errstate(over="ignore"):
        power = _bfloat16(np.ldexp(power, whole.astype(np.int64)))
        total = _bfloat16(power.sum(axis=axes, keepdims=True))
    # A total of 0: all powers are below the least number of bfloat16.
    if not np.isfinite(total).all() or not total.all():
        raise OverflowError(
            f"its inputs reach from {x.min():.4g} to {x.max():.4g}, and the engine"
            " takes their powers in bfloat16 as they are",
        )
    return _bfloat16(power / total)


def _bfloat16(x: Doubles) -> Doubles:
    """Round to float32, as intermediate results are, and then to bfloat16."""
    with np.errstate(over="ignore"):
        # The float32 in between may turn a value into a tie of bfloat16.
        return x.astype(np.float32).astype(bfloat16).astype(np.float64)


POINTWISE: dict[str, Operator] = {
    "Add": _elementwise(np.add),
    "Clip": clip,
    "Elu": in_float,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "InstanceNormalization": in_float,
    "LayerNormalization": in_float,
    "LeakyRelu": leaky,
    "LogSoftmax": in_float,
    "Max": _elementwise(np.maximum),
    "Min": _elementwise(np.minimum),
    "Mul": multiply,
    "PRelu": leaky,
    "Relu": clip,
    "Sigmoid": _in_float(lambda x: 1 / (1 + np.exp(-x))),
    "Softmax": softmax,
    "Sub": _elementwise(np.subtract),
    "Sum": _elementwise(np.add),
    "Tanh": _in_float(np.tanh),
}
