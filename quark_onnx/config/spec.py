"""QuantizationSpec: how one kind of tensor is quantized."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import calibrators
from calibrators import CalibrationError, Calibrator, Grid, MinMax
from calibrators.shown import short
from quark_onnx.config.text import format_call, parse_call
from quark_onnx.dtypes import INT8, Block, DType, Float4, Integer, Scaled
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.kernels.blockfloat import EXPONENTS, LEAST_ERROR
from quark_onnx.registry import DTYPES

if TYPE_CHECKING:
    from typing_extensions import Self

#: How scales of blocks are found.
SOLVERS = ("nearest", "hqq")


@dataclass(frozen=True)
class QuantizationSpec:
    """How a tensor is quantized; frozen, and composed with ``with_``.

    Attributes:
        dtype: the number format, or its name.
        symmetric: the zero point is fixed in the middle of the codes.
        per_channel: one scale for each output channel of a weight, or channel (axis 1) of an
            activation, instead of one for the tensor.
        pow2: scales are powers of two.
        scale: the type that scales are stored in, float32 or float16.
        narrow: a signed format leaves out its least code (-127..127 in 8 bits).
        reduce_range: leave one bit unused, for processors whose 8-bit products saturate.
        block_size: one scale for so many values along the axis that an operator sums over (weights
            only); 0 for none.
        solver: how the scale of a block is found: "nearest", the better of two that the range
            suggests; or "hqq", which also moves the zero point (half-quadratic quantization, Badri
            and Shaji 2023).
        saturate: a 16-bit float beyond the greatest finite one becomes that one instead of
            infinity.
        dynamic: the scale is computed as the model runs, from the values themselves (activations
            only).
        exponent: how the shared exponent of a microscaling block follows from its greatest value:
            "floor", "even", "ceil" or "rceil" (``quark_onnx.kernels.blockfloat.threshold``); for
            weights also "best", for each block whichever of two has the smaller error. "auto" is
            "best" for weights, and for activations the rule of least error, but "floor" where AMD's
            operator computes it.
        calibrator: how the range is found; a calibrator, its name, or ``"name:setting=value,..."``.

    >>> QuantizationSpec("uint8", symmetric=False).with_(calibrator="percentile:percentile=99.9").calibrator
    Percentile(percentile=99.9)
    """  # noqa: E501

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

    if TYPE_CHECKING:  # what may be written; names are looked up

        def __init__(  # noqa: PLR0913
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

    def __post_init__(self) -> None:  # noqa: C901
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if isinstance(self.calibrator, str):
            object.__setattr__(self, "calibrator", parse_calibrator(self.calibrator))
        if not isinstance(self.dtype, DType):
            raise ConfigError(
                f"dtype is {short(self.dtype)}; it must be a number"
                f" format{nearest('', DTYPES)}",
            )
        for name in (
            "symmetric",
            "per_channel",
            "pow2",
            "narrow",
            "reduce_range",
            "saturate",
            "dynamic",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is {short(getattr(self, name))}; it must be true or false",
                )
        if type(self.block_size) is not int or self.block_size < 0:
            raise ConfigError(
                f"block_size is {short(self.block_size)}; it must be a number of"
                " values, or 0 for no blocks",
            )
        if self.solver not in SOLVERS:
            raise ConfigError(
                f"solver is {short(self.solver)}; it must be one of:"
                f" {', '.join(SOLVERS)}",
            )
        if self.scale not in self.SCALES:
            raise ConfigError(
                f"scale is {short(self.scale)}; it must be one of:"
                f" {', '.join(self.SCALES)}",
            )
        if self.scale == "float16" and not self.measured:
            why = (
                "each run computes it, in float32"
                if self.dynamic
                else f"{self.dtype.name} has none"
            )
            raise ConfigError(f"scale is {short(self.scale)}; {why}")
        if self.solver == "hqq" and (self.symmetric or not self.block_size):
            raise ConfigError(
                "solver hqq moves the zero points of blocks; set symmetric to false and"
                " a block_size",
            )
        self._check_codes()
        self._check_exponent()
        if self.block_size and (
            not self.dtype.scaled or isinstance(self.dtype, Float4)
        ):
            raise ConfigError(
                f"block_size is {self.block_size}; it is for integers and fp8,"
                f" {self.dtype.name} has no blocks, or blocks of its own",
            )
        if isinstance(self.calibrator, type) or not hasattr(
            self.calibrator,
            "statistic",
        ):
            raise ConfigError(
                f"calibrator is {short(self.calibrator)}; it must be a calibrator or a"
                f" name{nearest('', calibrators.CALIBRATORS)}",
            )

    def _check_codes(self) -> None:
        """Settings that do not go together."""
        changed = [
            name for name in ("pow2", "reduce_range", "narrow") if getattr(self, name)
        ]
        if self.dynamic and changed[:1] not in ([], ["narrow"]):
            raise ConfigError(
                f"{changed[0]} cannot be set: each run computes the scale, for all"
                f" codes of {self.dtype}",
            )
        if self.solver == "hqq" and (
            changed or not isinstance(self.dtype, Integer) or self.dtype.bits > 8
        ):
            raise ConfigError(
                "solver hqq is for all codes of integers of 2, 4 and 8 bits, not for"
                f" {self}",
            )
        if self.block_size and self.dtype.bits >= 32:
            raise ConfigError(
                f"block_size is {self.block_size}; {self.dtype.name} has one scale for"
                " a tensor or a channel",
            )
        if (
            isinstance(self.dtype, Integer)
            and self.symmetric
            and self.grid.qmax == self.grid.zero
        ):
            raise ConfigError(
                f"reduce_range leaves one bit of {self.dtype.name}, which has no"
                " symmetric codes",
            )

    def _check_exponent(self) -> None:
        """A rule that is known, for a format whose blocks share an exponent."""
        if self.exponent not in self.EXPONENTS:
            raise ConfigError(
                f"exponent is {short(self.exponent)}; it must be one of:"
                f" {', '.join(self.EXPONENTS)}",
            )
        if self.exponent != "auto" and not _element(self.dtype):
            raise ConfigError(
                f"exponent is {short(self.exponent)}; it is for microscaling formats,"
                f" {self.dtype.name} is none",
            )

    def settled(self, *, weight: bool, vendor: bool) -> Self:
        """The spec with its rule for shared exponents chosen.

        Args:
            weight: it is for constants, whose codes are chosen here.
            vendor: AMD's operator computes it.
        """
        element = _element(self.dtype)
        if not element or self.exponent != "auto":
            return self
        return self.with_(
            exponent="best" if weight else "floor" if vendor else LEAST_ERROR[element],
        )

    def with_(self, **changes: Any) -> Self:
        """A copy with some attributes changed.

        A rule for shared exponents belongs to its format.
        """
        check_names(changes, type(self))
        if "dtype" in changes:
            changes = {"exponent": type(self).exponent} | changes
        return replace(self, **changes)

    @property
    def codes(self) -> Scaled:
        """The number format, where it is one with a scale.

        Others have no codes, and asking is a mistake.
        """
        assert isinstance(self.dtype, Scaled), f"{self.dtype.name} has no scale"
        return self.dtype

    @property
    def measured(self) -> bool:
        """Whether the scale of an activation has to be measured on data."""
        return self.dtype.scaled and not self.dynamic

    @property
    def grid(self) -> Grid:
        """The codes and the zero-point rule, as calibration sees them."""
        bits = self.dtype.bits - self.reduce_range
        half = self.scale == "float16"
        return self.codes.grid(
            symmetric=self.symmetric,
            pow2=self.pow2,
            narrow=self.narrow,
            bits=bits,
            half=half,
        )

    def alike(self, other: QuantizationSpec) -> bool:
        """Whether tensors that are quantized by either have the same codes."""
        if self.dtype != other.dtype or (self.block_size, self.dynamic) != (
            other.block_size,
            other.dynamic,
        ):
            return False
        if self.dtype.scaled:
            return self.grid == other.grid
        return (self.saturate, self.exponent) == (other.saturate, other.exponent)

    def __str__(self) -> str:
        if not self.dtype.scaled:
            return self.dtype.name + " saturating" * self.saturate
        symmetric = self.symmetric or not self.dtype.uniform
        parts = [self.dtype.name, "symmetric" if symmetric else "asymmetric"]
        parts += [
            word
            for word in ("per_channel", "pow2", "narrow", "reduce_range", "dynamic")
            if getattr(self, word)
        ]
        parts += [f"blocks of {self.block_size}"] if self.block_size else []
        parts += [f"{self.scale} scales"] if self.scale != "float32" else []
        if self.block_size:
            return " ".join([*parts, self.solver])
        return " ".join(
            parts if self.dynamic else [*parts, format_calibrator(self.calibrator)],
        )


def _element(dtype: DType) -> str:
    """The element type of a microscaling format; empty for others."""
    return dtype.element if isinstance(dtype, Block) else ""


def check_names(given: Any, cls: type[Any]) -> None:
    """Raise ConfigError for the first name in ``given`` that is no field of the dataclass ``cls``."""  # noqa: E501
    known = [f.name for f in fields(cls)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{cls.__name__} has no setting"
                f" {short(name)}{nearest(str(name), known)}",
            )


def parse_calibrator(text: str) -> Calibrator:
    """The calibrator written as ``"name"`` or ``"name:setting=value,..."``.

    >>> parse_calibrator("minmax:moving_average=true")
    MinMax(moving_average=True, constant=0.01)
    """
    name, settings = parse_call(text, "calibrator", words=False)
    try:
        return calibrators.create(name, **settings)  # type: ignore[no-any-return]
    except CalibrationError as error:
        raise ConfigError(str(error)) from error


def format_calibrator(calibrator: Any) -> str:
    """The text form that ``parse_calibrator`` reads; settings at their defaults are left out.

    >>> format_calibrator(parse_calibrator("percentile:percentile=99.9"))
    'percentile:percentile=99.9'
    """
    return format_call(calibrator)


def check_granularity(
    activation: QuantizationSpec | None,
    weight: QuantizationSpec | None,
    where: str = "",
) -> None:
    """Raise ConfigError where a granularity does not go with activations or weights."""
    if activation is not None:
        if activation.block_size:
            raise ConfigError(
                f"activation{where}: block_size belongs to the weight; block formats"
                " have blocks of their own",
            )
        if activation.dynamic and activation.per_channel:
            raise ConfigError(
                f"activation{where}: each run computes one scale for a tensor;"
                " per_channel cannot be set",
            )
        if activation.dynamic and (activation.dtype.name, activation.symmetric) != (
            "uint8",
            False,
        ):
            raise ConfigError(
                f"activation{where}: a dynamic scale is for uint8, asymmetric, not for"
                f" {activation}",
            )
    if weight is not None and weight.dynamic:
        raise ConfigError(
            f"weight{where}: the scale of a weight is known beforehand; dynamic belongs"
            " to the activation",
        )


def spec_of(
    data: Any,
    base: QuantizationSpec | None,
    where: str,
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
    settings = {"dtype": data} if isinstance(data, str) else settings_of(data, where)
    return (base or QuantizationSpec()).with_(**settings)


def settings_of(data: Any, where: str) -> dict[str, Any]:
    """Return a copy of a dictionary whose keys are names of settings.

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
