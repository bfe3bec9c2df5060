"""Numbers as text, rounded without becoming wrong."""

from __future__ import annotations


def size_change(before: int, after: int) -> str:
    """Return two sizes in bytes, with the ratio if rounding preserves the reduction.

    >>> size_change(4000, 1000)
    '4,000 -> 1,000 bytes (4.00x smaller)'
    >>> size_change(1001, 1000)
    '1,001 -> 1,000 bytes'
    """
    sizes = f"{before:,} -> {after:,} bytes"
    ratio = f"{before / max(1, after):.2f}"
    return f"{sizes} ({ratio}x smaller)" if float(ratio) > 1 else sizes


def percent(share: float, digits: int = 2) -> str:
    """Return a share as a percentage without the sign.

    The text is 100 only for the entire share, and 0 only for an empty share.

    >>> percent(0.75), percent(1.0), percent(0.999999), percent(1e-6), percent(-0.0, 1)
    ('75.00', '100.00', '>99.99', '<0.01', '0.0')
    """
    least = 10.0**-digits
    text = f"{100 * share:.{digits}f}"
    if share < 1 and float(text) >= 100:
        return f">{100 - least:.{digits}f}"
    if share > 0 and float(text) == 0:
        return f"<{least:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def percentage(share: float) -> str:
    """Return a share with sign and about two digits, never in scientific notation.

    >>> percentage(1.0), percentage(0.9999), percentage(0.0314), percentage(0.00012)
    ('100 %', '>99.9 %', '3.1 %', '0.012 %')
    >>> percentage(0.995), percentage(0.25), percentage(1e-9), percentage(0.0)
    ('99.5 %', '25 %', '<0.001 %', '0 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    size = 100 * abs(share)
    if size >= 99:
        return f"{percent(share, 1)} %"
    digits = next(
        digits for digits in range(4) if size >= 9.5 / 10**digits or digits == 3
    )
    return f"{percent(share, digits)} %"


def decibels(value: float, below: float | None = None) -> str:
    """Return a ratio in dB with two decimals, or more for a ratio just below a bound.

    >>> decibels(31.256), decibels(-0.001), decibels(float("inf")), decibels(9.9997, below=10)
    ('31.26', '0.00', 'inf', '9.9997')
    """
    text = f"{value:.2f}"
    if below is not None and value < below <= float(text):
        return repr(float(value))
    return text.removeprefix("-") if float(text) == 0 else text
