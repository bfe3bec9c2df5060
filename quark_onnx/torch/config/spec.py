"""TensorSpec and LayerSpec: how the tensors of a PyTorch layer are quantized."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from calibrators import Calibrator, Grid, MinMax
from quark_onnx.config.spec import QuantizationSpec, check_names
from quark_onnx.dtypes import INT8, DType, Half, Integer
from quark_onnx.errors import ConfigError
from quark_onnx.kernels.blockfloat import EXPONENTS
from quark_onnx.torch.config.number_formats import (
    Progressive,
    TwoLevel,
    block_of,
    format_named,
)


@dataclass(frozen=True)
class TensorSpec(QuantizationSpec):
    """A QuantizationSpec for PyTorch.

    ``per_channel`` stands for one scale for each output channel of a weight, and for each token of
    an activation; ``block_size`` for one scale for so many values along the last axis. The scale of
    a symmetric integer divides the range evenly among all codes (``calibrators.Grid.even``), as AMD
    Quark does.

    Attributes:
        scale: the type that scales are stored in: "model" is that of the weights, which is also
            what they are computed in; "float32", "float16" or "bfloat16".
        exponent: how the shared exponent of a microscaling block is chosen, by one of the rules of
            ``quark_onnx.kernels.blockfloat.threshold``; "even" is AMD Quark's. Weights may have
            "best", for each block whichever of two has the smaller error.

    >>> TensorSpec("uint4", symmetric=False, block_size=128).grid
    Grid(qmin=0, qmax=15, symmetric=False, pow2=False, half=False, even=False)
    """

    SCALES: ClassVar[tuple[str, ...]] = ("model", "float32", "float16", "bfloat16")
    EXPONENTS: ClassVar[tuple[str, ...]] = ("best", *EXPONENTS)

    scale: str = "model"
    calibrator: Calibrator = field(default_factory=MinMax)
    exponent: str = "even"

    if TYPE_CHECKING:  # what may be written; names are looked up

        def __init__(  # noqa: PLR0913
            self,
            dtype: DType | str = INT8,
            symmetric: bool = True,
            per_channel: bool = False,
            scale: str = "model",
            block_size: int = 0,
            dynamic: bool = False,
            exponent: str = "even",
            **settings: Any,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", format_named(self.dtype.lower()))
        if self.scale == "float16" and self.dynamic:
            raise ConfigError(
                "scale is 'float16'; each run computes it, in the type of the"
                " activations",
            )
        super().__post_init__()
        if isinstance(self.dtype, Progressive) and not (
            self.per_channel and self.symmetric
        ):
            raise ConfigError(
                f"{self.dtype.name} has one scale for each output, and no zero points;"
                " set per_channel",
            )
        if self.block_size and self.per_channel:
            raise ConfigError(
                f"block_size is {self.block_size} and per_channel is set; a scale is"
                " for either",
            )

    def _check_exponent(self) -> None:
        """A rule that is known; formats without shared exponents do not look at it."""
        if self.exponent not in self.EXPONENTS:
            raise ConfigError(
                f"exponent is {self.exponent!r}; it must be one of:"
                f" {', '.join(self.EXPONENTS)}",
            )

    @property
    def grid(self) -> Grid:
        grid = super().grid
        return replace(
            grid,
            even=isinstance(self.dtype, Integer) and grid.symmetric and grid.qmin < 0,
        )

    @property
    def group(self) -> int:
        """Values to a block; 0 for no blocks."""
        return self.block_size or block_of(self.dtype)

    @property
    def measured(self) -> bool:
        """Whether an activation has a scale that only data can tell."""
        return (
            self.dtype.scaled or isinstance(self.dtype, TwoLevel)
        ) and not self.dynamic

    @property
    def is_cast(self) -> bool:
        """Whether it is a float of 16 bits, which needs nothing but a cast."""
        return isinstance(self.dtype, Half)


@dataclass(frozen=True)
class LayerSpec:
    """How one layer is quantized; what is None stays as it is.

    Attributes:
        weight: the weight.
        input: what the layer reads.
        output: what it computes.
        rotated: whether attention rounds the output, after it has rotated it; the layer itself does
            not.
        probabilities: what the softmax of the attention computes that the layer belongs to.

    >>> LayerSpec(TensorSpec("int8")).weight_only
    True
    """

    weight: TensorSpec | None = None
    input: TensorSpec | None = None
    output: TensorSpec | None = None
    rotated: bool = False
    probabilities: TensorSpec | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "input", "output", "probabilities"):
            spec = getattr(self, name)
            if spec is not None and not isinstance(spec, TensorSpec):
                raise ConfigError(
                    f"{name} is {spec!r}; it must be a TensorSpec or None",
                )
        if self.weight is not None and self.weight.dynamic:
            raise ConfigError(
                "weight: its scale is known beforehand; dynamic belongs to the input",
            )
        for name in ("input", "output", "probabilities"):
            spec = getattr(self, name)
            if spec is not None and spec.exponent == "best":
                raise ConfigError(
                    f"{name}: exponent is 'best'; each run computes it, by one rule",
                )
            if (
                spec is not None
                and spec.measured
                and (spec.per_channel or spec.block_size)
            ):
                raise ConfigError(
                    f"{name}: one scale for each token or block is computed by each"
                    " run; set dynamic",
                )

    def with_(self, **changes: Any) -> LayerSpec:
        """A copy with some attributes changed."""
        check_names(changes, type(self))
        return replace(self, **changes)

    @property
    def weight_only(self) -> bool:
        return self.input is None and self.output is None and self.probabilities is None

    @property
    def measures(self) -> bool:
        """Whether there are scales that only data can tell."""
        return any(
            spec is not None and spec.measured
            for spec in (self.input, self.output, self.probabilities)
        )
