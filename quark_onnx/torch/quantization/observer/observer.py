"""Observers: AMD Quark's names of calibration methods.

Histogram observers minimize the squared error, as in PyTorch; so do MSE observers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from calibrators import Calibrator, MinMax, MinMSE, Percentile
from calibrators.base import range_of
from quark_onnx.common.absent import (  # noqa: F401  names of AMD Quark
    PerBlock2DMinMaxObserver,
    PerBlockMXDiffsObserver,
)
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.torch.formats import affine

if TYPE_CHECKING:
    from quark_onnx.torch.quantization.config.tensor import QTensorConfig


#: Observers by name.
OBSERVERS: dict[str, type[Observer]] = {}


class Observer:
    """Base of observers, which turn the tensors of calls into a scale and a zero point.

    Args:
        qspec: the settings of the tensor.
        device: device of the results; None for that of the tensors.

    Attributes:
        calibrator: the calibration method.
        scheme: the granularity of scales; "" if the number format implies it.
        pow2: whether scales are powers of two.
    """

    calibrator: ClassVar[Calibrator] = MinMax()
    scheme: ClassVar[str] = ""
    pow2: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        OBSERVERS[cls.__name__] = cls

    def __init__(
        self, qspec: QTensorConfig, device: torch.device | str | None = None
    ) -> None:
        self.qspec, self._device = qspec, device
        name = f"{type(self).__name__}, qspec"
        self._spec = qspec.spec(name).with_(calibrator=self.calibrator)
        if self.pow2:
            self._spec = self._spec.with_(pow2=True)
        self.reset_state()

    def reset_state(self) -> None:
        """Forget the observed tensors."""
        self._statistic: Any = None
        self._type: Any = None
        self._shape: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Observe a tensor; see ``forward``."""
        return self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Observe a tensor, and return it.

        Raises:
            DataError: the tensor is infinite or no number, or has another number of channels.
        """
        if not x.numel():
            return x
        if not bool(torch.isfinite(x).all()):
            raise DataError(
                f"{type(self).__name__}: the tensor is infinite or no number"
            )
        rows, shape = self._rows(x.detach())
        # Scales of each run count the newest tensor alone; others have all of them.
        if self._statistic is None or self.qspec.is_dynamic:
            self._statistic, self._shape = self._spec.calibrator.statistic(), shape
        elif shape != self._shape:
            raise DataError(
                f"{type(self).__name__}: scales have the shape {shape}, and {self._shape}"
                " before; call reset_state first"
            )
        self._statistic.observe(rows.float().cpu().numpy())
        self._type = x.dtype
        self._device = self._device or x.device
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and the zero point of the observed tensors.

        Raises:
            ConfigError: the format has no scale, or computes the scales of blocks itself.
            DataError: no tensor was observed.
        """
        if self._statistic is None:
            raise DataError(f"{type(self).__name__} has observed no tensor")
        name = self._spec.dtype.name
        if not self._spec.dtype.scaled:
            raise ConfigError(f"{name} has no scale that an observer computes")
        ends = range_of(self._spec.calibrator, self._statistic, self._spec.grid)
        low = torch.from_numpy(ends.lo).to(self._type)
        high = torch.from_numpy(ends.hi).to(self._type)
        params = affine.params_for(low, high, self._spec)
        scale = params.scale.reshape(self._shape).to(self._device)
        zero = affine.explicit_zero(params.zero, params.scale)
        return scale, zero.reshape(self._shape).to(self._device, torch.int32)

    _calculate_qparams = calculate_qparams

    def _rows(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the values of each scale as a row, and the shape of the scales."""
        # One scale, for a tensor or for a format that computes its own.
        return x.reshape(1, -1), ()


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

    def _rows(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        axis = _axis(self.qspec, x)
        return x.movedim(axis, 0).reshape(x.shape[axis], -1), (x.shape[axis],)


class PerChannelPowOf2MinMaxObserver(PerChannelMinMaxObserver):
    """Observer of the per-channel minimum and maximum, with power-of-two scales."""

    pow2 = True


class PerChannelPowOf2MinMSEObserver(PerChannelPowOf2MinMaxObserver):
    """Observer of the per-channel power-of-two scale of least squared error."""

    calibrator = MinMSE()


class PerGroupMinMaxObserver(Observer):
    """Observer of the per-group minimum and maximum."""

    scheme = "per_group"

    def _rows(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        axis, size = _axis(self.qspec, x), self.qspec.group_size
        # -1 is one group of all values, as in AMD Quark.
        if size in (None, -1):
            size = x.shape[axis]
        if x.shape[axis] % size:
            raise DataError(
                f"{type(self).__name__}: axis {axis} has {x.shape[axis]} values, no"
                f" multiple of the group_size {size}"
            )
        groups = x.movedim(axis, -1).reshape(-1, size)
        return groups, (len(groups) // (x.shape[axis] // size), x.shape[axis] // size)


class PerBlockMXObserver(Observer):
    """Observer of the maximum magnitude of microscaling blocks."""

    scheme = "per_group"


class PerBlockMXBufferReuseObserver(PerBlockMXObserver):
    """Observer of microscaling blocks; memory is not kept between calls."""


class PerBlockBFPObserver(Observer):
    """Observer of the maximum magnitude of block-floating-point blocks."""


#: AMD Quark's names of the base classes.
ObserverBase = UniformScalingObserver = Observer
#: Observers by ``observer_method`` of the spec helpers.
METHODS: dict[str, type[Observer]] = {
    "min_max": PerTensorMinMaxObserver,
    "histogram": PerTensorHistogramObserver,
    "histogrampro": PerTensorHistogramObserverPro,
    "MSE": PerTensorMSEObserver,
    "percentile": PerTensorPercentileObserver,
}


def _axis(qspec: QTensorConfig, x: torch.Tensor) -> int:
    """Return the axis of channels or groups, counted from the front.

    Raises:
        ConfigError: there is no axis, or the tensor lacks it.
    """
    axis = qspec.ch_axis
    if axis is None or not -x.dim() <= axis < x.dim():
        raise ConfigError(
            f"ch_axis is {axis}; it must be an axis of a tensor of {x.dim()} axes"
        )
    return axis % x.dim()
