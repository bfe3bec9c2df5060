"""Numbers as text, rounded without becoming wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable

#: Maximum number of decimals of a figure near a limit.
#: Beyond it the shortest text that reads back as the same float is shown.
_MOST_DIGITS = 9
#: Quantile of the normal distribution for an interval of 95 %.
_NORMAL = 1.959964


def size_change(before: int, after: int) -> str:
    """Return two sizes in bytes, with the ratio if rounding preserves the reduction.

    >>> size_change(4000, 1000)
    '4,000 -> 1,000 bytes (4.00x smaller)'
    >>> size_change(1001, 1000)
    '1,001 -> 1,000 bytes'
    """
    sizes = f"{before:,} -> {after:,} bytes"
    # The decision is made on the rounded text, so that no "1.00x smaller" appears.
    ratio = f"{before / max(1, after):.2f}"
    if float(ratio) > 1:
        return f"{sizes} ({ratio}x smaller)"
    return sizes


def percent(share: float, digits: int = 2) -> str:
    """Return a share as a percentage without the sign.

    The text is 100 only for the entire share, and 0 only for an empty share.

    >>> percent(0.75), percent(1.0), percent(0.999999), percent(1e-6), percent(-0.0, 1)
    ('75.00', '100.00', '>99.99', '<0.01', '0.0')
    """
    # 99.999 % must not read as 100: a single wrong value among many is the news.
    least = 10.0**-digits
    text = f"{100 * share:.{digits}f}"
    if share < 1 and float(text) >= 100:
        return f">{100 - least:.{digits}f}"
    if share > 0 and float(text) == 0:
        return f"<{least:.{digits}f}"
    return _with_one_zero(text)


def near_limits(value: float, limits: Iterable[float] = (), digits: int = 2) -> str:
    """Return a number with more decimals if rounding would move it to or across a limit.

    Args:
        value: the number.
        limits: limits that the number is compared with.
        digits: number of decimals far from the limits.

    >>> near_limits(0.8996, [0.9], 3), near_limits(0.8, [0.9], 3), near_limits(0.9, [0.9], 3)
    ('0.8996', '0.800', '0.900')
    >>> near_limits(19.9999, [20]), near_limits(20.0001, [20]), near_limits(float("inf"), [20])
    ('19.9999', '20.0001', 'inf')
    """
    limits = list(limits)
    sides = _sides(value, limits)
    # Decimals are added until the text lies on the same side of every limit as the number.
    for decimals in range(digits, _MOST_DIGITS):
        text = f"{value:.{decimals}f}"
        if _sides(float(text), limits) == sides:
            break
    else:
        # A NaN or an infinity has ended the loop in the first round; this is a number very close to
        # a limit.
        text = repr(float(value))
    return _with_one_zero(text)


def _with_one_zero(text: str) -> str:
    """Return a number in digits without the sign of a negative zero."""
    return text.removeprefix("-") if float(text) == 0 else text


def _sides(value: float, limits: Iterable[float]) -> list[int]:
    """Return for each limit whether a number is below (-1), at (0) or above it (1)."""
    # 0 for NaN as well, which no number of decimals would help.
    return [(value > limit) - (value < limit) for limit in limits]


def percentage(share: float, limits: Iterable[float] = ()) -> str:
    """Return a share with sign and about two digits, never in scientific notation.

    Args:
        share: the share.
        limits: shares that the share is compared with; rounding does not move it across them.

    >>> percentage(1.0), percentage(0.9999), percentage(0.0314), percentage(0.00012)
    ('100 %', '>99.9 %', '3.1 %', '0.012 %')
    >>> percentage(0.995), percentage(0.25), percentage(1e-9), percentage(0.0)
    ('99.5 %', '25 %', '<0.001 %', '0 %')
    >>> percentage(0.9467, [0.95]), percentage(0.94999, [0.95]), percentage(0.95, [0.95])
    ('94.7 %', '94.999 %', '95 %')
    """
    # Exact: 1.0 is the entire share, and not a rounded one.
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    digits = _percentage_digits(100 * abs(share))
    text = percent(share, digits)
    if text[0] in "<>":
        return f"{text} %"
    return f"{near_limits(100 * share, [100 * limit for limit in limits], digits)} %"


def _percentage_digits(size: float) -> int:
    """Return the decimals of a percentage: two digits in all, at most three decimals."""
    if size >= 99:
        # One decimal shows what is missing to 100 %.
        return 1
    for digits in range(3):
        if size >= 9.5 / 10**digits:
            return digits
    return 3


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Return the Wilson score interval of a share, at a confidence of 95 %.

    Wilson, Probable inference, the law of succession, and statistical inference (1927).

    Args:
        hits: number of hits.
        count: number of trials, at least 1.

    >>> [round(bound, 3) for bound in wilson(16, 16)]
    [0.806, 1.0]
    >>> [round(bound, 3) for bound in wilson(882, 900)]
    [0.969, 0.987]
    >>> wilson(4, 4)[1], wilson(0, 7)[0]
    (1.0, 0.0)
    """
    # Unlike the normal approximation, the interval is not empty for 0 or all hits, where few
    # samples would pass as certain.
    square = _NORMAL**2
    share = hits / count
    centre = share + square / (2 * count)
    spread = _NORMAL * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    scale = 1 + square / count
    # Of no hits the lower bound is 0, and of all hits the upper one 1, without rounding errors.
    least = (centre - spread) / scale if hits else 0.0
    most = (centre + spread) / scale if hits < count else 1.0
    return least, most


def decibels(value: float, below: float | None = None) -> str:
    """Return a ratio in dB with two decimals, or more for a ratio near a bound.

    >>> decibels(31.256), decibels(-0.001), decibels(float("inf")), decibels(9.9997, below=10)
    ('31.26', '0.00', 'inf', '9.9997')
    """
    return near_limits(value, [] if below is None else [below])
