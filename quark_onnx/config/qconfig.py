"""QConfig and Override: everything a user decides, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrators import Best
from calibrators.base import is_number
from calibrators.shown import short
from quark_onnx.config.spec import (
    QuantizationSpec,
    check_granularity,
    check_names,
    spec_of,
)
from quark_onnx.config.tensors import TensorOverride
from quark_onnx.config.text import format_call, name_tuple, parse_call
from quark_onnx.dtypes import INT8, UINT8
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.registry import OPTIMIZERS, PRESETS, RULES, TARGETS

#: Attributes of a spec that ``QConfig.with_`` takes as a short cut, and the spec that they go to.
_SHORT_CUTS = {"calibrator": "activation", "per_channel": "weight"}


#: The first opset with the operators that every result has.
_LEAST_OPSET = 11
#: No two models are that near, or that far.
_GREATEST_SQNR = 1e4
#: The default of ``QConfig.embedding``.
AUTO = "auto"
_SWITCHES = (
    "safe",
    "fix_sizes",
    "keep_existing",
    "keep_initializer_inputs",
    "prepare",
    "functions",
    "contrib",
    "movers",
    "clipping",
    "bodies",
)
#: Formats of biases, by name.
_BIASES = ("int32", "int16")
#: How the result is written.
FORMS = ("qdq", "operators", "vendor")


def _optimizers(value: Any) -> tuple[Any, ...]:
    """Optimizers from what a user may write: one or several, texts among them."""
    given = (value,) if isinstance(value, str) or hasattr(value, "stage") else value
    if not isinstance(given, list | tuple):
        raise ConfigError(
            f"optimizers is {short(value)}; it must be a list of"
            f" optimizers{nearest('', OPTIMIZERS)}",
        )
    found = tuple(
        parse_optimizer(item) if isinstance(item, str) else item for item in given
    )
    for item in found:
        if isinstance(item, type) or not hasattr(item, "stage"):
            raise ConfigError(
                f"optimizers holds {short(item)}; it must be an optimizer or a"
                f" name{nearest('', OPTIMIZERS)}",
            )
    return found


def parse_optimizer(text: str) -> Any:
    """The optimizer written as ``"name"`` or ``"name:setting=value,..."``."""
    name, settings = parse_call(text, "optimizer")
    cls = OPTIMIZERS[name]
    check_names(settings, cls)
    return cls(**settings)


@dataclass(frozen=True)
class Override:
    """Another decision for some of the nodes.

    Attributes:
        nodes: node names, globs (``"/head/*"``) or regular expressions (``"re:^/head/.*"``).
        op_types: operator types.
        between: two sets of tensor or node names; the nodes on the paths from the first to the
            second, both included.
        keep: leave these nodes float.
        activation: how tensors that these nodes compute and read are quantized; None leaves it as
            it is.
        weight: how their weights are quantized; None leaves it as it is.

    A node matches if any of the three matches. An override that matches no node of the model is an
    error.

    >>> Override("/head/*", keep=True)
    Override(nodes=('/head/*',), op_types=(), between=(), keep=True, activation=None, weight=None)
    """

    nodes: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    between: tuple[tuple[str, ...], ...] = ()
    keep: bool = False
    activation: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None

    if TYPE_CHECKING:  # what may be written; what is stored are tuples

        def __init__(  # noqa: PLR0913
            self,
            nodes: str | Iterable[str] = (),
            op_types: str | Iterable[str] = (),
            between: Sequence[str | Iterable[str]] = (),
            keep: bool = False,
            activation: QuantizationSpec | None = None,
            weight: QuantizationSpec | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "nodes", name_tuple(self.nodes, "nodes of an override")
        )
        object.__setattr__(
            self,
            "op_types",
            name_tuple(self.op_types, "op_types of an override"),
        )
        if not isinstance(self.between, list | tuple):
            raise ConfigError(
                f"between of an override is {short(self.between)}; it takes two sets of"
                " names",
            )
        ends = tuple(name_tuple(end, "between of an override") for end in self.between)
        object.__setattr__(self, "between", ends)
        if len(ends) not in (0, 2):
            raise ConfigError(
                f"between of an override has {len(ends)} sets of names; it takes two:"
                " starts and ends",
            )
        if not (self.nodes or self.op_types or self.between):
            raise ConfigError(
                "an override names no nodes; give nodes, op_types or between",
            )
        if not isinstance(self.keep, bool):
            raise ConfigError(
                f"keep of the override for {self.where} is {short(self.keep)}; it must"
                " be true or false",
            )
        if not (self.keep or self.activation or self.weight):
            raise ConfigError(
                f"the override for {self.where} changes nothing; give keep, activation"
                " or weight",
            )
        if self.keep and (self.activation or self.weight):
            raise ConfigError(
                f"the override for {self.where} both keeps nodes float and quantizes"
                " them",
            )
        for name in ("activation", "weight"):
            spec = getattr(self, name)
            if spec is not None and not isinstance(spec, QuantizationSpec):
                raise ConfigError(
                    f"{name} of the override for {self.where} is {short(spec)}, not a"
                    " QuantizationSpec",
                )
        check_granularity(
            self.activation,
            self.weight,
            f" of the override for {self.where}",
        )

    @property
    def where(self) -> str:
        """The patterns, for messages."""
        ends = (
            [" .. ".join(",".join(end) for end in self.between)] if self.between else []
        )
        return ", ".join([*self.nodes, *self.op_types, *ends])


@dataclass(frozen=True)
class QConfig:
    """What a user wants; frozen, and composed with ``with_``.

    The defaults are those of the preset A8W8.

    Attributes:
        activation: how activations are quantized; None keeps them float (weight-only).
        weight: how weights are quantized; None keeps them float.
        bias: biases become int32 with the scale activation x weight; "int16" stores them in 16
            bits, with that scale times the least power of two that holds them; False keeps them
            float.
        embedding: how tables that are looked up are quantized where they count as weights. "auto"
            is as weights, but int8 with a scale for each row where those have fewer bits, and float
            where a layer that stays float has the same values; None keeps tables float.
        overrides: other decisions for some nodes; a later one wins over an earlier one.
        tensors: other decisions for some tensors, which win over those for nodes; see
            ``TensorOverride``.
        op_types: only these operators are quantized; empty means every operator that has a rule.
        nodes: only these nodes (names, globs or regular expressions) are quantized; empty means
            all.
        exclude: node names, globs or regular expressions that stay float; short for an Override
            with ``keep``.
        safe: leave float what few bits are known to ruin: the decoding of detectors, where
            coordinates need more bits and boxes and scores would share one scale, and the residual
            stream around layer normalizations.
        optimizers: what makes the result better, in this order; each is its own configuration, or a
            text as ``"cle:relu6=bound"``.
        search: on how many samples scales of activations are settled by the error in the layers
            that read them, and biases by the mean error of rounded weights; 0 for not at all. As
            the scales move by octaves, the error of a tensor alone does not tell which one serves
            the model.
        target: what the result is for ("npu", "phx", "stx", ...): its constraints on power-of-two
            scales are met. Empty for none.
        fix_sizes: with a target, a symbolic batch becomes 1, as the target's compiler wants all
            sizes fixed.
        keep_existing: leave what is quantized already as it is and go on with the rest, instead of
            refusing the model.
        keep_initializer_inputs: initializers that are also inputs stay inputs whose values callers
            may override; they are not quantized then. By default they become constants, as no
            caller overrides a weight.
        prepare: fold and clean the float graph first.
        form: "qdq" leaves operators between Q/DQ pairs; "operators" writes those of ONNX and
            onnxruntime that compute on codes (MatMulInteger, ConvInteger, MatMulNBits), where there
            are any; "vendor" writes Q/DQ pairs, also those of 16-bit floats, as
            ExtendedQuantizeLinear and ExtendedDequantizeLinear of AMD's domain.
        contrib: write all pairs of integers in the com.microsoft domain, also where ONNX's own
            would do.
        float_results: operators of these types do not ask for their results to be quantized; their
            readers may.
        movers: operators that only move values are quantized also where what they read would be
            float.
        clipping: a Relu or Clip goes where saturation does the same; False keeps it, with a pair in
            front.
        bodies: the bodies of If, Loop and Scan are quantized, too.
        accuracy_level: attribute of the MatMulNBits nodes that the form "operators" writes: the
            lowest precision that onnxruntime may compute in. 0 leaves the choice to it, 1 is
            float32, 2 float16, 3 bfloat16, 4 int8.
        functions: nodes of a vendor's domain carry a body of standard operators, so that every
            runtime runs them.
        max_opset: the model's opset is not raised beyond this one, None for no limit. Q/DQ pairs of
            4, 8 and 16 bits, and weights in blocks, are then written in the com.microsoft domain,
            which has them at any opset.
        min_sqnr: the least acceptable signal-to-noise ratio of any output, in dB; None asks for
            none.

    >>> config = QConfig.of("A8W8").with_(calibrator="entropy", per_channel=True)
    >>> config.weight.per_channel, config.activation.calibrator
    (True, Entropy(candidates=128))
    """

    activation: QuantizationSpec | None = QuantizationSpec(
        UINT8,
        symmetric=False,
        calibrator=Best(),
    )
    weight: QuantizationSpec | None = QuantizationSpec(
        INT8,
        per_channel=True,
        narrow=True,
    )
    bias: bool | str = True
    embedding: QuantizationSpec | str | None = AUTO
    overrides: tuple[Override, ...] = ()
    tensors: tuple[TensorOverride, ...] = ()
    op_types: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    safe: bool = True
    optimizers: tuple[Any, ...] = ()
    search: int = 0
    target: str = ""
    fix_sizes: bool = True
    keep_existing: bool = False
    keep_initializer_inputs: bool = False
    prepare: bool = True
    form: str = "qdq"
    contrib: bool = False
    float_results: tuple[str, ...] = ()
    movers: bool = False
    clipping: bool = True
    bodies: bool = True
    accuracy_level: int = 0
    functions: bool = True
    max_opset: int | None = None
    min_sqnr: float | None = None

    def __post_init__(self) -> None:  # noqa: C901, PLR0912
        if not isinstance(self.overrides, list | tuple):
            raise ConfigError(
                f"overrides is {short(self.overrides)}; it must be a list of Override",
            )
        object.__setattr__(self, "overrides", tuple(self.overrides))
        object.__setattr__(self, "op_types", name_tuple(self.op_types, "op_types"))
        object.__setattr__(
            self,
            "float_results",
            name_tuple(self.float_results, "float_results"),
        )
        object.__setattr__(self, "nodes", name_tuple(self.nodes, "nodes"))
        object.__setattr__(self, "exclude", name_tuple(self.exclude, "exclude"))
        for name in ("activation", "weight"):
            spec = getattr(self, name)
            if spec is not None and not isinstance(spec, QuantizationSpec):
                raise ConfigError(
                    f"{name} is {short(spec)}; it must be a QuantizationSpec or None",
                )
        if not (
            self.embedding is None
            or self.embedding == AUTO
            or isinstance(self.embedding, QuantizationSpec)
        ):
            raise ConfigError(
                f"embedding is {short(self.embedding)}; it must be {AUTO!r}, a"
                " QuantizationSpec or None",
            )
        object.__setattr__(self, "optimizers", _optimizers(self.optimizers))
        if self.form not in FORMS:
            raise ConfigError(
                f"form is {short(self.form)}; it must be one of: {', '.join(FORMS)}",
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is {short(getattr(self, name))}; it must be true or false",
                )
        for override in self.overrides:
            if not isinstance(override, Override):
                raise ConfigError(
                    f"overrides holds {short(override)}, which is not an Override",
                )
        if not isinstance(self.tensors, list | tuple):
            raise ConfigError(
                f"tensors is {short(self.tensors)}; it must be a list of"
                " TensorOverride",
            )
        object.__setattr__(self, "tensors", tuple(self.tensors))
        for tensor in self.tensors:
            if not isinstance(tensor, TensorOverride):
                raise ConfigError(
                    f"tensors holds {short(tensor)}, which is not a TensorOverride",
                )
        check_granularity(self.activation, self.weight)
        if (
            self.activation is not None
            and self.activation.dynamic
            and self.form == "operators"
        ):
            for spec in (
                self.weight,
                *(override.weight for override in self.overrides),
            ):
                if spec is not None and (
                    spec.block_size or spec.dtype.name not in ("int8", "uint8")
                ):
                    raise ConfigError(
                        f"weight is {spec}; what each run computes a scale for is"
                        " multiplied with int8 or uint8 weights, with one scale for a"
                        " tensor or a channel; for others there is quantize_weights",
                    )
        for spec in (self.activation, self.weight):
            if (
                self.form == "vendor"
                and spec is not None
                and spec.dtype.name == "float16"
                and not spec.saturate
            ):
                raise ConfigError(
                    "saturate is false; the vendor's float16 saturates: set it to true,"
                    " or choose form qdq",
                )
        self._check_bias()
        self._check_exponents()
        self._check_numbers()
        self._check_target()
        for op_type in self.op_types:
            if len(RULES):  # the rules may not be loaded yet; then the plan will look
                RULES[op_type]

    def _check_numbers(self) -> None:
        """Settings that are numbers are in their ranges."""
        if type(self.search) is not int or self.search < 0:
            raise ConfigError(
                f"search is {short(self.search)}; it must be a number of samples, 0 or"
                " more",
            )
        if type(self.accuracy_level) is not int or not 0 <= self.accuracy_level <= 4:
            raise ConfigError(
                f"accuracy_level is {short(self.accuracy_level)}; it must be a whole"
                " number from 0 to 4",
            )
        if self.max_opset is not None and (
            type(self.max_opset) is not int or self.max_opset < _LEAST_OPSET
        ):
            raise ConfigError(
                f"max_opset is {short(self.max_opset)}; it must be an opset,"
                f" {_LEAST_OPSET} or higher",
            )
        if self.min_sqnr is not None and not (
            is_number(self.min_sqnr) and abs(self.min_sqnr) < _GREATEST_SQNR
        ):
            raise ConfigError(
                f"min_sqnr is {short(self.min_sqnr)}; it must be a number of decibels",
            )

    def _check_bias(self) -> None:
        """Biases have a format that exists, and that the other settings leave to the user."""
        if self.bias not in (True, False, *_BIASES):
            choices = ", ".join(_BIASES)
            raise ConfigError(
                f"bias is {short(self.bias)}; it must be true, false or one of:"
                f" {choices}",
            )

    def _check_target(self) -> None:
        """The target exists, and goes with the other settings."""
        if not isinstance(self.target, str):
            raise ConfigError(
                f"target is {short(self.target)}; it must be the name of a target, or"
                " empty",
            )
        if self.target and len(TARGETS):  # they may not be loaded yet
            TARGETS[self.target]
        if self.target and self.keep_initializer_inputs:
            raise ConfigError(
                f"keep_initializer_inputs is true, but the target {self.target} takes"
                " no initializers as inputs; leave out one of the two",
            )

    def _check_exponents(self) -> None:
        """Rules for shared exponents that what will be written can compute."""
        for change in (self, *self.overrides):
            for name, known in (
                ("activation", ("auto", "floor")),
                ("weight", ("auto", "floor", "best")),
            ):
                spec = getattr(change, name)
                if spec is None:
                    continue
                if name == "activation" and spec.exponent == "best":
                    raise ConfigError(
                        "activation: exponent is 'best'; each run computes it, by one"
                        " rule",
                    )
                if self.vendor_computes and spec.exponent not in known:
                    raise ConfigError(
                        f"{name}: exponent is {spec.exponent!r}; AMD's operator, which"
                        " form vendor and functions false leave it to, has floor",
                    )

    @property
    def vendor_computes(self) -> bool:
        """Whether a vendor's operators compute what ONNX has none for, instead of functions of
        standard operators.
        """
        return self.form == "vendor" or not self.functions

    @classmethod
    def of(cls, config: object) -> QConfig:
        """A QConfig from what a user may write: a preset's name, a YAML file, a dictionary, or a
        QConfig.
        """
        from quark_onnx.config.serialize import from_dict, load_yaml

        if isinstance(config, QConfig):
            return config
        if isinstance(config, dict):
            return from_dict(config)
        if isinstance(config, str | Path) and str(config).lower().endswith(
            (".yaml", ".yml"),
        ):
            return load_yaml(Path(config))
        if isinstance(config, Path) or (
            isinstance(config, str) and Path(config).suffix
        ):
            raise ConfigError(
                f"config {short(str(config))} is neither a preset's name nor a .yaml or"
                " .yml file",
            )
        if isinstance(config, str):
            preset = PRESETS[config]
            assert isinstance(preset, QConfig)
            return preset
        raise ConfigError(
            f"config is a {type(config).__name__}; it must be a preset's name, a YAML"
            " file, a dict or a QConfig",
        )

    def with_(self, **changes: Any) -> QConfig:
        """Return a copy with some settings changed.

        ``calibrator`` goes to the activations, ``per_channel`` to the weights. ``activation``,
        ``weight`` and ``embedding`` take what YAML takes: a ``QuantizationSpec``, the name of a
        number format, or a dictionary of changes.

        >>> str(QConfig.of("A8W8").with_(activation="uint16").activation)
        'uint16 asymmetric best'
        """
        for name in ("activation", "weight", "embedding"):
            if name in changes and changes[name] != AUTO:
                present = getattr(self, name)
                base = present if isinstance(present, QuantizationSpec) else None
                changes[name] = spec_of(changes[name], base, name)
        for name, target in _SHORT_CUTS.items():
            if name in changes:
                spec = changes.get(target, getattr(self, target))
                if spec is None:
                    raise ConfigError(
                        f"{name} cannot be set: {target} is None, so it is not"
                        " quantized",
                    )
                changes[target] = spec.with_(**{name: changes.pop(name)})
        check_names(changes, type(self))
        return replace(self, **changes)

    @property
    def table(self) -> QuantizationSpec | None:
        """How a table is quantized that is looked up, None for not at all.

        A row is the input of everything behind it, and no sum averages its errors out.

        >>> str(QConfig.of("INT4").table), str(QConfig.of("INT4").with_(embedding=None).table)
        ('int8 symmetric per_channel narrow minmax', 'None')
        """
        if (
            isinstance(self.embedding, QuantizationSpec)
            or self.embedding is None
            or self.weight is None
        ):
            return (
                self.embedding if isinstance(self.embedding, QuantizationSpec) else None
            )
        if self.weight.dtype.scaled and self.weight.dtype.bits < INT8.bits:
            return QuantizationSpec(
                INT8,
                per_channel=True,
                narrow=True,
                scale=self.weight.scale,
            )
        return self.weight

    @property
    def pairs(self) -> str:
        """How Q/DQ pairs are written: by the form, or "contrib"."""
        return "contrib" if self.contrib else self.form

    @property
    def measures(self) -> bool:
        """Whether there are scales that only data can tell."""
        specs = [self.activation, *(override.activation for override in self.overrides)]
        return any(spec is not None and spec.measured for spec in specs)

    @property
    def rereads(self) -> bool:
        """Whether the data is read more than once: optimizers learn from it, or are judged on it."""  # noqa: E501
        return any(
            optimizer.reads_data or getattr(optimizer, "judged", False)
            for optimizer in self.optimizers
        )

    def __str__(self) -> str:
        default = QConfig()
        lines = [
            f"activation: {self.activation or 'float'}",
            f"weight: {self.weight or 'float'}",
        ]
        lines += [
            f"{f.name}: {getattr(self, f.name)}"
            for f in fields(self)[2:]
            if getattr(self, f.name) != getattr(default, f.name)
            and f.name != "optimizers"
        ]
        lines += (
            [f"optimizers: {' '.join(map(format_call, self.optimizers))}"]
            if self.optimizers
            else []
        )
        return "\n".join(lines)
