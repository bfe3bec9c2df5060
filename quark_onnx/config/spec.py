"""QuantizationSpec: the quantization of a kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import calibrators
from calibrators import CalibrationError, Calibrator, Grid, MinMax
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.registry import DTYPES
from quark_onnx.config.checks import (
    Requirement,
    require_all,
    require_choice,
    require_flags,
    require_known,
    whole,
)
from quark_onnx.config.text import format_call, parse_call
from quark_onnx.dtypes import INT8, Block, DType, Float4, Integer, Scaled
from quark_onnx.kernels.blockfloat import EXPONENTS, LEAST_ERROR

if TYPE_CHECKING:
    from typing_extensions import Self

#: Algorithms for the scales of blocks.
SOLVERS = ("nearest", "hqq")
_FLAGS = (
    "symmetric",
    "per_channel",
    "pow2",
    "narrow",
    "reduce_range",
    "saturate",
    "dynamic",
)


@dataclass(frozen=True)
class QuantizationSpec:
    """The quantization of a tensor; frozen, and composed with ``with_``.

    Attributes:
        dtype: the number format, or its name.
        symmetric: the zero point is fixed in the middle of the codes.
        per_channel: one scale per output channel of a weight (more accurate). An activation has one
            per channel (axis 1). False: one scale per weight tensor.
        pow2: scales are powers of two.
        scale: type of stored scales, float32 or float16.
        narrow: omit the least code of a signed format (-127..127 in 8 bits).
        reduce_range: leave one bit unused, for processors whose 8-bit products saturate. Symmetric
            codes of int8 are -64 to 64.
        block_size: values per group. A group has a common scale, and lies along the axis that an
            operator sums over (weights only); 0 for no groups.
        solver: algorithm for the scale of a block: "nearest", the better of two that the range
            suggests; or "hqq", which also moves the zero point (half-quadratic quantization, Badri
            and Shaji 2023).
        saturate: a 16-bit float saturates at the greatest finite value instead of infinity.
        dynamic: the scale is computed at runtime, from the values themselves (activations only).
        exponent: rule for the shared exponent of a microscaling block: "floor", "even", "ceil" or
            "rceil" (``quark_onnx.kernels.blockfloat.threshold``); for weights also "best", per
            block the better of two. "auto" is "best" for weights, and for activations the rule of
            least error, but "floor" where AMD's operator computes it.
        calibrator: how ranges are found. It is a calibrator, its name, or
            ``"name:setting=value,..."``.

    >>> spec = QuantizationSpec("uint8", symmetric=False)
    >>> spec.with_(calibrator="percentile:percentile=99.9").calibrator
    Percentile(percentile=99.9)
    """

    #: Types of scales.
    SCALES: ClassVar[tuple[str, ...]] = ("float32", "float16")
    #: Rules for shared exponents.
    EXPONENTS: ClassVar[tuple[str, ...]] = ("auto", "best", *EXPONENTS)

    dtype: DType = INT8
    symmetric: bool = True
    per_channel: bool = False
    pow2: bool = False
    scale: str = "float32"
    narrow: bool = False
    reduce_range: bool = False
    block_size: int = 0
    solver: str = "nearest"
    saturate: bool = False
    dynamic: bool = False
    exponent: str = "auto"
    calibrator: Calibrator = field(default_factory=MinMax)

    # The accepted types; names are looked up.
    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913  the fields
            self,
            dtype: DType | str = INT8,
            symmetric: bool = True,
            per_channel: bool = False,
            pow2: bool = False,
            scale: str = "float32",
            narrow: bool = False,
            reduce_range: bool = False,
            block_size: int = 0,
            solver: str = "nearest",
            saturate: bool = False,
            dynamic: bool = False,
            exponent: str = "auto",
            calibrator: Calibrator | str = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        self._resolve_names()
        require_flags(self, _FLAGS)
        require_all(self, [_BLOCK_SIZE])
        require_choice(self, "solver", SOLVERS)
        self._check_scale()
        self._check_codes()
        self._check_exponent()
        has_blocks = self.dtype.scaled and not isinstance(self.dtype, Float4)
        if self.block_size and not has_blocks:
            raise ConfigError(
                f"block_size is {self.block_size}; it is for integers and fp8,"
                f" {self.dtype.name} has no blocks, or blocks of its own"
            )
        # A class has the attribute, too: MinMax in place of MinMax() is refused below.
        has_statistic = hasattr(self.calibrator, "statistic")
        if isinstance(self.calibrator, type) or not has_statistic:
            raise ConfigError(
                f"calibrator is {short(self.calibrator)}; it must be a calibrator or a"
                f" name{nearest('', calibrators.CALIBRATORS)}",
            )

    def _resolve_names(self) -> None:
        """Look up the number format and the calibrator by name."""
        if isinstance(self.dtype, str):
            # The dataclass is frozen: resolved values bypass its guard once, before anything reads
            # them.
            object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if isinstance(self.calibrator, str):
            object.__setattr__(self, "calibrator", parse_calibrator(self.calibrator))
        if not isinstance(self.dtype, DType):
            raise ConfigError(
                f"dtype is {short(self.dtype)}; it must be a number"
                f" format{nearest('', DTYPES)}",
            )

    def _check_scale(self) -> None:
        require_choice(self, "scale", self.SCALES)
        # A scale that is not measured is not stored by the model either.
        if self.scale == "float16" and not self.measured:
            why = f"{self.dtype.name} has none"
            if self.dynamic:
                why = "each run computes it, in float32"
            raise ConfigError(f"scale is {short(self.scale)}; {why}")
        if self.solver == "hqq" and (self.symmetric or not self.block_size):
            raise ConfigError(
                "solver hqq moves the zero points of blocks; set symmetric to false and"
                " a block_size"
            )

    def _check_codes(self) -> None:
        """Check for contradictory settings of codes."""
        # DynamicQuantizeLinear has no such attributes: its scale spans codes 0 to 255.
        for name in ("pow2", "reduce_range"):
            if self.dynamic and getattr(self, name):
                raise ConfigError(
                    f"{name} cannot be set: each run computes the scale, for all"
                    f" codes of {self.dtype}",
                )
        if self.solver == "hqq" and not _rounds_all_integers(self):
            raise ConfigError(
                "solver hqq is for all codes of integers of 2, 4 and 8 bits, not for"
                f" {self}"
            )
        if self.block_size and self.dtype.bits >= 32:
            raise ConfigError(
                f"block_size is {self.block_size}; {self.dtype.name} has one scale for"
                " a tensor or a channel"
            )
        if _has_no_codes(self):
            raise ConfigError(
                f"reduce_range leaves one bit of {self.dtype.name}, which has no"
                " symmetric codes"
            )

    def _check_exponent(self) -> None:
        """Check the rule for shared exponents."""
        require_choice(self, "exponent", self.EXPONENTS)
        if self.exponent != "auto" and not _element(self.dtype):
            raise ConfigError(
                f"exponent is {short(self.exponent)}; it is for microscaling formats,"
                f" {self.dtype.name} is none",
            )

    def settled(self, *, weight: bool, vendor: bool) -> Self:
        """Return the spec with a chosen rule for shared exponents.

        Args:
            weight: the spec is for constants, whose codes are computed here.
            vendor: AMD's operator computes the format.
        """
        element = _element(self.dtype)
        if not element or self.exponent != "auto":
            return self
        # "best" compares two exponents per block on the stored values, at no cost at runtime.
        if weight:
            return self.with_(exponent="best")
        return self.with_(exponent="floor" if vendor else LEAST_ERROR[element])

    def with_(self, **changes: Any) -> Self:
        """Return a copy with changed attributes.

        A change of the format resets the rule for shared exponents.
        """
        check_names(changes, type(self))
        if "dtype" in changes:
            # A rule for a microscaling format would be refused for any other format.
            changes = {"exponent": type(self).exponent} | changes
        return replace(self, **changes)

    @property
    def codes(self) -> Scaled:
        """The number format with a scale; only for formats with a scale."""
        assert isinstance(self.dtype, Scaled), f"{self.dtype.name} has no scale"
        return self.dtype

    @property
    def measured(self) -> bool:
        """Whether the scale of an activation has to be measured on data."""
        return self.dtype.scaled and not self.dynamic

    @property
    def grid(self) -> Grid:
        """The integer codes and the zero-point rule, as calibration sees them."""
        # True counts as 1: seven of eight bits.
        bits = self.dtype.bits - self.reduce_range
        half = self.scale == "float16"
        return self.codes.grid(
            symmetric=self.symmetric,
            pow2=self.pow2,
            narrow=self.narrow,
            bits=bits,
            half=half,
        )

    @property
    def as_onnxruntime(self) -> EvenSpec:
        """The same specification with the scales that onnxruntime's quantizer gives."""
        settings = {each.name: getattr(self, each.name) for each in fields(self)}
        return EvenSpec(**settings)

    def alike(self, other: QuantizationSpec) -> bool:
        """Return whether tensors of both specs have equal codes."""
        # Calibrators and solvers may differ: they choose a scale, and do not change the type of
        # codes.
        mine = (self.dtype, self.block_size, self.dynamic)
        if mine != (other.dtype, other.block_size, other.dynamic):
            return False
        if self.dtype.scaled:
            return self.grid == other.grid
        return (self.saturate, self.exponent) == (other.saturate, other.exponent)

    def __str__(self) -> str:
        if not self.dtype.scaled:
            return self.dtype.name + " saturating" * self.saturate
        # Floating formats have no zero point, whatever the flag says.
        symmetric = self.symmetric or not self.dtype.uniform
        parts = [self.dtype.name, "symmetric" if symmetric else "asymmetric"]
        for flag in ("per_channel", "pow2", "narrow", "reduce_range", "dynamic"):
            if getattr(self, flag):
                parts.append(flag)
        if self.block_size:
            parts.append(f"blocks of {self.block_size}")
        if self.scale != "float32":
            parts.append(f"{self.scale} scales")
        parts.append(self._method)
        return " ".join(filter(None, parts))

    @property
    def _method(self) -> str:
        """The algorithm that chooses the scales, as text; empty for dynamic scales."""
        # Blocks are solved on their values, whatever the calibrator.
        if self.block_size:
            return self.solver
        if self.dynamic:
            return ""
        return format_calibrator(self.calibrator)


class EvenSpec(QuantizationSpec):
    """A specification whose symmetric unsigned codes share the range evenly, as onnxruntime's.

    They reach one step further below the middle than above it, and either end is half a step away
    from a code: the squared error of weights is 1 to 10 % greater.
    """

    @property
    def grid(self) -> Grid:
        """The integer codes, as for ``QuantizationSpec``."""
        grid = super().grid
        return replace(grid, even=grid.symmetric and grid.qmin >= 0 and not grid.pow2)


def is_dynamic(spec: QuantizationSpec | None) -> bool:
    """Return whether each run computes the scale of an activation; not so for float (None)."""
    return spec is not None and spec.dynamic


def is_measured(spec: QuantizationSpec | None) -> bool:
    """Return whether the scale of an activation is measured on data; not so for float (None)."""
    return spec is not None and spec.measured


def has_powers_of_two(spec: QuantizationSpec | None) -> bool:
    """Return whether scales are powers of two; not so for float (None)."""
    return spec is not None and spec.pow2


def _element(dtype: DType) -> str:
    """Return the element type of a microscaling format; empty for other formats."""
    # Block floating-point formats other than MX have no element type, either.
    return dtype.element if isinstance(dtype, Block) else ""


def _rounds_all_integers(spec: QuantizationSpec) -> bool:
    """Return whether a spec has all codes of small integers, which solver hqq needs."""
    if any((spec.pow2, spec.reduce_range, spec.narrow)):
        return False
    return isinstance(spec.dtype, Integer) and spec.dtype.bits <= 8


def _has_no_codes(spec: QuantizationSpec) -> bool:
    """Return whether a symmetric spec has no code above the zero point."""
    if not isinstance(spec.dtype, Integer) or not spec.symmetric:
        return False
    # For example int2 with one bit less: the codes -1 and 0, with the zero point 0.
    return bool(spec.grid.qmax == spec.grid.zero)


_BLOCK_SIZE = Requirement(
    "block_size", whole(0), "a number of values, or 0 for no blocks"
)


def check_names(given: Iterable[object], cls: type[Any]) -> None:
    """Raise ConfigError for the first of ``given`` names that is not a field of ``cls``."""
    known = [field.name for field in fields(cls)]
    for name in given:
        require_known(name, known, f"{cls.__name__} has no setting")


def parse_calibrator(text: str) -> Calibrator:
    """Return the calibrator of a text ``"name"`` or ``"name:setting=value,..."``.

    >>> parse_calibrator("minmax:moving_average=true")
    MinMax(moving_average=True, constant=0.01)
    """
    # No calibrator has a setting that is a word.
    name, settings = parse_call(text, "calibrator", words=False)
    try:
        return calibrators.create(name, **settings)
    except CalibrationError as error:
        # The package calibrators does not know the errors of this package.
        raise ConfigError(str(error)) from error


def format_calibrator(calibrator: Calibrator) -> str:
    """Return the text for ``parse_calibrator``, without default settings.

    >>> format_calibrator(parse_calibrator("percentile:percentile=99.9"))
    'percentile:percentile=99.9'
    """
    return format_call(calibrator)


def check_granularity(
    activation: QuantizationSpec | None,
    weight: QuantizationSpec | None,
    where: str = "",
) -> None:
    """Raise ConfigError for a granularity that activations or weights do not support.

    Args:
        activation: quantization of activations; None if they stay float.
        weight: quantization of weights; None if they stay float.
        where: what the specs belong to, for messages.
    """
    if activation is not None and activation.block_size:
        raise ConfigError(
            f"activation{where}: block_size belongs to the weight; block formats have"
            " blocks of their own"
        )
    if activation is not None and activation.dynamic:
        if activation.per_channel:
            raise ConfigError(
                f"activation{where}: each run computes one scale for a tensor;"
                " per_channel cannot be set"
            )
        if activation.dtype.name != "uint8" or activation.symmetric:
            raise ConfigError(
                f"activation{where}: a dynamic scale is for uint8, asymmetric, not for"
                f" {activation}"
            )
    if weight is not None and weight.dynamic:
        raise ConfigError(
            f"weight{where}: the scale of a weight is known beforehand; dynamic belongs"
            " to the activation"
        )


def spec_of(
    data: object, base: QuantizationSpec | None, where: str
) -> QuantizationSpec | None:
    """Return a spec from changes to ``base``, or from just the name of a number format.

    Args:
        data: a dictionary of changes or a name; None and a spec are returned unchanged.
        base: what the changes apply to; None for the default spec.
        where: the setting's name, for error messages.

    Raises:
        ConfigError: ``data`` is none of these, or a change is wrong.
    """
    if data is None or isinstance(data, QuantizationSpec):
        return data
    # A bare name keeps the other settings of the base, such as its calibrator.
    settings = {"dtype": data} if isinstance(data, str) else settings_of(data, where)
    return (base or QuantizationSpec()).with_(**settings)


def settings_of(data: object, where: str) -> dict[str, Any]:
    """Return a copy of a dictionary whose keys are names of settings.

    Args:
        data: what the user gave.
        where: what the settings belong to, for messages.

    Raises:
        ConfigError: ``data`` is no dictionary, or a key is no name.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is {short(data)}; it must be a mapping of settings")
    for name in data:
        if not isinstance(name, str):
            raise ConfigError(
                f"{where} has no setting {short(name)}; settings have names",
            )
    return dict(data)
