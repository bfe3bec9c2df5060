"""Observers: AMD Quark's names of calibration methods.

Histogram observers minimize the squared error, as in PyTorch; so do MSE observers.
"""

from __future__ import annotations

from typing import ClassVar

from calibrators import Calibrator, MinMax, MinMSE, Percentile


class Observer:
    """Base of observers.

    Attributes:
        calibrator: the calibration method.
        scheme: the granularity of scales; "" if the number format implies it.
        pow2: whether scales are powers of two.
    """

    calibrator: ClassVar[Calibrator] = MinMax()
    scheme: ClassVar[str] = ""
    pow2: ClassVar[bool] = False


class PlaceholderObserver(Observer):
    """Observer of a cast, without a range."""


class PerTensorMinMaxObserver(Observer):
    """Observer of the per-tensor minimum and maximum."""

    scheme = "per_tensor"


class PerTensorHistogramObserver(PerTensorMinMaxObserver):
    """Observer of the per-tensor range of least squared error, with a histogram."""

    # PyTorch's HistogramObserver searches for the range of least squared error, too.
    calibrator = MinMSE()


class PerTensorHistogramObserverPro(PerTensorHistogramObserver):
    """Observer of the per-tensor range of least squared error, with a histogram."""


class PerTensorMSEObserver(PerTensorHistogramObserver):
    """Observer of the per-tensor range of least squared error."""


class PerTensorPercentileObserver(PerTensorMinMaxObserver):
    """Observer of per-tensor percentiles."""

    # The default percentile of the calibrator.
    calibrator = Percentile()


class PerTensorPowOf2MinMaxObserver(PerTensorMinMaxObserver):
    """Observer of the per-tensor minimum and maximum, with power-of-two scales."""

    pow2 = True


class PerTensorPowOf2MinMSEObserver(PerTensorMSEObserver):
    """Observer of the per-tensor power-of-two scale of least squared error."""

    pow2 = True


class PerChannelMinMaxObserver(Observer):
    """Observer of the per-channel or per-token minimum and maximum."""

    scheme = "per_channel"


class PerChannelPowOf2MinMaxObserver(PerChannelMinMaxObserver):
    """Observer of the per-channel minimum and maximum, with power-of-two scales."""

    pow2 = True


class PerGroupMinMaxObserver(Observer):
    """Observer of the per-group minimum and maximum."""

    scheme = "per_group"


class PerBlockMXObserver(Observer):
    """Observer of the maximum magnitude of microscaling blocks."""

    scheme = "per_group"


class PerBlockBFPObserver(Observer):
    """Observer of the maximum magnitude of block-floating-point blocks."""


#: Observers by name.
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
#: Observers by ``observer_method`` of the spec helpers.
METHODS: dict[str, type[Observer]] = {
    "min_max": PerTensorMinMaxObserver,
    "histogram": PerTensorHistogramObserver,
    "histogrampro": PerTensorHistogramObserverPro,
    "MSE": PerTensorMSEObserver,
    "percentile": PerTensorPercentileObserver,
}
