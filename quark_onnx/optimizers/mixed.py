"""AutoMixedPrecision: as few nodes as possible get more bits, so that the outputs are as good as asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from calibrators.base import is_number
from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import INT16, UINT16
from quark_onnx.errors import ConfigError
from quark_onnx.optimizers.base import register, require_number, require_whole


@register
@dataclass(frozen=True)
class AutoMixedPrecision:
    """Finds the nodes that few bits serve worst and gives them more, until the outputs reach a target.

    Every node is quantized alone, and the error that it causes at the outputs is measured. The worst are raised, as
    many as it takes; then those that turn out not to be needed are lowered again.

    Attributes:
        target: the least signal-to-noise ratio of any output in dB; with a metric, the greatest loss of it.
        to: "16bit" for activations of 16 bits, "float" to leave nodes float.
        samples: on how many samples the error is measured.
        share: at most this share of the nodes is raised, also where the target is missed then.
        metric: takes a model and gives a number, the higher the better; None for the signal-to-noise ratio.
    """

    name: ClassVar[str] = "auto_mixed_precision"
    stage: ClassVar[str] = "plan"
    needs_data: ClassVar[bool] = True

    target: float = 20.0
    to: str = "16bit"
    samples: int = 8
    share: float = 1.0
    metric: Callable[[Any], float] | None = None

    def __post_init__(self) -> None:
        require_number(self, "target")
        require_whole(self, "samples")
        if self.to not in ("16bit", "float"):
            raise ConfigError(f"to of {self.name} is {self.to!r}; it must be 16bit or float")
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ConfigError(f"share of {self.name} is {self.share!r}; it must be above 0 and at most 1")
        if self.metric is not None and not callable(self.metric):
            raise ConfigError(f"metric of {self.name} is {self.metric!r}; it must take a model and return a number")

    def raised(self, spec: QuantizationSpec | None) -> QuantizationSpec | None:
        """The activations of a raised node; None where they stay float, or have that many bits already."""
        if self.to == "float" or spec is None or spec.dynamic or spec.dtype.bits >= INT16.bits:
            return None
        signed = getattr(spec.dtype, "signed", False)
        wide = INT16 if signed else UINT16
        return spec.with_(dtype=wide, calibrator="minmse" if spec.pow2 else "minmax", reduce_range=False)
