"""derived: a statistic of one kind read off a richer one, as if it had been measured itself."""

from __future__ import annotations

from calibrators.base import Statistic
from calibrators.extremes import Extremes, MeanExtremes, MovingExtremes
from calibrators.grouped import GroupedHistogram
from calibrators.histogram import Histogram


def derived(statistic: Statistic, wanted: Statistic) -> Statistic | None:
    """Derive another statistic of the same values from a measured one; None if that is impossible.

    Args:
        statistic: what was measured.
        wanted: an empty statistic of the kind that is needed.

    >>> import numpy as np
    >>> measured = GroupedHistogram()
    >>> measured.observe(np.float32([[1, 2]]))
    >>> measured.observe(np.float32([[-3, 4]]))
    >>> derived(measured, Extremes())
    Extremes(lo=array([-3.]), hi=array([4.]), nonfinite=0)
    """
    # A moving average depends on the order of the batches, which no other statistic keeps.
    if isinstance(wanted, MovingExtremes):
        if not isinstance(statistic, MovingExtremes):
            return None
        return statistic if statistic.constant == wanted.constant else None
    if type(statistic) is type(wanted):
        return statistic
    result: Statistic | None = None
    if type(wanted) is Extremes and isinstance(statistic, Extremes | Histogram):
        # All of these statistics track the exact extremes next to their counts or sums.
        result = Extremes(statistic.lo, statistic.hi, statistic.nonfinite)
    # A grouped histogram is measured sample by sample, as the means are.
    elif type(wanted) is MeanExtremes and isinstance(statistic, MeanExtremes):
        result = MeanExtremes(
            statistic.lo,
            statistic.hi,
            statistic.nonfinite,
            statistic.sums,
            statistic.batches,
        )
    elif type(wanted) is Histogram and isinstance(statistic, GroupedHistogram):
        # Without values there are no rows to add up.
        result = statistic.whole() if statistic.lo.size else Histogram()
    return result
