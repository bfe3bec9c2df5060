"""TensorOverride: different decisions for certain tensors, by name."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators import CALIBRATORS
from calibrators.base import Calibrator, is_number
from calibrators.shown import clipped, short
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.registry import DTYPES
from quark_onnx.config.checks import (
    Requirement,
    is_integer,
    one_of,
    optional,
    require,
    require_all,
)
from quark_onnx.config.spec import (
    QuantizationSpec,
    check_names,
    format_calibrator,
    parse_calibrator,
    settings_of,
)
from quark_onnx.config.text import changed_settings, name_tuple
from quark_onnx.dtypes import DType, Scaled

_FLOAT32 = float(np.finfo(np.float32).max)
_FLAGS = ("symmetric", "reduce_range")
#: Settings from which a scale follows; a given scale excludes them.
_RANGE_SETTINGS = (*_FLAGS, "low", "high")
_SWITCHES = ("keep", "dedicated", "stored", "raised", "snapped")


#: Types and ranges of single settings. Numbers 0 and 1 are taken for false and true.
_REQUIREMENTS = (
    *(
        Requirement(name, one_of(True, False, None), "true or false")
        for name in (*_FLAGS, "narrow")
    ),
    *(Requirement(name, one_of(True, False), "true or false") for name in _SWITCHES),
    Requirement("axis", optional(is_integer), "a whole number"),
    Requirement(
        "min_range",
        lambda value: is_number(value) and 0 <= value < math.inf,
        "a finite number, 0 or more",
    ),
)


@dataclass(frozen=True)
class TensorOverride:
    """The quantization of tensors with given names.

    Settings at their defaults follow the rules. Several overrides of a tensor are merged; later
    ones take precedence, and one with a format or a range ends an earlier ``keep``.

    Attributes:
        tensors: tensor names or globs (``"/head/*"``).
        readers: apply to these nodes only, by name; empty for every reader. Other readers get the
            other format.
        keep: leave these tensors float; optimizers may still change their values.
        dtype: the number format, or its name.
        symmetric: as in a ``QuantizationSpec``.
        reduce_range: as in a ``QuantizationSpec``.
        narrow: as in a ``QuantizationSpec``.
        axis: axis of per-channel scales.
        calibrator: calibrator of an activation. It may be a text, as in a ``QuantizationSpec``.
            A tensor that only moves values has the range of its source.
        low: lower end of the range, one number or one per channel, instead of a measured one.
        high: upper end of the range, likewise.
        scale: one number or one per channel, with ``zero_point``; no range is then needed.
        zero_point: one number or one per channel, with ``scale``.
        min_range: least width of the range; its upper end is moved.
        dedicated: each reader has its own Q/DQ pair, instead of a shared one.
        stored: store a constant as codes; False leaves it float, followed by a Q/DQ pair.
        raised: the scale of a weight may be raised to hold a bias in int32; a bias that does not
            fit stays float.
        snapped: the zero point of an activation is the least code if nothing is negative, and the
            middle otherwise.

    >>> TensorOverride("image", scale=1 / 255, zero_point=0).zero_point
    (0,)
    """

    tensors: tuple[str, ...]
    readers: tuple[str, ...] = ()
    keep: bool = False
    dtype: DType | None = None
    symmetric: bool | None = None
    reduce_range: bool | None = None
    narrow: bool | None = None
    axis: int | None = None
    calibrator: Calibrator | None = None
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()
    min_range: float = 0.0
    dedicated: bool = False
    stored: bool = True
    raised: bool = True
    snapped: bool = False

    # The accepted types; the stored values are tuples.
    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913  the fields
            self,
            tensors: str | Iterable[str],
            readers: str | Iterable[str] = (),
            keep: bool = False,
            dtype: DType | str | None = None,
            symmetric: bool | None = None,
            reduce_range: bool | None = None,
            narrow: bool | None = None,
            axis: int | None = None,
            calibrator: Calibrator | str | None = None,
            low: float | Sequence[float] = (),
            high: float | Sequence[float] = (),
            scale: float | Sequence[float] = (),
            zero_point: int | Sequence[int] = (),
            min_range: float = 0.0,
            dedicated: bool = False,
            stored: bool = True,
            raised: bool = True,
            snapped: bool = False,
        ) -> None: ...

    def __str__(self) -> str:
        changes = changed_settings(self)
        del changes["tensors"]
        if self.calibrator is not None:
            changes["calibrator"] = format_calibrator(self.calibrator)
        settings = [
            f"{name} {clipped(str(value), 100)}" for name, value in changes.items()
        ]
        return f"{', '.join(self.tensors)}: {', '.join(settings)}"

    def __post_init__(self) -> None:
        for name in ("tensors", "readers"):
            names = name_tuple(getattr(self, name), f"{name} of an override of tensors")
            object.__setattr__(self, name, names)
        if not self.tensors:
            raise ConfigError("an override of tensors names none; give tensors")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", self._format(self.dtype))
        calibrator: object = self.calibrator
        if isinstance(calibrator, str):
            object.__setattr__(self, "calibrator", parse_calibrator(calibrator))
        for name in ("low", "high", "scale", "zero_point"):
            object.__setattr__(self, name, self._numbers(name))
        self._check_types()
        self._check_together()

    def _check_types(self) -> None:
        require_all(self, _REQUIREMENTS, f" of {self.where}")
        require(
            self.calibrator is None or hasattr(self.calibrator, "statistic"),
            f"calibrator of {self.where}",
            self.calibrator,
            f"a calibrator{nearest('', CALIBRATORS)}",
        )

    def _check_together(self) -> None:
        """Raise an error for contradictory settings."""
        if bool(self.scale) != bool(self.zero_point):
            raise ConfigError(
                f"{self.where} has a scale or a zero_point; both belong together",
            )
        # low and high are empty if not given, the flags None
        clash = [
            name for name in _RANGE_SETTINGS if getattr(self, name) not in (None, ())
        ]
        if self.scale and clash:
            raise ConfigError(
                f"{self.where} has a scale, and {clash[0]}, from which a scale would"
                " follow; give one",
            )
        require(
            all(0 < scale < math.inf for scale in self.scale),
            f"scale of {self.where}",
            self.scale,
            "greater than 0",
        )
        if self.calibrator is not None and self.known:
            raise ConfigError(
                f"{self.where} has a calibrator, and a range or a scale, which leaves nothing"
                " to measure; give one",
            )
        self._check_range()

    def _check_range(self) -> None:
        """Raise an error for a range that no scale covers."""
        for name in ("low", "high"):
            ends = getattr(self, name)
            require(
                all(abs(end) <= _FLOAT32 for end in ends),
                f"{name} of {self.where}",
                ends,
                "finite in float32",
            )
        # One number holds for every channel. Lengths that differ are an error of the plan, which
        # knows the channels.
        several = len(self.low) > 1 and len(self.high) > 1
        if several and len(self.low) != len(self.high):
            return
        # Ends that are swapped would give a range of nothing but zero.
        if np.any(np.asarray(self.low) > np.asarray(self.high)):
            raise ConfigError(
                f"low of {self.where} is {short(self.low)}, above high {short(self.high)}",
            )

    def _format(self, value: object) -> DType:
        """Return a number format from its name, or as it is.

        Raises:
            ConfigError: the value is no number format.
        """
        row = DTYPES[value] if isinstance(value, str) else value
        if isinstance(row, DType):
            return row
        raise ConfigError(
            f"dtype of {self.where} is {short(value)}; it must be a number"
            f" format{nearest('', DTYPES)}",
        )

    def _numbers(self, name: str) -> tuple[Any, ...]:
        """Return a setting as a tuple of numbers: whole ones for zero points.

        Args:
            name: the setting; its value is a number, or one for each channel.

        Raises:
            ConfigError: the value holds anything else.
        """
        value = getattr(self, name)
        # A string is no sequence of numbers: it stays one item, and is refused below.
        items = (value,)
        if not isinstance(value, str):
            # Scalars of numpy become Python numbers, which YAML can write.
            items = tuple(np.asarray(value).reshape(-1).tolist())
        require(
            all(map(is_number, items)),
            f"{name} of {self.where}",
            value,
            "a number, or one for each channel",
        )
        require(
            name != "zero_point" or all(float(item).is_integer() for item in items),
            f"zero_point of {self.where}",
            value,
            "a whole number",
        )
        return tuple(
            int(item) if name == "zero_point" else float(item) for item in items
        )

    @property
    def where(self) -> str:
        """The patterns, for messages."""
        return f"the override of tensor {', '.join(self.tensors)}"

    @property
    def decides(self) -> bool:
        """Whether a tensor gets a separate scale.

        A range alone does not separate a moved tensor from its source.
        """
        # None stands for "as the rules decide", whereas False is a decision.
        settings = (
            self.dtype,
            self.symmetric,
            self.reduce_range,
            self.narrow,
            self.axis,
        )
        return any(setting is not None for setting in settings) or bool(self.scale)

    @property
    def separates(self) -> bool:
        """Whether a tensor cannot share the scale of its source."""
        return self.decides or self.keep

    @property
    def known(self) -> bool:
        """Whether nothing has to be measured."""
        return bool(self.scale or (self.low and self.high))

    @property
    def ranged(self) -> bool:
        """Whether a range is given, or a rule for ranges."""
        return any((self.low, self.high, self.min_range, self.snapped))

    @property
    def gives_range(self) -> bool:
        """Whether a range, an end of it, or a scale is given."""
        return any((self.low, self.high, self.scale))

    def applied(self, spec: QuantizationSpec) -> QuantizationSpec:
        """Apply the override to the rules' spec.

        Args:
            spec: quantization of the tensor by the rules; it is not changed.

        Returns:
            The spec with the given format and flags. The scale, the range and the zero point of the
            override are not part of a spec.

        Raises:
            ConfigError: the number format has no scale, and one is given.
        """
        # Only settings that differ: ``with_`` of a new format resets the rule for exponents.
        flags = {name: getattr(self, name) for name in (*_FLAGS, "narrow")}
        changes = {name: value for name, value in flags.items() if value is not None}
        if self.dtype not in (None, spec.dtype):
            changes["dtype"] = self.dtype
        if self.calibrator is not None:
            changes["calibrator"] = self.calibrator
        changed = spec.with_(**changes) if changes else spec
        # Checked here, since the format may be that of the rules.
        self._check_scaled(changed.dtype)
        return changed

    def _check_scaled(self, dtype: DType) -> None:
        """Raise ConfigError if a scale or a range is given for a format without a scale."""
        needs_scale = self.scale or self.low or self.high
        if needs_scale and not isinstance(dtype, Scaled):
            raise ConfigError(
                f"{self.where} has a scale or a range, which {dtype.name} does not have",
            )

    def bounds(
        self, low: NDArray[np.float64], high: NDArray[np.float64]
    ) -> tuple[Any, Any]:
        """Return the range with given ends instead of measured ones.

        Args:
            low: measured lower end, one value or one for each channel.
            high: measured upper end, of the same shape.

        Returns:
            The lower and the upper end in float64.
        """
        # An empty tuple stands for the measured end.
        low = np.asarray(self.low or low, np.float64)
        high = np.asarray(self.high or high, np.float64)
        if self.min_range:
            # The upper end moves, as by onnxruntime's MinimumRealRange.
            high = np.maximum(high, low + self.min_range)
        return low, high

    def matches(self, tensor: str) -> bool:
        """Return whether a tensor's name matches."""
        return any(
            # A name that holds brackets does not match itself as a glob.
            tensor == name or fnmatch.fnmatchcase(tensor, name)
            for name in self.tensors
        )

    def merged(self, later: TensorOverride) -> TensorOverride:
        """Return the override changed by a later override.

        Args:
            later: an override for the same tensor; its settings apart from the defaults take
                precedence. The last one that keeps the tensor or gives a format or a range decides
                whether it is quantized.
        """
        changes = {
            name: value
            for name, value in changed_settings(later).items()
            if name not in ("tensors", "readers")
        }
        if not later.keep and (later.decides or later.low or later.high):
            changes["keep"] = False
        # A scale, and settings from which one would follow, replace each other.
        replaced: tuple[str, ...] = ()
        if later.scale:
            replaced = _RANGE_SETTINGS
        elif not changes.keys().isdisjoint(_RANGE_SETTINGS):
            replaced = ("scale", "zero_point")
        for setting in replaced:
            # The later override has the default where it does not decide.
            changes.setdefault(setting, getattr(later, setting))
        return replace(self, **changes)


def tensor_override_of(data: object) -> TensorOverride:
    """Return an override of tensors from a dictionary of settings, or as it is.

    Args:
        data: a ``TensorOverride``, or its settings by name.

    Raises:
        ConfigError: the data is no dictionary, names no tensors, or has an unknown setting.
    """
    if isinstance(data, TensorOverride):
        return data
    settings = settings_of(data, "an override of tensors")
    check_names(settings, TensorOverride)
    if "tensors" not in settings:
        raise ConfigError("an override of tensors names none; give tensors")
    return TensorOverride(**settings)


def tensor_calibrator(text: str) -> TensorOverride:
    """Return the override of a text ``"TENSOR=CALIBRATOR"``.

    Raises:
        ConfigError: the text has no calibrator that is known.

    >>> tensor_calibrator("a=b=minmax:moving_average=true").tensors
    ('a=b',)
    """
    # Names of tensors and settings of calibrators may hold a "=".
    parts = text.split("=")
    for count in range(1, len(parts)):
        tensor, calibrator = "=".join(parts[:count]), "=".join(parts[count:])
        if tensor and calibrator.partition(":")[0] in CALIBRATORS:
            return TensorOverride(tensor, calibrator=calibrator)
    raise ConfigError(
        f"{short(text)} is not of the form TENSOR=CALIBRATOR{nearest('', CALIBRATORS)}",
    )


def _has_wildcards(pattern: str) -> bool:
    """Return whether a pattern can match other names than itself."""
    return not set("*?[").isdisjoint(pattern)


class TensorOverrides:
    """The overrides of a configuration, looked up by tensor and reader."""

    def __init__(self, overrides: Iterable[TensorOverride] = ()) -> None:
        self._all = tuple(overrides)
        # Most overrides name tensors, which a table finds: a model may have one for each tensor.
        self._named: dict[str, list[int]] = {}
        self._globs: list[int] = []
        for index, override in enumerate(self._all):
            for pattern in override.tensors:
                self._named.setdefault(pattern, []).append(index)
            if any(map(_has_wildcards, override.tensors)):
                self._globs.append(index)
        # A rule's request looks up twice, and matching globs is slow.
        self._found: dict[tuple[str, str], TensorOverride | None] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def of(self, tensor: str, reader: str = "") -> TensorOverride | None:
        """Return the merged override of a tensor as read by a node, if any.

        Args:
            tensor: name of the tensor.
            reader: name of the node; empty for the producer and all readers that are not named.
        """
        if not self._all:
            return None
        key = (tensor, reader)
        if key not in self._found:
            self._found[key] = self._merged(tensor, reader)
        return self._found[key]

    def _merged(self, tensor: str, reader: str) -> TensorOverride | None:
        """Merge the overrides of a tensor as read by a node, in the order of the configuration.

        Args:
            reader: name of the node; empty for the producer and all readers that are not named.

        Returns:
            The merged override; None if none matches.
        """
        indices = set(self._named.get(tensor, ()))
        indices.update(
            index for index in self._globs if self._all[index].matches(tensor)
        )
        merged: TensorOverride | None = None
        for index in sorted(indices):
            override = self._all[index]
            # A decision for named readers is none for the producer, whose name is empty.
            if not override.readers or reader in override.readers:
                merged = merged.merged(override) if merged else override
        return merged

    def unmatched(self, tensors: Iterable[str]) -> list[str]:
        """Return the patterns without a match among tensors."""
        # Most patterns are names: a lookup spares a scan over all tensors of the model.
        known = set(tensors)

        def matches(pattern: str) -> bool:
            # Case counts on every system, as in ``TensorOverride.matches``.
            return pattern in known or any(
                fnmatch.fnmatchcase(tensor, pattern) for tensor in known
            )

        return [
            pattern
            for override in self._all
            for pattern in override.tensors
            if not matches(pattern)
        ]
