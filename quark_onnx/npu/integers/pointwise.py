"""Operators that compute element by element; sums align their inputs at the finer position, as "shift_read" does.

(amd-quark 0.13, onnx/postprocess/refinement/refine.py: C5 bounds that shift, C6 that of the result.) An activation is
computed on what is in front of it, before anything is rounded, as the engine does where the two are fused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.graph.clipping import clip_bounds
from quark_onnx.graph.node import softmax_axis
from quark_onnx.npu.integers.call import Call, Operator, Real, Value, exact, reals
from quark_onnx.npu.integers.fixed import Fixed, Ints, times, together

Doubles = NDArray[np.float64]


def _elementwise(function: Callable[..., Any]) -> Operator:
    """Of any number of inputs, with a result in their unit; in float where one of them is."""

    def operator(call: Call) -> list[Value]:
        def both(first: Value, second: Value) -> Value:
            if isinstance(first, Real) or isinstance(second, Real):
                return Real(function(reals(first), reals(second)))
            return together(function, exact(first), exact(second))

        return [reduce(both, (value for value in call.inputs if value is not None))]

    return operator


def multiply(call: Call) -> list[Value]:
    """Mul: positions add up; a constant in float is one at the position of its last bit."""
    first, second = (value for value in call.inputs if value is not None)
    if isinstance(first, Real) or isinstance(second, Real):
        return [Real(reals(first) * reals(second))]
    return [times(exact(first), exact(second))]


def clip(call: Call) -> list[Value]:
    """Relu and Clip."""
    bounds = clip_bounds(call.graph, call.node)
    if bounds is None:
        raise call.refused("its bounds are computed")
    value = call.inputs[0]
    if isinstance(value, Real):
        return [Real(value.values.clip(*bounds))]
    return [_clipped(call.fixed(0), *bounds)]


def leaky(call: Call) -> list[Value]:
    """LeakyRelu and PRelu, with the slopes of the model.

    The engine has slopes in 256ths, 26 / 256 for 0.1; amd-quark writes them into its models so (amd-quark 0.13,
    onnx/postprocess/simulation/simulate_dpu.py).
    """
    x = call.fixed(0)
    slope = call.fixed(1) if call.has(1) else _number(call.node.attribute("alpha", 0.01))
    return [_leaky(x, slope)]


def _leaky(x: Fixed, slope: Fixed) -> Fixed:
    return together(_where_negative, times(x, slope), x)


def _where_negative(below: Ints, above: Ints) -> Ints:
    chosen: Ints = np.where(above < 0, below, above)
    return chosen


def hard_sigmoid(call: Call) -> list[Value]:
    """HardSigmoid, alpha and beta as float32."""
    alpha, beta = call.node.attribute("alpha", 0.2), call.node.attribute("beta", 0.5)
    return [_hard_sigmoid(call.fixed(0), alpha, beta)]


def hard_swish(call: Call) -> list[Value]:
    """HardSwish: its input times its hard sigmoid of slope 1 / 6."""
    x = call.fixed(0)
    return [times(x, _hard_sigmoid(x, 1 / 6, 0.5))]


def _hard_sigmoid(x: Fixed, alpha: float, beta: float) -> Fixed:
    return _clipped(together(np.add, times(x, _number(alpha)), _number(beta)), 0.0, 1.0)


def _clipped(x: Fixed, low: float, high: float) -> Fixed:
    most = float(np.abs(x.reals()).max(initial=0))
    if low >= -most:  # a bound beyond all values, at times the greatest float, does nothing
        x = together(np.maximum, x, _number(low))
    return together(np.minimum, x, _number(high)) if high <= most else x


def _number(value: float) -> Fixed:
    return Fixed.exactly(np.asarray(np.float32(value)))


def _in_float(function: Callable[[Doubles], Doubles]) -> Operator:
    """An operator for which no arithmetic of the engine is documented: float64, rounded as a CPU does."""

    def operator(call: Call) -> list[Value]:
        value = call.inputs[0]
        assert value is not None
        return [Real(function(reals(value)))]

    return operator


def softmax(call: Call) -> list[Value]:
    """Softmax in float."""
    value, axis = call.inputs[0], softmax_axis(call.node, call.graph.opset)
    assert value is not None
    x = reals(value)
    axes = (axis,) if call.graph.opset >= 13 else tuple(range(axis % x.ndim, x.ndim))
    powers = np.exp(x - x.max(axis=axes, keepdims=True))
    return [Real(powers / powers.sum(axis=axes, keepdims=True))]


POINTWISE: dict[str, Operator] = {
    "Add": _elementwise(np.add),
    "Clip": clip,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "LeakyRelu": leaky,
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
