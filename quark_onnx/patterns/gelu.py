"""Gelu as exporters decompose it: exact, by Erf, and approximated by Tanh."""

from __future__ import annotations

import math

from quark_onnx.graph.pattern import Pattern, number, op, tensor


def _near(value: float) -> Pattern:
    """Return the pattern of a constant that exporters round in their own ways."""
    return number(value, within=1e-4)


def _halved(pattern: Pattern) -> Pattern:
    return pattern * _near(0.5) | pattern / _near(2)


_X = tensor("x")


def _gelu(shifted: Pattern) -> Pattern:
    """Return the pattern of half of x times a tensor; exporters write the factors in any order."""
    return _halved(_X * shifted) | _X * _halved(shifted) | _halved(_X) * shifted


_SCALED = _X * _near(math.sqrt(0.5)) | _X / _near(math.sqrt(2))
#: x * (1 + erf(x / sqrt(2))) / 2.
GELU = _gelu(_near(1) + op("Erf", _SCALED).named("erf"))

_SQUARE = _X * _X | op("Pow", _X, 2)
_CUBE = _SQUARE * _X | op("Pow", _X, 3)
_FACTOR, _CUBIC = _near(math.sqrt(2 / math.pi)), _near(0.044715)
_GROWING = _near(1) + _CUBIC * _SQUARE
_ANGLE = (
    _FACTOR * (_X + _CUBIC * _CUBE)
    | _FACTOR * (_X + _X * (_X * (_CUBIC * _X)))
    | _FACTOR * _X * _GROWING
    | _FACTOR * (_X * _GROWING)
)
#: x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2.
TANH_GELU = _gelu(_near(1) + op("Tanh", _ANGLE))
