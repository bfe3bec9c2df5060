"""State the conditions of a rewrite or a pattern, one a line.

A rewrite has many conditions, and one consequence if any of them fails: the graph stays unchanged.
``only_if`` states such a condition, ``otherwise`` names the consequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


class UnmetError(Exception):
    """A condition does not hold."""


def only_if(condition: object) -> None:
    """Leave the function that is decorated with ``otherwise`` unless a condition holds.

    Raises:
        UnmetError: the condition is false.
    """
    if not condition:
        raise UnmetError


def required(value: T | None) -> T:
    """Return a value that must be known.

    Raises:
        UnmetError: the value is None.
    """
    if value is None:
        raise UnmetError
    return value


def otherwise(default: D) -> Callable[[Callable[P, T]], Callable[P, T | D]]:
    """Return a decorator of a function that returns a default where a condition does not hold.

    Everything is required before anything is changed.

    >>> @otherwise(None)
    ... def spatial_size(shape):
    ...     sizes = required(shape)[2:]
    ...     only_if(len(sizes) == 2)
    ...     return sizes[0] * sizes[1]
    >>> spatial_size((1, 3, 4, 5)), spatial_size((1, 3)), spatial_size(None)
    (20, None, None)
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T | D]:
        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | D:
            # The error carries no message: an unmet condition is the usual case, and nobody reads
            # why.
            try:
                return function(*args, **kwargs)
            except UnmetError:
                return default

        return guarded

    return decorate
