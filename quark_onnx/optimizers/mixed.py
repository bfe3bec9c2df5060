"""AutoMixedPrecision: give nodes more or fewer bits, so that the outputs reach a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from calibrators import Best, MinMSE
from calibrators.base import is_number
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import Override, QConfig, QuantizationSpec, name_tuple
from quark_onnx.config.checks import require, require_one_of
from quark_onnx.config.spec import spec_of
from quark_onnx.dtypes import INT8, INT16, UINT8, UINT16, Integer
from quark_onnx.optimizers.base import register, require_number, require_whole

#: Outputs of a model: a list of arrays for each sample.
Outputs = Sequence[Sequence[Any]]
#: Distance of outputs from those of the float model.
Distance = Callable[[Outputs, Outputs], float]

#: Format of a changed node in words, by the setting ``to``.
_WORDS = {
    "16bit": "16 bits",
    "float": "float",
    "8bit_weights": "8-bit weights",
    "8bit": "8 bits",
}


@register
@dataclass(frozen=True)
class AutoMixedPrecision:
    """Mix number formats so that the outputs reach a target.

    To raise, every node is quantized alone, and the error that it causes at the outputs is
    measured. The worst are raised, as many as it takes; then those that turn out not to be needed
    are lowered again. To lower (``"8bit"``), the model starts with 16 bits, every node is lowered
    alone, and as many nodes as the target allows are lowered, the least harmful first.

    Attributes:
        target: the least signal-to-noise ratio of any output in dB; with a metric, its greatest
            loss; with a distance, the greatest distance.
        to: "16bit" for activations of 16 bits, "float" to leave nodes float, "8bit_weights" for
            weights of 8 bits instead of fewer; "8bit" to lower activations and weights of 16 bits.
        samples: number of samples on which the error is measured.
        share: greatest share of the nodes (with such weights, for "8bit_weights") to raise, even if
            the target is missed then; or to lower.
        activation: quantization of changed activations: a ``QuantizationSpec``, or a mapping of its
            settings; None follows from the configuration and ``to``.
        weight: quantization of changed weights; None likewise.
        metric: maps a model to a number, the higher the better; None for the signal-to-noise ratio.
        distance: maps the outputs of the float model and those of the quantized one, a list of
            arrays for each sample, to a number, the lower the better; instead of a metric.
        nodes: name patterns of the nodes that may be changed; all nodes if ``op_types`` is empty,
            too.
        op_types: operator types of the nodes that may be changed.
        exclude: name patterns of nodes that must not be changed.
    """

    name: ClassVar[str] = "auto_mixed_precision"
    stage: ClassVar[str] = "plan"
    reads_data: ClassVar[bool] = True

    target: float = 20.0
    to: str = "16bit"
    samples: int = 8
    share: float = 1.0
    activation: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    metric: Callable[[Any], float] | None = None
    distance: Distance | None = None
    nodes: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_number(self, "target")
        require_whole(self, "samples")
        require_one_of(f"to of {self.name}", self.to, _WORDS)
        require(
            is_number(self.share) and 0 < self.share <= 1,
            f"share of {self.name}",
            self.share,
            "above 0 and at most 1",
        )
        for name in ("activation", "weight"):
            spec = getattr(self, name)
            if isinstance(spec, dict):
                # The dataclass is frozen, and files give all settings of a spec as a mapping.
                spec = spec_of(spec, None, f"{name} of {self.name}")
                object.__setattr__(self, name, spec)
            require(
                isinstance(spec, QuantizationSpec | None),
                f"{name} of {self.name}",
                spec,
                "a QuantizationSpec or None",
            )
        self._check_goal()
        for name in ("nodes", "op_types", "exclude"):
            names = name_tuple(getattr(self, name), f"{name} of {self.name}")
            # The dataclass is frozen, and callers may give one text or a list.
            object.__setattr__(self, name, names)

    def _check_goal(self) -> None:
        """Raise ConfigError where a metric or a distance cannot be called, or both are given."""
        for name, wanted in (
            ("metric", "take a model and return a number"),
            ("distance", "take the outputs of two models and return a number"),
        ):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(
                    f"{name} of {self.name} is {function!r}; it must {wanted}"
                )
        if self.metric is not None and self.distance is not None:
            raise ConfigError(
                f"{self.name} has a metric and a distance; choose one of them",
            )

    @property
    def of_weights(self) -> bool:
        """Whether weights are raised."""
        return self.to == "8bit_weights"

    @property
    def lowers(self) -> bool:
        """Whether the model starts with 16 bits, and nodes get fewer."""
        return self.to == "8bit"

    def check(self, config: QConfig) -> None:
        """Raise ConfigError if a configuration leaves nothing to change."""
        if self.of_weights and not self.narrow(config.weight):
            raise ConfigError(
                f"to of {self.name} is '8bit_weights', but no weights are integers of"
                " fewer bits; choose 16bit",
            )
        lowered = (
            self.activation,
            self.weight,
            self._lowered(config.activation),
            self._lowered(config.weight),
        )
        if self.lowers and not any(lowered):
            raise ConfigError(
                f"to of {self.name} is '8bit', but neither activations nor weights are"
                " integers of 16 bits; start from the preset A16W8, or choose 16bit",
            )

    def narrow(self, spec: QuantizationSpec | None) -> bool:
        """Return whether weights of this kind can be raised."""
        return (
            spec is not None
            and isinstance(spec.dtype, Integer)
            and spec.dtype.bits < INT8.bits
        )

    def override(self, nodes: tuple[str, ...], config: QConfig) -> Override:
        """Return the override for changed nodes."""
        if self.lowers:
            activation = self.activation or self._lowered(config.activation)
            return Override(
                nodes=nodes,
                activation=activation,
                weight=self.weight or self._lowered(config.weight),
            )
        if self.of_weights and config.weight is not None:
            # The sign stays, so that zero points keep their meaning.
            wide = INT8 if getattr(config.weight.dtype, "signed", False) else UINT8
            return Override(
                nodes=nodes,
                weight=self.weight or config.weight.with_(dtype=wide),
            )
        spec = self._raised(config.activation)
        # Nodes without a format of 16 bits stay float altogether.
        keep = spec is None
        return Override(
            nodes=nodes,
            keep=keep,
            activation=spec,
            weight=None if keep else self.weight,
        )

    def word(self, config: QConfig) -> str:
        """Return the format of a changed node in words."""
        if self.of_weights or self.to == "float":
            return _WORDS[self.to]
        if self.activation is not None:
            return self.activation.dtype.name
        stays = not self.lowers and self._raised(config.activation) is None
        return _WORDS["float" if stays else self.to]

    def _raised(self, spec: QuantizationSpec | None) -> QuantizationSpec | None:
        """Return the activations of a raised node.

        None if they stay float, or have enough bits already.
        """
        if self.to != "16bit":
            return None
        if self.activation is not None:
            return self.activation
        # Dynamic scales are those of 8-bit products (DynamicQuantizeLinear writes uint8).
        if spec is None or spec.dynamic or spec.dtype.bits >= INT16.bits:
            return None
        signed = getattr(spec.dtype, "signed", False)
        return spec.with_(
            dtype=INT16 if signed else UINT16,
            # A float scale of 16 bits has codes enough for the whole range.
            calibrator="minmse" if spec.pow2 else "minmax",
            reduce_range=False,
        )

    def _lowered(self, spec: QuantizationSpec | None) -> QuantizationSpec | None:
        """Return the quantization of a lowered node; None without integers of 16 bits."""
        if (
            spec is None
            or not isinstance(spec.dtype, Integer)
            or spec.dtype.bits != INT16.bits
        ):
            return None
        # 8 bits need a calibrator that clips outliers, as the presets of 8 bits have.
        narrow = INT8 if spec.dtype.signed else UINT8
        return spec.with_(
            dtype=narrow,
            calibrator=MinMSE() if spec.pow2 else Best(),
        )
