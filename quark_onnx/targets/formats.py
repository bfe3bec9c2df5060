"""Name number formats as targets do, and explain why a target refuses one."""

from __future__ import annotations

from quark_onnx.config import Override, QConfig, TensorOverride
from quark_onnx.config.spec import QuantizationSpec, is_dynamic
from quark_onnx.dtypes import Integer
from quark_onnx.targets.target import Takes, Target

_CUSTOMARY = {"bfloat16": "BF16", "float16": "FP16"}
#: Advice for the formats that the BF16 compiler derives from a float model.
_OWN = (
    "bfloat16 and BFP16 are made of the float model by its compiler: quark-onnx npu"
    " deploy --preset BF16 ships that"
)


def format_of(config: QConfig) -> str:
    """Return the number format of a configuration under the targets' name.

    >>> names = ("XINT8", "S8S8", "A16W8", "BF16", "MX9_INT8", "W8", "DYNAMIC")
    >>> [format_of(QConfig.of(name)) for name in names]
    ['XINT8', 'A8W8', 'A16W8', 'BF16', 'MX9_INT8', 'W8', 'dynamic A8W8']
    """
    # Targets name the pair of formats that a model has, not the preset that made it.
    activation = config.activation
    weight = config.weight
    if activation is None or weight is None:
        return _integer_name(activation, weight)
    if not (_is_integer(activation) and _is_integer(weight)):
        names = map(_customary_name, (activation, weight))
        # One name if both formats are equal, such as BF16.
        return "_".join(dict.fromkeys(names))
    # Only XINT8 has power-of-two scales; A8W8 of the targets has float scales.
    if activation.pow2 and weight.pow2:
        return "XINT8"
    return _integer_name(activation, weight)


def _customary_name(spec: QuantizationSpec) -> str:
    """Return the name of a number format under which vendors know the format."""
    return _CUSTOMARY.get(spec.dtype.name, spec.dtype.name.upper())


def _integer_name(
    activation: QuantizationSpec | None, weight: QuantizationSpec | None
) -> str:
    """Return a name such as A8W8, W8 or dynamic A8W8."""
    name = ""
    if activation is not None:
        name += f"A{activation.dtype.bits}"
    if weight is not None:
        name += f"W{weight.dtype.bits}"
    if is_dynamic(activation):
        return f"dynamic {name}"
    return name or "float"


def _is_integer(spec: QuantizationSpec) -> bool:
    return isinstance(spec.dtype, Integer)


def unfit(target: Target, config: QConfig) -> str:
    """Return the reason to refuse a model with a configuration; empty if accepted."""
    # The BF16 compiler takes a float model: tensors of the type bfloat16 are refused by
    # onnxruntime's provider (INVALID_GRAPH, onnxsim#1404).
    if format_of(config) == "BF16" and "BF16" in target.presets:
        return (
            f"{target.name} refuses tensors of the type bfloat16, which this model has"
            f" to show their error; {_OWN}"
        )
    return refusal(target, config)


def refusal(target: Target, config: QConfig) -> str:
    """Return the reason to refuse a configuration, with advice; empty if accepted."""
    if target.takes is not None:
        return _beyond_engine(target, target.takes, config)
    # amd-quark's flow for the engine writes biases of 8 bits, or of 32 bits on request.
    if config.bias == "int16" and target.integer_engine:
        return f"{target.name} does not take biases of 16 bits; leave out bias"
    format_name = format_of(config)
    if format_name not in target.presets:
        advice = f"; take --preset {target.presets[0]}"
        if "BF16" in target.presets and format_name.startswith("BF"):
            advice = f"; {_OWN}"
        return (
            f"config is {format_name}, but {target.name} ({target.summary}) takes"
            f" {', '.join(target.presets)}{advice}"
        )
    if format_name == "XINT8":
        return _beside_xint8(target, config)
    if config.form == "operators":
        return f"{target.name} takes Q/DQ pairs; form is operators: leave it out"
    return ""


def _beside_xint8(target: Target, config: QConfig) -> str:
    """Return a setting of an XINT8 configuration that breaks the format; empty if none.

    The rules are S1 to S8 of the checker.
    """
    engine = f"the XINT8 engine of {target.name}"
    if config.form == "operators":
        return f"{engine} takes Q/DQ pairs; form is operators: leave it out"
    wider = [
        optimizer
        for optimizer in config.optimizers
        if optimizer.name == "auto_mixed_precision" and optimizer.to != "float"
    ]
    if wider:
        return (
            f"{engine} takes 8-bit codes with power-of-two scales everywhere;"
            f" auto_mixed_precision mixes in {wider[0].to}: take to=float"
        )
    changes: list[QConfig | Override] = [config, *config.overrides]
    specs = [spec for change in changes for spec in (change.activation, change.weight)]
    for spec in specs:
        if spec is None:
            continue
        if spec.dtype.bits != 8 or not spec.pow2 or not spec.symmetric:
            return (
                f"{engine} takes 8-bit codes with power-of-two scales and no zero point"
                f" everywhere; an override has {spec.dtype.name}: take keep=true for these"
                " nodes, or leave the override out"
            )
        if spec.per_channel:
            return f"{engine} takes one scale per tensor; per_channel is true: leave it out"
    for override in config.tensors:
        if override.dtype is not None and override.dtype.bits not in (8, 32):
            return f"{engine} takes 8-bit codes, not {_own_type(override)}"
    return ""


def _beyond_engine(target: Target, takes: Takes, config: QConfig) -> str:
    """Return what a configuration has that an engine does not take; empty if nothing."""
    engine = f"{target.name} ({target.summary})"
    if why := _beyond_settings(takes, config):
        return f"{engine} takes {why}"
    if why := _beyond_types(takes, config):
        return f"{engine} takes {why}; take --preset {target.presets[0]}"
    return ""


def _beyond_settings(takes: Takes, config: QConfig) -> str:
    """Return a setting that an engine does not take, with what to do; empty if there is none."""
    if not takes.codes and config.form == "vendor":
        return "ONNX's own Q/DQ pairs, and form is vendor: leave it out"
    if not takes.codes and config.contrib:
        return "ONNX's own Q/DQ pairs, and contrib is true: leave it out"
    if config.bias == "int16" and takes.biases:
        return f"biases of {' or '.join(takes.biases)}, and bias is int16: leave it out"
    for optimizer in config.optimizers:
        if optimizer.name == "auto_mixed_precision" and takes.activations:
            types = " or ".join(takes.activations)
            if optimizer.to != "float":
                return (
                    f"activations of {types}, and auto_mixed_precision mixes in"
                    f" {optimizer.to}: take to=float"
                )
    return ""


def _beyond_types(takes: Takes, config: QConfig) -> str:
    """Return a number format that an engine does not take; empty if there is none."""
    if not takes.codes and (why := _beyond_pairs(config)):
        return why
    changes: list[QConfig | Override] = [config, *config.overrides]
    for change in changes:
        why = _beyond_activation(takes, change.activation) or _beyond_weight(
            takes, change.weight
        )
        if why:
            return why
    # A tensor may be an activation, a weight or a bias, which only the model tells.
    types = dict.fromkeys((*takes.activations, *takes.weights, *takes.biases))
    types.pop("float", None)
    for override in config.tensors:
        dtype = override.dtype
        if takes.activations and dtype is not None and dtype.name not in types:
            return f"codes of {' or '.join(types)}, not {_own_type(override)}"
    return ""


def _own_type(override: TensorOverride) -> str:
    """Return the type of an override in words, with the tensors that it is for."""
    assert override.dtype is not None
    return f"{override.dtype.name}, which tensors {', '.join(override.tensors)} have"


def _beyond_pairs(config: QConfig) -> str:
    """Return what a configuration writes besides pairs with constant scales."""
    if config.activation is None or config.weight is None:
        return f"activations and weights in codes, and config is {format_of(config)}"
    if is_dynamic(config.activation):
        return "constant scales, and config has dynamic ones"
    if config.form == "operators":
        return "Q/DQ pairs, and form is operators"
    return ""


def _beyond_activation(takes: Takes, spec: QuantizationSpec | None) -> str:
    if spec is None or not takes.activations:
        return ""
    if spec.dtype.name not in takes.activations:
        return f"activations of {' or '.join(takes.activations)}, not {spec.dtype.name}"
    if not takes.zero_points and not spec.symmetric:
        return "no zero points, and activations are not symmetric"
    return ""


def _beyond_weight(takes: Takes, spec: QuantizationSpec | None) -> str:
    if spec is None or not takes.weights:
        return ""
    if spec.dtype.name not in takes.weights:
        return f"weights of {' or '.join(takes.weights)}, not {spec.dtype.name}"
    if spec.block_size or not spec.symmetric:
        return f"symmetric weights without blocks, not {spec}"
    return ""
