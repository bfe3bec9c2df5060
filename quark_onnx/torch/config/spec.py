"""Specifications of how the tensors of a PyTorch layer are quantized."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from calibrators import Calibrator, Grid, MinMax
from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import Contradiction, refuse, require_choice
from quark_onnx.config.spec import QuantizationSpec, check_names
from quark_onnx.dtypes import INT8, DType, Half, Integer
from quark_onnx.kernels.blockfloat import EXPONENTS
from quark_onnx.torch.config.number_formats import (
    Progressive,
    TwoLevel,
    block_of,
    format_named,
)

# Checked apart from the other contradictions, since the base class has an error of its own.
_SCALE_AT_RUNTIME = Contradiction(
    lambda spec: spec.scale == "float16" and spec.dynamic,
    "scale is 'float16'; each run computes it, in the type of the activations",
)
_CONTRADICTIONS = (
    Contradiction(
        lambda spec: (
            isinstance(spec.dtype, Progressive)
            and not (spec.per_channel and spec.symmetric)
        ),
        "{settings.dtype.name} has one scale for each output, and no zero points; set"
        " per_channel",
    ),
    Contradiction(
        lambda spec: spec.block_size and spec.per_channel,
        "block_size is {settings.block_size} and per_channel is set; a scale is for"
        " either",
    ),
)
#: Tensors of a layer whose scales may be computed by each run.
_ACTIVATIONS = ("input", "output", "probabilities")
_CONTRADICTIONS_OF_ACTIVATIONS = (
    # "best" compares the errors of two candidates, which runtimes do not do.
    Contradiction(
        lambda spec: spec.exponent == "best",
        "exponent is 'best'; each run computes it, by one rule",
    ),
    Contradiction(
        lambda spec: spec.measured and (spec.per_channel or spec.block_size),
        "one scale for each token or block is computed by each run; set dynamic",
    ),
)
_DYNAMIC_WEIGHT = Contradiction(
    lambda spec: spec.dynamic,
    "weight: its scale is known beforehand; dynamic belongs to the input",
)


@dataclass(frozen=True)
class TensorSpec(QuantizationSpec):
    """Quantization specification of a tensor in PyTorch.

    ``per_channel`` means one scale per output channel of a weight, and per token of an activation.
    ``block_size`` is the number of values per scale along the last axis. The scale of a symmetric
    integer divides the range evenly among all codes (``calibrators.Grid.even``), as AMD Quark does.

    Attributes:
        scale: dtype of stored scales: "model" (the dtype of the weights, in which scales are also
            computed), "float32", "float16" or "bfloat16".
        exponent: rule for the shared exponent of a microscaling block, a rule of
            ``quark_onnx.kernels.blockfloat.threshold``; "even" is AMD Quark's rule. Weights may
            have "best": the candidate exponent with the smaller error, block by block.

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
        # before the checks of the base, which would call it a scale in float32
        refuse(self, [_SCALE_AT_RUNTIME])
        super().__post_init__()
        refuse(self, _CONTRADICTIONS)

    def _check_exponent(self) -> None:
        """Raise ConfigError for an unknown rule."""
        require_choice(self, "exponent", self.EXPONENTS)

    @property
    def grid(self) -> Grid:
        """The integer codes, the zero-point rule, and AMD Quark's rule for symmetric scales.

        The codes of signed symmetric integers share the range evenly (``Grid.even``): the greatest
        magnitude lies half a step beyond ``qmax``.
        """
        grid = super().grid
        # On a signed symmetric grid, the scale is 2 * amax / (qmax - qmin): amax / 127.5 for int8.
        signed = isinstance(self.dtype, Integer) and grid.qmin < 0
        return replace(grid, even=signed and grid.symmetric)

    @property
    def group(self) -> int:
        """Values per group or block; 0 for no groups."""
        return self.block_size or block_of(self.dtype)

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves all values, not one per channel, token, group or block."""
        return not self.per_channel and not self.group

    @property
    def measured(self) -> bool:
        """Whether the scale of an activation needs calibration data."""
        # NVFP4 has no scale of Q/DQ operators, but its global scale is calibrated.
        scaled = self.dtype.scaled or isinstance(self.dtype, TwoLevel)
        return scaled and not self.dynamic

    @property
    def is_cast(self) -> bool:
        """Whether the format is a 16-bit float, which needs nothing but a cast."""
        return isinstance(self.dtype, Half)


@dataclass(frozen=True)
class LayerSpec:
    """Quantization specification of a layer; a tensor with None stays float.

    Attributes:
        weight: the weight.
        input: the layer's input.
        output: the layer's output.
        rotated: whether attention rounds the output after the rotation (RoPE), instead of the
            layer.
        probabilities: softmax probabilities of the attention that the layer belongs to.

    >>> LayerSpec(TensorSpec("int8")).weight_only
    True
    """

    weight: TensorSpec | None = None
    input: TensorSpec | None = None
    output: TensorSpec | None = None
    rotated: bool = False
    probabilities: TensorSpec | None = None

    def __post_init__(self) -> None:
        for name in ("weight", *_ACTIVATIONS):
            spec = getattr(self, name)
            if not isinstance(spec, TensorSpec | None):
                raise ConfigError(
                    f"{name} is {spec!r}; it must be a TensorSpec or None",
                )
        # A weight is known before the model runs, so its scale is never computed by a run.
        if self.weight is not None:
            refuse(self.weight, [_DYNAMIC_WEIGHT])
        for name in _ACTIVATIONS:
            spec = getattr(self, name)
            if spec is not None:
                refuse(spec, _CONTRADICTIONS_OF_ACTIVATIONS, f"{name}: ")

    def with_(self, **changes: Any) -> LayerSpec:
        """Return a copy with changed attributes."""
        check_names(changes, type(self))
        return replace(self, **changes)

    @property
    def weight_only(self) -> bool:
        """Whether inputs, outputs and probabilities stay float."""
        return not self._activations

    @property
    def measures(self) -> bool:
        """Whether an activation's scale needs calibration data."""
        # Weights need no data for their scales.
        return any(spec.measured for spec in self._activations)

    @property
    def _activations(self) -> list[TensorSpec]:
        """Specifications of the quantized activations."""
        specs = (self.input, self.output, self.probabilities)
        return [spec for spec in specs if spec is not None]
