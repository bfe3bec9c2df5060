"""AutoMixedPrecision: as few nodes as possible get more bits, so that the outputs are as good as asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from calibrators.base import is_number
from quark_onnx.config import Override, QConfig, QuantizationSpec
from quark_onnx.dtypes import INT8, INT16, UINT8, UINT16, Integer
from quark_onnx.errors import ConfigError
from quark_onnx.optimizers.base import register, require_number, require_whole

#: What a raised node gets, in words, by the setting.
_WORDS = {"16bit": "16 bits", "float": "float", "8bit_weights": "8-bit weights"}


@register
@dataclass(frozen=True)
class AutoMixedPrecision:
    """Finds the nodes that few bits serve worst and gives them more, until the outputs reach a target.

    Every node is quantized alone, and the error that it causes at the outputs is measured. The worst are raised, as
    many as it takes; then those that turn out not to be needed are lowered again.

    Attributes:
        target: the least signal-to-noise ratio of any output in dB; with a metric, the greatest loss of it.
        to: "16bit" for activations of 16 bits, "float" to leave nodes float, "8bit_weights" for weights of 8 bits
            where they have fewer.
        samples: on how many samples the error is measured.
        share: at most this share of the nodes (of those with such weights, where it is about weights) is raised, also
            where the target is missed then.
        metric: takes a model and gives a number, the higher the better; None for the signal-to-noise ratio.
    """

    name: ClassVar[str] = "auto_mixed_precision"
    stage: ClassVar[str] = "plan"
    reads_data: ClassVar[bool] = True

    target: float = 20.0
    to: str = "16bit"
    samples: int = 8
    share: float = 1.0
    metric: Callable[[Any], float] | None = None

    def __post_init__(self) -> None:
        require_number(self, "target")
        require_whole(self, "samples")
        if self.to not in tuple(_WORDS):  # what is given may have no hash
            raise ConfigError(f"to of {self.name} is {self.to!r}; it must be one of: {', '.join(_WORDS)}")
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ConfigError(f"share of {self.name} is {self.share!r}; it must be above 0 and at most 1")
        if self.metric is not None and not callable(self.metric):
            raise ConfigError(f"metric of {self.name} is {self.metric!r}; it must take a model and return a number")

    @property
    def of_weights(self) -> bool:
        """Whether weights are what is raised."""
        return self.to == "8bit_weights"

    def narrow(self, spec: QuantizationSpec | None) -> bool:
        """Whether weights of this kind can be raised."""
        return spec is not None and isinstance(spec.dtype, Integer) and spec.dtype.bits < INT8.bits

    def override(self, nodes: tuple[str, ...], config: QConfig) -> Override:
        """The decision for raised nodes."""
        if self.of_weights and config.weight is not None:
            wide = INT8 if getattr(config.weight.dtype, "signed", False) else UINT8
            return Override(nodes=nodes, weight=config.weight.with_(dtype=wide))
        spec = self._raised(config.activation)
        return Override(nodes=nodes, keep=True) if spec is None else Override(nodes=nodes, activation=spec)

    def word(self, config: QConfig) -> str:
        """What becomes of a raised node."""
        return _WORDS["float" if not self.of_weights and self._raised(config.activation) is None else self.to]

    def _raised(self, spec: QuantizationSpec | None) -> QuantizationSpec | None:
        """The activations of a raised node; None where they stay float, or have that many bits already."""
        if self.to != "16bit" or spec is None or spec.dynamic or spec.dtype.bits >= INT16.bits:
            return None
        signed = getattr(spec.dtype, "signed", False)
        wide = INT16 if signed else UINT16
        return spec.with_(dtype=wide, calibrator="minmse" if spec.pow2 else "minmax", reduce_range=False)
