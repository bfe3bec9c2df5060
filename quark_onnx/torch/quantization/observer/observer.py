"""Observers: AMD Quark's names for how a range is found; each stands for a calibrator.

Histogram observers look for the range of least squared error, as PyTorch's does; so does MSE.
"""

from __future__ import annotations

from typing import ClassVar

from calibrators import Calibrator, MinMax, MinMSE, Percentile


class Observer:
    """Base of the names.

    Attributes:
        calibrator: how the range is found.
        scheme: what a scale belongs to; "" where the number format says so.
        pow2: scales are powers of two.
    """

    calibrator: ClassVar[Calibrator] = MinMax()
    scheme: ClassVar[str] = ""
    pow2: ClassVar[bool] = False


class PlaceholderObserver(Observer):
    """Nothing is to be found: a cast."""


class PerTensorMinMaxObserver(Observer):
    """The least and the greatest value."""

    scheme = "per_tensor"


class PerTensorHistogramObserver(PerTensorMinMaxObserver):
    """The range of least squared error, on a histogram."""

    calibrator = MinMSE()


class PerTensorHistogramObserverPro(PerTensorHistogramObserver):
    """The range of least squared error, on a histogram."""


class PerTensorMSEObserver(PerTensorHistogramObserver):
    """The range of least squared error."""


class PerTensorPercentileObserver(PerTensorMinMaxObserver):
    """The range of nearly all values."""

    calibrator = Percentile()


class PerTensorPowOf2MinMaxObserver(PerTensorMinMaxObserver):
    """The least and the greatest value; the scale is a power of two."""

    pow2 = True


class PerTensorPowOf2MinMSEObserver(PerTensorMSEObserver):
    """The power of two with the least squared error."""

    pow2 = True


class PerChannelMinMaxObserver(Observer):
    """The least and the greatest value of each channel, or token."""

    scheme = "per_channel"


class PerChannelPowOf2MinMaxObserver(PerChannelMinMaxObserver):
    """The least and the greatest value of each channel; scales are powers of two."""

    pow2 = True


class PerGroupMinMaxObserver(Observer):
    """The least and the greatest value of each group."""

    scheme = "per_group"


class PerBlockMXObserver(Observer):
    """The greatest magnitude of each block of a microscaling format."""

    scheme = "per_group"


class PerBlockBFPObserver(Observer):
    """The greatest magnitude of each block of a block floating point format."""


#: All of them, by name.
OBSERVERS: dict[str, type[Observer]] = {
    cls.__name__: cls
    for cls in (
        PlaceholderObserver,
        PerTensorMinMaxObserver,
        PerTensorHistogramObserver,
        PerTensorHistogramObserverPro,
        PerTensorMSEObserver,
        PerTensorPercentileObserver,
        PerTensorPowOf2MinMaxObserver,
        PerTensorPowOf2MinMSEObserver,
        PerChannelMinMaxObserver,
        PerChannelPowOf2MinMaxObserver,
        PerGroupMinMaxObserver,
        PerBlockMXObserver,
        PerBlockBFPObserver,
    )
}
#: By what the helpers of specs call their method.
METHODS: dict[str, type[Observer]] = {
    "min_max": PerTensorMinMaxObserver,
    "histogram": PerTensorHistogramObserver,
    "histogrampro": PerTensorHistogramObserverPro,
    "MSE": PerTensorMSEObserver,
    "percentile": PerTensorPercentileObserver,
}
