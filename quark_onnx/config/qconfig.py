"""QConfig: the user's decisions, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrators import Best
from calibrators.base import is_number
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.registry import OPTIMIZERS, PRESETS, RULES, TARGETS
from quark_onnx.common.reported import preformatted
from quark_onnx.config.checks import (
    Requirement,
    instance_of,
    is_flag,
    one_of,
    optional,
    require,
    require_all,
    require_items,
    whole,
)
from quark_onnx.config.override import Override, override_of
from quark_onnx.config.spec import (
    QuantizationSpec,
    check_granularity,
    check_names,
    is_dynamic,
    is_measured,
    settings_of,
    spec_of,
)
from quark_onnx.config.tensors import TensorOverride, tensor_override_of
from quark_onnx.config.text import changed_settings, format_call, name_tuple, parse_call
from quark_onnx.config.yaml_file import read_yaml
from quark_onnx.dtypes import INT8, UINT8

#: Attributes of a spec that ``QConfig.with_`` accepts as shortcuts, and the spec that has them.
_SHORT_CUTS = {"calibrator": "activation", "per_channel": "weight"}


#: First opset with the operators that every result has.
_LEAST_OPSET = 11
#: Limit of signal-to-noise ratios in dB.
_GREATEST_SQNR = 1e4
#: The default of ``QConfig.embedding``.
AUTO = "auto"
_SWITCHES = (
    "safe",
    "equalize",
    "fix_sizes",
    "keep_existing",
    "keep_initializer_inputs",
    "prepare",
    "functions",
    "contrib",
    "movers",
    "clipping",
    "bodies",
    "all_pairs",
    "portable",
)
#: Formats of biases, by name.
_BIASES = ("int32", "int16")
#: Operators that may follow their inputs: between float operators, rounding gains nothing.
FOLLOWERS = ("Clip", "GlobalAveragePool", "Relu", "Where")
#: Formats of weights in integer products with dynamic activations.
_BYTES = ("int8", "uint8")
#: How the result is written.
FORMS = ("qdq", "operators", "vendor")


# Comparisons with NaN are false, so that NaN is refused like an infinite bound.
def _is_bound(value: Any) -> bool:
    """Return whether a value is a signal-to-noise ratio in dB that an output could reach."""
    return bool(is_number(value) and abs(value) < _GREATEST_SQNR)


_is_spec = optional(instance_of(QuantizationSpec))
#: Types and ranges of single settings.
_REQUIREMENTS = (
    Requirement("activation", _is_spec, "a QuantizationSpec or None"),
    Requirement("weight", _is_spec, "a QuantizationSpec or None"),
    Requirement(
        "embedding",
        # The text comes first: every other string is refused by the type.
        lambda value: value == AUTO or _is_spec(value),
        f"{AUTO!r}, a QuantizationSpec or None",
    ),
    Requirement("form", one_of(*FORMS), f"one of: {', '.join(FORMS)}"),
    *(Requirement(name, is_flag, "true or false") for name in _SWITCHES),
    Requirement("tensors", instance_of(list, tuple), "a list of TensorOverride"),
    Requirement(
        "bias",
        one_of(True, False, *_BIASES),
        f"true, false or one of: {', '.join(_BIASES)}",
    ),
    Requirement("search", whole(0), "a number of samples, 0 or more"),
    Requirement("accuracy_level", whole(0, 4), "a whole number from 0 to 4"),
    Requirement(
        "max_opset",
        optional(whole(_LEAST_OPSET)),
        f"an opset, {_LEAST_OPSET} or higher",
    ),
    Requirement("min_sqnr", optional(_is_bound), "a number of decibels"),
    Requirement("target", instance_of(str), "the name of a target, or empty"),
)
_OVERRIDES = Requirement("overrides", instance_of(list, tuple), "a list of Override")
#: Rules for shared exponents that AMD's operator has, by the kind of tensor; "auto" chooses one.
_VENDOR_EXPONENTS = {
    "activation": ("auto", "floor"),
    "weight": ("auto", "floor", "best"),
}


def _optimizers(value: Any) -> tuple[Any, ...]:
    """Return optimizers from one or several, as objects, texts or mappings.

    Args:
        value: an optimizer, a text or a mapping, or a list or tuple of these.

    Raises:
        ConfigError: the value or an item is something else, or a text names no optimizer.
    """
    # An optimizer has a stage, a list of optimizers has none.
    is_single = isinstance(value, str | dict) or hasattr(value, "stage")
    items = (value,) if is_single else value
    if not isinstance(items, list | tuple):
        raise ConfigError(
            f"optimizers is {short(value)}; it must be a list of"
            f" optimizers{nearest('', OPTIMIZERS)}",
        )
    # All texts are parsed before objects are checked.
    optimizers = tuple(optimizer_of(item) for item in items)
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    return optimizers


def optimizer_of(item: object) -> object:
    """Return the optimizer of a text or a mapping, or the object as it is.

    Args:
        item: an optimizer; a text ``"name:setting=value,..."``; or a mapping with the key "name"
            and the settings, which may then be lists and mappings.

    Raises:
        ConfigError: there is no such optimizer, or no such setting.
    """
    if isinstance(item, str):
        return parse_optimizer(item)
    if not isinstance(item, dict):
        return item
    settings = settings_of(item, "an optimizer")
    if "name" not in settings:
        raise ConfigError(f"an optimizer has no name: {short(item)}; give its name")
    name = settings.pop("name")
    require(isinstance(name, str), "name of an optimizer", name, "a text")
    for setting, value in settings.items():
        if isinstance(value, list):
            # Optimizers are hashable values.
            settings[setting] = tuple(value)
    return _made(name, settings)


def _check_optimizer(item: object) -> None:
    """Raise ConfigError for an object that is no optimizer."""
    # A class has the attribute as well, but no settings: "CLE" in place of "CLE()" is a mistake.
    if isinstance(item, type) or not hasattr(item, "stage"):
        raise ConfigError(
            f"optimizers holds {short(item)}; it must be an optimizer or a"
            f" name{nearest('', OPTIMIZERS)}",
        )


def parse_optimizer(text: str) -> Any:
    """Return the optimizer of a text ``"name"`` or ``"name:setting=value,..."``.

    Args:
        text: name of an optimizer, with settings after a colon if any.

    Raises:
        ConfigError: there is no such optimizer, or no such setting.
    """
    return _made(*parse_call(text, "optimizer"))


def _made(name: str, settings: dict[str, Any]) -> Any:
    """Return the optimizer of a name with the given settings."""
    cls = OPTIMIZERS[name]
    # A misspelled setting gets a suggestion here, in place of a TypeError of the constructor.
    check_names(settings, cls)
    return cls(**settings)


@dataclass(frozen=True)
class QConfig:
    """The user's configuration; frozen, and composed with ``with_``.

    The defaults are those of the preset A8W8.

    Attributes:
        activation: quantization of activations; None keeps them float (weight-only).
        weight: quantization of weights; None keeps them float.
        bias: True converts biases to int32 with the scale activation x weight; "int16" stores them
            in 16 bits, with that scale times the least sufficient power of two; False keeps them
            float.
        embedding: quantization of lookup tables if they count as weights. "auto" is the weights'
            quantization, but int8 with a scale per row if that has fewer bits, and float if a float
            layer has the same values; None keeps tables float.
        overrides: different decisions for some nodes; the last one that matches a node decides
            whether it is kept float or quantized.
        tensors: different decisions for some tensors, which take precedence over those for nodes;
            see ``TensorOverride``.
        op_types: quantize only these operator types, such as Conv MatMul. Empty for every operator
            with a rule.
        nodes: quantize only these nodes; patterns as for ``exclude``. Empty for all.
        exclude: nodes that stay float: names, globs (``'/head/*'``) or ``'re:REGEX'``. It is short
            for an Override with ``keep``.
        safe: keep operators float that degrade with few bits: the decoding of detectors, where
            coordinates need more bits and boxes and scores would share a scale, and the residual
            stream around layer normalizations. False: also quantize what 8 bits degrade: box
            decoding, unequal Concats, residuals.
        optimizers: accuracy optimizers, in this order. Each is its own configuration, a text such
            as ``"cle:relu6=bound"``, or a mapping with its ``name`` and settings.
        equalize: run ``cle`` if the structure of the model calls for it: depthwise convolutions
            read activations without an upper bound, activations or weights with one scale have at
            most 8 bits, and ``optimizers`` has no rewrite of the float graph. Such a detector gets
            ``bias_correction``, too, without a target, a search, or another optimizer of layers.
            Both are left out if held-out samples show too small a gain. False: leave out ``cle``
            and ``bias_correction``, where the structure calls for them.
        search: number of samples on which activation scales are chosen by the error in the layers
            that read them, and biases by the mean error of rounded weights; 0 for none. As
            power-of-two scales move by octaves, the error of a tensor alone does not tell the best
            one for the model.
        target: NPU or engine whose rules the result meets. A number format that it does not take,
            and a model that breaks a rule, are errors. Empty for none: the result runs in
            onnxruntime, and has no form that serves its kernels alone.
        fix_sizes: with a target, a symbolic batch becomes 1, if the target's compiler requires
            static sizes. False: with ``target``, keep a dynamic batch; broken rules are then no
            errors. They are notes, for a model that is made final later.
        keep_existing: accept a partly quantized model and keep its Q/DQ pairs. The other parts are
            quantized; by default, the model is refused.
        keep_initializer_inputs: initializers that are also inputs stay inputs, in float. Callers
            may override their values. By default they become constants, as no caller overrides a
            weight.
        prepare: fold and clean the float graph first. False: no constant folding and no
            BatchNormalization folding.
        form: qdq (Q/DQ pairs), operators (integer operators) or vendor (AMD's pairs). "qdq" leaves
            operators between Q/DQ pairs; "operators" writes operators of ONNX and onnxruntime on
            codes (MatMulInteger, ConvInteger, MatMulNBits), if there are any; "vendor" writes Q/DQ
            pairs, also those of 16-bit floats, as ExtendedQuantizeLinear and
            ExtendedDequantizeLinear of AMD's domain.
        contrib: write all pairs of integers in the com.microsoft domain, even if ONNX's own would
            suffice.
        float_results: operators of these types do not request quantization of their results; their
            readers may.
        movers: quantize operators that only move values even if their input would be float.
        follow_inputs: operators of these types (of Relu, Clip, Where and GlobalAveragePool) are
            quantized only if their inputs are quantized; otherwise they read and write floats.
        clipping: remove a Relu or Clip if saturation has the same effect; False keeps it, with a
            pair before it.
        bodies: quantize the bodies of If, Loop and Scan, too.
        all_pairs: place pairs wherever onnxruntime's quantizer does. Results of MatMul and Gemm get
            one, which by default are rounded only if a reader is quantized; so do the operands of
            ArgMax, TopK and Pad, the activations of layers whose weights are stored as codes, and,
            with the scale 1, what was zero throughout calibration. Results of Sigmoid, Tanh and
            others with a known range have the measured one, except those of Softmax.
        portable: write no operators beside those that converters of quantized models know. An Add
            before a LayerNormalization stays Add; Mul and Add scale the sums of a ConvInteger, in
            place of BatchNormalization; no Max and Min clip activations of 7 bits, which then
            saturate at 8; and no Min precedes the pair of a Softmax of unknown size.
        accuracy_level: least MatMulNBits precision: 1 float32, 2 float16, 3 bfloat16, 4 int8. It is
            an attribute of the nodes with the form "operators"; 0 leaves the choice to onnxruntime.
        functions: give nodes of a vendor's domain a body of standard operators, so that every
            runtime runs them. False: vendor operators carry no ONNX function body.
        max_opset: highest opset of the result. None for no limit. With a limit, Q/DQ pairs of 4, 8
            and 16 bits, and weights in blocks, are written in the com.microsoft domain, which
            supports them at any opset.
        min_sqnr: minimum SQNR of any output in dB. None for no check.

    >>> config = QConfig.of("A8W8").with_(calibrator="entropy", per_channel=True)
    >>> config.weight.per_channel, config.activation.calibrator
    (True, Entropy(candidates=128))
    """

    activation: QuantizationSpec | None = QuantizationSpec(
        UINT8, symmetric=False, calibrator=Best()
    )
    weight: QuantizationSpec | None = QuantizationSpec(
        INT8, per_channel=True, narrow=True
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
    equalize: bool = True
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
    follow_inputs: tuple[str, ...] = ()
    clipping: bool = True
    bodies: bool = True
    all_pairs: bool = False
    portable: bool = False
    accuracy_level: int = 0
    functions: bool = True
    max_opset: int | None = None
    min_sqnr: float | None = None

    def __post_init__(self) -> None:
        # A list before its items: a single Override, which is not iterable, is refused with this
        # text.
        require_all(self, [_OVERRIDES])
        # A frozen dataclass is assigned this way; tuples keep the value immutable.
        object.__setattr__(self, "overrides", tuple(self.overrides))
        for name in ("op_types", "float_results", "follow_inputs", "nodes", "exclude"):
            object.__setattr__(self, name, name_tuple(getattr(self, name), name))
        # Only the rules of these operators read ``follow_inputs``.
        unknown = [name for name in self.follow_inputs if name not in FOLLOWERS]
        if unknown:
            raise ConfigError(
                f"follow_inputs holds {unknown[0]!r}; it takes"
                f" {', '.join(FOLLOWERS)}{nearest(unknown[0], FOLLOWERS)}",
            )
        object.__setattr__(self, "optimizers", _optimizers(self.optimizers))
        require_all(self, _REQUIREMENTS)
        object.__setattr__(self, "tensors", tuple(self.tensors))
        require_items("overrides", self.overrides, Override)
        require_items("tensors", self.tensors, TensorOverride)
        check_granularity(self.activation, self.weight)
        # A table is a weight: its scales are stored in the model.
        if isinstance(self.embedding, QuantizationSpec):
            check_granularity(None, self.embedding, " of embedding")
        self._check_dynamic()
        self._check_saturation()
        self._check_exponents()
        self._check_target()
        # If the rules are not loaded yet, the plan checks the types.
        if len(RULES):
            for op_type in self.op_types:
                RULES[op_type]

    def _check_dynamic(self) -> None:
        """Check that integer products with dynamic activations support the weights."""
        if not is_dynamic(self.activation) or self.form != "operators":
            return
        # An override of some nodes may give their weights a format without an integer product.
        for spec in (self.weight, *(override.weight for override in self.overrides)):
            if spec is None:
                continue
            if spec.block_size or spec.dtype.name not in _BYTES:
                raise ConfigError(
                    f"weight is {spec}; what each run computes a scale for is"
                    " multiplied with int8 or uint8 weights, with one scale for a"
                    " tensor or a channel; for others there is quantize_weights",
                )

    def _check_saturation(self) -> None:
        """Check that float16 saturates where the vendor's operator computes it.

        Raises:
            ConfigError: a format does not saturate.
        """
        if self.form != "vendor":
            return
        changes: list[QConfig | Override] = [self, *self.overrides]
        for change in changes:
            for spec in (change.activation, change.weight):
                # Codes would differ from the operator's results for values above 65504.
                if spec and spec.dtype.name == "float16" and not spec.saturate:
                    raise ConfigError(
                        "saturate is false; the vendor's float16 saturates: set it to"
                        " true, or choose form qdq",
                    )

    def _check_target(self) -> None:
        """Check the target, and settings that exclude a target."""
        # The targets may not be loaded yet.
        # The registry fills when quantization is imported; the plan looks the name up again.
        if self.target and len(TARGETS):
            TARGETS[self.target]
        if self.keep_initializer_inputs and len(TARGETS) and self.npu:
            raise ConfigError(
                f"keep_initializer_inputs is true, but the target {self.target} takes"
                " no initializers as inputs; leave out one of the two",
            )

    def _check_exponents(self) -> None:
        """Check that the operators to be written support the rules for shared exponents."""
        changes: list[QConfig | Override] = [self, *self.overrides]
        for change in changes:
            # "best" compares the errors of two candidates per block, which no operator does at
            # runtime.
            if change.activation and change.activation.exponent == "best":
                raise ConfigError(
                    "activation: exponent is 'best'; each run computes it, by one rule",
                )
            if self.vendor_computes:
                _check_vendor_exponents(change)

    @property
    def npu(self) -> str:
        """Name of the NPU whose rules the result meets; empty for an engine, and for none.

        >>> [QConfig(target=name).npu for name in ("stx", "openvino")]
        ['stx', '']
        """
        return self.target if self.target and TARGETS[self.target].is_npu else ""

    @property
    def fixes_sizes(self) -> bool:
        """Whether a symbolic batch becomes 1."""
        return self.fix_sizes and bool(self.target) and TARGETS[self.target].is_static

    @property
    def prepares_float(self) -> bool:
        """Whether a model in which nothing is quantized is prepared for the target, too."""
        return bool(self.npu) or self.fixes_sizes

    @property
    def vendor_computes(self) -> bool:
        """Whether vendor operators compute block formats, instead of functions."""
        return self.form == "vendor" or not self.functions

    @classmethod
    def of(cls, config: object) -> QConfig:
        """Return a QConfig from a preset's name, a YAML file, a dictionary, or a QConfig.

        Args:
            config: name of a preset, path of a YAML file, dictionary of settings, or QConfig.

        Raises:
            ConfigError: the value is of another type, or describes no configuration.
        """
        if isinstance(config, QConfig):
            return config
        if isinstance(config, dict):
            return from_dict(config)
        if isinstance(config, str | Path):
            return cls._named(config)
        raise ConfigError(
            f"config is a {type(config).__name__}; it must be a preset's name, a YAML"
            " file, a dict or a QConfig",
        )

    @classmethod
    def _named(cls, config: str | Path) -> QConfig:
        """Return the configuration of a preset's name or of a YAML file's path.

        Args:
            config: a text with the ending .yaml or .yml is a path; a text without any ending is the
                name of a preset.

        Raises:
            ConfigError: there is no such preset, or the file has another ending or cannot be read.
        """
        if str(config).lower().endswith((".yaml", ".yml")):
            return load_yaml(Path(config))
        if isinstance(config, Path) or Path(config).suffix:
            raise ConfigError(
                f"config {short(str(config))} is neither a preset's name nor a .yaml or"
                " .yml file",
            )
        # An unknown name raises ConfigError with the nearest preset.
        preset = PRESETS[config]
        assert isinstance(preset, QConfig)
        return preset

    def with_(self, **changes: Any) -> QConfig:
        """Return a copy with changed settings.

        ``calibrator`` applies to the activations, ``per_channel`` to the weights. ``activation``,
        ``weight`` and ``embedding`` accept what YAML accepts: a ``QuantizationSpec``, the name of a
        number format, or a dictionary of changes. Items of ``overrides`` and ``tensors`` may be
        dictionaries, too; specs of overrides change those that the copy has for other nodes.

        Args:
            **changes: settings by name, including the two shortcuts.

        Raises:
            ConfigError: there is no such setting, a value is wrong, or a shortcut applies to
                tensors that stay float.

        >>> str(QConfig.of("A8W8").with_(activation="uint16").activation)
        'uint16 asymmetric best'
        """
        # "auto" is a word of ``embedding``, and no name of a number format.
        for name in ("activation", "weight", "embedding"):
            if name in changes and changes[name] != AUTO:
                changes[name] = self._changed_spec(name, changes[name])
        for name, target in _SHORT_CUTS.items():
            if name not in changes:
                continue
            # A spec that is changed in the same call gets the shortcut applied.
            spec = changes.get(target, getattr(self, target))
            if spec is None:
                raise ConfigError(
                    f"{name} cannot be set: {target} is None, so it is not quantized",
                )
            changes[target] = spec.with_(**{name: changes.pop(name)})
        check_names(changes, type(self))
        # Last: mappings of overrides change the specs that the configuration gets in this call.
        if isinstance(changes.get("overrides"), list | tuple):
            activation = changes.get("activation", self.activation)
            weight = changes.get("weight", self.weight)
            changes["overrides"] = tuple(
                override_of(item, activation, weight) for item in changes["overrides"]
            )
        if isinstance(changes.get("tensors"), list | tuple):
            changes["tensors"] = tuple(
                tensor_override_of(item) for item in changes["tensors"]
            )
        return replace(self, **changes)

    def _changed_spec(self, name: str, data: object) -> QuantizationSpec | None:
        """Return a spec from what YAML accepts, or raise ConfigError.

        ``data``: a spec, the name of a number format, a dictionary of changes, or None.
        """
        # The base of a dictionary of changes: settings that the dictionary omits stay.
        present = getattr(self, name)
        base = present if isinstance(present, QuantizationSpec) else None
        return spec_of(data, base, name)

    @property
    def table(self) -> QuantizationSpec | None:
        """Quantization of a lookup table, None for float.

        A row is the input of the following layers, and no sum averages its errors.

        >>> str(QConfig.of("INT4").table), str(QConfig.of("INT4").with_(embedding=None).table)
        ('int8 symmetric per_channel narrow minmax', 'None')
        """
        if isinstance(self.embedding, QuantizationSpec):
            return self.embedding
        if self.embedding is None or self.weight is None:
            return None
        if self.weight.dtype.scaled and self.weight.dtype.bits < INT8.bits:
            return QuantizationSpec(
                INT8, per_channel=True, narrow=True, scale=self.weight.scale
            )
        return self.weight

    @property
    def pairs(self) -> str:
        """Form of Q/DQ pairs: ``form``, or "contrib"."""
        return "contrib" if self.contrib else self.form

    @property
    def measures(self) -> bool:
        """Whether calibration data is needed for scales."""
        # An override may quantize activations of a weight-only configuration.
        activations = (override.activation for override in self.overrides)
        return any(map(is_measured, (self.activation, *activations)))

    @property
    def keeps_function(self) -> bool:
        """Whether the optimizers leave the function of the float model as it is."""
        # Rewrites that are exact, such as equalization, keep its outputs.
        return all(
            optimizer.exact
            for optimizer in self.optimizers
            if optimizer.stage == "float"
        )

    @property
    def rereads(self) -> bool:
        """Whether the data is read more than once, by optimizers or their evaluation."""
        return any(
            optimizer.reads_data or getattr(optimizer, "judged", False)
            for optimizer in self.optimizers
        )

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it."""
        return preformatted(self)

    def __str__(self) -> str:
        lines = [
            f"activation: {self.activation or 'float'}",
            f"weight: {self.weight or 'float'}",
        ]
        # Activation and weight are shown even if they are the defaults, optimizers come last.
        for name, value in changed_settings(self).items():
            if name not in ("activation", "weight", "optimizers"):
                text = "; ".join(map(str, value)) if isinstance(value, tuple) else value
                lines.append(f"{name}: {text}")
        if self.optimizers:
            lines.append(f"optimizers: {' '.join(map(format_call, self.optimizers))}")
        return "\n".join(lines)


def _check_vendor_exponents(change: QConfig | Override) -> None:
    """Raise ConfigError for a rule for shared exponents that AMD's operator does not have.

    Args:
        change: a configuration or an override, whose activation and weight are checked.
    """
    for name, known in _VENDOR_EXPONENTS.items():
        spec = getattr(change, name)
        if spec is not None and spec.exponent not in known:
            raise ConfigError(
                f"{name}: exponent is {spec.exponent!r}; AMD's operator, which"
                " form vendor and functions false leave it to, has floor",
            )


def from_dict(data: dict[str, Any]) -> QConfig:
    """Return the configuration of a dictionary.

    ``preset`` names the configuration to start from (A8W8 if absent), the other keys change it.
    ``calibrator`` and ``per_channel`` are shortcuts as in ``QConfig.with_``.

    Args:
        data: settings by name; nested dictionaries stand for overrides and specs.

    Raises:
        ConfigError: the data is no dictionary, a setting is unknown, or a value is wrong.

    >>> from_dict({"preset": "S8S8", "per_channel": True}).weight.per_channel
    True
    """
    changes = settings_of(data, "the config")
    preset = changes.pop("preset", "A8W8")
    require(
        isinstance(preset, str | QConfig),
        "preset",
        preset,
        f"a preset's name{nearest(str(preset), PRESETS)}",
    )
    # Python callers may pass a QConfig as the preset.
    base: QConfig = preset if isinstance(preset, QConfig) else PRESETS[preset]
    return base.with_(**changes)


def load_yaml(path: Path) -> QConfig:
    """Read a configuration from a YAML file.

    Args:
        path: path of the file; an empty file is the default configuration.

    Raises:
        ConfigError: the file is missing, is not YAML, or describes no configuration; the message
            names it.
    """
    data = read_yaml(path)
    try:
        # An empty file is the default configuration.
        return from_dict({} if data is None else data)
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from error
